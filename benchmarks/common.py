"""What the benchmarks share: calls by the name of an op and of who computes it, and their measures.

How to call fastnorm and its peers stands in fastnorm/_peers.py. It is loaded from this checkout, since the fastnorm
that is installed may be an older commit, and uses only public functions: what a commit lacks is skipped.
"""
import functools
import importlib.util
import math
import statistics
import sys
import timeit
from pathlib import Path

import fastnorm


def load_peers():
    """The module fastnorm/_peers.py of this checkout."""
    path = Path(__file__).resolve().parent.parent / "fastnorm" / "_peers.py"
    spec = importlib.util.spec_from_file_location("peers_of_the_checkout", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


peers = load_peers()
OPS = list(peers.OPS)
# Norms of rows, and those of channels.
ROW_OPS = [op for op in OPS if not op.startswith("batch_norm")]
CHANNEL_OPS = [op for op in OPS if op.startswith("batch_norm")]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def parse(case):
    """(32, 768), None for "32x768"; (64, 56, 56), 1 for "64x56x56 axis 1"."""
    shape, _, axis = case.partition(" axis ")
    return tuple(map(int, shape.split("x"))), int(axis) if axis else None


def make_arrays(op, case, dtype="float32"):
    shape, axis = parse(case)
    return peers.make_arrays(op, shape, dtype, axis)


# asv calls setup anew before every call that it times. Without the cache, each would meet cold memory.
@functools.lru_cache(maxsize=1)
def make_call(op, case, dtype="float32", implementation="fastnorm"):
    """A call without arguments that has been called once."""
    call = peers.make_call(implementation, make_arrays(op, case, dtype), fastnorm.get_num_threads())
    call()
    return call


def gb_per_s(call, n_bytes):
    """Median over samples of at least a millisecond."""
    timer = timeit.Timer(call)
    number = max(1, math.ceil(1e-3 / timer.timeit(1)))
    value = n_bytes / (statistics.median(timer.repeat(5, number)) / number) / 1e9
    return float(f"{value:.4g}")


class _Call:
    """One call, into memory that is used again.

    The op is a parameter, as are the case (shape and axis), the dtype and who computes; the classes say which values
    of them go together, since the full product would take days.
    """

    param_names = ["op", "case", "dtype", "implementation"]
    # A sample is a single call, since asv runs setup before each.
    repeat = (10, 100, 1.0)

    def setup(self, op, case, dtype, implementation):
        self.call = make_call(op, case, dtype, implementation)

    def time_call(self, op, case, dtype, implementation):
        self.call()


class _Bandwidth(_Call):
    """And what the call has to move at least, over its time."""

    def track_gb_per_s(self, op, case, dtype, implementation):
        return gb_per_s(self.call, peers.bytes_moved(op, parse(case)[0], dtype))

    track_gb_per_s.unit = "GB/s"
