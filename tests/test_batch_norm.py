"""batch_norm: channels normalized over all other axes, running statistics, forward and backward."""

import signal

import numpy as np
import pytest
from helpers import (
    BFLOAT16,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    NARROW_FLOATS,
    WIDE_FLOATS,
    arithmetic,
    assert_rounded_once,
    assert_same_bits,
    capped,
    errors_in_ulp,
    name_of,
)

import fastnorm
from fastnorm import batch_norm, batch_norm_backward, batch_norm_forward, reference

AxisError = np.exceptions.AxisError
every_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
every_wide_dtype = pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
# (shape, axis): matrices, runs short and long and of several blocks, channels last, few channels of many values and
# many of few, the first axis.
CASES = capped(
    [
        ((64, 33), 1),
        ((9, 200), 1),
        ((8, 3, 7), 1),
        ((4, 6, 5, 5), 1),
        ((8, 4, 31, 33), 1),
        ((3, 40, 2000), 1),
        ((6, 5, 7, 64), -1),
        ((6, 9, 7, 3), -1),
        ((2, 3, 4, 5, 2), 2),
        ((2, 2, 30_000), 1),
        ((3000, 40), 1),
        ((40_000, 2), 1),
        ((5, 6, 4), 0),
    ]
)


def channels_first(a, axis):
    """(n_channels, values) of an array of the shape of x or of its statistics."""
    a = np.moveaxis(a, axis, 0)
    return a.reshape(len(a), -1)


def data(rng, shape, axis, dtype, mean=3.0):
    x = rng.standard_normal(shape) + mean
    w, b = rng.standard_normal((2, shape[axis]))
    return x.astype(dtype), w.astype(dtype), b.astype(dtype)


def everything(x, dy, w, b, running=None, **options):
    """All results of training and evaluation, forward and backward, running arrays included."""
    running = (np.zeros(len(w)), np.ones(len(w))) if running is None else running
    results = {}
    for training in (True, False):
        kept = [a.copy() for a in running]
        y, mean, rstd = batch_norm_forward(x, w, b, *kept, training=training, **options)
        grads = batch_norm_backward(dy, x, mean, rstd, w, training=training, **{"axis": options.get("axis", 1)})
        for name, a in zip(
            ("y", "mean", "rstd", "dx", "dweight", "dbias", "running_mean", "running_var"),
            (y, mean, rstd, *grads, *kept),
            strict=True,
        ):
            results[f"{name} {'train' if training else 'eval'}"] = a
    return results


# ---- accuracy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [0.0, 3.0, 1e4])
@every_wide_dtype
def test_training_is_within_its_bounds(dtype, mean, rng):
    for shape, axis in CASES:
        x, w, b = data(rng, shape, axis, dtype, mean)
        y, m, rstd = batch_norm_forward(x, training=True, axis=axis)
        exact, exact_mean, exact_rstd = reference.batch_norm_forward(x, training=True, axis=axis)
        assert m.dtype == rstd.dtype == dtype and m.shape == rstd.shape == exact_mean.shape
        exact_rows = channels_first(exact, axis)
        assert errors_in_ulp(channels_first(y, axis), exact_rows, exact_rows, dtype) <= 4
        spread = (np.abs(exact_mean) + 1 / exact_rstd).reshape(-1, 1)
        assert errors_in_ulp(m.reshape(-1, 1), exact_mean.reshape(-1, 1), spread, dtype) <= 1
        assert errors_in_ulp(rstd.reshape(-1, 1), exact_rstd.reshape(-1, 1), exact_rstd.reshape(-1, 1), dtype) <= 2
        # With weight and bias: three more roundings, of numbers no larger than these.
        affine = batch_norm(x, w, b, training=True, axis=axis)
        exact = channels_first(reference.batch_norm(x, w, b, training=True, axis=axis), axis)
        scale = np.abs(exact_rows).max(axis=1, keepdims=True) * np.abs(w.reshape(-1, 1)) + np.abs(b.reshape(-1, 1))
        assert errors_in_ulp(channels_first(affine, axis), exact, scale, dtype) <= 5


