"""The formulas in plain array code: a page to read, the oracle of the tests, the baseline of the benchmarks.

Everything is computed in the widest float that NumPy has (float64 for CuPy arrays) and returned in
it, without a thought for speed. Names and arguments are those of the public functions.
"""
import numpy as np


def _wide(a):
    """a in the widest float type of its library."""
    if type(a).__module__.split(".")[0] == "cupy":
        return a.astype("float64")
    return np.asarray(a).astype(np.longdouble)


def _axes(x, axis):
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    return tuple(sorted(a % x.ndim for a in axes))


def _expand(parameter, x, axes):
    """weight or bias, of the shape of the normalized axes, where these stand in x."""
    return _wide(parameter).reshape([n if a in axes else 1 for a, n in enumerate(x.shape)])


def _affine(x_hat, weight, bias, axes):
    if weight is not None:
        x_hat = x_hat * _expand(weight, x_hat, axes)
    if bias is not None:
        x_hat = x_hat + _expand(bias, x_hat, axes)
    return x_hat


def _centred(x, axes):
    """x - mean and the mean. A first guess is taken off exactly, so that a large mean costs no digits."""
    guess = x.mean(axis=axes, keepdims=True)
    d = x - guess
    rest = d.mean(axis=axes, keepdims=True)
    return d - rest, guess + rest


def layer_norm_forward(x, weight=None, bias=None, *, axis=-1, eps=1e-5):
    """y, mean and rstd."""
    x = _wide(x)
    axes = _axes(x, axis)
    d, mean = _centred(x, axes)
    rstd = 1 / ((d * d).mean(axis=axes, keepdims=True) + eps) ** 0.5
    return _affine(d * rstd, weight, bias, axes), mean, rstd


def layer_norm(x, weight=None, bias=None, *, axis=-1, eps=1e-5):
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    return layer_norm_forward(x, weight, bias, axis=axis, eps=eps)[0]


def rms_norm_forward(x, weight=None, *, axis=-1, eps=1e-5, weight_offset=0.0):
    """y and rstd."""
    x = _wide(x)
    axes = _axes(x, axis)
    rstd = 1 / ((x * x).mean(axis=axes, keepdims=True) + eps) ** 0.5
    return _affine(x * rstd, None if weight is None else _wide(weight) + weight_offset, None, axes), rstd


def rms_norm(x, weight=None, *, axis=-1, eps=1e-5, weight_offset=0.0):
    """x / sqrt(mean(x**2) + eps) * (weight_offset + weight)."""
    return rms_norm_forward(x, weight, axis=axis, eps=eps, weight_offset=weight_offset)[0]


def add_layer_norm_forward(x, residual, weight=None, bias=None, *, alpha=1.0, axis=-1, eps=1e-5):
    """y, h, mean and rstd."""
    h = _wide(x) + alpha * _wide(residual)
    y, mean, rstd = layer_norm_forward(h, weight, bias, axis=axis, eps=eps)
    return y, h, mean, rstd


def add_layer_norm(x, residual, weight=None, bias=None, *, alpha=1.0, axis=-1, eps=1e-5):
    """layer_norm(h) and h = x + alpha * residual."""
    return add_layer_norm_forward(x, residual, weight, bias, alpha=alpha, axis=axis, eps=eps)[:2]


def add_rms_norm_forward(x, residual, weight=None, *, alpha=1.0, axis=-1, eps=1e-5, weight_offset=0.0):
    """y, h and rstd."""
    h = _wide(x) + alpha * _wide(residual)
    y, rstd = rms_norm_forward(h, weight, axis=axis, eps=eps, weight_offset=weight_offset)
    return y, h, rstd


def add_rms_norm(x, residual, weight=None, *, alpha=1.0, axis=-1, eps=1e-5, weight_offset=0.0):
    """rms_norm(h) and h = x + alpha * residual."""
    return add_rms_norm_forward(x, residual, weight, alpha=alpha, axis=axis, eps=eps, weight_offset=weight_offset)[:2]


def _channels(parameter, x, axis):
    """An array of one value a channel, where the channels stand in x."""
    return _wide(parameter).reshape([n if a == axis % x.ndim else 1 for a, n in enumerate(x.shape)])


def batch_norm_forward(x, weight=None, bias=None, running_mean=None, running_var=None, *, training=False, eps=1e-5,
                       axis=1):
    """y, mean and rstd. The running arrays are not updated: `running_statistics` has their new values."""
    x = _wide(x)
    if training:
        axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
        d, mean = _centred(x, axes)
        rstd = 1 / ((d * d).mean(axis=axes, keepdims=True) + eps) ** 0.5
    else:
        mean, rstd = _channels(running_mean, x, axis), 1 / (_channels(running_var, x, axis) + eps) ** 0.5
        d = x - mean
    y = d * rstd
    if weight is not None:
        y = y * _channels(weight, x, axis)
    if bias is not None:
        y = y + _channels(bias, x, axis)
    return y, mean, rstd


