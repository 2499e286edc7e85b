"""What is built and shipped: no wide instructions where an old processor looks, a complete source archive, a build
without OpenMP, a build that notices an edited header. What takes a compiler is slow.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest
from helpers import ROOT, TESTS, run_python

PACKAGE = ROOT / "fastnorm"
MODULES = sorted(PACKAGE.rglob("*.so"))
IN_CHECKOUT = (ROOT / "pyproject.toml").exists()
in_checkout = pytest.mark.skipif(not IN_CHECKOUT, reason="fastnorm is not imported from its checkout")


@pytest.mark.skipif(not shutil.which("objdump"), reason="needs objdump")
@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name.split(".")[0])
def test_wide_registers_only_where_the_processor_was_asked(path):
    """P01: an illegal instruction at import on an older processor. And the wide modules are wide indeed."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    name = path.name.split(".")[0]
    assert ("%zmm" in listing) == name.endswith("_v4")
    assert ("%ymm" in listing) == name.endswith(("_v3", "_v4"))
    if not name.endswith(("_v3", "_v4")):
        # Whatever else x86-64-v1 lacks.
        assert not any(
            f"\t{op}" in listing for op in ("vadd", "vmul", "pshufb", "roundss", "roundsd", "pblend", "popcnt", "movbe")
        )


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.name.split(".")[0])
def test_nothing_is_linked_that_sets_the_floating_point_state(path):
    """T05: -ffast-math links crtfastmath.o, whose start-up code sets flush to zero for the whole process."""
    symbols = subprocess.run(["readelf", "-s", "--wide", str(path)], capture_output=True, text=True, check=True).stdout
    assert "set_fast_math" not in symbols and "crtfastmath" not in symbols


@in_checkout
def test_the_flags_of_the_build_reorder_nothing():
    text = (ROOT / "setup.py").read_text()
    assert "-ffp-contract=off" in text
    for flag in ("-ffast-math", "-Ofast", "-funsafe-math", "-fassociative-math", "-march=native", "-freciprocal-math"):
        assert flag not in text


@in_checkout
def test_the_names_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "fastnorm-nn"
    assert project["dependencies"] == ["numpy>=2.0"]
    assert {"cuda12", "cuda13", "bf16", "dask", "test", "test-cuda", "docs", "dev"} <= set(
        project["optional-dependencies"]
    )
    assert "Cython" not in " ".join(project["dependencies"])


# ---- slow: builds ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, without anything built."""
    target = tmp_path_factory.mktemp("checkout") / "fastnorm-nn"
    ignore = shutil.ignore_patterns(
        ".git", "build", "*.so", "*.c", "__pycache__", "dist", "*.egg-info", ".asv", "shared"
    )
    shutil.copytree(ROOT, target, ignore=ignore)
    return target


# What is tested here does not depend on optimization, which takes most of the compile time.
QUICK = {"FASTNORM_DEBUG": "1"}


def build(folder, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **QUICK, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def run_in(folder, code, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith("FASTNORM_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**env, "PYTHONPATH": os.pathsep.join([str(folder), str(TESTS)]), **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@in_checkout
@pytest.mark.slow
def test_the_source_archive_builds_away_from_the_checkout(checkout, tmp_path):
    """P04: with all that the compiler reads, and nothing that was made from it."""
    pytest.importorskip("build")
    subprocess.run(
        [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path / "dist")],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    [archive] = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = tar.getnames()
    # The command, not the module: what extractall warns about depends on the version of Python.
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(tmp_path)], check=True)
    sources = {
        str(p.relative_to(ROOT))
        for p in PACKAGE.rglob("*")
        if p.suffix in (".py", ".pyx", ".pxd", ".pxi", ".h", ".cu", ".cuh", ".typed")
    }
    shipped = {n.split("/", 1)[1] for n in names if "/" in n}
    assert sources <= shipped, sources - shipped
    assert {"pyproject.toml", "setup.py", "LICENSE", "README.md"} <= shipped
    assert not [n for n in shipped if n.endswith((".so", ".c"))]
    [folder] = [p for p in tmp_path.iterdir() if p.name.startswith("fastnorm")]
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "wheel")],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, **QUICK},
    )
    [wheel] = (tmp_path / "wheel").glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "installed", "zip")
    print(run_in(tmp_path / "installed", "import numpy as np, fastnorm; print(fastnorm.layer_norm(np.eye(3)).sum())"))
    for name in ("py.typed", "_cuda/row_forward.cu", "_cuda/sums.cuh"):
        assert (tmp_path / "installed/fastnorm" / name).exists(), name


@in_checkout
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
def test_a_compiler_without_openmp_builds_a_package_that_works(checkout, tmp_path):
    """P03: stock Apple clang rejects -fopenmp. Same bits, one thread, and show_config says so."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        "#!/bin/sh\n"
        'for a in "$@"; do case "$a" in *openmp*) echo "unsupported option -fopenmp" >&2; exit 1;; esac; done\n'
        'exec gcc "$@"\n'
    )
    compiler.chmod(0o755)
    folder = tmp_path / "serial"
    shutil.copytree(checkout, folder)
    printed = build(folder, CC=str(compiler), LDSHARED=f"{compiler} -shared")
    assert "without OpenMP" in printed
    run_in(
        folder,
        """
import fastnorm, sys
assert not fastnorm.show_config("dict")["openmp"] and fastnorm.get_num_threads() == 1
assert fastnorm.set_num_threads(4) == 1 and fastnorm.get_num_threads() == 1
""",
    )
    lines = subprocess.run(
        [sys.executable, str(TESTS / "digest.py")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    ).stdout
    assert lines == run_python(TESTS / "digest.py", timeout=120).stdout


@in_checkout
@pytest.mark.slow
def test_a_build_notices_every_edited_source(checkout, tmp_path):
    """An edited header, included file, declaration or module rebuilds; an untouched tree does not."""
    folder = tmp_path / "rebuilt"
    shutil.copytree(checkout, folder)
    build(folder)

    def times():
        return {p.name: p.stat().st_mtime_ns for p in folder.rglob("*.so")}

    before = times()
    build(folder)
    assert times() == before, "nothing was edited"
    for name in ("lanes.h", "row_forward.pxi"):
        path = folder / "fastnorm/_cpu" / name
        # A character of the last line of a comment on top: what the compiler sees changes nothing.
        path.write_text(path.read_text() + "\n")
        os.utime(path)
        build(folder)
        after = times()
        kernels = [n for n in after if n.startswith(("_float32", "_float64"))]
        assert kernels and all(after[n] > before[n] for n in kernels), name
        before = after