def adversarial(dtype, n, rng):
    """Channels that break one-pass and float32 sums: name -> values."""
    huge = 1e38 if dtype == np.float32 else 1e300
    yield "outlier first", np.r_[1e6, rng.standard_normal(n - 1)]
    yield "outlier last", np.r_[rng.standard_normal(n - 1), 1e6]
    yield "sorted", np.sort(rng.standard_normal(n)) + 100
    yield "trend", np.linspace(0, 1e4, n)
    yield "half constant", np.r_[np.full(n // 2, 5.0), rng.standard_normal(n - n // 2)]
    yield "huge", rng.uniform(-1, 1, n) * huge
    yield "tiny", rng.standard_normal(n) * 1e-30


@pytest.mark.parametrize("layout", ["runs", "last"])
@every_wide_dtype
def test_named_families_are_within_their_bounds(dtype, layout, rng):
    n = 4 * 700
    families = dict(adversarial(dtype, n, rng))
    channels = np.array(list(families.values())).astype(dtype)
    eps = 0.0
    if layout == "runs":
        x, axis = np.ascontiguousarray(channels.reshape(len(channels), 4, 700).transpose(1, 0, 2)), 1
    else:
        # Enough channels to go across them.
        x, axis = np.ascontiguousarray(np.tile(channels, (6, 1)).T), 1
    y = channels_first(batch_norm(x, training=True, axis=axis, eps=eps), axis)[: len(channels)]
    exact = reference.layer_norm(channels, eps=eps)
    for name, result, value in zip(families, y, exact, strict=True):
        assert errors_in_ulp(result[None], value[None], value[None], dtype) <= 4, name


@pytest.mark.parametrize("dtype", NARROW_FLOATS, ids=name_of)
def test_16_bit_results_are_rounded_once(dtype, rng):
    for shape, axis in CASES[:7]:
        x, w, b = data(rng, shape, axis, dtype)
        for training in (True, False):
            running = np.full(len(w), 2.5), np.full(len(w), 1.5)
            y = batch_norm(x, w, b, *running, training=training, axis=axis)
            exact = reference.batch_norm(x, w, b, *running, training=training, axis=axis)
            if training:
                exact = reference.batch_norm(x, w, b, training=True, axis=axis)
            assert_rounded_once(y, exact, 8 * np.spacing(np.abs(exact).max().astype(np.float32)).astype(np.float64))


@pytest.mark.parametrize("value", [1e10, 0.1, -3e-5])
@every_wide_dtype
def test_constant_channels_give_exactly_the_bias(dtype, value, rng):
    """N10's relatives: no variance appears where there is none."""
    for shape, axis in CASES:
        x = np.full(shape, value, dtype)
        b = rng.standard_normal(shape[axis]).astype(dtype)
        for eps in (1e-5, 0.0):
            y, mean, rstd = batch_norm_forward(x, None, b, training=True, axis=axis, eps=eps)
            assert (channels_first(y, axis) == b[:, None]).all()
            assert (mean == dtype.type(value)).all()
            assert np.isinf(rstd).all() if eps == 0 else (rstd == dtype.type(1 / np.sqrt(eps))).all()


@pytest.mark.parametrize("shape", [(1, 1, 1 << 25), (1 << 25, 1), (1 << 13, 1, 1 << 12)], ids=str)
def test_a_long_sum_of_float32_ones_does_not_stall(shape):
    """N10: a float32 running sum stops at 2**24."""
    x, running = np.ones(shape, np.float32), (np.zeros(1, np.float32), np.ones(1, np.float32))
    y, mean, _ = batch_norm_forward(x, None, None, *running, training=True, momentum=1.0)
    assert mean == 1 and running[0] == 1 and running[1] == 0 and not y.any()


# ---- what it is made of --------------------------------------------------------------------------------


@every_dtype
def test_a_channel_is_a_row_of_layer_norm(dtype, rng):
    """The same bits, statistics too: channels first or last, in a batch of channels or alone."""
    for shape, axis in CASES:
        x = data(rng, shape, axis, dtype)[0]
        y, mean, rstd = batch_norm_forward(x, training=True, axis=axis)
        rows, row_mean, row_rstd = fastnorm.layer_norm_forward(channels_first(x, axis))
        assert_same_bits(channels_first(y, axis), rows)
        assert_same_bits((mean.reshape(-1), rstd.reshape(-1)), (row_mean.reshape(-1), row_rstd.reshape(-1)))
        for channel in {0, shape[axis] // 2, shape[axis] - 1}:
            alone = batch_norm(np.take(x, [channel], axis), training=True, axis=axis)
            assert_same_bits(channels_first(alone, axis)[0], rows[channel])


@every_dtype
def test_an_axis_is_the_same_however_the_array_lies(dtype, rng):
    for shape in [s for s, a in CASES if a == 1]:
        x, w, b = data(rng, shape, 1, dtype)
        dy = rng.standard_normal(shape).astype(dtype)
        first = everything(x, dy, w, b)
        last = everything(
            np.ascontiguousarray(np.moveaxis(x, 1, -1)), np.ascontiguousarray(np.moveaxis(dy, 1, -1)), w, b, axis=-1
        )
        for key, value in last.items():
            assert_same_bits(np.moveaxis(value, -1, 1) if value.ndim > 1 else value, first[key])


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(np.float32)], ids=name_of)
def test_memory_layout_does_not_change_the_bits(dtype, layout, rng):
    for shape, axis in (((40, 70), 1), ((3, 5, 8, 9), 1), ((4, 6, 7, 40), -1), ((2, 3, 1500), 1)):
        x, w, b = data(rng, shape, axis, dtype)
        dy = rng.standard_normal(shape).astype(dtype)
        running = rng.random((2, shape[axis])).astype(dtype)
        plain = everything(x, dy, w, b, running, axis=axis)
        changed = everything(layout(x), layout(dy), layout(w), layout(b), [layout(a) for a in running], axis=axis)
        for key, value in plain.items():
            assert_same_bits(np.asarray(changed[key], value.dtype), value)
        assert_same_bits(everything(layout(x), dy, w, b, running, axis=axis), plain)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(n, rng, threads):
    for shape, axis in [
        ((2, 2, 70_000), 1),
        ((1, 2, 70_000), 1),
        ((70_000, 2), 1),
        ((2000, 64), 1),
        ((8, 50, 20, 20), 1),
        ((20, 20, 20, 40), -1),
    ]:
        if not capped([shape]):
            continue
        x, w, b = data(rng, shape, axis, np.float32)
        dy = rng.standard_normal(shape).astype(np.float32)
        threads(1)
        one = everything(x, dy, w, b, axis=axis)
        threads(n)
        for _ in range(3):
            assert_same_bits(everything(x, dy, w, b, axis=axis), one)


@every_dtype
def test_a_norm_and_its_forward_give_the_same_y(dtype, rng):
    x, w, b = data(rng, (6, 4, 9), 1, dtype)
    running = np.ones(4), np.ones(4)
    for options in ({"training": True}, {}):
        assert_same_bits(batch_norm(x, w, b, *running, **options), batch_norm_forward(x, w, b, *running, **options)[0])


@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
def test_integers_are_computed_as_float64(dtype, rng):
    x = (10 * rng.random((6, 4, 5))).astype(dtype)
    w, b = rng.standard_normal((2, 4))
    assert_same_bits(everything(x, x, w, b), everything(x.astype(np.float64), x, w, b))


# ---- running statistics ----------------------------------------------------------------------------------


def test_the_conventions_of_a_small_example():
    """BN1, by hand: biased variance for y, unbiased for the running one, momentum weights the new value."""
    x = np.array([[1.0], [3.0], [5.0]])
    rm, rv = np.array([10.0]), np.array([2.0])
    y = batch_norm(x, None, None, rm, rv, training=True, momentum=0.1, eps=0.0)
    np.testing.assert_allclose(y, (x - 3) / np.sqrt(8 / 3), rtol=1e-15)
    np.testing.assert_allclose([rm[0], rv[0]], [0.9 * 10 + 0.1 * 3, 0.9 * 2 + 0.1 * 4], rtol=1e-15)
    kept = rm.copy(), rv.copy()
    batch_norm(x, None, None, rm, rv)
    batch_norm(x, None, None, rm, rv, training=True, momentum=0.0)
    assert_same_bits((rm, rv), kept)
    batch_norm(x, None, None, rm, rv, training=True, momentum=1.0)
    assert rm == 3 and rv == 4


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1, 0.5])
@pytest.mark.parametrize("running_dtype", FLOATS, ids=name_of)
@every_dtype
def test_running_arrays_are_updated_in_place_and_keep_their_dtype(dtype, running_dtype, momentum, rng):
    for shape, axis in CASES[:7]:
        x = data(rng, shape, axis, dtype)[0]
        rm, rv = (rng.random((2, shape[axis])) + 1).astype(running_dtype)
        exact = reference.running_statistics(x, rm, rv, momentum=momentum, axis=axis)
        batch_norm(x, None, None, rm, rv, training=True, momentum=momentum, axis=axis)
        assert rm.dtype == rv.dtype == running_dtype
        for a, e in zip((rm, rv), exact, strict=True):
            if running_dtype in NARROW_FLOATS:
                # Sums are those of float32 in 16-bit and float32 x, of which the update is rounded once.
                assert_rounded_once(a, e, 8 * np.spacing(np.abs(e).max().astype(np.float32)).astype(np.float64))
            else:
                wider = dtype if dtype in WIDE_FLOATS else np.dtype(np.float32)
                real = wider if wider.itemsize < running_dtype.itemsize else running_dtype
                assert errors_in_ulp(a[:, None], e[:, None], e[:, None], real) <= 4


