"""What the compiler of the devices makes of the kernels: resources and instructions. No device is needed.

NVRTC compiles one program at a time in a process, so this is done in processes of their own, beside the emulator.

Its front end makes the same PTX for many architectures, and that is most of its work: it makes this once for all of
them, and ptxas, the assembler that NVRTC has inside, makes the cubins. Reports.compared holds both against NVRTC alone.
"""

import bisect
import collections
import functools
import multiprocessing
import os
import re
import struct
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import nvidia
from cupy.cuda import nvrtc

from fastnorm._cuda import geometry, sources

# Those for which the front end writes the same text.
GROUPS = [(75, 80, 86, 89, 90), (100, 120)]
ARCHITECTURES = [a for group in GROUPS for a in group]
# Whose instructions are looked at one by one: the oldest, the one with most users, the newest.
DISASSEMBLED = [75, 90, 120]
TOOLS = [p for root in nvidia.__path__ for p in Path(root).glob("*/bin")]
KERNELS = geometry.variants()
# One of each kind; enough to see whether NVRTC has begun to treat architectures of a group differently.
SAMPLE = [next(k for k in KERNELS if k[0] == s and dict(k[1]).get("packs") != 4) for s in ("copy.cu", "finish_sums.cu")]
SAMPLE += [k for k in KERNELS if dict(k[1]) == dict(storage="float32", centered=1, packs=2, threads=128)]
# nvdisasm takes longer to begin than for a kernel: each job has a few kernels, some large, some small.
JOBS = 12


class Reports:
    """Those of all kernels for all architectures, in the making."""

    def __init__(self, compared=SAMPLE):
        # Behind the tests, which run one after the other: they decide how long all takes.
        self.pool = ProcessPoolExecutor(
            os.cpu_count(), multiprocessing.get_context("spawn"), initializer=os.nice, initargs=(5,)
        )
        # Of kernels, the architectures for which NVRTC alone makes other code.
        self.compared = {k: self.pool.submit(differences_of, *k) for k in compared}
        self.jobs = [self.pool.submit(reports_of, KERNELS[i::JOBS]) for i in range(JOBS)]

    def of(self, architecture):
        """(variant, resources, instructions) of each kernel; no instructions for some architectures."""
        return [(k, *self.jobs[i % JOBS].result()[architecture][i // JOBS]) for i, k in enumerate(KERNELS)]

    def close(self):
        self.pool.shutdown(cancel_futures=True)


def reports_of(kernels):
    """By architecture, of each of the kernels: resources of its functions, and how often each instruction stands in
    them if that is wanted."""
    cubins = [cubins_of(*kernel) for kernel in kernels]
    reports = {}
    for architecture in ARCHITECTURES:
        of_one = [c[architecture] for c in cubins]
        is_wanted = architecture in DISASSEMBLED
        instructions = instructions_of(of_one, architecture) if is_wanted else [{}] * len(kernels)
        reports[architecture] = list(zip(map(resources_of, of_one), instructions, strict=True))
    return reports


def differences_of(source, macros):
    def all_of(cubin):
        return resources_of(cubin), dict(code_of(cubin))

    one, other = cubins_of(source, macros), cubins_of_nvrtc(source, macros)
    return [a for a in ARCHITECTURES if all_of(one[a]) != all_of(other[a])]


def cubins_of_nvrtc(source, macros):
    return {a: compiled(source, macros, f"sm_{a}", nvrtc.getCUBIN) for a in ARCHITECTURES}


def cubins_of(source, macros):
    """By architecture."""
    if assembler() is None:
        return cubins_of_nvrtc(source, macros)
    return {a: assembled(text, a) for group in GROUPS for a, text in ptx_of(source, macros, group).items()}


def ptx_of(source, macros, group):
    """By architecture: what NVRTC writes for the first, under the names of all."""
    text = compiled(source, macros, f"compute_{group[0]}", nvrtc.getPTX)
    target = f"\n.target sm_{group[0]}\n".encode()
    assert text.count(target) == 1
    return {a: text.replace(target, f"\n.target sm_{a}\n".encode()) for a in group}


def compiled(source, macros, target, get):
    """As CuPy compiles it, flush-to-zero included."""
    program = nvrtc.createProgram(sources.joined(source), source, (), ())
    options = (*sources.options(**dict(macros)), f"-arch={target}", "-ftz=true")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        raise AssertionError(f"{source} {macros}: {nvrtc.getProgramLog(program)[:2000]}") from None
    made = get(program)
    # CuPy takes the last byte for the end of a text, which it is of PTX.
    return made.encode() if isinstance(made, str) else made + b"\0" if get is nvrtc.getCUBIN else made


@functools.cache
def assembler():
    """ptxas of the release of NVRTC, if it is installed. Of another one it need not be what NVRTC has inside."""
    found = [p / "ptxas" for p in TOOLS if (p / "ptxas").exists()]
    release = "release {}.{},".format(*nvrtc.getVersion())
    return next((str(p) for p in found if release in output_of(str(p), "--version")), None)


def assembled(ptx, architecture):
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_bytes(ptx)
        output_of(assembler(), f"-arch=sm_{architecture}", str(text), "-o", str(cubin))
        return cubin.read_bytes()


def output_of(*command):
    environment = {**os.environ, "PATH": os.pathsep.join([*map(str, TOOLS), os.environ["PATH"]])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def output_about(data, *command):
    """Of a tool that reads a file."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return output_of(*command, file.name)


def resources_of(cubin):
    return {
        name: dict(zip(("registers", "stack", "shared", "local"), map(int, numbers), strict=True))
        for name, *numbers in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
            output_about(cubin, "cuobjdump", "-res-usage"),
        )
    }


def instructions_of(cubins, architecture):
    """Of each cubin, by function: how often each instruction stands in it. All are disassembled in one go, the code of
    each behind that of the last."""
    functions = [(number, *f) for number, cubin in enumerate(cubins) for f in code_of(cubin)]
    counts = [{name: collections.Counter() for n, name, _ in functions if n == k} for k in range(len(cubins))]
    ends, end = [], 0
    for _, _, code in functions:
        ends.append(end := end + len(code))
    text = output_about(b"".join(code for *_, code in functions), "nvdisasm", "-b", f"SM{architecture}")
    for address, instruction in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", text):
        number, name, _ = functions[bisect.bisect(ends, int(address, 16))]
        counts[number][name][instruction] += 1
    return counts


def code_of(cubin):
    """(function, machine code) of an ELF file of 64 bits."""
    (headers,), (n, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    # Of each section: where its name is, where it begins, its size.
    sections = [struct.unpack_from("<I20xQQ", cubin, headers + 64 * i) for i in range(n)]
    for name, start, size in sections:
        at = sections[names][1] + name
        name = cubin[at : cubin.index(b"\0", at)].decode()
        if name.startswith(".text."):
            yield name.removeprefix(".text."), cubin[start : start + size]
