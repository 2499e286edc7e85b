"""Arrays as kernels take them: pointers and strides, in place where the layout allows, else in a copy."""
from functools import cache
from typing import Any, NamedTuple

import cupy
import numpy as np

from fastnorm._cuda.copies import FLOATS, copy, is_aligned, merged, storage_number

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


class Rows(NamedTuple):
    """Rows of contiguous columns."""

    array: Any          # whose memory it is
    pointer: int
    stride: int         # from row to row, in bytes


NO_ROWS = Rows(None, 0, 0)


class Channels(NamedTuple):
    """An array seen as (outer, n_channels, inner) of contiguous inner values."""

    array: Any
    pointer: int
    outer_stride: int       # in bytes
    channel_stride: int


NO_CHANNELS = Channels(None, 0, 0, 0)


@cache
def storage(x, *others):
    """(the dtype that the kernels work on, the arithmetic type). That of all arrays if they agree on a float type;
    otherwise the arithmetic type of x, to and from which a copy converts."""
    arithmetic = FLOAT32 if x.name in FLOATS and x != FLOAT64 else FLOAT64
    return x if x.name in FLOATS and all(a == x for a in others) else arithmetic, arithmetic


def rows(a, n_axes, n_cols, dtype, fresh=False):
    """The rows of an array as kernels take them: where they are, if the columns lie next to each other and one stride
    leads from row to row; otherwise in a copy. fresh: only the place is wanted, not what is there."""
    if a.dtype == dtype:
        if a.flags.c_contiguous and a.data.ptr % dtype.itemsize == 0:
            return Rows(a, a.data.ptr, n_cols * dtype.itemsize)
        cut = a.ndim - n_axes
        row_shape, row_strides = merged(a.shape[:cut], a.strides[:cut])
        column_shape, column_strides = merged(a.shape[cut:], a.strides[cut:])
        if len(row_shape) <= 1 and column_strides in ((), (dtype.itemsize,)) and is_aligned(a):
            return Rows(a, a.data.ptr, row_strides[0] if row_strides else n_cols * dtype.itemsize)
    plain = cupy.empty(a.shape, dtype)
    if not fresh:
        copy(a, plain)
    return Rows(plain, plain.data.ptr, n_cols * dtype.itemsize)


def channels(a, axis, inner, dtype, columns, fresh=False):
    """The array as kernels over channels take it, as rows() does it. columns: the channels, too, must be contiguous."""
    n_channels, size = a.shape[axis], dtype.itemsize
    if a.dtype == dtype:
        if a.flags.c_contiguous and a.data.ptr % size == 0:
            return Channels(a, a.data.ptr, n_channels * inner * size, inner * size)
        outer_shape, outer_strides = merged(a.shape[:axis], a.strides[:axis])
        inner_shape, inner_strides = merged(a.shape[axis + 1:], a.strides[axis + 1:])
        channel_stride = a.strides[axis] if n_channels > 1 else inner * size
        if (len(outer_shape) <= 1 and inner_strides in ((), (size,)) and is_aligned(a)
                and (not columns or channel_stride == inner * size)):
            outer_stride = outer_strides[0] if outer_strides else n_channels * inner * size
            return Channels(a, a.data.ptr, outer_stride, channel_stride)
    plain = cupy.empty(a.shape, dtype)
    if not fresh:
        copy(a, plain)
    return Channels(plain, plain.data.ptr, n_channels * inner * size, inner * size)


def deliver(view, array):
    """To the array itself, if its Rows or Channels are elsewhere."""
    if view.array is not array:
        copy(view.array, array)


def width(*views):
    """The widest access in bytes that all of these Rows or Channels are aligned for."""
    bits = 16
    for v in views:
        for number in v[1:]:
            bits |= number
    return bits & -bits


def pointer(a):
    return 0 if a is None else a.data.ptr


def numbers(a):
    """The arguments for one number a channel, of any type and stride; None is null."""
    if a is None:
        return 0, 0, 0, 0
    return a.data.ptr, storage_number(a.dtype), a.strides[0], int(is_aligned(a))
