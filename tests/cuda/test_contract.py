"""The tests of the CPU wing, on the CUDA wing: the same functions and the same oracles, with the longest rows left out."""
import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

from device import module_over_device  # noqa: E402

TESTS = Path(__file__).parent.parent
MODULES = ["accuracy", "onnx", "gradients", "properties", "bits", "layouts", "types", "empty", "bad_input"]
# Long enough for every path: rows in slices, too.
LONGEST = 70_003

# Tests that ask what CuPy arrays do not have, or what is promised of the CPU only.
LEFT_OUT = {}


def load(name, replaced):
    """A module of the suite once more, with other modules under the names that it imports."""
    spec = importlib.util.spec_from_file_location(f"cuda_{name}", TESTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    kept = {k: sys.modules.get(k) for k in replaced}
    sys.modules.update(replaced)
    try:
        spec.loader.exec_module(module)
    finally:
        for k, v in kept.items():
            if v is None:
                del sys.modules[k]
            else:
                sys.modules[k] = v
    return module


def collect():
    over_device = {"fastnorm": module_over_device()}
    helpers = load("helpers", over_device)
    helpers.LONGEST = LONGEST
    for module in MODULES:
        loaded = load(f"test_{module}", {**over_device, "helpers": helpers})
        for name, test in vars(loaded).items():
            if name.startswith("test_") and name not in LEFT_OUT:
                globals()[f"test_{module}_{name[5:]}"] = test


collect()
