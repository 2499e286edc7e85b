"""rms_norm, add_rms_norm: divide by the root mean square along axes. Doors: signatures, defaults, docstrings.

Compiled by Cython as it stands, like the hall behind it (fastnorm._row_norm).
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from cython.cimports.fastnorm._row_norm import backward, forward

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import ArrayLike, NDArray


def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, *, axis: int | tuple[int, ...] | None = -1,
             eps: float = 1e-5, weight_offset: float = 0.0, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Root mean square normalization: ``x / sqrt(mean(x**2) + eps) * (weight_offset + weight)``.

    Parameters
    ----------
    x : array_like
        float16, bfloat16 (of ml_dtypes), float32 or float64, of any shape with at least one
        dimension, any memory layout and byte order; integers and bool are computed as float64.
    weight : array_like, optional
        Of the shape of the normalized axes, in the order in which they stand in x. It may have
        another dtype, is rounded to the arithmetic type (float32, float64 for float64 x), and does
        not change the dtype of the result. None: ones.
    axis : int, tuple of ints or None
        The axes to normalize over, as NumPy has them; None: all.
    eps : float
        Added to the mean square inside the square root; at least 0. With 0, a row of zeros stays 0.
    weight_offset : float
        Added to weight in the arithmetic type. Models that store ``weight - 1`` use 1.0.
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
        different kinds; eps or weight_offset is not a number.
    ValueError
        weight or out of the wrong shape, out read-only, eps negative or not finite, an axis that is
        repeated or ``()``, weight_offset without weight.
    numpy.exceptions.AxisError
        An axis that x does not have.

    See Also
    --------
    rms_norm_forward : also returns the statistic that `rms_norm_backward` needs.
    layer_norm : centres, and has a bias.

    Notes
    -----
    Rows whose squares would overflow or underflow are scaled first, so any finite row is right. The
    result has the same bits for any number of threads, processor level and memory layout, and for
    a row whatever batch it stands in. NaN and infinity stay in their row.

    CuPy arrays give CuPy arrays, computed on the device of x and its current stream; all arrays must
    then be CuPy's, and on that device (ValueError). The bits are those of the GPU, not of the CPU.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import rms_norm
    >>> rms_norm(np.array([[3.0, 4.0], [1e200, -1e200]])).round(3)
    array([[ 0.849,  1.131],
           [ 1.   , -1.   ]])
    """
    return forward(x, None, 1.0, weight, None, axis, eps, weight_offset, out, None, False, False, False)


