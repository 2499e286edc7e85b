"""Checks of arguments, with our error texts. Nothing here computes. Compiled, like the halls that call it."""
from functools import cache
from operator import index

import numpy as np
from numpy.lib.array_utils import normalize_axis_index, normalize_axis_tuple

from fastnorm._backend import backend_of

FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTEGERS = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_SUPPORTED = "float16, bfloat16, float32, float64 (integers and bool are computed as float64)"
_FLOAT32, _FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)


@cache
def _types(dtype):
    """(is supported, is a float, arithmetic type, result type). Cached: NumPy spells a dtype's name anew each time."""
    name = dtype.name
    is_float = name in FLOATS
    return (is_float or name in _INTEGERS, is_float, _FLOAT64 if name == "float64" or not is_float else _FLOAT32,
            dtype.newbyteorder("=") if is_float else _FLOAT64)


def array(name, value, wing):
    """value as a plain array of the wing and on the current device, of a dtype that kernels read."""
    if type(value) is not wing.xp.ndarray:
        if backend_of(name, value) is not wing:
            raise TypeError(f"{name}: {type(value).__module__}.{type(value).__qualname__} does not mix with the kind "
                            f"of array that x is; convert one of them first")
        value = wing.xp.asarray(value)
    if not _types(value.dtype)[0]:
        raise TypeError(f"{name}: dtype {value.dtype} is not supported; expected {_SUPPORTED}")
    _check_device(name, value, wing)
    return value


def _check_device(name, value, wing):
    """By the time arguments are checked, the device of x is the current one."""
    if wing.away(value) is not None:
        raise ValueError(f"{name}: it is on {value.device}, but x is on another device; expected all arrays on one")


def arithmetic_type(dtype):
    """The dtype of statistics and sums: float32 for 16-bit types and float32, else float64."""
    return _types(dtype)[2]


def is_wider(dtype, other):
    """Whether the arithmetic type of dtype is wider than that of the other."""
    return _types(dtype)[2] is _FLOAT64 and _types(other)[2] is _FLOAT32


def result_type(dtype):
    """The dtype of what has the dtype of an input: its own in native byte order, float64 for integers."""
    return _types(dtype)[3]


def normalized_axes(x, axis):
    """axis as a sorted tuple of non-negative ints."""
    if type(axis) is int and -x.ndim <= axis < x.ndim:
        return (axis % x.ndim,)
    if axis is None:
        axes = tuple(range(x.ndim))
        if not axes:
            axes = normalize_axis_tuple(-1, 0)
    else:
        axes = tuple(sorted(normalize_axis_tuple(axis, x.ndim, argname="axis")))
    if not axes:
        raise ValueError("axis: () normalizes nothing; expected at least one axis")
    return axes


def single_axis(x, axis):
    """axis as a non-negative int; a tuple of axes is a TypeError."""
    if type(axis) is not int:
        if isinstance(axis, (bool, tuple, list)) or axis is None:
            raise TypeError(f"axis: expected one int, the axis of the channels, got {axis!r}")
        try:
            axis = index(axis)
        except TypeError:
            raise TypeError(f"axis: expected one int, the axis of the channels, got {axis!r}") from None
    return normalize_axis_index(axis, x.ndim, "axis")


def nonnegative(name, value):
    """value as a finite float of at least 0."""
    number = real_number(name, value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}")
    return number


def finite(name, value):
    """value as a finite float."""
    number = real_number(name, value)
    if number - number != 0.0:
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    return number


def real_number(name, value):
    """value as a float."""
    if type(value) is float:
        return value
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 0):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: too large for a float") from None
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None


def parameter(name, value, shape, wing):
    """weight or bias as it came, of the shape of the normalized axes; None stays None."""
    if value is None:
        return None
    value = array(name, value, wing)
    if value.shape != shape:
        raise ValueError(f"{name}: shape {value.shape}, but the normalized axes of x have shape {shape}")
    return value


def channel_parameter(name, value, n_channels, wing):
    """weight, bias or a running statistic as it came, one value a channel; None stays None."""
    if value is None:
        return None
    value = array(name, value, wing)
    if value.shape != (n_channels,):
        raise ValueError(f"{name}: shape {value.shape}, but x has {n_channels} channels: expected ({n_channels},)")
    return value


