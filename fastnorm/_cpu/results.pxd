cimport numpy as cnp

cdef cnp.ndarray new_like(cnp.ndarray x)
