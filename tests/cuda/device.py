"""The device under test behind two verbs, put and get; and fastnorm over it for NumPy arrays, so that a test written
for the CPU wing runs on the other one as it stands."""

import ctypes
import functools
import types

import cupy
import emulator
import numpy as np

import fastnorm
import fastnorm.reference
from fastnorm._cuda import copies, devices, row_norm, sources


class Gpu:
    """The current CUDA device."""

    is_emulated = False

    def install(self):
        pass

    def remove(self):
        pass

    def allocate(self, size, shift):
        return cupy.cuda.alloc(size + 256) + shift

    def read(self, pointer, size):
        return cupy.ndarray((size,), np.uint8, pointer).get().tobytes()

    def write(self, pointer, data):
        if data:
            cupy.ndarray((len(data),), np.uint8, pointer).set(np.frombuffer(data, np.uint8))


class Emulated:
    """Host memory that CuPy takes for device memory."""

    is_emulated = True

    def __init__(self):
        self.emulator = emulator.Emulator()

    def install(self):
        self.kept = sources.module, devices.current, devices.entered, devices.properties
        self.forget()
        sources.module = self.emulator.module
        self.number = 0
        devices.current = lambda: self.number
        devices.entered = self.entered
        devices.properties = lambda number: devices.Device(emulator.MULTIPROCESSORS, emulator.SHARED_MEMORY)
        cupy.cuda.set_allocator(self.emulator.memory)

    def remove(self):
        sources.module, devices.current, devices.entered, devices.properties = self.kept
        self.forget()
        cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)

    @staticmethod
    def forget():
        """Kernels that were compiled before."""
        sources.kernel.cache_clear()
        row_norm._program.cache_clear()

    def entered(self, number):
        return _Entered(self, number)

    def allocate(self, size, shift):
        return self.emulator.memory.allocate(size, shift)

    def read(self, pointer, size):
        return ctypes.string_at(pointer.ptr, size)

    def write(self, pointer, data):
        ctypes.memmove(pointer.ptr, data, len(data))


class _Entered:
    """As a cupy.cuda.Device is one."""

    def __init__(self, device, number):
        self.device, self.number = device, number

    def __enter__(self):
        self.before, self.device.number = self.device.number, self.number
        self.device.emulator.memory.device = self.number

    def __exit__(self, *_):
        self.device.number = self.device.emulator.memory.device = self.before


@functools.cache
def the_device():
    return Gpu() if cupy.cuda.is_available() else Emulated()


# ---- arrays there and back ------------------------------------------------------------------------


class Transfer:
    """NumPy arrays on the device, laid out as they are: shared memory stays shared, an odd address odd."""

    def __init__(self, arrays):
        self.device = the_device()
        self.regions = []
        for start, end in sorted(np.lib.array_utils.byte_bounds(a) for a in arrays if a.size):
            if self.regions and start < self.regions[-1][1]:
                self.regions[-1][1] = max(end, self.regions[-1][1])
            else:
                self.regions.append([start, end])
        for region in self.regions:
            start, end = region
            pointer = self.device.allocate(end - start, start % 256)
            self.device.write(pointer, ctypes.string_at(start, end - start))
            region.append(pointer)

    def put(self, a):
        address = a.__array_interface__["data"][0]
        for start, end, pointer in self.regions:
            if a.size and start <= address < end:
                return cupy.ndarray(a.shape, a.dtype, pointer + (address - start), a.strides)
        return cupy.ndarray(a.shape, a.dtype, self.device.allocate(max(1, a.nbytes), 0))

    def bring_back(self):
        """Whatever has changed there changes here, read-only or not."""
        for start, end, pointer in self.regions:
            data = self.device.read(pointer, end - start)
            if data != ctypes.string_at(start, end - start):
                ctypes.memmove(start, data, end - start)


def put(a):
    return Transfer([a]).put(a)


def get(a):
    """A C-contiguous device array as a NumPy array."""
    assert a.flags.c_contiguous
    return np.frombuffer(bytearray(the_device().read(a.data, a.nbytes)), a.dtype).reshape(a.shape)


# ---- fastnorm over the device, for NumPy arrays ---------------------------------------------------


def _goes_there(value):
    """CuPy has no other dtypes; what it lacks stays NumPy's and gets the error that NumPy's wing has."""
    return type(value) is np.ndarray and value.dtype.name in copies.STORAGE_TYPES


def _native(value):
    if type(value) is np.ndarray and value.dtype.kind in "biuf" and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


NUMBERS = ("eps", "axis", "weight_offset", "param_grads", "alpha", "training", "momentum")


def over_device(function):
    """A function of fastnorm that takes and returns NumPy arrays, and computes on the device."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        args, arrays = [_native(a) for a in args], {k: _native(v) for k, v in kwargs.items() if k not in NUMBERS}
        transfer = Transfer([a for a in (*args, *arrays.values()) if _goes_there(a)])
        there = {}

        def put_one(a):
            if not _goes_there(a):
                return a
            b = transfer.put(a)
            there[id(b)] = a
            keep.append(b)
            return b

        keep = []
        try:
            result = function(*[put_one(a) for a in args], **kwargs | {k: put_one(v) for k, v in arrays.items()})
        finally:
            transfer.bring_back()

        def back(r):
            return there[id(r)] if id(r) in there else get(r) if isinstance(r, cupy.ndarray) else r

        return tuple(back(r) for r in result) if isinstance(result, tuple) else back(result)

    return call


OPERATIONS = (
    "layer_norm",
    "layer_norm_forward",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_forward",
    "rms_norm_backward",
    "add_layer_norm",
    "add_layer_norm_forward",
    "add_layer_norm_backward",
    "add_rms_norm",
    "add_rms_norm_forward",
    "add_rms_norm_backward",
    "batch_norm",
    "batch_norm_forward",
    "batch_norm_backward",
)


def module_over_device():
    """What a test gets as `fastnorm`."""
    module = types.ModuleType("fastnorm")
    module.__dict__.update({k: v for k, v in vars(fastnorm).items() if not k.startswith("__") or k == "__file__"})
    for name in OPERATIONS:
        setattr(module, name, over_device(getattr(fastnorm, name)))
    return module
