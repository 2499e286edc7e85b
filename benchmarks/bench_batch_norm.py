"""batch_norm beside PyTorch, where that is installed, and a copy: images, matrices, channels last."""
import functools

import numpy as np

import fastnorm

from .common import dimensions, gb_per_s

try:
    import torch
except ImportError:
    torch = None

if not hasattr(fastnorm, "batch_norm"):
    raise NotImplementedError("this commit has no batch_norm")

# Shape and axis of the channels: large images, small ones, tiny ones, a matrix, channels last, few channels.
CASES = [
    "64x64x56x56 axis 1", "32x256x28x28 axis 1", "64x512x7x7 axis 1", "4096x1024 axis 1", "64x56x56x64 axis 3",
    "16x2x512x512 axis 1", "32x64 axis 1",
]
# Arrays that have to go through memory at least: x and y; dy, x and dx.
STREAMS = {"training": 2, "evaluation": 2, "backward": 3}


class Arrays:
    """The arguments of all ops in one dtype. All memory has been written to, so that no page fault is timed."""

    def __init__(self, shape, axis, dtype):
        rng = np.random.default_rng(0)
        self.axis = axis
        self.x, self.dy = (rng.standard_normal(shape, dtype=np.float32).astype(dtype) for _ in range(2))
        self.weight, self.bias = rng.standard_normal((2, shape[axis])).astype(dtype)
        self.running_mean, self.running_var = np.zeros(shape[axis], np.float32), np.ones(shape[axis], np.float32)
        self.out = np.ones(shape, dtype)


def _fastnorm(op, a):
    if op == "backward":
        _, mean, rstd = fastnorm.batch_norm_forward(a.x, training=True, axis=a.axis, out=a.out)
        return lambda: fastnorm.batch_norm_backward(a.dy, a.x, mean, rstd, a.weight, axis=a.axis, out=a.out)
    training = op == "training"
    return lambda: fastnorm.batch_norm(a.x, a.weight, a.bias, a.running_mean, a.running_var, training=training, axis=a.axis,
                                       out=a.out)


def _torch(op, a):
    if torch is None or a.x.dtype != np.float32 or a.axis != 1:
        raise NotImplementedError("PyTorch is timed in float32, with the channels on axis 1, where it is installed")
    torch.set_num_threads(fastnorm.get_num_threads())
    x, dy, weight, bias, mean, var = map(torch.from_numpy, (a.x, a.dy, a.weight, a.bias, a.running_mean, a.running_var))
    if op != "backward":
        return lambda: torch.nn.functional.batch_norm(x, mean, var, weight, bias, op == "training")
    _, mean, rstd = torch.ops.aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    wanted = [True, True, True]
    return lambda: torch.ops.aten.native_batch_norm_backward(dy, x, weight, None, None, mean, rstd, True, 1e-5, wanted)


# As make_call() of common.py: asv calls setup anew before each sample.
@functools.lru_cache(maxsize=1)
def make_call(op, dtype, case, implementation):
    shape, axis = case.split(" axis ")
    arrays = Arrays(dimensions(shape), int(axis), dtype)
    call = (_fastnorm if implementation == "fastnorm" else _torch)(op, arrays)
    call()
    return call, arrays.x.nbytes


class BatchNorm:
    """One call, into memory that is used again (PyTorch: into what it has just freed)."""

    params = [list(STREAMS), ["float16", "float32", "float64"], CASES, ["fastnorm", "torch"]]
    param_names = ["op", "dtype", "case", "implementation"]
    repeat = (10, 100, 1.0)

    def setup(self, op, dtype, case, implementation):
        self.call, self.n_bytes = make_call(op, dtype, case, implementation)

    def time_call(self, op, dtype, case, implementation):
        self.call()

    def track_gb_per_s(self, op, dtype, case, implementation):
        return gb_per_s(self.call, STREAMS[op] * self.n_bytes)

    track_gb_per_s.unit = "GB/s"
