"""python -m fastnorm bench: fastnorm beside what else is installed, in turns; a table, JSON, a plot."""
import datetime
import functools
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
import timeit
from pathlib import Path
from typing import NamedTuple

import fastnorm
from fastnorm import _peers

DEFAULT_OPS = ("layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward", "add_rms_norm", "batch_norm")
# In the first cache or the second, in the last one, past it.
DEFAULT_SHAPES = ((32, 768), (512, 1024), (4096, 1024))
# For a plot: arrays of float32 of 4 KiB to 128 MiB.
SWEEP_SHAPES = tuple((n_rows, 1024) for n_rows in (1, 4, 16, 64, 256, 1024, 4096, 16384, 32768))
# What `python -m fastnorm` shows beside info and check.
QUICK_OPS = ("layer_norm", "rms_norm", "layer_norm_backward", "add_rms_norm", "batch_norm")
PEERS = tuple(i for i in _peers.IMPLEMENTATIONS if i not in ("fastnorm", "copy"))

# A sample is as many calls as take this long: of one tiny call, the clock would be measured.
SAMPLE_SECONDS = 2e-4
# A turn begins with calls that are not timed: after the others, its threads are asleep and its arrays out of the cache.
# Threads that were asleep need some five calls to have their processors again, when others want these as well.
WARM_SECONDS = 2e-3
TURN_SECONDS = 1e-2
SAMPLES_A_TURN = 10
# A longer call does not notice.
LONG_CALL_SECONDS = 5e-2
ROUNDS_AT_LEAST = 3
# Of the minute before: that much is more than a browser.
BUSY_LOAD = 0.7
# A ratio of two medians is marked if the spread of one is above that.
SHAKY_PERCENT = 10


class Case(NamedTuple):
    op: str
    shape: tuple
    dtype: str
    threads: int


class Timing(NamedTuple):
    """Seconds of a call."""
    median: float
    quartiles: tuple
    samples: int

    @property
    def spread(self):
        """Half the interquartile range, in percent of the median."""
        return 50 * (self.quartiles[1] - self.quartiles[0]) / self.median


class Result(NamedTuple):
    case: Case
    timings: dict
    skipped: dict


def shape_text(shape):
    return "x".join(map(str, shape))


def threads_text(n):
    return f"{n} thread{'s' if n > 1 else ''}"


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------

def implementations(peers=None):
    """Those to be measured, always with fastnorm and a copy; and the reasons why the others are not."""
    found = _peers.installed()
    missing = {i: str(v) for i, v in found.items() if isinstance(v, _peers.Unavailable)}
    on_device = [i for i in PEERS if "cupy" in i and i not in missing and (peers is None or i in peers)]
    if on_device and not fastnorm.show_config("dict")["gpus"]:
        missing |= dict.fromkeys(on_device, "CuPy finds no device")
    wanted = {"fastnorm", "copy", *(PEERS if peers is None else peers)}
    return ([i for i in _peers.IMPLEMENTATIONS if i in wanted and i not in missing],
            {i: reason for i, reason in missing.items() if i in wanted})


def measure(cases, names, seconds, progress):
    """The result of every case, as soon as it is there."""
    arrays_of = functools.lru_cache(maxsize=1)(_peers.make_arrays)
    previous = fastnorm.get_num_threads()
    try:
        for case in cases:
            progress(case)
            calls, skipped = {}, {}
            for name in names:
                try:
                    calls[name] = _peers.make_call(name, arrays_of(case.op, case.shape, case.dtype), case.threads)
                except _peers.Unavailable as reason:
                    skipped[name] = str(reason)
                except MemoryError:
                    skipped[name] = "not enough memory"
            yield Result(case, _timings(calls, case.threads, seconds) if calls else {}, skipped)
    finally:
        fastnorm.set_num_threads(previous)


def _timings(calls, n_threads, seconds):
    """Timings of calls that take turns, so that a disturbance meets all of them."""
    turns = {name: _turn(call) for name, call in calls.items()}
    samples = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for n_rounds in itertools.count(1):
        for name, turn in turns.items():
            # Of one thread, nothing is left when it has returned.
            if n_threads > 1:
                _wait_for_quiet()
            samples[name] += turn()
        if n_rounds >= ROUNDS_AT_LEAST and time.perf_counter() > end:
            break
    return {name: _timing(values) for name, values in samples.items()}