def batch_norm(x, weight=None, bias=None, running_mean=None, running_var=None, *, training=False, eps=1e-5, axis=1):
    """(x - mean) / sqrt(var + eps) * weight + bias for every channel."""
    return batch_norm_forward(x, weight, bias, running_mean, running_var, training=training, eps=eps, axis=axis)[0]


def running_statistics(x, running_mean, running_var, *, momentum=0.1, axis=1):
    """What a training call makes of the running arrays: their new values."""
    x = _wide(x)
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    d, mean = _centred(x, axes)
    n = x.size // x.shape[axis]
    new = mean.reshape(-1), (d * d).sum(axis=axes) / (n - 1)
    old = _wide(running_mean), _wide(running_var)
    return tuple((1 - momentum) * a + momentum * b for a, b in zip(old, new, strict=True))


def _gradients(dy, x_hat, rstd, weight, axes, centered):
    rows = tuple(a for a in range(x_hat.ndim) if a not in axes)
    wdy = _affine(dy, weight, None, axes)
    c1 = (wdy * x_hat).mean(axis=axes, keepdims=True)
    c2 = wdy.mean(axis=axes, keepdims=True) if centered else 0
    return rstd * (wdy - c2 - x_hat * c1), (dy * x_hat).sum(axis=rows), dy.sum(axis=rows)


def layer_norm_backward(dy, x, weight=None, *, axis=-1, eps=1e-5, rstd=None):
    """dx, dweight and dbias, with the mean of x itself, and its rstd unless one is given."""
    x = _wide(x)
    axes = _axes(x, axis)
    d, _ = _centred(x, axes)
    rstd = 1 / ((d * d).mean(axis=axes, keepdims=True) + eps) ** 0.5 if rstd is None else _wide(rstd)
    return _gradients(_wide(dy), d * rstd, rstd, weight, axes, True)


def rms_norm_backward(dy, x, weight=None, *, axis=-1, eps=1e-5, weight_offset=0.0, rstd=None):
    """dx and dweight, with the rstd of x itself unless one is given."""
    x = _wide(x)
    axes = _axes(x, axis)
    rstd = 1 / ((x * x).mean(axis=axes, keepdims=True) + eps) ** 0.5 if rstd is None else _wide(rstd)
    weight = None if weight is None else _wide(weight) + weight_offset
    return _gradients(_wide(dy), x * rstd, rstd, weight, axes, False)[:2]


def add_layer_norm_backward(dy, dh, h, weight=None, *, alpha=1.0, axis=-1, eps=1e-5, rstd=None):
    """dx, dresidual, dweight and dbias."""
    dx, dweight, dbias = layer_norm_backward(dy, h, weight, axis=axis, eps=eps, rstd=rstd)
    dx = dx if dh is None else dx + _wide(dh)
    return dx, alpha * dx, dweight, dbias


def add_rms_norm_backward(dy, dh, h, weight=None, *, alpha=1.0, axis=-1, eps=1e-5, weight_offset=0.0, rstd=None):
    """dx, dresidual and dweight."""
    dx, dweight = rms_norm_backward(dy, h, weight, axis=axis, eps=eps, weight_offset=weight_offset, rstd=rstd)
    dx = dx if dh is None else dx + _wide(dh)
    return dx, alpha * dx, dweight


def batch_norm_backward(dy, x, weight=None, *, mean=None, rstd=None, axis=1, training=True, eps=1e-5):
    """dx, dweight and dbias. In training with the statistics of x itself, and its rstd unless one is given; in
    evaluation with the mean and rstd that are given."""
    dy, x = _wide(dy), _wide(x)
    axes = tuple(a for a in range(x.ndim) if a != axis % x.ndim)
    if training:
        d, _ = _centred(x, axes)
        rstd = 1 / ((d * d).mean(axis=axes, keepdims=True) + eps) ** 0.5 if rstd is None else _wide(rstd)
    else:
        d, rstd = x - _wide(mean), _wide(rstd)
    x_hat = d * rstd
    scale = rstd if weight is None else rstd * _channels(weight, x, axis)
    dx = dy
    if training:
        dx = dy - dy.mean(axis=axes, keepdims=True) - x_hat * (dy * x_hat).mean(axis=axes, keepdims=True)
    return scale * dx, (dy * x_hat).sum(axis=axes), dy.sum(axis=axes)
