"""Any strides, alignment and byte order, of inputs and of out; what may overlap; what must stay untouched."""

import mmap
import os

import numpy as np
import pytest
from helpers import (
    BFLOAT16,
    FLOATS,
    LAYOUTS,
    NORMS,
    WRITABLE_LAYOUTS,
    assert_same_bits,
    backward_of,
    bits,
    exact,
    forward_of,
    is_centered,
    name_of,
    run_python,
)

import fastnorm


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_layouts_of_this_suite_keep_the_values(layout, dtype, rng):
    for shape in ((5,), (4, 6), (2, 3, 4)):
        a = rng.standard_normal(shape).astype(dtype)
        assert bits(
            layout(a).astype(dtype)
            if dtype != BFLOAT16 or layout(a).dtype.isnative
            else layout(a).view(np.uint16).byteswap().view(BFLOAT16)
        ) == bits(a)


def test_every_kind_of_view_counts_by_its_values(rng):
    """L01: the reported ones."""
    b = rng.standard_normal((6, 8, 10)).astype(np.float32)
    wb = rng.standard_normal(40).astype(np.float32)
    views = [
        b.transpose(0, 2, 1),
        b.T,
        b[::-1],
        b[:, :, ::-1],
        b[::2, 1::3],
        b[..., ::2],
        np.asfortranarray(b[0]),
        b[:, :1, :],
        b[3:4, ::-2, 1:],
        np.broadcast_to(b[0, 0], (7, 10)),
        np.broadcast_to(b[:, :, :1], (6, 8, 9)),
    ]
    for v in views:
        w = wb[::-2][: v.shape[-1]]
        for norm in NORMS:
            assert_same_bits(norm(v, w), norm(v.copy(), w.copy()))
        out = np.empty((*v.shape, 2), np.float32)[..., 0]
        assert_same_bits(fastnorm.layer_norm(v, out=out).copy(), fastnorm.layer_norm(v.copy()))


@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("out_dtype", FLOATS, ids=name_of)
def test_out_has_any_layout_and_float_dtype(out_dtype, dtype, layout, rng):
    """The result is that of the arithmetic, rounded once to the dtype of out."""
    for shape, axis in (((5, 70), -1), ((70, 40), 0), ((2, 1500), -1), ((3, 40, 60), 1)):
        x, dy = (rng.standard_normal((2, *shape)) + 1).astype(dtype)
        for norm in NORMS:
            _, *statistics = forward_of(norm)(x, axis=axis)
            plain, out = np.empty(shape, out_dtype), layout(np.zeros(shape, out_dtype))
            assert norm(x, axis=axis, out=plain) is plain
            assert norm(x, axis=axis, out=out) is out
            assert_same_bits(native(out), plain)
            result = backward_of(norm)(dy, x, *statistics, axis=axis, out=out)[0]
            assert result is out
            assert_same_bits(native(out), backward_of(norm)(dy, x, *statistics, axis=axis, out=plain)[0])
            if out_dtype == dtype:
                assert_same_bits(plain, backward_of(norm)(dy, x, *statistics, axis=axis)[0])


def native(a):
    """A C-ordered copy in native byte order."""
    if a.dtype.isnative:
        return np.array(a, order="C")
    return np.array(a, order="C").view(f"u{a.itemsize}").byteswap().view(a.dtype.newbyteorder("="))


@pytest.mark.parametrize("out_dtype, half_step", [(np.dtype(np.float16), 2.0**-11), (BFLOAT16, 2.0**-8)], ids=str)
def test_a_float64_result_is_rounded_to_16_bits_once(out_dtype, half_step):
    """Just above the middle: by way of float32 it would be rounded down."""
    b = np.array([1 + half_step + 2.0**-40, 1 + half_step, 1 + half_step - 2.0**-40])
    y = fastnorm.layer_norm(np.zeros((1, 3)), None, b, out=np.empty((1, 3), out_dtype))
    assert y.astype(float).tolist() == [[1 + 2 * half_step, 1, 1]]


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_out_may_be_the_input(norm, dtype, rng):
    """L05: x in forward, x or dy in backward; on any axis; small, and large enough for threads and splits."""
    for shape, axis in (((11, 13), -1), ((200, 500), -1), ((2, 70_001), -1), ((70, 1100), 0), ((3, 80, 90), 1)):
        x, dy = rng.standard_normal((2, *shape)).astype(dtype)
        y, *statistics = forward_of(norm)(x, axis=axis)
        dx, *params = backward_of(norm)(dy, x, *statistics, axis=axis)
        z = x.copy()
        assert norm(z, axis=axis, out=z) is z
        assert_same_bits(z, y)
        for which in (0, 1):
            inputs = [dy.copy(), x.copy()]
            result = backward_of(norm)(*inputs, *statistics, axis=axis, out=inputs[which])
            assert result[0] is inputs[which]
            assert_same_bits(result, (dx, *params))
        # dy is x is out.
        z = x.copy()
        assert_same_bits(
            backward_of(norm)(z, z, *statistics, axis=axis, out=z), backward_of(norm)(x, x, *statistics, axis=axis)
        )