def test_running_arrays_may_be_strided_byte_swapped_and_views(rng):
    x = rng.standard_normal((30, 5)).astype(np.float32)
    expected = np.zeros(5, np.float32), np.ones(5, np.float32)
    batch_norm(x, None, None, *expected, training=True)
    memory = np.full((2, 10), 7.0, np.float32)
    memory[0, ::2], memory[1, ::2] = 0, 1
    batch_norm(x, None, None, memory[0, ::2], memory[1, ::2], training=True)
    assert_same_bits((memory[0, ::2].copy(), memory[1, ::2].copy()), expected)
    assert (memory[:, 1::2] == 7).all(), "what lies between was written to"


def test_running_arrays_in_the_other_byte_order(rng):
    x = rng.standard_normal((30, 5)).astype(np.float32)
    expected = np.zeros(5, np.float32), np.ones(5, np.float32)
    swapped = [a.astype(a.dtype.newbyteorder()) for a in expected]
    for training in (True, False):
        y = batch_norm(x, None, None, *expected, training=training)
        assert_same_bits(batch_norm(x, None, None, *swapped, training=training), y)
        for a, b in zip(swapped, expected, strict=True):
            assert_same_bits(a.astype(b.dtype), b)


@every_dtype
def test_evaluation_uses_the_running_arrays_and_leaves_them(dtype, rng):
    for shape, axis in CASES:
        x, w, b = data(rng, shape, axis, dtype)
        rm, rv = rng.standard_normal(len(w)) + 3, rng.random(len(w)) + 0.5
        kept = rm.copy(), rv.copy()
        y, mean, rstd = batch_norm_forward(x, w, b, rm, rv, axis=axis)
        assert_same_bits((rm, rv), kept)
        exact, exact_mean, exact_rstd = reference.batch_norm_forward(x, w, b, rm, rv, axis=axis)
        real = arithmetic(dtype)
        assert y.dtype == dtype and mean.dtype == rstd.dtype == real and mean.shape == exact_mean.shape
        assert_same_bits(mean.reshape(-1), rm.astype(real))
        assert errors_in_ulp(rstd.reshape(-1, 1), exact_rstd.reshape(-1, 1), exact_rstd.reshape(-1, 1), real) <= 2
        plain = channels_first(reference.batch_norm(x, None, None, rm, rv, axis=axis), axis)
        scale = np.abs(plain).max(axis=1, keepdims=True) * np.abs(w.reshape(-1, 1)) + np.abs(b.reshape(-1, 1))
        if dtype in WIDE_FLOATS:
            assert errors_in_ulp(channels_first(y, axis), channels_first(exact, axis), scale, dtype) <= 4
        else:
            slack = 4 * np.spacing(scale.max().astype(np.float32)).astype(np.float64)
            assert_rounded_once(y, exact, slack)


