"""The hall of layer_norm and rms_norm: check, choose the wing, allocate, call its kernel, shape the result.

Compiled by Cython as it stands, since a tiny call must cost no more than np.add; the .pxd file lets
the doors call in here as in C.
"""
import math

from cython.cimports.fastnorm._cpu.common_case import common_backward, common_forward

from fastnorm import _arrays
from fastnorm._backend import backend_of


def forward(x, weight, bias, axis, eps, weight_offset, out, centered, with_statistics):
    """y, or (y, mean, rstd) with_statistics; mean is None if not centered."""
    # Exact ndarrays, native, contiguous, trailing axis: what does not hold needs no message here.
    if type(axis) is int and axis == -1 and type(weight_offset) is float and weight_offset == 0.0:
        result = common_forward(x, weight, bias, eps, out, centered, with_statistics)
        if result is not None:
            return result

    wing = backend_of("x", x)
    device = wing.away(x)
    if device is not None:
        with device:
            return forward(x, weight, bias, axis, eps, weight_offset, out, centered, with_statistics)
    xp = wing.xp
    x = _arrays.array("x", x, wing)
    axes = _arrays.normalized_axes(x, axis)
    shape = tuple([x.shape[a] for a in axes])
    eps = _arrays.nonnegative("eps", eps)
    arithmetic = _arrays.arithmetic_type(x.dtype)
    weight = _arrays.parameter("weight", weight, shape, wing)
    weight_offset = _offset(weight_offset, weight)
    bias = _arrays.parameter("bias", bias, shape, wing)
    y = _arrays.output("out", out, x, _arrays.result_type(x.dtype), wing)
    mean = rstd = None
    if with_statistics:
        statistics_shape = _keepdims(x, axes)
        rstd = xp.empty(statistics_shape, arithmetic)
        if centered:
            mean = xp.empty(statistics_shape, arithmetic)

    if x.size == 0:
        if with_statistics:
            wing.fill(rstd, 1.0 / math.sqrt(eps) if eps > 0 else math.inf)
            if centered:
                wing.fill(mean, 0.0)
    else:
        target = y
        if out is not None and _arrays.needs_copy(y, (x,), (weight, bias), wing):
            target = xp.empty(y.shape, y.dtype)
        wing.row_norm_forward(_columns_last(x, axes), len(axes), weight, weight_offset, bias, eps,
                              _columns_last(target, axes), mean, rstd, centered)
        if target is not y:
            wing.copy(target, y)
    return (y, mean, rstd) if with_statistics else y


def backward(dy, x, mean, rstd, weight, axis, weight_offset, param_grads, out, centered):
    """(dx, dweight, dbias); dbias is None if not centered, both are without param_grads."""
    if type(axis) is int and axis == -1 and type(weight_offset) is float and weight_offset == 0.0:
        result = common_backward(dy, x, mean, rstd, weight, param_grads, out, centered)
        if result is not None:
            return result
    wing = backend_of("x", x)
    device = wing.away(x)
    if device is not None:
        with device:
            return backward(dy, x, mean, rstd, weight, axis, weight_offset, param_grads, out, centered)
    xp = wing.xp
    x = _arrays.array("x", x, wing)
    axes = _arrays.normalized_axes(x, axis)
    shape = tuple([x.shape[a] for a in axes])
    arithmetic = _arrays.arithmetic_type(x.dtype)
    dy = _arrays.same_shape("dy", dy, x, wing)
    statistics_shape = _keepdims(x, axes)
    weight = _arrays.parameter("weight", weight, shape, wing)
    weight_offset = _offset(weight_offset, weight)
    mean_row = _arrays.statistic("mean", mean, statistics_shape, arithmetic, wing) if centered else None
    rstd_row = _arrays.statistic("rstd", rstd, statistics_shape, arithmetic, wing)
    dx = _arrays.output("out", out, x, _arrays.result_type(x.dtype), wing)
    dweight = dbias = None
    if param_grads:
        dtype = arithmetic if weight is None else _arrays.result_type(weight.dtype)
        dweight = xp.empty(shape, dtype)
        if centered:
            dbias = xp.empty(shape, dtype)

    if x.size == 0:
        # Sums over nothing.
        if param_grads:
            wing.fill(dweight, 0.0)
            if centered:
                wing.fill(dbias, 0.0)
    else:
        target = dx
        if out is not None and _arrays.needs_copy(dx, (dy, x), (weight, mean, rstd), wing):
            target = xp.empty(dx.shape, dx.dtype)
        wing.row_norm_backward(_columns_last(dy, axes), _columns_last(x, axes), len(axes), weight, weight_offset,
                               mean_row, rstd_row, _columns_last(target, axes), dweight, dbias, centered)
        if target is not dx:
            wing.copy(target, dx)
    return dx, dweight, dbias


def _columns_last(a, axes):
    """The array with the normalized axes at the end."""
    if axes[0] == a.ndim - len(axes):
        return a
    return a.transpose(tuple([k for k in range(a.ndim) if k not in axes]) + axes)


def _keepdims(x, axes):
    """The shape of x with the normalized axes of length 1."""
    return tuple([1 if a in axes else n for a, n in enumerate(x.shape)])


def _offset(weight_offset, weight):
    """weight_offset as a float."""
    weight_offset = _arrays.real_number("weight_offset", weight_offset)
    if weight_offset != 0.0 and weight is None:
        raise ValueError("weight_offset: it is added to weight, but weight is None")
    return weight_offset
