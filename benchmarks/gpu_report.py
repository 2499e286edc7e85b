"""One script for a machine with a GPU: the tests on the device, then how fast it is. Prints its table last.

    python benchmarks/gpu_report.py [--no-tests] [--no-sanitizer] [--seconds 280]

Times are medians of CUDA events over calls that go round through more memory than the second-level cache holds.
The yardstick is a device copy measured in the same run. PyTorch (eager and compiled) and plain CuPy are beside it
where they are installed.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = [64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 262144]
COMPILED_COLUMNS = [1024, 4096, 16384, 65536]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
# Bytes of x: far beyond any second-level cache.
SIZE = 256 << 20
ROUNDS = 3
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def progress(text):
    print(f"# {text}", file=sys.stderr, flush=True)


# ---- tests ----------------------------------------------------------------------------------------


def run_tests(deadline):
    """The same files as without a GPU. Returns a line for the report."""
    command = [*PYTEST, "tests/cuda", "--ignore=tests/cuda/test_cubins.py"]
    progress(" ".join(command[2:]))
    return last_line("pytest tests/cuda", command, deadline)


def run_sanitizer(deadline):
    """compute-sanitizer over cases that are small enough for it."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return ["compute-sanitizer: not installed"]
    lines = []
    for check in ("memcheck", "racecheck", "synccheck", "initcheck"):
        sanitized = [tool, "--tool", check, "--error-exitcode", "9", *PYTEST]
        files = ["tests/cuda/test_launches.py", "tests/cuda/test_channels.py", "tests/cuda/test_fused_rows.py"]
        command = [*sanitized, *files, "-k", "path_around or views or one_launch"]
        progress(f"compute-sanitizer {check}")
        lines.append(last_line(f"compute-sanitizer {check}", command, min(deadline, time.monotonic() + 40)))
    return lines


def last_line(name, command, deadline):
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(1, deadline - time.monotonic())
        )
    except subprocess.TimeoutExpired:
        return f"{name}: out of time"
    text = (done.stdout.strip() or done.stderr.strip()).splitlines() or [""]
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n")
    return f"{name}: exit code {done.returncode}; {text[-1]}"


# ---- times ----------------------------------------------------------------------------------------


class Clock:
    """Median microseconds of a call, over arrays that take turns."""

    def __init__(self, cupy):
        self.cupy = cupy
        self.events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(60)]

    def time(self, calls, seconds=0.15):
        """calls: the same work on different arrays."""
        for call in calls:
            call()
        self.cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        calls[0]()
        self.cupy.cuda.Device().synchronize()
        once = max(1e-5, time.perf_counter() - start)
        count = int(min(len(self.events), max(7, seconds / once)))
        for k, (before, after) in enumerate(self.events[:count]):
            before.record()
            calls[k % len(calls)]()
            after.record()
        self.cupy.cuda.Device().synchronize()
        return statistics.median(1e3 * self.cupy.cuda.get_elapsed_time(b, a) for b, a in self.events[:count])


def host_cost(cupy, call):
    """Microseconds until a call returns, its kernels still queued."""
    best = float("inf")
    for _ in range(20):
        cupy.cuda.Device().synchronize()
        start = time.perf_counter()
        for _ in range(50):
            call()
        best = min(best, (time.perf_counter() - start) / 50)
    cupy.cuda.Device().synchronize()
    return 1e6 * best


def dtype_of(name):
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


@cache
def copy_kernel(cupy):
    """copy(x, y) as a kernel of CuPy's: cupy.copyto of contiguous arrays is a memcpy, which may use another engine."""
    kernel = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x", "report_copy")
    return lambda x, y: kernel(x.reshape(-1).view(cupy.float32), y.reshape(-1).view(cupy.float32))


def plain_cupy(cupy, x, w, b):
    mean = x.mean(axis=-1, keepdims=True)
    var = x.var(axis=-1, keepdims=True)
    return (x - mean) / cupy.sqrt(var + 1e-5) * w + b


HEAD = (
    "dtype           N        M | copy GB/s |  forward   GB/s %copy | backward   GB/s %copy | rms % |"
    "  torch  comp.    bwd   cupy   (times of peers / ours)"
)


