# Row kernels for float64 arithmetic at level baseline; the flags are in setup.py.
include "row_norm.pxi"
