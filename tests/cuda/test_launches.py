"""Dispatch, devices, views, paths and conversions: what is there besides the numbers that test_contract.py judges."""

import subprocess
import sys

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from device import get, put  # noqa: E402

import fastnorm  # noqa: E402
from fastnorm import reference  # noqa: E402
from fastnorm._cuda import copies, geometry, sources  # noqa: E402

FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
INTEGERS = [np.dtype(c) for c in "?bBhHiIqQ"]


def name_of(dtype):
    return dtype.name


# ---- dispatch -------------------------------------------------------------------------------------


def test_cupy_arrays_in_cupy_arrays_out():
    x = put(np.ones((3, 8), np.float32))
    y, mean, rstd = fastnorm.layer_norm_forward(x)
    results = [y, mean, rstd, *fastnorm.layer_norm_backward(x, x, mean, rstd), *fastnorm.rms_norm_forward(x)]
    assert all(type(r) is cupy.ndarray and r.flags.c_contiguous for r in results)
    assert fastnorm.layer_norm(x, out=y) is y
    assert fastnorm.layer_norm_backward(x, x, mean, rstd, param_grads=False)[1:] == (None, None)


def test_kinds_of_arrays_do_not_mix():
    """G06: a TypeError that names the argument; nothing is transferred silently."""
    x, w = np.ones((3, 8), np.float32), np.ones(8, np.float32)
    there, w_there = put(x), put(w)
    for a, named in (
        (there, {"weight": w}),
        (there, {"weight": w.tolist()}),
        (there, {"bias": w}),
        (there, {"out": np.empty_like(x)}),
        (x, {"weight": w_there}),
        (x, {"bias": w_there}),
        (x, {"out": put(x)}),
        (x.tolist(), {"weight": w_there}),
    ):
        with pytest.raises(TypeError, match=f"^{next(iter(named))}: "):
            fastnorm.layer_norm(a, **named)
    _, mean, rstd = fastnorm.layer_norm_forward(there)
    m, r = get(mean), get(rstd)
    for name, arguments in (
        ("dy", (x, there, mean, rstd)),
        ("mean", (there, there, m, rstd)),
        ("rstd", (there, there, mean, r)),
    ):
        with pytest.raises(TypeError, match=f"^{name}: "):
            fastnorm.layer_norm_backward(*arguments)
    with pytest.raises(TypeError, match="^x: .*from_dlpack"):
        fastnorm.layer_norm(memoryview(b"1234"))


def test_dtypes_that_no_kernel_reads_are_refused():
    x = put(np.ones((3, 8), np.complex64))
    with pytest.raises(TypeError, match="^x: dtype complex64 is not supported"):
        fastnorm.layer_norm(x)
    with pytest.raises(TypeError, match="^out: .*same_kind"):
        fastnorm.layer_norm(put(np.ones((3, 8), np.float32)), out=put(np.ones((3, 8), np.int32)))


def test_elements_that_share_memory_are_no_output():
    out = cupy.broadcast_to(put(np.zeros((1, 8), np.float32)), (3, 8))
    with pytest.raises(ValueError, match="^out: output array is read-only"):
        fastnorm.layer_norm(put(np.ones((3, 8), np.float32)), out=out)


def test_cupy_is_not_imported_for_numpy_arrays():
    """G05: absent, broken or there; also where another package has put a broken one into sys.modules."""
    code = """
import sys, importlib.abc
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cupy": raise {error}
if {broken}: sys.meta_path.insert(0, Broken())
import numpy as np, fastnorm
assert fastnorm.layer_norm(np.ones((2, 4), np.float32)).shape == (2, 4)
assert "cupy" not in sys.modules and "fastnorm._cuda" not in sys.modules
"""
    for broken, error in (
        (0, "None"),
        (1, "ImportError('libcuda.so.1')"),
        (1, "OSError('x')"),
        (1, "RuntimeError('no device')"),
    ):
        subprocess.run([sys.executable, "-c", code.format(broken=broken, error=error)], check=True)


