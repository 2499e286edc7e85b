"""The same bits: for any number of threads, processor level, memory layout, axis and batch (DESIGN.md 3.5)."""

import numpy as np
import pytest
from helpers import (
    FLOATS,
    LAYOUTS,
    NORMS,
    TESTS,
    WIDE_FLOATS,
    assert_same_bits,
    everything,
    forward_of,
    name_of,
    run_python,
)

import fastnorm


def digest_lines(**environment):
    return run_python(TESTS / "digest.py", timeout=120, **environment).stdout.splitlines()


@pytest.fixture(scope="module")
def baseline_lines():
    """One thread, the narrowest level, no streaming stores."""
    return digest_lines(FASTNORM_NUM_THREADS=1, FASTNORM_ISA="baseline", FASTNORM_STREAM_BYTES=1 << 60)


def assert_same_digests(lines, expected):
    different = [line for line, wanted in zip(lines, expected, strict=True) if line != wanted]
    assert not different, "\n".join(different[:40])


@pytest.mark.parametrize("level", fastnorm.show_config("dict")["isa_levels"][1:])
def test_every_processor_level_gives_the_same_bits(level, baseline_lines):
    assert len(baseline_lines) > 400
    assert_same_digests(digest_lines(FASTNORM_NUM_THREADS=1, FASTNORM_ISA=level), baseline_lines)


@pytest.mark.parametrize("level", fastnorm.show_config("dict")["isa_levels"])
def test_stores_past_the_cache_give_the_same_bits(level, baseline_lines):
    assert_same_digests(
        digest_lines(FASTNORM_NUM_THREADS=2, FASTNORM_ISA=level, FASTNORM_STREAM_BYTES=1), baseline_lines
    )


@pytest.mark.parametrize("n", [2, 3, 7])
def test_any_number_of_threads_gives_the_same_bits(n, baseline_lines):
    assert_same_digests(digest_lines(FASTNORM_NUM_THREADS=n), baseline_lines)


def test_set_num_threads_does_not_change_the_bits(threads, rng):
    """As above within one process, and run to run."""
    x, dy = rng.standard_normal((2, 3001, 41)).astype(np.float32)
    w, b = rng.standard_normal((2, 41)).astype(np.float32)
    for norm in NORMS:
        threads(1)
        first = everything(norm, x, dy, w, b)
        for n in (1, 2, 3, 7):
            threads(n)
            for _ in range(3):
                assert_same_bits(everything(norm, x, dy, w, b), first)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_memory_layout_does_not_change_the_bits(norm, dtype, layout, rng):
    """Of x, of dy, of weight, of all; over the last, the first, and a middle axis."""
    for shape, axis in (((40, 70), -1), ((100, 48), 0), ((3, 40, 50), 1), ((2, 1100), -1), ((6, 5, 40), (0, 2))):
        axes = axis if isinstance(axis, tuple) else (axis,)
        x, dy = (rng.standard_normal((2, *shape)) + 1).astype(dtype)
        w, b = rng.standard_normal((2, *[shape[a] for a in axes])).astype(dtype)
        plain = everything(norm, x, dy, w, b, axis=axis)
        assert_same_bits(everything(norm, layout(x), layout(dy), layout(w), layout(b), axis=axis), plain)
        assert_same_bits(everything(norm, layout(x), dy, w, b, axis=axis), plain)
        assert_same_bits(everything(norm, x, layout(dy), w, b, axis=axis), plain)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
