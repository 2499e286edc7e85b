"""Gradients: central differences of the forward in float64, and identities that any right gradient has."""

import numpy as np
import pytest
from helpers import NORMS, assert_same_bits, backward_of, exact_gradients, forward_of, gradients, is_centered, name_of

import fastnorm


def central_differences(f, a, step=1e-6):
    """The gradient of the scalar f() with respect to the elements of a, which f reads."""
    gradient = np.empty_like(a)
    for i in np.ndindex(a.shape):
        keep = a[i]
        a[i] = keep + step
        above = f()
        a[i] = keep - step
        gradient[i] = (above - f()) / (2 * step)
        a[i] = keep
    return gradient


@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize(
    "shape, axis",
    [
        ((3, 5), -1),
        ((4, 6), 0),
        ((2, 3, 4), 1),
        ((2, 3, 4), (0, 2)),
        ((2, 3, 2), None),
        ((7,), 0),
        ((3, 70), -1),
        ((5, 40), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_gradients_are_those_of_central_differences(norm, shape, axis, weighted, rng):
    axes = tuple(range(len(shape))) if axis is None else tuple(sorted(a % len(shape) for a in np.atleast_1d(axis)))
    normalized = [shape[a] for a in axes]
    x, dy = rng.standard_normal((2, *shape)) + 0.5
    w, b = rng.standard_normal((2, *normalized)) + 1
    options = {} if is_centered(norm) or not weighted else {"weight_offset": 1.0}
    eps = 1e-2

    def loss():
        affine = (w if weighted else None, *([b] if is_centered(norm) else []))
        return (norm(x, *affine, axis=axis, eps=eps, **options) * dy).sum()

    dx, dweight, *dbias = gradients(norm, dy, x, w if weighted else None, axis=axis, eps=eps, **options)
    np.testing.assert_allclose(dx, central_differences(loss, x), rtol=1e-6, atol=2e-8)
    if weighted:
        np.testing.assert_allclose(dweight, central_differences(loss, w), rtol=1e-6, atol=2e-8)
    if is_centered(norm):
        np.testing.assert_allclose(dbias[0], central_differences(loss, b), rtol=1e-6, atol=2e-8)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1.0, 100.0])
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_gradients_are_right_for_any_eps(norm, eps, rng):
    x, dy = rng.standard_normal((2, 5, 40))
    for got, wanted in zip(gradients(norm, dy, x, eps=eps), exact_gradients(norm, dy, x, eps=eps), strict=True):
        np.testing.assert_allclose(got, wanted.astype(float), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("columns", [2, 5, 31, 100, 1500])
def test_dx_sums_to_zero_and_vanishes_for_a_constant_dy(columns, rng):
    """B03: a kernel that subtracts mean(dy * weight) twice trains all the same."""
    x = rng.standard_normal((7, columns))
    w = rng.standard_normal(columns) + 2
    assert np.abs(gradients(fastnorm.layer_norm, np.full_like(x, 5.0), x)[0]).max() < 1e-11
    dx = gradients(fastnorm.layer_norm, rng.standard_normal(x.shape) + 3, x, w)[0]
    np.testing.assert_allclose(dx.sum(-1), 0, atol=1e-11 * np.abs(dx).max() * columns)


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_dx_is_orthogonal_to_x_hat_without_eps(norm, rng):
    """Scaling x changes nothing, so the gradient has no part along it."""
    x, dy = rng.standard_normal((2, 6, 50))
    dx = gradients(norm, dy, x, eps=0.0)[0]
    np.testing.assert_allclose((dx * norm(x, eps=0.0)).sum(-1), 0, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, 7.0, -2.5, 0.1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_gradient_through_a_constant_row_is_finite(dtype, value):
    """B05."""
    for n in (4, 64, 100):
        x, dy = np.full((1, n), value, dtype), np.resize(np.array([1, 2, 4, 1], dtype), (1, n))
        dx, dweight, dbias = gradients(fastnorm.layer_norm, dy, x, np.ones(n, dtype))
        row = [-316.22776601683796, 0, 632.4555320336759, -316.22776601683796]
        np.testing.assert_allclose(dx[0], np.resize(row, n), rtol=1e-6, atol=1e-4)
        assert not dweight.any() and (dbias == dy[0]).all()


def test_weight_none_is_a_weight_of_ones(rng):
    """B01: in forward and backward, with bias and without; the gradients come back all the same."""
    x, dy = rng.standard_normal((2, 6, 10)).astype(np.float32)
    w, b = rng.standard_normal((2, 10)).astype(np.float32)
    one, zero = np.ones(10, np.float32), np.zeros(10, np.float32)
    layer_norm = fastnorm.layer_norm
    assert_same_bits(layer_norm(x, w), layer_norm(x, w, zero))
    assert_same_bits(layer_norm(x, None, b), layer_norm(x, one, b))
    assert np.abs(layer_norm(x, w) - layer_norm(x)).max() > 0.1 < np.abs(layer_norm(x, None, b) - layer_norm(x)).max()
    for norm in NORMS:
        assert_same_bits(gradients(norm, dy, x), gradients(norm, dy, x, one))


def test_gradients_of_a_vector_and_of_fewer_rows_than_threads():
    """B06: partial sums of rows that do not exist must count as nothing, time after time."""
    x, w = np.zeros(4, np.float32), np.ones(4, np.float32)
    for _ in range(50):
        y, rstd = fastnorm.rms_norm_forward(x, w)
        assert y.shape == (4,) and rstd.shape == (1,)
        dx, dweight = fastnorm.rms_norm_backward(np.full(4, -1, np.float32), x, rstd, w)
        assert dweight.shape == (4,) and not dweight.any()
        np.testing.assert_allclose(dx, -316.22777, rtol=1e-5)
    for rows in (1, 2, 3, 31, 33, 63, 64, 65, 67, 129):
        x = np.ones((rows, 4), np.float32)
        x[:, 0] = -1
        for norm in NORMS:
            (*statistics,) = forward_of(norm)(x)[1:]
            dweight = backward_of(norm)(np.ones_like(x), x, *statistics, w)[1]
            np.testing.assert_allclose(
                dweight, exact_gradients(norm, np.ones_like(x), x, w)[1].astype(float), rtol=1e-5
            )


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_backward_is_linear_in_dy(norm, rng):
    """By powers of two, so exactly."""
    x, dy = rng.standard_normal((2, 70, 130)).astype(np.float32)
    once, twice = gradients(norm, dy, x), gradients(norm, dy * 4, x)
    assert_same_bits(tuple(a * 4 for a in once), twice)


@pytest.mark.parametrize("offset", [1.0, -0.5, 3])
def test_weight_offset_is_added_to_the_weight(offset, rng):
    x, dy = rng.standard_normal((2, 6, 10)).astype(np.float32)
    w = rng.standard_normal(10).astype(np.float32)
    assert_same_bits(fastnorm.rms_norm(x, w, weight_offset=offset), fastnorm.rms_norm(x, w + np.float32(offset)))
    assert_same_bits(
        gradients(fastnorm.rms_norm, dy, x, w, weight_offset=offset),
        gradients(fastnorm.rms_norm, dy, x, w + np.float32(offset)),
    )
    # A 16-bit weight is widened before the offset is added.
    h = w.astype(np.float16)
    assert_same_bits(
        fastnorm.rms_norm(x, h, weight_offset=offset), fastnorm.rms_norm(x, h.astype(np.float32) + np.float32(offset))
    )
