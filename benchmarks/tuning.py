"""python benchmarks/tuning.py [sweep ...]: what lies behind the constants of fastnorm/_cpu.

Each sweep times both sides of one decision over a range of sizes, in turns, and prints the ratio: below 1, the first
side wins. The constant belongs where the ratio crosses 1; docs/architecture.md says what was chosen and from which run.
Run it on an idle machine, a few times; a sweep takes a minute or two.
"""
import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
import timeit

import numpy as np

import fastnorm
from fastnorm._cpu import results, row_norm

NEVER = 1 << 60


# ---------------------------------------------------------------------------------------------
# Timing
# ---------------------------------------------------------------------------------------------

def medians(*calls, seconds=0.4, pause=0.0):
    """Median seconds of each call; they take turns. pause: seconds of sleep before each, to find threads asleep."""
    number = 1 if pause else max(1, int(2e-4 / min(timeit.repeat(calls[0], number=1, repeat=3))))
    samples = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples[0]) < 7:
        for call, sample in zip(calls, samples, strict=True):
            if pause:
                time.sleep(pause)
            sample.append(timeit.timeit(call, number=number) / number)
    return [statistics.median(sample) for sample in samples]


def ratio(first, second, **how):
    a, b = medians(first, second, **how)
    return a / b


def with_constants(module, changes, call):
    """call under other constants."""
    before = {name: module.constants()[name] for name in changes}

    @functools.wraps(call)
    def changed():
        module.constants(**changes)
        call()
        module.constants(**before)

    return changed


def with_threads(n, call):
    def threaded():
        with fastnorm.num_threads(n):
            call()

    return threaded


def table(title, heads, rows):
    """Print rows as they come."""
    print(f"\n{title}\n" + "".join(f"{head:>16s}" for head in heads))
    for row in rows:
        print("".join(f"{cell:>16s}" if isinstance(cell, str) else f"{cell:>16.2f}" for cell in row), flush=True)


# ---------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------

