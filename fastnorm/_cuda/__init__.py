"""The CUDA wing: kernels in CUDA C++ over CuPy arrays. fastnorm._backend has the contract.

Imported when the first CuPy array comes along, never before.
"""
import cupy as xp
from cupy import empty

from fastnorm._cuda.channel_norm import channel_norm_backward, channel_norm_forward
from fastnorm._cuda.copies import copy, fill
from fastnorm._cuda.devices import away
from fastnorm._cuda.row_norm import row_norm_backward, row_norm_forward

__all__ = ["address", "away", "channel_norm_backward", "channel_norm_forward", "copy", "empty", "fill", "is_read_only",
           "may_share_memory", "row_norm_backward", "row_norm_forward", "xp"]


def may_share_memory(a, b):
    """By the bounds of both. CuPy's own function takes two views of one foreign array for apart."""
    if a.size == 0 or b.size == 0:
        return False
    a_low, a_high = _bounds(a)
    b_low, b_high = _bounds(b)
    return a_low < b_high and b_low < a_high


def _bounds(a):
    """The addresses of the first byte and after the last."""
    low = a.data.ptr
    if a.flags.c_contiguous:
        return low, low + a.nbytes
    high = low + a.itemsize
    for n, step in zip(a.shape, a.strides, strict=True):
        if step < 0:
            low += (n - 1) * step
        else:
            high += (n - 1) * step
    return low, high


def address(a):
    return a.data.ptr


def is_read_only(a):
    """CuPy has no read-only arrays, but those of a stride of zero have elements that are not their own."""
    if a.flags.c_contiguous or a.size == 0:
        return False
    return any(s == 0 and n > 1 for s, n in zip(a.strides, a.shape, strict=True))
