"""Prints one digest per result of a fixed set of calls. The bits are promised to be the same for any
number of threads, any processor level, with streaming stores or without: test_bits.py compares the
lines that this prints under different environment variables.
"""

import hashlib

import numpy as np
from helpers import FLOATS, NORMS, bits, everything, gradients, name_of

import fastnorm

# As in conftest.py: threads from small sizes on.
fastnorm._cpu.row_norm.constants(THREAD_MIN=1 << 14)

# (shape, axis): many short rows, rows of some blocks, few rows long enough to be split over threads,
# rows next to each other in memory, several axes.
SHAPES = [
    ((3000, 33), -1),
    ((70, 1500), -1),
    ((1, 140_003), -1),
    ((3, 70_001), -1),
    ((300, 257), 0),
    ((3000, 40), 0),
    ((3, 1100, 65), 1),
    ((40, 7, 300), (0, 2)),
    ((5000, 3), -1),
    ((33, 5, 600), (0, 1)),
]


def data(shape, axis, dtype):
    """Rows of all kinds: plain, with a large mean, to be centred anew, to be scaled, constant, not finite."""
    rng = np.random.default_rng([n for n in shape])
    x = rng.standard_normal(shape) + rng.choice([0.0, 0.0, 30.0, 1e4], shape)
    axes = axis if isinstance(axis, tuple) else (axis % x.ndim,)
    rows = np.moveaxis(x, axes, range(-len(axes), 0))
    flat = rows.reshape(-1, int(np.prod([shape[a] for a in axes])))
    largest = 1e4 if dtype.name == "float16" else 3e38 if dtype.name != "float64" else 1e300
    flat[0::11, 0] = 0.9e4 * (1 if dtype.name == "float16" else 1e6)
    flat[3::17] *= largest / 1e6
    flat[5::19] *= 1e-6 if dtype.name == "float16" else 1e-30
    flat[7::23] = 0.1
    if len(flat) > 30:
        flat[13, -1] = np.nan
        flat[29, 0] = np.inf
    rows[...] = flat.reshape(rows.shape)
    np.clip(x, -largest, largest, out=x, where=np.isfinite(x))
    normalized = [shape[a] for a in sorted(axes)]
    w, b = rng.standard_normal((2, *normalized)) + 1
    return x.astype(dtype), (rng.standard_normal(shape) + 0.5).astype(dtype), w.astype(dtype), b.astype(dtype)


def digests():
    with np.errstate(all="ignore"):
        for dtype in FLOATS:
            for shape, axis in SHAPES:
                x, dy, w, b = data(shape, axis, dtype)
                for norm in NORMS:
                    for affine in (True, False):
                        results = everything(
                            norm, x, dy, w if affine else None, b if affine else None, axis=axis, eps=1e-9
                        )
                        for key, value in results.items():
                            yield [dtype, shape, axis, norm, affine, key], value
                    # A weight of float64 shows the sums of dweight and dbias before they are rounded to
                    # float32; terms of all magnitudes round in double, so that their order shows.
                    scale = 10.0 ** np.random.default_rng(0).uniform(-9, 9, shape)
                    wild = (dy.astype(np.float64) * scale).astype(np.float32)
                    for k, g in enumerate(gradients(norm, wild, x, w.astype(np.float64), axis=axis)):
                        yield [dtype, shape, axis, norm, "wide", k], g
                yield from family(dtype, x, dy, w, b, axis)
            yield [dtype, "out float16"], fastnorm.layer_norm(x, axis=axis, out=np.empty(x.shape, np.float16))
            yield [dtype, "offset"], fastnorm.rms_norm(x, w, axis=axis, weight_offset=1.0)


def family(dtype, x, dy, w, b, axis):
    """The residual forms and batch_norm over the last axis."""
    for name in ("add_layer_norm", "add_rms_norm"):
        affine = (w, b) if name == "add_layer_norm" else (w,)
        y, h, *statistics = getattr(fastnorm, f"{name}_forward")(x, dy, *affine, alpha=0.3, axis=axis)
        grads = getattr(fastnorm, f"{name}_backward")(dy, x, h, *statistics, w, alpha=0.3, axis=axis)
        for k, value in enumerate((y, h, *statistics, *grads)):
            yield [dtype, x.shape, axis, name, k], value
    for channel_axis in {0, x.ndim - 1}:
        n = x.shape[channel_axis]
        if x.size // n < 2:
            continue
        for training in (True, False):
            running = np.full(n, 0.5), np.full(n, 2.0)
            options = {"axis": channel_axis, "training": training}
            y, mean, rstd = fastnorm.batch_norm_forward(x, None, None, *running, **options)
            grads = fastnorm.batch_norm_backward(dy, x, mean, rstd, **options)
            for k, value in enumerate((y, mean, rstd, *running, *grads)):
                yield [dtype, x.shape, channel_axis, "batch_norm", training, k], value


if __name__ == "__main__":
    for names, value in digests():
        print(*map(name_of, names), hashlib.sha256(bits(value)).hexdigest()[:16])
