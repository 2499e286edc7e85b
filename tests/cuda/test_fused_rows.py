"""The residual forms of the CUDA wing, called as the halls call them: fused equals unfused bit for bit."""

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from device import get, put  # noqa: E402

from fastnorm import _cuda, reference  # noqa: E402
from fastnorm._cuda import geometry  # noqa: E402

HALF, BFLOAT, SINGLE, DOUBLE = (np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
FLOATS = [HALF, BFLOAT, SINGLE, DOUBLE]
TOLERANCE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 2e-6, "float64": 2e-14}
# In packs of 16 bytes: a length for each path, whole packs and not.
LENGTHS = [1, 33, 70, 600, 1500, 2100, 14400]


def name_of(dtype):
    return dtype.name


def arithmetic(dtype):
    return DOUBLE if dtype == DOUBLE else SINGLE


def columns_of(dtype):
    """Lengths, odd ones too."""
    for k, packs in enumerate(LENGTHS):
        yield max(1, packs * 16 // dtype.itemsize - k % 2)


def empty(shape, dtype):
    return cupy.empty(shape, dtype)


def forward(x, residual, alpha, weight, bias, y_dtype, h_dtype, centered=True):
    """(y, h, mean, rstd) of device arrays."""
    y = empty(x.shape, y_dtype)
    h = None if residual is None else empty(x.shape, h_dtype)
    real = arithmetic(np.dtype(h_dtype) if residual is not None else x.dtype)
    mean, rstd = empty((x.shape[0],), real) if centered else None, empty((x.shape[0],), real)
    _cuda.row_norm_forward(x, residual, alpha, 1, weight, 0.0, bias, 1e-5, y, h, mean, rstd, centered)
    return y, h, mean, rstd


def backward(dy, dh, h, weight, mean, rstd, alpha, dx_dtype, h_dtype, centered=True, fused=True):
    """(dx, dresidual, dweight, dbias) of device arrays."""
    dx = empty(h.shape, dx_dtype)
    dresidual = empty(h.shape, h_dtype) if fused else None
    dweight = empty((h.shape[1],), weight.dtype)
    dbias = empty((h.shape[1],), weight.dtype) if centered else None
    _cuda.row_norm_backward(dy, dh, h, 1, weight, 0.0, mean, rstd, alpha, dx, dresidual, dweight, dbias, centered)
    return dx, dresidual, dweight, dbias


def same_bits(a, b):
    a, b = get(a) if isinstance(a, cupy.ndarray) else a, get(b) if isinstance(b, cupy.ndarray) else b
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def summed(x, residual, alpha, dtype):
    """h in plain NumPy: a product and a sum, rounded each in the arithmetic type, then stored."""
    real = DOUBLE if DOUBLE in (x.dtype, residual.dtype) else SINGLE
    return (x.astype(real) + real.type(alpha) * residual.astype(real)).astype(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
def test_fused_is_the_norm_of_the_stored_sum(centered, dtype):
    rng = np.random.default_rng(1)
    seen = set()
    for n in columns_of(dtype):
        seen.add(geometry.forward_plan(n, dtype.itemsize, 227 << 10)[:2])
        x, residual = rng.standard_normal((2, 3, n)).astype(dtype)
        w, b = put(rng.standard_normal(n).astype(dtype)), put(rng.standard_normal(n).astype(np.float32))
        for alpha in (1.0, 1.7):
            y, h, *statistics = forward(put(x), put(residual), alpha, w, b, dtype, dtype, centered)
            wanted = summed(x, residual, alpha, dtype)
            assert same_bits(h, wanted)
            expected = forward(put(wanted), None, 1.0, w, b, dtype, None, centered)
            assert same_bits(y, expected[0]) and same_bits(statistics[1], expected[3])
            assert not centered or same_bits(statistics[0], expected[2])
    assert len(seen) == 4, "a path that no length takes"


@pytest.mark.parametrize(
    "x_dtype, residual_dtype, y_dtype, h_dtype",
    [
        (BFLOAT, SINGLE, BFLOAT, SINGLE),  # a 16-bit sublayer, a residual stream of float32
        (SINGLE, BFLOAT, SINGLE, BFLOAT),  # the norm is that of the h that was rounded
        (HALF, BFLOAT, HALF, BFLOAT),
        (HALF, HALF, HALF, SINGLE),
        (SINGLE, SINGLE, HALF, HALF),
        (SINGLE, DOUBLE, SINGLE, DOUBLE),
        (DOUBLE, SINGLE, HALF, DOUBLE),
    ],
    ids=lambda d: d.name,
)
def test_dtypes_may_differ(x_dtype, residual_dtype, y_dtype, h_dtype):
    rng = np.random.default_rng(2)
    for n in (37, 5000, 70_001):
        x, residual = rng.standard_normal((3, n)).astype(x_dtype), rng.standard_normal((3, n)).astype(residual_dtype)
        dy, dh = rng.standard_normal((3, n)).astype(x_dtype), rng.standard_normal((3, n)).astype(residual_dtype)
        w = put(rng.standard_normal(n).astype(np.float32))
        y, h, mean, rstd = forward(put(x), put(residual), -0.3, w, None, y_dtype, h_dtype)
        wanted = summed(x, residual, -0.3, h_dtype)
        assert same_bits(h, wanted)
        expected = forward(put(wanted), None, 1.0, w, None, y_dtype, None)
        assert same_bits(y, expected[0]) and same_bits(mean, expected[2]) and same_bits(rstd, expected[3])
        results = backward(put(dy), put(dh), h, w, mean, rstd, -0.3, y_dtype, h_dtype)
        exact = reference.add_layer_norm_backward(dy, dh, wanted, get(w), alpha=-0.3, rstd=get(rstd)[:, None])
        for got, value in zip(results, exact, strict=True):
            tolerance = max(TOLERANCE[got.dtype.name], TOLERANCE[rstd.dtype.name])
            scale = np.abs(value).max()
            assert np.abs(get(got).astype(np.longdouble) - value).max() <= tolerance * float(scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
def test_backward_adds_dh_before_it_rounds(centered, dtype):
    rng = np.random.default_rng(3)
    seen = set()
    alpha = 0.81
    for n in columns_of(dtype):
        seen.add(geometry.backward_plan(n, dtype.itemsize, centered, 227 << 10)[:2])
        h, dy, dh = rng.standard_normal((3, 20, n)).astype(dtype)
        w = rng.standard_normal(n).astype(np.float32)
        real = arithmetic(dtype)
        mean, rstd = put(h.mean(axis=1, dtype=real)), put((1 / h.std(axis=1, dtype=real)).astype(real))
        given = (put(w), mean if centered else None, rstd)
        plain = backward(put(dy), None, put(h), *given, 1.0, dtype, dtype, centered, fused=False)
        alone = backward(put(dy), None, put(h), *given, alpha, dtype, dtype, centered)
        added = backward(put(dy), put(dh), put(h), *given, alpha, dtype, dtype, centered)
        # Sums over rows and dx as without a residual.
        assert same_bits(alone[0], plain[0])
        for k in (2, 3)[: 1 + centered]:
            assert same_bits(alone[k], plain[k]) and same_bits(added[k], plain[k])
        if dtype == real:
            # Nothing is rounded to storage, so the sums can be done afterwards.
            assert same_bits(alone[1], real.type(alpha) * get(plain[0]))
            assert same_bits(added[0], get(plain[0]) + dh)
            assert same_bits(added[1], real.type(alpha) * (get(plain[0]) + dh))
            continue
        # In float32 the same values take other lengths in packs, so that last bits differ before they are rounded.
        wide = backward(
            put(dy.astype(real)), put(dh.astype(real)), put(h.astype(real)), *given, alpha, real, real, centered
        )
        for k in (0, 1):
            exact = get(wide[k]).astype(float)
            error = np.abs(get(added[k]).astype(float) - exact)
            assert (error <= 0.5001 * ulp(exact, dtype) + 1e-6).all(), "rounded more than once"
    assert len(seen) >= 3, "a path that no length takes"


def ulp(value, dtype):
    bits = {"float16": 10, "bfloat16": 7}[dtype.name]
    lowest = {"float16": 2.0**-14, "bfloat16": 2.0**-126}[dtype.name]
    return 2.0 ** (np.floor(np.log2(np.maximum(np.abs(value), lowest))) - bits)


@pytest.mark.parametrize("n", [33, 5000, 70_001])
def test_results_may_take_the_place_of_inputs(n):
    rng = np.random.default_rng(4)
    x, residual, dy, dh = rng.standard_normal((4, 5, n)).astype(np.float32)
    w = put(rng.standard_normal(n).astype(np.float32))
    mean, rstd = empty((5,), SINGLE), empty((5,), SINGLE)
    y, h, *_ = forward(put(x), put(residual), 0.7, w, None, SINGLE, SINGLE)
    for order in ("x residual", "residual x", "x new", "new x", "residual new", "new residual"):
        arrays = {"x": put(x), "residual": put(residual), "new": empty(x.shape, SINGLE)}
        y_place, h_place = (arrays[k] for k in order.split())
        _cuda.row_norm_forward(
            arrays["x"], arrays["residual"], 0.7, 1, w, 0.0, None, 1e-5, y_place, h_place, mean, rstd, True
        )
        assert same_bits(y_place, y) and same_bits(h_place, h), order
    expected = backward(put(dy), put(dh), h, w, mean, rstd, 0.7, SINGLE, SINGLE)
    for place in range(3):
        arrays = [put(dy), put(dh), put(get(h))]
        dx, dresidual = arrays[place], empty(x.shape, SINGLE)
        _cuda.row_norm_backward(*arrays, 1, w, 0.0, mean, rstd, 0.7, dx, dresidual, None, None, True)
        assert same_bits(dx, expected[0]) and same_bits(dresidual, expected[1]), place


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_views_count_by_their_values(dtype):
    """Each array another one: turned, with gaps, backwards, at an odd address."""
    rng = np.random.default_rng(5)
    n, rows = 45, 6
    x, residual, dy, dh = rng.standard_normal((4, rows, n)).astype(dtype)
    w = put(rng.standard_normal(n).astype(np.float32))
    y, h, mean, rstd = forward(put(x), put(residual), 2.0, w, None, dtype, dtype)
    expected = backward(put(dy), put(dh), h, w, mean, rstd, 2.0, dtype, dtype)

    def turned(a):
        return put(np.ascontiguousarray(a.T)).T

    def with_gaps(a):
        wide = np.zeros((rows, n + 3), dtype)
        wide[:, 2:-1] = a
        return put(wide)[:, 2:-1]

    def backwards(a):
        return put(np.ascontiguousarray(a[::-1, ::-1]))[::-1, ::-1]

    def odd(a):
        return put(np.frombuffer(b"\0" + a.tobytes(), np.uint8))[1:].view(dtype).reshape(rows, n)

    layouts = [turned, with_gaps, backwards, odd]
    zeros = np.zeros((rows, n), dtype)

    def values(a):
        plain = empty(a.shape, a.dtype)
        _cuda.copy(a, plain)
        return get(plain).tobytes()

    for k in range(4):
        one, two, three, four = layouts[k:] + layouts[:k]
        there = three(zeros), four(zeros)
        _cuda.row_norm_forward(one(x), two(residual), 2.0, 1, w, 0.0, None, 1e-5, *there, None, None, True)
        assert [values(a) for a in there] == [get(a).tobytes() for a in (y, h)]
        there = two(zeros), one(zeros)
        _cuda.row_norm_backward(one(dy), two(dh), three(get(h)), 1, w, 0.0, mean, rstd, 2.0, *there, None, None, True)
        assert [values(a) for a in there] == [get(a).tobytes() for a in expected[:2]]
