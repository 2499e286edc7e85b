"""What the compiler of the devices makes of every kernel that a launcher can ask for. No device is needed."""

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

import nvidia  # noqa: E402
from cupy.cuda import nvrtc  # noqa: E402

from fastnorm._cuda import geometry, sources  # noqa: E402

ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
# Whose instructions are looked at one by one: the oldest, the one with most users, the newest.
DISASSEMBLED = [75, 90, 120]
TOOLS = [str(p) for root in nvidia.__path__ for p in Path(root).glob("*/bin")]
# Registers of a multiprocessor; a thread gets them in eights.
REGISTERS = 65536
KERNELS = geometry.variants()
# Packs of x, dy and dx (y) that a thread of the kernels over channels has at a time.
CHANNEL_ACCESSES = {
    "channel_runs_sums": (4, 0),
    "channel_runs_apply": (4, 4),
    "channel_columns_sums": (8, 0),
    "channel_columns_apply": (4, 4),
    "channel_runs_gradient_sums": (8, 0),
    "channel_runs_gradient_apply": (8, 4),
    "channel_columns_gradient_sums": (8, 0),
    "channel_columns_gradient_apply": (8, 4),
}


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


def report_of(cubin, path, instructions):
    """Resources by kernel, and the instructions of each if they are wanted."""
    path.write_bytes(cubin)
    environment = {**os.environ, "PATH": os.pathsep.join([*TOOLS, os.environ["PATH"]])}
    command = ["cuobjdump", "-res-usage", *(["-sass"] if instructions else []), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    resources = {
        name: dict(zip(("registers", "stack", "shared", "local"), map(int, numbers), strict=True))
        for name, *numbers in re.findall(
            r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", done.stdout
        )
    }
    parts = re.split(r"\n\s+Function : (\w+)\n", done.stdout)
    return resources, dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda a: f"sm_{a}")
def reports(request, tmp_path_factory):
    """(variant, resources, instructions) of all of them; no instructions for some architectures."""
    folder = tmp_path_factory.mktemp("cubins")

    def one(k):
        source, macros = KERNELS[k]
        cubin = cubin_of(source, macros, request.param)
        return KERNELS[k], *report_of(cubin, folder / f"{k}.cubin", request.param in DISASSEMBLED)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(one, range(len(KERNELS))))


def test_every_kernel_compiles_and_fits(reports):
    assert 50 < len(reports) <= 100
    for (source, macros), resources, instructions in reports:
        assert resources and (resources.keys() == instructions.keys() or not instructions)
        for name, r in resources.items():
            note = (source, macros, name, r)
            assert r["stack"] == r["local"] == 0, note
            assert not re.search(r"\b(LDL|STL)\b", instructions.get(name, "")), note
            threads = dict(macros).get("threads", 256)
            assert -(-r["registers"] // 8) * 8 * threads <= REGISTERS, note
            # All shared memory is dynamic; from sm_90 on the system keeps a kilobyte.
            assert r["shared"] in (0, 1024), note
            # No atomics: the sums have one order.
            assert not re.search(r"\b(RED|ATOM|ATOMG|ATOMS)\b", instructions.get(name, "")), note


def test_rows_are_read_and_written_16_bytes_at_a_time(reports):
    seen = {name for _, _, instructions in reports for name in instructions}
    assert not seen or seen > CHANNEL_ACCESSES.keys()
    for (source, macros), _, instructions in reports:
        packs = dict(macros).get("packs")
        for name, text in instructions.items():
            wide_reads, wide_writes = len(re.findall(r"\bLDG\.E\.128", text)), len(re.findall(r"\bSTG\.E\.128", text))
            if name in ("row_forward", "slice_forward_apply"):
                assert wide_reads >= max(packs, 1) and wide_writes >= max(packs, 1), (source, macros, name)
            elif name == "row_backward":
                assert wide_reads >= 2 * packs and wide_writes >= packs, (source, macros, name)
            elif name in ("slice_forward_sums", "slice_backward_sums"):
                assert wide_reads >= packs, (source, macros, name)
            elif name == "slice_backward_apply":
                assert wide_reads >= 2 and wide_writes >= 1, (source, macros, name)
            elif name in CHANNEL_ACCESSES:
                reads, writes = CHANNEL_ACCESSES[name]
                assert wide_reads >= reads and wide_writes >= writes, (source, macros, name)


def test_every_plan_is_within_the_limits_of_a_launch():
    """Threads as the kernel was compiled for, barriers as there are, shared memory as the device has it."""
    for shared_memory in (48 << 10, 64 << 10, 99 << 10, 163 << 10, 227 << 10):
        for size in (2, 4, 8):
            for n_cols in [*range(1, 2000, 7), *range(2000, 150_000, 613)]:
                plans = [geometry.forward_plan(n_cols, size, shared_memory)]
                plans += [geometry.backward_plan(n_cols, size, c, shared_memory) for c in (True, False)]
                for plan in plans:
                    macros = dict(plan.macros)
                    assert plan.threads <= macros["threads"] and plan.threads % 32 == 0
                    assert plan.shared_memory <= shared_memory
                    assert plan.team & (plan.team - 1) == 0 if plan.team < 32 else plan.team % 32 == 0
                    # Barrier 0 is that of the block.
                    assert plan.team <= 32 or plan.teams <= 15
                    packs = geometry.packs_of(n_cols, size)
                    if plan.source.startswith("row") and macros["packs"]:
                        assert plan.team * macros["packs"] >= packs
                        # No more than twice the threads that have something to do.
                        assert plan.team < 2 * max(32, packs) or plan.team <= 2 * packs
