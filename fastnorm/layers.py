"""Layers that hold their parameters, over the functions of fastnorm: for networks built from arrays.

Every layer has ``forward(x)`` (or a call), ``backward(dy)``, which returns dx and keeps the gradients of the
parameters, and ``update(learning_rate)``. A sublayer is anything with these three.
"""
import math
import sys
from typing import NamedTuple

import numpy as np

from fastnorm._arrays import FLOATS
from fastnorm._batch_norm import batch_norm_backward, batch_norm_forward
from fastnorm._layer_norm import (
    add_layer_norm_backward,
    add_layer_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
)
from fastnorm._rms_norm import add_rms_norm_backward, add_rms_norm_forward, rms_norm_backward, rms_norm_forward

__all__ = ["BatchNorm", "DeepNorm", "DeepNormScales", "LayerNorm", "PostNorm", "PreNorm", "RMSNorm", "deepnorm_scales"]


class _Layer:
    """Parameters by name, where x is, and back to a file."""

    # Of the parameters; each has an array of this name, None if the layer has none, and one with grad_ before it.
    _parameters = ()
    # Of what else belongs to the state.
    _buffers = ()

    def __init__(self, shape, eps, dtype):
        self.eps = eps
        self.weight, self.grad_weight = np.ones(shape, _float_dtype(dtype)), None
        self._saved = None

    def __call__(self, x):
        return self.forward(x)

    def _saved_by(self, forward, backward):
        """What the last forward kept for its backward; there are two pairs of these."""
        if self._saved is None or self._saved[0] != forward:
            raise RuntimeError(f"{type(self).__name__}.{backward}: call {forward} first; it keeps what {backward} "
                               f"needs")
        return self._saved[1:]

    def update(self, learning_rate):
        """One step of gradient descent: parameter -= learning_rate * gradient, in place.

        Parameters
        ----------
        learning_rate : float

        Raises
        ------
        RuntimeError
            There are no gradients: backward has not been called since the layer was made.
        """
        for name in self._parameters:
            parameter, gradient = getattr(self, name), getattr(self, "grad_" + name)
            if parameter is None:
                continue
            if gradient is None:
                raise RuntimeError(f"{type(self).__name__}.update: no gradients; call backward first")
            parameter -= learning_rate * gradient

    def state_dict(self):
        """The parameters and running statistics by name, as NumPy arrays: what numpy.savez takes and `load_state_dict`
        reads.

        Returns
        -------
        dict of str to ndarray
            Copies; a later `update` does not change them.
        """
        return {name: _on_host(value) for name, value in self._state().items()}

    def _state(self):
        """What there is of parameters and buffers, by name."""
        state = {name: getattr(self, name) for name in self._parameters + self._buffers}
        return {name: value for name, value in state.items() if value is not None}

    def load_state_dict(self, state):
        """Take over the state of another layer of the same kind.

        Parameters
        ----------
        state : mapping of str to array_like
            As `state_dict` returns it, or the file that numpy.load opens. Values are converted to the
            dtype of the layer.

        Raises
        ------
        KeyError
            An array is missing, or there is one that the layer does not have.
        ValueError
            An array of the wrong shape. Nothing is changed then.
        """
        own = self._state()
        if set(state) != set(own):
            raise KeyError(f"state: expected {sorted(own)}, got {sorted(state)}")
        values = {name: np.asarray(state[name]) for name in own}
        for name, value in values.items():
            if value.shape != own[name].shape:
                raise ValueError(f"{name}: shape {value.shape}, but the layer has {own[name].shape}")
        # All conversions before the first change: one of them may fail.
        converted = {name: _like(own[name], value.astype(own[name].dtype)) for name, value in values.items()}
        for name, value in converted.items():
            setattr(self, name, value)

    def _follow(self, x):
        """The state goes once to where x is; x comes from there ever after."""
        cupy = sys.modules.get("cupy")
        there = cupy is not None and isinstance(x, cupy.ndarray)
        if there == isinstance(self.weight, np.ndarray):
            for name, value in self._state().items():
                setattr(self, name, cupy.asarray(value) if there else _on_host(value))