def updated(name, value, n_channels, wing):
    """A running statistic that a call is to change in place: checked, not converted."""
    if not isinstance(value, wing.xp.ndarray):
        raise TypeError(f"{name}: it is updated in place; expected {wing.xp.__name__}.ndarray, "
                        f"not {type(value).__module__}.{type(value).__qualname__}")
    if backend_of(name, value) is not wing:
        raise TypeError(f"{name}: {type(value).__qualname__} does not mix with the kind of array that x is")
    channel_parameter(name, value, n_channels, wing)
    if not _types(value.dtype)[1]:
        raise TypeError(f"{name}: dtype {value.dtype} cannot hold a running statistic; expected {', '.join(FLOATS)}")
    if wing.is_read_only(value):
        raise ValueError(f"{name}: it is updated in place, but it is read-only")


def same_shape(name, value, x, wing, x_name="x"):
    """An input of the shape of x."""
    value = array(name, value, wing)
    if value.shape != x.shape:
        raise ValueError(f"{name}: shape {value.shape}, but {x_name} has shape {x.shape}")
    return value


def statistic(name, value, shape, dtype, wing):
    """mean or rstd as forward returned it, flat."""
    value = array(name, value, wing)
    if value.shape != shape:
        raise ValueError(f"{name}: shape {value.shape}, but for this x and axis it is {shape}")
    if value.dtype != dtype:
        raise TypeError(f"{name}: dtype {value.dtype}, but for this x it is {dtype}")
    if not value.flags.c_contiguous or not value.dtype.isnative or wing.address(value) % value.itemsize:
        plain = wing.xp.empty(shape, dtype)
        wing.copy(value, plain)
        value = plain
    return value.reshape(-1)


def output(name, out, x, dtype, wing, x_name="x"):
    """out, or a new array of the shape of x if it is None."""
    if out is None:
        return wing.empty(x.shape, dtype)
    if not isinstance(out, wing.xp.ndarray):
        raise TypeError(f"{name}: return arrays must be of type {wing.xp.__name__}.ndarray, "
                        f"not {type(out).__module__}.{type(out).__qualname__}")
    if backend_of(name, out) is not wing:
        raise TypeError(f"{name}: {type(out).__qualname__} does not mix with the kind of array that x is")
    _check_device(name, out, wing)
    if not _types(out.dtype)[1]:
        raise TypeError(f"{name}: cannot cast the result from {dtype!r} to {out.dtype!r} with casting rule "
                        f"'same_kind'; expected {', '.join(FLOATS)}")
    if out.shape != x.shape:
        raise ValueError(f"{name}: shape {out.shape}, but {x_name} has shape {x.shape}")
    if wing.is_read_only(out):
        raise ValueError(f"{name}: output array is read-only")
    return out


def is_same_memory(a, b, wing):
    """Whether two arrays are the same elements in the same places."""
    return (a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides
            and wing.address(a) == wing.address(b))


class _Place:
    """Where an array lies, as NumPy takes it. Nothing is read there: it may be on another device."""

    def __init__(self, a, wing):
        self.__array_interface__ = {"version": 3, "data": (wing.address(a), False), "typestr": f"|V{a.itemsize}",
                                    "shape": a.shape, "strides": a.strides}


def overlap(a, b, wing):
    """Whether two arrays have a byte in common; not only by their bounds, as for a copy that does no harm."""
    if not wing.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(np.asarray(_Place(a, wing)), np.asarray(_Place(b, wing)), max_work=10**5)
    except np.exceptions.TooHardError:
        return True


def computed_apart(result, out, in_place, others, wing):
    """Where a result is computed: in its place, or apart if the caller's out overlaps an input other than element by
    element."""
    if out is not None and needs_copy(result, in_place, others, wing):
        return wing.empty(result.shape, result.dtype)
    return result


def keepdims(x, axes):
    """The shape of x with those axes of length 1."""
    return tuple([1 if a in axes else n for a, n in enumerate(x.shape)])


def copied(a, wing):
    """A copy in memory of its own."""
    new = wing.empty(a.shape, a.dtype)
    wing.copy(a, new)
    return new


def needs_copy(out, in_place, others, wing):
    """Whether out must be computed elsewhere and copied: it overlaps an input other than element by element."""
    if any([b is not None and wing.may_share_memory(out, b) for b in others]):
        return True
    return any([wing.may_share_memory(out, a) and not is_same_memory(out, a, wing) for a in in_place])
