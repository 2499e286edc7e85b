"""From the .cu files to kernels: joined text, options, one compilation for each variant and device.

Joined text rather than include paths, because CuPy's cache on disk does not look into included files; macros
rather than template names, because that cache has them in every version of CuPy.
"""
import re
from functools import cache
from importlib.resources import files

import cupy

from fastnorm._cuda import devices

# A product and a sum are rounded once only where the source says fused().
OPTIONS = ("--std=c++17", "--fmad=false")
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.M)
# Bytes; beyond, a kernel has to be told how much shared memory it gets.
STATIC_LIMIT = 48 * 1024

# What compiles a source; tests put a compiler for the processor here.
module = cupy.RawModule


@cache
def joined(name):
    """The text of a file with what it includes, each once."""
    seen = set()

    def text_of(name):
        if name in seen:
            return ""
        seen.add(name)
        text = files("fastnorm._cuda").joinpath(name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: text_of(match[1]), text)

    return text_of(name)


def options(**macros):
    """Compiler options; a macro storage is KERNEL_STORAGE in the sources."""
    return OPTIONS + tuple(f"-DKERNEL_{name.upper()}={value}" for name, value in macros.items())


@cache
def kernel(device, source, name, large=False, **macros):
    """The kernel of a source file, compiled for the current device, which device is the number of. large: whether it
    may be launched with more than STATIC_LIMIT of shared memory."""
    function = module(code=joined(source), options=options(**macros)).get_function(name)
    # CuPy compiles a source once, so rows of other lengths share the kernel and its limit: all that the device has.
    if large:
        function.max_dynamic_shared_size_bytes = devices.properties(device).shared_memory
    return function