class _RowLayer(_Layer):
    """A norm over the trailing axes: also of a sum, as PostNorm needs it."""

    def __init__(self, normalized_shape, eps, dtype):
        self.normalized_shape = _shape(normalized_shape)
        self._axis = _trailing(self.normalized_shape)
        super().__init__(self.normalized_shape, eps, dtype)


def _on_host(a):
    return np.array(a) if isinstance(a, np.ndarray) else a.get()


def _like(a, value):
    """value where a is."""
    return value if isinstance(a, np.ndarray) else sys.modules["cupy"].asarray(value)


def _shape(normalized_shape):
    if isinstance(normalized_shape, bool):
        raise ValueError(f"normalized_shape: expected a positive int or a tuple of them, got {normalized_shape!r}")
    shape = (normalized_shape,) if isinstance(normalized_shape, (int, np.integer)) else tuple(normalized_shape)
    if not shape or any(not isinstance(n, (int, np.integer)) or n < 1 for n in shape):
        raise ValueError(f"normalized_shape: expected a positive int or a tuple of them, got {normalized_shape!r}")
    return tuple(int(n) for n in shape)


def _trailing(shape):
    """The axes of that shape at the end of x. A lone -1 is the common case of the functions."""
    return -1 if len(shape) == 1 else tuple(range(-len(shape), 0))


def _float_dtype(dtype):
    dtype = np.dtype(dtype)
    if dtype.name not in FLOATS:
        raise TypeError(f"dtype: {dtype} is not supported; expected {', '.join(FLOATS)}")
    return dtype


class LayerNorm(_RowLayer):
    """`layer_norm` over the trailing axes, with its weight and bias.

    Parameters
    ----------
    normalized_shape : int or tuple of ints
        The shape of the trailing axes of x that are normalized, and of weight and bias.
    eps : float
        As in `layer_norm`.
    bias : bool
        Whether there is one.
    dtype : dtype_like
        Of the parameters and their gradients: a float dtype.

    Attributes
    ----------
    weight, bias : ndarray
        Ones and zeros at first; bias is None without one. With CuPy arrays as input they become CuPy arrays.
    grad_weight, grad_bias : ndarray or None
        Gradients of the last `backward`, which replaces them.

    Raises
    ------
    ValueError
        normalized_shape is not a positive int or a tuple of them.
    TypeError
        dtype is not one of float16, bfloat16, float32, float64.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm.layers import LayerNorm
    >>> layer = LayerNorm(3)
    >>> layer(np.array([[1.0, 2.0, 3.0]])).round(3)
    array([[-1.225,  0.   ,  1.225]])
    >>> layer.backward(np.array([[1.0, 0.0, 0.0]])).round(3)
    array([[ 0.204, -0.408,  0.204]])
    >>> layer.update(learning_rate=0.1)
    >>> layer.bias
    array([-0.1,  0. ,  0. ])
    """

    _parameters = ("weight", "bias")

    def __init__(self, normalized_shape, *, eps=1e-5, bias=True, dtype=np.float64):
        super().__init__(normalized_shape, eps, dtype)
        self.bias = np.zeros_like(self.weight) if bias else None
        self.grad_bias = None

    def forward(self, x):
        """y, of the shape and dtype of x; x and its statistics are kept for `backward`."""
        if type(x) is not type(self.weight):
            self._follow(x)
        y, mean, rstd = layer_norm_forward(x, self.weight, self.bias, axis=self._axis, eps=self.eps)
        self._saved = "forward", x, mean, rstd
        return y

    def backward(self, dy):
        """dx, from the gradient with respect to the y of the last `forward`; sets grad_weight and grad_bias."""
        x, mean, rstd = self._saved_by("forward", "backward")
        dx, self.grad_weight, grad_bias = layer_norm_backward(dy, x, mean, rstd, self.weight, axis=self._axis)
        if self.bias is not None:
            self.grad_bias = grad_bias
        return dx

    def forward_sum(self, x, residual, alpha=1.0):
        """y of ``x + alpha * residual``, which is kept for `backward_sum`: `add_layer_norm` with these parameters."""
        if type(x) is not type(self.weight):
            self._follow(x)
        y, h, mean, rstd = add_layer_norm_forward(x, residual, self.weight, self.bias, alpha=alpha, axis=self._axis,
                                                  eps=self.eps)
        self._saved = "forward_sum", h, mean, rstd, alpha
        return y

    def backward_sum(self, dy):
        """(dx, dresidual), from the gradient with respect to the y of the last `forward_sum`; sets grad_weight and
        grad_bias."""
        h, mean, rstd, alpha = self._saved_by("forward_sum", "backward_sum")
        dx, dresidual, self.grad_weight, grad_bias = add_layer_norm_backward(dy, None, h, mean, rstd, self.weight,
                                                                             alpha=alpha, axis=self._axis)
        if self.bias is not None:
            self.grad_bias = grad_bias
        return dx, dresidual