def test_a_running_mean_wider_than_x_keeps_its_digits(rng):
    x = (1e6 + rng.standard_normal((50, 3))).astype(np.float32)
    rm, rv = np.full(3, 1e6 + 0.03), np.full(3, 1.0)
    y = batch_norm(x, None, None, rm, rv, eps=0.0)
    np.testing.assert_allclose(y, x.astype(np.float64) - rm, rtol=0, atol=1e-6)
    # And running statistics may be integers or lists where they are only read.
    assert_same_bits(
        batch_norm(x, None, None, [0, 1, 2], [1, 1, 1]), batch_norm(x, None, None, np.arange(3.0), np.ones(3))
    )


# ---- backward --------------------------------------------------------------------------------------------


@every_dtype
def test_gradients_are_within_their_bounds(dtype, rng):
    real = arithmetic(dtype)
    for shape, axis in CASES:
        x, w, b = data(rng, shape, axis, dtype)
        dy = (rng.standard_normal(shape) + 0.5).astype(dtype)
        running = rng.standard_normal(len(w)) + 3, rng.random(len(w)) + 0.5
        for training in (True, False):
            _, mean, rstd = batch_norm_forward(x, w, b, *[a.copy() for a in running], training=training, axis=axis)
            dx, dweight, dbias = batch_norm_backward(dy, x, mean, rstd, w, axis=axis, training=training)
            assert dx.dtype == dtype and dx.shape == shape and dweight.dtype == dbias.dtype == dtype
            assert dweight.shape == dbias.shape == w.shape
            exact = reference.batch_norm_backward(dy, x, w, mean=mean, rstd=rstd, axis=axis, training=training)
            scale = np.abs(
                channels_first(dy, axis).astype(float) * (rstd.reshape(-1, 1) * w.reshape(-1, 1).astype(float))
            )
            scale = scale.max(axis=1, keepdims=True)
            n = x.size // len(w)
            if dtype in WIDE_FLOATS:
                bound = 8 if n < 32 else 4
                assert errors_in_ulp(channels_first(dx, axis), channels_first(exact[0], axis), scale, dtype) <= bound
                for result, value in zip((dweight, dbias), exact[1:], strict=True):
                    terms = np.abs(value).max()
                    assert errors_in_ulp(result, value, np.full_like(value, terms), dtype) <= 4
            else:
                assert_rounded_once(dx, exact[0], 8 * np.spacing(scale.max().astype(np.float32)).astype(np.float64))
                for result, value in zip((dweight, dbias), exact[1:], strict=True):
                    slack = 4 * np.spacing(np.abs(value).max().astype(np.float32)).astype(np.float64)
                    assert_rounded_once(result, value, slack)
            plain = batch_norm_backward(dy, x, mean, rstd, axis=axis, training=training)
            assert plain[1].dtype == plain[2].dtype == real
            none = batch_norm_backward(dy, x, mean, rstd, w, axis=axis, training=training, param_grads=False)
            assert none[1] is None and none[2] is None
            assert_same_bits(none[0], dx)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape, axis", [((6, 4), 1), ((3, 2, 5), 1), ((3, 2, 2, 3), 1), ((2, 3, 4), -1)], ids=str)
