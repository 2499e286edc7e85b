"""What import fastnorm does and does not do to the process, and the environment variables that it reads."""

import numpy as np
import pytest
from helpers import run_python

import fastnorm

LEVELS = fastnorm.show_config("dict")["isa_levels"]


def test_import_leaves_floating_point_as_it_was():
    """T05: no flush to zero, on any thread; NumPy warns about nothing."""
    run_python("""
import warnings
warnings.simplefilter("error")
import sys
import numpy as np
state = np.geterr()
import fastnorm
def check():
    assert sys.float_info.min / 2 > 0 and np.float32(1e-40) * np.float32(1) > 0
    assert np.finfo(np.float32).smallest_subnormal > 0
    str(np.finfo(np.float64))
check()
x = np.ones((1000, 1000), np.float32)
for n in (1, 3):
    with fastnorm.num_threads(n):
        y, m, r = fastnorm.layer_norm_forward(x)
        fastnorm.layer_norm_backward(x, x, m, r)
    check()
assert np.geterr() == state
# Subnormal input and results survive, from all threads.
tiny = np.full((1000, 1000), 1e-40, np.float32)
with fastnorm.num_threads(3):
    assert (fastnorm.layer_norm(np.zeros_like(tiny), None, tiny[0]) == tiny).all()
    assert (abs(fastnorm.rms_norm(tiny, eps=0.0) - 1) < 1e-6).all()
""")


def test_import_brings_numpy_and_our_own_modules_only():
    done = run_python("""
import sys
import numpy
before = set(sys.modules)
import fastnorm
fastnorm.layer_norm(numpy.ones((2, 3), numpy.float32))
fastnorm.layer_norm(numpy.ones((2, 3)), axis=0)
new = {m.split(".")[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)
assert all(m.startswith(("fastnorm", "numpy", "_cython", "cython_runtime")) for m in new), new
for name in ("cupy", "ml_dtypes", "dask", "cython", "Cython", "scipy", "torch"):
    assert name not in sys.modules, name
assert "fastnorm.reference" not in sys.modules
""")
    assert done.stdout == "" and done.stderr == ""


def test_import_changes_no_environment_variable():
    """And sets none that other OpenMP users read."""
    run_python("""
import os
before = dict(os.environ)
import ctypes
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
import numpy, fastnorm
fastnorm.layer_norm(numpy.ones((1000, 1000)))
assert dict(os.environ) == before
for name in ("OMP_NUM_THREADS", "KMP_DUPLICATE_LIB_OK", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
    assert libc.getenv(name.encode()) == (before[name].encode() if name in before else None)
""")


@pytest.mark.parametrize(
    "error",
    [
        "ImportError('libcuda.so.1: cannot open shared object file')",
        "OSError('x')",
        "RuntimeError('cudaErrorNoDevice')",
    ],
)
def test_a_broken_cupy_is_nobodys_business(error):
    """G05: not imported for NumPy arrays; show_config survives it."""
    run_python(f"""
import sys, importlib.abc
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "cupy":
            raise {error}
sys.meta_path.insert(0, Broken())
import numpy as np, fastnorm
assert fastnorm.layer_norm(np.ones((2, 4), np.float32)).shape == (2, 4)
assert "cupy" not in sys.modules
config = fastnorm.show_config("dict")
assert config["cupy"] is None and config["gpus"] == []
""")


@pytest.mark.parametrize("level", LEVELS)
def test_fastnorm_isa_chooses_a_level(level):
    done = run_python("import fastnorm; print(fastnorm.show_config('dict')['isa'])", FASTNORM_ISA=level)
    assert done.stdout.strip() == level


def test_an_empty_fastnorm_isa_is_an_unset_one():
    for value in ("", None):
        done = run_python("import fastnorm; print(fastnorm.show_config('dict')['isa'])", FASTNORM_ISA=value)
        assert done.stdout.strip() == LEVELS[-1]


@pytest.mark.parametrize("text", ["v5", "avx2", "V3", "baseline,v3"])
def test_an_unknown_fastnorm_isa_is_an_import_error_that_says_what_there_is(text):
    done = run_python("import fastnorm", FASTNORM_ISA=text, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0 and last.startswith("ImportError") and "FASTNORM_ISA" in last and text in last
    assert all(level in last for level in LEVELS)


@pytest.mark.parametrize("text", ["many", "1.5", "-1"])
def test_a_bad_fastnorm_stream_bytes_is_an_error_that_names_it(text):
    done = run_python("import fastnorm", FASTNORM_STREAM_BYTES=text, check=False)
    assert done.returncode != 0 and "FASTNORM_STREAM_BYTES" in done.stderr.splitlines()[-1]


def test_an_empty_fastnorm_stream_bytes_is_an_unset_one():
    run_python("import numpy as np, fastnorm; fastnorm.layer_norm(np.ones((3, 4)))", FASTNORM_STREAM_BYTES="")


def test_show_config_as_a_dict():
    config = fastnorm.show_config("dict")
    assert list(config) == ["version", "isa", "isa_levels", "num_threads", "openmp", "numpy", "cupy", "gpus"]
    assert config["version"] == fastnorm.__version__ and config["numpy"] == np.__version__
    assert config["isa"] in config["isa_levels"] and config["isa_levels"][0] == "baseline"
    assert config["num_threads"] == fastnorm.get_num_threads() and isinstance(config["openmp"], bool)


def test_show_config_prints_every_entry(capsys):
    assert fastnorm.show_config() is None
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(fastnorm.show_config("dict"))


@pytest.mark.parametrize("mode", ["json", "", None, 1])
def test_show_config_knows_two_modes(mode):
    with pytest.raises(ValueError, match="mode"):
        fastnorm.show_config(mode)


def test_wings_of_other_processors_are_found_by_name_only():
    """The level named baseline needs nothing but the processor that every x86-64 is."""
    run_python(
        "import fastnorm, sys; assert not [m for m in sys.modules if m.endswith(('_v3', '_v4'))]",
        FASTNORM_ISA="baseline",
    )


@pytest.mark.parametrize("command", [["info"], ["check"]])
def test_python_m_fastnorm_shows_and_checks(command):
    done = run_python(
        "import runpy, sys; runpy.run_module('fastnorm', run_name='__main__')", arguments=command, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert fastnorm.__version__ in done.stdout or "ok" in done.stdout.lower()