def rms_norm_forward(x: ArrayLike, weight: ArrayLike | None = None, *, axis: int | tuple[int, ...] | None = -1,
                     eps: float = 1e-5, weight_offset: float = 0.0,
                     out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """`rms_norm`, and the statistic that `rms_norm_backward` needs.

    Parameters
    ----------
    x, weight, axis, eps, weight_offset, out
        As in `rms_norm`.

    Returns
    -------
    y : ndarray
        As `rms_norm` returns it, bit for bit.
    rstd : ndarray
        ``1 / sqrt(mean(x**2) + eps)``, of the shape of x with the normalized axes kept as length 1;
        float32, float64 for float64 and integer x.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import rms_norm_forward
    >>> y, rstd = rms_norm_forward(np.array([3.0, 4.0]), eps=0.0)
    >>> rstd.round(4)
    array([0.2828])
    """
    y, _, rstd = forward(x, None, 1.0, weight, None, axis, eps, weight_offset, out, None, False, True, False)
    return y, rstd


def rms_norm_backward(dy: ArrayLike, x: ArrayLike, rstd: NDArray[Any], weight: ArrayLike | None = None, *,
                      axis: int | tuple[int, ...] | None = -1, weight_offset: float = 0.0, param_grads: bool = True,
                      out: NDArray[Any] | None = None) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Gradients of a scalar through `rms_norm`, from its gradient dy with respect to y.

    Parameters
    ----------
    dy : array_like
        Of the shape of x, of any supported dtype.
    x, weight, axis, weight_offset
        As they were given to `rms_norm_forward`.
    rstd : ndarray
        As `rms_norm_forward` returned it.
    param_grads : bool
        Whether dweight is wanted.
    out : ndarray, optional
        Where dx goes, of the shape of x and a float dtype; it may be dy itself.

    Returns
    -------
    dx : ndarray
        ``rstd * (wdy - x_hat * mean(wdy * x_hat))`` with ``wdy = dy * (weight_offset + weight)``
        and ``x_hat = x * rstd``; of the shape and dtype of x; `out` if it was given.
    dweight : ndarray or None
        The sum of ``dy * x_hat`` over the rows, of the shape of the normalized axes and the dtype
        of weight, of rstd if weight is None. None without param_grads.

    Raises
    ------
    TypeError
        As `rms_norm`; rstd of another dtype than the forward returns.
    ValueError
        As `rms_norm`; dy or rstd of the wrong shape.
    numpy.exceptions.AxisError
        An axis that x does not have.

    Notes
    -----
    The formulas are the chain rule applied to that of `rms_norm` [1]_. dweight is added up in
    float64, whatever the dtypes, in an order that depends on the shape alone. Where the terms of dx
    cancel, the rounding of the saved rstd shows: by up to two units in the last place of the largest
    ``rstd * wdy`` of a row.

    References
    ----------
    .. [1] B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import rms_norm_backward, rms_norm_forward
    >>> x = np.array([[3.0, 4.0]])
    >>> y, rstd = rms_norm_forward(x, eps=0.0)
    >>> dx, dweight = rms_norm_backward(np.ones_like(x), x, rstd)
    >>> dx.round(4)
    array([[ 0.0453, -0.0339]])
    """
    dx, _, dweight, _ = backward(dy, None, x, None, rstd, weight, 1.0, axis, weight_offset, param_grads, out, False,
                                 False)
    return dx, dweight


def add_rms_norm(x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, *, alpha: float = 1.0,
                 axis: int | tuple[int, ...] | None = -1, eps: float = 1e-5, weight_offset: float = 0.0,
                 out: NDArray[Any] | None = None, residual_out: NDArray[Any] | None = None,
                 ) -> tuple[NDArray[Any], NDArray[Any]]:
    """``h = x + alpha * residual`` and ``rms_norm(h)``, in one pass over memory.

    Parameters
    ----------
    x : array_like
        What a sublayer gave: as in `rms_norm`.
    residual : array_like
        The skip path, of the shape of x; it may have another dtype, which is then that of h.
    weight, axis, eps, weight_offset
        As in `rms_norm`.
    alpha : float
        By what residual is multiplied.
    out, residual_out : ndarray, optional
        Where y and h go, of the shape of x and a float dtype; each may be x or residual itself, but
        they must not overlap each other.

    Returns
    -------
    y : ndarray
        The norm of h as it is stored, bit for bit what ``rms_norm(h)`` gives; of the dtype of x; `out`
        if it was given.
    h : ndarray
        ``x + alpha * residual``, the product and the sum rounded each in the arithmetic type (float32;
        float64 if one of the three is), stored in the dtype of residual; `residual_out` if it was given.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `rms_norm`; residual of another shape than x, alpha not finite, out and residual_out that
        overlap.

    See Also
    --------
    rms_norm : of an array that is there already.
    add_layer_norm : centres, and has a bias.

    Examples
    --------
    A layer of a Pre-LN network, into memory that is there already: x and the skip path are replaced by
    the input of the next sublayer and by the new skip path.

    >>> import numpy as np
    >>> from fastnorm import add_rms_norm
    >>> x, residual = np.array([[1.0, 2.0]]), np.array([[2.0, 2.0]])
    >>> y, h = add_rms_norm(x, residual, out=x, residual_out=residual)
    >>> residual
    array([[3., 4.]])
    >>> x.round(3)
    array([[0.849, 1.131]])
    """
    return forward(x, residual, alpha, weight, None, axis, eps, weight_offset, out, residual_out, False, False, True)


def add_rms_norm_forward(x: ArrayLike, residual: ArrayLike, weight: ArrayLike | None = None, *, alpha: float = 1.0,
                         axis: int | tuple[int, ...] | None = -1, eps: float = 1e-5, weight_offset: float = 0.0,
                         out: NDArray[Any] | None = None, residual_out: NDArray[Any] | None = None,
                         ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """`add_rms_norm`, and the statistic that `add_rms_norm_backward` needs.

    Parameters
    ----------
    x, residual, weight, alpha, axis, eps, weight_offset, out, residual_out
        As in `add_rms_norm`.

    Returns
    -------
    y, h : ndarray
        As `add_rms_norm` returns them, bit for bit.
    rstd : ndarray
        Of h, as `rms_norm_forward` returns it.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `add_rms_norm`.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import add_rms_norm_forward
    >>> y, h, rstd = add_rms_norm_forward(np.array([1.0, 2.0]), np.array([2.0, 2.0]), eps=0.0)
    >>> rstd.round(4)
    array([0.2828])
    """
    y, h, _, rstd = forward(x, residual, alpha, weight, None, axis, eps, weight_offset, out, residual_out, False, True,
                            True)
    return y, h, rstd


def add_rms_norm_backward(dy: ArrayLike, dh: ArrayLike | None, h: ArrayLike, rstd: NDArray[Any],
                          weight: ArrayLike | None = None, *, alpha: float = 1.0,
                          axis: int | tuple[int, ...] | None = -1, weight_offset: float = 0.0, param_grads: bool = True,
                          out: NDArray[Any] | None = None,
                          ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
    """Gradients of a scalar through `add_rms_norm`, from its gradients dy and dh with respect to y and h.

    Parameters
    ----------
    dy : array_like
        Of the shape of h, of any supported dtype.
    dh : array_like or None
        What arrives at h from where else it went, likewise; None for nothing.
    h, rstd : ndarray
        As `add_rms_norm_forward` returned them.
    weight, alpha, axis, weight_offset
        As they were given to `add_rms_norm_forward`.
    param_grads : bool
        Whether dweight is wanted.
    out : ndarray, optional
        Where dx goes, of the shape of h and a float dtype; it may be dy or dh itself.

    Returns
    -------
    dx : ndarray
        The dx of `rms_norm_backward` at h, plus dh: the gradient with respect to x (and to h); of the dtype of
        dy; `out` if it was given.
    dresidual : ndarray
        ``alpha * dx``, of the dtype of h; always an array of its own.
    dweight : ndarray or None
        As `rms_norm_backward` returns it.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As `rms_norm_backward`; dh of another shape than h, alpha not finite.

    Notes
    -----
    Since ``h = x + alpha * residual``, the gradient with respect to h is that of x, and alpha times it
    is that of residual. dresidual is computed from dx before it is rounded to 16 bits.

    Examples
    --------
    >>> import numpy as np
    >>> from fastnorm import add_rms_norm_backward, add_rms_norm_forward
    >>> y, h, rstd = add_rms_norm_forward(np.array([[1.0, 2.0]]), np.array([[2.0, 2.0]]), eps=0.0)
    >>> dx, dresidual, dweight = add_rms_norm_backward(np.zeros((1, 2)), np.ones((1, 2)), h, rstd)
    >>> dx is dresidual
    False
    >>> dresidual
    array([[1., 1.]])
    """
    dx, dresidual, dweight, _ = backward(dy, dh, h, None, rstd, weight, alpha, axis, weight_offset, param_grads, out,
                                         False, True)
    return dx, dresidual, dweight
