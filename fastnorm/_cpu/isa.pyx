"""Which instruction-set level computes: the widest that this processor has, or FASTNORM_ISA.

The bits are the same on all of them, so the choice matters for speed and for tests only.
"""
import os
from importlib import import_module

from cpython.pycapsule cimport PyCapsule_GetPointer
from fastnorm._cpu.kernels cimport kernels

cdef extern from "levels.h":
    int count_levels()

#: Levels of this build that this processor can run, narrowest first.
levels = ("baseline", "v3", "v4")[:count_levels()]


def choose(wanted):
    """The level named wanted, or the widest one if it is empty."""
    if not wanted:
        return levels[-1]
    if wanted not in levels:
        raise ImportError(f"FASTNORM_ISA={wanted!r}: this processor and build have {', '.join(levels)}")
    return wanted


level = choose(os.environ.get("FASTNORM_ISA"))


cdef const kernels* load(str real):
    """The kernels of the chosen level for the arithmetic type float32 or float64."""
    module = import_module(f"fastnorm._cpu._{real}_{level}")
    return <const kernels*>PyCapsule_GetPointer(module.capsule, "fastnorm._cpu.kernels")


cdef const kernels* float32_kernels = load("float32")
cdef const kernels* float64_kernels = load("float64")
