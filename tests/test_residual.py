"""The residual forms: h = x + alpha * residual and its norm, forward and backward."""

import numpy as np
import pytest
from helpers import (
    BFLOAT16,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    WIDE_FLOATS,
    arithmetic,
    assert_rounded_once,
    assert_same_bits,
    capped,
    errors_in_ulp,
    name_of,
)

import fastnorm
from fastnorm import reference

FUSED = [fastnorm.add_layer_norm, fastnorm.add_rms_norm]
every_fused = pytest.mark.parametrize("fused", FUSED, ids=name_of)
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
# Rows that are short, of several blocks, long enough for several threads; next to each other in memory; several axes.
SHAPES = capped([(7, 33), (5, 1000), (3, 5000), (2, 70_001), (1, 1), (600, 64)])
ACROSS = capped([((300, 70), 0), ((3, 1100, 65), 1), ((40, 7, 100), (0, 2)), ((50, 33), 0)])
CASES = [(shape, -1) for shape in SHAPES] + ACROSS


def is_centered(fused):
    return fused.__name__ == "add_layer_norm"


def norm_of(fused):
    return fastnorm.layer_norm if is_centered(fused) else fastnorm.rms_norm


def of(fused, ending):
    return getattr(fastnorm, fused.__name__ + ending)


def unfused_of(fused, ending):
    return getattr(fastnorm, fused.__name__.removeprefix("add_") + ending)


def parameters(fused, rng, shape, dtype):
    """weight, and bias if there is one."""
    return tuple(rng.standard_normal((2 if is_centered(fused) else 1, *shape)).astype(dtype))


def normalized_shape(shape, axis):
    return [shape[a] for a in (axis if isinstance(axis, tuple) else (axis,))]


def added(x, residual, alpha, dtype=None):
    """x + alpha * residual as the contract has it: product and sum rounded in the arithmetic type, then stored."""
    dtype = dtype or residual.dtype
    real = np.result_type(*(arithmetic(d) for d in (x.dtype, residual.dtype, dtype))).type
    return (x.astype(real) + real(alpha) * residual.astype(real)).astype(dtype)


@pytest.mark.parametrize("alpha", [1.0, 0.7, -3.0, 0.0, 2])
@every_dtype
@every_fused
def test_fused_is_unfused_bit_for_bit(fused, dtype, alpha, rng):
    """F01: statistics are those of h as it is stored, in every path."""
    for shape, axis in CASES:
        x, residual = rng.standard_normal((2, *shape)).astype(dtype)
        affine = parameters(fused, rng, normalized_shape(shape, axis), dtype)
        h = added(x, residual, alpha)
        y, *statistics = unfused_of(fused, "_forward")(h, *affine, axis=axis)
        expected = (y, h, *statistics)
        assert_same_bits(of(fused, "_forward")(x, residual, *affine, alpha=alpha, axis=axis), expected)
        assert_same_bits(fused(x, residual, *affine, alpha=alpha, axis=axis), expected[:2])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(np.float32)], ids=name_of)
@every_fused
def test_memory_layout_does_not_change_the_bits(fused, dtype, layout, rng):
    for shape, axis in (((40, 70), -1), ((100, 48), 0), ((3, 40, 50), 1), ((2, 1100), -1), ((6, 5, 40), (0, 2))):
        x, residual, dy, dh = rng.standard_normal((4, *shape)).astype(dtype)
        affine = parameters(fused, rng, normalized_shape(shape, axis), dtype)
        plain = of(fused, "_forward")(x, residual, *affine, alpha=0.3, axis=axis)
        for a, b in ((layout(x), residual), (x, layout(residual)), (layout(x), layout(residual))):
            assert_same_bits(of(fused, "_forward")(a, b, *affine, alpha=0.3, axis=axis), plain)
        _, h, *statistics = plain
        gradients = of(fused, "_backward")(dy, dh, h, *statistics, affine[0], alpha=0.3, axis=axis)
        for a, b, c in (
            (layout(dy), dh, h),
            (dy, layout(dh), h),
            (dy, dh, layout(h)),
            [layout(i) for i in (dy, dh, h)],
        ):
            again = of(fused, "_backward")(a, b, c, *statistics, affine[0], alpha=0.3, axis=axis)
            assert_same_bits(again, gradients)


