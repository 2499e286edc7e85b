# Row kernels for float64 arithmetic at level v4; the flags are in setup.py.
include "row_norm.pxi"
