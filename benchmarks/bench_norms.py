"""Every op over shapes, dtypes and axes, and beside its peers; CuPy arrays where there is a GPU."""
import functools

import numpy as np

import fastnorm

from .common import CHANNEL_OPS, DTYPES, ROW_OPS, _Bandwidth, _Call, make_arrays, peers

# One row; in the first and in the second cache, short rows too; past them, past all caches; one long row.
SHAPES = ["1x64", "512x64", "32x768", "512x1024", "4096x768", "4096x4096", "1x1048576"]
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
# Whoever of the peers is installed where asv finds the benchmarks.
PEERS = [name for name, version in peers.installed().items()
         if name not in ("fastnorm", "copy", "cupy", "fastnorm cupy") and isinstance(version, str)]


class Shapes(_Bandwidth):
    """Rows along the last axis."""

    params = [ROW_OPS, SHAPES, ["float32"], ["fastnorm"]]


class Channels(_Bandwidth):
    """batch_norm."""

    params = [CHANNEL_OPS, CHANNELS, ["float32"], ["fastnorm"]]


class Copy(_Bandwidth):
    """x to out: what an op can hope for on this machine."""

    params = [["layer_norm"], SHAPES, ["float32"], ["copy"]]


class Dtypes(_Call):
    """Shapes has float32."""

    params = [ROW_OPS, ["4096x768"], [d for d in DTYPES if d != "float32"], ["fastnorm"]]


class ChannelDtypes(_Call):
    """Channels has float32."""

    params = [CHANNEL_OPS, ["32x256x28x28 axis 1"], [d for d in DTYPES if d != "float32"], ["fastnorm"]]


@functools.lru_cache(maxsize=1)
def into(op, case, dtype, offset):
    """A call whose result begins offset bytes after the start of a cache line."""
    arrays = make_arrays(op, case, dtype)
    memory = np.ones(arrays.out.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    arrays.out = memory[start : start + arrays.out.nbytes].view(arrays.out.dtype).reshape(arrays.out.shape)
    return peers.make_call("fastnorm", arrays, fastnorm.get_num_threads())


class Offsets(_Call):
    """Past the cache go whole lines only: a result that begins inside one must not cost much more."""

    params = [["layer_norm", "layer_norm_backward"], ["4096x1024", "65536x64"], ["float16", "float32"], [0, 16, 48]]
    param_names = ["op", "case", "dtype", "offset"]

    def setup(self, op, case, dtype, offset):
        self.call = into(op, case, dtype, offset)


class Axes(_Call):
    """Another axis than the last, beside the last axis of an array of the same size."""

    params = [["layer_norm", "layer_norm_backward", "rms_norm", "add_rms_norm"], AXES, ["float32"], ["fastnorm"]]


@functools.lru_cache(maxsize=1)
def unfused(op, case, dtype):
    """Two calls in the place of one."""
    arrays = make_arrays(op.removeprefix("add_"), case, dtype)
    x, residual = arrays.x.copy(), arrays.x.copy()
    norm = peers.make_call("fastnorm", arrays, fastnorm.get_num_threads())

    def add_and_norm():
        np.add(x, residual, out=arrays.x)
        norm()

    return add_and_norm


class Unfused(_Call):
    """What the residual forms of Shapes replace: np.add, then the norm."""

    params = [["add_layer_norm", "add_rms_norm"], ["512x1024", "4096x4096"], ["float32"], ["fastnorm"]]

    def setup(self, op, case, dtype, implementation):
        self.call = unfused(op, case, dtype)


class Peers(_Call):
    """The same with other libraries."""

    params = [ROW_OPS, ["32x768", "4096x768"], ["float32"], PEERS]


class ChannelPeers(_Call):
    """As Peers."""

    params = [CHANNEL_OPS, ["32x256x28x28 axis 1"], ["float32"], PEERS]


class CuPy(_Call):
    """Arrays on the current device, until it has finished; ours and the formula in plain CuPy."""

    params = [ROW_OPS, ["32x768", "16384x4096"], ["float16"], ["fastnorm cupy", "cupy"]]


class ChannelCuPy(_Call):
    """As CuPy."""

    params = [CHANNEL_OPS, ["64x256x56x56 axis 1"], ["float16"], ["fastnorm cupy", "cupy"]]