class RMSNorm(_RowLayer):
    """`rms_norm` over the trailing axes, with its weight.

    Parameters
    ----------
    normalized_shape : int or tuple of ints
        The shape of the trailing axes of x that are normalized, and of weight.
    eps : float
        As in `rms_norm`.
    dtype : dtype_like
        Of weight and its gradient: a float dtype.

    Attributes
    ----------
    weight : ndarray
        Ones at first. With CuPy arrays as input it becomes a CuPy array.
    grad_weight : ndarray or None
        The gradient of the last `backward`, which replaces it.

    Raises
    ------
    ValueError
        normalized_shape is not a positive int or a tuple of them.
    TypeError
        dtype is not one of float16, bfloat16, float32, float64.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm.layers import RMSNorm
    >>> RMSNorm(2)(np.array([[3.0, 4.0]])).round(3)
    array([[0.849, 1.131]])
    """

    _parameters = ("weight",)

    def __init__(self, normalized_shape, *, eps=1e-5, dtype=np.float64):
        super().__init__(normalized_shape, eps, dtype)

    def forward(self, x):
        """y, of the shape and dtype of x; x and its statistics are kept for `backward`."""
        if type(x) is not type(self.weight):
            self._follow(x)
        y, rstd = rms_norm_forward(x, self.weight, axis=self._axis, eps=self.eps)
        self._saved = "forward", x, rstd
        return y

    def backward(self, dy):
        """dx, from the gradient with respect to the y of the last `forward`; sets grad_weight."""
        x, rstd = self._saved_by("forward", "backward")
        dx, self.grad_weight = rms_norm_backward(dy, x, rstd, self.weight, axis=self._axis)
        return dx

    def forward_sum(self, x, residual, alpha=1.0):
        """y of ``x + alpha * residual``, which is kept for `backward_sum`: `add_rms_norm` with this weight."""
        if type(x) is not type(self.weight):
            self._follow(x)
        y, h, rstd = add_rms_norm_forward(x, residual, self.weight, alpha=alpha, axis=self._axis, eps=self.eps)
        self._saved = "forward_sum", h, rstd, alpha
        return y

    def backward_sum(self, dy):
        """(dx, dresidual), from the gradient with respect to the y of the last `forward_sum`; sets grad_weight."""
        h, rstd, alpha = self._saved_by("forward_sum", "backward_sum")
        dx, dresidual, self.grad_weight = add_rms_norm_backward(dy, None, h, rstd, self.weight, alpha=alpha,
                                                                axis=self._axis)
        return dx, dresidual


