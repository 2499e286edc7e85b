"""The CPU wing: Cython kernels over NumPy arrays. fastnorm._backend has the contract."""
import numpy as xp
from numpy import may_share_memory

from fastnorm._cpu.channel_norm import channel_norm_backward, channel_norm_forward
from fastnorm._cpu.copies import address, away, copy, fill, is_read_only
from fastnorm._cpu.isa import level, levels
from fastnorm._cpu.results import empty
from fastnorm._cpu.row_norm import (
    has_openmp,
    max_openmp_threads,
    row_norm_backward,
    row_norm_forward,
    set_thread_policy,
)

__all__ = ["address", "away", "channel_norm_backward", "channel_norm_forward", "copy", "empty", "fill",
           "has_openmp", "is_read_only", "level", "levels", "max_openmp_threads", "may_share_memory",
           "row_norm_backward", "row_norm_forward", "set_thread_policy", "xp"]
