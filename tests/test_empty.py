"""Zero rows, zero features: empty results, zero gradients, no warning (warnings are errors in this suite)."""

import numpy as np
import pytest
from helpers import FLOATS, INTEGERS, NORMS, backward_of, forward_of, is_centered, name_of

import fastnorm


@pytest.mark.parametrize(
    "shape, axis",
    [((0, 8), -1), ((3, 0, 8), -1), ((8, 0), 0), ((0, 0, 8), -1), ((2, 8, 0), 1), ((8, 0, 4), (0, 2))],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_no_rows_give_empty_results_and_zero_gradients(norm, dtype, shape, axis):
    """S01: sums over nothing are zero, never memory that nobody has written."""
    x = np.empty(shape, dtype)
    axes = axis if isinstance(axis, tuple) else (axis % len(shape),)
    w = np.ones([shape[a] for a in axes], dtype)
    y, *statistics = forward_of(norm)(x, w, axis=axis)
    assert y.shape == shape and y.dtype == dtype
    keepdims = tuple(1 if a in axes else n for a, n in enumerate(shape))
    assert all(s.shape == keepdims for s in statistics)
    for _ in range(10):
        dx, *params = backward_of(norm)(x, x, *statistics, w, axis=axis)
        assert dx.shape == shape and dx.dtype == dtype
        assert all(p.shape == w.shape and p.dtype == dtype and not p.astype(float).any() for p in params)
    assert backward_of(norm)(x, x, *statistics, w, axis=axis, param_grads=False)[1:] == (None,) * len(params)


@pytest.mark.parametrize("eps", [1e-5, 4.0, 0.0])
@pytest.mark.parametrize(
    "shape, axis",
    [((3, 0), -1), ((0, 3), 0), ((2, 0, 3), (1, 2)), ((0,), 0), ((0,), None), ((0, 5), None), ((2, 3, 0), -1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_rows_without_elements_have_mean_0_and_rstd_of_eps(norm, dtype, shape, axis, eps):
    x = np.empty(shape, dtype)
    y, *statistics = forward_of(norm)(x, axis=axis, eps=eps)
    assert y.shape == shape
    rstd = statistics[-1]
    assert rstd.size > 0 and (rstd == (np.inf if eps == 0 else rstd.dtype.type(1 / np.sqrt(eps)))).all()
    if is_centered(norm):
        assert not statistics[0].any()
    dx, *params = backward_of(norm)(x, x, *statistics, axis=axis)
    assert dx.shape == shape and all(p.size == 0 for p in params)


@pytest.mark.parametrize("dtype", INTEGERS[:4], ids=name_of)
def test_empty_integers_become_empty_float64(dtype):
    for norm in NORMS:
        assert norm(np.empty((0, 3), dtype)).dtype == np.float64


def test_an_empty_list_is_a_vector_without_elements():
    y, mean, rstd = fastnorm.layer_norm_forward([])
    assert y.shape == (0,) and mean.shape == rstd.shape == (1,)


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_out_may_be_empty(norm):
    for shape in ((0, 4), (4, 0)):
        x, out = np.empty(shape, np.float32), np.empty(shape, np.float16)
        assert norm(x, out=out) is out
        assert backward_of(norm)(x, x, *forward_of(norm)(x)[1:], out=out)[0] is out
        assert norm(x, out=x) is x
