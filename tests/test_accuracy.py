"""The accuracy that DESIGN.md 3.1 promises, in the measures that it names; no overflow, no underflow."""

import itertools

import ml_dtypes
import mpmath
import numpy as np
import pytest
from helpers import (
    FLOATS,
    LONGEST,
    NARROW_FLOATS,
    NORMS,
    WIDE_FLOATS,
    arithmetic,
    assert_rounded_once,
    assert_same_bits,
    bits,
    capped,
    errors_in_ulp,
    exact,
    exact_gradients,
    forward_of,
    gradients,
    is_centered,
    name_of,
    ulp_of,
)

import fastnorm

# Around every length where the code takes another way: lane groups, steps, blocks, split rows.
LENGTHS = capped(
    [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        100,
        127,
        128,
        129,
        255,
        257,
        511,
        512,
        513,
        768,
        1000,
        1023,
        1024,
        1025,
        2047,
        2049,
        4096,
        5000,
        8191,
        8193,
        65536,
        65537,
        200_003,
        1_000_000,
    ]
)


def rows_for(n):
    """How many rows keep a test short."""
    return max(2, min(24, (LONGEST or 200_000) // n))


# ---- named families: what breaks one-pass and rounded-mean formulas -------------------------------


def outlier_first(rng, n):
    z = rng.standard_normal(n)
    z[0] = 1e6
    return z


def outlier_last(rng, n):
    return outlier_first(rng, n)[::-1]


def huge_outlier_first(rng, n):
    """Beyond the digits of float32: a guess of the mean from the first elements says nothing about the rest."""
    z = rng.standard_normal(n)
    z[0] = -1e12
    return z


def block_first(rng, n):
    z = rng.standard_normal(n)
    z[: max(1, min(n // 4, 1024))] += 1e4
    return z


def block_last(rng, n):
    return block_first(rng, n)[::-1]


def first_step_only(rng, n):
    """The 64 values that the first guess of the mean comes from lie far from all others, and near each other."""
    z = rng.standard_normal(n)
    z[:64] = 3e5 + rng.standard_normal(min(n, 64))
    return z


def ascending(rng, n):
    return np.sort(rng.standard_normal(n)) + 10


def descending(rng, n):
    return ascending(rng, n)[::-1]


def trend(rng, n):
    return 1e5 + np.arange(n) * (1e4 / n) + 0.1 * rng.standard_normal(n)


def half_constant(rng, n):
    z = np.full(n, 1000.1)
    z[n // 2 :] = rng.standard_normal(n - n // 2)
    return z


def mostly_constant(rng, n):
    z = np.full(n, 0.1)
    z[-1] = 0.3
    return z


def heavy_tails(rng, n):
    return rng.standard_cauchy(n) ** 3


def alternating(rng, n):
    return np.where(np.arange(n) % 2, 1.0, -1.0) * (3 + rng.random(n))


def zero_mean_pairs(rng, n):
    """Sums that cancel: the last bits of large values decide about the mean."""
    z = rng.standard_normal(n) * 1e6
    z[1::2] = -z[:-1:2][: len(z[1::2])]
    return z + rng.standard_normal(n)


def lane_aligned(rng, n):
    """Every sixteenth value large: one lane holds them all."""
    z = rng.standard_normal(n)
    z[::16] += 1e5
    return z


FAMILIES = [
    outlier_first,
    outlier_last,
    huge_outlier_first,
    block_first,
    block_last,
    first_step_only,
    ascending,
    descending,
    trend,
    half_constant,
    mostly_constant,
    heavy_tails,
    alternating,
    zero_mean_pairs,
    lane_aligned,
]
FAMILY_LENGTHS = capped([2, 3, 5, 16, 17, 33, 64, 65, 100, 128, 1000, 1024, 1025, 5000, 65_543, 1_000_000])


def forward_error(norm, x, eps):
    """In ulp of the largest |y| of a row."""
    y = exact(norm, x, eps=eps)
    return errors_in_ulp(norm(x, eps=eps), y, y, x.dtype)


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_named_families_are_within_4_ulp(norm, dtype, family, rng):
    for n in FAMILY_LENGTHS:
        x = np.array([family(rng, n) for _ in range(min(4, rows_for(n)))]).astype(dtype)
        for eps in (1e-5, 0.0):
            error = forward_error(norm, x, eps)
            assert error <= 4, (n, eps, error)


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
@pytest.mark.parametrize(
    "dtype, scale",
    [
        (np.float32, 1e-30),
        (np.float32, 1e-41),
        (np.float32, 1e20),
        (np.float32, 1e26),
        (np.float64, 1e-200),
        (np.float64, 1e-310),
        (np.float64, 1e160),
        (np.float64, 1e290),
    ],
)
def test_huge_and_tiny_rows_are_within_4_ulp(norm, dtype, scale, family, rng):
    for n in (2, 3, 17, 64, 65, 1000, 5000, 70_001):
        z = np.array([family(rng, n) for _ in range(2)])
        if z.max() > 1e6:
            z *= 1e6 / np.abs(z).max()
        x = (z * scale).astype(dtype)
        error = forward_error(norm, x, 0.0)
        assert error <= 4, (n, error)


@pytest.mark.parametrize(
    "dtype, scale, eps",
    [
        (np.float32, 1e-20, 1e-40),
        (np.float32, 1e-18, 1e-37),
        (np.float32, 1e-3, 1e-5),
        (np.float32, 1e-12, 1e-5),
        (np.float32, 1e20, 1e38),
        (np.float64, 1e-160, 1e-320),
        (np.float64, 1e-160, 1e-321),
        (np.float64, 1e155, 1e307),
    ],
)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_eps_counts_whatever_the_magnitude(norm, dtype, scale, eps, rng):
    for n in (3, 64, 1000):
        x = (rng.standard_normal((3, n)) * scale).astype(dtype)
        assert forward_error(norm, x, eps) <= 4


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_random_rows_are_within_3_ulp_at_any_mean(norm, dtype, n, rng):
    ratios = [0, 1, 1e2, 1e4, 1e6, 1e7] + ([1e9, 1e12, 1e14] if dtype == np.float64 else [])
    if n > 100_000:
        ratios = ratios[::3] + ratios[-1:]
    for ratio in ratios:
        x = (rng.standard_normal((rows_for(n), n)) + ratio).astype(dtype)
        error = forward_error(norm, x, 1e-5)
        assert error <= 3, (ratio, error)


@pytest.mark.parametrize("axis", [0, 1, (0, 2), (1, 2), None], ids=str)
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_other_axes_are_as_accurate(norm, dtype, axis, rng):
    for ratio in (0, 1e3, 1e7):
        x = (rng.standard_normal((40, 50, 60)) + ratio).astype(dtype)
        y = exact(norm, x, axis=axis)
        axes = tuple(range(3)) if axis is None else (axis,) if isinstance(axis, int) else axis
        largest = np.abs(y).max(axis=axes, keepdims=True)
        error = (np.abs(norm(x, axis=axis) - y) / ulp_of(largest, dtype)).max()
        assert error <= 3, (ratio, error)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_statistics_are_rounded_from_wider_sums(norm, dtype, rng):
    """To half an ulp, give or take what the sums lose."""
    for ratio in (0, 1e2, 1e4):
        x = (rng.standard_normal((7, 3000)) + ratio).astype(dtype)
        *_, rstd = forward_of(norm)(x)
        *_, exact_rstd = exact(forward_of(norm), x)
        assert (np.abs(rstd - exact_rstd) <= 2 * ulp_of(exact_rstd, dtype)).all()
        if is_centered(norm):
            mean, exact_mean = forward_of(norm)(x)[1], exact(forward_of(norm), x)[1]
            spread = 1 / exact_rstd
            assert (np.abs(mean - exact_mean) <= ulp_of(exact_mean, dtype) / 2 + 2 * ulp_of(spread, dtype)).all()


@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_affine_adds_two_roundings(norm, dtype, rng):
    x = (rng.standard_normal((9, 1000)) + 100).astype(dtype)
    w, b = (rng.standard_normal((2, 1000)) * 3).astype(dtype)
    arguments = (w, b) if is_centered(norm) else (w,)
    y, x_hat = exact(norm, x, *arguments), exact(norm, x)
    allowed = (
        3 * ulp_of(np.abs(x_hat).max(axis=-1, keepdims=True), dtype) * np.abs(w)
        + ulp_of(w * x_hat, dtype)
        + ulp_of(y, dtype)
    )
    assert (np.abs(norm(x, *arguments) - y) <= allowed).all()


@pytest.mark.parametrize("n", [1, 3, 8, 16, 17, 100, 1000, 4096, 5000])
@pytest.mark.parametrize("dtype", NARROW_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_16_bit_results_are_rounded_once(norm, dtype, n, rng):
    """Weight in float32: it must not be rounded to 16 bits on the way (D02)."""
    w, b = (1.0009 + 0.1 * rng.standard_normal((2, n))).astype(np.float32)
    for ratio in (0, 30):
        x = (rng.standard_normal((8, n)) + ratio).astype(dtype)
        for arguments in ((), (w,), (w, b) if is_centered(norm) else (w,)):
            y = exact(norm, x, *arguments)
            x_hat = np.abs(exact(norm, x)).max(axis=-1, keepdims=True)
            slack = 3 * ulp_of(x_hat, dtype) * (np.abs(w).max() if arguments else 1) + 2 * ulp_of(y, dtype)
            result = norm(x, *arguments)
            assert result.dtype == dtype
            assert_rounded_once(result, y, slack)


@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
def test_the_longdouble_oracle_agrees_with_mpmath(dtype, rng):
    """The oracle of this file, held against 60 digits on the rows that strain it most."""
    ratio = 1e7 if dtype == np.float32 else 1e14
    rows = [rng.standard_normal(200) + ratio, outlier_first(rng, 100), trend(rng, 100), heavy_tails(rng, 65)]
    for x in (r.astype(dtype) for r in rows):
        for norm in NORMS:
            with mpmath.workdps(60):
                v = [mpmath.mpf(float(a)) for a in x]
                mean = mpmath.fsum(v) / len(v) if is_centered(norm) else mpmath.mpf(0)
                rstd = 1 / mpmath.sqrt(mpmath.fsum([(a - mean) ** 2 for a in v]) / len(v) + mpmath.mpf(1e-5))
                y = [(a - mean) * rstd for a in v]
                largest = max(abs(a) for a in y)
                mine = exact(norm, x)
                # longdouble to mpmath without loss: high part and rest.
                error = max(
                    abs(mpmath.mpf(float(p)) + mpmath.mpf(float(p - np.longdouble(float(p)))) - q)
                    for p, q in zip(mine, y, strict=True)
                )
                assert error <= largest * mpmath.mpf(2) ** -58
                result = norm(x)
                spacing = mpmath.mpf(float(np.spacing(dtype.type(float(largest)))))
                assert max(abs(mpmath.mpf(float(p)) - q) for p, q in zip(result, y, strict=True)) <= 4 * spacing


# ---- backward -------------------------------------------------------------------------------------


def gradient_errors(norm, dy, x, weight=None, eps=1e-5):
    """(dx in ulp of the largest |rstd * dy * weight| of the row, dweight and dbias in ulp of their largest).

    dx is that of the rstd which backward is given. It enters three times, and where the terms cancel,
    its rounding alone moves dx by up to two ulp: no algorithm can know better.
    """
    dtype = x.dtype
    results = gradients(norm, dy, x, weight, eps=eps)
    wanted = exact_gradients(norm, dy, x, weight, eps=eps)
    *_, rstd = forward_of(norm)(x, eps=eps)
    wanted = (exact_gradients(norm, dy, x, weight, rstd=rstd)[0], *wanted[1:])
    wdy = dy.astype(np.longdouble) * (1 if weight is None else weight)
    return [errors_in_ulp(results[0], wanted[0], rstd * wdy, dtype)] + [
        errors_in_ulp(r, w, w, dtype) for r, w in zip(results[1:], wanted[1:], strict=True)
    ]


def assert_gradients_are_close(norm, dy, x, weight=None, eps=1e-5, note=None):
    dx, *params = gradient_errors(norm, dy, x, weight, eps)
    assert dx <= (4 if x.shape[-1] >= 32 else 8), (note, "dx", dx)
    # One feature: x_hat is zero, so dweight is exactly zero and has no largest to measure by.
    for name, error in zip(("dweight", "dbias"), params, strict=False):
        assert error <= 4, (note, name, error)


@pytest.mark.parametrize(
    "n", capped([2, 3, 5, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 768, 1000, 1024, 1025, 5000, 65_537, 1_000_000])
)
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_gradients_are_within_their_bounds(norm, dtype, n, rng):
    for ratio in [0, 1e4, 1e7 if dtype == np.float32 else 1e14][: 3 if n < 100_000 else 2]:
        # Not fewer rows than features: of few rows dweight is as rough as one product.
        x = (rng.standard_normal((rows_for(n), n)) + ratio).astype(dtype)
        w = rng.standard_normal(n).astype(dtype)
        for dy_mean in (0, 10):
            dy = (rng.standard_normal(x.shape) + dy_mean).astype(dtype)
            assert_gradients_are_close(norm, dy, x, w if dy_mean else None, note=(ratio, dy_mean))


@pytest.mark.parametrize(
    "rows, columns", capped([(1_000_000, 2), (300_000, 3), (100_000, 16), (20_000, 33), (4099, 70), (900, 70)])
)
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_parameter_gradients_of_many_rows_are_within_4_ulp(norm, dtype, rows, columns, rng):
    x = (rng.standard_normal((rows, columns)) + 3).astype(dtype)
    for dy_mean in (0, 5):
        dy = (rng.standard_normal(x.shape) + dy_mean).astype(dtype)
        assert_gradients_are_close(norm, dy, x, note=dy_mean)
        if rows * columns > 1e6:
            break


@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_gradients_of_named_families_are_within_their_bounds(norm, dtype, family, rng):
    for n in (3, 17, 64, 100, 1000, 1025, 5000):
        x = np.array([family(rng, n) for _ in range(6)]).astype(dtype)
        # One column may hold all of dweight. With dy of one sign its sum does not cancel by chance: what
        # is measured in ulp of a sum of six terms that cancel is the terms.
        dy = (np.abs(rng.standard_normal(x.shape)) + 0.5).astype(dtype)
        assert_gradients_are_close(norm, dy, x, note=n)
        dy = rng.standard_normal(x.shape).astype(dtype)
        dx = gradient_errors(norm, dy, x)[0]
        assert dx <= (4 if n >= 32 else 8), (n, "dx", dx)


@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
def test_backward_makes_up_for_the_rounding_of_the_saved_mean(dtype):
    """N01: consecutive values near a large mean, whose mean is no number of the type."""
    base = 50_000 if dtype == np.float32 else 2.0**51
    x = (base + np.array([[0, 1, 2, 3], [0, 0, 1, 3]])).astype(dtype)
    dy = np.array([[1, -2, 4, 1], [3, 1, 0, 2]], dtype)
    assert_gradients_are_close(fastnorm.layer_norm, dy, x)


@pytest.mark.parametrize("dtype", NARROW_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_16_bit_gradients_are_rounded_once(norm, dtype, rng):
    x, dy = (rng.standard_normal((2, 200, 100)) + 1).astype(dtype)
    w = (rng.standard_normal(100) + 1).astype(dtype)
    results, wanted = gradients(norm, dy, x, w), exact_gradients(norm, dy, x, w)
    *_, rstd = exact(forward_of(norm), x)
    scales = [
        np.abs(rstd * dy.astype(np.longdouble) * w.astype(np.longdouble)).max(axis=-1, keepdims=True),
        *(np.abs(a).max() for a in wanted[1:]),
    ]
    for result, value, scale in zip(results, wanted, scales, strict=True):
        assert result.dtype == dtype
        assert_rounded_once(result, value, 4 * ulp_of(scale, dtype))


@pytest.mark.parametrize("dtype", NARROW_FLOATS, ids=name_of)
def test_a_16_bit_gradient_is_rounded_once_from_the_double_sum(dtype):
    """A sum a hair above the middle of two 16-bit numbers: rounded by way of float32 it goes the wrong way."""
    half_step = 2.0**-11 if dtype == np.float16 else 2.0**-8
    dy = np.array([[1 + half_step], [2.0**-30]], np.float32)
    _, _, dbias = gradients(fastnorm.layer_norm, dy, np.zeros((2, 1), np.float32), np.ones(1, dtype))
    assert float(dbias[0]) == 1 + 2 * half_step


@pytest.mark.parametrize("dtype", NARROW_FLOATS, ids=name_of)
def test_parameter_gradients_of_16_bit_types_are_not_summed_in_16_bits(dtype):
    """B02: a float16 sum of ones stalls at 2048, one of bfloat16 at 256."""
    rows = 8192
    x = np.tile(np.array([-1, 1], dtype), (rows, 1))
    w = np.ones(2, dtype)
    _, _, dbias = gradients(fastnorm.layer_norm, np.ones((rows, 2), dtype), x, w)
    assert dbias.tolist() == [rows, rows]
    for norm in NORMS:
        dweight = gradients(norm, np.full((rows, 2), 2.0**-10, dtype), x, w)[1]
        np.testing.assert_allclose(dweight.astype(float), [-8, 8], rtol=4e-3)


def test_a_long_sum_of_float32_ones_does_not_stall():
    """N10, as the gradient of the bias has it: a plain float32 sum stops at 2**24."""
    rows = 2**24 + 2**12
    dy = np.broadcast_to(np.ones((1, 1), np.float32), (rows, 1))
    mean, rstd = np.zeros((rows, 1), np.float32), np.broadcast_to(np.float32(1), (rows, 1))
    _, _, dbias = fastnorm.layer_norm_backward(
        dy,
        np.broadcast_to(np.float32(0), (rows, 1)),
        mean,
        rstd,
        np.ones(1, np.float64),
        out=np.empty((rows, 1), np.float16),
    )
    assert dbias.tolist() == [rows]


# ---- overflow and underflow -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 16, 17, 64, 65, 512, 1024, 1025, 5000, 70_000])
@pytest.mark.parametrize(
    "dtype, value, eps",
    [
        (np.float32, 1e15, 1e-5),
        (np.float32, 1e19, 1e-5),
        (np.float32, 3e38, 1e-5),
        (np.float32, 1e-30, 0),
        (np.float32, 1e-45, 0),
        (np.float64, 1e154, 1e-5),
        (np.float64, 1e300, 1e-5),
        (np.float64, 1.7e308, 0),
        (np.float64, 1e-200, 0),
        (np.float64, 5e-324, 0),
    ],
)
def test_rms_norm_of_a_constant_row_is_its_sign(dtype, value, eps, n):
    """N06."""
    x = np.full((2, n), value, dtype)
    x[1] *= -1
    y = fastnorm.rms_norm(x, eps=eps)
    assert (np.abs(y - np.array([[1], [-1]])) <= 2 * np.spacing(dtype(1))).all()


@pytest.mark.parametrize("n", [2, 16, 64, 66, 512, 1026, 70_000])
@pytest.mark.parametrize(
    "dtype, value, eps",
    [
        (np.float32, 1e15, 1e-5),
        (np.float32, 1e19, 1e-5),
        (np.float32, 1.7e38, 1e-5),
        (np.float32, 1e-30, 0),
        (np.float32, 1e-44, 0),
        (np.float64, 1e300, 1e-5),
        (np.float64, 8e307, 1e-5),
        (np.float64, 1e-300, 0),
    ],
)
def test_layer_norm_of_two_alternating_values_is_minus_one_and_one(dtype, value, eps, n):
    """N06: also where their sum leaves the range of the type."""
    x = np.tile(np.array([1, 2], dtype) * dtype(value), (3, n // 2))
    y = fastnorm.layer_norm(x, eps=eps)
    assert (np.abs(y - np.tile([-1, 1], n // 2)) <= 4 * np.spacing(dtype(1))).all()


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_statistics_of_huge_rows_are_right(norm):
    x = np.array([[3e38, -3e38, 1e38, 2e38], [1e-30, 3e-30, -2e-30, 5e-30]], np.float32)
    for row in x:
        (*statistics,) = forward_of(norm)(row, eps=0.0)[1:]
        for got, wanted in zip(statistics, exact(forward_of(norm), row, eps=0.0)[1:], strict=True):
            np.testing.assert_allclose(got.astype(float), wanted.astype(float), rtol=1e-6)


@pytest.mark.parametrize("value", [300.0, 1000.0, 60000.0])
def test_float16_squares_do_not_overflow(value):
    """N08."""
    for n in (8, 4096):
        y = fastnorm.rms_norm(np.full((2, n), value, np.float16))
        assert y.dtype == np.float16 and (y == 1).all()


@pytest.mark.parametrize("scale", [1e-20, 1e-30, 1e19, 1e30])
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_gradients_of_large_and_small_float32_rows_are_within_their_bounds(norm, scale, rng):
    for n in (33, 1000):
        x = (rng.standard_normal((5, n)) * scale).astype(np.float32)
        assert_gradients_are_close(norm, rng.standard_normal(x.shape).astype(np.float32), x, eps=0.0)


# ---- rows with an exact answer --------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1234.0, 0.1, -3.3e7, 7.7e-5, 1 / 3, 1e-30, 1e30, 1e36, 3e38, -1e-42, 1e300])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_constant_row_gives_exactly_the_bias(dtype, value):
    """N03, E01: also with eps = 0, for awkward lengths and for values that no binary fraction is."""
    if abs(value) > float(ml_dtypes.finfo(dtype).max):
        return
    value = dtype.type(value)
    for n in (1, 3, 10, 15, 33, 63, 64, 65, 100, 127, 255, 256, 257, 1000, 1023, 1025, 4097, 70_001):
        x = np.full((2, n), value, dtype)
        b = np.linspace(-1, 1, n).astype(dtype)
        for eps in (1e-5, 1e-12, 0.0):
            y, mean, rstd = fastnorm.layer_norm_forward(x, eps=eps)
            assert not y.astype(np.float32).any(), n
            assert (mean == float(value)).all()
            assert np.isinf(rstd).all() if eps == 0 else np.allclose(rstd, 1 / np.sqrt(eps)), n
            assert_same_bits(
                fastnorm.layer_norm(x, np.full(n, 5, dtype), b, eps=eps), np.tile(b, (2, 1)) + dtype.type(0)
            )


@pytest.mark.parametrize("axis", [0, 1])
def test_a_constant_row_gives_exactly_the_bias_on_other_axes(axis):
    for n in (3, 63, 65, 257, 1025):
        shape = (n, 300) if axis == 0 else (3, n, 200)
        b = np.linspace(-1, 1, n, dtype=np.float32)
        for eps in (1e-5, 0.0):
            y = fastnorm.layer_norm(np.full(shape, 0.1, np.float32), None, b, axis=axis, eps=eps)
            assert_same_bits(y, np.broadcast_to(b[:, None], shape).copy())


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("eps", [1e-5, 1e-8, 1e-12])
def test_eps_does_not_vanish_in_16_bits(dtype, eps):
    """E01."""
    x = np.zeros((2, 10), dtype)
    x[1] = 3.25
    assert not fastnorm.layer_norm(x, np.ones(10, dtype), np.zeros(10, dtype), eps=eps).astype(float).any()
    assert not fastnorm.rms_norm(x[:1], eps=eps).astype(float).any()
    assert np.isfinite(fastnorm.layer_norm_forward(x, eps=eps)[2]).all()


def test_eps_stands_inside_the_square_root():
    """E02."""
    np.testing.assert_allclose(
        fastnorm.layer_norm(np.array([[-1e-3, 1e-3]]), eps=1e-5), [[-0.301511344577764, 0.301511344577764]], rtol=1e-9
    )
    np.testing.assert_allclose(fastnorm.rms_norm(np.array([[1e-3, 1e-3]]), eps=1e-5), 0.301511344577764, rtol=1e-9)


def test_zeros_and_eps_0_give_zeros():
    y, rstd = fastnorm.rms_norm_forward(np.zeros((2, 5)), eps=0.0)
    assert not y.any() and np.isinf(rstd).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_one_feature_gives_the_bias_and_no_weight_gradient(dtype):
    """N05."""
    x = np.array([[1e4], [0.1], [-7.0], [60000.0]], dtype)
    w, b, dy = np.array([123.0], dtype), np.array([3.0], dtype), np.array([[1], [2], [4], [0]], dtype)
    y, mean, rstd = fastnorm.layer_norm_forward(x, w, b)
    assert (y == 3).all() and (mean.astype(dtype) == x).all()
    dx, dweight, dbias = fastnorm.layer_norm_backward(dy, x, mean, rstd, w)
    assert not dx.astype(float).any() and dweight[0] == 0 and dbias[0] == 7


def test_large_means_are_right():
    """N01: the reported rows, with the values of mpmath."""
    a = np.array([[50000, 50001, 50002, 50003], [90000, 90001, 90002, 90003]], np.float32)
    row = [-1.3416354200, -0.4472118067, 0.4472118067, 1.3416354200]
    np.testing.assert_allclose(fastnorm.layer_norm(a), [row, row], rtol=1e-6)
    b = np.float32(1e4) + np.arange(16, dtype=np.float32) * np.float32(1e-3)
    y = fastnorm.layer_norm(b)
    np.testing.assert_allclose([y[0], y[-1]], [-1.3313333518, 1.3313333518], rtol=1e-6)


# ---- NaN and infinity -----------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("columns", [37, 1500])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_nan_and_infinity_stay_in_their_row(dtype, columns, axis, norm, rng):
    """N12: bit for bit, in forward and dx; on other axes the row shares tiles with its neighbours."""
    clean, dy = (rng.standard_normal((2, 70, columns))).astype(dtype)
    keep = np.arange(70) != 4
    turn = (lambda a: a) if axis == -1 else (lambda a: np.ascontiguousarray(a.T))

    def results(x):
        dx = gradients(norm, turn(dy), turn(x), axis=axis)[0]
        return [turn(r) for r in (*forward_of(norm)(turn(x), axis=axis), dx)]

    before = results(clean)
    for where, bad in itertools.product((0, 5, 36, -1), (np.inf, -np.inf, np.nan)):
        dirty = clean.copy()
        dirty[4, where] = bad
        after = results(dirty)
        for p, q in zip(before, after, strict=True):
            assert bits(p[keep]) == bits(q[keep]), (where, bad)
        y = after[0][4]
        assert np.isnan(y[where]), (where, bad)
        if is_centered(norm) or np.isnan(bad):
            assert np.isnan(y).all(), (where, bad)
        else:
            # Finite over infinite.
            assert (np.delete(y, where) == 0).all(), (where, bad)


def test_the_mean_of_a_row_with_an_infinity_is_that_infinity():
    for bad in (np.inf, -np.inf):
        for n in (3, 70, 3000):
            x = np.ones((1, n), np.float32)
            x[0, n // 2] = bad
            assert fastnorm.layer_norm_forward(x)[1][0, 0] == bad


def test_arithmetic_type_of_helpers_is_that_of_the_package():
    for dtype in FLOATS:
        assert fastnorm.layer_norm_forward(np.ones((1, 2), dtype))[1].dtype == arithmetic(dtype)
