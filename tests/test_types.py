"""Which dtype and which kind of array goes in, and which comes out."""

import numpy as np
import pytest
from helpers import (
    BFLOAT16,
    FLOATS,
    INTEGERS,
    NARROW_FLOATS,
    NORMS,
    arithmetic,
    assert_same_bits,
    backward_of,
    exact,
    forward_of,
    gradients,
    is_centered,
    name_of,
    round_to,
)

import fastnorm


@pytest.mark.parametrize("weight_dtype", [None, *FLOATS], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_results_have_the_dtype_of_x_and_gradients_that_of_weight(norm, dtype, weight_dtype, rng):
    """D02: neither weight, bias, dy nor a NumPy float64 eps promotes anything."""
    x = rng.standard_normal((4, 32)).astype(dtype)
    w = None if weight_dtype is None else rng.standard_normal(32).astype(weight_dtype)
    affine = (w, w) if is_centered(norm) else (w,)
    for eps in (1e-5, np.float64(1e-5), np.float32(1e-5), 1, np.array(1e-5)):
        y, *statistics = forward_of(norm)(x, *affine, eps=eps)
        assert y.dtype == norm(x, *affine, eps=eps).dtype == dtype
        assert all(s.dtype == arithmetic(dtype) for s in statistics)
    for dy_dtype in FLOATS + INTEGERS[:3]:
        dx, *params = backward_of(norm)(np.ones((4, 32), dy_dtype), x, *statistics, w)
        assert dx.dtype == dtype
        assert all(p.dtype == (arithmetic(dtype) if w is None else weight_dtype) for p in params)


@pytest.mark.parametrize("weight_dtype", FLOATS + INTEGERS[:4], ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_weight_bias_and_dy_are_rounded_to_the_arithmetic_type_and_no_further(dtype, weight_dtype, rng):
    """D02: a weight of 1.0009 must not collapse to the 1.0 of a 16-bit x; float64 is rounded to float32 for it."""
    for shape, axis in (((4, 32), -1), ((40, 50), 0)):
        x = rng.standard_normal(shape).astype(dtype)
        w, b = (3 * rng.standard_normal((2, shape[axis])) + 4).astype(weight_dtype)
        dy = (3 * rng.standard_normal(shape) + 4).astype(weight_dtype)
        real = arithmetic(dtype)
        for norm in NORMS:
            affine = (w, b) if is_centered(norm) else (w,)
            y, *statistics = forward_of(norm)(x, *affine, axis=axis)
            assert_same_bits(y, norm(x, *[p.astype(real) for p in affine], axis=axis))
            dx, *params = backward_of(norm)(dy, x, *statistics, w, axis=axis)
            # A float64 weight shows the sums before they are rounded.
            wide_dx, *sums = backward_of(norm)(dy.astype(real), x, *statistics, w.astype(real).astype(float), axis=axis)
            assert_same_bits(dx, wide_dx)
            for p, total in zip(params, sums, strict=True):
                rounded = round_to(total, p.dtype) if p.dtype in NARROW_FLOATS else total.astype(p.dtype)
                np.testing.assert_array_equal(p.astype(float), rounded)


@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_integers_and_bool_are_computed_as_float64(norm, dtype):
    """D01: x, dy, weight and bias; in any layout; the extremes of the dtype too."""
    largest = 1 if dtype.kind == "b" else np.iinfo(dtype).max
    smallest = 0 if dtype.kind in "bu" else np.iinfo(dtype).min
    a = np.resize(np.array([1, 0, 1, 1, 0, largest, smallest], dtype), (5, 33))
    wide = a.astype(np.float64)
    for x in (a, np.asfortranarray(a), a[::2, ::-1], np.resize(a, (50, 60)), a.astype(dtype.newbyteorder("S"))):
        for axis in (0, 1):
            y, *statistics = forward_of(norm)(x, axis=axis)
            assert_same_bits((y, *statistics), forward_of(norm)(x.astype(np.float64), axis=axis))
    assert_same_bits(norm(wide, a[0]), norm(wide, wide[0]))
    got = gradients(norm, a, a, a[0])
    assert_same_bits(got, gradients(norm, wide, wide, wide[0]))
    assert all(g.dtype == np.float64 for g in got)


def test_integers_one_two_three():
    """D01, as reported."""
    for dtype in (np.int32, np.uint8, int):
        np.testing.assert_allclose(
            fastnorm.layer_norm(np.array([1, 2, 3], dtype)), [-1.2247357, 0, 1.2247357], rtol=1e-6
        )


def test_lists_and_tuples_are_arrays():
    rows = [[1.0, 2.0, 4.0], [3.0, 1.0, 2.0]]
    x = np.array(rows)
    for norm in NORMS:
        assert_same_bits(norm(rows), norm(x))
        assert_same_bits(norm(tuple(map(tuple, rows)), weight=[1, 2, 3]), norm(x, np.array([1.0, 2, 3])))
        statistics = forward_of(norm)(x)[1:]
        assert_same_bits(
            backward_of(norm)(rows, rows, *statistics, [1.0, 2.0, 3.0]),
            backward_of(norm)(x, x, *statistics, np.array([1.0, 2.0, 3.0])),
        )
        assert_same_bits(
            backward_of(norm)(rows, rows, *[s.tolist() for s in statistics], out=np.empty((2, 3))),
            backward_of(norm)(x, x, *statistics),
        )
    assert_same_bits(fastnorm.layer_norm([1, 2, 3]), fastnorm.layer_norm(np.array([1.0, 2, 3])))


@pytest.mark.parametrize("scalar", [3, 3.0, True, np.float32(3), np.float64(3), np.array(3.0), np.array(3)], ids=repr)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_scalars_have_no_axis(norm, scalar):
    for axis in (-1, 0, None):
        with pytest.raises(np.exceptions.AxisError):
            norm(scalar, axis=axis)


def test_subclasses_come_back_as_plain_arrays(rng, tmp_path):
    """L03: memory maps, read-only ones too, and the subclasses of others."""

    class Tagged(np.ndarray):
        pass

    x = rng.standard_normal((20, 16)).astype(np.float32)
    x.tofile(tmp_path / "x.bin")
    for view in (np.memmap(tmp_path / "x.bin", np.float32, "r", shape=x.shape), x.view(Tagged), x.view(np.recarray)):
        for norm in NORMS:
            y, *statistics = forward_of(norm)(view, view[0])
            assert type(y) is np.ndarray and all(type(s) is np.ndarray for s in statistics)
            assert_same_bits(y, norm(x, x[0]))
            results = backward_of(norm)(view, view, *[s.view(Tagged) for s in statistics], view[0])
            assert all(type(r) is np.ndarray for r in results)
            assert_same_bits(results, backward_of(norm)(x, x, *statistics, x[0]))


def test_out_may_be_a_memory_map(rng, tmp_path):
    x = rng.standard_normal((20, 16)).astype(np.float32)
    out = np.memmap(tmp_path / "y.bin", np.float32, "w+", shape=x.shape)
    assert fastnorm.layer_norm(x, out=out) is out
    out.flush()
    assert_same_bits(np.fromfile(tmp_path / "y.bin", np.float32).reshape(x.shape), fastnorm.layer_norm(x))


def test_masked_arrays_and_matrices_are_refused():
    """D03: never compute with the values under a mask."""
    masked = np.ma.array([[1.0, 999.0, 3.0]], mask=[[False, True, False]])
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix([[1.0, 2.0, 3.0]])
    x = np.ones((1, 3))
    for bad in (masked, matrix):
        for norm in NORMS:
            statistics = forward_of(norm)(x)[1:]
            for name, call in {
                "x": lambda norm=norm, bad=bad: norm(bad),
                "weight": lambda norm=norm, bad=bad: norm(x, bad),
                "out": lambda norm=norm, bad=bad: norm(x, out=bad),
                "dy": lambda norm=norm, bad=bad, s=statistics: backward_of(norm)(bad, x, *s),
                "rstd": lambda norm=norm, bad=bad, s=statistics: backward_of(norm)(x, x, *s[:-1], bad[:, :1]),
            }.items():
                with pytest.raises(TypeError, match=f"^{name}: "):
                    call()
    assert masked.data.tolist() == [[1.0, 999.0, 3.0]]


def test_bfloat16_is_recognised(rng):
    """D05: its kind is V, and no NumPy float is its parent."""
    x = rng.standard_normal((4, 64)).astype(BFLOAT16)
    y = fastnorm.layer_norm(x)
    assert y.dtype == BFLOAT16
    np.testing.assert_allclose(y.astype(float), exact(fastnorm.layer_norm, x).astype(float), rtol=2.0**-8, atol=1e-6)
    with pytest.raises(TypeError, match="^x: "):
        fastnorm.layer_norm(np.zeros((2, 2), "V2"))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=name_of)
@pytest.mark.parametrize("axis", [0, 1])
def test_every_16_bit_number_is_read_right(dtype, axis):
    """A row of one value twice: rms_norm gives back the bits of x if nothing is added and the scale is one."""
    patterns = np.arange(2**16, dtype=np.uint16).view(dtype)
    finite = patterns[np.isfinite(patterns.astype(np.float32))]
    x = np.stack([finite, finite], axis=axis)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        expected = np.where(wide == 0, wide, np.copysign(1.0, wide))
    y = fastnorm.rms_norm(x, axis=axis, eps=0.0)
    np.testing.assert_array_equal(y.astype(float), expected)
    # And written right: the values of a bias, where x is centred away.
    zeros = np.zeros((3, finite.size), dtype)
    for out in (None, np.empty(zeros.shape, dtype), np.empty(zeros.shape[::-1], dtype).T):
        y = fastnorm.layer_norm(zeros, None, finite, out=out)
        np.testing.assert_array_equal(y.astype(float), np.broadcast_to(finite.astype(float), zeros.shape))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=name_of)
def test_float32_results_are_rounded_to_the_nearest_16_bit_number(dtype, rng):
    """Ties to even, overflow to infinity, subnormals, NaN: as the casts of NumPy and ml_dtypes have them."""
    edges = rng.integers(0, 2**32, 40_000, dtype=np.uint32)
    edges[::3] = edges[::3] & np.uint32(0xFFFF0000) | 0x8000  # the middle of two bfloat16 numbers
    edges[1::3] = edges[1::3] & np.uint32(0xFFFFE000) | 0x1000  # and of two float16 ones
    b = edges.view(np.float32)
    b[::5] = rng.uniform(-7e4, 7e4, b[::5].shape)
    b[1::5] = rng.uniform(-1e-4, 1e-4, b[1::5].shape)
    for shape in ((2, b.size), (2, 13)):
        with np.errstate(all="ignore"):
            expected = b[: shape[1]].astype(dtype).astype(np.float32)
        y = fastnorm.layer_norm(np.zeros(shape, dtype), None, b[: shape[1]])
        # -0 comes from the bias plus 0 as +0.
        np.testing.assert_array_equal(y.astype(np.float32), np.broadcast_to(expected, shape))
