"""All that is asked of a device and of the CUDA runtime."""
from functools import cache
from typing import NamedTuple

import cupy


class Device(NamedTuple):
    """What the geometry of launches depends on."""

    multiprocessors: int
    # Bytes that a block may ask for.
    shared_memory: int


@cache
def properties(number):
    """The Device of a number."""
    attributes = cupy.cuda.Device(number).attributes
    return Device(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])


def current():
    """The number of the current device of this thread."""
    return cupy.cuda.runtime.getDevice()


def entered(number):
    """A context in which that device is the current one."""
    return cupy.cuda.Device(number)


def away(array):
    """A context for the device of an array, None if it is the current one."""
    number = array.data.device_id
    return None if number == current() else entered(number)
