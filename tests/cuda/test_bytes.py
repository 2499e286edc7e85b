"""What the launches move: x is read once, y written once; backward reads x and dy once. Counted, not estimated."""

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from device import put  # noqa: E402

import fastnorm  # noqa: E402
from fastnorm import _cuda  # noqa: E402
from fastnorm._cuda import geometry  # noqa: E402

DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
# In packs of 16 bytes: each path and its ends, whole packs and not.
LENGTHS = [1, 7, 64, 65, 513, 1024, 2048, 2049, 15000]


def rows_of(packs):
    """Enough for several blocks; of long rows fewer, each of them is many blocks."""
    return 40 if packs < 10_000 else 16


def moved(emulated):
    return sum(launch.read + launch.written for launch in emulated.launches)


def columns(packs, dtype, odd):
    return max(1, packs * 16 // dtype.itemsize - (1 if odd else 0))


def arrays(rng, rows, n, dtype, how_many):
    return [put(rng.standard_normal((rows, n)).astype(dtype)) for _ in range(how_many)]


@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
@pytest.mark.parametrize("packs", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
def test_forward_moves_each_byte_once(centered, dtype, packs, odd, emulated, rng):
    rows, n = 9, columns(packs, dtype, odd)
    [x] = arrays(rng, rows, n, dtype, 1)
    forward = fastnorm.layer_norm_forward if centered else fastnorm.rms_norm_forward
    emulated.launches.clear()
    forward(x)
    real = max(4, dtype.itemsize)
    plan = geometry.forward_plan(n, dtype.itemsize, 227 << 10)
    sweeps = 2 if plan.source == "row_forward" else 3
    figure = sweeps * rows * n * dtype.itemsize + rows * real * (2 if centered else 1)
    small = 0
    if sweeps == 3:
        # Moments of the slices, written once and read up to three times; the scales of the rows.
        small = rows * (geometry.slices_of(n, dtype.itemsize) * 32 * (4 + 1) + 3 * 32)
    assert figure <= moved(emulated) <= 1.05 * figure + small
    assert len(emulated.launches) == (1 if sweeps == 2 else 3)
    # Parameters: once for each row, from the caches.
    emulated.launches.clear()
    w = put(np.ones(n, dtype))
    forward(x, w)
    figure += rows * n * dtype.itemsize
    assert figure <= moved(emulated) <= 1.05 * figure + small


@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
@pytest.mark.parametrize("packs", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("centered", [True, False], ids=["layer_norm", "rms_norm"])
def test_backward_reads_x_and_dy_once(centered, dtype, packs, odd, emulated, rng):
    rows, n = rows_of(packs), columns(packs, dtype, odd)
    dy, x = arrays(rng, rows, n, dtype, 2)
    real = max(4, dtype.itemsize)
    statistics = [put(np.ones((rows, 1), np.float32 if real == 4 else np.float64)) for _ in range(2 if centered else 1)]
    backward = fastnorm.layer_norm_backward if centered else fastnorm.rms_norm_backward
    plan = geometry.backward_plan(n, dtype.itemsize, centered, 227 << 10)
    sweeps, n_sums = (3 if plan.source == "row_backward" else 5), 2 if centered else 1
    for param_grads in (True, False):
        emulated.launches.clear()
        backward(dy, x, *statistics, param_grads=param_grads)
        figure = sweeps * rows * n * dtype.itemsize + rows * real * n_sums
        small = 0
        if sweeps == 5:
            slices = geometry.slices_of(n, dtype.itemsize)
            runs, _, partials = geometry.backward_chunks(rows, n, dtype.itemsize, 3)
            small = rows * (slices * 48 * 2 + 5 * real * (1 + runs) + slices * real + 2 * real)
        else:
            partials = emulated.launches[0].grid[0]
        # Partial sums are written and read once, their sum is written.
        sums = (2 * partials + 1) * n_sums * n * real if param_grads else 0
        assert figure + sums <= moved(emulated) <= 1.05 * (figure + sums) + small
        assert len(emulated.launches) == (1 if sweeps == 3 else 3) + param_grads
        if param_grads:
            assert partials <= max(1, rows // 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_other_axes_cost_a_copy_each_way(dtype, emulated, rng):
    """Of x before and of y after, 2 * M * N * e each."""
    x = put(rng.standard_normal((300, 70)).astype(dtype))
    emulated.launches.clear()
    fastnorm.layer_norm(x, axis=0)
    assert moved(emulated) == 6 * 300 * 70 * dtype.itemsize
    assert [launch.name for launch in emulated.launches] == ["copy_tiles", "row_forward", "copy_tiles"]
    # Rows that only have a gap between them are taken where they are.
    emulated.launches.clear()
    fastnorm.layer_norm(x[:, 3:50], out=x[:, 3:50])
    assert moved(emulated) == 2 * 300 * 47 * dtype.itemsize
    assert len(emulated.launches) == 1


# ---- residual forms -------------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [False, True], ids=["aligned", "odd"])
@pytest.mark.parametrize("packs", LENGTHS)
@pytest.mark.parametrize("dtype", [DTYPES[0], DTYPES[2]], ids=lambda d: d.name)
def test_the_sum_costs_a_read_and_a_write(dtype, packs, odd, emulated, rng):
    """4MNe forward, where rows come in slices 5; backward 5MNe with dh and dresidual, in slices 7."""
    rows, n = rows_of(packs), columns(packs, dtype, odd)
    x, residual = arrays(rng, rows, n, dtype, 2)
    y, h, dx, dresidual = (cupy.empty((rows, n), dtype) for _ in range(4))
    mean, rstd = (cupy.empty((rows,), np.float32) for _ in range(2))
    size = rows * n * dtype.itemsize
    plan = geometry.forward_plan(n, dtype.itemsize, 227 << 10)
    slices = geometry.slices_of(n, dtype.itemsize)
    emulated.launches.clear()
    _cuda.row_norm_forward(x, residual, 0.5, 1, None, 0.0, None, 1e-5, y, h, mean, rstd, True)
    sweeps, small = (4, 0) if plan.source == "row_forward" else (5, rows * (slices * 32 * 5 + 96))
    assert sweeps * size + rows * 8 <= moved(emulated) <= 1.05 * (sweeps * size + rows * 8) + small
    plan = geometry.backward_plan(n, dtype.itemsize, True, 227 << 10)
    emulated.launches.clear()
    _cuda.row_norm_backward(x, residual, h, 1, None, 0.0, mean, rstd, 0.5, dx, dresidual, None, None, True)
    sweeps, small = 5, 0
    if plan.source == "slice_backward":
        sweeps, small = 7, rows * (slices * 100 + 20 * geometry.backward_chunks(rows, n, dtype.itemsize, 3)[0] + 40)
    assert sweeps * size + rows * 8 <= moved(emulated) <= 1.05 * (sweeps * size + rows * 8) + small


# ---- channels -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(2048, 24), (1030, 3), (3, 2, 30_000), (40, 4, 30, 30), (256, 12, 7)], ids=lambda s: str(s)
)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_channels_move_no_more_than_they_must(dtype, shape, emulated, rng):
    """Training: 3 times the size of x, backward 5; evaluation 2, backward 2 and with gradients of parameters 4."""
    x, dy = (put(rng.standard_normal(shape).astype(dtype)) for _ in range(2))
    channels, size, real = shape[1], x.nbytes, max(4, dtype.itemsize)
    inner = x.size // shape[0] // channels
    plan = geometry.channel_plan(shape[0], channels, inner, dtype.itemsize)
    y = cupy.empty(shape, dtype)
    mean, rstd = (cupy.empty((channels,), np.float32 if real == 4 else np.float64) for _ in range(2))
    dweight, dbias = (cupy.empty((channels,), np.float32) for _ in range(2))
    running = cupy.empty((channels,)), put(np.ones(channels))
    # Parts of channels, written once and read three times; what the blocks read of each channel.
    parts = channels * plan.parts
    scales = (
        plan.blocks * 6 * real if plan.way == "runs" else plan.blocks * plan.across * 16 // dtype.itemsize * 6 * real
    )
    small = parts * 40 * 4 + 2 * scales + channels * 200

    def costs(times, call, *arguments):
        emulated.launches.clear()
        call(*arguments)
        assert times * size <= moved(emulated) <= 1.05 * times * size + small, (moved(emulated) / size, small / size)

    def forward(training):
        _cuda.channel_norm_forward(x, 1, None, None, 1e-5, *running, 0.1, y, mean, rstd, training)

    def backward(training, *sums):
        _cuda.channel_norm_backward(dy, x, 1, None, mean, rstd, y, *sums, training)

    costs(3, forward, True)
    assert len(emulated.launches) == 3
    costs(2, forward, False)
    assert len(emulated.launches) == 2
    costs(5, backward, True, dweight, dbias)
    assert len(emulated.launches) == 3
    costs(4, backward, False, dweight, dbias)
    costs(2, backward, False, None, None)
    assert len(emulated.launches) == 2
    # And that is not much.
    assert small <= 0.2 * 3 * size, small / size
