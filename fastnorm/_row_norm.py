"""The hall of layer_norm, rms_norm and their residual forms: check, choose the wing, allocate, call its kernel, shape
the result.

Compiled by Cython as it stands, since a tiny call must cost no more than np.add; the .pxd file lets
the doors call in here as in C.
"""
import math

from cython.cimports.fastnorm._cpu.common_case import common_backward, common_forward

from fastnorm import _arrays
from fastnorm._backend import backend_of


def forward(x, residual, alpha, weight, bias, axis, eps, weight_offset, out, residual_out, centered, with_statistics,
            fused):
    """y or (y, mean, rstd) with_statistics; (y, h) or (y, h, mean, rstd) if fused, which normalizes
    h = x + alpha * residual. mean is None if not centered."""
    # Exact ndarrays, native, contiguous, trailing axis: what does not hold needs no message here.
    if type(axis) is int and axis == -1 and type(weight_offset) is float and weight_offset == 0.0:
        result = common_forward(x, residual, alpha, weight, bias, eps, out, residual_out, centered, with_statistics,
                                fused)
        if result is not None:
            return result

    wing = backend_of("x", x)
    device = wing.away(x)
    if device is not None:
        with device:
            return forward(x, residual, alpha, weight, bias, axis, eps, weight_offset, out, residual_out, centered,
                           with_statistics, fused)
    xp = wing.xp
    x = _arrays.array("x", x, wing)
    axes = _arrays.normalized_axes(x, axis)
    shape = tuple([x.shape[a] for a in axes])
    eps = _arrays.nonnegative("eps", eps)
    weight = _arrays.parameter("weight", weight, shape, wing)
    weight_offset = _offset(weight_offset, weight)
    bias = _arrays.parameter("bias", bias, shape, wing)
    h = None
    if fused:
        residual = _arrays.same_shape("residual", residual, x, wing)
        alpha = _arrays.finite("alpha", alpha)
        h = _arrays.output("residual_out", residual_out, x, _arrays.result_type(residual.dtype), wing)
    y = _arrays.output("out", out, x, _arrays.result_type(x.dtype), wing)
    if fused and (out is not None or residual_out is not None) and _arrays.overlap(y, h, wing):
        raise ValueError("out, residual_out: they overlap; expected two arrays")
    mean = rstd = None
    if with_statistics:
        arithmetic = _arrays.arithmetic_type(h.dtype if fused else x.dtype)
        statistics_shape = _arrays.keepdims(x, axes)
        rstd = xp.empty(statistics_shape, arithmetic)
        if centered:
            mean = xp.empty(statistics_shape, arithmetic)

    if x.size == 0:
        if with_statistics:
            wing.fill(rstd, 1.0 / math.sqrt(eps) if eps > 0 else math.inf)
            if centered:
                wing.fill(mean, 0.0)
    else:
        inputs = (x, residual) if fused else (x,)
        y_target = _arrays.computed_apart(y, out, inputs, (weight, bias), wing)
        h_target = _arrays.computed_apart(h, residual_out, inputs, (weight, bias), wing) if fused else None
        if fused and (_arrays.is_wider(x.dtype, h.dtype) or _arrays.is_wider(residual.dtype, h.dtype)):
            # The sum is that of the wider type; the norm is that of h as it is stored.
            _add_wide(x, residual, alpha, h_target, wing)
            wing.row_norm_forward(_columns_last(h_target, axes), None, 1.0, len(axes), weight, weight_offset, bias, eps,
                                  _columns_last(y_target, axes), None, mean, rstd, centered)
        else:
            wing.row_norm_forward(_columns_last(x, axes), _columns_last(residual, axes) if fused else None, alpha,
                                  len(axes), weight, weight_offset, bias, eps, _columns_last(y_target, axes),
                                  _columns_last(h_target, axes) if fused else None, mean, rstd, centered)
        if y_target is not y:
            wing.copy(y_target, y)
        if h_target is not h:
            wing.copy(h_target, h)
    if fused:
        return (y, h, mean, rstd) if with_statistics else (y, h)
    return (y, mean, rstd) if with_statistics else y


def backward(dy, dh, x, mean, rstd, weight, alpha, axis, weight_offset, param_grads, out, centered, fused):
    """(dx, dresidual, dweight, dbias); dresidual is None if not fused, dbias if not centered, both gradients of
    parameters without param_grads. If fused, x is the h of the forward and dh the gradient that arrives at it."""
    if type(axis) is int and axis == -1 and type(weight_offset) is float and weight_offset == 0.0:
        result = common_backward(dy, dh, x, mean, rstd, weight, alpha, param_grads, out, centered, fused)
        if result is not None:
            return result
    name = "h" if fused else "x"
    wing = backend_of(name, x)
    device = wing.away(x)
    if device is not None:
        with device:
            return backward(dy, dh, x, mean, rstd, weight, alpha, axis, weight_offset, param_grads, out, centered,
                            fused)
    xp = wing.xp
    x = _arrays.array(name, x, wing)
    axes = _arrays.normalized_axes(x, axis)
    shape = tuple([x.shape[a] for a in axes])
    arithmetic = _arrays.arithmetic_type(x.dtype)
    dy = _arrays.same_shape("dy", dy, x, wing, name)
    statistics_shape = _arrays.keepdims(x, axes)
    weight = _arrays.parameter("weight", weight, shape, wing)
    weight_offset = _offset(weight_offset, weight)
    mean_row = _arrays.statistic("mean", mean, statistics_shape, arithmetic, wing) if centered else None
    rstd_row = _arrays.statistic("rstd", rstd, statistics_shape, arithmetic, wing)
    dresidual = None
    if fused:
        alpha = _arrays.finite("alpha", alpha)
        if dh is not None:
            dh = _arrays.same_shape("dh", dh, x, wing, name)
    dx = _arrays.output("out", out, x, _arrays.result_type(dy.dtype if fused else x.dtype), wing, name)
    if fused:
        dresidual = wing.empty(x.shape, _arrays.result_type(x.dtype))
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
        target = _arrays.computed_apart(dx, out, (dy, x) if dh is None else (dy, x, dh), (weight, mean, rstd), wing)
        wing.row_norm_backward(_columns_last(dy, axes), None if dh is None else _columns_last(dh, axes),
                               _columns_last(x, axes), len(axes), weight, weight_offset, mean_row, rstd_row, alpha,
                               _columns_last(target, axes), _columns_last(dresidual, axes) if fused else None,
                               dweight, dbias, centered)
        if target is not dx:
            wing.copy(target, dx)
    return dx, dresidual, dweight, dbias


def _add_wide(x, residual, alpha, h, wing):
    """h = x + alpha * residual in float64, rounded once to the narrower type of h. Rare, so by way of a norm that
    nobody wants."""
    wide, unwanted = wing.xp.empty(x.shape, float), wing.xp.empty(x.shape, float)
    wing.row_norm_forward(x, residual, alpha, 1, None, 0.0, None, 1.0, unwanted, wide, None, None, False)
    wing.copy(wide, h)


def _columns_last(a, axes):
    """The array with the normalized axes at the end."""
    if axes[0] == a.ndim - len(axes):
        return a
    return a.transpose(tuple([k for k in range(a.ndim) if k not in axes]) + axes)


def _offset(weight_offset, weight):
    """weight_offset as a float."""
    weight_offset = _arrays.real_number("weight_offset", weight_offset)
    if weight_offset != 0.0 and weight is None:
        raise ValueError("weight_offset: it is added to weight, but weight is None")
    return weight_offset
