"""What the compiler of the devices makes of the kernels: resources and instructions. No device is needed.

NVRTC compiles one program at a time in a process, so this is done in processes of their own, beside the emulator.
"""

import collections
import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import nvidia
from cupy.cuda import nvrtc

from fastnorm._cuda import geometry, sources

ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
# Whose instructions are looked at one by one: the oldest, the one with most users, the newest.
DISASSEMBLED = [75, 90, 120]
TOOLS = [str(p) for root in nvidia.__path__ for p in Path(root).glob("*/bin")]
KERNELS = geometry.variants()


class Reports:
    """Those of all kernels for all architectures, in the making."""

    def __init__(self):
        self.pool = ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn"))
        self.reports = {a: [self.pool.submit(report, *kernel, a) for kernel in KERNELS] for a in ARCHITECTURES}

    def of(self, architecture):
        """(variant, resources, instructions) of each kernel; no instructions for some architectures."""
        return [(k, *r.result()) for k, r in zip(KERNELS, self.reports[architecture], strict=True)]

    def close(self):
        self.pool.shutdown(cancel_futures=True)


def report(source, macros, architecture):
    """Resources by kernel, and how often each instruction stands in it if that is wanted."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin_of(source, macros, architecture))
        file.flush()
        instructions = instructions_of(file.name) if architecture in DISASSEMBLED else {}
        return resources_of(file.name), instructions


def cubin_of(source, macros, architecture):
    """As CuPy compiles it, flush-to-zero included."""
    program = nvrtc.createProgram(sources.joined(source), source, (), ())
    options = (*sources.options(**dict(macros)), f"-arch=sm_{architecture}", "-ftz=true")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        raise AssertionError(f"{source} {macros}: {nvrtc.getProgramLog(program)[:2000]}") from None
    # CuPy takes the last byte for the end of a text.
    return nvrtc.getCUBIN(program) + b"\0"


def output_of(*command):
    environment = {**os.environ, "PATH": os.pathsep.join([*TOOLS, os.environ["PATH"]])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resources_of(path):
    return {
        name: dict(zip(("registers", "stack", "shared", "local"), map(int, numbers), strict=True))
        for name, *numbers in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
            output_of("cuobjdump", "-res-usage", path),
        )
    }


def instructions_of(path):
    # Without the analysis of where indirect branches go, that is a third faster.
    parts = re.split(r"\n\s*\.section\s+\.text\.(\w+),", output_of("nvdisasm", "-c", "-ndf", path))
    return {
        name: collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", text))
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
