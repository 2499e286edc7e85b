"""Norms over channels on the CUDA wing, called as the hall calls them: both ways, against the reference."""

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from device import get, put  # noqa: E402

from fastnorm import _cuda, reference  # noqa: E402
from fastnorm._cuda import geometry  # noqa: E402

FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}
# (N, C), channels-last, (N, C, L), (N, C, H, W), the first axis; one channel and many, few rows and several chunks,
# packs that end in the middle of a channel, slices that end in the middle of a run.
SHAPES = [
    ((50, 7), 1),
    ((2, 1), 1),
    ((9, 600), 1),
    ((3, 1100), 1),
    ((4200, 3), 1),
    ((6, 5, 8), -1),
    ((40, 33, 3), 1),
    ((70, 5, 3, 3), 1),
    ((4, 3), 0),
    ((1, 6, 70), 1),
    ((4, 3, 17, 19), 1),
    ((5, 2, 4, 16), 1),
    ((2, 2, 9001), 1),
    ((2, 40_000), 0),
]


def name_of(value):
    return getattr(value, "name", None) or str(value)


def arithmetic(dtype):
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def others(shape, axis):
    return tuple(a for a in range(len(shape)) if a != axis % len(shape))


def forward(x, axis, weight=None, bias=None, running=(None, None), momentum=0.1, eps=1e-5, training=True, y=None):
    """(y, mean, rstd) of device arrays."""
    axis %= x.ndim
    y = cupy.empty(x.shape, x.dtype) if y is None else y
    mean, rstd = (cupy.empty((x.shape[axis],), arithmetic(x.dtype)) for _ in range(2))
    _cuda.channel_norm_forward(x, axis, weight, bias, eps, *running, momentum, y, mean, rstd, training)
    return y, mean, rstd


def backward(dy, x, axis, weight, mean, rstd, training=True, dx=None, param_grads=True, dtype=np.float32):
    """(dx, dweight, dbias) of device arrays."""
    axis %= x.ndim
    dx = cupy.empty(x.shape, x.dtype) if dx is None else dx
    dweight, dbias = (cupy.empty((x.shape[axis],), dtype) if param_grads else None for _ in range(2))
    _cuda.channel_norm_backward(dy, x, axis, weight, mean, rstd, dx, dweight, dbias, training)
    return dx, dweight, dbias


def plan_of(shape, axis, dtype):
    axis %= len(shape)
    outer, inner = (int(np.prod(s, dtype=int)) for s in (shape[:axis], shape[axis + 1 :]))
    return geometry.channel_plan(outer, shape[axis], inner, dtype.itemsize)


def same_bits(a, b):
    return all(get(p).tobytes() == get(q).tobytes() for p, q in zip(a, b, strict=True))


def assert_close(got, exact, scale, dtype):
    """To a few units in the last place of the largest |scale|; both as the reference has them."""
    error = np.abs(get(got).astype(np.longdouble).reshape(exact.shape) - exact)
    assert (error <= TOLERANCE[dtype.name] * scale).all(), (error / scale).max()


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape, axis", SHAPES, ids=str)
def test_forward_and_backward_are_those_of_the_reference(shape, axis, dtype):
    rng = np.random.default_rng(1)
    x, dy = (3 * rng.standard_normal((2, *shape)) + 20).astype(dtype)
    channels, axes = shape[axis], others(shape, axis)
    w, b = (rng.standard_normal((2, channels)) + 1).astype(dtype)
    old = rng.standard_normal(channels), rng.random(channels) + 0.5
    running = put(old[0].astype(np.float32)), put(old[1])
    y, mean, rstd = forward(put(x), axis, put(w), put(b), running, 0.25)
    exact_y, exact_mean, exact_rstd = reference.batch_norm_forward(x, w, b, training=True, axis=axis)
    scale = np.abs(exact_y).max(axis=axes, keepdims=True) + np.abs(b).max()
    assert_close(y, exact_y, scale.astype(float), dtype)
    assert_close(mean, exact_mean, np.abs(exact_mean), mean.dtype)
    assert_close(rstd, exact_rstd, exact_rstd, mean.dtype)
    new = reference.running_statistics(x, old[0].astype(np.float32), old[1], momentum=0.25, axis=axis)
    for k in (0, 1):
        assert_close(running[k], new[k], np.abs(new[k]), np.dtype(np.float32) if k == 0 else mean.dtype)

    real = arithmetic(dtype)
    for training in (True, False):
        results = backward(put(dy), put(x), axis, put(w), mean, rstd, training, dtype=real)
        exact = reference.batch_norm_backward(
            dy, x, w, axis=axis, mean=get(mean).reshape(exact_mean.shape), rstd=get(rstd).reshape(exact_mean.shape),
            training=training,
        )  # fmt: skip
        largest = np.abs(dy.astype(float)).max() * get(rstd).max() * np.abs(w.astype(float)).max()
        assert_close(results[0], exact[0], 2 * largest, dtype)
        terms = np.abs(dy).astype(np.longdouble).sum(axis=axes)
        assert_close(results[1], exact[1], 4 * terms, real)
        assert_close(results[2], exact[2], terms, real)
        # dx is the same whether the sums are wanted or not.
        alone = backward(put(dy), put(x), axis, put(w), mean, rstd, training, param_grads=False)
        assert same_bits(alone[:1], results[:1])


