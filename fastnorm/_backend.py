"""Which wing computes: by the type of the arrays, nothing else.

A wing is a module with the array namespace as ``xp`` and kernels that fill OUT arrays, check nothing
and allocate no results. Both wings have the same names and arguments:

row_norm_forward(x, n_axes, weight, bias, eps, y, mean, rstd, centered)
    y = (x - mean) * rstd * weight + bias over the last n_axes axes; about zero if not centered.
row_norm_backward(dy, x, n_axes, weight, mean, rstd, dx, dweight, dbias, centered)
    dx, and the sums over rows for dweight and dbias.

x, y, dy, dx   arrays of one shape, any strides, byte order and storage type; the normalized axes come last.
               y may be x, dx may be dy or x; otherwise OUT arrays overlap nothing.
weight, bias   (n_cols,) contiguous, of the arithmetic type, or None for ones and zeros.
mean, rstd     (n_rows,) contiguous, of the arithmetic type. Forward fills those that are not None;
               backward reads rstd, and mean if centered.
dweight, dbias of n_cols values, contiguous, of any float type, or None if not wanted. Sums are float64 and
               rounded once.
n_rows and n_cols are at least 1.
"""
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
    raise TypeError(f"{name}: arrays of type {_type_name(kind)} are not supported, numpy.ndarray is; "
                    f"numpy.from_dlpack brings arrays of other libraries over without a copy")


def _type_name(kind):
    return f"{kind.__module__}.{kind.__qualname__}"