@pytest.mark.parametrize("residual_dtype", FLOATS + INTEGERS[:3], ids=name_of)
@pytest.mark.parametrize("x_dtype", FLOATS + INTEGERS[:3], ids=name_of)
@every_fused
def test_dtypes_of_x_and_residual_may_differ(fused, x_dtype, residual_dtype, rng):
    x, residual = 3 * rng.standard_normal((2, 20, 130))
    x, residual = x.astype(x_dtype), residual.astype(residual_dtype)
    h_dtype = residual_dtype if residual_dtype in FLOATS else np.dtype(np.float64)
    y_dtype = x_dtype if x_dtype in FLOATS else np.dtype(np.float64)
    y, h, *statistics = of(fused, "_forward")(x, residual, alpha=1.3)
    assert_same_bits(h, added(x, residual, 1.3, h_dtype))
    assert y.dtype == y_dtype and all(s.dtype == arithmetic(h_dtype) for s in statistics)
    assert_same_bits(y, norm_of(fused)(h, out=np.empty(h.shape, y_dtype)))
    for s, t in zip(statistics, unfused_of(fused, "_forward")(h)[1:], strict=True):
        assert_same_bits(s, t)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@every_fused
def test_results_have_the_dtype_of_out_and_residual_out(fused, dtype, rng):
    x, residual = rng.standard_normal((2, 9, 40)).astype(np.float32)
    out, residual_out = np.empty((9, 40), dtype), np.empty((9, 40), dtype)
    y, h = fused(x, residual, out=out, residual_out=residual_out)
    assert y is out and h is residual_out
    assert_same_bits(h, added(x, residual, 1.0, dtype))
    assert_same_bits(y, norm_of(fused)(h))


@every_dtype
@every_fused
def test_gradients_are_those_of_the_norm_and_what_arrives_at_h(fused, dtype, rng):
    for shape, axis in CASES:
        dy, dh, h = rng.standard_normal((3, *shape)).astype(dtype)
        w = parameters(fused, rng, normalized_shape(shape, axis), dtype)[0]
        _, *statistics = unfused_of(fused, "_forward")(h, axis=axis)
        plain, *plain_sums = unfused_of(fused, "_backward")(dy, h, *statistics, w, axis=axis)
        backward = of(fused, "_backward")
        for alpha in (1.0, 0.81):
            dx, dresidual, *sums = backward(dy, dh, h, *statistics, w, alpha=alpha, axis=axis)
            for a, b in zip(sums, plain_sums, strict=True):
                assert_same_bits(a, b)
            alone, alone_residual, *_ = backward(dy, None, h, *statistics, w, alpha=alpha, axis=axis)
            assert_same_bits(alone, plain)
            if dtype in WIDE_FLOATS:
                assert_same_bits(dx, plain + dh)
                assert_same_bits(dresidual, dtype.type(alpha) * dx)
                assert_same_bits(alone_residual, dtype.type(alpha) * plain)
            else:
                # One rounding of what is right to a few units of float32.
                exact = getattr(reference, backward.__name__)(dy, dh, h, w, alpha=alpha, axis=axis, rstd=statistics[-1])
                slack = 40 * np.spacing(np.abs(exact[0]).max().astype(np.float32)).astype(np.float64)
                assert_rounded_once(dx, exact[0], slack)
                assert_rounded_once(dresidual, exact[1], slack)
            none = backward(dy, dh, h, *statistics, w, alpha=alpha, axis=axis, param_grads=False)
            assert_same_bits(none[:2], (dx, dresidual))
            assert none[2:] == (None,) * len(sums)


@pytest.mark.parametrize("alpha", [1.0, 2.5])
@every_fused
def test_dx_and_dresidual_are_never_the_same_object(fused, alpha, rng):
    x, residual, dy = rng.standard_normal((3, 4, 8))
    _, h, *statistics = of(fused, "_forward")(x, residual, alpha=alpha)
    for dh in (None, dy):
        dx, dresidual, *_ = of(fused, "_backward")(dy, dh, h, *statistics, alpha=alpha)
        assert not np.shares_memory(dx, dresidual)
        kept = dresidual.copy()
        dx += 1
        assert_same_bits(dresidual, kept)