class BatchNorm(_Layer):
    """`batch_norm` over the channels of an axis, with its parameters and running statistics.

    A new layer is in training mode: `eval` and `train` change that.

    Parameters
    ----------
    num_features : int
        The number of channels.
    eps, momentum, axis
        As in `batch_norm`.
    dtype : dtype_like
        Of the parameters, their gradients and the running statistics: a float dtype.

    Attributes
    ----------
    weight, bias : ndarray
        Ones and zeros at first. With CuPy arrays as input they become CuPy arrays.
    running_mean, running_var : ndarray
        Zeros and ones at first; every `forward` in training mode updates them.
    grad_weight, grad_bias : ndarray or None
        Gradients of the last `backward`, which replaces them.
    training : bool
        Whether `forward` uses the statistics of its x (True at first) or the running ones.

    Raises
    ------
    ValueError
        num_features is not a positive int.
    TypeError
        dtype is not one of float16, bfloat16, float32, float64.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm.layers import BatchNorm
    >>> layer = BatchNorm(2, momentum=1.0)
    >>> layer(np.array([[1.0, 10.0], [3.0, 30.0]])).round(3)
    array([[-1., -1.],
           [ 1.,  1.]])
    >>> layer.eval()(np.array([[2.0, 20.0]])).round(3)
    array([[0., 0.]])
    """

    _parameters = ("weight", "bias")
    _buffers = ("running_mean", "running_var")

    def __init__(self, num_features, *, eps=1e-5, momentum=0.1, axis=1, dtype=np.float64):
        if isinstance(num_features, bool) or not isinstance(num_features, (int, np.integer)) or num_features < 1:
            raise ValueError(f"num_features: expected a positive int, got {num_features!r}")
        super().__init__((int(num_features),), eps, dtype)
        self.num_features, self.momentum, self.axis, self.training = int(num_features), momentum, axis, True
        self.bias, self.grad_bias = np.zeros_like(self.weight), None
        self.running_mean, self.running_var = np.zeros_like(self.weight), np.ones_like(self.weight)

    def train(self):
        """Use the statistics of x from now on; returns the layer."""
        self.training = True
        return self

    def eval(self):
        """Use the running statistics from now on; returns the layer."""
        self.training = False
        return self

    def forward(self, x):
        """y, of the shape and dtype of x; x and its statistics are kept for `backward`."""
        if type(x) is not type(self.weight):
            self._follow(x)
        y, mean, rstd = batch_norm_forward(x, self.weight, self.bias, self.running_mean, self.running_var,
                                           training=self.training, momentum=self.momentum, eps=self.eps, axis=self.axis)
        self._saved = "forward", x, mean, rstd, self.training
        return y

    def backward(self, dy):
        """dx, from the gradient with respect to the y of the last `forward`; sets grad_weight and grad_bias."""
        x, mean, rstd, training = self._saved_by("forward", "backward")
        dx, self.grad_weight, self.grad_bias = batch_norm_backward(dy, x, mean, rstd, self.weight, axis=self.axis,
                                                                   training=training)
        return dx


class _Block:
    """A sublayer and a norm."""

    def __init__(self, sublayer, norm):
        self.sublayer, self.norm = sublayer, norm

    def __call__(self, x):
        return self.forward(x)

    def update(self, learning_rate):
        """One step of gradient descent of both."""
        self.sublayer.update(learning_rate)
        self.norm.update(learning_rate)

    def state_dict(self):
        """The states of both, if the sublayer has a state_dict; names begin with ``sublayer.`` and ``norm.``."""
        return {f"{part}.{name}": value for part in ("sublayer", "norm")
                for name, value in getattr(self, part).state_dict().items()}

    def load_state_dict(self, state):
        """Take over the states of both.

        Parameters
        ----------
        state : mapping of str to array_like
            As `state_dict` returns it.

        Raises
        ------
        KeyError
            A name that begins otherwise; or as the sublayer and the norm have it.
        ValueError
            As the sublayer and the norm have it. The sublayer is loaded first.
        """
        unknown = [name for name in state if not name.startswith(("sublayer.", "norm."))]
        if unknown:
            raise KeyError(f"state: expected names that begin with sublayer. and norm., got {unknown}")
        for part in ("sublayer", "norm"):
            begin = f"{part}."
            getattr(self, part).load_state_dict(
                {name.removeprefix(begin): state[name] for name in state if name.startswith(begin)})


class PreNorm(_Block):
    """x + sublayer(norm(x)): the residual block of Pre-LN transformers.

    Parameters
    ----------
    sublayer, norm
        Anything with forward, backward and update.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm.layers import LayerNorm, PreNorm
    >>> block = PreNorm(LayerNorm(3), norm=LayerNorm(3))
    >>> block(np.array([[1.0, 2.0, 3.0]])).round(3)
    array([[-0.225,  2.   ,  4.225]])
    """

    def forward(self, x):
        """x + sublayer(norm(x))."""
        return x + self.sublayer.forward(self.norm.forward(x))

    def backward(self, dy):
        """dx, from the gradient with respect to the last y."""
        return dy + self.norm.backward(self.sublayer.backward(dy))