@pytest.mark.parametrize("layout", WRITABLE_LAYOUTS, ids=name_of)
def test_out_may_be_the_input_in_any_layout(layout, rng):
    for axis in (0, -1):
        for shape in ((7, 9), (80, 90)):
            x = rng.standard_normal(shape).astype(np.float32)
            for norm in NORMS:
                z = layout(x)
                norm(z, axis=axis, out=z)
                assert_same_bits(native(z), norm(x, axis=axis))


def memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def overlapping(shape, dtype, rng, shift):
    """Two arrays of one shape, the second so many elements further on in the same memory."""
    n = int(np.prod(shape))
    buffer = rng.standard_normal(n + abs(shift)).astype(dtype)
    first, second = buffer[:n].reshape(shape), buffer[abs(shift) :].reshape(shape)
    return (first, second) if shift > 0 else (second, first)


@pytest.mark.parametrize("shift", [1, 3, 64, -1, -3, -64])
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_out_may_overlap_an_input_in_part(norm, dtype, shift, rng):
    """Through a copy, on any axis and layout."""
    for shape, axis in (((6, 7), -1), ((40, 130), -1), ((130, 40), 0)):
        x, out = overlapping(shape, dtype, rng, shift)
        dy = rng.standard_normal(shape).astype(dtype)
        expected = forward_of(norm)(x.copy(), axis=axis)
        got = forward_of(norm)(x, axis=axis, out=out)
        assert got[0] is out
        assert_same_bits(got, expected)

        x, out = overlapping(shape, dtype, rng, shift)
        _, *statistics = forward_of(norm)(x, axis=axis)
        for inputs in ((dy, x), (x, dy)):
            keep = [a.copy() for a in inputs]
            expected = backward_of(norm)(*keep, *statistics, axis=axis)
            assert_same_bits(backward_of(norm)(*inputs, *statistics, axis=axis, out=out), expected)
            out.reshape(-1)[...] = 0
            x, out = overlapping(shape, dtype, rng, shift)
            inputs = (x, dy)


def test_out_may_be_the_input_transposed_or_reversed(rng):
    for view in (np.transpose, np.flipud, np.fliplr):
        for axis in (0, 1):
            x = rng.standard_normal((50, 50)).astype(np.float32)
            expected = fastnorm.layer_norm(x.copy(), axis=axis)
            assert_same_bits(np.array(fastnorm.layer_norm(x, axis=axis, out=view(x)), order="C"), expected)


