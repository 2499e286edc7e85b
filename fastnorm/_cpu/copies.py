"""What the halls need to know of NumPy arrays, or do with them, besides computing."""


def copy(source, target):
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