@pytest.mark.parametrize("shape, axis", [((3000, 40), -1), ((2, 70_003), -1), ((90, 1111), 0)])
def test_memory_layout_does_not_change_the_bits_of_large_arrays(shape, axis, layout, rng, threads):
    """Large enough for threads, and for rows that are split over them."""
    threads(3)
    x, dy = (rng.standard_normal((2, *shape)) + 1).astype(np.float32)
    for norm in NORMS:
        assert_same_bits(everything(norm, layout(x), layout(dy), axis=axis), everything(norm, x, dy, axis=axis))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(norm, dtype, rng):
    for rows, columns in ((9, 1), (9, 7), (70, 33), (37, 100), (9, 1025), (6, 5000), (5, 70_001)):
        x, dy = (rng.standard_normal((2, rows, columns)) + 2).astype(dtype)
        x[rows // 2, 0] = 1e4
        w, b = rng.standard_normal((2, columns)).astype(dtype)
        batch = everything(norm, x, dy, w, b)
        for r in range(0, rows, 3):
            for alone in (everything(norm, x[r], dy[r], w, b), everything(norm, x[r : r + 1], dy[r : r + 1], w, b)):
                for key in batch.keys() - {"dweight", "dbias"}:
                    assert_same_bits(alone[key].reshape(-1), batch[key][r])
        part = everything(norm, x[1:], dy[1:], w, b)
        for key in batch.keys() - {"dweight", "dbias"}:
            assert_same_bits(part[key], batch[key][1:])


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_the_first_axis_has_the_bits_of_the_last_of_the_transpose(norm, dtype, rng):
    """Rows side by side in tiles against rows one by one: awkward lengths in both directions."""
    for columns, rows in (
        (1, 70),
        (3, 40),
        (15, 33),
        (16, 64),
        (17, 1100),
        (63, 65),
        (64, 200),
        (65, 2049),
        (127, 31),
        (300, 1025),
        (511, 70),
        (513, 70),
        (1023, 40),
        (1024, 40),
        (1025, 40),
        (2500, 33),
    ):
        x, dy = (rng.standard_normal((2, columns, rows)) + 1).astype(dtype)
        w, b = rng.standard_normal((2, columns)).astype(dtype)
        across = everything(norm, x, dy, w, b, axis=0)
        along = everything(norm, np.ascontiguousarray(x.T), np.ascontiguousarray(dy.T), w, b)
        for key in along:
            assert_same_bits(across[key] if key in ("dweight", "dbias") else across[key].T, along[key])


@pytest.mark.parametrize("dtype", WIDE_FLOATS, ids=name_of)
@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_rows_that_are_summed_again_keep_their_bits_in_tiles_and_splits(norm, dtype, rng, threads):
    """An outlier first, where the first guess of the mean is wrong; values to be scaled; both in one tile."""
    largest = 1e38 if dtype == np.float32 else 1e306
    for rows, columns in ((70, 100), (40, 1500), (3, 70_001)):
        x = rng.standard_normal((rows, columns)) + 5
        x[0::5, 0] = 1e9
        x[1::7] *= 1e-30
        plain = x.astype(dtype)
        x[2::6] = np.clip(x[2::6] * 0.1, -1, 1) * largest
        scaled = x.astype(dtype)
        for a in (plain, scaled):
            alone = [forward_of(norm)(row, eps=1e-20) for row in a]
            for n in (1, 3):
                threads(n)
                along = forward_of(norm)(a, eps=1e-20)
                across = forward_of(norm)(np.ascontiguousarray(a.T), axis=0, eps=1e-20)
                for k, result in enumerate(along):
                    assert_same_bits(across[k].T, result)
                    assert_same_bits(np.array([r[k] for r in alone]), result)


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_a_norm_and_its_forward_give_the_same_y(norm, rng):
    x = rng.standard_normal((30, 50)).astype(np.float32)
    assert_same_bits(norm(x), forward_of(norm)(x)[0])


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
@pytest.mark.parametrize(
    "axis, same", [(-1, 1), ((1,), 1), ((-1,), 1), (1, -1), (None, (0, 1)), ((1, 0), (0, 1))], ids=str
)
def test_an_axis_is_the_same_however_it_is_written(norm, axis, same, rng):
    x = rng.standard_normal((30, 50)).astype(np.float32)
    assert_same_bits(forward_of(norm)(x, axis=axis), forward_of(norm)(x, axis=same))


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
def test_parameter_gradients_are_there_or_not_and_dx_is_the_same(norm, rng):
    x, dy = rng.standard_normal((2, 130, 1100)).astype(np.float32)
    (*statistics,) = forward_of(norm)(x)[1:]
    backward = fastnorm.layer_norm_backward if norm is fastnorm.layer_norm else fastnorm.rms_norm_backward
    dx, *params = backward(dy, x, *statistics, param_grads=False)
    assert params == [None] * len(params)
    assert_same_bits(dx, backward(dy, x, *statistics)[0])
