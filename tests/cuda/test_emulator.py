"""The emulator itself: what breaks a kernel on a GPU must be noticed here. Each test puts a fault into the sources."""

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import numpy as np  # noqa: E402
from device import get, put  # noqa: E402

import fastnorm  # noqa: E402
from fastnorm import reference  # noqa: E402
from fastnorm._cuda import geometry, row_norm, sources  # noqa: E402

FORWARD, LONG_ROWS, BACKWARD, LONG_BACKWARD = "forward", "long rows", "backward", "long backward"
# Rows of one warp and of several, whole packs and not; in slices.
SHAPES = {
    FORWARD: [(9, 33), (5, 1000), (4, 1027), (3, 4096)],
    BACKWARD: [(60, 33), (60, 400), (60, 1000), (40, 1027), (40, 4096), (30, 5000)],
    LONG_ROWS: [(2, 60_000)],
    LONG_BACKWARD: [(9, 9000)],
}
SEEDS = (1, 2, 3)


def run(emulator, what):
    """Results are those of the reference, on three schedules."""
    rng = np.random.default_rng(0)
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
        "x + row * x_stride + slice",
        "x + row * (int)(x_stride << 16) + slice",
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
