"""The emulator itself: what breaks a kernel on a GPU must be noticed here. Each test puts a fault into the sources."""

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import numpy as np  # noqa: E402
from device import get, put  # noqa: E402

import fastnorm  # noqa: E402
from fastnorm import _cuda, reference  # noqa: E402
from fastnorm._cuda import geometry, row_norm, sources  # noqa: E402

FORWARD, LONG_ROWS, BACKWARD, LONG_BACKWARD = "forward", "long rows", "backward", "long backward"
FUSED, CHANNELS, CHANNELS_BACKWARD = "residual", "channels", "channels backward"
# Rows of one warp and of several, whole packs and not; in slices.
SHAPES = {
    FORWARD: [(9, 33), (5, 1000), (4, 1027), (3, 4096)],
    BACKWARD: [(60, 33), (60, 400), (60, 1000), (40, 1027), (40, 4096), (30, 5000)],
    LONG_ROWS: [(2, 60_000)],
    LONG_BACKWARD: [(9, 9000)],
    FUSED: [(9, 33), (3, 4096), (2, 60_000)],
    # In columns and in runs.
    CHANNELS: [(3000, 5), (70, 13, 3), (5, 3, 30, 41), (40, 3, 3, 7)],
    CHANNELS_BACKWARD: [(3000, 5), (70, 13, 3), (5, 3, 30, 41), (40, 3, 3, 7)],
}
SEEDS = (1, 2, 3)


def run(emulator, what):
    """Results are those of the reference, on three schedules."""
    rng = np.random.default_rng(0)
    if what in (FUSED, CHANNELS, CHANNELS_BACKWARD):
        return {FUSED: run_fused, CHANNELS: run_channels, CHANNELS_BACKWARD: run_channels}[what](emulator, what, rng)
    for rows, n in SHAPES[what]:
        x, dy = (rng.standard_normal((2, rows, n)) + 1).astype(np.float32)
        w, b = rng.standard_normal((2, n)).astype(np.float32)
        for emulator.seed in SEEDS:
            if what in (FORWARD, LONG_ROWS):
                results = fastnorm.layer_norm_forward(put(x), put(w), put(b))
                wanted = reference.layer_norm_forward(x, w, b)
            else:
                _, mean, rstd = reference.layer_norm_forward(x)
                results = fastnorm.layer_norm_backward(
                    put(dy), put(x), put(mean.astype(np.float32)), put(rstd.astype(np.float32)), put(w)
                )
                wanted = reference.layer_norm_backward(dy, x, w)
            for result, value in zip(results, wanted, strict=True):
                np.testing.assert_allclose(get(result), value.astype(float), rtol=1e-4, atol=2e-5)


def assert_results(results, wanted):
    for result, value in zip(results, wanted, strict=True):
        np.testing.assert_allclose(get(result), value.astype(float).reshape(result.shape), rtol=1e-4, atol=2e-5)


def run_fused(emulator, what, rng):
    for shape in SHAPES[what]:
        x, residual, dy = rng.standard_normal((3, *shape)).astype(np.float32)
        statistics = [cupy.empty((shape[0],), np.float32) for _ in range(2)]
        for emulator.seed in SEEDS:
            y, h, dx, dresidual = (cupy.empty(shape, np.float32) for _ in range(4))
            _cuda.row_norm_forward(put(x), put(residual), 2.0, 1, None, 0.0, None, 1e-5, y, h, *statistics, True)
            assert_results((y, h), reference.add_layer_norm(x, residual, alpha=2.0))
            _cuda.row_norm_backward(put(dy), put(x), h, 1, None, 0.0, *statistics, 2.0, dx, dresidual, None, None, True)
            assert_results((dx, dresidual), reference.add_layer_norm_backward(dy, x, get(h), alpha=2.0)[:2])


