"""The house of DESIGN.md section 4: imports only go down, and the front shows what it promises."""

import ast
import inspect
import re

import pytest
from helpers import ROOT

import fastnorm

PACKAGE = ROOT / "fastnorm"
# Higher floors import lower ones only. These stand beside the house, and no floor imports them.
BESIDE = ["reference.py", "__main__.py", "_bench.py", "_check.py", "_peers.py"]
FLOORS = [
    {"fastnorm._cpu", "fastnorm._cuda"},
    {"fastnorm._backend", "fastnorm._arrays", "fastnorm._threads", "fastnorm._config"},
    {"fastnorm._row_norm", "fastnorm._channel_norm"},
    {"fastnorm._layer_norm", "fastnorm._rms_norm", "fastnorm._batch_norm"},
    {"fastnorm.layers"},
    {"fastnorm"},
]
CIMPORTS = re.compile(
    r"^\s*(?:from\s+(?:cython\.cimports\.)?(fastnorm[\w.]*)\s+c?import|c?import\s+(fastnorm[\w.]*))", re.M
)


def imports_of(path):
    """Modules of fastnorm that a source file imports, cimports too; a package stands for its modules."""
    found = {a or b for a, b in CIMPORTS.findall(path.read_text())}
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "fastnorm":
                found |= {f"fastnorm.{a.name}" for a in node.names}
                found.discard("fastnorm")
    return found


def floor_of(module):
    for number, modules in enumerate(FLOORS):
        if any(module == m or (m != "fastnorm" and module.startswith(m + ".")) for m in modules):
            return number
    raise AssertionError(f"{module} has no floor in this test")


def wing_of(module):
    return next((w for w in FLOORS[0] if module == w or module.startswith(w + ".")), None)


SOURCES = sorted(
    p
    for pattern in ("*.py", "*.pxd", "_cpu/*.py", "_cpu/*.pyx", "_cpu/*.pxd", "_cpu/*.pxi", "_cuda/*.py")
    for p in PACKAGE.glob(pattern)
    if p.name not in BESIDE
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    module = (
        "fastnorm"
        if path.name == "__init__.py" and path.parent == PACKAGE
        else ".".join(["fastnorm", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
    )
    for imported in imports_of(path):
        # A wing imports itself as it likes, and no other wing.
        if wing_of(module) and wing_of(module) == wing_of(imported):
            continue
        assert not (wing_of(module) and wing_of(imported)), imported
        if imported != module:
            same_floor = floor_of(imported) == floor_of(module)
            # On one floor, too: but never a circle.
            assert floor_of(imported) < floor_of(module) or same_floor and module not in imports_of_module(imported), (
                imported
            )


def imports_of_module(module):
    path = PACKAGE.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return imports_of(path)


def test_the_sources_of_all_floors_are_here():
    assert {"__init__.py", "_layer_norm.py", "_row_norm.py", "row_norm.pyx", "lanes.h"} <= {
        p.name for p in PACKAGE.rglob("*")
    }
    assert len(SOURCES) > 15


def test_the_wings_have_the_same_names_and_arguments():
    """By their sources: CuPy need not be here."""
    for name in ("row_norm_forward", "row_norm_backward", "channel_norm_forward", "channel_norm_backward"):
        module = name.rsplit("_", 1)[0]
        cython = (PACKAGE / f"_cpu/{module}.pyx").read_text()
        python = (PACKAGE / f"_cuda/{module}.py").read_text()
        ours, theirs = (re.search(rf"^def {name}\(([^)]*)\):", text, re.M)[1] for text in (cython, python))
        assert [a.split()[-1] for a in ours.split(",")] == [a.strip() for a in theirs.split(",")]
    wings = [ast.parse((PACKAGE / w / "__init__.py").read_text()) for w in ("_cpu", "_cuda")]
    names = [
        {
            n.value
            for node in wing.body
            if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
            for n in node.value.elts
        }
        for wing in wings
    ]
    # The CPU wing has threads and processor levels besides.
    assert names[1] <= names[0] and len(names[1]) == 12


def test_the_front_shows_exactly_its_names():
    public = {n for n, v in vars(fastnorm).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public | {"__version__"} == set(fastnorm.__all__)
    assert fastnorm.__all__ == sorted(fastnorm.__all__, key=lambda n: (n != "__version__", n))
    assert all(hasattr(fastnorm, n) for n in fastnorm.__all__)


@pytest.mark.parametrize(
    "signature",
    [
        "layer_norm(x, weight=None, bias=None, *, axis=-1, eps=1e-05, out=None)",
        "layer_norm_forward(x, weight=None, bias=None, *, axis=-1, eps=1e-05, out=None)",
        "layer_norm_backward(dy, x, mean, rstd, weight=None, *, axis=-1, param_grads=True, out=None)",
        "rms_norm(x, weight=None, *, axis=-1, eps=1e-05, weight_offset=0.0, out=None)",
        "rms_norm_forward(x, weight=None, *, axis=-1, eps=1e-05, weight_offset=0.0, out=None)",
        "rms_norm_backward(dy, x, rstd, weight=None, *, axis=-1, weight_offset=0.0, param_grads=True, out=None)",
        "set_num_threads(n)",
        "get_num_threads()",
        "num_threads(n)",
        "show_config(mode='print')",
    ],
)
def test_signatures_are_those_of_the_contract(signature):
    name = signature.split("(")[0]
    found = inspect.signature(getattr(fastnorm, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert name + str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == signature


def test_results_have_one_shape_per_function():
    x = [[1.0, 2.0]]
    assert len(fastnorm.layer_norm_forward(x)) == 3 and len(fastnorm.rms_norm_forward(x)) == 2
    y, mean, rstd = fastnorm.layer_norm_forward(x)
    for param_grads in (True, False):
        assert len(fastnorm.layer_norm_backward(x, x, mean, rstd, param_grads=param_grads)) == 3
        assert len(fastnorm.rms_norm_backward(x, x, rstd, param_grads=param_grads)) == 2


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
