"""A device for tests without a GPU: real cupy.ndarrays over host memory, and kernels compiled for the processor.

`Module` takes the place of cupy.RawModule, `Memory` that of CuPy's allocator; the launchers of fastnorm._cuda do not
notice. emulator.cpp runs the kernels, emulator.h is what they see of it.
"""

import ctypes
import functools
import hashlib
import os
import re
import struct
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cupy
import numpy as np

HEADER, RUNTIME = Path(__file__).with_name("emulator.h"), Path(__file__).with_name("emulator.cpp")
COMPILER = os.environ.get("CXX", "g++")
LIBRARY = ["-std=c++17", "-fPIC", "-shared", "-w"]
# Null pointers and objects that are too small: the emulator looks at every access itself.
SANITIZE = ["-fsanitize=undefined", "-fno-sanitize=null,object-size,pointer-overflow", "-static-libubsan"]
FLAGS = [*LIBRARY, "-O1", "-ffp-contract=off", *SANITIZE]
RUNTIME_FLAGS = [*LIBRARY, "-O2", "-ftree-vectorize"]
FEATURES = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
if "fma" in FEATURES:
    FLAGS.append("-mfma")
if "avx2" in FEATURES:
    RUNTIME_FLAGS.append("-mavx2")
# Beside the compiled tests: of this checkout alone, and kept from run to run.
CACHE = Path(__file__).with_name("__pycache__") / "emulator"
# What an H200 has, but for the few multiprocessors: with small tests, blocks must still get several rows.
SHARED_MEMORY = 227 * 1024
MULTIPROCESSORS = 3


class Region(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p) for name in ("start", "end", "guard_start", "guard_end", "writer", "reader")
    ] + [(name, ctypes.c_int64) for name in ("is_written", "is_read")]


class Counters(ctypes.Structure):
    _fields_ = [("read", ctypes.c_int64), ("written", ctypes.c_int64)]


class _Block:
    """Host memory with a guard on both sides. NaN all over, as every float type reads it."""

    GUARD = 256

    def __init__(self, size, shift=0):
        self.buffer = np.full(size + shift + 3 * self.GUARD, 0xFF, np.uint8)
        address = self.buffer.ctypes.data
        self.start = address + self.GUARD - address % self.GUARD + shift
        self.touched = np.zeros(2 * size, np.int32)
        writer = self.touched.ctypes.data
        # As each launch gets it.
        self.region = Region(
            self.start, self.start + size, address, address + self.buffer.size, writer, writer + 4 * size, 0, 0
        )


class Memory:
    """An allocator for cupy.cuda.set_allocator, and the list of what it has given out. device: of new arrays."""

    def __init__(self):
        self.device = 0
        self.blocks = weakref.WeakSet()

    def __call__(self, size):
        return self.allocate(size)

    def allocate(self, size, shift=0):
        """shift: bytes beyond an address that is a multiple of 256."""
        block = _Block(size, shift)
        self.blocks.add(block)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(block.start, size, block, self.device), 0)

    def regions(self):
        blocks = sorted(self.blocks, key=lambda b: b.start)
        return (Region * len(blocks))(*(b.region for b in blocks)), blocks


class Launch:
    """What a launch has done: for tests that look at it."""

    def __init__(self, name, grid, threads, shared, counters):
        self.name, self.grid, self.threads, self.shared = name, grid, threads, shared
        self.read, self.written = counters.read, counters.written


class Emulator:
    """One device: its memory, its launches, the seed of its schedules."""

    def __init__(self):
        self.memory = Memory()
        self.launches = []
        self.limits = {}
        self.seed = 1
        self.next_serial = 1

    def module(self, code, options=()):
        return Module(self, code, options)


class Module:
    """As cupy.RawModule."""

    def __init__(self, emulator, code, options):
        self.emulator, self.options, self.runtime = emulator, options, runtime()
        self.library = ctypes.CDLL(str(built(code, options)))

    def get_function(self, name):
        return Function(self, name)


