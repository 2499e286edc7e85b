"""What the halls need to know of NumPy arrays, or do with them, besides computing."""
import numpy as np

from fastnorm._cpu.row_norm import round_doubles


def copy(source, target):
    if source.dtype == np.float64 and target.dtype.name == "bfloat16":
        narrow = np.empty(source.shape, target.dtype.newbyteorder("="))
        round_doubles(np.ascontiguousarray(source), narrow)
        source = narrow
    # What is too large for a narrower type becomes infinity, as in the kernels, without a warning.
    with np.errstate(all="ignore"):
        target[...] = source


def fill(target, value):
    target[...] = value


def address(a):
    return a.__array_interface__["data"][0]


def is_read_only(a):
    return not a.flags.writeable


def away(a):
    """There is one memory only."""
    return None