@pytest.mark.parametrize("rows", [6, 200])
def test_out_may_overlap_the_parameters_and_the_statistics(rows, rng):
    n = rows
    for norm in NORMS:
        x, dy = rng.standard_normal((2, rows, n)).astype(np.float32)
        n_parameters = 2 if is_centered(norm) else 1
        expected = norm(x, *rng.standard_normal((n_parameters, n)).astype(np.float32) * 0 + np.float32(2))
        for r in (0, rows - 1):
            out = np.full((rows, n), 2, np.float32)
            assert_same_bits(norm(x, *[out[r]] * n_parameters, out=out), expected)
        y, *statistics = forward_of(norm)(x)
        weight = rng.standard_normal(n).astype(np.float32)
        expected = backward_of(norm)(dy, x, *statistics, weight)
        out = np.empty((rows, n), np.float32)
        out[1] = weight
        assert_same_bits(backward_of(norm)(dy, x, *statistics, out[1], out=out), expected)
        for k in range(len(statistics)):
            out = np.empty((rows, n), np.float32)
            out[:, 2:3] = statistics[k]
            views = list(statistics)
            views[k] = out[:, 2:3]
            assert_same_bits(backward_of(norm)(dy, x, *views, weight, out=out), expected)
            # Contiguous too.
            flat = np.empty(rows * n, np.float32)
            flat[3 : 3 + rows] = statistics[k].ravel()
            views[k] = flat[3 : 3 + rows].reshape(rows, 1)
            assert_same_bits(backward_of(norm)(dy, x, *views, weight, out=flat.reshape(rows, n)), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_memory_around_out_stays_untouched(dtype, rng):
    """S06: every width around a vector register, and 320, 769 that others got wrong; forward and backward."""
    for n in [*range(1, 71), 127, 129, 255, 257, 320, 769, 1023, 1025, 4095, 8193]:
        rows = 5
        x, dy = rng.standard_normal((2, rows, n)).astype(dtype)
        w = rng.standard_normal(n).astype(dtype)
        guard = np.full(rows * n + 64, 777, dtype)
        out = guard[32 : 32 + rows * n].reshape(rows, n)
        for norm in NORMS:
            y, *statistics = forward_of(norm)(x, w)
            assert_same_bits(norm(x, w, out=out), y)
            assert (guard[:32] == guard[0]).all() and (guard[-32:] == guard[0]).all(), n
            dx = backward_of(norm)(dy, x, *statistics, w, out=out)[0]
            assert_same_bits(dx, backward_of(norm)(dy, x, *statistics, w)[0])
            assert (guard[:32] == guard[0]).all() and (guard[-32:] == guard[0]).all(), n


@pytest.mark.parametrize("axis", [0, -1])
def test_memory_between_the_rows_of_out_stays_untouched(axis, rng):
    for shape in ((5, 33), (70, 90), (50, 1030)):
        x = rng.standard_normal(shape).astype(np.float32)
        wide = np.full((shape[0] + 2, shape[1] + 6), 777, np.float32)
        out = wide[1:-1, 3:-3]
        expected = fastnorm.layer_norm(x, axis=axis)
        fastnorm.layer_norm(x, axis=axis, out=out)
        assert_same_bits(out.copy(), expected)
        out[...] = 777
        assert (wide == 777).all()


@pytest.mark.skipif(not hasattr(mmap, "PROT_READ"), reason="needs mprotect")
def test_nothing_beyond_the_arrays_is_read():
    """The last byte of every input is the last of a page, the next page cannot be read: a load beyond it is a crash."""
    run_python("""
import ctypes, mmap
import ml_dtypes, numpy as np, fastnorm
libc = ctypes.CDLL(None, use_errno=True)
page = mmap.PAGESIZE

def at_the_end(a, front):
    pages = -(-a.nbytes // page) + 2
    memory = mmap.mmap(-1, pages * page)
    keep.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for fence in (start, start + (pages - 1) * page):
        assert libc.mprotect(ctypes.c_void_p(fence), page, 0) == 0
    offset = page if front else (pages - 1) * page - a.nbytes
    view = np.ndarray(a.shape, a.dtype, memory, offset)
    view[...] = a
    return view

keep = []
rng = np.random.default_rng(0)
for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
    for shape, axis in (((3, 5), -1), ((3, 100), -1), ((2, 1030), -1), ((7, 69), -1), ((61, 83), 0), ((5, 1039), 0),
                        ((3, 37, 41), 1)):
        n = shape[axis]
        for front in (False, True):
            x, dy, out = (at_the_end(rng.standard_normal(shape).astype(dtype), front) for _ in range(3))
            w, b = (at_the_end(rng.standard_normal(n).astype(dtype), front) for _ in range(2))
            y, m, r = fastnorm.layer_norm_forward(x, w, b, axis=axis, out=out)
            fastnorm.layer_norm_backward(dy, x, at_the_end(m, front), at_the_end(r, front), w, axis=axis, out=out)
            y, r = fastnorm.rms_norm_forward(x, w, axis=axis, out=out)
            fastnorm.rms_norm_backward(dy, x, r, w, axis=axis, out=out)
import os
os._exit(0)                     # without unmapping what numpy still points to
""")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_large_results_into_odd_addresses_and_strides(direction, axis):
    """Stores past the cache need whole lines; a field of packed records starts each column elsewhere."""
    run_python(
        """
import sys
import numpy as np, fastnorm
direction, axis = sys.argv[1], int(sys.argv[2])
rng = np.random.default_rng(0)
for dtype in (np.float32, np.float64, np.float16):
    for columns, rows in ((50, 128), (3, 1500), (130, 40)):
        size = np.dtype(dtype).itemsize
        x, dy = rng.standard_normal((2, columns, rows)).astype(dtype)
        y, m, r = fastnorm.layer_norm_forward(x, axis=axis)
        dx = fastnorm.layer_norm_backward(dy, x, m, r, axis=axis)[0]
        for gap in (0, 1, 2, size, 3 * size, 64):
            for start in (0, 1, size, 7 * size, 60):
                stride = rows * size + gap
                raw = np.zeros(columns * stride + 256, np.uint8)
                out = np.ndarray(x.shape, dtype, raw.data, -raw.ctypes.data % 64 + start, (stride, size))
                if direction == "forward":
                    fastnorm.layer_norm(x, axis=axis, out=out)
                else:
                    fastnorm.layer_norm_backward(dy, x, m, r, axis=axis, out=out)
                assert np.array_equal(out, y if direction == "forward" else dx), (dtype, columns, gap, start)
""",
        arguments=(direction, str(axis)),
        FASTNORM_STREAM_BYTES=1,
    )


@pytest.mark.parametrize("rows", [65_535, 65_536, 65_537, 131_073])
def test_more_rows_than_16_bits_count(rows):
    """S03, forward and backward."""
    row = np.array([0.5, -1.0, 2.0, 3.0], np.float32)
    x = row + (np.arange(rows, dtype=np.float32) % 17)[:, None]
    for norm in NORMS:
        y, *statistics = forward_of(norm)(x)
        expected = forward_of(norm)(x[:17])
        assert_same_bits(y, np.resize(expected[0], y.shape))
        dy = np.resize(np.array([1, 2, 0, -1], np.float32), x.shape)
        dx = backward_of(norm)(dy, x, *statistics)[0]
        assert_same_bits(dx, np.resize(backward_of(norm)(dy[:17], x[:17], *expected[1:])[0], dx.shape))


@pytest.mark.parametrize("axis", [(1, 2), (-2, -1), (-3, -2), 1, 0, (0, 3), (0, 2), (3, 0, 1), None], ids=str)
def test_several_axes_have_a_weight_of_their_shape(axis, rng):
    """S08: in the order in which the axes stand in x, however they are written."""
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    axes = tuple(range(4)) if axis is None else tuple(sorted(a % 4 for a in np.atleast_1d(axis)))
    w, b = rng.standard_normal((2, *[x.shape[a] for a in axes])).astype(np.float32)
    for norm in NORMS:
        affine = (w, b) if is_centered(norm) else (w,)
        y = norm(x, *affine, axis=axis)
        np.testing.assert_allclose(y, exact(norm, x, *affine, axis=axes).astype(float), atol=3e-6)
        _, *statistics = forward_of(norm)(x, axis=axis)
        assert all(s.shape == tuple(1 if k in axes else n for k, n in enumerate(x.shape)) for s in statistics)


@pytest.mark.parametrize("ndim", [20, 64])
def test_arrays_of_many_dimensions(ndim):
    x = np.arange(12.0).reshape([2, 3, 2] + [1] * (ndim - 3))
    assert_same_bits(fastnorm.layer_norm(x, axis=1), fastnorm.layer_norm(x.reshape(2, 3, 2), axis=1).reshape(x.shape))
    x = np.asarray(x, order="F")
    assert_same_bits(fastnorm.layer_norm(x, axis=None), fastnorm.layer_norm(x.reshape(-1)).reshape(x.shape))


def test_read_only_inputs_are_accepted(rng):
    """L03: weights, statistics and dy too; bytes that Python owns."""
    x, w = rng.standard_normal((20, 16)).astype(np.float32), np.ones(16, np.float32)
    expected = fastnorm.layer_norm(x, w)
    y, mean, rstd = fastnorm.layer_norm_forward(x, w)
    for a in (x, w, mean, rstd):
        a.setflags(write=False)
    assert_same_bits(fastnorm.layer_norm(x, w, w), expected + 1)
    fastnorm.layer_norm_backward(x, x, mean, rstd, w)
    assert_same_bits(fastnorm.layer_norm(np.frombuffer(x.tobytes(), np.float32).reshape(x.shape), w), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_inputs_stay_as_they_are(norm, dtype, rng):
    """L05: float32 above all, where a conversion copies nothing."""
    for shape, axis in (((11, 13), -1), ((90, 80), 0), ((2, 70_000), -1)):
        x, dy = rng.standard_normal((2, *shape)).astype(dtype)
        w, b = rng.standard_normal((2, shape[axis])).astype(dtype)
        y, *statistics = forward_of(norm)(x, axis=axis)
        arrays = [x, dy, w, b, *statistics]
        before = [a.tobytes() for a in arrays]
        norm(x, *((w, b) if is_centered(norm) else (w,)), axis=axis)
        backward_of(norm)(dy, x, *statistics, w, axis=axis)
        assert [a.tobytes() for a in arrays] == before


@pytest.mark.slow
@pytest.mark.skipif(memory_bytes() < 12e9, reason="needs 12 GB of memory")
def test_more_elements_than_32_bits_count():
    """S05: 2**31 + 512 elements, 9 GB."""
    rows, columns = 4_194_305, 512
    x = np.zeros((rows, columns), np.float16)
    x[rows // 2 :, 0] = 1
    x[-1] = np.arange(columns)
    y = fastnorm.layer_norm(x)
    for i in (0, rows // 2, rows - 2, rows - 1):
        assert_same_bits(y[i : i + 1], fastnorm.layer_norm(x[i : i + 1]))