@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@every_fused
def test_gradients_are_within_their_bounds(fused, dtype, rng):
    for n in capped([33, 1000, 70_001]):
        x, residual, dy, dh = rng.standard_normal((4, 3, n)).astype(dtype)
        w = rng.standard_normal(n).astype(dtype)
        _, h, *statistics = of(fused, "_forward")(x, residual, alpha=0.5)
        dx, dresidual, *_ = of(fused, "_backward")(dy, dh, h, *statistics, w, alpha=0.5)
        exact = getattr(reference, of(fused, "_backward").__name__)(dy, dh, h, w, alpha=0.5, rstd=statistics[-1])
        scale = np.abs(statistics[-1] * dy * w).max(axis=-1, keepdims=True) + np.abs(dh)
        assert errors_in_ulp(dx, exact[0], scale, dtype) <= 4
        assert errors_in_ulp(dresidual, exact[1], 0.5 * scale, dtype) <= 4


@pytest.mark.parametrize("axis", [-1, 0, (0, 2)], ids=str)
@every_fused
def test_gradients_agree_with_central_differences(fused, axis, rng):
    shape = (4, 3, 5)
    x, residual, dy, dh = rng.standard_normal((4, *shape))
    affine = parameters(fused, rng, normalized_shape(shape, axis), np.float64)
    options = {"alpha": 1.7, "axis": axis}

    def loss(x, residual):
        y, h = fused(x, residual, *affine, **options)
        return (y * dy).sum() + (h * dh).sum()

    _, h, *statistics = of(fused, "_forward")(x, residual, *affine, **options)
    dx, dresidual, *_ = of(fused, "_backward")(dy, dh, h, *statistics, affine[0], **options)
    for _ in range(5):
        step = 1e-6 * rng.standard_normal(shape)
        for gradient, difference in (
            (dx, loss(x + step, residual) - loss(x - step, residual)),
            (dresidual, loss(x, residual + step) - loss(x, residual - step)),
        ):
            np.testing.assert_allclose((gradient * step).sum() * 2, difference, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("dy_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("h_dtype", FLOATS, ids=name_of)
def test_dx_has_the_dtype_of_dy_and_dresidual_that_of_h(h_dtype, dy_dtype, rng):
    dy, dh = rng.standard_normal((2, 6, 50)).astype(dy_dtype)
    h = rng.standard_normal((6, 50)).astype(h_dtype)
    for fused in FUSED:
        statistics = unfused_of(fused, "_forward")(h)[1:]
        dx, dresidual, *_ = of(fused, "_backward")(dy, dh, h, *statistics)
        assert dx.dtype == dy_dtype and dresidual.dtype == h_dtype
        exact = getattr(reference, of(fused, "_backward").__name__)(dy, dh, h)
        for result, value in ((dx, exact[0]), (dresidual, exact[1])):
            tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5}.get(result.dtype.name, 1e-13)
            tolerance = max(tolerance, 1e-5 if arithmetic(h_dtype) == np.float32 else 0)
            np.testing.assert_allclose(result.astype(np.float64), value.astype(np.float64), rtol=0, atol=5 * tolerance)
        out = np.empty((6, 50), np.float64)
        assert of(fused, "_backward")(dy, dh, h, *statistics, out=out)[0] is out


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@every_fused
def test_any_number_of_threads_gives_the_same_bits(fused, n, rng, threads):
    for shape, axis in capped([((2000, 64), -1), ((3, 70_001), -1), ((90, 1111), 0)]):
        x, residual, dy, dh = rng.standard_normal((4, *shape)).astype(np.float32)
        threads(1)
        y, h, *statistics = of(fused, "_forward")(x, residual, axis=axis, alpha=0.5)
        gradients = of(fused, "_backward")(dy, dh, h, *statistics, axis=axis, alpha=0.5)
        threads(n)
        assert_same_bits(of(fused, "_forward")(x, residual, axis=axis, alpha=0.5), (y, h, *statistics))
        assert_same_bits(of(fused, "_backward")(dy, dh, h, *statistics, axis=axis, alpha=0.5), gradients)


# ---- rows that need more than the plain way, and results that replace arguments -----------------------


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@every_fused
def test_sums_that_are_scaled_or_centred_anew_are_added_up_once(fused, dtype, n_threads, rng, threads):
    """Where h lies in place of residual, adding up again what is summed again would be wrong."""
    largest = 1e38 if dtype == np.float32 else 1e306
    threads(n_threads)
    for shape, axis in capped([((70, 100), -1), ((100, 70), 0), ((3, 70_001), -1), ((70, 1500), -1), ((6, 9), -1)]):
        residual = rng.standard_normal(shape) + 5
        rows = residual if axis == -1 else residual.T
        rows[0::5, 0] = 1e9
        rows[1::7] *= 1e-30
        rows[2::6] = np.clip(rows[2::6] * 0.1, -1, 1) * largest
        residual = residual.astype(dtype)
        x = np.abs(rng.standard_normal(shape)).astype(dtype)
        h = added(x, residual, 0.5)
        y, *statistics = unfused_of(fused, "_forward")(h, axis=axis, eps=1e-20)
        expected = (y, h, *statistics)
        assert_same_bits(of(fused, "_forward")(x, residual, alpha=0.5, axis=axis, eps=1e-20), expected)
        a, b = x.copy(), residual.copy()
        in_place = of(fused, "_forward")(a, b, alpha=0.5, axis=axis, eps=1e-20, out=a, residual_out=b)
        assert in_place[0] is a and in_place[1] is b
        assert_same_bits(in_place, expected)


@every_dtype
@every_fused
def test_results_may_go_into_the_arguments(fused, dtype, rng):
    for shape, axis in capped([((20, 70), -1), ((100, 48), 0), ((6, 5, 40), (0, 2)), ((2, 70_001), -1)]):
        x, residual, dy, dh = rng.standard_normal((4, *shape)).astype(dtype)
        expected = fused(x, residual, alpha=2.0, axis=axis)
        for y_name, h_name in (
            ("x", "residual"),
            ("residual", "x"),
            ("x", None),
            ("residual", None),
            (None, "x"),
            (None, "residual"),
        ):
            here = {"x": x.copy(), "residual": residual.copy(), None: None}
            result = fused(
                here["x"], here["residual"], alpha=2.0, axis=axis, out=here[y_name], residual_out=here[h_name]
            )
            assert_same_bits(result, expected)
        _, h, *statistics = of(fused, "_forward")(x, residual, axis=axis)
        expected = of(fused, "_backward")(dy, dh, h, *statistics, axis=axis, alpha=3.0)
        for name in ("dy", "dh", "h"):
            here = {"dy": dy.copy(), "dh": dh.copy(), "h": h.copy()}
            result = of(fused, "_backward")(*here.values(), *statistics, axis=axis, alpha=3.0, out=here[name])
            assert result[0] is here[name]
            assert_same_bits(result, expected)


@every_fused
def test_results_that_overlap_arguments_in_part_are_right(fused, rng):
    memory = rng.standard_normal((30, 40)).astype(np.float32)
    other = rng.standard_normal((20, 40)).astype(np.float32)
    w = np.linspace(1, 2, 40, dtype=np.float32)
    for move in (1, 5, 10):
        expected = fused(memory[:20], other, w)
        for option in ("out", "residual_out"):
            here = memory.copy()
            result = fused(here[:20], other, w, **{option: here[move : move + 20]})
            assert_same_bits(result, expected)
            here = memory.copy()
            result = fused(other, here[:20], w, **{option: here[move : move + 20]})
            assert_same_bits(result, fused(other, memory[:20], w))
    _, h, *statistics = of(fused, "_forward")(memory[:20], other)
    expected = of(fused, "_backward")(other, memory[:20], h, *statistics)
    here = memory.copy()
    assert_same_bits(of(fused, "_backward")(other, here[:20], h, *statistics, out=here[3:23]), expected)
    # A result over the weight.
    here = np.concatenate([w, rng.standard_normal(800).astype(np.float32)])
    expected = fused(other, other, w)
    result = fused(other, other, here[:40], residual_out=here[:800].reshape(20, 40))
    assert_same_bits(result, expected)


@every_fused
def test_results_that_interleave_do_not_overlap(fused, rng):
    x, residual = rng.standard_normal((2, 4, 8)).astype(np.float32)
    memory = np.zeros((4, 16), np.float32)
    y, h = fused(x, residual, out=memory[:, :8], residual_out=memory[:, 8:])
    assert_same_bits((y.copy(), h.copy()), fused(x, residual))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=name_of)