def rows_of_table(cupy, deadline):
    """Lines of text, as they are measured."""
    try:
        import torch

        torch = torch if torch.cuda.is_available() else None
    except ImportError:
        torch = None
    clock = Clock(cupy)
    yield HEAD
    for name in DTYPES:
        for n in COLUMNS:
            if time.monotonic() > deadline:
                yield "out of time"
                return
            yield measured(cupy, torch, clock, name, n, deadline)
            cupy.get_default_memory_pool().free_all_blocks()
    yield FAMILY_HEAD
    for name in DTYPES[::2]:
        for measure in (residual_forms, channels):
            if time.monotonic() > deadline:
                yield "out of time"
                return
            yield from measure(cupy, clock, name)
            cupy.get_default_memory_pool().free_all_blocks()
    yield launch_costs(cupy)


def measured(cupy, torch, clock, name, n, deadline):
    """One row of the table."""
    import fastnorm

    dtype = dtype_of(name)
    m = max(1, SIZE // (n * dtype.itemsize))
    size = m * n * dtype.itemsize
    xs, ys = ([cupy.empty((m, n), dtype) for _ in range(ROUNDS)] for _ in range(2))
    for x in xs:
        block = cupy.random.standard_normal((min(m, 4096), n), dtype=cupy.float32)
        for start in range(0, m, block.shape[0]):
            x[start : start + block.shape[0]] = block[: m - start].astype(dtype)
    w, b = cupy.ones(n, dtype), cupy.zeros(n, dtype)
    _, mean, rstd = fastnorm.layer_norm_forward(xs[0])
    pairs = list(zip(xs, ys, strict=True))
    # A copy kernel, not the copy engine: reads and writes as a kernel does.
    copy = clock.time([partial(copy_kernel(cupy), x, y) for x, y in pairs])
    forward = clock.time([partial(fastnorm.layer_norm, x, w, b, out=y) for x, y in pairs])
    rms = clock.time([partial(fastnorm.rms_norm, x, w, out=y) for x, y in pairs])
    backward = clock.time(
        [partial(fastnorm.layer_norm_backward, xs[k], xs[k - 1], mean, rstd, w, out=ys[k]) for k in range(ROUNDS)]
    )
    eager = compiled = torch_backward = plain = None
    if torch is not None:
        eager, compiled, torch_backward = torch_times(torch, clock, xs, w, b, n, deadline)
    if name != "bfloat16":
        plain = clock.time([partial(plain_cupy, cupy, xs[0], w, b)], 0.05)
    ratios = ((eager, forward), (compiled, forward), (torch_backward, backward), (plain, forward))
    return (
        f"{name:9s} {n:7d} {m:8d} | {2 * size / copy / 1e3:9.0f} | "
        f"{forward:8.1f} {2 * size / forward / 1e3:6.0f} {100 * copy / forward:5.0f} | "
        f"{backward:8.1f} {3 * size / backward / 1e3:6.0f} {150 * copy / backward:5.0f} | {100 * copy / rms:5.0f} | "
        + " ".join(f"{theirs / ours:6.2f}" if theirs else f"{'-':>6s}" for theirs, ours in ratios)
    )


FAMILY_HEAD = f"{'':28s} dtype    {'shape':20s} |       us   GB/s %copy   (bytes as docs/gpu.md counts them)"


def random(cupy, shape, dtype):
    x = cupy.empty(shape, dtype)
    flat, block = x.reshape(-1), cupy.random.standard_normal(1 << 24, dtype=cupy.float32)
    for start in range(0, flat.size, block.size):
        flat[start : start + block.size] = block[: flat.size - start].astype(dtype)
    return x


def line(name, x, times, clock, calls):
    """times: how often the operation moves the bytes of x."""
    copy = clock.time([partial(copy_kernel(clock.cupy), x, clock.cupy.empty_like(x))])
    taken = clock.time(calls)
    return (
        f"{name:28s} {x.dtype.name:8s} {str(x.shape):20s} | {taken:8.1f} {times * x.nbytes / taken / 1e3:6.0f} "
        f"{50 * times * copy / taken:5.0f}"
    )


def residual_forms(cupy, clock, name):
    """Lines for the forms with a residual."""
    import fastnorm

    dtype = dtype_of(name)
    for n in (1024, 4096, 16384):
        x, residual, y, h = (random(cupy, (SIZE // (n * dtype.itemsize), n), dtype) for _ in range(4))
        w = cupy.ones(n, dtype)
        yield line("add_rms_norm", x, 4, clock, [partial(fastnorm.add_rms_norm, x, residual, w, out=y, residual_out=h)])
        *_, rstd = fastnorm.add_rms_norm_forward(x, residual, w, out=y, residual_out=h)
        yield line(
            "add_rms_norm_backward",
            x,
            5,
            clock,
            [partial(fastnorm.add_rms_norm_backward, x, residual, h, rstd, w, out=y)],
        )


def channels(cupy, clock, name):
    """Lines for batch_norm: both of its ways."""
    import fastnorm

    dtype = dtype_of(name)
    for shape in (
        (64, 256, 56, 56),
        (256, 1024, 14, 14),
        (64, 3, 512, 512),
        (200_704, 256),
        (1_000_000, 64),
        (512, 65_536),
    ):
        x, dy, y = (random(cupy, shape, dtype) for _ in range(3))
        running = cupy.zeros(shape[1], cupy.float32), cupy.ones(shape[1], cupy.float32)
        _, mean, rstd = fastnorm.batch_norm_forward(x, training=True, out=y)
        train = partial(fastnorm.batch_norm, x, None, None, *running, training=True, out=y)
        yield line("batch_norm training", x, 3, clock, [train])
        yield line("batch_norm evaluation", x, 2, clock, [partial(fastnorm.batch_norm, x, None, None, *running, out=y)])
        yield line(
            "batch_norm_backward", x, 5, clock, [partial(fastnorm.batch_norm_backward, dy, x, mean, rstd, out=y)]
        )


def launch_costs(cupy):
    """What a call costs the host."""
    import fastnorm

    x, y, w = cupy.ones((32, 768), cupy.float16), cupy.ones((32, 768), cupy.float16), cupy.ones(768, cupy.float16)
    _, mean, rstd = fastnorm.layer_norm_forward(x)
    calls = {
        "layer_norm(out=)": partial(fastnorm.layer_norm, x, w, w, out=y),
        "rms_norm(out=)": partial(fastnorm.rms_norm, x, w, out=y),
        "layer_norm_backward(out=)": partial(fastnorm.layer_norm_backward, x, x, mean, rstd, w, out=y),
        "cupy.add(out=)": partial(cupy.add, x, x, out=y),
    }
    times = ", ".join(f"{name} {host_cost(cupy, call):.1f}" for name, call in calls.items())
    return f"launch cost on the host, (32, 768) float16, microseconds: {times}"


def torch_times(torch, clock, xs, w, b, n, deadline):
    """(eager, compiled, backward) of PyTorch on the same memory, None where it was not tried."""
    norm = torch.nn.functional.layer_norm
    ts = [torch.from_dlpack(x) for x in xs]
    tw, tb = torch.from_dlpack(w), torch.from_dlpack(b)
    native = torch.ops.aten
    with torch.cuda.stream(torch.cuda.ExternalStream(clock.cupy.cuda.get_current_stream().ptr)):
        eager = clock.time([partial(norm, t, (n,), tw, tb) for t in ts])
        compiled = None
        if n in COMPILED_COLUMNS and ts[0].element_size() == 2 and time.monotonic() + 30 < deadline:
            fused = torch.compile(lambda t, w, b: norm(t, (n,), w, b))
            compiled = clock.time([partial(fused, t, tw, tb) for t in ts])
        _, mean, rstd = native.native_layer_norm(ts[0], (n,), tw, tb, 1e-5)
        backward = clock.time(
            [partial(native.native_layer_norm_backward, t, ts[0], (n,), mean, rstd, tw, tb, [True] * 3) for t in ts]
        )
    return eager, compiled, backward


# ---- report ---------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-tests", action="store_true", help="only the table")
    parser.add_argument("--no-sanitizer", action="store_true", help="without compute-sanitizer")
    parser.add_argument("--seconds", type=float, default=280, help="when to stop, from the start (default 280)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    try:
        import cupy
    except ImportError:
        print("CuPy is not installed: pip install 'fastnorm-nn[cuda13]' or [cuda12]")
        return 2
    if not cupy.cuda.is_available():
        print("no GPU that CuPy can use; tests/cuda runs without one")
        return 2
    lines = []
    if not arguments.no_tests:
        lines.append(run_tests(min(deadline, time.monotonic() + 0.5 * arguments.seconds)))
        if not arguments.no_sanitizer:
            lines += run_sanitizer(min(deadline, time.monotonic() + 0.2 * arguments.seconds))
    table = []
    for row in rows_of_table(cupy, deadline):
        progress(row)
        table.append(row)
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    print("\n".join(lines))
    print(
        f"{properties['name'].decode()}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}, CuPy {cupy.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; microseconds, x of {SIZE >> 20} MiB, layer_norm with weight and bias"
    )
    print("\n".join(table))
    return 0 if all("exit code 0" in line or "not installed" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