def _turn(call):
    """A function that gives the samples of one turn."""
    timer = timeit.Timer(call)
    once = timer.timeit(1)
    if once > LONG_CALL_SECONDS:
        return lambda: [timer.timeit(1)]
    once = max(1e-9, min(once, *timer.repeat(3, 1)))
    number = max(1, math.ceil(SAMPLE_SECONDS / once))
    n_samples = max(1, min(SAMPLES_A_TURN, int(TURN_SECONDS / once)))
    n_warm = max(1, int(WARM_SECONDS / once))

    def turn():
        timer.timeit(n_warm)
        return [seconds / number for seconds in timer.repeat(n_samples, number)]

    return turn


def _wait_for_quiet(longest=0.1):
    """Wait until no thread of this process computes.

    A pool of threads goes on spinning for its next piece of work when its turn is over, in the time of the next one:
    that of OpenMP for 4 to 10 ms, that of onnxruntime for 40 ms. Turned off, it would make its owner slower than it is
    where it is used (onnxruntime by half, at 512x1024). So everyone keeps its habits, and nobody begins before they
    have ended. The clock of a process counts in ticks what its other threads do: no less than 10 ms tell.
    """
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        busy = time.process_time()
        time.sleep(0.01)
        if time.process_time() - busy < 0.001:
            return


def _timing(values):
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, (q1, q3), len(values))


# ---------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------

def gb_per_s(case, name, timing):
    """Of the bytes that have to be moved, whoever moves them; a copy moves two arrays."""
    op = "layer_norm" if name == "copy" else case.op
    return _peers.bytes_moved(op, case.shape, case.dtype) / timing.median / 1e9


def percent_of_copy(result, name):
    """Percent of the bandwidth of a copy, in the same case; NaN without one."""
    if "copy" not in result.timings:
        return math.nan
    bandwidth = {k: gb_per_s(result.case, k, result.timings[k]) for k in (name, "copy")}
    return 100 * bandwidth[name] / bandwidth["copy"]


# ---------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------

class Table:
    """A row for each case: fastnorm's figures, and how much longer the peers take."""

    def __init__(self, cases, names):
        self.peers = [n for n in names if n not in ("fastnorm", "copy")]
        self.op_width = max(len(c.op) for c in cases)
        self.shape_width = max(5, *(len(shape_text(c.shape)) for c in cases))
        self.threads = {c.threads for c in cases}
        self.last = None

    def header(self, dtype):
        peers = [n + ("*" if n in _peers.OWN_THREADS else " ") for n in self.peers]
        return (f"{dtype:{self.op_width}s} {'shape':>{self.shape_width}s} thr {'us':>9s} {'+-%':>4s} {'GB/s':>6s} "
                f"{'copy%':>6s} " + "".join(f"{p:>{self._width(p)}s}" for p in peers)).rstrip()

    def row(self, result):
        case, ours = result.case, result.timings["fastnorm"]
        return (f"{case.op:{self.op_width}s} {shape_text(case.shape):>{self.shape_width}s} {case.threads:3d} "
                f"{_microseconds(ours):>9s} {ours.spread:4.0f} {gb_per_s(case, 'fastnorm', ours):6.1f} "
                f"{percent_of_copy(result, 'fastnorm'):6.0f} "
                + "".join(f"{_ratio(result, p):>{self._width(p)}s}" for p in self.peers)).rstrip()

    @staticmethod
    def _width(peer):
        return max(8, len(peer.rstrip("* ")) + 2)

    def lines(self, result):
        """What a result adds to the table."""
        case, last = result.case, self.last
        self.last = case
        if last is None or last.dtype != case.dtype:
            yield from ([""] if last else []) + [self.header(case.dtype)]
        elif last.op != case.op:
            yield ""
        if "fastnorm" in result.timings and "copy" in result.timings:
            yield self.row(result)
        else:
            reason = next(iter(result.skipped.values()))
            yield f"{case.op:{self.op_width}s} {shape_text(case.shape):>{self.shape_width}s} {case.threads:3d} {reason}"

    def legend(self):
        yield "us, GB/s, copy%: fastnorm's median with out=, bandwidth, and bandwidth in percent of that of a copy."
        if self.peers:
            yield "Columns of the others: their median over fastnorm's; above 1, fastnorm is faster."
            yield f"~: one of the two medians is shaky: half the interquartile range is above {SHAKY_PERCENT}% of it."
        yield from _footnotes(self.peers)