def test_a_sum_of_float64_is_rounded_to_16_bits_once(dtype):
    """A hair above a tie, which goes the wrong way by way of float32."""
    tie = 1 + 2.0 ** (-11 if dtype == np.float16 else -8)
    x = np.array([[tie + 2.0**-40, 2.0, 3.0]])
    for residual, options in ((np.zeros(x.shape, dtype), {}), (0 * x, {"residual_out": np.empty(x.shape, dtype)})):
        _, h = fastnorm.add_rms_norm(x, residual, **options)
        assert float(h[0, 0]) == 1 + 2 * (tie - 1)


@every_fused
def test_nan_and_infinity_stay_in_their_row(fused, rng):
    for shape, axis in (((9, 100), -1), ((100, 40), 0)):
        x, residual = rng.standard_normal((2, *shape)).astype(np.float32)
        clean = fused(x, residual, axis=axis)
        a, b = x.copy(), residual.copy()
        a[(2, 5) if axis == -1 else (5, 2)] = np.nan
        b[(4, 7) if axis == -1 else (7, 4)] = np.inf
        y, h = fused(a, b, axis=axis)
        if axis == 0:
            y, h, clean = y.T, h.T, tuple(c.T for c in clean)
        bad = np.isin(np.arange(len(y)), (2, 4))
        assert np.isnan(y[bad]).any(axis=1).all()
        assert_same_bits(y[~bad], clean[0][~bad])
        assert_same_bits(h[~bad], clean[1][~bad])