def test_gradients_agree_with_central_differences(shape, axis, training, rng):
    x, w, b = data(rng, shape, axis, np.float64, 0.5)
    dy = rng.standard_normal(shape)
    running = rng.standard_normal(len(w)), rng.random(len(w)) + 0.5

    def loss(x, w, b):
        return (batch_norm(x, w, b, *[a.copy() for a in running], training=training, axis=axis) * dy).sum()

    _, mean, rstd = batch_norm_forward(x, w, b, *[a.copy() for a in running], training=training, axis=axis)
    gradients = batch_norm_backward(dy, x, mean, rstd, w, axis=axis, training=training)
    for k, gradient in enumerate(gradients):
        for _ in range(5):
            step = 1e-6 * rng.standard_normal(gradient.shape)
            steps = [step if i == k else 0.0 for i in range(3)]
            difference = loss(x + steps[0], w + steps[1], b + steps[2]) - loss(x - steps[0], w - steps[1], b - steps[2])
            np.testing.assert_allclose((gradient * step).sum() * 2, difference, rtol=2e-6, atol=1e-13)


@every_wide_dtype
def test_what_x_is_does_not_matter_to_dx_of_an_evaluation(dtype, rng):
    """Its statistics are constants: NaN in x is in dweight alone."""
    x, dy = rng.standard_normal((2, 6, 3, 50)).astype(dtype)
    w = np.array([2.0, 3.0, 4.0], dtype)
    _, mean, rstd = batch_norm_forward(x, w, None, np.zeros(3), np.ones(3))
    dx, dweight, dbias = batch_norm_backward(dy, x, mean, rstd, w, training=False)
    x[2, 1, 7] = np.nan
    for out in (None, dy.copy()):
        again = batch_norm_backward(dy if out is None else out, x, mean, rstd, w, training=False, out=out)
        assert_same_bits(again[0], dx)
        assert_same_bits(again[2], dbias)
        assert np.isnan(again[1][1])
        assert_same_bits(again[1][[0, 2]], dweight[[0, 2]])


@every_dtype
def test_results_may_go_into_the_arguments(dtype, rng):
    for shape, axis in CASES:
        x, w, b = data(rng, shape, axis, dtype)
        dy = rng.standard_normal(shape).astype(dtype)
        running = np.full(len(w), 0.5), np.full(len(w), 2.0)
        for training in (True, False):
            kept = [a.copy() for a in running]
            y, mean, rstd = batch_norm_forward(x, w, b, *kept, training=training, axis=axis)
            here = x.copy()
            result = batch_norm(here, w, b, *[a.copy() for a in running], training=training, axis=axis, out=here)
            assert result is here
            assert_same_bits(here, y)
            dx, *sums = batch_norm_backward(dy, x, mean, rstd, w, axis=axis, training=training)
            for name in ("dy", "x"):
                here = {"dy": dy.copy(), "x": x.copy()}
                result = batch_norm_backward(
                    *here.values(), mean, rstd, w, axis=axis, training=training, out=here[name]
                )
                assert result[0] is here[name]
                assert_same_bits(result, (dx, *sums))


