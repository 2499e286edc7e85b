"""The benchmark suite without asv: classes can be set up and called, and instructions are counted alike every time."""

import importlib
import shutil
import sys

import numpy as np
import pytest
from helpers import ROOT

FOLDER = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="no benchmarks beside the package")


def classes():
    """Every benchmark class of the suite, by name."""
    sys.path.append(str(ROOT))
    try:
        modules = [importlib.import_module(f"benchmarks.{p.stem}") for p in sorted(FOLDER.glob("bench_*.py"))]
    finally:
        sys.path.remove(str(ROOT))
    found = [c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    return {f"{c.__module__.split('.')[-1]}.{c.__name__}": c for c in found if benchmarks_of(c)}


def benchmarks_of(cls):
    return [name for name in dir(cls) if name.startswith(("time_", "track_", "peakmem_", "timeraw_"))]


CLASSES = classes() if FOLDER.exists() else {}


def test_there_is_a_benchmark_of_everything():
    assert {name.split(".")[0] for name in CLASSES} == {p.stem for p in FOLDER.glob("bench_*.py")}


@pytest.mark.parametrize("name", [n for n, c in CLASSES.items() if not hasattr(c, "setup_cache")])
def test_a_benchmark_can_be_set_up_and_called(name, threads):
    """With the first value of each parameter, which is the smallest; and every value of the first parameter, mostly
    the op, unless the arrays are large."""
    cls = CLASSES[name]
    params = getattr(cls, "params", [])
    params = params if not params or isinstance(params[0], list) else [params]
    firsts = params[0] if params and not name.startswith("bench_memory") else [p[0] for p in params[:1]]
    for first in firsts or [None]:
        values = [first, *(p[0] for p in params[1:])] if params else []
        for benchmark in benchmarks_of(cls):
            self = cls()
            try:
                getattr(self, "setup", lambda *_: None)(*values)
            except NotImplementedError as skipped:
                assert str(skipped)
            else:
                result = getattr(self, benchmark)(*values)
                assert not benchmark.startswith("track_") or result >= 0


def test_the_accuracy_that_is_tracked_is_that_of_the_documentation():
    """A few units in the last place, and what a broken kernel would give is seen."""
    accuracy = importlib.import_module("benchmarks.bench_accuracy")
    for family in accuracy.FAMILIES:
        values = accuracy.make_values("layer_norm", "float32", family)
        ours, exact = accuracy.ours_and_exact("layer_norm", values)
        assert accuracy.error_in_ulp(ours, exact, accuracy.EPS["float32"]) < 4
        assert accuracy.error_in_ulp(ours + abs(ours).max() / 2**16, exact, accuracy.EPS["float32"]) > 16


def test_arrays_of_counted_calls_lie_in_a_row():
    """At pages, in their order, with the same values."""
    instructions = importlib.import_module("benchmarks.bench_instructions")
    arrays = {"x": np.arange(3000.0).reshape(3, 1000), "y": np.empty((0, 4), np.float16), "z": np.ones(5, np.int8)}
    copies = instructions.in_a_row(arrays)
    addresses = [a.ctypes.data for a in copies.values()]
    assert addresses == sorted(addresses)
    assert not any(a % 4096 for a in addresses)
    assert not np.may_share_memory(copies["x"], copies["z"])
    for name, a in arrays.items():
        np.testing.assert_array_equal(copies[name], a, strict=True)


def test_counts_are_read_from_the_file_of_callgrind():
    instructions = importlib.import_module("benchmarks.bench_instructions")
    skipped, *run = instructions.CASES
    printed = "\n".join([f"{skipped}\tno such op", *(f"{case}\trun" for case in run)])
    # What comes before the first mark, then some counts of the same calls and what follows them; first, of nothing.
    totals = [10**6, 100, 105, 100]
    for k in range(len(run)):
        n = 100 + instructions.N_CALLS * (k + 1)
        totals += [7, n + 5, n, n + 1]
    file = "".join(f"part: {k}\ntotals: {n}\n" for k, n in enumerate([*totals, 8]))
    counts = instructions.per_call(printed, file)
    assert counts == {skipped: "no such op", **{case: k + 1 for k, case in enumerate(run)}}


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("valgrind"), reason="needs valgrind")
def test_instructions_are_counted_alike_every_time(monkeypatch):
    """What CI takes for a change of the code is no noise: a third of what makes it fail."""
    instructions = importlib.import_module("benchmarks.bench_instructions")
    monkeypatch.delenv("FASTNORM_NUM_THREADS", raising=False)
    first = instructions.count_instructions()
    # Another size of the environment moves the stack.
    monkeypatch.setenv("ANOTHER", "x" * 1000)
    second = instructions.count_instructions()
    assert all(isinstance(n, float) for n in first.values()), first
    assert second == {case: pytest.approx(n, rel=0.01) for case, n in first.items()}
