"""What only a GPU can show: streams, graphs, what the runtime knows of the kernels."""

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import numpy as np  # noqa: E402

import fastnorm  # noqa: E402
from fastnorm._cuda import devices, geometry, sources  # noqa: E402
from fastnorm.layers import LayerNorm, RMSNorm  # noqa: E402

pytestmark = pytest.mark.skipif(not cupy.cuda.is_available(), reason="needs a GPU")


def test_everything_runs_on_the_current_stream():
    """G03: with work queued in front, on a stream that waits for no other."""
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(20):
        with stream:
            x = cupy.zeros((4096, 1024), cupy.float32)
            for _ in range(20):
                x += 1
            x[:, ::2] += 2
            y, mean, rstd = fastnorm.layer_norm_forward(x)
            dx, dweight, dbias = fastnorm.layer_norm_backward(y, x, mean, rstd)
            turned = fastnorm.layer_norm(x.T, axis=0)
        stream.synchronize()
        assert abs(float(y[0, 0]) - 1) < 1e-4 and abs(float(y[0, 1]) + 1) < 1e-4
        assert abs(float(turned[0, 0]) - 1) < 1e-4
        assert abs(float(dweight[0]) - 4096) < 1 and abs(float(dbias[0]) - 4096) < 1


@pytest.mark.parametrize("columns", [64, 4096, 100_000])
def test_a_call_can_be_captured_once_its_kernels_are_there(columns):
    """With out=, on a stream of its own; replayed on other values; its memory comes from a pool that stays."""
    x, dy = cupy.random.standard_normal((2, 64, columns)).astype(cupy.float32)
    y, dx = cupy.empty_like(x), cupy.empty_like(x)

    def step():
        _, mean, rstd = fastnorm.layer_norm_forward(x, out=y)
        return mean, rstd, *fastnorm.layer_norm_backward(dy, x, mean, rstd, out=dx)

    step()
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        step()
        stream.synchronize()
        stream.begin_capture()
        results = step()
        graph = stream.end_capture()
    for _ in range(3):
        x[...] = cupy.random.standard_normal(x.shape)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = fastnorm.layer_norm(x)
        assert (y == expected).all()
        _, mean, rstd = fastnorm.layer_norm_forward(x)
        assert (dx == fastnorm.layer_norm_backward(dy, x, mean, rstd)[0]).all()
    assert results[2] is dx


@pytest.mark.parametrize("shape", [(512, 64), (8, 16, 30, 30)], ids=str)
def test_a_captured_training_step_updates_the_running_arrays(shape):
    """Time after time: with each replay once more."""
    x, residual = cupy.random.standard_normal((2, *shape)).astype(cupy.float32)
    y, h = cupy.empty_like(x), cupy.empty_like(x)
    running = cupy.zeros(shape[1], cupy.float32), cupy.ones(shape[1], cupy.float32)

    def step():
        fastnorm.add_rms_norm(x, residual, out=y, residual_out=h)
        return fastnorm.batch_norm(h, None, None, *running, training=True, out=y)

    step()
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        step()
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
    axes = (0, *range(2, len(shape)))
    for _ in range(3):
        before = running[0].copy()
        x[...] = cupy.random.standard_normal(shape)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        new = (x + residual).mean(axis=axes, dtype=cupy.float64)
        np.testing.assert_allclose(running[0].get(), (0.9 * before + 0.1 * new).get(), rtol=1e-5, atol=1e-6)
        assert (y == fastnorm.batch_norm(x + residual, training=True)).all()


def test_large_channels_are_right_and_the_same_each_time():
    for shape in ((200_000, 64), (1_000_000, 3), (64, 3, 512, 512), (256, 512, 7, 7), (32, 100_000)):
        x, dy = cupy.random.standard_normal((2, *shape), dtype=cupy.float32)
        y, mean, rstd = fastnorm.batch_norm_forward(x, training=True)
        first = fastnorm.batch_norm_backward(dy, x, mean, rstd)
        axes = (0, *range(2, len(shape)))
        np.testing.assert_allclose(y.mean(axis=axes, dtype=cupy.float64).get(), 0, atol=1e-5)
        np.testing.assert_allclose((y * y).mean(axis=axes, dtype=cupy.float64).get(), 1, rtol=1e-3)
        sums = dy.sum(axis=axes, dtype=cupy.float64).get()
        np.testing.assert_allclose(first[2].get(), sums, rtol=1e-6, atol=1e-6 * abs(sums).max())
        for _ in range(3):
            again = fastnorm.batch_norm_backward(dy, x, mean, rstd)
            assert all((p == q).all() for p, q in zip(first, again, strict=True))
            assert (fastnorm.batch_norm(x, training=True) == y).all()


def test_layers_follow_their_input():
    """Parameters go to the device with the first CuPy array, and their state comes back as NumPy arrays."""
    for layer in (LayerNorm(8), RMSNorm(8)):
        x = cupy.random.standard_normal((4, 8))
        y = layer(x)
        dx = layer.backward(cupy.ones_like(x))
        layer.update(0.5)
        assert all(isinstance(a, cupy.ndarray) for a in (y, dx, layer.weight, layer.grad_weight))
        state = layer.state_dict()
        assert all(isinstance(a, np.ndarray) for a in state.values())
        layer.load_state_dict(state)
        assert isinstance(layer.weight, cupy.ndarray)
        assert isinstance(layer(x.get()), np.ndarray) and isinstance(layer.weight, np.ndarray)


def test_no_kernel_spills_and_all_can_be_launched():
    device = devices.current()
    for source, macros in geometry.variants():
        name = {
            "copy.cu": "copy_tiles",
            "slice_forward.cu": "slice_forward_sums",
            "slice_backward.cu": "slice_backward_apply",
            "channel_forward.cu": "channel_columns_sums",
            "channel_backward.cu": "channel_columns_gradient_sums",
        }.get(source, source.removesuffix(".cu"))
        kernel = sources.kernel(device, source, name, **dict(macros))
        assert kernel.local_size_bytes == 0, (source, macros)
        assert kernel.max_threads_per_block >= dict(macros).get("threads", 256), (source, macros)


def test_large_arrays_are_right_and_the_same_each_time():
    x, dy = cupy.random.standard_normal((2, 20_000, 1024), dtype=cupy.float32)
    y, mean, rstd = fastnorm.layer_norm_forward(x)
    first = fastnorm.layer_norm_backward(dy, x, mean, rstd)
    for _ in range(5):
        again = fastnorm.layer_norm_backward(dy, x, mean, rstd)
        assert all((p == q).all() for p, q in zip(first, again, strict=True))
        assert (fastnorm.layer_norm(x) == y).all()
    np.testing.assert_allclose(y.mean(axis=1).get(), 0, atol=1e-5)
    np.testing.assert_allclose(first[2].get(), dy.sum(axis=0, dtype=cupy.float64).get(), rtol=1e-6, atol=1e-3)
