# Row kernels for float32 arithmetic at level baseline; the flags are in setup.py.
include "row_norm.pxi"
