"""How many threads a call uses, and how it gets along with forks, signals, the interpreter lock and other threads."""

import os
import signal
import sys
import threading
import time
import timeit
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import NORMS, assert_same_bits, everything, gradients, run_python

import fastnorm

OPENMP = fastnorm.show_config("dict")["openmp"]
needs_openmp = pytest.mark.skipif(not OPENMP, reason="this build has no OpenMP: always one thread")
needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def answer(code, **environment):
    """What a fresh interpreter prints for get_num_threads(), after some code."""
    return int(run_python(f"import fastnorm\n{code}\nprint(fastnorm.get_num_threads())", **environment).stdout)


def clean(**environment):
    return {"OMP_NUM_THREADS": None, "OMP_THREAD_LIMIT": None, **environment}


@needs_openmp
def test_set_num_threads_returns_the_previous_number(threads):
    threads(3)
    assert fastnorm.get_num_threads() == 3
    assert fastnorm.set_num_threads(1000) == 3
    assert fastnorm.get_num_threads() == 1000, "more than there are processors is allowed"
    assert fastnorm.set_num_threads(np.int64(2)) == 1000
    assert type(fastnorm.get_num_threads()) is int


@needs_openmp
def test_the_context_goes_before_the_process_wide_number(threads):
    threads(2)
    with fastnorm.num_threads(5):
        assert fastnorm.get_num_threads() == 5
        with fastnorm.num_threads(1):
            assert fastnorm.get_num_threads() == 1
            fastnorm.set_num_threads(7)
            assert fastnorm.get_num_threads() == 1
        assert fastnorm.get_num_threads() == 5
    assert fastnorm.get_num_threads() == 7
    with pytest.raises(KeyError), fastnorm.num_threads(4):
        raise KeyError
    assert fastnorm.get_num_threads() == 7


@needs_openmp
def test_the_context_is_that_of_one_python_thread(threads):
    threads(2)
    seen = []
    with fastnorm.num_threads(5):
        other = threading.Thread(target=lambda: seen.append(fastnorm.get_num_threads()))
        other.start()
        other.join()
        assert fastnorm.get_num_threads() == 5
    assert seen == [2]
    other = threading.Thread(target=fastnorm.set_num_threads, args=(3,))
    other.start()
    other.join()
    assert fastnorm.get_num_threads() == 3, "set_num_threads is process-wide"


@pytest.mark.parametrize(
    "n, error",
    [
        (0, ValueError),
        (-1, ValueError),
        (False, ValueError),
        (-(10**30), ValueError),
        (1.0, TypeError),
        ("2", TypeError),
        (None, TypeError),
        ([1], TypeError),
    ],
    ids=repr,
)
def test_fewer_than_one_thread_is_refused_and_changes_nothing(n, error, threads):
    threads(2)
    before = fastnorm.get_num_threads()
    with pytest.raises(error, match="n: "):
        fastnorm.set_num_threads(n)
    with pytest.raises(error, match="n: "), fastnorm.num_threads(n):
        raise AssertionError("the block must not be entered")
    assert fastnorm.get_num_threads() == before


@needs_openmp
def test_environment_variables_in_their_order():
    assert answer("", **clean(FASTNORM_NUM_THREADS=5, OMP_NUM_THREADS=3)) == 5
    assert answer("", **clean(FASTNORM_NUM_THREADS="", OMP_NUM_THREADS=1)) == 1
    assert answer("", **clean(FASTNORM_NUM_THREADS=" ", OMP_NUM_THREADS=1)) == 1
    assert answer("fastnorm.set_num_threads(4)", **clean(FASTNORM_NUM_THREADS=5)) == 4
    assert (
        answer(
            "c = fastnorm.num_threads(6); c.__enter__(); fastnorm.set_num_threads(4)", **clean(FASTNORM_NUM_THREADS=5)
        )
        == 6
    )
    # The default is no more than OpenMP's.
    assert 1 <= answer("", **clean(OMP_NUM_THREADS=2)) <= 2


@needs_openmp
@needs_affinity
def test_the_affinity_of_the_process_counts():
    """T04: one processor allowed, one thread used."""
    pin = "import os; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])\nimport fastnorm"
    assert int(run_python(f"{pin}\nprint(fastnorm.get_num_threads())", **clean()).stdout) == 1
    assert 1 <= answer("", **clean()) <= len(os.sched_getaffinity(0))


@needs_openmp
def test_threadpoolctl_limits_count():
    """The default is asked anew at every call."""
    pytest.importorskip("threadpoolctl")
    code = """
import threadpoolctl, fastnorm, numpy as np
fastnorm.layer_norm(np.ones((2, 2)))
before = fastnorm.get_num_threads()
with threadpoolctl.threadpool_limits(1):
    assert fastnorm.get_num_threads() == 1
assert fastnorm.get_num_threads() == before
"""
    run_python(code, **clean(OMP_NUM_THREADS=2))