# ---- devices --------------------------------------------------------------------------------------


def test_arrays_of_another_device_are_computed_there(emulated, device):
    """G04: on a second device that only the emulator has."""
    a = np.arange(24.0, dtype=np.float32).reshape(3, 8)
    with device.entered(1):
        x, w = put(a), put(a[0])
    here = put(a[0])
    assert x.device.id == 1 and here.device.id == 0 and device.number == 0
    y, mean, rstd = fastnorm.layer_norm_forward(x, w)
    grads = fastnorm.layer_norm_backward(x, x, mean, rstd, w)
    assert all(r.device.id == 1 for r in (y, mean, rstd, *grads))
    assert device.number == 0
    np.testing.assert_allclose(get(y), reference.layer_norm(a, a[0]).astype(float), rtol=1e-5)
    for named in ({"weight": here}, {"bias": here}, {"out": put(a)}):
        with pytest.raises(ValueError, match=f"^{next(iter(named))}: .*device"):
            fastnorm.layer_norm(x, **named)
        assert device.number == 0
    with pytest.raises(ValueError, match="^dy: .*device"):
        fastnorm.layer_norm_backward(put(a), x, mean, rstd)
    with pytest.raises(ValueError, match="^weight: .*device"):
        fastnorm.layer_norm(put(a), w)


def test_a_kernel_is_compiled_once_for_each_device(emulated, device):
    device.forget()
    for _ in range(3):
        for number in (0, 1):
            with device.entered(number):
                fastnorm.rms_norm(put(np.ones((3, 8), np.float32)))
    assert sources.kernel.cache_info().misses == 2


# ---- a launch costs what it must ------------------------------------------------------------------


def test_a_call_is_one_launch_and_no_hidden_work(emulated):
    """One kernel, no allocation but for results; CuPy's own kernels would raise here."""
    x, w = put(np.ones((40, 1000), np.float16)), put(np.ones(1000, np.float16))
    y, mean, rstd = fastnorm.layer_norm_forward(x, w, w)
    for call, names in (
        (lambda: fastnorm.layer_norm(x, w, w, out=y), ["row_forward"]),
        (lambda: fastnorm.layer_norm(x, out=x), ["row_forward"]),
        (lambda: fastnorm.layer_norm_forward(x, w), ["row_forward"]),
        (lambda: fastnorm.layer_norm_backward(x, x, mean, rstd, w), ["row_backward", "finish_sums"]),
        (lambda: fastnorm.layer_norm_backward(x, x, mean, rstd, w, param_grads=False), ["row_backward"]),
        (lambda: fastnorm.layer_norm(x, w.astype(np.float16, copy=False)), ["row_forward"]),
    ):
        emulated.launches.clear()
        call()
        assert [launch.name for launch in emulated.launches] == names


def test_empty_input_launches_no_row_kernel(emulated):
    """S01; statistics and gradients of nothing are filled."""
    for shape in ((0, 8), (8, 0), (3, 0, 8)):
        x = put(np.empty(shape, np.float32))
        y, mean, rstd = fastnorm.layer_norm_forward(x)
        dx, dweight, dbias = fastnorm.layer_norm_backward(x, x, mean, rstd)
        assert y.shape == dx.shape == shape and not get(dweight).any() and not get(dbias).any()
        assert not get(mean).any()
        np.testing.assert_allclose(get(rstd), 1 / np.sqrt(1e-5), rtol=1e-6)
    assert {launch.name for launch in emulated.launches} <= {"fill"}


