"""The CPU wing: Cython kernels over NumPy arrays. fastnorm._backend has the contract."""
import numpy as xp

from fastnorm._cpu.isa import level, levels
from fastnorm._cpu.row_norm import (
    has_openmp,
    max_openmp_threads,
    row_norm_backward,
    row_norm_forward,
    set_thread_policy,
)

__all__ = ["has_openmp", "level", "levels", "max_openmp_threads", "row_norm_backward", "row_norm_forward",
           "set_thread_policy", "xp"]
