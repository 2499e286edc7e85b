"""Whether fastnorm computes right on this machine: its accuracy, and the same bits by every way to a result."""
import numpy as np

import fastnorm
from fastnorm import reference

OPS = ("layer_norm", "rms_norm")

# Rows, columns and kind of x. The last is long enough for a row to be split over threads.
CHECK_CASES = (
    (64, 5, "normal"),
    (64, 768, "normal"),
    (8, 1000, "large mean"),
    (8, 3001, "outlier"),
    (2, 70001, "normal"),
)
# As large as leaves values that differ, in this dtype, when the standard deviation is 1.
LARGE_MEAN = {"float16": 1e2, "bfloat16": 1e2, "float32": 1e6, "float64": 1e13}

# In ulp of the arithmetic type. In short rows the terms of dx cancel.
ALLOWED = 4
ALLOWED_DX_SHORT = 8
SHORT = 32


def _check_dtypes():
    """The storage types that can be checked here."""
    dtypes = [np.dtype(np.float16), np.dtype(np.float32)]
    try:
        from ml_dtypes import bfloat16
        dtypes.insert(1, np.dtype(bfloat16))
    except ImportError:
        pass
    # Where longdouble is float64, there is nothing to hold float64 against.
    if np.finfo(np.longdouble).eps < np.finfo(np.float64).eps:
        dtypes.append(np.dtype(np.float64))
    return dtypes


