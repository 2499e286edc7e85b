# Row kernels for float32 arithmetic at level v3; the flags are in setup.py.
include "row_norm.pxi"