# ---- empty, and refused ------------------------------------------------------------------------------


@every_dtype
@every_fused
def test_empty_arrays(fused, dtype):
    for shape, axis in (((0, 8), -1), ((8, 0), 0), ((3, 0), -1), ((0,), 0)):
        x = np.empty(shape, dtype)
        y, h, *statistics = of(fused, "_forward")(x, x, axis=axis)
        assert y.shape == h.shape == shape and y.dtype == h.dtype == dtype
        _, *expected = unfused_of(fused, "_forward")(x, axis=axis)
        for s, t in zip(statistics, expected, strict=True):
            assert_same_bits(s, t)
        for dh in (x, None):
            dx, dresidual, *sums = of(fused, "_backward")(x, dh, h, *statistics, axis=axis)
            assert dx.shape == dresidual.shape == shape and not any(s.astype(float).any() for s in sums)


def refuses(call, error, *texts, arrays):
    before = [a.tobytes() for a in arrays]
    with pytest.raises(error) as caught:
        call()
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {str(caught.value)!r}"
    assert [a.tobytes() for a in arrays] == before, "an array was changed"


@every_fused
def test_bad_arguments_are_refused_by_name_and_change_nothing(fused, rng):
    x, residual, out, residual_out = rng.standard_normal((4, 4, 8)).astype(np.float32)
    good = {"x": x, "residual": residual, "out": out, "residual_out": residual_out}
    for error, texts, replaced in (
        (ValueError, ["residual: shape (4, 7)", "x has shape (4, 8)"], {"residual": residual[:, :7]}),
        (ValueError, ["residual: shape (8,)"], {"residual": residual[0]}),
        (TypeError, ["alpha: expected a number"], {"alpha": "2"}),
        (TypeError, ["alpha: expected a number"], {"alpha": None}),
        (ValueError, ["alpha: expected a finite number"], {"alpha": np.nan}),
        (ValueError, ["alpha: expected a finite number"], {"alpha": np.inf}),
        (ValueError, ["residual_out: shape (4, 7)"], {"residual_out": residual_out[:, :7]}),
        (TypeError, ["residual_out:", "same_kind"], {"residual_out": np.empty((4, 8), int)}),
        (TypeError, ["residual_out: return arrays must be"], {"residual_out": [[1.0] * 8] * 4}),
        (ValueError, ["out, residual_out: they overlap"], {"residual_out": out}),
        (ValueError, ["out, residual_out: they overlap"], {"out": x, "residual_out": x}),
        (ValueError, ["eps"], {"eps": -1.0}),
        (ValueError, ["weight: shape (4,)"], {"weight": np.ones(4, np.float32)}),
        (np.exceptions.AxisError, ["axis"], {"axis": 2}),
    ):
        arguments = {**good, **replaced}
        refuses(lambda a=arguments: fused(**a), error, *texts, arrays=list(good.values()))
    # The two results may not overlap in part either.
    memory = np.zeros((7, 8), np.float32)
    refuses(
        lambda: fused(x, residual, out=memory[:4], residual_out=memory[3:]), ValueError, "overlap", arrays=[x, memory]
    )


