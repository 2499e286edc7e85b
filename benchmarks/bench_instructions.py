"""Instructions of a call, counted by valgrind. Unlike times, they hardly differ from run to run: CI compares them."""
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import fastnorm

ROOT = Path(__file__).resolve().parent.parent
# What users call most, short rows with and without an end, and one of each kernel: op, shape and axis, dtype.
CASES = [
    "layer_norm 1x64 float32",
    "layer_norm 512x64 float32",
    "layer_norm 512x100 float32",
    "layer_norm 64x768 float32",
    "layer_norm 64x768 float16",
    "layer_norm 64x768 float64",
    "layer_norm 256x256 axis 0 float32",
    "rms_norm 64x768 float32",
    "rms_norm 64x768 bfloat16",
    "layer_norm_backward 1x64 float32",
    "layer_norm_backward 64x768 float32",
    "layer_norm_backward 64x768 float16",
    "layer_norm_backward 256x256 axis 0 float32",
    "rms_norm_backward 64x768 float32",
    "add_rms_norm 64x768 float32",
    "add_layer_norm_backward 64x768 float32",
    "batch_norm 8x16x28x28 axis 1 float32",
    "batch_norm_evaluation 8x16x28x28 axis 1 float32",
    "batch_norm_backward 8x16x28x28 axis 1 float32",
    "batch_norm 2000x64 axis 1 float32",
]
# The interpreter specializes code while it runs, so that the first calls cost more, and marks cost something, too. Of
# several counts the smallest one counts: what happens once in a while only adds.
N_WARM, N_CALLS, N_COUNTS = 20, 10, 3
# And of several processes: CPython's cache of attributes is indexed by addresses, and two names that share a place cost
# 700 instructions in every call. Environments of different sizes give different addresses.
FILLERS = [0, 500, 1300]
# callgrind starts a new count at each call of this function of libc, which nothing else calls.
MARK = "getppid"


def level():
    """The widest level that valgrind can run: it knows no AVX-512."""
    return "v3" if "v3" in fastnorm.show_config("dict")["isa_levels"] else "baseline"


def count_instructions():
    """{case: instructions of a call, or why there are none}, by a few processes for all cases."""
    if os.environ.get("FASTNORM_NUM_THREADS", "1") != "1":
        return dict.fromkeys(CASES, "counted with one thread")
    if not shutil.which("valgrind"):
        return dict.fromkeys(CASES, "valgrind is not installed")
    # What is counted does not depend on what else runs, so they may run side by side.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        counts = list(pool.map(count_in_a_process, FILLERS))
    return {case: min(c[case] for c in counts) for case in CASES}


def count_in_a_process(filler):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ASV", "FASTNORM"))}
    environment |= {"FASTNORM_ISA": level(), "FASTNORM_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment["FILLER"] = "x" * filler
    # glibc: arrays begin at pages, not wherever the heap has room, on which the path through a kernel depends.
    environment["MALLOC_MMAP_THRESHOLD_"] = "16384"
    # This checkout goes to the end of the path: the fastnorm that is installed is the one to count.
    code = f"import sys; sys.path.append({str(ROOT)!r}); from benchmarks.bench_instructions import run; run()"
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder, "counts")
        valgrind = ["valgrind", "--tool=callgrind", f"--dump-before={MARK}", "--combine-dumps=yes",
                    f"--callgrind-out-file={counts}"]
        done = subprocess.run([*valgrind, sys.executable, "-P", "-c", code], env=environment, cwd=folder, text=True,
                              capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"valgrind: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return per_call(done.stdout, counts.read_text())


def per_call(printed, counts):
    """printed: for each case "run" or why it was not; counts: callgrind's file, a part for what lies between marks."""
    totals = [int(n) for n in re.findall(r"^totals: (\d+)", counts, re.M)]
    # N_COUNTS parts, and what comes before the next ones.
    smallest = (min(totals[k : k + N_COUNTS]) for k in range(1, len(totals), N_COUNTS + 1))
    nothing = next(smallest)
    reasons = dict(line.split("\t") for line in printed.splitlines())
    return {case: (next(smallest) - nothing) / N_CALLS if reasons[case] == "run" else reasons[case] for case in CASES}


def run():
    """In the process that valgrind counts."""
    import gc

    gc.disable()
    measure(lambda: None)
    for case in CASES:
        try:
            call = make(case)
        except NotImplementedError as e:
            print(case, e, sep="\t")
        else:
            measure(call)
            print(case, "run", sep="\t")


def make(case):
    from .common import make_arrays, peers

    op, rest = case.split(" ", 1)
    shape_and_axis, dtype = rest.rsplit(" ", 1)
    arrays = make_arrays(op, shape_and_axis, dtype)
    vars(arrays).update(in_a_row({k: a for k, a in vars(arrays).items() if isinstance(a, np.ndarray)}))
    return peers.make_call("fastnorm", arrays)


def in_a_row(arrays, page=4096):
    """Copies, each at the start of a page, in the order of the names and above the heap, where small results are.

    Where arrays lie decides how many instructions it takes to find that they do not overlap: some 3 % of a small call.
    """
    n_pages = [-(-a.nbytes // page) for a in arrays.values()]
    # So many more that the C library gives this memory a place of its own.
    memory = np.zeros((sum(n_pages) + 64) * page, np.uint8)
    rest = memory[-memory.ctypes.data % page :]
    copies = {}
    for (name, a), n in zip(arrays.items(), n_pages, strict=True):
        copies[name] = rest[: a.nbytes].view(a.dtype).reshape(a.shape)
        copies[name][...] = a
        rest = rest[n * page :]
    return copies


def measure(call, mark=os.getppid):
    for _ in range(N_WARM):
        call()
    for _ in range(N_COUNTS):
        mark()
        for _ in range(N_CALLS):
            call()
    mark()


class Instructions:
    """One thread, level v3 (baseline where the processor lacks it), no results so large that they bypass the cache."""

    params = [CASES]
    param_names = ["case"]
    timeout = 600

    def setup_cache(self):
        return count_instructions()

    setup_cache.timeout = 600

    def setup(self, counts, case):
        if isinstance(counts[case], str):
            raise NotImplementedError(counts[case])

    def track_instructions(self, counts, case):
        return counts[case]

    track_instructions.unit = "instructions"
