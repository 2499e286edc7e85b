"""python -m fastnorm: what it runs on, whether it computes right here, how fast it is beside what else is installed."""
import argparse
import math
import os
import sys
from pathlib import Path

import fastnorm
from fastnorm import _bench, _check, _peers

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


# ---------------------------------------------------------------------------------------------
# The values of options
# ---------------------------------------------------------------------------------------------

def _shape(text):
    """(512, 1024) for 512x1024 or 512,1024."""
    try:
        shape = tuple(int(n) for n in text.replace(",", "x").split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers between x or commas, as in 512x1024, got {text!r}")
    return shape


def _threads(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return seconds


def _writable(text):
    """The name of a file that can be written to: found out before the time is spent."""
    if text == "-":
        return text
    existed = os.path.exists(text)
    try:
        with open(text, "ab"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {text!r}: {error.strerror}") from error
    if not existed:
        os.remove(text)
    return text


def _plot_file(text):
    if Path(text).suffix.lower() not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"expected a name that ends with {', '.join(PLOT_SUFFIXES)}, got {text!r}")
    if not _peers.is_here("matplotlib"):
        raise argparse.ArgumentTypeError("drawing needs matplotlib: pip install matplotlib")
    return _writable(text)


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------

def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m fastnorm",
        description="Show what fastnorm runs on, check it on this machine, and time it beside other libraries.",
        epilog="Without a command: info, check, and a short bench beside plain NumPy. FASTNORM_NUM_THREADS sets the "
               "threads, FASTNORM_ISA the processor level. The exit code is 1 if a check fails.")
    parser.add_argument("--version", action="version", version=f"fastnorm {fastnorm.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    texts = {"info": "show versions, processor level, threads and devices",
             "check": "compare results with extended precision, and bits between threads and layouts",
             "bench": "time fastnorm beside NumPy, numba, PyTorch, JAX, onnxruntime, CuPy and a copy"}
    subparsers = {name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
                  for name, text in texts.items()}
    _add_bench_options(subparsers["bench"])
    return parser, subparsers["bench"]


def _add_bench_options(parser):
    shapes = " ".join(map(_bench.shape_text, _bench.DEFAULT_SHAPES))
    parser.description += (" All of them take turns; those that are not installed are left out. Channels of batch_norm "
                           "are on axis 1; the others normalize the last axis.")
    parser.epilog = ("Without options it takes some two minutes. Ctrl-C ends it with what was measured so far. "
                     "docs/benchmarks.md says how to read the table.")
    add = parser.add_argument
    add("--op", nargs="+", choices=_peers.OPS, metavar="OP",
        help=f"of {', '.join(_peers.OPS)} (default: {' '.join(_bench.DEFAULT_OPS)})")
    add("--shape", nargs="+", type=_shape, metavar="SHAPE",
        help=f"as 512x1024 or 512,1024 (default: {shapes}; with --plot 4 KiB to 128 MiB)")
    add("--dtype", nargs="+", choices=_peers.DTYPES, default=["float32"], metavar="DTYPE",
        help=f"of {', '.join(_peers.DTYPES)} (default: float32)")
    add("--threads", nargs="+", type=_threads, metavar="N", help="numbers of threads (default: 1 and what info shows)")
    add("--against", nargs="+", choices=_bench.PEERS, metavar="NAME",
        help=f"of {', '.join(map(repr, _bench.PEERS))} (default: all that are installed)")
    add("--seconds", type=_seconds, default=1.0, metavar="S", help="spent on a case at least (default: %(default)s)")
    add("--long", action="store_true", help="a block for each case, with all figures of every implementation")
    add("--json", type=_writable, metavar="FILE", help="write all figures; - for stdout, without the table")
    add("--plot", type=_plot_file, metavar="FILE", help="draw bandwidth by size, as .png, .svg or .pdf")


def _cases(options, parser):
    """What the options of bench ask for; ends with exit code 2 if that cannot be."""
    shapes = options.shape or (_bench.SWEEP_SHAPES if options.plot else _bench.DEFAULT_SHAPES)
    ops = options.op or _bench.DEFAULT_OPS
    if "bfloat16" in options.dtype and not _peers.is_here("ml_dtypes"):
        parser.error("argument --dtype: bfloat16 needs ml_dtypes: pip install ml_dtypes")
    for name in options.against or ():
        version = _peers.installed()[name]
        if isinstance(version, _peers.Unavailable):
            parser.error(f"argument --against: {version}")
    cases = [_bench.Case(op, shape, dtype, threads) for dtype in dict.fromkeys(options.dtype)
             for op in dict.fromkeys(ops) for shape in dict.fromkeys(shapes)
             for threads in _thread_counts(options.threads)]
    impossible = [c for c in cases if not _has_channels(c)]
    # Ops that were not asked for may be left out.
    if impossible and (options.op or len(impossible) == len(cases)):
        parser.error(f"argument --shape: {impossible[0].op} needs channels on axis 1 and more than one value in each, "
                     f"got {_bench.shape_text(impossible[0].shape)}")
    return [c for c in cases if c not in impossible]


def _has_channels(case):
    if not case.op.startswith("batch_norm"):
        return True
    return len(case.shape) > 1 and math.prod(case.shape) > case.shape[1]


def _thread_counts(counts=None):
    # One thread too: that is what NumPy uses, and what is left when other processes keep the processors busy.
    return sorted(set(counts or (1, fastnorm.get_num_threads())))


def _quick_bench():
    cases = [_bench.Case(op, shape, "float32", n) for op in _bench.QUICK_OPS for shape in _bench.DEFAULT_SHAPES
             for n in _thread_counts()]
    return _bench.bench(cases, ["numpy"], seconds=0.1)


def _run(argv):
    parser, bench_parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "info":
        fastnorm.show_config()
        return 0
    if options.command == "check":
        return 0 if _check.check() else 1
    if options.command == "bench":
        return _bench.bench(_cases(options, bench_parser), options.against, options.seconds, options.json, options.plot,
                            options.long)
    fastnorm.show_config()
    print()
    passed = _check.check()
    print()
    return _quick_bench() or (0 if passed else 1)


def main(argv=None):
    """Run a command, or all; the exit code."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # As when `| head` has seen enough. Python would complain once more while it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
