# Row kernels for float64 arithmetic at level v3; the flags are in setup.py.
include "row_norm.pxi"
