"""layer_norm, add_layer_norm: normalize to mean 0 and variance 1 along axes. Doors: signatures, defaults, docstrings.

Compiled by Cython as it stands, like the hall behind it (fastnorm._row_norm).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from cython.cimports.fastnorm._row_norm import backward, forward

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import ArrayLike, NDArray


def layer_norm(x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *,
               axis: int | tuple[int, ...] | None = -1, eps: float = 1e-5,
               out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Layer normalization: ``(x - mean) / sqrt(var + eps) * weight + bias`` along `axis`.

    Parameters
    ----------
    x : array_like
        float16, bfloat16 (of ml_dtypes), float32 or float64, of any shape with at least one
        dimension, any memory layout and byte order; integers and bool are computed as float64.
    weight, bias : array_like, optional
        Of the shape of the normalized axes, in the order in which they stand in x. They may have
        another dtype, are rounded to the arithmetic type (float32, float64 for float64 x), and do
        not change the dtype of the result. None: ones, zeros.
    axis : int, tuple of ints or None
        The axes to normalize over, as NumPy has them; None: all.
    eps : float
        Added to the biased variance inside the square root; at least 0. With 0, a constant row
        gives bias.
    out : ndarray, optional
        Where the result goes, of the shape of x and a float dtype; it may be x itself. Large
        results are about twice as fast into memory that was used before.

    Returns
    -------
    ndarray
        C-ordered, of the shape and dtype of x; `out` if it was given.

    Raises
    ------
    TypeError
        An array of a dtype or kind that is not supported, a masked array or matrix, arrays of
        different kinds; eps is not a number.
    ValueError
        weight, bias or out of the wrong shape, out read-only, eps negative or not finite, an axis
        that is repeated or ``()``.
    numpy.exceptions.AxisError
        An axis that x does not have.

    See Also
    --------
    layer_norm_forward : also returns the statistics that `layer_norm_backward` needs.
    rms_norm : without centering.

    Notes
    -----
    Accurate to a few units in the last place of the largest value of a row, for any mean and any
    magnitude: the variance is that of centred values, and the mean is kept to twice the precision.
    The result has the same bits for any number of threads, processor level and memory layout, and
    for a row whatever batch it stands in. NaN and infinity stay in their row.

    CuPy arrays give CuPy arrays, computed on the device of x and its current stream; all arrays must
    then be CuPy's, and on that device (ValueError). The bits are those of the GPU, not of the CPU.

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import layer_norm
    >>> layer_norm(np.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], dtype=np.float32)).round(3)
    array([[-1.225,  0.   ,  1.225],
           [-1.225,  0.   ,  1.225]], dtype=float32)

    Over several axes, with a weight of their shape, into memory that is there already:

    >>> x = np.arange(24.0).reshape(2, 3, 4)
    >>> y = layer_norm(x, weight=np.full((3, 4), 2.0), axis=(1, 2), out=x)
    >>> y is x
    True
    """
    return forward(x, None, 1.0, weight, bias, axis, eps, 0.0, out, None, True, False, False)


