"""layer_norm: normalize to mean 0 and variance 1 along axes. Doors: signatures, defaults, docstrings.

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
    return forward(x, weight, bias, axis, eps, 0.0, out, True, False)


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
    return forward(x, weight, bias, axis, eps, 0.0, out, True, True)


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
    return backward(dy, x, mean, rstd, weight, axis, 0.0, param_grads, out, True)