class PostNorm(_Block):
    """norm(sublayer(x) + alpha * x): the residual block of the first transformers.

    Parameters
    ----------
    sublayer, norm
        Anything with forward, backward and update. With a LayerNorm or RMSNorm the sum and its norm are one
        pass over memory (`add_layer_norm`, `add_rms_norm`).
    alpha : float
        By what the skip path is multiplied.

    See Also
    --------
    DeepNorm : with the alpha of its paper.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm.layers import LayerNorm, PostNorm
    >>> block = PostNorm(LayerNorm(3), norm=LayerNorm(3))
    >>> block(np.array([[1.0, 2.0, 3.0]])).round(3)
    array([[-1.225,  0.   ,  1.225]])
    """

    def __init__(self, sublayer, norm, alpha=1.0):
        super().__init__(sublayer, norm)
        self.alpha = alpha

    def forward(self, x):
        """norm(sublayer(x) + alpha * x)."""
        y = self.sublayer.forward(x)
        if self._is_fused():
            return self.norm.forward_sum(y, x, self.alpha)
        return self.norm.forward(y + self.alpha * (np.asarray(x) if isinstance(x, (list, tuple)) else x))

    def _is_fused(self):
        """Whether the norm of a sum is the norm's own, and not overridden."""
        return any(type(self.norm).forward is kind.forward for kind in (LayerNorm, RMSNorm))

    def backward(self, dy):
        """dx, from the gradient with respect to the last y."""
        if self._is_fused():
            dh, dresidual = self.norm.backward_sum(dy)
        else:
            dh = self.norm.backward(dy)
            dresidual = self.alpha * dh
        return dresidual + self.sublayer.backward(dh)


class DeepNorm(PostNorm):
    """layer_norm(sublayer(x) + alpha * x): Post-LN for very deep networks [1]_.

    Parameters
    ----------
    sublayer
        Anything with forward, backward and update. Its initial weights are to be scaled by the paper's second
        constant: `deepnorm_scales` has both.
    normalized_shape, eps, dtype
        Of its LayerNorm, the attribute ``norm``.
    alpha : float
        By what the skip path is multiplied.

    References
    ----------
    .. [1] H. Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", 2022, arXiv:2203.00555.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm.layers import DeepNorm, LayerNorm, deepnorm_scales
    >>> encoder, _ = deepnorm_scales(n_encoder_layers=8)
    >>> block = DeepNorm(LayerNorm(3), 3, alpha=encoder.alpha)
    >>> block(np.array([[1.0, 2.0, 3.0]])).round(3)
    array([[-1.225,  0.   ,  1.225]])
    """

    def __init__(self, sublayer, normalized_shape, *, alpha, eps=1e-5, dtype=np.float64):
        super().__init__(sublayer, LayerNorm(normalized_shape, eps=eps, dtype=dtype), alpha)


class DeepNormScales(NamedTuple):
    """By what DeepNorm multiplies the skip path (alpha), and the initial weights of the feed-forward layers, values and
    output projections (initial_scale, the second constant of the paper)."""

    alpha: float
    initial_scale: float


def deepnorm_scales(n_encoder_layers=0, n_decoder_layers=0):
    """DeepNorm's constants for an architecture.

    Parameters
    ----------
    n_encoder_layers, n_decoder_layers : int
        Layers of the encoder and of the decoder; 0: there is none.

    Returns
    -------
    encoder, decoder : DeepNormScales or None
        Those of the layers of each; None for what there is not.

    Raises
    ------
    ValueError
        Neither has layers, or a number is negative.

    References
    ----------
    .. [1] H. Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", 2022, arXiv:2203.00555, figure 2.

    Examples
    --------
    >>> from fastnorm.layers import deepnorm_scales
    >>> encoder, decoder = deepnorm_scales(n_encoder_layers=8)
    >>> encoder.alpha, round(encoder.initial_scale, 4)
    (2.0, 0.3536)
    """
    n, m = n_encoder_layers, n_decoder_layers
    if n < 0 or m < 0 or n + m == 0:
        raise ValueError(f"n_encoder_layers, n_decoder_layers: expected at least one layer, got {n} and {m}")
    if n == 0 or m == 0:
        scales = DeepNormScales((2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25)
        return (scales, None) if n else (None, scales)
    both = math.pow(n, 0.25) * math.pow(m, 1 / 16)
    return DeepNormScales(0.81 * both, 0.87 / both), DeepNormScales((3 * m) ** 0.25, (12 * m) ** -0.25)