def test_a_row_has_the_same_bits_whatever_the_schedule_and_the_batch(emulated):
    rng = np.random.default_rng(0)
    for n in (33, 700, 5000, 60_001):
        x, dy = rng.standard_normal((2, 20, n)).astype(np.float32)
        seen = set()
        for emulated.seed in (1, 2, 3):
            y, mean, rstd = fastnorm.layer_norm_forward(put(x))
            results = (y, mean, rstd, *fastnorm.layer_norm_backward(put(dy), put(x), mean, rstd))
            seen.add(b"".join(get(r).tobytes() for r in results))
        assert len(seen) == 1


# ---- views ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_views_count_by_their_values(dtype):
    """G01: x, weight, dy and out; strides of zero and below, odd starts."""
    rng = np.random.default_rng(1)
    base = rng.standard_normal((64, 48)).astype(dtype)
    b = put(base)
    for view in (
        lambda a: a.T,
        lambda a: a[:, :40],
        lambda a: a[3:, 8:],
        lambda a: a[::2],
        lambda a: a[:, ::-1],
        lambda a: a[:, 1:33],
        lambda a: a[::-3, ::2],
        lambda a: a.reshape(8, 8, 48)[:, 1:7],
        lambda a: a.reshape(8, 8, 48).transpose(1, 0, 2),
        lambda a: a.reshape(4, 4, 4, 4, 3, 4).transpose(5, 1, 3, 0, 2, 4)[::2],
        lambda a: a.reshape(2, 2, 2, 2, 2, 2, 3, 2, 2, 2, 2)[:, :, ::-1, :, :, ::-1, ::2],
    ):
        v, host = view(b), np.ascontiguousarray(view(base))
        plain = put(host)
        assert get(fastnorm.layer_norm(v)).tobytes() == get(fastnorm.layer_norm(plain)).tobytes()
        w = put(base)[::-1, 5][: v.shape[-1]]
        w_plain = put(np.ascontiguousarray(base[::-1, 5][: v.shape[-1]]))
        if w.shape[0] == v.shape[-1]:
            y, mean, rstd = fastnorm.layer_norm_forward(v, w)
            assert get(y).tobytes() == get(fastnorm.layer_norm(plain, w_plain)).tobytes()
            ours = fastnorm.layer_norm_backward(v, v, mean, rstd, w)
            theirs = fastnorm.layer_norm_backward(plain, plain, mean, rstd, w_plain)
            assert all(get(p).tobytes() == get(q).tobytes() for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("order", [(1, 0), (1, 2, 0), (2, 0, 1), (2, 1, 0), (0, 2, 1)], ids=str)
def test_transposing_copies_read_and_write_in_runs(order, monkeypatch):
    """Of a tile, neighbouring threads read along dimension 4 and write along dimension 5."""
    launches = []
    monkeypatch.setattr(
        sources, "kernel", lambda device, source, name: lambda grid, block, args, **_: launches.append((name, args))
    )
    source = put(np.zeros((40, 50, 60)[: len(order)], np.float32)).transpose(order)
    copies.copy(source, put(np.zeros(source.shape, np.float32)))
    [(name, (_, _, *_, s0, s1, s2, s3, s4, s5, t0, t1, t2, t3, t4, t5))] = launches
    assert name == "copy_tiles" and s4 == t5 == 4, (s4, s5, t4, t5)


# ---- paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_every_path_around_its_limits(norm, dtype):
    """The last length of one path and the first of the next, against the reference."""
    rng = np.random.default_rng(2)
    size = dtype.itemsize
    centered = norm == "layer_norm"
    paths = set()
    for packs in (1, 2, 3, 32, 64, 65, 128, 129, 512, 513, 1024, 1025, 2048, 2049, 14335, 14337):
        n = packs * 16 // size
        for columns in {n, max(1, n - 1)}:
            x, dy = (rng.standard_normal((2, 5, columns)) + 1).astype(dtype)
            y, *statistics = getattr(fastnorm, norm + "_forward")(put(x))
            grads = getattr(fastnorm, norm + "_backward")(put(dy), put(x), *statistics)
            tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "float64": 1e-12}[dtype.name]
            wanted = getattr(reference, norm)(x)
            np.testing.assert_allclose(get(y).astype(float), wanted.astype(float), rtol=tolerance, atol=tolerance)
            for g, w in zip(grads, getattr(reference, norm + "_backward")(dy, x), strict=True):
                np.testing.assert_allclose(get(g).astype(float), w.astype(float), rtol=tolerance, atol=20 * tolerance)
            paths |= {
                geometry.forward_plan(columns, size, 227 << 10)[:2],
                geometry.backward_plan(columns, size, centered, 227 << 10)[:2],
            }
    wanted = {
        (s.removesuffix(".cu"), m[2:])
        for s, m in geometry.variants()
        if m[:2] == (("storage", dtype.name), ("centered", int(centered)))
    }
    assert paths == wanted, "a path that no length here takes"


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_what_is_not_finite_stays_in_its_row_where_rows_come_in_slices(dtype):
    """N12, N03, N06 for the path that no other test of these is long enough for."""
    n = 16 * 14400 // dtype.itemsize + 1
    assert geometry.forward_plan(n, dtype.itemsize, 227 << 10).source == "slice_forward"
    x = np.random.default_rng(4).standard_normal((6, n)).astype(dtype)
    clean = x.copy()
    x[1, n - 1], x[2, 5], x[3, n // 2], x[4] = np.inf, np.nan, -np.inf, 0.1
    for eps in (1e-5, 0.0):
        y, mean, rstd = (get(a).astype(float) for a in fastnorm.layer_norm_forward(put(x), eps=eps))
        assert np.isnan(y[1:4]).all() and (y[4] == 0).all()
        assert mean[1, 0] == np.inf and np.isnan(mean[2, 0]) and mean[3, 0] == -np.inf and mean[4, 0] == float(x[4, 0])
        assert np.isinf(rstd[4, 0]) if eps == 0 else np.isclose(rstd[4, 0], 1 / np.sqrt(eps))
        assert not np.isfinite(rstd[1, 0])
        whole = get(fastnorm.layer_norm(put(clean), eps=eps)).astype(float)
        assert (y[[0, 5]] == whole[[0, 5]]).all()
        y, rstd = (get(a).astype(float) for a in fastnorm.rms_norm_forward(put(x), eps=eps))
        assert np.isnan(y[1, n - 1]) and (y[1, :-1] == 0).all() and np.isnan(y[2]).all() and rstd[1, 0] == 0


def test_rows_of_one_length_leave_room_for_those_of_another():
    """They share a kernel, and with it the limit of its shared memory."""
    for n in (40_000, 20_000, 40_000):
        assert geometry.forward_plan(n, 4, 227 << 10).shared_memory > 48 << 10
        fastnorm.layer_norm(put(np.ones((2, n), np.float32)))
    for n in (7000, 6000, 7000):
        x, one = put(np.ones((2, n), np.float32)), put(np.ones((2, 1), np.float32))
        assert geometry.backward_plan(n, 4, True, 227 << 10).shared_memory > 48 << 10
        fastnorm.layer_norm_backward(x, x, one, one)


@pytest.mark.parametrize("scale", [5e151, 1e152, 2e152, 2.9e152, 4e152, 1e-160])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_slices_in_range_whose_sum_is_not(norm, scale):
    """N06: the squares of each slice fit into a double, those of the row do not."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((4, 30_000)) * scale
    x[1] = rng.standard_normal(30_000) * min(scale, 1e150)
    x[1, :8192] += min(scale * 1e8, 1e160)
    x[2] = 5e304
    x[3, :9000] = 0
    # A constant row is 0 / 0 to the reference.
    with np.errstate(all="ignore"):
        wanted = getattr(reference, norm)(x, eps=0.0)
    got = get(getattr(fastnorm, norm)(put(x), eps=0.0))
    keep = [0, 1, 2, 3] if norm == "rms_norm" else [0, 1, 3]
    largest = np.abs(wanted[keep]).max(axis=1, keepdims=True)
    assert (np.abs(got[keep] - wanted[keep]) <= 4 * np.spacing(largest.astype(float))).all()
    if norm == "layer_norm":
        assert (got[2] == 0).all()


def test_overlap_is_seen_between_views_that_came_in_apart(emulated):
    """As two views of another library's array do: each with an owner of its own."""
    rng = np.random.default_rng(6)
    whole = rng.standard_normal((40, 100)).astype(np.float32)
    memory = put(whole)

    def view(start):
        first = memory.data.ptr + 400 * start
        pointer = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(first, 39 * 400, memory, 0), 0)
        return cupy.ndarray((39, 80), np.float32, pointer, (400, 4))

    expected = get(fastnorm.layer_norm(put(np.ascontiguousarray(whole[:39, :80]))))
    fastnorm.layer_norm(view(0), out=view(1))
    np.testing.assert_array_equal(get(memory)[1:, :80], expected)


