"""batch_norm: normalize every channel over all other axes. Doors: signatures, defaults, docstrings.

Compiled by Cython as it stands, like the hall behind it (fastnorm._channel_norm).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from cython.cimports.fastnorm._channel_norm import backward, forward

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import ArrayLike, NDArray


def batch_norm(x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None,
               running_mean: NDArray[Any] | None = None, running_var: NDArray[Any] | None = None, *,
               training: bool = False, momentum: float = 0.1, eps: float = 1e-5, axis: int = 1,
               out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Batch normalization: ``(x - mean) / sqrt(var + eps) * weight + bias`` for every channel.

    In training, mean and var are those of the channel's values in x, over all axes but `axis`; in evaluation
    they are running_mean and running_var.

    Parameters
    ----------
    x : array_like
        (N, C), (N, C, L), (N, C, H, W) or of any other shape that has the axis; float16, bfloat16 (of
        ml_dtypes), float32 or float64, of any memory layout and byte order; integers and bool are computed as
        float64.
    weight, bias : array_like, optional
        (C,), of any supported dtype; rounded to the arithmetic type (float32, float64 for float64 x). None:
        ones, zeros.
    running_mean, running_var : ndarray, optional
        (C,). In evaluation both are needed and only read. In training, both or neither: they are updated in
        place and keep their float dtype, ``running = (1 - momentum) * running + momentum * new``, where the
        new variance is the unbiased one (divided by n - 1). They change only when the call succeeds.
    training : bool
        Whether the statistics are those of x.
    momentum : float
        The weight of the new value: 0 leaves the running arrays as they are, 1 replaces them.
    eps : float
        Added to the variance inside the square root; at least 0. With 0, a constant channel gives bias.
    axis : int
        The axis of the channels, which is not normalized over. -1 for channels-last arrays.
    out : ndarray, optional
        Where the result goes, of the shape of x and a float dtype; it may be x itself.

    Returns
    -------
    ndarray
        C-ordered, of the shape and dtype of x; `out` if it was given.

    Raises
    ------
    TypeError
        An array of a dtype or kind that is not supported, a masked array or matrix, arrays of different kinds;
        running arrays that are not arrays of floats in training; axis is not an int.
    ValueError
        weight, bias or a running array that is not (C,), one of the running arrays without the other, none in
        evaluation, a read-only one in training; fewer than two values per channel in training; out of the wrong
        shape or read-only; eps negative or not finite. The running arrays are untouched then.
    numpy.exceptions.AxisError
        An axis that x does not have.

    See Also
    --------
    batch_norm_forward : also returns the statistics that `batch_norm_backward` needs.
    layer_norm : normalizes every case alone, the same in training and evaluation.

    Notes
    -----
    y is normalized with the biased variance (divided by n), the running variance is the unbiased one, as the
    paper [1]_ and PyTorch have it. Accuracy and bits are promised as for `layer_norm`, a channel in the place of a
    row; NaN and infinity stay in their channel, and in training get into its running statistics.

    References
    ----------
    .. [1] S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal
       Covariate Shift", 2015, arXiv:1502.03167.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import batch_norm
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0]])
    >>> running_mean, running_var = np.zeros(2), np.ones(2)
    >>> batch_norm(x, None, None, running_mean, running_var, training=True).round(3)
    array([[-1., -1.],
           [ 1.,  1.]])
    >>> running_mean
    array([0.2, 2. ])
    >>> batch_norm(np.array([[0.2, 2.0]]), None, None, running_mean, running_var)
    array([[0., 0.]])
    """
    return forward(x, weight, bias, running_mean, running_var, training, momentum, eps, axis, out, False)


def batch_norm_forward(x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None,
                       running_mean: NDArray[Any] | None = None, running_var: NDArray[Any] | None = None, *,
                       training: bool = False, momentum: float = 0.1, eps: float = 1e-5, axis: int = 1,
                       out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """`batch_norm`, and the statistics that `batch_norm_backward` needs.

    Parameters
    ----------
    x, weight, bias, running_mean, running_var, training, momentum, eps, axis, out
        As in `batch_norm`.

    Returns
    -------
    y : ndarray
        As `batch_norm` returns it, bit for bit.
    mean, rstd : ndarray
        Of the channels, ``rstd = 1 / sqrt(var + eps)``; in evaluation from the running arrays. Of the shape of x
        with all axes but that of the channels of length 1; float32, float64 for float64 and integer x.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `batch_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import batch_norm_forward
    >>> y, mean, rstd = batch_norm_forward(np.array([[1.0, 10.0], [3.0, 30.0]]), training=True, eps=0.0)
    >>> mean
    array([[ 2., 20.]])
    >>> rstd
    array([[1. , 0.1]])
    """
    return forward(x, weight, bias, running_mean, running_var, training, momentum, eps, axis, out, True)


def batch_norm_backward(dy: ArrayLike, x: ArrayLike, mean: NDArray[Any], rstd: NDArray[Any],
                        weight: ArrayLike | None = None, *, axis: int = 1, training: bool = True,
                        param_grads: bool = True, out: NDArray[Any] | None = None,
                        ) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
    """Gradients of a scalar through `batch_norm`, from its gradient dy with respect to y.

    Parameters
    ----------
    dy : array_like
        Of the shape of x, of any supported dtype.
    x, weight, axis, training
        As they were given to `batch_norm_forward`.
    mean, rstd : ndarray
        As `batch_norm_forward` returned them.
    param_grads : bool
        Whether dweight and dbias are wanted.
    out : ndarray, optional
        Where dx goes, of the shape of x and a float dtype; it may be dy itself.

    Returns
    -------
    dx : ndarray
        In training ``weight * rstd * (dy - mean(dy) - x_hat * mean(dy * x_hat))`` with the means over the channel
        and ``x_hat = (x - mean) * rstd``; in evaluation, where the statistics are constants, ``weight * rstd * dy``.
        Of the shape and dtype of x; `out` if it was given.
    dweight, dbias : ndarray or None
        The sums of ``dy * x_hat`` and ``dy`` over the channel: (C,), of the dtype of weight, of the statistics if
        weight is None. None without param_grads.

    Raises
    ------
    TypeError
        As `batch_norm`; mean or rstd of another dtype than the forward returns.
    ValueError
        As `batch_norm`; dy, mean or rstd of the wrong shape.
    numpy.exceptions.AxisError
        An axis that x does not have.

    Notes
    -----
    The formulas are the chain rule applied to that of `batch_norm` [1]_. What the saved mean has lost to rounding
    is made up for in training; in evaluation x_hat is that of the mean as it is given, rounded to the arithmetic type
    where the running mean was wider. The sums are those of float32 (float64) in blocks of 1024 (512) values, added
    up in float64: where they cancel over few channels, more than their last places may be lost.

    References
    ----------
    .. [1] S. Ioffe, C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal
       Covariate Shift", 2015, arXiv:1502.03167, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import batch_norm_backward, batch_norm_forward
    >>> x = np.array([[1.0, 10.0], [3.0, 30.0], [2.0, 50.0]])
    >>> y, mean, rstd = batch_norm_forward(x, training=True)
    >>> dx, dweight, dbias = batch_norm_backward(np.ones_like(x), x, mean, rstd)
    >>> bool(abs(dx).max() < 1e-12)
    True
    >>> dbias
    array([3., 3.])
    """
    return backward(dy, x, mean, rstd, weight, axis, training, param_grads, out)