class LongTable:
    """A block for each case, with a row for each implementation."""

    def __init__(self, cases, names):
        self.names = names
        self.first = True

    def lines(self, result):
        case = result.case
        n_bytes = _peers.bytes_moved(case.op, case.shape, case.dtype)
        yield from () if self.first else ("",)
        self.first = False
        yield (f"{case.op} {shape_text(case.shape)} {case.dtype}, {threads_text(case.threads)}, "
               f"{n_bytes / 1e6:.3g} MB to move")
        yield f"  {'':14s} {'us':>10s} {'+-%':>5s} {'samples':>8s} {'GB/s':>7s} {'copy%':>6s} {'/ fastnorm':>11s}"
        for name in self.names:
            if name in result.skipped:
                yield f"  {name:14s} {result.skipped[name]}"
                continue
            timing, ratio, percent = result.timings[name], _ratio(result, name), percent_of_copy(result, name)
            bandwidth = gb_per_s(case, name, timing)
            name += "*" * (name in _peers.OWN_THREADS)
            yield (f"  {name:14s} {_microseconds(timing):>10s} {timing.spread:5.0f} {timing.samples:8d} "
                   f"{bandwidth:7.1f} {percent:6.0f} {ratio:>11s}").rstrip()

    def legend(self):
        yield "us, +-%: median, and half the interquartile range in percent of it. GB/s: of the bytes to be moved."
        yield from _footnotes(self.names)


def _microseconds(timing):
    us = timing.median * 1e6
    return f"{us:.2f}" if us < 1000 else f"{us:.0f}"


def _ratio(result, name):
    """A median over fastnorm's; marked if one of them is no good."""
    if name not in result.timings or "fastnorm" not in result.timings:
        return "- "
    timing, ours = result.timings[name], result.timings["fastnorm"]
    ratio = timing.median / ours.median
    digits = 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:.{digits}f}{'~' if max(timing.spread, ours.spread) > SHAKY_PERCENT else ' '}"


def _footnotes(names):
    own = [n for n in names if n in _peers.OWN_THREADS]
    if own:
        uses = {"numpy": "numpy uses one", "jax": "jax one for each processor", "cupy": "cupy a GPU",
                "fastnorm cupy": "fastnorm cupy a GPU"}
        yield f"*: whatever the number of threads, {', '.join(uses[n] for n in own)}."
    yield ("GB/s: x read and y written once; backward dy and x read, dx written; add_* two read, two written;\n"
           "add_*_backward dy, dh and h read, dx and dresidual written.")


def reasons(results, missing):
    """Why something was not measured, a line for each reason."""
    found = {}
    for name, reason in missing.items():
        found.setdefault((reason, ()), []).append(name)
    for name in _peers.IMPLEMENTATIONS:
        ops = {}
        for result in results:
            if name in result.skipped:
                ops.setdefault(result.skipped[name], {})[result.case.op] = None
        for reason, names in ops.items():
            found.setdefault((reason, tuple(names)), []).append(name)
    for (reason, ops), names in found.items():
        yield f"- {', '.join(names)}: {reason}" + (f" ({', '.join(ops)})" if ops else "")


# ---------------------------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------------------------

def as_json(results, missing, seconds, load, interrupted):
    """All that was measured, and on what."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "processors": os.cpu_count(), "system": platform.platform(),
                    "isa": fastnorm.show_config("dict")["isa"], "load_average_before": load},
        "versions": {"python": platform.python_version()}
        | {name: version for name, version in _peers.installed().items() if isinstance(version, str)},
        "missing": missing,
        "threads": sorted({r.case.threads for r in results}),
        "seconds_per_case": seconds,
        "unit": "seconds",
        "interrupted": interrupted,
        "rows": [row for result in results for row in _json_rows(result)],
        "skipped": [case | {"implementation": name, "reason": reason}
                    for result in results for case in [_json_case(result)] for name, reason in result.skipped.items()],
    }


def _json_case(result):
    return result.case._asdict() | {"shape": list(result.case.shape)}


def _json_rows(result):
    for name, timing in result.timings.items():
        yield _json_case(result) | {
            "implementation": name,
            "median": timing.median,
            "quartiles": list(timing.quartiles),
            "samples": timing.samples,
            "gb_per_s": gb_per_s(result.case, name, timing),
            # JSON has no NaN.
            "percent_of_copy": percent_of_copy(result, name) if "copy" in result.timings else None,
        }


def processor():
    """The name of the processor, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ---------------------------------------------------------------------------------------------
# Plot
# ---------------------------------------------------------------------------------------------

# Told apart by marker and dashes, not by colour alone.
STYLES = {
    "fastnorm": dict(color="black", marker="o", linestyle="-", linewidth=2),
    "numpy": dict(color="#2a7fb8", marker="v", linestyle=":"),
    "numba": dict(color="#009e73", marker="s", linestyle="--"),
    "torch": dict(color="#d55e00", marker="^", linestyle="-."),
    "jax": dict(color="#a04f80", marker="D", linestyle=(0, (1, 3))),
    "onnxruntime": dict(color="#0072b2", marker="x", linestyle=(0, (5, 1, 1, 1, 1, 1))),
    "cupy": dict(color="#e69f00", marker="P", linestyle=(0, (3, 3))),
    "fastnorm cupy": dict(color="black", marker="*", linestyle="--"),
    "copy": dict(color="0.75", linewidth=7, solid_capstyle="round", zorder=0),
}