def test_statistics_at_odd_addresses_are_read_right():
    rng = np.random.default_rng(7)
    x = put(rng.standard_normal((5, 33)).astype(np.float32))
    _, mean, rstd = fastnorm.layer_norm_forward(x)

    def odd(a):
        return put(np.frombuffer(b"\0" + get(a).tobytes(), np.uint8))[1:].view(np.float32).reshape(5, 1)

    expected = fastnorm.layer_norm_backward(x, x, mean, rstd)
    for results in (
        fastnorm.layer_norm_backward(x, x, odd(mean), rstd),
        fastnorm.layer_norm_backward(x, x, mean, odd(rstd)),
    ):
        assert all(get(p).tobytes() == get(q).tobytes() for p, q in zip(results, expected, strict=True))


def test_more_rows_than_a_grid_is_wide():
    """S03: rows are on the first dimension of the grid."""
    rows = 70_000
    x = np.array([0.5, -1.0, 2.0], np.float32) + (np.arange(rows, dtype=np.float32) % 17)[:, None]
    y, mean, rstd = fastnorm.layer_norm_forward(put(x))
    np.testing.assert_array_equal(get(y), np.resize(get(y)[:17], y.shape))
    dx = fastnorm.layer_norm_backward(put(x), put(x), mean, rstd)[0]
    np.testing.assert_array_equal(get(dx), np.resize(get(dx)[:17], dx.shape))


