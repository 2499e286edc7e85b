"""Against the reference implementation of the ONNX operators, which is plain NumPy and nobody's kernel."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
from helpers import BFLOAT16  # noqa: E402
from onnx import TensorProto, defs, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

import fastnorm  # noqa: E402

OPSET = 23 if defs.onnx_opset_version() >= 23 else 17
TYPES = {np.float16: TensorProto.FLOAT16, np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}
TOLERANCE = {np.float16: 4e-3, np.float32: 3e-5, np.float64: 1e-12}


def run_onnx(op, inputs, outputs, axis, eps, dtype):
    names = ["x", "w", "b"][: len(inputs)]
    node = helper.make_node(op, names, outputs, axis=axis, epsilon=eps)
    graph = helper.make_graph(
        [node],
        "norm",
        [helper.make_tensor_value_info(n, TYPES[dtype], None) for n in names],
        [helper.make_tensor_value_info(n, TYPES[dtype], None) for n in outputs],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("axis", [-1, 1, 0, -2])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
def test_layer_norm_is_layer_normalization_17(dtype, axis, biased, rng):
    x = (rng.standard_normal((3, 4, 50)) + 2).astype(dtype)
    axes = tuple(range(axis % 3, 3))
    w, b = rng.standard_normal((2, *x.shape[axis % 3 :])).astype(dtype)
    eps = float(np.float32(1e-3))
    inputs = [x, w, b] if biased else [x, w]
    theirs = run_onnx("LayerNormalization", inputs, ["y", "mean", "rstd"], axis, eps, dtype)
    mine = fastnorm.layer_norm_forward(x, w, b if biased else None, axis=axes, eps=eps)
    assert mine[0].dtype == dtype
    for p, q in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(p.astype(float), q.astype(float), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.skipif(OPSET < 23, reason="this onnx has no RMSNormalization")
@pytest.mark.parametrize("axis", [-1, 1, 0])
@pytest.mark.parametrize("dtype", TYPES, ids=lambda t: t.__name__)
def test_rms_norm_is_rms_normalization_23(dtype, axis, rng):
    x = (rng.standard_normal((3, 4, 50)) + 2).astype(dtype)
    w = rng.standard_normal(x.shape[axis % 3 :]).astype(dtype)
    eps = float(np.float32(1e-3))
    [theirs] = run_onnx("RMSNormalization", [x, w], ["y"], axis, eps, dtype)
    mine = fastnorm.rms_norm(x, w, axis=tuple(range(axis % 3, 3)), eps=eps)
    np.testing.assert_allclose(mine.astype(float), theirs.astype(float), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_bfloat16_is_float32_rounded_once(rng):
    """The operator has no bfloat16 reference; the float32 one, rounded, is within one bfloat16 step."""
    x = rng.standard_normal((3, 4, 50)).astype(BFLOAT16)
    w = rng.standard_normal(50).astype(np.float32)
    theirs = run_onnx("LayerNormalization", [x.astype(np.float32), w], ["y"], -1, float(np.float32(1e-5)), np.float32)[
        0
    ]
    np.testing.assert_allclose(fastnorm.layer_norm(x, w).astype(float), theirs, rtol=2.0**-8, atol=1e-6)