def plot(results, path):
    """Bandwidth by the size of an array, a panel for each op, dtype and number of threads; a copy is the roof."""
    from matplotlib.figure import Figure

    panels = {}
    for result in results:
        panels.setdefault((result.case.op, result.case.dtype, result.case.threads), []).append(result)
    counts = sorted({threads for *_, threads in panels})
    n_columns = len(counts) if len(counts) > 1 else min(3, len(panels))
    n_rows = math.ceil(len(panels) / n_columns)
    # Without pyplot: no window system, no state.
    figure = Figure(figsize=(1 + 4.2 * n_columns, 1.4 + 3 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    handles = {}
    for (key, members), ax in zip(panels.items(), axes, strict=False):
        handles |= _panel(ax, members, "{}, {}, ".format(*key[:2]) + threads_text(key[2]))
    for ax in list(axes)[len(panels):]:
        ax.remove()
    order = [n for n in _peers.IMPLEMENTATIONS if n in handles]
    figure.legend([handles[n] for n in order], order, loc="outside lower center", ncols=2 * n_columns, frameon=False,
                  handlelength=4)
    figure.suptitle(f"fastnorm {fastnorm.__version__}, {processor()}, {datetime.date.today()}", fontsize="medium")
    figure.savefig(path, dpi=150)


def _panel(ax, results, title):
    """Draw one panel; its lines by name."""
    lines = {}
    for name in _peers.IMPLEMENTATIONS:
        points = sorted((math.prod(r.case.shape) * _itemsize(r.case.dtype), gb_per_s(r.case, name, r.timings[name]))
                        for r in results if name in r.timings)
        if points:
            [lines[name]] = ax.plot(*zip(*points, strict=True), markersize=5, **STYLES[name])
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: _size_text(x))
    ax.set_ylim(bottom=0)
    ax.set(title=title, xlabel="one array", ylabel="GB/s")
    ax.title.set_fontsize("medium")
    ax.tick_params(axis="x", labelsize="small")
    ax.grid(alpha=0.3)
    return lines


def _itemsize(dtype):
    return _peers.bytes_moved("layer_norm", (1,), dtype) // 2


def _size_text(n_bytes):
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            return f"{n_bytes:g} {unit}"
        n_bytes /= 1024


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------

class Progress:
    """A bar on a terminal's stderr; nothing elsewhere."""

    WIDTH = 30

    def __init__(self, total):
        self.total, self.done = total, -1
        self.shown = sys.stderr.isatty()

    def __call__(self, case):
        """The next case begins."""
        self.done += 1
        full = self.WIDTH * self.done // self.total
        text = f"{case.op} {shape_text(case.shape)} {case.dtype}, {threads_text(case.threads)}"
        self._write(f"[{'#' * full}{'.' * (self.WIDTH - full)}] {self.done}/{self.total}  {text}")

    def clear(self):
        """Make room for a line of the table."""
        self._write("")

    def _write(self, text):
        if self.shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def load_average():
    """How many processes computed here in the last minute; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def _busy_machine(load):
    """A line, if what follows will mean little."""
    if load is not None and load > BUSY_LOAD:
        yield (f"Load average {load:.1f}, {os.cpu_count()} processors: others compute here, too. On several threads,\n"
               "where one waits for the other, times then tell more of them than of what is measured.\n\n")


def bench(cases, peers=None, seconds=1.0, json_file=None, plot_file=None, long=False):
    """Measure the cases and print, write and draw the results; the exit code."""
    names, missing = implementations(peers)
    table = None if json_file == "-" else (LongTable if long else Table)(cases, names)
    progress = Progress(len(cases))
    results, interrupted, load = [], False, load_average()
    if table:
        print(*_busy_machine(load), sep="\n", end="", flush=True)
    try:
        for result in measure(cases, names, seconds, progress):
            results.append(result)
            progress.clear()
            if table:
                print(*table.lines(result), sep="\n", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    progress.clear()
    if table:
        print("", *table.legend(), *reasons(results, missing), sep="\n")
    if interrupted:
        print(f"interrupted after {len(results)} of {len(cases)} cases", file=sys.stderr)
    if json_file:
        text = json.dumps(as_json(results, missing, seconds, load, interrupted), indent=1)
        print(text) if json_file == "-" else Path(json_file).write_text(text + "\n")
    if plot_file and results:
        plot(results, plot_file)
    return 130 if interrupted else 0