@functools.cache
def runtime():
    """The library that runs kernels, those of all libraries loaded after it."""
    library = ctypes.CDLL(str(compiled(RUNTIME.read_text(), RUNTIME_FLAGS)), mode=ctypes.RTLD_GLOBAL)
    library.emulated_launch.restype = ctypes.c_char_p
    return library


def built(code, options):
    """The library of a kernel's source."""
    names = re.findall(r'extern "C" __global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(', code)
    assert names, "no kernels"
    source = HEADER.read_text() + code + "".join(f"\nEMULATED_KERNEL({n})" for n in names) + "\n"
    return compiled(source, [*FLAGS, *(o for o in options if o.startswith("-D"))])


def compiled(source, flags):
    """Built once, whoever asks."""
    path = CACHE / f"{hashlib.sha256(chr(0).join([source, COMPILER, *flags]).encode()).hexdigest()[:24]}.so"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        command = [COMPILER, *flags, "-x", "c++", "-", "-o", str(made)]
        done = subprocess.run(command, input=source, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr[:5000]
        made.replace(path)
    return path


def build_all(sources_and_options):
    """Ahead of their first use, on all processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda one: built(*one), sources_and_options))


class Function:
    """As cupy.RawKernel."""

    def __init__(self, module, name):
        self.emulator, self.name, self.runtime = module.emulator, name, module.runtime
        self.call = ctypes.cast(getattr(module.library, f"emulated_call_{name}"), ctypes.c_void_p)
        kinds = getattr(module.library, f"emulated_kinds_{name}")
        kinds.restype = ctypes.c_char_p
        self.kinds = kinds().decode()
        threads = [int(o.split("=")[1]) for o in module.options if o.startswith("-DKERNEL_THREADS=")]
        self.most_threads = threads[0] if threads else 1024
        # CuPy compiles a source once for a device: whoever asks for the kernel again gets the same one, limit included.
        self.limits = self.emulator.limits
        self.key = (module.library._name, name)
        self.limits.setdefault(self.key, 48 * 1024)

    @property
    def max_dynamic_shared_size_bytes(self):
        return self.limits[self.key]

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        self.limits[self.key] = size

    def __call__(self, grid, block, args, *, shared_mem=0):
        (threads,) = block
        grid = (*grid, 1)[:2]
        if not (0 < threads <= self.most_threads and threads % 32 == 0):
            raise RuntimeError(f"{self.name}: {threads} threads of at most {self.most_threads}")
        if not (0 < grid[0] < 2**31 and 0 < grid[1] < 65536):
            raise RuntimeError(f"{self.name}: a grid of {grid}")
        if not 0 <= shared_mem <= min(self.max_dynamic_shared_size_bytes, SHARED_MEMORY):
            raise RuntimeError(f"{self.name}: {shared_mem} bytes of shared memory")
        given = "".join("d" if type(a) is float else "i" if type(a) is int else "?" for a in args)
        if given != self.kinds.replace("p", "i"):
            raise TypeError(f"{self.name}: launched with {given} ({args}), the kernel takes {self.kinds}")
        packed = struct.pack("=" + given.replace("i", "Q"), *(a if type(a) is float else a % 2**64 for a in args))
        e = self.emulator
        regions, blocks = e.memory.regions()
        counters = Counters()
        error = self.runtime.emulated_launch(
            self.call,
            (ctypes.c_uint * 2)(*grid),
            ctypes.c_uint(threads),
            ctypes.c_size_t(shared_mem),
            packed,
            regions,
            len(blocks),
            ctypes.c_int32(e.next_serial),
            ctypes.c_uint64(e.seed),
            ctypes.byref(counters),
        )
        e.next_serial += grid[0] * grid[1]
        e.launches.append(Launch(self.name, grid, threads, shared_mem, counters))
        if error:
            raise RuntimeError(f"{self.name}: {error.decode()}")
