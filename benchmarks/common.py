"""What the benchmarks share: arrays, the table of ops, the bytes that an op has to move.

Only public functions of fastnorm are used, so that older commits can be measured.
"""
import functools
import importlib.util
import math
import statistics
import sys
import timeit
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fastnorm

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


def _load_peers():
    """fastnorm/_peers.py as it stands beside this file: the fastnorm that is measured may be older and lack it."""
    path = Path(__file__).parents[1] / "fastnorm" / "_peers.py"
    spec = importlib.util.spec_from_file_location("fastnorm_peers", path)
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for it.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


plain_numpy = _load_peers()

FORWARD = ["layer_norm", "rms_norm"]
BACKWARD = ["layer_norm_backward", "rms_norm_backward"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
# One row, in the first and in the second cache, past them, past all caches; few long rows.
SHAPES = ["1x64", "32x768", "512x1024", "4096x768", "4096x4096", "1x1048576"]
IMPLEMENTATIONS = ["fastnorm", "numpy"]


class Arrays(NamedTuple):
    """The arguments of an op. All memory has been written to, so that no page fault is timed."""
    x: np.ndarray
    dy: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    out: np.ndarray


def make_arrays(shape, dtype, axis=-1):
    """Arrays with a mean that is not 0."""
    if dtype == "bfloat16" and ml_dtypes is None:
        raise NotImplementedError("ml_dtypes is not installed")
    rng = np.random.default_rng(0)
    parameter_shape = (shape[axis],)
    x, dy, weight, bias = (rng.standard_normal(s, dtype=np.float32) for s in (shape, shape, *2 * [parameter_shape]))
    x += 0.5
    return Arrays(*(a.astype(dtype, copy=False) for a in (x, dy, weight, bias)), np.ones(shape, dtype))


# ---------------------------------------------------------------------------------------------
# Ops: from arrays to a call without arguments. NumPy's have the trailing axis only.
# ---------------------------------------------------------------------------------------------

def _layer_norm(a, axis):
    return lambda: fastnorm.layer_norm(a.x, a.weight, a.bias, axis=axis, out=a.out)


def _rms_norm(a, axis):
    return lambda: fastnorm.rms_norm(a.x, a.weight, axis=axis, out=a.out)


def _layer_norm_backward(a, axis):
    _, mean, rstd = fastnorm.layer_norm_forward(a.x, axis=axis, out=a.out)
    return lambda: fastnorm.layer_norm_backward(a.dy, a.x, mean, rstd, a.weight, axis=axis, out=a.out)


def _rms_norm_backward(a, axis):
    _, rstd = fastnorm.rms_norm_forward(a.x, axis=axis, out=a.out)
    return lambda: fastnorm.rms_norm_backward(a.dy, a.x, rstd, a.weight, axis=axis, out=a.out)


def _numpy_layer_norm(a, axis):
    return lambda: plain_numpy.numpy_layer_norm(a.x, a.weight, a.bias)


def _numpy_rms_norm(a, axis):
    return lambda: plain_numpy.numpy_rms_norm(a.x, a.weight)


def _numpy_layer_norm_backward(a, axis):
    _, mean, rstd = fastnorm.layer_norm_forward(a.x, out=a.out)
    return lambda: plain_numpy.numpy_layer_norm_backward(a.dy, a.x, mean, rstd, a.weight)


def _numpy_rms_norm_backward(a, axis):
    _, rstd = fastnorm.rms_norm_forward(a.x, out=a.out)
    return lambda: plain_numpy.numpy_rms_norm_backward(a.dy, a.x, rstd, a.weight)


OPS = {
    "fastnorm": {
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "layer_norm_backward": _layer_norm_backward,
        "rms_norm_backward": _rms_norm_backward,
    },
    "numpy": {
        "layer_norm": _numpy_layer_norm,
        "rms_norm": _numpy_rms_norm,
        "layer_norm_backward": _numpy_layer_norm_backward,
        "rms_norm_backward": _numpy_rms_norm_backward,
    },
}


# asv calls setup anew before every call that it times. Without the cache, each would meet cold memory.
@functools.lru_cache(maxsize=1)
def make_call(op, dtype, shape, implementation="fastnorm", axis=-1):
    """A call without arguments that has been called once; shape as "32x768"."""
    # 16-bit floats take NumPy seconds, and float64 tells nothing that float32 does not.
    if implementation == "numpy" and dtype != "float32":
        raise NotImplementedError("NumPy is timed in float32")
    call = OPS[implementation][op](make_arrays(dimensions(shape), dtype, axis), axis)
    call()
    return call


def dimensions(shape):
    """(32, 768) for "32x768"."""
    return tuple(map(int, shape.split("x")))


def bytes_moved(op, dtype, shape):
    """The least that has to go through memory: x and y; backward dy, x and dx. Parameters are not counted."""
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return (3 if op in BACKWARD else 2) * math.prod(dimensions(shape)) * itemsize


def gb_per_s(call, n_bytes):
    """Median over samples of at least a millisecond."""
    timer = timeit.Timer(call)
    number = max(1, int(1e-3 / timer.timeit(1)))
    value = n_bytes / (statistics.median(timer.repeat(5, number)) / number) / 1e9
    return float(f"{value:.4g}")
