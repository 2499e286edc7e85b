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