def _arithmetic(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _check_arrays(dtype, n_rows, n_cols, kind):
    """x and dy of a dtype, weight and bias of its arithmetic type."""
    rng = np.random.default_rng(n_cols)
    x, dy = rng.standard_normal((2, n_rows, n_cols))
    weight, bias = rng.standard_normal((2, n_cols)).astype(_arithmetic(dtype))
    if kind == "large mean":
        x += LARGE_MEAN[dtype.name]
    elif kind == "outlier":
        # In a column of its own in each row: in one column, the terms of dweight would cancel.
        np.fill_diagonal(x, 1e4)
    return x.astype(dtype), dy.astype(dtype), weight, bias


def _ulps(result, exact, scale):
    """The largest error, in units in the last place of scale; inf for NaN."""
    error = np.abs(result - exact) / np.spacing(scale.astype(result.dtype))
    return float(np.nan_to_num(error.max(), nan=np.inf))


def _forward_errors(op, x, weight, bias):
    """(error, allowed) of y, without and with weight and bias."""
    parameters = (weight, bias) if op == "layer_norm" else (weight,)
    for given in ((), parameters):
        # 16-bit results are these, rounded once: _check_bits.
        y = getattr(fastnorm, op)(x, *given, out=np.empty(x.shape, _arithmetic(x.dtype)))
        exact = getattr(reference, op)(x, *given)
        shift = bias if len(given) == 2 else 0
        scale = (np.abs(exact - shift) + np.abs(shift)).max(axis=-1, keepdims=True)
        yield _ulps(y, exact, scale), ALLOWED


def _backward_errors(op, x, dy, weight):
    """(error, allowed) of dx and of the gradients of the parameters."""
    _, *row_statistics = getattr(fastnorm, op + "_forward")(x)
    dx = np.empty(x.shape, _arithmetic(x.dtype))
    _, *gradients = getattr(fastnorm, op + "_backward")(dy, x, *row_statistics, weight, out=dx)
    exact_dx, *exact = getattr(reference, op + "_backward")(dy, x, weight)
    rstd = row_statistics[-1]
    scale = np.abs(rstd * (dy * weight)).max(axis=-1, keepdims=True)
    yield _ulps(dx, exact_dx, scale), ALLOWED if x.shape[-1] >= SHORT else ALLOWED_DX_SHORT
    for gradient, exact_gradient in zip(gradients, exact, strict=True):
        yield _ulps(gradient, exact_gradient, np.abs(exact_gradient).max()), ALLOWED


def _check_accuracy(op, direction, dtype):
    """The (error, allowed) that comes closest to failing, over all cases."""
    pairs = []
    for case in CHECK_CASES:
        x, dy, weight, bias = _check_arrays(dtype, *case)
        if direction == "forward":
            pairs += _forward_errors(op, x, weight, bias)
        else:
            pairs += _backward_errors(op, x, dy, weight)
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _results(op, x, dy, weight, bias, axis=-1):
    """All that forward and backward return."""
    parameters = (weight, bias) if op == "layer_norm" else (weight,)
    y, *row_statistics = getattr(fastnorm, op + "_forward")(x, *parameters, axis=axis)
    gradients = getattr(fastnorm, op + "_backward")(dy, x, *row_statistics, weight, axis=axis)
    return [y, *row_statistics, *gradients]


def _same_bits(a, b):
    return all(u.tobytes() == v.tobytes() for u, v in zip(a, b, strict=True))


def _bits_by_threads(op, dtype):
    """Whether 1 and 2 threads give the same bits: many rows, and few long ones."""
    for shape in ((512, 768), (2, 70001)):
        arrays = _check_arrays(dtype, *shape, "normal")
        with fastnorm.num_threads(1):
            one = _results(op, *arrays)
        with fastnorm.num_threads(2):
            two = _results(op, *arrays)
        if not _same_bits(one, two):
            return False
    return True


def _bits_by_axis(op, dtype):
    """Whether axis 0 of an array gives the bits of the trailing axis of its transpose."""
    x, dy, weight, bias = _check_arrays(dtype, 96, 768, "normal")
    trailing = _results(op, x, dy, weight, bias)
    leading = _results(op, x.T.copy(), dy.T.copy(), weight, bias, axis=0)
    return _same_bits(trailing, [r.T for r in leading])


def _bits_by_rounding(op, dtype):
    """Whether a 16-bit result is the wider one rounded once."""
    x, _, weight, _ = _check_arrays(dtype, 96, 768, "normal")
    wide = getattr(fastnorm, op)(x, weight, out=np.empty(x.shape, _arithmetic(dtype)))
    return _same_bits([getattr(fastnorm, op)(x, weight)], [wide.astype(dtype)])


def _bits_by_fusion(op, dtype):
    """Whether the residual form gives the norm of the sum that it returns."""
    x, residual, weight, _ = _check_arrays(dtype, 96, 768, "normal")
    y, h = getattr(fastnorm, f"add_{op}")(x, residual, weight, alpha=0.5)
    return _same_bits([y], [getattr(fastnorm, op)(h, weight)])


def _bits_by_channel(op, dtype):
    """Whether batch_norm gives a channel the bits that layer_norm gives to a row of its values."""
    x = _check_arrays(dtype, 96, 768, "large mean")[0]
    channels = fastnorm.batch_norm(x.reshape(8, 12, 768), training=True)
    rows = fastnorm.layer_norm(x.reshape(8, 12, 768), axis=(0, 2))
    return _same_bits([channels], [rows])


BIT_CHECKS = {
    "1 and 2 threads": _bits_by_threads,
    "axis 0 and trailing axis": _bits_by_axis,
    "16-bit: wide, rounded once": _bits_by_rounding,
    "residual forms: the norm of the stored sum": _bits_by_fusion,
    "batch_norm: a channel as a row of layer_norm": _bits_by_channel,
}


def check():
    """Print one line for each group of checks; whether all are passed."""
    dtypes = _check_dtypes()
    passed = True
    print("error against extended precision, in ulp of float32 (float64 for float64)\n")
    print(f"{'op':12s} {'direction':10s} {'dtype':10s} {'error':>8s} {'allowed':>8s}")
    for op in OPS:
        for direction in ("forward", "backward"):
            for dtype in dtypes:
                error, allowed = _check_accuracy(op, direction, dtype)
                ok = error <= allowed
                passed &= ok
                print(f"{op:12s} {direction:10s} {dtype.name:10s} {error:8.2f} {allowed:8d}   {_verdict(ok)}")
    print("\nthe same bits, forward and backward\n")
    for label, function in BIT_CHECKS.items():
        ok = all(function(op, dtype) for op in OPS for dtype in dtypes)
        passed &= ok
        print(f"{label:51s}   {_verdict(ok)}")
    return passed


def _verdict(ok):
    return "ok" if ok else "FAILED"
