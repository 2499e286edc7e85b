"""Which wing computes: by the type of the arrays, nothing else.

A wing is a module with the array namespace as ``xp`` and kernels that fill OUT arrays, check nothing
and allocate no results. All wings have the same names and arguments:

row_norm_forward(x, residual, alpha, n_axes, weight, weight_offset, bias, eps, y, h, mean, rstd, centered)
    y = (h - mean) * rstd * (weight_offset + weight) + bias over the last n_axes axes; about zero if not centered.
    h = x + alpha * residual as it is stored (product and sum rounded each), or x itself if residual and h are None.
row_norm_backward(dy, dh, x, n_axes, weight, weight_offset, mean, rstd, alpha, dx, dresidual, dweight, dbias, centered)
    dx + dh, alpha times that in dresidual, and the sums over rows for dweight and dbias. x is what was normalized; dh
    None for nothing, dresidual None if not wanted.
channel_norm_forward(x, axis, weight, bias, eps, running_mean, running_var, momentum, y, mean, rstd, training)
    y = (x - mean) * rstd * weight + bias for every channel of the axis. In training with the statistics of x, and
    the running arrays, if they are not None, are updated when all else is done: (1 - momentum) * old + momentum * new,
    without the one whose factor is zero; the new variance is that of n - 1. In evaluation with the running statistics,
    and x may have no values.
channel_norm_backward(dy, x, axis, weight, mean, rstd, dx, dweight, dbias, training)
    dx, and the sums over each channel for dweight and dbias; statistics are constants if not training.

x, y, residual, h, dy, dh, dx, dresidual
               arrays of one shape, any strides, byte order and storage type; for rows, the normalized axes come last.
               y and h may each be x or residual, dx may be dy, dh or x; otherwise OUT arrays overlap nothing.
               The arithmetic type is that of what is normalized (h, x), and no narrower than those of x and residual.
weight, bias   of the shape of the normalized axes, (n_channels,) for channels; any strides, byte order and storage
               type, or None for ones and zeros. They are rounded to the arithmetic type before weight_offset is added.
mean, rstd     (n_rows,) or (n_channels,) contiguous, of the arithmetic type. Forward fills those that are not None;
               backward reads rstd, and mean if centered.
running_mean, running_var
               (n_channels,), any strides, byte order and storage type; of a float type and writable in training.
dweight, dbias of n_cols or n_channels values, contiguous, of any float type, or None if not wanted. Sums are float64
               or as good, and rounded once.
n_rows, n_cols and n_channels are at least 1.

And what else the halls need to know of arrays, or do with them:

empty(shape, dtype)     a new C-ordered array for a result; dtype is a numpy.dtype
copy(source, target)    target[...] = source for arrays of one shape that do not overlap, of any float types
fill(target, value)     target[...] = value for a new array of a float dtype
may_share_memory(a, b)  by the bounds of both
address(a)              of the first element
is_read_only(a)
away(a)                 a context that makes the device of a the current one; None if it is, or has none

A wing other than that of NumPy is imported when its first array comes along.
"""
import sys

import numpy as np

from fastnorm import _cpu

# Arrays of these types, and of no subclass, go straight to their wing.
_WINGS = {np.ndarray: _cpu}
# Whose elements are not simply what is in memory.
_REFUSED = (np.ma.MaskedArray, np.matrix)


def backend_of(name, array):
    """The wing for an argument, or TypeError that names it. Lists, tuples and scalars are NumPy's."""
    kind = type(array)
    wing = _WINGS.get(kind)
    if wing is not None:
        return wing
    if isinstance(array, _REFUSED):
        raise TypeError(f"{name}: inputs of type {_type_name(kind)} are not supported; pass a plain ndarray")
    if isinstance(array, (np.ndarray, np.generic, list, tuple, int, float, complex)):
        return _cpu
    # Whoever has such an array has imported CuPy; nobody else pays for it.
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        from fastnorm import _cuda

        _WINGS[cupy.ndarray] = _cuda
        return _cuda
    raise TypeError(f"{name}: arrays of type {_type_name(kind)} are not supported, numpy.ndarray and cupy.ndarray are; "
                    f"their from_dlpack brings arrays of other libraries over without a copy")


def _type_name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"
