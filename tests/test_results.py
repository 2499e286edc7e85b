"""Memory of large results: kept when they are freed, bounded, off by a switch, and never to be told from any other."""
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from helpers import run_python

import fastnorm
from fastnorm._cpu import results

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is kept on Linux only")

SHAPE = (2048, 1024)


@pytest.fixture(autouse=True)
def keeps_from_one_mebibyte():
    """Small arrays, to be quick."""
    before = results.constants()
    results.constants(KEPT_MIN=1 << 20)
    yield
    results.constants(**before)


def arrays(seed=0):
    return np.random.default_rng(seed).standard_normal((2, *SHAPE), np.float32)


def address(a):
    return a.__array_interface__["data"][0]


def call_of_each(x, dy):
    """All that the functions return anew in the size of x."""
    y, mean, rstd = fastnorm.layer_norm_forward(x)
    yield y
    yield fastnorm.layer_norm_backward(dy, x, mean, rstd)[0]
    yield from fastnorm.add_rms_norm(x, dy)
    yield from fastnorm.add_layer_norm_backward(dy, None, x, mean, rstd)[:2]
    yield fastnorm.layer_norm(x, axis=0)
    yield fastnorm.batch_norm(x, training=True)


def test_memory_of_a_freed_result_is_that_of_the_next():
    x, dy = arrays()
    first = list(call_of_each(x, dy))
    exact = [a.copy() for a in first]
    places = {address(a) for a in first}
    assert len(places) == len(first)
    del first
    again = list(call_of_each(x, dy))
    # One of them, of batch_norm, may need memory of its own before.
    assert len({address(a) for a in again} & places) >= len(exact) - 1
    for a, b in zip(again, exact, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_result_is_a_plain_array():
    y = fastnorm.layer_norm(arrays()[0])
    assert type(y) is np.ndarray and y.base is None and y.flags.owndata and y.flags.writeable and y.flags.c_contiguous
    exact = y[:100].copy()
    y.resize((100, SHAPE[1]), refcheck=False)
    np.testing.assert_array_equal(y, exact)
    y.resize((9000, SHAPE[1]), refcheck=False)
    np.testing.assert_array_equal(y[:100], exact)
    assert not y[100:].any()


def test_resized_memory_is_not_taken_for_larger_than_it_is():
    x = arrays()[0]
    y = fastnorm.layer_norm(x)
    y.resize((1, SHAPE[1]), refcheck=False)
    del y
    y = fastnorm.layer_norm(x)
    z = fastnorm.layer_norm(2 * x)
    np.testing.assert_array_equal(y, fastnorm.layer_norm(x))
    assert not np.shares_memory(y, z)


def test_other_sizes_get_other_memory():
    """No block is given to a result that is much smaller than it, or larger."""
    x = arrays()[0]
    y = fastnorm.layer_norm(np.concatenate([x, x]))
    place = address(y)
    del y
    small, large = fastnorm.layer_norm(x), fastnorm.layer_norm(np.concatenate([x, x, x]))
    assert address(small) != place
    np.testing.assert_array_equal(large[:2048], small)


def run(code, **environment):
    environment = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


COUNT = """
import numpy as np, fastnorm
from fastnorm._cpu import results
results.constants(KEPT_MIN=1 << 20)
x = np.ones((2048, 1024), np.float32)
many = [fastnorm.layer_norm(x) for _ in range(20)]
assert results.kept_now() == 0
del many
kept = results.kept_now()
larger = fastnorm.layer_norm(np.ones((8192, 1024), np.float32))
del larger
print(kept, results.kept_now())
"""


@pytest.mark.parametrize("limit", [0, 9 << 20, 20 << 20, 1 << 30])
def test_what_is_kept_is_bounded(limit):
    code, text = run(COUNT, FASTNORM_KEEP_BYTES=str(limit))
    assert code == 0, text
    kept, after = map(int, text.split())
    # Of blocks of 8 MiB, and somewhat more, as many as fit, 16 at most; then one of 32 MiB, if there is room.
    assert kept <= limit and kept < 16 * (11 << 20)
    assert kept >= min(limit - (11 << 20), 16 << 23)
    assert after <= limit
    assert (after > 1 << 25) == (limit == 1 << 30)


@pytest.mark.parametrize("text", ["-1", "1e9", "64M"])
def test_a_limit_that_is_no_number_is_an_error_at_import(text):
    code, output = run("import fastnorm", FASTNORM_KEEP_BYTES=text)
    assert code != 0 and "FASTNORM_KEEP_BYTES" in output and "expected a number of bytes" in output


def test_a_limit_beyond_all_memory_is_none():
    code, output = run("import fastnorm", FASTNORM_KEEP_BYTES="9" * 30, FASTNORM_STREAM_BYTES="9" * 30)
    assert code == 0, output


def test_an_empty_limit_is_the_default():
    code, output = run("from fastnorm._cpu import results; print(results.kept_now())", FASTNORM_KEEP_BYTES="")
    assert code == 0 and output == "0\n"


def test_several_threads_of_python():
    """Each holds results for a while and looks whether they are still its own."""
    x, _ = arrays()
    exact = fastnorm.layer_norm(x)
    wrong = []

    def work(scale):
        held = []
        for k in range(30):
            held.append(fastnorm.layer_norm(x))
            np.multiply(held[-1], scale, out=held[-1])
            if k % 3 == 2:
                wrong.extend(a for a in held if not np.array_equal(a, exact * np.float32(scale)))
                held.clear()

    workers = [threading.Thread(target=work, args=(2.0**n,)) for n in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_an_allocator_that_a_program_has_given_numpy_is_used():
    """By functions 304 (PyDataMem_SetHandler) and 305 of NumPy's C API: NumPy has no Python for it."""
    run_python("""
import ctypes
import numpy as np, fastnorm
multiarray = np._core.multiarray
_ARRAY_API, get_handler_name = multiarray._ARRAY_API, multiarray.get_handler_name
from fastnorm._cpu import results
results.constants(KEPT_MIN=1 << 20)
pointer = ctypes.pythonapi.PyCapsule_GetPointer
pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
functions = ctypes.cast(pointer(_ARRAY_API, None), ctypes.POINTER(ctypes.c_void_p))
set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[304])
get_handler = ctypes.PYFUNCTYPE(ctypes.py_object)(functions[305])

# NumPy's own under another name, which the struct begins with.
size = 128 + 8 * 5
default = pointer(get_handler(), b"mem_handler")
other = ctypes.create_string_buffer(ctypes.string_at(default, size), size)
other[:6] = b"other" + bytes(1)
capsule = new_capsule(ctypes.addressof(other), b"mem_handler", None)

x = np.ones((512, 1024), np.float32)
assert get_handler_name(fastnorm.layer_norm(x)) == "fastnorm"
before = set_handler(capsule)
layer, axis0, batch = fastnorm.layer_norm(x), fastnorm.layer_norm(x, axis=0), fastnorm.batch_norm(x, training=True)
for y in (layer, axis0, batch, *fastnorm.add_rms_norm(x, x)):
    assert get_handler_name(y) == "other", get_handler_name(y)
set_handler(before)
assert get_handler_name(fastnorm.layer_norm(x)) == "fastnorm"
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_of_fork_keeps_its_own():
    """In an interpreter of its own: libraries that other tests have loaded may object to a fork."""
    run_python("""
import os
import numpy as np, fastnorm
from fastnorm._cpu import results
results.constants(KEPT_MIN=1 << 20)
x = np.random.default_rng(0).standard_normal((2048, 1024), np.float32)
exact = fastnorm.layer_norm(x)
fastnorm.layer_norm(x)
assert results.kept_now() > 0
child = os.fork()
if child == 0:
    y = fastnorm.layer_norm(x)
    same = np.array_equal(y, exact)
    del y
    os._exit(0 if same and np.array_equal(fastnorm.layer_norm(x), exact) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


@pytest.mark.parametrize("n_bytes", [1 << 40, 1 << 62])
def test_more_memory_than_there_is(n_bytes):
    before = results.kept_now()
    x = np.broadcast_to(np.float32(1), (n_bytes // 4096, 1024))
    with pytest.raises((MemoryError, ValueError)):
        fastnorm.layer_norm(x)
    assert results.kept_now() <= before