def forward(shape, dtype=np.float32, axis=-1):
    """layer_norm with weight and bias into memory that is there; its x and y are the attributes of the call."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
    weight, bias = np.ones((2, shape[axis]), np.float32)
    y = np.ones_like(x)
    call = functools.partial(fastnorm.layer_norm, x, weight, bias, axis=axis, out=y)
    call.x, call.y = x, y
    return call


def backward(shape, dtype=np.float32, axis=-1):
    x, dy = np.random.default_rng(0).standard_normal((2, *shape), np.float32).astype(dtype)
    weight, dx = np.ones(shape[axis], np.float32), np.ones_like(x)
    _, mean, rstd = fastnorm.layer_norm_forward(x, axis=axis)
    call = functools.partial(fastnorm.layer_norm_backward, dy, x, mean, rstd, weight, axis=axis, out=dx)
    call.x, call.y = x, dx
    return call


def residual(shape):
    x, r = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    weight, y, h = np.ones(shape[-1], np.float32), np.ones_like(x), np.ones_like(x)
    call = functools.partial(fastnorm.add_rms_norm, x, r, weight, out=y, residual_out=h)
    call.x, call.y = x, y
    return call


def then(call, consumer):
    """A call and somebody who reads its y."""
    def both():
        call()
        consumer(call.y)

    return both


# ---------------------------------------------------------------------------------------------
# Sweeps
# ---------------------------------------------------------------------------------------------

def threads():
    """THREAD_MIN: two threads over one, with 64 columns, 1024 columns, in backward, in float16; after a pause of 5 ms,
    when the second thread sleeps. Nothing is split that has less than twice THREAD_MIN values."""
    def rows():
        for k in range(12, 21):
            size = 1 << k
            calls = [forward((size // 64, 64)), forward((size // 1024, 1024)), backward((size // 1024, 1024)),
                     forward((size // 1024, 1024), np.float16)]
            two = [with_constants(row_norm, {"THREAD_MIN": 1}, with_threads(2, call)) for call in calls]
            one = [with_constants(row_norm, {"THREAD_MIN": NEVER}, with_threads(2, call)) for call in calls]
            yield (str(size), *(ratio(a, b) for a, b in zip(two, one, strict=True)), ratio(two[1], one[1], pause=5e-3))

    table("threads: 2 threads / 1 thread",
          ["values", "64 columns", "1024 columns", "backward", "float16", "after a pause"], rows())


def split():
    """SPLIT_MIN: one row and three rows, split over two threads, over not split."""
    def rows():
        for k in range(14, 22):
            calls = [forward((1, 1 << k)), forward((3, 1 << k)), backward((1, 1 << k))]
            yield (str(1 << k), *(
                ratio(with_constants(row_norm, {"SPLIT_MIN": 1, "THREAD_MIN": 1}, with_threads(2, call)),
                      with_constants(row_norm, {"SPLIT_MIN": NEVER, "THREAD_MIN": 1}, with_threads(2, call)))
                for call in calls))

    table("split: rows split over 2 threads / not split", ["columns", "1 row", "3 rows", "backward, 1"], rows())


def stream():
    """STREAM_BYTES: past the cache over into it; alone, and with somebody who copies or sums up the result next."""
    def rows():
        for mib in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64):
            shape = (mib << 8, 1024)
            cells = []
            for call in (forward(shape), backward(shape), residual(shape)):
                other = np.ones_like(call.y)
                for timed in (call, then(call, lambda y, other=other: np.copyto(other, y)), then(call, np.sum)):
                    cells.append(ratio(with_constants(row_norm, {"STREAM_BYTES": 0}, timed),
                                       with_constants(row_norm, {"STREAM_BYTES": NEVER}, timed)))
            yield (f"{mib} MiB", *cells)

    heads = (op + consumer for op in ("forward", "backward", "residual") for consumer in ("", ", copy", ", sum"))
    table("stream: stores past the cache / into it, one thread", ["result", *heads], rows())


def adjacent():
    """ADJACENT_MIN: axis=0 of (columns, rows), rows side by side in lanes over row by row."""
    def rows():
        for n in (2, 4, 6, 8, 12, 16, 24, 32, 64):
            calls = [op((columns, n), axis=0) for columns in (64, 1024, 65536) for op in (forward, backward)]
            yield (str(n), *(ratio(with_constants(row_norm, {"ADJACENT_MIN": 1}, call),
                                   with_constants(row_norm, {"ADJACENT_MIN": NEVER}, call)) for call in calls))

    table("adjacent: across rows / row by row",
          ["rows", *(f"{columns}{op}" for columns in (64, 1024, 65536) for op in ("", " backward"))], rows())


def release():
    """RELEASE_MIN: with the global lock released, over kept."""
    def rows():
        for k in range(6, 17):
            calls = [forward((1, 1 << k)), backward((1, 1 << k))]
            yield (str(1 << k), *(ratio(with_constants(row_norm, {"RELEASE_MIN": 0}, call),
                                        with_constants(row_norm, {"RELEASE_MIN": NEVER}, call)) for call in calls))

    table("release: lock released / kept", ["values", "forward", "backward"], rows())


def kept():
    """KEPT_MIN: results in memory that is kept, over that of NumPy; and over out= given."""
    def rows():
        for mib in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128):
            call = forward((int(mib * 256), 1024))
            fresh = functools.partial(fastnorm.layer_norm, *call.args)
            keeps = with_constants(results, {"KEPT_MIN": 1}, fresh)
            yield (f"{mib} MiB", ratio(keeps, with_constants(results, {"KEPT_MIN": NEVER}, fresh)), ratio(keeps, call))

    table("kept: a new result in kept memory / in NumPy's, and / out=", ["result", "NumPy's", "out="], rows())


LEVEL_CODE = """
import sys; sys.path.insert(0, "benchmarks")
import numpy as np, tuning
for shape in ((1, 64), (32, 768), (512, 1024), (4096, 4096)):
    for op, dtype in ((tuning.forward, "f"), (tuning.forward, "e"), (tuning.forward, "d"), (tuning.backward, "f")):
        call = op(shape, np.dtype(dtype))
        print(tuning.medians(call)[0] / call.x.size * 1e9)
"""


def levels():
    """Vector paths: nanoseconds a value at each processor level, one process each."""
    columns = []
    for level in fastnorm.show_config("dict")["isa_levels"]:
        environment = os.environ | {"FASTNORM_ISA": level, "FASTNORM_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", LEVEL_CODE], env=environment, capture_output=True, text=True,
                              check=True)
        columns.append([float(line) for line in done.stdout.split()])
    names = [f"{shape} {op}" for shape in ("1x64", "32x768", "512x1024", "4096x4096")
             for op in ("f32", "f16", "f64", "back")]
    table("levels: nanoseconds a value", ["", *fastnorm.show_config("dict")["isa_levels"]],
          [(name, *cells) for name, *cells in zip(names, *columns, strict=True)])


SWEEPS = {f.__name__: f for f in (threads, split, stream, adjacent, release, kept, levels)}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1])
    parser.add_argument("sweep", nargs="*", help=", ".join(SWEEPS) + "; all without one")
    names = parser.parse_args(argv).sweep or list(SWEEPS)
    for name in names:
        if name not in SWEEPS:
            parser.error(f"sweep: {name!r}; expected {', '.join(SWEEPS)}")
    fastnorm.set_num_threads(1)
    for name in names:
        SWEEPS[name]()


if __name__ == "__main__":
    main()
