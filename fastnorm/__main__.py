"""python -m fastnorm: what it runs on, whether it computes right here, how fast it is beside NumPy."""
import argparse
import statistics
import sys
import timeit
from itertools import chain

import numpy as np

import fastnorm
from fastnorm import reference
from fastnorm._peers import numpy_layer_norm, numpy_layer_norm_backward, numpy_rms_norm, numpy_rms_norm_backward

OPS = ("layer_norm", "rms_norm")
BENCH_SHAPES = ((1, 64), (32, 768), (512, 1024), (4096, 1024))

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


# ---------------------------------------------------------------------------------------------
# check
# ---------------------------------------------------------------------------------------------

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


# ---------------------------------------------------------------------------------------------
# bench
# ---------------------------------------------------------------------------------------------

def _medians(calls, seconds=0.5):
    """Median seconds of each (threads, call); they take turns, so that a disturbance meets all of them."""
    timers = [timeit.Timer(call) for _, call in calls]
    # A sample of one tiny call would measure the clock.
    numbers = [max(1, int(2e-4 / min(timer.repeat(3, 1)))) for timer in timers]
    samples = [[] for _ in timers]
    end = timeit.default_timer() + seconds
    while timeit.default_timer() < end or len(samples[0]) < 3:
        for (n_threads, _), timer, number, sample in zip(calls, timers, numbers, samples, strict=True):
            with fastnorm.num_threads(n_threads):
                sample.append(timer.timeit(number) / number)
    return [statistics.median(sample) for sample in samples]


def _bench_calls(shape):
    """Op, fastnorm's call, NumPy's call, and how many arrays of this shape have to be moved."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, *shape), dtype=np.float32)
    weight, bias = rng.standard_normal((2, shape[-1]), dtype=np.float32)
    out = np.zeros_like(x)
    fn = fastnorm
    _, mean, rstd = fn.layer_norm_forward(x)
    _, rms_rstd = fn.rms_norm_forward(x)
    yield ("layer_norm", lambda: fn.layer_norm(x, weight, bias, out=out),
           lambda: numpy_layer_norm(x, weight, bias), 2)
    yield ("rms_norm", lambda: fn.rms_norm(x, weight, out=out),
           lambda: numpy_rms_norm(x, weight), 2)
    yield ("layer_norm_backward", lambda: fn.layer_norm_backward(dy, x, mean, rstd, weight, out=out),
           lambda: numpy_layer_norm_backward(dy, x, mean, rstd, weight), 3)
    yield ("rms_norm_backward", lambda: fn.rms_norm_backward(dy, x, rms_rstd, weight, out=out),
           lambda: numpy_rms_norm_backward(dy, x, rms_rstd, weight), 3)


def _bench_family(shape):
    """The same for the rest of the family."""
    rng = np.random.default_rng(0)
    x, residual = rng.standard_normal((2, *shape), dtype=np.float32)
    weight, bias = rng.standard_normal((2, shape[-1]), dtype=np.float32)
    out, h = np.zeros((2, *shape), np.float32)
    fn = fastnorm
    yield ("add_rms_norm", lambda: fn.add_rms_norm(x, residual, weight, out=out, residual_out=h),
           lambda: numpy_rms_norm(x + residual, weight), 4)
    if shape[0] > 1:
        yield ("batch_norm, training", lambda: fn.batch_norm(x, weight, bias, training=True, out=out),
               lambda: (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + 1e-5) * weight + bias, 2)


def _columns(op, shape, *cells):
    return f"{op:20s} {shape:>9s}" + "".join(f"{cell:>10s}" for cell in cells)


def bench():
    """Print a table of times beside plain NumPy."""
    # One thread too: that is what NumPy uses, and what is left when other processes keep the processors busy.
    counts = sorted({1, fastnorm.get_num_threads()})
    threads = [f"{n} thread{'s' if n > 1 else ''}" for n in counts]
    print("float32, microseconds, medians of interleaved runs; fastnorm with out=\n")
    print(_columns("op", "shape", *threads, "NumPy", "ratio", "GB/s"))
    for shape in BENCH_SHAPES:
        for op, ours, numpys, n_arrays in chain(_bench_calls(shape), _bench_family(shape)):
            *seconds, numpy_seconds = _medians([(n, ours) for n in counts] + [(1, numpys)])
            ratio = numpy_seconds / seconds[-1]
            gb_per_s = n_arrays * 4 * shape[0] * shape[1] / seconds[-1] / 1e9
            print(_columns(op, f"{shape[0]}x{shape[1]}", *[f"{s * 1e6:.2f}" for s in seconds],
                           f"{numpy_seconds * 1e6:.1f}", f"{ratio:.1f}", f"{gb_per_s:.1f}"), flush=True)
        print()
    print(f"ratio: NumPy's time over fastnorm's with {threads[-1]}. GB/s: x read once and y\n"
          "written once; backward dy and x read, dx written; add_rms_norm two read, two written.")


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------

def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m fastnorm",
        description="Show what fastnorm runs on, check it on this machine, and time it beside plain NumPy.",
        epilog="Without a command all three run, in some ten seconds. FASTNORM_NUM_THREADS sets the threads, "
               "FASTNORM_ISA the processor level. The exit code is 1 if a check fails.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, text in (("info", "show versions, processor level, threads and devices"),
                       ("check", "compare results with extended precision, and bits between threads and layouts"),
                       ("bench", "time a few shapes beside plain NumPy")):
        commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    return parser


def main(argv=None):
    """Run a command, or all; the exit code."""
    command = _parser().parse_args(argv).command
    passed = True
    if command in (None, "info"):
        fastnorm.show_config()
    if command is None:
        print()
    if command in (None, "check"):
        passed = check()
    if command is None:
        print()
    if command in (None, "bench"):
        bench()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