def test_the_shapes_take_every_way():
    plans = [plan_of(shape, axis, dtype) for shape, axis in SHAPES for dtype in FLOATS]
    columns = [p for p in plans if p.way == "columns"]
    assert {p.across for p in columns} >= {1, 2, 4, 128} and max(p.chunks for p in columns) > 2
    assert {geometry.settling_team(p.parts) for p in plans} >= {1, 4, 8, 32}
    assert max(p.parts for p in plans if p.way == "runs") > 4


def test_a_plan_has_every_value_once_and_fits_into_a_launch():
    for outer in (1, 2, 31, 500, 5000, 3_000_000):
        for channels in (1, 3, 33, 1000, 70_000):
            for inner in (1, 5, 31, 49, 3000):
                for size in (2, 4, 8):
                    plan = geometry.channel_plan(outer, channels, inner, size)
                    assert max(plan.forward_memory, plan.backward_memory) <= 48 << 10
                    team = geometry.settling_team(plan.parts)
                    assert 256 % team == 0 and plan.parts >= 1
                    if plan.way == "columns":
                        beside = -(-channels * inner * size // (16 * plan.across))
                        assert plan.blocks == beside * plan.chunks and 256 % plan.across == 0
                        assert (plan.chunks - 1) * plan.rows_of_chunk < outer <= plan.chunks * plan.rows_of_chunk
                        # Moments of 40 bytes a chunk and column, read three times: few beside a large x.
                        assert plan.chunks == 1 or 160 * plan.parts <= 0.08 * 3 * outer * inner * size


# ---- hard numbers ---------------------------------------------------------------------------------


def families(n, dtype, rng):
    """Channels of n values that a careless sum gets wrong."""
    large, huge, tiny = (1e7, 1e37, 1e-30) if dtype == np.float32 else (1e14, 1e307, 1e-300)
    spread = rng.standard_normal((9, n))
    spread[0, 0] = spread[1, -1] = spread[2, : n // 10 + 1] = spread[3, -(n // 10 + 1) :] = 1e4
    spread[4].sort()
    spread[5] = np.linspace(0, 1e3, n) + 0.01 * spread[5]
    spread[6] *= huge
    spread[7] *= tiny
    spread[8] += large
    halves = np.where(np.arange(n) < n // 2, 1.0, 3.0)
    return np.vstack([spread, halves, rng.standard_cauchy(n), np.full(n, 1e10)]).astype(dtype)


@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("n", [4, 40, 2000, 9000])
@pytest.mark.parametrize("dtype", FLOATS[2:], ids=name_of)
def test_hard_channels_are_as_accurate_as_rows(dtype, n, eps):
    channels = families(n, dtype, np.random.default_rng(n))
    count = len(channels)
    columns = np.ascontiguousarray(channels.T)
    runs = np.ascontiguousarray(channels.reshape(count, 2, n // 2).transpose(1, 0, 2))
    for x in (columns, runs):
        y, mean, rstd = (get(a) for a in forward(put(x), 1, eps=eps))
        with np.errstate(all="ignore"):
            exact_y, exact_mean, _ = reference.batch_norm_forward(x, training=True, eps=eps)
        largest = np.abs(exact_y).max(axis=others(x.shape, 1))[:-1]
        error = np.abs(y.astype(np.longdouble) - exact_y).max(axis=others(x.shape, 1))[:-1]
        assert (error <= 4 * np.spacing(largest.astype(dtype)).astype(np.longdouble)).all(), error
        # The constant channel.
        assert not y[:, -1].any() and mean[-1] == dtype.type(1e10)
        assert np.isinf(rstd[-1]) if eps == 0 else np.isclose(rstd[-1], eps**-0.5)
        error = np.abs(mean - exact_mean.reshape(-1))
        assert (error <= np.finfo(dtype).eps * np.abs(x).max(axis=others(x.shape, 1)).astype(np.longdouble)).all()


@pytest.mark.parametrize("shape", [(500, 6), (3, 6, 5000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_what_is_not_finite_stays_in_its_channel(dtype, shape):
    """N12; and it gets into the running arrays of that channel."""
    clean = np.random.default_rng(2).standard_normal(shape).astype(dtype)
    x = clean.copy()
    last = (shape[0] - 1, *(s - 1 for s in shape[2:]))
    x[(0, 1) + (0,) * (len(shape) - 2)] = np.inf
    x[(last[0], 2, *last[1:])] = np.nan
    x[(1, 3) + (7,) * (len(shape) - 2)] = -np.inf
    running = put(np.zeros(6, np.float32)), put(np.ones(6))
    y, mean, rstd = (get(a).astype(float) for a in forward(put(x), 1, running=running))
    whole = get(forward(put(clean), 1)[0]).astype(float)
    assert np.isnan(y[:, 1:4]).all() and (y[:, [0, 4, 5]] == whole[:, [0, 4, 5]]).all()
    assert mean[1] == np.inf and np.isnan(mean[2]) and mean[3] == -np.inf and not np.isfinite(rstd[1:4]).any()
    means, variances = (get(a) for a in running)
    assert means[1] == np.inf and np.isnan(means[2]) and means[3] == -np.inf and np.isnan(variances[1:4]).all()
    assert np.isfinite(means[[0, 4, 5]]).all() and np.isfinite(variances[[0, 4, 5]]).all()


def test_many_equal_values():
    """N10: 2**24 ones and more have a mean of exactly 1; in chunks of columns, too. A whole block puts their parts
    together."""
    for shape in ((2, 1, 2**23 + 8), (2**19 + 1, 2)):
        assert geometry.settling_team(plan_of(shape, 1, np.dtype(np.float16)).parts) == 256
        y, mean, rstd = forward(put(np.ones(shape, np.float16)), 1)
        assert (get(mean) == 1).all() and not get(y).any()


# ---- running statistics, evaluation ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_running_arrays_are_updated_where_they_are(dtype):
    """Strided, backwards, at odd addresses; rounded once; nothing beside them is touched."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 5)) + 2
    old = rng.random((2, 5)).astype(dtype)
    for momentum in (0.1, 0.0, 1.0):
        new = reference.running_statistics(x, *old, momentum=momentum)
        wanted = [old[k] if momentum == 0 else v.astype(np.float64).astype(dtype) for k, v in enumerate(new)]
        strided = np.full((2, 15), 9, dtype)
        strided[0, 1::3], strided[1, 12::-3] = old
        there = put(strided)
        forward(put(x), 1, running=(there[0, 1::3], there[1, 12::-3]), momentum=momentum)
        strided[0, 1::3], strided[1, 12::-3] = wanted
        np.testing.assert_allclose(get(there).astype(float), strided.astype(float), rtol=5e-16)
        odd = [put(np.frombuffer(b"\0" + a.tobytes(), np.uint8)) for a in old]
        forward(put(x), 1, running=[a[1:].view(dtype) for a in odd], momentum=momentum)
        assert [get(a)[1:].tobytes() for a in odd] == [
            get(there)[0, 1::3].tobytes(), get(there)[1, 12::-3].tobytes()
        ]  # fmt: skip


def test_running_arrays_may_be_weight_and_bias():
    """These count as they were when the call began."""
    rng = np.random.default_rng(4)
    x, w, b = rng.standard_normal((70, 9)).astype(np.float32), *rng.random((2, 9)).astype(np.float32)
    expected = forward(put(x), 1, put(w), put(b))
    w_there, b_there = put(w), put(b)
    assert same_bits(forward(put(x), 1, w_there, b_there, (b_there, w_there)), expected)
    assert (get(w_there) != w).all()


@pytest.mark.parametrize("running_dtype", ["float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_evaluation_takes_the_running_statistics(dtype, running_dtype):
    rng = np.random.default_rng(5)
    for shape in ((30, 6), (3, 6, 50), (2, 6, 3, 4)):
        x = (rng.standard_normal(shape) + 100).astype(dtype)
        means, variances = (100 + rng.random(6)).astype(running_dtype), (4 + rng.random(6)).astype(running_dtype)
        w, b = rng.standard_normal((2, 6)).astype(np.float32)
        y, mean, rstd = forward(put(x), 1, put(w), put(b), (put(means), put(variances)), training=False)
        exact = reference.batch_norm_forward(x, w, b, means, variances)
        assert_close(y, exact[0], np.abs(exact[0]).max() + 1, dtype)
        assert_close(mean, exact[1], np.abs(exact[1]), mean.dtype)
        assert_close(rstd, exact[2], exact[2], mean.dtype)
        # There may be no values at all.
        nothing = cupy.empty((0, *shape[1:]), dtype)
        _, *statistics = forward(nothing, 1, None, None, (put(means), put(variances)), training=False)
        assert same_bits(statistics, (mean, rstd))


def test_a_running_mean_of_float64_is_not_rounded_to_float32():
    x = np.full((4, 3), 2.0**24, np.float32)
    means = put(np.full(3, 2.0**24 - 0.25))
    y = get(forward(put(x), 1, running=(means, put(np.ones(3))), eps=0.0, training=False)[0])
    assert (y == 0.25).all()


def test_a_difference_beyond_the_range_is_not_infinite():
    for dtype, large in ((np.float32, 3e38), (np.float64, 1.7e308)):
        x = np.full((4, 3), large, dtype)
        running = put(np.full(3, -large)), put(np.full(3, 1e76 if dtype is np.float32 else 1e300))
        y = get(forward(put(x), 1, running=running, eps=0.0, training=False)[0])
        np.testing.assert_allclose(y, 2 * (large / np.sqrt(get(running[1])[0])), rtol=3e-7)


# ---- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(12, 10), (6, 10, 40), (6, 10, 3, 2)], ids=str)
def test_views_count_by_their_values(shape, dtype, emulated):
    rng = np.random.default_rng(6)
    base = rng.standard_normal(shape).astype(dtype)
    w = rng.standard_normal(10).astype(np.float32)

    def odd(a):
        return put(np.frombuffer(b"\0" + get(a).tobytes(), np.uint8))[1:].view(dtype).reshape(a.shape)

    for view, copies in (
        (lambda a: a[::2], 0),
        (lambda a: a[1:, 2:9], 0),
        (lambda a: a[:, 3:4], 0),
        (lambda a: a[:, ::2], plan_of(shape, 1, dtype).way == "columns"),
        (lambda a: a[::-1], 0),
        (lambda a: a[..., ::-1], 1),
        (lambda a: a.swapaxes(0, -1), 1),
        (odd, 1),
    ):
        v = view(put(base))
        plain = cupy.empty(v.shape, dtype)
        _cuda.copy(v, plain)
        host = get(plain)
        channels = v.shape[1]
        weight = put(np.resize(w, channels))
        there = put(np.zeros(base.shape, dtype))
        out = view(there)
        emulated.launches.clear()
        y, mean, rstd = forward(v, 1, weight, y=out)
        assert len([x for x in emulated.launches if x.name.startswith("copy")]) == 2 * copies
        expected = forward(put(host), 1, weight)
        _cuda.copy(out, plain)
        assert same_bits((plain, mean, rstd), expected)
        ours, theirs = backward(v, v, 1, weight, mean, rstd), backward(put(host), put(host), 1, weight, *expected[1:])
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("shape", [(300, 10), (3, 4, 5000)], ids=str)
def test_results_may_take_the_place_of_inputs(shape):
    rng = np.random.default_rng(7)
    x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
    expected = forward(put(x), 1)
    there = put(x)
    assert same_bits(forward(there, 1, y=there), expected)
    _, mean, rstd = expected
    for training in (True, False):
        expected = backward(put(dy), put(x), 1, None, mean, rstd, training)
        for place in (0, 1):
            arrays = put(dy), put(x)
            assert same_bits(backward(*arrays, 1, None, mean, rstd, training, dx=arrays[place]), expected)


@pytest.mark.parametrize("x_dtype", FLOATS, ids=name_of)
def test_dtypes_may_differ(x_dtype):
    rng = np.random.default_rng(8)
    x = rng.standard_normal((40, 6, 20)).astype(x_dtype)
    real = arithmetic(x_dtype)
    _, mean, rstd = forward(put(x), 1)
    for other in FLOATS:
        dy = rng.standard_normal(x.shape).astype(other)
        w = (3 * rng.standard_normal(6)).astype(other)
        y, *_ = forward(put(x), 1, put(w), put(w), y=cupy.empty(x.shape, other))
        exact = reference.batch_norm(x, w, w, training=True)
        assert_close(y, exact, np.abs(exact).max(), max(y.dtype, real, key=lambda d: TOLERANCE[d.name]))
        # Gradients of parameters in any dtype: the same sums, rounded once.
        dx, dweight, dbias = backward(put(dy), put(x), 1, put(w), mean, rstd, dtype=other)
        assert dx.dtype == x_dtype
        _, *sums = backward(put(dy), put(x), 1, put(w), mean, rstd, dtype=np.float64)
        for got, value in zip((dweight, dbias), sums, strict=True):
            np.testing.assert_array_equal(get(got), get(value).astype(other))


def test_bits_do_not_depend_on_the_schedule(emulated):
    rng = np.random.default_rng(9)
    for shape in ((3000, 20), (4, 3, 9000), (70, 30, 5)):
        x, dy = rng.standard_normal((2, *shape)).astype(np.float32)
        seen = set()
        for emulated.seed in (1, 2, 3):
            results = forward(put(x), 1)
            results += backward(put(dy), put(x), 1, None, *results[1:])
            seen.add(b"".join(get(r).tobytes() for r in results))
        assert len(seen) == 1
