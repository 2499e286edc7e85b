"""Normalization over an axis that is not the last, beside the last axis of an array of the same size."""
from .common import BACKWARD, FORWARD, bytes_moved, gb_per_s, make_call

# Shape and axis; each line has one size and one length of the normalized axis.
CASES = [
    "512x512 axis 0", "512x512 axis 1",
    "4096x4096 axis 0", "4096x4096 axis 1",
    "64x256x1024 axis 1", "64x1024x256 axis 2",
    "32x64x56x56 axis 1", "32x56x56x64 axis 3",
]


class Axes:
    """float32, forward and backward, into memory that is used again."""

    params = [FORWARD + BACKWARD, CASES]
    param_names = ["op", "case"]
    repeat = (10, 100, 1.0)

    def setup(self, op, case):
        self.shape, axis = case.split(" axis ")
        self.call = make_call(op, "float32", self.shape, axis=int(axis))

    def time_call(self, op, case):
        self.call()

    def track_gb_per_s(self, op, case):
        return gb_per_s(self.call, bytes_moved(op, "float32", self.shape))

    track_gb_per_s.unit = "GB/s"
