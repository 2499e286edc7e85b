"""Copies between any strides, alignments and dtypes, and what else moves no more than bytes: on our own kernels, so
that nothing is hidden in them and the same code runs in tests without a GPU."""
from functools import cache
from itertools import product

from fastnorm._cuda import devices, sources

# storage.cuh has the same list.
STORAGE_TYPES = ("float16", "bfloat16", "float32", "float64", "bool", "int8", "uint8", "int16", "uint16", "int32",
                 "uint32", "int64", "uint64")
FLOATS = STORAGE_TYPES[:4]
_DIMS = 6
_TILE = 32


@cache
def storage_number(dtype):
    return STORAGE_TYPES.index(dtype.name)


def merged(shape, *strides):
    """The same elements with as few dimensions as do: (shape, strides of each array)."""
    kept = []
    for n, *steps in zip(shape, *strides, strict=True):
        if n == 1:
            continue
        if kept and all(last == n * step for last, step in zip(kept[-1][1:], steps, strict=True)):
            kept[-1] = (kept[-1][0] * n, *steps)
        else:
            kept.append((n, *steps))
    if not kept:
        return ((), *((),) * len(strides))
    return tuple(zip(*kept, strict=True))


def is_aligned(a):
    return not (a.data.ptr % a.itemsize or any(s % a.itemsize for s in a.strides))


def copy(source, target):
    """target[...] = source, for arrays of one shape on the current device that do not overlap."""
    if source.size == 0:
        return
    # Densest dimension of target last.
    order = sorted(range(target.ndim), key=lambda d: -abs(target.strides[d]))
    ordered = ([numbers[d] for d in order] for numbers in (target.shape, source.strides, target.strides))
    shape, from_strides, to_strides = merged(*ordered)
    dims = list(zip(shape, from_strides, to_strides, strict=True))
    turned = False
    if dims:
        dense = min(range(len(dims)), key=lambda d: (abs(dims[d][1]), d != len(dims) - 1))
        # copy_tiles takes the densest dimension of source before that of target. A tile that is hardly filled is
        # worse than accesses that lie apart.
        turned = dense != len(dims) - 1 and min(dims[dense][0], dims[-1][0]) >= _TILE // 4
        if turned:
            dims[-1:-1] = [dims.pop(dense)]
    outer, inner = dims[:-_DIMS], dims[-_DIMS:]
    inner = [(1, 0, 0)] * (_DIMS - len(inner)) + inner
    count = 1
    for n, _, _ in inner:
        count *= n
    blocks = -(-count // 1024)
    if turned:
        n4, n5 = inner[4][0], inner[5][0]
        blocks = count // (n4 * n5) * -(-n4 // _TILE) * -(-n5 // _TILE)
    kernel = sources.kernel(devices.current(), "copy.cu", "copy_tiles" if turned else "copy_elements")
    types = (storage_number(source.dtype), storage_number(target.dtype),
             int(is_aligned(source)), int(is_aligned(target)))
    numbers = [d[k] for k in range(3) for d in inner]
    # More dimensions than a kernel has are rare enough for a launch each.
    for index in product(*(range(n) for n, _, _ in outer)):
        at = source.data.ptr + sum(i * d[1] for i, d in zip(index, outer, strict=True))
        to = target.data.ptr + sum(i * d[2] for i, d in zip(index, outer, strict=True))
        kernel((blocks,), (256,), (at, to, *types, *numbers), shared_mem=8 * _TILE * (_TILE + 1) if turned else 0)


def fill(target, value):
    """target[...] = value, for a new array of a float dtype."""
    if target.size:
        kernel = sources.kernel(devices.current(), "copy.cu", "fill")
        kernel((-(-target.size // 256),), (256,),
               (target.data.ptr, storage_number(target.dtype), target.itemsize, target.size, float(value)))