@every_fused
def test_what_only_numpy_has_is_refused_by_name(fused, rng):
    x, residual = rng.standard_normal((2, 4, 8))
    frozen = residual.copy()
    frozen.flags.writeable = False
    for error, text, arguments in (
        (TypeError, "residual:", {"residual": np.ma.masked_array(residual)}),
        (TypeError, "residual:", {"residual": None}),
        (TypeError, "residual: dtype complex128", {"residual": residual.astype(complex)}),
        (ValueError, "residual_out: output array is read-only", {"residual": residual, "residual_out": frozen}),
    ):
        refuses(lambda a=arguments: fused(x, **a), error, text, arrays=[x, residual, frozen])
    assert_same_bits(fused(x, frozen), fused(x, residual))


@every_fused
def test_bad_arguments_of_backward_are_refused_by_name_and_change_nothing(fused, rng):
    dy, dh, h, out = rng.standard_normal((4, 4, 8)).astype(np.float32)
    statistics = dict(
        zip(("mean", "rstd") if is_centered(fused) else ("rstd",), unfused_of(fused, "_forward")(h)[1:], strict=True)
    )
    good = {"dy": dy, "dh": dh, "h": h, **statistics, "out": out}
    for error, texts, replaced in (
        (ValueError, ["dh: shape (4, 7)", "h has shape (4, 8)"], {"dh": dh[:, :7]}),
        (TypeError, ["dh:"], {"dh": dh.astype("U3")}),
        (ValueError, ["dy: shape (8,)", "h has shape (4, 8)"], {"dy": dy[0]}),
        (TypeError, ["h:"], {"h": h.astype(complex)}),
        (ValueError, ["rstd: shape (4,)"], {"rstd": statistics["rstd"].reshape(-1)}),
        (TypeError, ["rstd: dtype float64"], {"rstd": statistics["rstd"].astype(float)}),
        (ValueError, ["out: shape (4, 7)", "h has shape (4, 8)"], {"out": out[:, :7]}),
        (ValueError, ["alpha: expected a finite number"], {"alpha": -np.inf}),
        (TypeError, ["alpha: expected a number"], {"alpha": [1.0]}),
    ):
        arguments = {**good, **replaced}
        refuses(lambda a=arguments: of(fused, "_backward")(**a), error, *texts, arrays=list(good.values()))


def test_weight_offset_belongs_to_rms_norm(rng):
    x, residual, dy = rng.standard_normal((3, 5, 30)).astype(np.float32)
    w = rng.standard_normal(30).astype(np.float32)
    y, h, rstd = fastnorm.add_rms_norm_forward(x, residual, w, weight_offset=1.0)
    assert_same_bits(y, fastnorm.rms_norm(h, w, weight_offset=1.0))
    dx, *_ = fastnorm.add_rms_norm_backward(dy, None, h, rstd, w, weight_offset=1.0)
    assert_same_bits(dx, fastnorm.rms_norm_backward(dy, h, rstd, w, weight_offset=1.0)[0])
    with pytest.raises(ValueError, match="weight_offset"):
        fastnorm.add_rms_norm(x, residual, weight_offset=1.0)


def test_lists_and_bfloat16_streams(rng):
    y, h = fastnorm.add_layer_norm([[1.0, 2.0]], [[1, 1]])
    assert_same_bits(h, np.array([[2.0, 3.0]]))
    # A network in float32 around a stream in bfloat16: each array keeps its own dtype.
    x, residual = rng.standard_normal((2, 3, 64))
    y, h = fastnorm.add_rms_norm(x.astype(np.float32), residual.astype(BFLOAT16))
    assert y.dtype == np.float32 and h.dtype == BFLOAT16
