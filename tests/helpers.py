"""What the tests share: dtypes, the measure of accuracy, memory layouts, ways to call, subprocesses."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import fastnorm
from fastnorm import reference

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
WIDE_FLOATS = [np.dtype(np.float32), np.dtype(np.float64)]
NARROW_FLOATS = [np.dtype(np.float16), BFLOAT16]
FLOATS = NARROW_FLOATS + WIDE_FLOATS
INTEGERS = [np.dtype(c) for c in "?bBhHiIlLqQ"]
NORMS = [fastnorm.layer_norm, fastnorm.rms_norm]

ROOT = Path(fastnorm.__file__).parent.parent
TESTS = Path(__file__).parent


# Values of an array at most, where something slower than the CPU wing runs these tests; None: any number.
LONGEST = None


def capped(cases):
    """Those lengths, shapes, or pairs of a shape and an axis, that are not too long."""
    sizes = [np.prod(c[0] if isinstance(c, tuple) and isinstance(c[0], tuple) else c) for c in cases]
    return [c for c, size in zip(cases, sizes, strict=True) if LONGEST is None or size <= LONGEST]


def name_of(value):
    """A test id: dtypes and functions by their name."""
    return getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)


def arithmetic(dtype):
    """The type of statistics and sums."""
    return np.dtype(np.float32) if dtype in [np.dtype(np.float32), *NARROW_FLOATS] else np.dtype(np.float64)


# ---- accuracy, as DESIGN.md 3.1 measures it -------------------------------------------------------


def ulp_of(value, dtype):
    """The distance from |value| to the next number of the arithmetic type of dtype."""
    return np.spacing(np.abs(value).astype(arithmetic(dtype))).astype(np.longdouble)


def errors_in_ulp(result, exact, scale, dtype):
    """|result - exact| in ulp of the largest |scale| of each row (of the last axis)."""
    assert np.isfinite(result.astype(np.float64)).all(), "not finite"
    largest = np.abs(scale).max(axis=-1, keepdims=True)
    return (np.abs(result.astype(np.longdouble) - exact) / ulp_of(largest, dtype)).max(initial=0)


def assert_rounded_once(result, exact, slack):
    """A 16-bit result is that of one rounding of a number no more than slack away from exact."""
    low, high = (round_to(exact + s, result.dtype) for s in (-slack, slack))
    r = result.astype(np.float64)
    assert ((low <= r) & (r <= high)).all()


def round_to(value, dtype):
    """value rounded once to dtype, as float64. By way of the grid of dtype, without NumPy's casts."""
    bits, smallest = {"float16": (11, -24), "bfloat16": (8, -133)}[dtype.name]
    value = np.asarray(value, np.longdouble)
    _, exponent = np.frexp(value)
    step = np.maximum(exponent - bits, smallest)
    rounded = np.ldexp(np.rint(np.ldexp(value, -step)), step)
    # Beyond the largest number, infinity.
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(np.abs(rounded) > largest, np.copysign(np.inf, rounded), rounded).astype(np.float64)


# ---- calling a norm, whichever it is --------------------------------------------------------------


def is_centered(norm):
    return "layer" in norm.__name__


def forward_of(norm):
    return fastnorm.layer_norm_forward if is_centered(norm) else fastnorm.rms_norm_forward


def backward_of(norm):
    return fastnorm.layer_norm_backward if is_centered(norm) else fastnorm.rms_norm_backward


def gradients(norm, dy, x, weight=None, *, eps=1e-5, axis=-1, forward_options=None, **options):
    """(dx, dweight, dbias) with the statistics of the forward; without dbias for rms_norm."""
    _, *statistics = forward_of(norm)(x, axis=axis, eps=eps)
    return backward_of(norm)(dy, x, *statistics, weight, axis=axis, **options)


def exact(norm, x, *arguments, **options):
    """The same function of fastnorm.reference, in longdouble."""
    return getattr(reference, norm.__name__)(x, *arguments, **options)


def exact_gradients(norm, dy, x, weight=None, **options):
    return getattr(reference, backward_of(norm).__name__)(dy, x, weight, **options)


def everything(norm, x, dy, weight=None, bias=None, *, axis=-1, eps=1e-5):
    """All results of forward and backward as a flat dict, to be compared bit by bit."""
    affine = (weight, bias) if is_centered(norm) else (weight,)
    y, *statistics = forward_of(norm)(x, *affine, axis=axis, eps=eps)
    grads = backward_of(norm)(dy, x, *statistics, weight, axis=axis)
    names = ["mean", "rstd"] if is_centered(norm) else ["rstd"]
    return {
        "y": y,
        **dict(zip(names, statistics, strict=True)),
        **dict(zip(("dx", "dweight", "dbias"), grads, strict=False)),
    }