@needs_openmp
def test_a_cgroup_quota_counts(monkeypatch, tmp_path):
    """The files of both versions, as the kernel writes them; rounded up, never zero."""
    from fastnorm import _threads

    for text, quota in (("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("400000 100000", 4)):
        (tmp_path / "cpu.max").write_text(text + "\n")
        assert _threads._quota_v2(tmp_path) == quota
    for text, quota in (("-1", None), ("150000", 2), ("1000", 1)):
        (tmp_path / "cpu.cfs_quota_us").write_text(text + "\n")
        (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
        assert _threads._quota_v1(tmp_path) == quota
    assert _threads._quota_v2(tmp_path / "nowhere") is None
    monkeypatch.setattr(_threads, "_process_wide", None)
    monkeypatch.setattr(_threads, "_environment", None)
    monkeypatch.setattr(_threads, "_cgroup_quota", lambda: 1)
    assert fastnorm.get_num_threads() == 1


@pytest.mark.parametrize("text", ["0", "-2", "two", "1.5"])
def test_a_bad_environment_variable_is_an_error_that_names_it(text):
    done = run_python("import fastnorm", FASTNORM_NUM_THREADS=text, check=False)
    assert done.returncode != 0 and "FASTNORM_NUM_THREADS" in done.stderr.splitlines()[-1] and text in done.stderr


def test_tiny_calls_are_not_slower_with_the_default_number_of_threads(threads):
    """T04: below a measured size no team of threads is started."""
    x = np.ones((8, 64), np.float32)

    def seconds():
        return min(timeit.repeat(lambda: fastnorm.layer_norm(x), number=200, repeat=7))

    threads(8)
    many = seconds()
    threads(1)
    assert many < 3 * seconds()


FORK = """
import os, signal, sys
import numpy as np, fastnorm
fastnorm.set_num_threads(4)
rng = np.random.default_rng(0)
x = rng.standard_normal((4096, 256)).astype(np.float32)
split = rng.standard_normal((1, 2**20)).astype(np.float32)
def results(a):
    y, mean, rstd = fastnorm.layer_norm_forward(a)
    return b"".join(r.tobytes() for r in (y, *fastnorm.layer_norm_backward(a, a, mean, rstd)))
def all_results():
    return [results(x), results(split), results(np.ascontiguousarray(x.T[:, :4096]))]
before = all_results() if sys.argv[1] == "used" else None
def child(depth):
    pid = os.fork()
    if pid == 0:
        signal.alarm(12)                                  # a child that hangs is killed
        # Threads of a process that never had any survive a fork.
        ok = fastnorm.get_num_threads() == (1 if before or not depth else 4)
        got = all_results()
        ok = ok and (before is None or got == before)
        if ok and depth:
            ok = child(depth - 1)
        os._exit(0 if ok else 3)
    return os.waitpid(pid, 0)[1] == 0
assert child(1), "a child hung, crashed, or computed something else"
assert fastnorm.get_num_threads() == 4
if before:
    assert all_results() == before, "the parent computes as before"
"""


@needs_fork
@needs_openmp
@pytest.mark.parametrize("history", ["used", "unused"])
def test_a_forked_child_finishes_with_the_same_values(history):
    """T01: forward, backward, split rows and tiles; and the child of the child."""
    run_python(FORK, arguments=(history,))


@needs_fork
def test_multiprocessing_by_fork_finishes():
    """T01 as people meet it."""
    run_python("""
import multiprocessing as mp, warnings
import numpy as np, fastnorm
warnings.simplefilter("ignore")
x = np.random.default_rng(0).standard_normal((4096, 256)).astype(np.float32)
expected = fastnorm.layer_norm(x)
def child(k):
    return np.array_equal(fastnorm.layer_norm(x), expected)
if __name__ == "__main__":
    with mp.get_context("fork").Pool(2) as pool:
        assert pool.map_async(child, range(8)).get(timeout=40) == [True] * 8
""")


@needs_openmp
def test_integer_sums_are_exact_for_any_number_of_threads(threads, rng):
    """T02: a race on a shared accumulator shows as a sum that is not the number of rows."""
    for rows, columns in ((10_007, 33), (130_001, 3), (5, 70_001)):
        x, dy = rng.standard_normal((2, rows, columns)).astype(np.float32)
        seen = set()
        for n in (1, 2, 3, 7):
            threads(n)
            for _ in range(3):
                assert (gradients(fastnorm.layer_norm, np.ones_like(x), x)[2] == rows).all()
                seen.add(b"".join(g.tobytes() for g in gradients(fastnorm.layer_norm, dy, x)))
        assert len(seen) == 1


@needs_openmp
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_that_share_a_row_add_to_no_sum_of_each_other(dtype):
    """A store past the cache leaves less than a lane group at the end of each block. Its part of dweight and dbias was
    once added as a whole group, the first sums of the next thread's block included: lost, in one call out of 250."""
    run_python(
        f"""
import numpy as np, fastnorm
rows, columns = 3, 66_000
x, dy = np.random.default_rng(0).standard_normal((2, rows, columns)).astype("{dtype}")
_, mean, rstd = fastnorm.layer_norm_forward(x)
memory = np.empty(x.nbytes + 128, np.uint8)
start = -memory.ctypes.data % 64 + 16  # not at the start of a cache line
dx = memory[start : start + x.nbytes].view("{dtype}").reshape(rows, columns)
seen = set()
for n in (1, 2, 3, 7):
    with fastnorm.num_threads(n):
        for _ in range(600 if n > 1 else 1):
            seen.add(b"".join(g.tobytes() for g in fastnorm.layer_norm_backward(dy, x, mean, rstd, out=dx)[1:]))
assert len(seen) == 1, len(seen)
""",
        timeout=120,
        FASTNORM_STREAM_BYTES=1,
    )


def test_many_python_threads_at_once_get_the_same_bits(threads, rng):
    threads(2)
    arrays = [
        rng.standard_normal(shape).astype(dtype)
        for shape in ((3, 5), (600, 300), (1, 70_000), (300, 600))
        for dtype in (np.float32, np.float64, np.float16)
    ]
    jobs = [(norm, a, axis) for norm in NORMS for a in arrays for axis in (0, -1)]

    def work(job):
        norm, a, axis = job
        with fastnorm.num_threads(1 + len(a) % 3):
            return everything(norm, a, a, axis=axis)

    expected = [work(job) for job in jobs]
    with ThreadPoolExecutor(8) as pool:
        for got, wanted in zip(pool.map(work, jobs * 3), expected * 3, strict=True):
            assert_same_bits(got, wanted)


def test_the_interpreter_lock_is_released(threads, rng):
    """T07: another Python thread keeps ticking while a kernel runs."""
    threads(1)
    x = rng.standard_normal((200, 100_000)).astype(np.float32)
    out, ticks, stop = np.empty_like(x), [], threading.Event()
    _, mean, rstd = fastnorm.layer_norm_forward(x, out=out)
    gradient = np.empty_like(x)

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    def total(call):
        """Ticks while the call runs for some time in all."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.4:
            call()
        return sum(begin <= t for t in ticks)

    # Without a switch while a call runs, there are no more ticks than calls.
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        calls = []
        for call in (
            lambda: fastnorm.layer_norm(x, out=out),
            lambda: fastnorm.layer_norm(x, axis=0, out=out),
            lambda: fastnorm.layer_norm_backward(x, x, mean, rstd, out=gradient),
        ):
            calls.clear()
            n = total(lambda call=call: (call(), calls.append(1)))
            assert n > 3 * len(calls), (n, len(calls))
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(sys.platform == "win32", reason="needs kill")
@pytest.mark.parametrize("n", [1, 2])
def test_ctrl_c_reaches_long_calls_and_the_next_call_works(n):
    """T08: an interrupt is neither lost nor a crash, and does not wait for the end of everything."""
    run_python(
        """
import os, signal, sys, threading, time
import numpy as np, fastnorm
fastnorm.set_num_threads(int(sys.argv[1]))
x = np.ones((600, 100_000), np.float32)
out = np.empty_like(x)
y, mean, rstd = fastnorm.layer_norm_forward(x, out=out)
for call in (lambda: fastnorm.layer_norm(x, out=out), lambda: fastnorm.layer_norm(x, axis=0, out=out),
             lambda: fastnorm.layer_norm_backward(x, x, mean, rstd, out=out)):
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.perf_counter()
    try:
        while time.perf_counter() - begin < 20:
            call()
        raise SystemExit("interrupt lost")
    except KeyboardInterrupt:
        assert time.perf_counter() - begin < 5
    assert np.isfinite(fastnorm.layer_norm(x[:2, :64])).all()
    assert np.isfinite(fastnorm.layer_norm(x[:4], out=out[:4])).all()
""",
        arguments=(str(n),),
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_one_long_call_is_interrupted_before_its_end(threads):
    """A signal handler runs while a single call is under way: a result of some hundred ms looks for it in between."""
    threads(1)
    rows = 300
    row = np.ones((1, 2_000_000), np.float16)
    # 600 million values in the memory of two million: in, by a stride of zero, and out, one row again and again.
    x = np.broadcast_to(row, (rows, row.size))
    out = np.lib.stride_tricks.as_strided(np.empty_like(row), x.shape, (0, row.itemsize))

    def seconds():
        begin = time.perf_counter()
        fastnorm.layer_norm(x, out=out)
        return time.perf_counter() - begin

    whole = seconds()
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, whole / 5)
        with pytest.raises(KeyboardInterrupt):
            seconds_until_interrupt = -time.perf_counter()
            try:
                fastnorm.layer_norm(x, out=out)
            finally:
                seconds_until_interrupt += time.perf_counter()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert seconds_until_interrupt < 0.8 * whole