def layer_norm_forward(x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *,
                       axis: int | tuple[int, ...] | None = -1, eps: float = 1e-5,
                       out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """`layer_norm`, and the statistics that `layer_norm_backward` needs.

    Parameters
    ----------
    x, weight, bias, axis, eps, out
        As in `layer_norm`.

    Returns
    -------
    y : ndarray
        As `layer_norm` returns it, bit for bit.
    mean : ndarray
        Of the shape of x with the normalized axes kept as length 1; float32, float64 for float64
        and integer x. 0 for rows of no elements.
    rstd : ndarray
        ``1 / sqrt(var + eps)``, likewise.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import layer_norm_forward
    >>> y, mean, rstd = layer_norm_forward(np.array([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0]]))
    >>> mean
    array([[2.],
           [4.]])
    >>> rstd.round(2)
    array([[  1.22],
           [316.23]])
    """
    return forward(x, None, 1.0, weight, bias, axis, eps, 0.0, out, None, True, True, False)


def layer_norm_backward(dy: ArrayLike, x: ArrayLike, mean: NDArray[Any], rstd: NDArray[Any],
                        weight: ArrayLike | None = None, *, axis: int | tuple[int, ...] | None = -1,
                        param_grads: bool = True, out: NDArray[Any] | None = None,
                        ) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
    """Gradients of a scalar through `layer_norm`, from its gradient dy with respect to y.

    Parameters
    ----------
    dy : array_like
        Of the shape of x, of any supported dtype.
    x, weight, axis
        As they were given to `layer_norm_forward`.
    mean, rstd : ndarray
        As `layer_norm_forward` returned them.
    param_grads : bool
        Whether dweight and dbias are wanted.
    out : ndarray, optional
        Where dx goes, of the shape of x and a float dtype; it may be dy itself.

    Returns
    -------
    dx : ndarray
        ``rstd * (wdy - mean(wdy) - x_hat * mean(wdy * x_hat))`` with ``wdy = dy * weight`` and
        ``x_hat = (x - mean) * rstd``; of the shape and dtype of x; `out` if it was given.
    dweight, dbias : ndarray or None
        The sums of ``dy * x_hat`` and ``dy`` over the rows, of the shape of the normalized axes and
        the dtype of weight, of the statistics if weight is None. None without param_grads.

    Raises
    ------
    TypeError
        As `layer_norm`; mean or rstd of another dtype than the forward returns.
    ValueError
        As `layer_norm`; dy, mean or rstd of the wrong shape.
    numpy.exceptions.AxisError
        An axis that x does not have.

    Notes
    -----
    The formulas are the chain rule applied to that of `layer_norm` [1]_. The parameter gradients are
    added up in float64, whatever the dtypes, in an order that depends on the shape alone. What the
    saved mean has lost to rounding is made up for; the rounding of rstd is not, and where the terms
    of dx cancel it shows: by up to two units in the last place of the largest ``rstd * wdy`` of a row.

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import layer_norm_backward, layer_norm_forward
    >>> x = np.array([[1.0, 2.0, 4.0], [3.0, 1.0, 2.0]])
    >>> y, mean, rstd = layer_norm_forward(x)
    >>> dx, dweight, dbias = layer_norm_backward(np.ones_like(x), x, mean, rstd)
    >>> bool(abs(dx).max() < 1e-12)
    True
    >>> dbias
    array([2., 2., 2.])
    """
    dx, _, dweight, dbias = backward(dy, None, x, mean, rstd, weight, 1.0, axis, 0.0, param_grads, out, True, False)
    return dx, dweight, dbias


def add_layer_norm(x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, *,
                   alpha: float = 1.0, axis: int | tuple[int, ...] | None = -1, eps: float = 1e-5,
                   out: NDArray[Any] | None = None, residual_out: NDArray[Any] | None = None,
                   ) -> tuple[NDArray[Any], NDArray[Any]]:
    """``h = x + alpha * residual`` and ``layer_norm(h)``, in one pass over memory.

    Parameters
    ----------
    x : array_like
        What a sublayer gave: as in `layer_norm`.
    residual : array_like
        The skip path, of the shape of x; it may have another dtype, which is then that of h.
    weight, bias, axis, eps
        As in `layer_norm`.
    alpha : float
        By what residual is multiplied: 1 for Pre-LN and Post-LN, DeepNorm's constant [1]_ for DeepNorm
        (`fastnorm.layers.deepnorm_scales`).
    out, residual_out : ndarray, optional
        Where y and h go, of the shape of x and a float dtype; each may be x or residual itself, but
        they must not overlap each other.

    Returns
    -------
    y : ndarray
        The norm of h as it is stored, bit for bit what ``layer_norm(h)`` gives; of the dtype of x;
        `out` if it was given.
    h : ndarray
        ``x + alpha * residual``, the product and the sum rounded each in the arithmetic type (float32;
        float64 if one of the three is), stored in the dtype of residual; `residual_out` if it was given.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `layer_norm`; residual of another shape than x, alpha not finite, out and residual_out that
        overlap.

    See Also
    --------
    layer_norm : of an array that is there already.
    fastnorm.layers.PostNorm, fastnorm.layers.DeepNorm : blocks of a network made of it.

    Notes
    -----
    It moves four arrays where `numpy.add` and `layer_norm` move five or more. In a Pre-LN network,
    y goes into the next sublayer and h is the next residual; in Post-LN and DeepNorm y is both.

    References
    ----------
    .. [1] H. Wang et al., "DeepNet: Scaling Transformers to 1,000 Layers", 2022, arXiv:2203.00555.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import add_layer_norm
    >>> y, h = add_layer_norm(np.array([[1.0, 2.0, 3.0]]), np.array([[0.5, 0.0, 0.5]]), alpha=2.0)
    >>> h
    array([[2., 2., 4.]])
    >>> y.round(3)
    array([[-0.707, -0.707,  1.414]])
    """
    return forward(x, residual, alpha, weight, bias, axis, eps, 0.0, out, residual_out, True, False, True)


def add_layer_norm_forward(x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None,
                           bias: ArrayLike | None = None, *, alpha: float = 1.0,
                           axis: int | tuple[int, ...] | None = -1, eps: float = 1e-5, out: NDArray[Any] | None = None,
                           residual_out: NDArray[Any] | None = None,
                           ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """`add_layer_norm`, and the statistics that `add_layer_norm_backward` needs.

    Parameters
    ----------
    x, residual, weight, bias, alpha, axis, eps, out, residual_out
        As in `add_layer_norm`.

    Returns
    -------
    y, h : ndarray
        As `add_layer_norm` returns them, bit for bit.
    mean, rstd : ndarray
        Of h, as `layer_norm_forward` returns them.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `add_layer_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import add_layer_norm_forward
    >>> y, h, mean, rstd = add_layer_norm_forward(np.array([[1.0, 2.0, 3.0]]), np.ones((1, 3)))
    >>> mean
    array([[3.]])
    """
    return forward(x, residual, alpha, weight, bias, axis, eps, 0.0, out, residual_out, True, True, True)


def add_layer_norm_backward(dy: ArrayLike, dh: ArrayLike | None, h: ArrayLike, mean: NDArray[Any], rstd: NDArray[Any],
                            weight: ArrayLike | None = None, *, alpha: float = 1.0,
                            axis: int | tuple[int, ...] | None = -1, param_grads: bool = True,
                            out: NDArray[Any] | None = None,
                            ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]:
    """Gradients of a scalar through `add_layer_norm`, from its gradients dy and dh with respect to y and h.

    Parameters
    ----------
    dy : array_like
        Of the shape of h, of any supported dtype.
    dh : array_like or None
        What arrives at h from where else it went, likewise; None for nothing, as in Post-LN.
    h, mean, rstd : ndarray
        As `add_layer_norm_forward` returned them.
    weight, alpha, axis
        As they were given to `add_layer_norm_forward`.
    param_grads : bool
        Whether dweight and dbias are wanted.
    out : ndarray, optional
        Where dx goes, of the shape of h and a float dtype; it may be dy or dh itself.

    Returns
    -------
    dx : ndarray
        The dx of `layer_norm_backward` at h, plus dh: the gradient with respect to x (and to h); of the dtype
        of dy; `out` if it was given.
    dresidual : ndarray
        ``alpha * dx``, of the dtype of h; always an array of its own.
    dweight, dbias : ndarray or None
        As `layer_norm_backward` returns them.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `layer_norm_backward`; dh of another shape than h, alpha not finite.

    Notes
    -----
    Since ``h = x + alpha * residual``, the gradient with respect to h is that of x, and alpha times it
    is that of residual. dresidual is computed from dx before it is rounded to 16 bits.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import add_layer_norm_backward, add_layer_norm_forward
    >>> y, h, mean, rstd = add_layer_norm_forward(np.array([[1.0, 2.0, 4.0]]), np.ones((1, 3)), alpha=2.0)
    >>> dx, dresidual, dweight, dbias = add_layer_norm_backward(np.ones((1, 3)), h, h, mean, rstd, alpha=2.0)
    >>> dx.round(6)
    array([[3., 4., 6.]])
    >>> dresidual.round(6)
    array([[ 6.,  8., 12.]])
    """
    return backward(dy, dh, h, mean, rstd, weight, alpha, axis, 0.0, param_grads, out, True, True)
