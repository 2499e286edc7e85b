"""What the halls need to know of NumPy arrays, or do with them, besides computing."""
import numpy as np


def copy(source, target):
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
