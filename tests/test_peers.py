"""fastnorm/_peers.py: what the benchmarks call is right, whoever computes it; what cannot be called says why."""


import sys
import types

import numpy as np
import pytest
from helpers import ROOT, run_python

import fastnorm
from fastnorm import _peers, reference

PEERS = [i for i in _peers.IMPLEMENTATIONS if i != "copy"]
HERE = {name for name, version in _peers.installed().items() if isinstance(version, str)}
# Of the largest value of a result: peers round as they like, also their parameter gradients.
TOLERANCE = {"float16": 2e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-9}


@pytest.fixture(autouse=True)
def _threads_as_before(threads):
    """make_call sets them for the process."""


def expected(a):
    """All results, in longdouble."""
    function = getattr(reference, a.op.removesuffix("_evaluation"))
    parameters = (a.weight,) if "rms" in a.op else (a.weight, a.bias)
    if a.op in ("batch_norm", "batch_norm_evaluation"):
        return [function(a.x, *parameters, a.running_mean, a.running_var, training=a.op == "batch_norm", axis=a.axis)]
    if a.op.startswith("add_") and a.op.endswith("_backward"):
        return list(function(a.dy, a.dh, a.x, a.weight, alpha=_peers.ALPHA, axis=a.axis))
    if a.op.endswith("_backward"):
        return list(function(a.dy, a.x, a.weight, axis=a.axis))
    if a.residual is not None:
        return list(function(a.x, a.residual, *parameters, axis=a.axis))
    return [function(a.x, *parameters, axis=a.axis)]


def to_numpy(result):
    if type(result).__module__.startswith("torch"):
        import torch

        return result.to(torch.float64).detach().numpy()
    if hasattr(result, "get"):
        result = result.get()
    return np.asarray(result).astype(np.float64)


def assert_right(call, a):
    results = call()
    results = [to_numpy(r) for r in (results if isinstance(results, tuple | list) else [results])]
    wanted = expected(a)
    for result, exact in zip(results, wanted, strict=len(wanted) > 1):
        exact = exact.astype(np.float64).reshape(result.shape)
        assert np.abs(result - exact).max() <= TOLERANCE[a.x.dtype.name] * np.abs(exact).max()


def has_a_gap(implementation, a):
    """Whether the peer is known to lack this."""
    batch, gradient, narrow = a.op.startswith("batch_norm"), a.op.endswith("_backward"), a.x.dtype.itemsize == 2
    return {
        "numba": batch or narrow,
        "jax": a.x.dtype == np.float64,
        "onnxruntime": gradient
        or a.op == "batch_norm"
        or a.x.dtype.name == "bfloat16"
        or (a.residual is not None and a.x.dtype == np.float64)
        or (batch and a.axis != 1),
    }.get(implementation, False)


def check(implementation, a, n_threads=1):
    """The right result, or the reason why there is none."""
    if implementation not in HERE:
        pytest.skip(str(_peers.installed()[implementation]))
    if "cupy" in implementation and not fastnorm.show_config("dict")["gpus"]:
        with pytest.raises(_peers.Unavailable, match="no device"):
            _peers.make_call(implementation, a, n_threads)
    elif has_a_gap(implementation, a):
        with pytest.raises(_peers.Unavailable, match=r"\w+ \w+"):
            _peers.make_call(implementation, a, n_threads)
    else:
        assert_right(_peers.make_call(implementation, a, n_threads), a)


# numba compiles for a second or two each; these have been through every line of its kernels.
SOON_COMPILED = ["rms_norm", "add_layer_norm", "rms_norm_backward", "add_layer_norm_backward"]