def test_long_sums_do_not_stall():
    """N10: with a plain float32 sum of equal values, the gradient of the bias is off by percents."""
    rows = 200_000
    dy, x = put(np.full((rows, 1), 0.1, np.float32)), put(np.zeros((rows, 1), np.float32))
    one = put(np.ones((rows, 1), np.float32))
    dbias = fastnorm.layer_norm_backward(dy, x, x, one)[2]
    np.testing.assert_allclose(get(dbias), [rows * float(np.float32(0.1))], rtol=2e-7)


@pytest.mark.slow
def test_more_elements_than_32_bits_count(device):
    """S05, on a GPU."""
    if device.is_emulated:
        pytest.skip("gigabytes: needs a GPU")
    rows, columns = 4_194_305, 512
    x = cupy.zeros((rows, columns), cupy.float16)
    x[rows // 2 :, 0] = 1
    x[-1] = cupy.arange(columns)
    y = fastnorm.layer_norm(x)
    for i in (0, rows // 2, rows - 2, rows - 1):
        assert (y[i] == fastnorm.layer_norm(x[i : i + 1])[0]).all()


# ---- conversions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=name_of)
def test_every_16_bit_number_is_widened_right(dtype):
    patterns = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = put(np.zeros(2**16, np.float32))
    copies.copy(put(patterns), wide)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(get(wide), patterns.astype(np.float32))


@pytest.mark.parametrize("source", [np.float32, np.float64])
@pytest.mark.parametrize("dtype", FLOATS[:2], ids=name_of)
def test_numbers_are_narrowed_to_the_nearest(dtype, source):
    """Around every 16-bit number and every middle between two of them; ties to even, overflow, subnormals, NaN."""
    with np.errstate(all="ignore"):
        patterns = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float64)
    finite = np.sort(patterns[np.isfinite(patterns)])
    middles = (finite[1:] + finite[:-1]) / 2
    largest = float(ml_dtypes.finfo(dtype).max)
    edge = largest + (largest - float(finite[-2])) / 2
    values = np.concatenate([finite, middles, [np.inf, -np.inf, np.nan, edge, -edge, largest * 4, -largest * 4]])
    with np.errstate(all="ignore"):
        values = np.concatenate(
            [np.nextafter(values.astype(source), np.inf), values, np.nextafter(values.astype(source), -np.inf)]
        )
        values = values.astype(source)
        # Rounded to nearest by hand: of the two neighbours the closer one, the even one in the middle.
        expected = nearest(values.astype(np.float64), finite, patterns, edge)
    narrow = put(np.zeros(values.shape, dtype))
    copies.copy(put(values), narrow)
    # Below the normal numbers of float32 a GPU flushes, as CuPy compiles.
    with np.errstate(all="ignore"):
        there = get(narrow).astype(np.float64)
    normal = ~(np.abs(values) < 2.0**-126)
    np.testing.assert_array_equal(there[normal], expected[normal])


def nearest(values, finite, patterns, edge):
    grid = np.unique(finite)
    above = np.clip(np.searchsorted(grid, values), 1, grid.size - 1)
    low, high = grid[above - 1], grid[above]
    even = {v: i % 2 == 0 for i, v in enumerate(patterns) if np.isfinite(v)}
    middle = (low + high) / 2
    result = np.where(values < middle, low, high)
    for i in np.flatnonzero(values == middle):
        result[i] = low[i] if even[low[i]] else high[i]
    result[np.abs(values) >= edge] = np.copysign(np.inf, values[np.abs(values) >= edge])
    result[np.isnan(values)] = np.nan
    return result


@pytest.mark.parametrize("dtype", INTEGERS, ids=name_of)
def test_integers_become_float64(dtype):
    info = None if dtype.kind == "b" else np.iinfo(dtype)
    a = np.resize(np.array([1, 0, 1] + ([] if info is None else [info.max, info.min, info.max // 3]), dtype), (5, 12))
    for view in (lambda v: v, lambda v: v.T, lambda v: v[::2, 1:]):
        there = view(put(a))
        wide = cupy.empty(there.shape, np.float64)
        copies.copy(there, wide)
        np.testing.assert_array_equal(get(wide), view(a).astype(np.float64))
    y = fastnorm.layer_norm(put(a), put(a[0]))
    assert y.dtype == np.float64
    np.testing.assert_array_equal(get(y), get(fastnorm.layer_norm(put(a.astype(float)), put(a[0].astype(float)))))


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS[:3], ids=name_of)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=name_of)
def test_parameters_of_any_dtype_are_rounded_to_the_arithmetic_type(x_dtype, dtype):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 100)).astype(x_dtype)
    w, b = (3 * rng.standard_normal((2, 100)) + 4).astype(dtype)
    real = np.float64 if x_dtype == np.float64 else np.float32
    y = fastnorm.layer_norm(put(x), put(w), put(b))
    assert get(y).tobytes() == get(fastnorm.layer_norm(put(x), put(w.astype(real)), put(b.astype(real)))).tobytes()
    odd = put(np.resize(w, 101))[1:]
    assert (
        get(fastnorm.rms_norm(put(x), odd, weight_offset=1.0)).tobytes()
        == get(fastnorm.rms_norm(put(x), put(np.resize(w, 101)[1:].astype(real) + real(1)))).tobytes()
    )
