"""Normalization over the trailing axis, into memory that is used again: time and bandwidth."""
import numpy as np

from .common import (
    BACKWARD,
    DTYPES,
    FORWARD,
    IMPLEMENTATIONS,
    SHAPES,
    bytes_moved,
    dimensions,
    gb_per_s,
    make_call,
)


class _Norm:
    """One call, and the bytes that it has to move over its time. Below ten microseconds see bench_calls."""

    param_names = ["op", "dtype", "shape", "implementation"]
    # A sample is a single call, since asv runs setup before each.
    repeat = (10, 100, 1.0)

    def setup(self, op, dtype, shape, implementation):
        self.call = make_call(op, dtype, shape, implementation)

    def time_call(self, op, dtype, shape, implementation):
        self.call()

    def track_gb_per_s(self, op, dtype, shape, implementation):
        return gb_per_s(self.call, bytes_moved(op, dtype, shape))

    track_gb_per_s.unit = "GB/s"


class Forward(_Norm):
    """layer_norm with weight and bias, rms_norm with weight."""

    params = [FORWARD, DTYPES, SHAPES, IMPLEMENTATIONS]


class Backward(_Norm):
    """dx and the gradients of the parameters, dx into memory that is used again."""

    params = [BACKWARD, DTYPES, SHAPES, IMPLEMENTATIONS]


class Copy:
    """np.copyto of a float32 array: what a forward can hope for on this machine, with one thread."""

    params = [SHAPES]
    param_names = ["shape"]

    def setup(self, shape):
        self.x, self.y = np.ones((2, *dimensions(shape)), np.float32)

    def track_gb_per_s(self, shape):
        return gb_per_s(lambda: np.copyto(self.y, self.x), self.x.nbytes + self.y.nbytes)

    track_gb_per_s.unit = "GB/s"
