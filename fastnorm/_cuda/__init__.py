"""The CUDA wing: kernels in CUDA C++ over CuPy arrays. fastnorm._backend has the contract.

Imported when the first CuPy array comes along, never before.
"""
import cupy as xp

from fastnorm._cuda.copies import copy, fill
from fastnorm._cuda.devices import away
from fastnorm._cuda.row_norm import row_norm_backward, row_norm_forward

__all__ = ["address", "away", "copy", "fill", "is_read_only", "may_share_memory", "row_norm_backward",
           "row_norm_forward", "xp"]


def may_share_memory(a, b):
    """By the bounds of both. Those of contiguous arrays are cheaper to see than CuPy makes them."""
    if a.flags.c_contiguous and b.flags.c_contiguous:
        p, q = a.data.ptr, b.data.ptr
        return p < q + b.nbytes and q < p + a.nbytes
    return xp.may_share_memory(a, b)


def address(a):
    return a.data.ptr


def is_read_only(a):
    """CuPy has no read-only arrays, but those of a stride of zero have elements that are not their own."""
    if a.flags.c_contiguous or a.size == 0:
        return False
    return any(s == 0 and n > 1 for s, n in zip(a.strides, a.shape, strict=True))
