"""The residual forms beside what they replace: np.add, then the norm; and backward, then np.add and np.multiply."""
import functools

import numpy as np

import fastnorm

from .common import DTYPES, dimensions, gb_per_s, make_arrays

if not hasattr(fastnorm, "add_layer_norm"):
    raise NotImplementedError("this commit has no residual forms")

NORMS = ["layer_norm", "rms_norm"]
SHAPES = ["1x64", "32x768", "512x1024", "4096x768", "4096x4096"]
# Arrays that have to go through memory: x, residual, h, y; dy, dh, h, dx, dresidual.
STREAMS = {"forward": 4, "backward": 5}


def _forward(norm, a, residual, h, implementation):
    affine = (a.weight, a.bias) if norm == "layer_norm" else (a.weight,)
    if implementation == "fused":
        fused = getattr(fastnorm, f"add_{norm}")
        return lambda: fused(a.x, residual, *affine, out=a.out, residual_out=h)
    plain = getattr(fastnorm, norm)

    def unfused():
        np.add(a.x, residual, out=h)
        plain(h, *affine, out=a.out)

    return unfused


def _backward(norm, a, dh, h, implementation):
    statistics = getattr(fastnorm, f"{norm}_forward")(h)[1:]
    if implementation == "fused":
        fused = getattr(fastnorm, f"add_{norm}_backward")
        return lambda: fused(a.dy, dh, h, *statistics, a.weight, alpha=0.5, out=a.out)
    plain = getattr(fastnorm, f"{norm}_backward")

    def unfused():
        plain(a.dy, h, *statistics, a.weight, out=a.out)
        np.add(a.out, dh, out=a.out)
        return a.out * 0.5

    return unfused


# As make_call(): asv calls setup anew before each sample.
@functools.lru_cache(maxsize=1)
def make_call(norm, direction, dtype, shape, implementation):
    a = make_arrays(dimensions(shape), dtype)
    other, h = a.dy.copy(), a.x.copy()
    call = (_forward if direction == "forward" else _backward)(norm, a, other, h, implementation)
    call()
    return call


class Residual:
    """One call; forward into memory that is used again, dresidual of backward into fresh memory."""

    params = [NORMS, list(STREAMS), DTYPES, SHAPES, ["fused", "unfused"]]
    param_names = ["norm", "direction", "dtype", "shape", "implementation"]
    repeat = (10, 100, 1.0)

    def setup(self, norm, direction, dtype, shape, implementation):
        self.call = make_call(norm, direction, dtype, shape, implementation)

    def time_call(self, norm, direction, dtype, shape, implementation):
        self.call()

    def track_gb_per_s(self, norm, direction, dtype, shape, implementation):
        """Of the bytes that the fused form has to move, whoever moves them."""
        itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
        return gb_per_s(self.call, STREAMS[direction] * np.prod(dimensions(shape)) * itemsize)

    track_gb_per_s.unit = "GB/s"
