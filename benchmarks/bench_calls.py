"""What a tiny call costs: checks, allocation and dispatch, beside a ufunc on the same arrays."""
import timeit
from types import SimpleNamespace

import numpy as np

import fastnorm

try:
    from fastnorm import layers
except ImportError:
    layers = None

STATEMENTS = [
    "np.add(x, x, out=y)",
    "np.add(x, x)",
    "layer_norm(x, weight, bias, out=y)",
    "layer_norm(x, weight, bias)",
    "layer_norm_forward(x, weight, bias)",
    "layer_norm_backward(dy, x, mean, rstd, weight, out=dx)",
    "layer_norm_backward(dy, x, mean, rstd, weight)",
    "rms_norm(x, weight, out=y)",
    "rms_norm(x, weight)",
    "rms_norm_forward(x, weight)",
    "rms_norm_backward(dy, x, rms_rstd, weight, out=dx)",
    "rms_norm_backward(dy, x, rms_rstd, weight)",
    # The rest of the family, and layers beside the functions that they call.
    "add_layer_norm(x, residual, weight, bias, out=y, residual_out=h)",
    "add_layer_norm_backward(dy, dh, x, mean, rstd, weight)",
    "batch_norm(rows, weight, bias, running_mean, running_var, training=True)",
    "batch_norm(rows, weight, bias, running_mean, running_var)",
    "batch_norm_forward(rows, weight, bias, running_mean, running_var, training=True)",
    "layers.batch_norm(rows)",
    "layers.layer_norm(x)",
    "layers.rms_norm(x)",
    "layers.layer_norm.forward_sum(x, residual)",
    # Other types, and what is not contiguous and trailing.
    "layer_norm(x16, weight, bias, out=y16)",
    "layer_norm(x16, weight16, bias16, out=y16)",
    "layer_norm(x, weight, bias, axis=(1,), out=y)",
    "layer_norm(x.T, weight, bias, axis=0)",
]


class TinyCall:
    """A thousand calls on one row of 64 float32 (x16, y16: float16): milliseconds are microseconds a call."""

    params = [STATEMENTS]
    param_names = ["statement"]
    repeat = (10, 100, 1.0)

    def setup(self, statement):
        rng = np.random.default_rng(0)
        x, dy = rng.standard_normal((2, 1, 64), dtype=np.float32)
        weight, bias = rng.standard_normal((2, 64), dtype=np.float32)
        _, mean, rstd = fastnorm.layer_norm_forward(x)
        _, rms_rstd = fastnorm.rms_norm_forward(x)
        names = dict(x=x, dy=dy, weight=weight, bias=bias, mean=mean, rstd=rstd, rms_rstd=rms_rstd,
                     y=np.ones_like(x), dx=np.ones_like(x), np=np)
        names |= {name + "16": names[name].astype(np.float16) for name in ("x", "y", "weight", "bias")}
        names |= dict(residual=dy.copy(), dh=dy.copy(), h=np.ones_like(x))
        names |= dict(rows=rng.standard_normal((2, 64), dtype=np.float32),
                      running_mean=np.zeros(64, np.float32), running_var=np.ones(64, np.float32))
        if layers is not None and hasattr(layers, "BatchNorm"):
            names["layers"] = SimpleNamespace(
                layer_norm=layers.LayerNorm(64, dtype=np.float32), rms_norm=layers.RMSNorm(64, dtype=np.float32),
                batch_norm=layers.BatchNorm(64, dtype=np.float32))
        functions = {name: getattr(fastnorm, name) for name in fastnorm.__all__}
        # timeit compiles the statement: no lambda and no attribute look-up is timed with it.
        self.calls = timeit.Timer(statement, globals=functions | names)
        self.calls.timeit(100)

    def time_1000_calls(self, statement):
        self.calls.timeit(1000)
