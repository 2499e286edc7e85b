"""Every op over shapes, dtypes and axes, and beside its peers; CuPy arrays where there is a GPU."""
from .common import CHANNEL_OPS, DTYPES, ROW_OPS, Call, peers

# One row, in the first and in the second cache, past them, past all caches; one long row.
SHAPES = ["1x64", "32x768", "512x1024", "4096x768", "4096x4096", "1x1048576"]
# Each line has one size and one length of the normalized axis; the last line is what GPT and images are like.
AXES = [
    "512x512 axis 0", "512x512 axis 1",
    "4096x4096 axis 0",
    "64x256x1024 axis 1", "64x1024x256 axis 2",
    "32x64x56x56 axis 1", "32x56x56x64 axis 3",
]
# Large images, small ones, tiny ones, a matrix, channels last, few channels; one channel a row, and more than a million
# values a channel between two looks for Ctrl-C.
CHANNELS = [
    "64x64x56x56 axis 1", "32x256x28x28 axis 1", "64x512x7x7 axis 1", "4096x1024 axis 1", "64x56x56x64 axis 3",
    "16x2x512x512 axis 1", "32x64 axis 1", "1x1200x1000x16 axis 3",
]
OTHERS = [name for name in peers.IMPLEMENTATIONS if name not in ("fastnorm", "cupy", "fastnorm cupy")]


class Shapes(Call):
    """Rows along the last axis."""

    params = [ROW_OPS, SHAPES, ["float32"], ["fastnorm"]]


class Dtypes(Call):
    """Shapes has float32."""

    params = [ROW_OPS, ["32x768", "4096x768"], [d for d in DTYPES if d != "float32"], ["fastnorm"]]


class Axes(Call):
    """Another axis than the last, beside the last axis of an array of the same size."""

    params = [ROW_OPS, AXES, ["float32"], ["fastnorm"]]


class Channels(Call):
    """batch_norm."""

    params = [CHANNEL_OPS, CHANNELS, ["float32"], ["fastnorm"]]


class ChannelDtypes(Call):
    """Channels has float32."""

    params = [CHANNEL_OPS, ["32x256x28x28 axis 1"], [d for d in DTYPES if d != "float32"], ["fastnorm"]]


class Others(Call):
    """Who else computes the same, where it is installed, and a copy: what an op can hope for on this machine."""

    params = [ROW_OPS, ["32x768", "4096x768"], ["float32"], OTHERS]


class OtherChannels(Call):
    """As Others."""

    params = [CHANNEL_OPS, ["32x256x28x28 axis 1"], ["float32"], OTHERS]


class CuPy(Call):
    """Arrays on the current device, until it has finished; ours and the formula in plain CuPy."""

    params = [ROW_OPS, ["32x768", "16384x4096"], ["float32", "float16"], ["fastnorm cupy", "cupy"]]


class CuPyChannels(Call):
    """As CuPy."""

    params = [CHANNEL_OPS, ["64x256x56x56 axis 1"], ["float32", "float16"], ["fastnorm cupy", "cupy"]]