def test_out_may_overlap_x_in_part_and_have_another_dtype(rng):
    memory = rng.standard_normal((30, 40)).astype(np.float32)
    expected = batch_norm(memory[:20], training=True)
    for move in (1, 10):
        here = memory.copy()
        assert_same_bits(batch_norm(here[:20], training=True, out=here[move : move + 20]), expected)
    for dtype in FLOATS:
        out = np.empty((20, 40), dtype)
        assert batch_norm(memory[:20], training=True, out=out) is out
        np.testing.assert_allclose(out.astype(float), expected, rtol=0, atol=2e-2)


def test_views_that_interleave_do_not_overlap(rng):
    """Bounds are enough to copy, not to refuse."""
    x = rng.standard_normal((6, 3)).astype(np.float32)
    expected = np.zeros(3), np.ones(3)
    y = batch_norm(x, None, None, *expected, training=True)
    both = np.zeros((3, 2))
    both[:, 1] = 1
    memory = np.zeros((6, 7), np.float32)
    result = batch_norm(x, None, None, both[:, 0], both[:, 1], training=True, out=memory[:, 2:5])
    assert_same_bits(result.copy(), y)
    assert_same_bits((both[:, 0].copy(), both[:, 1].copy()), expected)
    # In evaluation the running arrays are inputs like any other: out may even lie over them.
    memory[:, 0], memory[0, 2:5] = 2, (0.5, 1.5, 2.5)
    expected = batch_norm(x, None, None, memory[0, 2:5].copy(), memory[:3, 0].copy())
    assert_same_bits(batch_norm(x, None, None, memory[0, 2:5], memory[:3, 0], out=memory[:, 2:5]).copy(), expected)


@every_wide_dtype
def test_extreme_scales_of_weight_do_not_overflow_on_the_way(dtype, rng):
    """rstd * weight is out of range where dx is not."""
    scales = ((1e-12, 1e30, 1e-20), (1e12, 1e-32, 1e20))
    if dtype == np.float64:
        scales = ((1e-100, 1e250, 1e-150), (1e100, 1e-250, 1e150))
    for shape, axis in CASES[:7]:
        for x_scale, weight, dy_scale in scales:
            x = (x_scale * rng.standard_normal(shape)).astype(dtype)
            dy = (dy_scale * rng.standard_normal(shape)).astype(dtype)
            w = np.full(shape[axis], weight, dtype)
            _, mean, rstd = batch_norm_forward(x, w, training=True, axis=axis, eps=0.0)
            dx = batch_norm_backward(dy, x, mean, rstd, w, axis=axis)[0]
            exact = channels_first(reference.batch_norm_backward(dy, x, w, rstd=rstd, axis=axis)[0], axis)
            bound = 8 if x.size // len(w) < 32 else 4
            assert errors_in_ulp(channels_first(dx, axis), exact, exact, dtype) <= bound


@every_wide_dtype
def test_an_evaluation_without_variance_and_eps_gives_bias_at_the_mean(dtype):
    b = np.array([3.0, 4.0], dtype)
    for shape in ((5, 2), (5, 2, 9), (5, 2, 3)):
        x = np.empty(shape, dtype)
        x[:, 0], x[:, 1] = 1.5, 2.5
        y, _, rstd = batch_norm_forward(x, None, b, np.array([1.5, 2.5]), np.zeros(2), eps=0.0)
        assert np.isinf(rstd).all()
        assert (channels_first(y, 1) == b[:, None]).all()


# ---- what stays in its channel, what is empty, what is refused ----------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_channel(bad, rng):
    """BN3: the other channels and their running values come out as if it were not there."""
    for shape, axis in CASES:
        x = rng.standard_normal(shape).astype(np.float32)
        running = np.zeros(shape[axis]), np.ones(shape[axis])
        clean = everything(x, x, running[1], running[0], running, axis=axis)
        broken = x.copy()
        channel = shape[axis] // 2
        np.moveaxis(broken, axis, 0)[channel].flat[-1] = bad
        dirty = everything(broken, x, running[1], running[0], running, axis=axis)
        others = np.arange(shape[axis]) != channel
        for key in clean:
            a, b = (v[key] if v[key].ndim == 1 else channels_first(v[key], axis) for v in (clean, dirty))
            assert_same_bits(a[others], b[others])
        for key in ("running_mean train", "running_var train"):
            assert not np.isfinite(dirty[key][channel])


