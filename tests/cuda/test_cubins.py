"""What the compiler of the devices makes of every kernel that a launcher can ask for. No device is needed."""

import re

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

from cubins import ARCHITECTURES, DISASSEMBLED, KERNELS, assembler  # noqa: E402

from fastnorm._cuda import geometry, sources  # noqa: E402

# Registers of a multiprocessor; a thread gets them in eights.
REGISTERS = 65536
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


@pytest.fixture(scope="module", params=ARCHITECTURES, ids=lambda a: f"sm_{a}")
def reports(request, cubin_reports):
    return cubin_reports.of(request.param)


@pytest.fixture
def compared(cubin_reports):
    return cubin_reports.compared


def count(instructions, *names):
    """How many have one of these names, whatever comes after it."""
    return sum(n for name, n in instructions.items() if any(f"{name}.".startswith(f"{wanted}.") for wanted in names))


def test_every_kernel_compiles_and_fits(reports, request):
    assert 50 < len(KERNELS) == len(reports) <= 100
    disassembled = request.node.callspec.params["reports"] in DISASSEMBLED
    for (source, macros), resources, instructions in reports:
        assert resources and instructions.keys() == (resources.keys() if disassembled else set())
        assert all(count(i, "EXIT") for i in instructions.values())
        for name, r in resources.items():
            note = (source, macros, name, r)
            assert r["stack"] == r["local"] == 0, note
            assert not count(instructions.get(name, {}), "LDL", "STL"), note
            threads = dict(macros).get("threads", 256)
            assert -(-r["registers"] // 8) * 8 * threads <= REGISTERS, note
            # All shared memory is dynamic; from sm_90 on the system keeps a kilobyte.
            assert r["shared"] in (0, 1024), note
            # No atomics: the sums have one order.
            assert not count(instructions.get(name, {}), "RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS"), note


def test_assembled_cubins_are_those_of_the_compiler_alone(compared):
    """As CuPy makes them: the same code and resources. With --slow, of every kernel."""
    if assembler() is None:
        pytest.skip("no ptxas of NVRTC's release: NVRTC alone made all cubins")
    for kernel, differing in compared.items():
        assert not differing.result(), kernel


def test_the_sources_are_the_same_for_every_architecture():
    """Or one PTX could not serve several."""
    for source in {source for source, _ in KERNELS}:
        assert set(re.findall(r".*__CUDA_ARCH.*", sources.joined(source))) <= {"#ifdef __CUDA_ARCH__"}, source


def test_rows_are_read_and_written_16_bytes_at_a_time(reports):
    seen = {name for _, _, instructions in reports for name in instructions}
    assert not seen or seen > CHANNEL_ACCESSES.keys()
    for (source, macros), _, instructions in reports:
        packs = dict(macros).get("packs")
        for name, counts in instructions.items():
            wide_reads, wide_writes = count(counts, "LDG.E.128"), count(counts, "STG.E.128")
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
