# Row kernels for float32 arithmetic at level v4; the flags are in setup.py.
include "row_norm.pxi"