@every_dtype
def test_empty_arrays(dtype):
    """S01. No values per channel: evaluation has statistics still, training refuses."""
    rm, rv = np.array([1.0, 2.0]), np.array([3.0, 0.0])
    for shape, axis in (((0, 2), 1), ((0, 2, 3), 1), ((3, 2, 0), 1), ((0, 3, 2), -1), ((2, 0), 0)):
        x = np.empty(shape, dtype)
        assert batch_norm(x, None, None, rm, rv, axis=axis).shape == shape
        y, mean, rstd = batch_norm_forward(x, None, None, rm, rv, axis=axis, eps=1.0)
        assert y.dtype == dtype and mean.shape == rstd.shape
        np.testing.assert_allclose(mean.reshape(-1), rm)
        np.testing.assert_allclose(rstd.reshape(-1), [0.5, 1.0])
        dx, dweight, dbias = batch_norm_backward(x, x, mean, rstd, np.ones(2, dtype), axis=axis, training=False)
        assert dx.shape == shape and not dweight.astype(float).any() and not dbias.astype(float).any()
        kept = rm.copy(), rv.copy()
        with pytest.raises(ValueError, match="values per channel"):
            batch_norm(x, None, None, rm, rv, training=True, axis=axis)
        assert_same_bits((rm, rv), kept)
    # No channels.
    x, none = np.empty((4, 0), dtype), np.empty(0)
    for training in (True, False):
        y, mean, rstd = batch_norm_forward(x, None, None, none, none.copy(), training=training)
        assert y.shape == (4, 0) and mean.shape == rstd.shape == (1, 0)
        assert batch_norm_backward(x, x, mean, rstd, training=training)[1].shape == (0,)


def refuses(error, *texts, function=batch_norm, **arguments):
    arrays = [a for a in arguments.values() if isinstance(a, np.ndarray) and a.dtype != object]
    before = [a.tobytes() for a in arrays]
    with pytest.raises(error) as caught:
        function(**arguments)
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in {str(caught.value)!r}"
    assert [a.tobytes() for a in arrays] == before, "an array was changed"


def frozen(a):
    a.flags.writeable = False
    return a


@pytest.mark.parametrize("function", [batch_norm, batch_norm_forward], ids=name_of)
@pytest.mark.parametrize("training", [True, False])
def test_bad_arguments_are_refused_by_name_and_change_nothing(training, function, rng):
    x = rng.standard_normal((5, 3, 4)).astype(np.float32)
    good = {
        "x": x,
        "weight": np.ones(3),
        "bias": np.ones(3),
        "running_mean": np.zeros(3),
        "running_var": np.ones(3),
        "training": training,
        "out": np.full((5, 3, 4), 9, np.float32),
    }
    function(**{**good, "running_mean": np.zeros(3), "running_var": np.ones(3)})
    three = "x has 3 channels"
    for error, texts, replaced in (
        (ValueError, ["weight: shape (4,)", three], {"weight": np.ones(4)}),
        (ValueError, ["weight: shape (1,)", three], {"weight": np.ones(1)}),
        (ValueError, ["bias: shape (3, 1)", three], {"bias": np.ones((3, 1))}),
        (ValueError, ["running_mean: shape (2,)", three], {"running_mean": np.ones(2)}),
        (ValueError, ["running_var: shape (1, 3)", three], {"running_var": np.ones((1, 3))}),
        (ValueError, ["running_var: it is None", "running_mean is not"], {"running_var": None}),
        (ValueError, ["running_mean: it is None", "running_var is not"], {"running_mean": None}),
        (TypeError, ["axis:", "one int"], {"axis": (1,)}),
        (TypeError, ["axis:", "one int"], {"axis": None}),
        (TypeError, ["axis:", "one int"], {"axis": 1.0}),
        (AxisError, ["axis"], {"axis": 3}),
        (AxisError, ["axis"], {"x": np.ones(4, np.float32), "out": None}),
        (ValueError, ["weight: shape (3,)", "x has 4 channels"], {"axis": -1}),
        (ValueError, ["eps:"], {"eps": -1e-5}),
        (ValueError, ["eps:"], {"eps": np.nan}),
        (TypeError, ["momentum: expected a number"], {"momentum": None}),
        (ValueError, ["momentum: expected a finite number"], {"momentum": np.inf}),
        (ValueError, ["out: shape (5, 3)", "x has shape (5, 3, 4)"], {"out": np.ones((5, 3), np.float32)}),
        (TypeError, ["out:", "same_kind"], {"out": np.ones((5, 3, 4), int)}),
    ):
        refuses(error, *texts, function=function, **{**good, **replaced})
    memory = np.ones(60, np.float32)
    overlapping = {**good, "out": memory.reshape(5, 3, 4), "running_var": memory[:3]}
    if training:
        refuses(ValueError, "out, running_var: they overlap", function=function, **overlapping)