def unless_numba_is_slow(op, implementation):
    slow = implementation == "numba" and op not in SOON_COMPILED and not op.startswith("batch_norm")
    return pytest.param(op, implementation, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("op, implementation", [unless_numba_is_slow(op, i) for op in _peers.OPS for i in PEERS])
def test_every_peer_gives_the_result_of_the_reference(op, implementation):
    check(implementation, _peers.make_arrays(op, (24, 40)))


@pytest.mark.parametrize("implementation", [i for i in PEERS if i != "numba"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ["rms_norm", "layer_norm_backward", "batch_norm", "batch_norm_evaluation"])
def test_in_every_dtype(op, dtype, implementation):
    check(implementation, _peers.make_arrays(op, (24, 40), dtype))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_numba_has_one_of_them(dtype):
    check("numba", _peers.make_arrays("rms_norm", (24, 40), dtype))


@pytest.mark.parametrize("implementation", [i for i in PEERS if i != "numba"])
@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("op", [op for op in _peers.OPS if op.startswith("batch_norm")])
def test_batch_norm_of_images(op, axis, implementation):
    a = _peers.make_arrays(op, (4, 6, 5, 7), axis=axis)
    assert a.weight.shape == (a.x.shape[axis],)
    check(implementation, a)


@pytest.mark.parametrize("implementation", ["fastnorm", "numpy", "jax"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm_backward", "add_rms_norm_backward"])
def test_along_other_axes(op, implementation):
    check(implementation, _peers.make_arrays(op, (24, 5, 6), axis=(0, 1)))


@pytest.mark.parametrize("implementation", ["numba", "torch", "onnxruntime"])
def test_those_without_other_axes_say_so(implementation):
    a = _peers.make_arrays("layer_norm", (24, 40), axis=0)
    with pytest.raises(_peers.Unavailable, match="last|installed"):
        _peers.make_call(implementation, a)


@pytest.mark.parametrize("implementation", ["fastnorm", pytest.param("numba", marks=pytest.mark.slow), "torch"])
@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_backward"])
def test_on_two_threads(op, implementation):
    check(implementation, _peers.make_arrays(op, (64, 40)), n_threads=2)


@pytest.mark.parametrize("shape", [(8, 8), (1024, 1025)])
@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_copy_copies_all(dtype, n_threads, shape):
    a = _peers.make_arrays("layer_norm", shape, dtype)
    call = _peers.make_call("copy", a, n_threads)
    first = call()
    first[...] = 0
    second = call()
    assert second.tobytes() == a.x.tobytes() and np.shares_memory(first, second)


def test_all_memory_is_there_and_means_are_not_zero():
    for op in _peers.OPS:
        a = _peers.make_arrays(op, (64, 64))
        assert 0.4 < a.x.mean() < 0.6
        add, backward = "add_" in op, "backward" in op
        wanted = {"dy": backward, "dh": add and backward, "residual": add and not backward}
        assert all((getattr(a, name) is not None) == has for name, has in wanted.items())
        assert (a.running_mean is not None) == (a.running_var is not None) == op.startswith("batch_norm")


def test_bytes_moved():
    assert [_peers.bytes_moved(op, (2, 3), "float32") // 24 for op in _peers.OPS] == [2, 2, 3, 3, 4, 4, 5, 5, 2, 2, 3]
    assert _peers.bytes_moved("layer_norm", (2, 3), "bfloat16") == 24


def test_what_does_not_exist_is_unavailable():
    with pytest.raises(_peers.Unavailable, match="channels"):
        _peers.make_arrays("batch_norm", (8,))
    with pytest.raises(ValueError, match="op"):
        _peers.make_arrays("group_norm", (8, 8))
    with pytest.raises(ValueError, match="implementation"):
        _peers.make_call("mxnet", _peers.make_arrays("layer_norm", (8, 8)))
    assert issubclass(_peers.Unavailable, NotImplementedError)


def test_an_older_fastnorm_has_fewer_ops(monkeypatch):
    a = _peers.make_arrays("add_rms_norm", (8, 8))
    monkeypatch.delattr(fastnorm, "add_rms_norm")
    with pytest.raises(_peers.Unavailable, match="has no add_rms_norm"):
        _peers.make_call("fastnorm", a)


def test_the_file_loads_by_its_path_and_imports_no_peer():
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("peers_by_path", {str(ROOT / "fastnorm" / "_peers.py")!r})
peers = importlib.util.module_from_spec(spec)
sys.modules["peers_by_path"] = peers
spec.loader.exec_module(peers)
found = peers.installed()
assert tuple(found) == peers.IMPLEMENTATIONS and found["fastnorm"]
assert not set(sys.modules) & {{"torch", "numba", "jax", "onnxruntime", "onnx", "cupy"}}
assert peers.make_call("numpy", peers.make_arrays("layer_norm", (4, 8)))().shape == (4, 8)
"""
    run_python(code)


def test_without_any_of_them():
    code = """
import sys
for name in ("torch", "numba", "jax", "onnxruntime", "onnx", "cupy", "ml_dtypes"):
    sys.modules[name] = None
from fastnorm import _peers
for name in ("torch", "numba", "jax", "onnxruntime", "cupy", "fastnorm cupy"):
    assert isinstance(_peers.installed()[name], _peers.Unavailable)
    try:
        _peers.make_call(name, _peers.make_arrays("layer_norm", (4, 8)))
    except _peers.Unavailable as reason:
        assert "installed" in str(reason), reason
    else:
        raise AssertionError(name)
try:
    _peers.make_arrays("layer_norm", (4, 8), "bfloat16")
except _peers.Unavailable as reason:
    assert "ml_dtypes" in str(reason)
else:
    raise AssertionError
"""
    run_python(code)


@pytest.mark.parametrize("op", _peers.OPS)
@pytest.mark.parametrize("implementation", ["cupy", "fastnorm cupy"])
def test_calls_of_cupy_wait_for_the_device(implementation, op, monkeypatch):
    """With a CuPy that has NumPy's arrays."""
    waited = []
    stream = types.SimpleNamespace(synchronize=lambda: waited.append(1))
    runtime = types.SimpleNamespace(getDeviceCount=lambda: 1)
    cuda = types.SimpleNamespace(runtime=runtime, get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(asarray=np.array, cuda=cuda))
    a = _peers.make_arrays(op, (24, 40))
    call = _peers.make_call(implementation, a)
    assert waited == [1]
    assert_right(call, a)
    assert waited == [1, 1]
