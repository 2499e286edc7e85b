"""The hall of batch_norm: check, choose the wing, allocate, call its kernel, shape the result.

Compiled by Cython as it stands; the .pxd file lets the door call in here as in C.
"""
from fastnorm import _arrays
from fastnorm._backend import backend_of


def forward(x, weight, bias, running_mean, running_var, training, momentum, eps, axis, out, with_statistics):
    """y, or (y, mean, rstd) with_statistics; the running arrays of a training call are changed last of all."""
    wing = backend_of("x", x)
    device = wing.away(x)
    if device is not None:
        with device:
            return forward(x, weight, bias, running_mean, running_var, training, momentum, eps, axis, out,
                           with_statistics)
    xp = wing.xp
    x = _arrays.array("x", x, wing)
    axis = _arrays.single_axis(x, axis)
    n_channels = x.shape[axis]
    eps = _arrays.nonnegative("eps", eps)
    momentum = _arrays.finite("momentum", momentum)
    weight = _arrays.channel_parameter("weight", weight, n_channels, wing)
    bias = _arrays.channel_parameter("bias", bias, n_channels, wing)
    running_mean, running_var = _running(running_mean, running_var, n_channels, training, wing)
    if training and n_channels and x.size // n_channels < 2:
        raise ValueError(f"x: shape {x.shape} has {x.size // n_channels} values per channel; training needs at least "
                         f"2, since the variance of one is not known")
    y = _arrays.output("out", out, x, _arrays.result_type(x.dtype), wing)
    if out is not None and training:
        for name, running in (("running_mean", running_mean), ("running_var", running_var)):
            if running is not None and _arrays.overlap(y, running, wing):
                raise ValueError(f"out, {name}: they overlap; expected two arrays")
    mean = rstd = None
    if with_statistics:
        shape, arithmetic = _statistics_shape(x, axis), _arrays.arithmetic_type(x.dtype)
        mean, rstd = xp.empty(shape, arithmetic), xp.empty(shape, arithmetic)

    # Without values there are still the statistics of an evaluation.
    if n_channels and (x.size or with_statistics):
        if out is not None and _arrays.needs_copy(y, (x,), (weight, bias, running_mean, running_var), wing):
            # Inputs are copied rather than the result: nothing may come after the running arrays are updated.
            x, weight, bias = [None if a is None else _arrays.copied(a, wing) for a in (x, weight, bias)]
            if not training:
                running_mean, running_var = _arrays.copied(running_mean, wing), _arrays.copied(running_var, wing)
        mean_row, rstd_row = (mean.reshape(-1), rstd.reshape(-1)) if with_statistics else (None, None)
        wing.channel_norm_forward(x, axis, weight, bias, eps, running_mean, running_var, momentum, y, mean_row,
                                  rstd_row, training)
    return (y, mean, rstd) if with_statistics else y


def backward(dy, x, mean, rstd, weight, axis, training, param_grads, out):
    """(dx, dweight, dbias), the gradients of parameters None without param_grads."""
    wing = backend_of("x", x)
    device = wing.away(x)
    if device is not None:
        with device:
            return backward(dy, x, mean, rstd, weight, axis, training, param_grads, out)
    xp = wing.xp
    x = _arrays.array("x", x, wing)
    axis = _arrays.single_axis(x, axis)
    n_channels = x.shape[axis]
    arithmetic = _arrays.arithmetic_type(x.dtype)
    dy = _arrays.same_shape("dy", dy, x, wing)
    weight = _arrays.channel_parameter("weight", weight, n_channels, wing)
    mean_row = _arrays.statistic("mean", mean, _statistics_shape(x, axis), arithmetic, wing)
    rstd_row = _arrays.statistic("rstd", rstd, _statistics_shape(x, axis), arithmetic, wing)
    dx = _arrays.output("out", out, x, _arrays.result_type(x.dtype), wing)
    dweight = dbias = None
    if param_grads:
        dtype = arithmetic if weight is None else _arrays.result_type(weight.dtype)
        dweight, dbias = xp.empty((n_channels,), dtype), xp.empty((n_channels,), dtype)

    if x.size == 0:
        # Sums over nothing.
        if param_grads:
            wing.fill(dweight, 0.0)
            wing.fill(dbias, 0.0)
    else:
        target = _arrays.computed_apart(dx, out, (dy, x), (weight, mean, rstd), wing)
        wing.channel_norm_backward(dy, x, axis, weight, mean_row, rstd_row, target, dweight, dbias, training)
        if target is not dx:
            wing.copy(target, dx)
    return dx, dweight, dbias


def _running(running_mean, running_var, n_channels, training, wing):
    """Both running arrays, or two None: writable in training, anything array-like in evaluation."""
    if (running_mean is None) != (running_var is None):
        missing, given = (("running_mean", "running_var") if running_mean is None else ("running_var", "running_mean"))
        raise ValueError(f"{missing}: it is None, but {given} is not; expected both or neither")
    if running_mean is None:
        if not training:
            raise ValueError("running_mean, running_var: they are None; expected both in evaluation (training=False)")
        return None, None
    if not training:
        return (_arrays.channel_parameter("running_mean", running_mean, n_channels, wing),
                _arrays.channel_parameter("running_var", running_var, n_channels, wing))
    _arrays.updated("running_mean", running_mean, n_channels, wing)
    _arrays.updated("running_var", running_var, n_channels, wing)
    if _arrays.overlap(running_mean, running_var, wing):
        raise ValueError("running_mean, running_var: they overlap; expected two arrays")
    return running_mean, running_var


def _statistics_shape(x, axis):
    """The shape of x with all axes but that of the channels of length 1."""
    return _arrays.keepdims(x, [a for a in range(x.ndim) if a != axis])