def test_running_arrays_that_cannot_be_updated_are_refused_in_training_only(rng):
    x = rng.standard_normal((5, 3)).astype(np.float32)
    both = np.zeros(4)
    for error, texts, mean, var in (
        (ValueError, ["running_mean:", "read-only"], frozen(np.zeros(3)), np.ones(3)),
        (ValueError, ["running_var:", "read-only"], np.zeros(3), frozen(np.ones(3))),
        (TypeError, ["running_mean:", "in place"], [0.0] * 3, np.ones(3)),
        (TypeError, ["running_var:", "int64"], np.zeros(3), np.ones(3, np.int64)),
        (ValueError, ["running_mean, running_var: they overlap"], both[:3], both[1:]),
    ):
        refuses(error, *texts, x=x, running_mean=mean, running_var=var, training=True)
        assert batch_norm(x, None, None, mean, var).shape == x.shape
    refuses(ValueError, "expected both in evaluation", x=x)
    assert batch_norm(x, training=True).shape == x.shape


@pytest.mark.parametrize("shape, axis", [((1, 3), 1), ((3,), 0), ((1, 3, 1, 1), 1), ((1, 1, 3), -1)], ids=str)
def test_one_value_per_channel_is_refused_in_training(shape, axis):
    """BN2: its unbiased variance is 0 / 0, which would spoil the running one."""
    x, running = np.ones(shape, np.float32), {"running_mean": np.zeros(3), "running_var": np.ones(3)}
    refuses(ValueError, "x: shape", "1 values per channel", x=x, **running, training=True, axis=axis)
    np.testing.assert_allclose(batch_norm(x, **running, axis=axis), 1, atol=1e-5)
    two = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.isfinite(batch_norm(two, **running, training=True)).all() and np.isfinite(running["running_var"]).all()


def test_bad_arguments_of_backward_are_refused_by_name_and_change_nothing(rng):
    x, dy, out = rng.standard_normal((3, 5, 3, 4)).astype(np.float32)
    _, mean, rstd = batch_norm_forward(x, training=True)
    good = {"dy": dy, "x": x, "mean": mean, "rstd": rstd, "weight": np.ones(3), "out": out}
    for error, texts, replaced in (
        (ValueError, ["dy: shape (5, 3)", "x has shape (5, 3, 4)"], {"dy": dy[:, :, 0]}),
        (ValueError, ["mean: shape (3,)", "(1, 3, 1)"], {"mean": mean.reshape(-1)}),
        (ValueError, ["rstd: shape (1, 4, 1)"], {"rstd": np.ones((1, 4, 1), np.float32)}),
        (TypeError, ["rstd: dtype float64"], {"rstd": rstd.astype(float)}),
        (ValueError, ["weight: shape (4,)", "3 channels"], {"weight": np.ones(4)}),
        (TypeError, ["axis:"], {"axis": (1,)}),
    ):
        refuses(error, *texts, function=batch_norm_backward, **{**good, **replaced})


def test_what_only_numpy_has_is_refused_by_name(rng):
    x = rng.standard_normal((5, 3))
    for training in (True, False):
        running = {"running_mean": np.zeros(3), "running_var": np.ma.masked_array(np.ones(3))}
        refuses(TypeError, "running_var:", x=x, **running, training=training)
        running["running_var"] = np.ones(3, complex)
        refuses(TypeError, "running_var:", "complex128", x=x, **running, training=training)
        refuses(TypeError, "x:", "float32", x=x.astype(complex), training=training)
    _, mean, rstd = batch_norm_forward(x, training=True)
    backward = {"function": batch_norm_backward, "dy": x, "x": x, "mean": mean, "rstd": rstd}
    refuses(ValueError, "out: output array is read-only", **backward, out=frozen(x.copy()))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")
@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_leaves_the_running_statistics(overlap, threads):
    """The signal comes while the kernel computes; what it finds is looked at before the update."""
    threads(1)
    memory = np.ones((6001, 4000), np.float32)
    x, out = memory[:6000], memory[1:] if overlap else np.ones((6000, 4000), np.float32)
    running = np.zeros(4000), np.ones(4000)
    before = signal.signal(signal.SIGALRM, lambda *_: signal.default_int_handler(signal.SIGINT, None))
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.005)
            batch_norm(x, None, None, *running, training=True, out=out)
            signal.pause()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not running[0].any() and (running[1] == 1).all()


def test_memory_maps_and_bfloat16(tmp_path, rng):
    values = rng.standard_normal((8, 3)).astype(np.float32)
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(8, 3))
    x[:] = values
    rm = np.memmap(tmp_path / "rm", np.float32, "w+", shape=(3,))
    y = batch_norm(x, None, None, rm, np.ones(3), training=True)
    assert type(y) is np.ndarray and rm.any()
    assert_same_bits(y, batch_norm(values, training=True))
    assert batch_norm(values.astype(BFLOAT16), training=True).dtype == BFLOAT16