def bits(a):
    """The bytes of an array in C order. NaN is NaN: its payload is nobody's promise."""
    a = np.array(a, order="C")
    if a.dtype.kind in "fV":
        a[np.isnan(a)] = np.nan
    return a.tobytes()


def assert_same_bits(a, b):
    """Of arrays, or of dicts, tuples of arrays."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert bits(a[key]) == bits(b[key]), key
    elif isinstance(a, tuple):
        for p, q in zip(a, b, strict=True):
            assert_same_bits(p, q)
    else:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert bits(a) == bits(b)


# ---- memory layouts: each maker returns an array equal to a ---------------------------------------


def _buffer_with_offset(a, offset):
    raw = np.zeros(a.nbytes + offset + 64, np.uint8)
    view = np.ndarray(a.shape, a.dtype, raw.data, offset - raw.ctypes.data % -64)
    view[...] = a
    return view


def transposed(a):
    return np.array(a.T, order="C").T


def swapped_axes(a):
    """The first two of three or more axes exchanged in memory; of two: Fortran order."""
    return np.array(a.swapaxes(0, 1), order="C").swapaxes(0, 1) if a.ndim > 1 else a[::-1].copy()[::-1]


def sliced_columns(a):
    wide = np.zeros((*a.shape[:-1], 2 * a.shape[-1] + 3), a.dtype)
    wide[..., 1 : 2 * a.shape[-1] + 1 : 2] = a
    return wide[..., 1 : 2 * a.shape[-1] + 1 : 2]


def padded_rows(a):
    """Contiguous rows with a gap between them."""
    wide = np.zeros((*a.shape[:-1], a.shape[-1] + 5), a.dtype)
    wide[..., 3 : 3 + a.shape[-1]] = a
    return wide[..., 3 : 3 + a.shape[-1]]


def sliced_rows(a):
    tall = np.zeros((3 * a.shape[0], *a.shape[1:]), a.dtype)
    tall[1::3] = a
    return tall[1::3]


def reversed_all(a):
    backwards = (slice(None, None, -1),) * a.ndim
    return a[backwards].copy()[backwards]


def reversed_columns(a):
    return a[..., ::-1].copy()[..., ::-1]


def byte_swapped(a):
    if a.dtype == BFLOAT16:
        # ml_dtypes casts no swapped values; swap the bytes by hand.
        return (
            a.view(np.uint16).byteswap().view(a.dtype.newbyteorder("S"))
            if a.flags.c_contiguous
            else byte_swapped(np.ascontiguousarray(a))
        )
    return a.astype(a.dtype.newbyteorder("S"))


def offset_by_one_element(a):
    return _buffer_with_offset(a, a.itemsize)


def odd_byte_offset(a):
    return _buffer_with_offset(a, 3)


def packed_field(a):
    """A field of packed records: strides that are no multiple of the item size."""
    records = np.zeros(a.shape, np.dtype([("tag", "u1"), ("value", a.dtype)]))
    records["value"] = a
    return records["value"]


def read_only(a):
    a = a.copy()
    a.setflags(write=False)
    return a


def fortran(a):
    return np.asfortranarray(a)


LAYOUTS = [
    transposed,
    swapped_axes,
    sliced_columns,
    padded_rows,
    sliced_rows,
    reversed_all,
    reversed_columns,
    byte_swapped,
    offset_by_one_element,
    odd_byte_offset,
    packed_field,
    read_only,
    fortran,
]
WRITABLE_LAYOUTS = [m for m in LAYOUTS if m is not read_only]


# ---- subprocesses: what can only be seen in a fresh interpreter -----------------------------------


def run_python(code, *, timeout=60, check=True, arguments=(), **environment):
    """Run code (text, or the path of a script) with this fastnorm on the path. None in environment: unset."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FASTNORM_")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    for key, value in environment.items():
        env.pop(key, None)
        if value is not None:
            env[key] = str(value)
    source = [str(code)] if isinstance(code, Path) else ["-c", code]
    done = subprocess.run(
        [sys.executable, *source, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=timeout,
        check=False,
        cwd=TESTS,
    )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