def run_channels(emulator, what, rng):
    for shape in SHAPES[what]:
        x, dy = (rng.standard_normal((2, *shape)) + 1).astype(np.float32)
        w, b = rng.standard_normal((2, shape[1])).astype(np.float32)
        seen = set()
        for emulator.seed in SEEDS:
            running = put(np.zeros(shape[1])), put(np.ones(shape[1]))
            y, dx = cupy.empty(shape, np.float32), cupy.empty(shape, np.float32)
            mean, rstd, dweight, dbias = (cupy.empty((shape[1],), np.float32) for _ in range(4))
            _cuda.channel_norm_forward(put(x), 1, put(w), put(b), 1e-5, *running, 0.1, y, mean, rstd, True)
            if what == CHANNELS:
                assert_results((y, mean, rstd), reference.batch_norm_forward(x, w, b, training=True))
                assert_results(running, reference.running_statistics(x, np.zeros(shape[1]), np.ones(shape[1])))
                # A wrong hi costs a sweep more and the last bits only.
                seen.add(get(y).tobytes())
                assert len(seen) == 1
                continue
            _cuda.channel_norm_backward(put(dy), put(x), 1, put(w), mean, rstd, dx, dweight, dbias, True)
            dx_wanted, *sums = reference.batch_norm_backward(dy, x, w)
            assert_results((dx,), (dx_wanted,))
            for got, value in zip((dweight, dbias), sums, strict=True):
                np.testing.assert_allclose(get(got), value.astype(float), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("what", SHAPES)
def test_the_sources_as_they_are_pass(what, emulated):
    run(emulated, what)


FAULTS = {
    # A barrier less: reads what nobody has written.
    "no barrier before the slots are read": (FORWARD, "sums.cuh", "    wait(t);\n", ""),
    # Slots that are written again while others still read them.
    "one half of the slots only": (FORWARD, "sums.cuh", "t.turn ^= 1;", ""),
    "one barrier for all teams": (BACKWARD, "sums.cuh", "barrier(t.number + 1, t.size)", "barrier(1, t.size)"),
    "too few threads at a barrier": (FORWARD, "sums.cuh", "barrier(t.number + 1, t.size)", "barrier(1, t.size + 32)"),
    "a warp that leaves before the barrier": (
        FORWARD,
        "sums.cuh",
        "    wait(t);\n",
        "    if (t.rank >= 32) return;\n    wait(t);\n",
    ),
    "__syncthreads in a branch": (
        BACKWARD,
        "row_backward.cu",
        "        if (n_units > 1) __syncthreads();",
        "        if (unit == turn) __syncthreads();",
    ),
    "no barrier between the teams that add up": (
        BACKWARD,
        "row_backward.cu",
        "        if (n_units > 1) __syncthreads();",
        "",
    ),
    "a shuffle by a part of the warp": (
        FORWARD,
        "sums.cuh",
        "        for (int i = 0; i < N; i++) parts[i] = combine(parts[i], from_lane(parts[i], mask));\n    if",
        "        if (t.rank % 32 < 16)\n"
        "        for (int i = 0; i < N; i++) parts[i] = combine(parts[i], from_lane(parts[i], mask));\n    if",
    ),
    "a shuffle too few": (FORWARD, "sums.cuh", "mask > 0; mask /= 2", "mask > 1; mask /= 2"),
    "the row ends one value later": (
        FORWARD,
        "packs.cuh",
        "index_t rest = n_cols - first(k);",
        "index_t rest = n_cols + 1 - first(k);",
    ),
    "the row ends one value earlier": (
        FORWARD,
        "packs.cuh",
        "index_t rest = n_cols - first(k);",
        "index_t rest = n_cols - 1 - first(k);",
    ),
    "values beyond the row count": (
        FORWARD,
        "statistics.cuh",
        "(CENTERED && i < n_valid ? m.hi : (real)0)",
        "(CENTERED ? m.hi : (real)0)",
    ),
    "wide accesses at odd addresses": (
        FORWARD,
        "packs.cuh",
        "n >= pack<S>::VALUES && width == 16",
        "n >= pack<S>::VALUES",
    ),
    "whole packs at the end of a row": (
        FORWARD,
        "packs.cuh",
        "if (n >= pack<S>::VALUES && width == 16) {\n        words4 v;",
        "if (n >= 1 && width >= 4) {\n        words4 v;",
    ),
    "rows that are not there are written": (FORWARD, "row_forward.cu", "    if (!here) return;\n", ""),
    "blocks that share their partial sums": (
        BACKWARD,
        "row_backward.cu",
        "partials + (index_t)blockIdx.x * N_SUMS",
        "partials + 0 * N_SUMS",
    ),
    "shared sums that nobody has zeroed": (
        BACKWARD,
        "row_backward.cu",
        "if (rank + k * step < n_packs) at(k, part) = chunk();",
        ";",
    ),
    "rows of 32 bits": (
        LONG_ROWS,
        "slice_forward.cu",
        "x + row * x_stride + offset, true",
        "x + row * (int)(x_stride << 16) + offset, true",
    ),
    "a slice too few": (
        LONG_ROWS,
        "slice_forward.cu",
        "return (n_cols + SLICE - 1) / SLICE;",
        "return n_cols / SLICE;",
    ),
    "the last slice is whole": (
        LONG_ROWS,
        "slice_forward.cu",
        "return smaller(SLICE, n_cols - slice * SLICE);",
        "return SLICE;",
    ),
    "every block has the first rows": (
        LONG_BACKWARD,
        "slice_backward.cu",
        "row = chunk * rows_per_chunk, end",
        "row = 0, end",
    ),
    "one row too many in a chunk": (
        LONG_BACKWARD,
        "slice_backward.cu",
        "end = smaller(row + rows_per_chunk, n_rows)",
        "end = row + rows_per_chunk + 1",
    ),
    "a residual that is added to the packs of others": (
        FUSED,
        "packs.cuh",
        "residual + x.first(k) * sizeof",
        "residual + x.first(0) * sizeof",
    ),
    "h is written where there are no rows": (
        FUSED,
        "packs.cuh",
        "        int n = here ? x.valid(k) : 0;\n        if (n > 0) write_pack(",
        "        int n = x.valid(k);\n        if (n > 0) write_pack(",
    ),
    "dh of the row before": (FUSED, "row_backward.cu", "dh + row * dh_stride", "dh + (row - (row > 0)) * dh_stride"),
    "dresidual without alpha": (FUSED, "gradients.cuh", "out.set(i, alpha * a[i])", "out.set(i, a[i])"),
    "no barrier before levels are added up": (
        CHANNELS,
        "channel_forward.cu",
        "total_of(pairwise(v));\n        }\n        __syncthreads();\n",
        "total_of(pairwise(v));\n        }\n",
    ),
    "no barrier before hi is read": (
        CHANNELS,
        "channel_forward.cu",
        "hi[c] = (real)(over_levels(0, c).value() / n);\n        __syncthreads();\n",
        "hi[c] = (real)(over_levels(0, c).value() / n);\n",
    ),
    "a level too few": (
        CHANNELS,
        "channel_forward.cu",
        "level < mine.down; level++) s = added",
        "level < mine.down - 1; level++) s = added",
    ),
    "rows of the next chunk": (
        CHANNELS,
        "channels.cuh",
        "end = smaller(begin + rows_of_chunk, outer)",
        "end = smaller(begin + rows_of_chunk + 1, outer)",
    ),
    "the last run goes on": (
        CHANNELS,
        "channels.cuh",
        "(int)smaller(place.inner - start[k], (index_t)VALUES) : 0;",
        "VALUES : 0;",
    ),
    "runs beyond the last": (CHANNELS, "channels.cuh", "n_valid[k] = run[k] < place.outer ? ", "n_valid[k] = true ? "),
    "slices that begin anew": (
        CHANNELS,
        "channels.cuh",
        "first_pack = place.first % place.packs_of_run",
        "first_pack = 0",
    ),
    "the count of a slice is that of whole packs": (
        CHANNELS,
        "channels.cuh",
        "number / packs_of_run * inner + number % packs_of_run * values_of_pack",
        "number * values_of_pack",
    ),
    "channels of the neighbour": (
        CHANNELS,
        "channels.cuh",
        "return inner == 1 ? column : column / inner;",
        "return column;",
    ),
    "channels that are not there are updated": (
        CHANNELS,
        "channel_forward.cu",
        "if (t.rank > 0 || c >= n_channels) return;",
        "if (t.rank > 0) return;",
    ),
    "all levels update at the same time": (
        CHANNELS,
        "channel_forward.cu",
        "if (t.rank > 0 || c >= n_channels) return;",
        "if (c >= n_channels) return;",
    ),
    "parts of another chunk": (
        CHANNELS_BACKWARD,
        "channel_backward.cu",
        "mine.column(c) * n_chunks + mine.chunk",
        "mine.column(c) * n_chunks",
    ),
    "sums that are written over too early": (
        CHANNELS_BACKWARD,
        "channel_backward.cu",
        "which * sizeof(s), s);\n        }\n        __syncthreads();\n",
        "which * sizeof(s), s);\n        }\n",
    ),
    "the mean of rows that are not there": (
        CHANNELS_BACKWARD,
        "channel_backward.cu",
        "(j < left ? m[i] : (real)0)",
        "m[i]",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_kernels_is_noticed(fault, emulated, monkeypatch):
    what, name, old, new = FAULTS[fault]
    text = sources.files("fastnorm._cuda").joinpath(name).read_text()
    assert old in text, "the sources have changed, this test must follow"

    class Folder:
        def joinpath(self, n):
            return Faulty(n)

    class Faulty:
        def __init__(self, n):
            self.name = n

        def read_text(self, encoding="utf-8"):
            whole = (real("fastnorm._cuda") / self.name).read_text(encoding=encoding)
            return whole.replace(old, new) if self.name == name else whole

    real = sources.files
    monkeypatch.setattr(sources, "files", lambda package: Folder())
    try:
        for cached in (sources.joined, sources.kernel, row_norm._program):
            cached.cache_clear()
        with pytest.raises((RuntimeError, AssertionError)):
            run(emulated, what)
    finally:
        for cached in (sources.joined, sources.kernel, row_norm._program):
            cached.cache_clear()


def test_too_little_shared_memory_is_noticed(emulated, monkeypatch):
    right = geometry.forward_plan
    for missing in (16, 3072):

        def less(*arguments, missing=missing):
            plan = right(*arguments)
            return plan._replace(shared_memory=plan.shared_memory - missing)

        monkeypatch.setattr(geometry, "forward_plan", less)
        row_norm._program.cache_clear()
        with pytest.raises((RuntimeError, AssertionError)):
            fastnorm.layer_norm(put(np.ones((3, 40_000), np.float32)))
    row_norm._program.cache_clear()


def test_wrong_arguments_and_launches_are_noticed(emulated):
    fill = sources.kernel(0, "copy.cu", "fill")
    a = put(np.zeros(10, np.float32))
    right = (a.data.ptr, 2, 4, 10, 1.0)
    fill((1,), (256,), right)
    assert (get(a) == 1).all()
    for i, wrong in ((0, 1.0), (3, 10.0), (4, 1), (1, np.int32(2)), (4, np.float32(1)), (1, True), (2, None)):
        with pytest.raises(TypeError, match="fill"):
            fill((1,), (256,), (*right[:i], wrong, *right[i + 1 :]))
    with pytest.raises(TypeError, match="fill"):
        fill((1,), (256,), right[:-1])
    for grid, block, shared in ((1, 1025, 0), (1, 100, 0), (0, 256, 0), (2**31, 256, 0), (1, 256, 60_000), (1, 0, 0)):
        with pytest.raises(RuntimeError, match="fill"):
            fill((grid,), (block,), right, shared_mem=shared)
    with pytest.raises(RuntimeError, match="outside of all arrays"):
        fill((1,), (256,), (a.data.ptr, 2, 4, 11, 1.0))
    # Two blocks, one place.
    with pytest.raises(RuntimeError, match="another block"):
        fill((2,), (256,), (a.data.ptr, 2, 0, 300, 1.0))
