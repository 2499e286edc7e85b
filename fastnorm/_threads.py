"""How many threads a call may use, and what happens to them at a fork."""
import operator
import os
import threading
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from fastnorm import _cpu

_process_wide = None            # set_num_threads
_context = threading.local()    # num_threads: .count
_forked = False                 # in the child of a process that had used threads
_used = False                   # threads were started, or may have been


def _checked(n, name="n"):
    """n as an int of at least 1."""
    try:
        count = operator.index(n)
    except TypeError:
        raise TypeError(f"{name}: a number of threads is an int, not {type(n).__name__}") from None
    if count < 1:
        raise ValueError(f"{name}: a number of threads is at least 1, not {count}")
    return min(count, 2**16)


def _from_environment():
    text = os.environ.get("FASTNORM_NUM_THREADS", "").strip()
    if not text:
        return None
    try:
        return _checked(int(text), "FASTNORM_NUM_THREADS")
    except ValueError:
        raise ValueError(f"FASTNORM_NUM_THREADS: a whole number of at least 1, not {text!r}") from None


@cache
def _cgroup_quota():
    """Processors that the control group of this process may use, rounded up; None without a limit."""
    quotas = []
    try:
        paths = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in paths:
        if controllers == "":
            root, reader = Path("/sys/fs/cgroup"), _quota_v2
        elif "cpu" in controllers.split(","):
            root, reader = Path("/sys/fs/cgroup/cpu"), _quota_v1
        else:
            continue
        # A parent's limit binds too; inside a container the path may not exist, the root does.
        folder = root / path.lstrip("/")
        quotas += [reader(f) for f in (folder, *folder.parents) if f == root or root in f.parents]
    quotas = [q for q in quotas if q]
    return min(quotas) if quotas else None


def _quota_v2(folder):
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return None


def _quota_v1(folder):
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else max(1, -(-quota // int((folder / "cpu.cfs_period_us").read_text())))
    except (OSError, ValueError):
        return None


def get_num_threads():
    """Return how many threads a call from this Python thread may use.

    The first that is set of: the `num_threads` context of this thread, `set_num_threads`, the
    environment variable ``FASTNORM_NUM_THREADS`` as it was at import, and the smaller of what OpenMP
    would use (``OMP_NUM_THREADS``, the affinity mask, threadpoolctl) and the quota of the control
    group. Small calls use one thread, whatever this says. Results do not depend on it.

    Returns
    -------
    int
        At least 1. Always 1 in a build without OpenMP, and in the child of a fork of a process that
        had used threads.

    Examples
    --------
    >>> import fastnorm
    >>> with fastnorm.num_threads(2):
    ...     fastnorm.get_num_threads() <= 2
    True
    """
    if _forked or not _cpu.has_openmp:
        return 1
    count = getattr(_context, "count", None) or _process_wide or _environment
    if count is None:
        count = min(_cpu.max_openmp_threads(), _cgroup_quota() or 2**16)
    return count


def set_num_threads(n):
    """Set how many threads calls may use, in the whole process.

    Parameters
    ----------
    n : int
        At least 1; may exceed the number of processors.

    Returns
    -------
    int
        What `get_num_threads` said before.

    Raises
    ------
    ValueError
        n is less than 1.
    TypeError
        n is no integer.

    See Also
    --------
    num_threads : the same for a block of code.

    Examples
    --------
    >>> import fastnorm
    >>> previous = fastnorm.set_num_threads(1)
    >>> fastnorm.set_num_threads(previous)
    1
    """
    global _process_wide
    n = _checked(n)
    previous = get_num_threads()
    _process_wide = n
    return previous


@contextmanager
def num_threads(n):
    """Context manager: calls from this Python thread use n threads inside the block.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    ValueError
        n is less than 1.
    TypeError
        n is no integer.

    Examples
    --------
    >>> import numpy as np, fastnorm
    >>> with fastnorm.num_threads(1):
    ...     y = fastnorm.layer_norm(np.eye(3))
    """
    n = _checked(n)
    previous = getattr(_context, "count", None)
    _context.count = n
    try:
        yield
    finally:
        _context.count = previous


def _policy():
    """What the CPU wing asks before a large call."""
    global _used
    n = get_num_threads()
    if n > 1:
        _used = True
    return n


def _after_fork_in_child():
    """GNU OpenMP's threads do not survive a fork, and a parallel region in the child would wait for them forever."""
    global _forked
    if _used:
        _forked = True


_environment = _from_environment()
_cpu.set_thread_policy(_policy)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
