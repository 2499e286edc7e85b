"""How far results are from those of fastnorm.reference, which computes in longdouble, apart from the kernels."""
import inspect
import os

import numpy as np

import fastnorm
from fastnorm import reference

from .common import DTYPES, OPS

EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
N_ROWS, N_COLUMNS = 64, 1000
FAMILIES = ["random", "large mean", "outlier"]


def make_values(op, dtype, family):
    """Arguments of any function of the family, by name. Channels stand where rows do."""
    rng = np.random.default_rng(0)
    x, residual, dy, dh = rng.standard_normal((4, N_ROWS, N_COLUMNS))
    is_channels = op.startswith("batch_norm")
    n = N_ROWS if is_channels else N_COLUMNS
    weight, bias, running_mean = rng.standard_normal((3, n))
    if family == "large mean":
        # Three bits are left for the spread of 1.
        x += 0.125 / EPS[dtype]
        running_mean += 0.125 / EPS[dtype]
    if family == "outlier":
        x[:, 5] = 1000
    arrays = dict(x=x, residual=residual, h=x, dy=dy, dh=dh, weight=weight, bias=bias)
    values = {name: a.astype(dtype_of(dtype)) for name, a in arrays.items()}
    return values | dict(running_mean=running_mean, running_var=0.5 + rng.random(n), axis=0 if is_channels else -1,
                         training=op != "batch_norm_evaluation")


def dtype_of(name):
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise NotImplementedError("ml_dtypes is not installed") from None
    return np.dtype(ml_dtypes.bfloat16)


def call(module, name, values):
    """The results of a function: y or dx, and what follows."""
    try:
        function = getattr(module, name)
    except AttributeError:
        raise NotImplementedError(f"this commit has no {name}") from None
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in values.items() if name in names})


def ours_and_exact(op, values):
    """y or dx."""
    norm = op.removesuffix("_evaluation")
    plain = norm.removeprefix("add_")
    if norm.endswith("_backward"):
        *_, mean, rstd = call(fastnorm, plain.removesuffix("_backward") + "_forward", values)
        # The exact one makes its own statistics.
        return call(fastnorm, norm, values | dict(mean=mean, rstd=rstd))[0], call(reference, norm, values)[0]
    ours, h, *_ = call(fastnorm, f"{norm}_forward", values)
    # A residual form normalizes what it stores: a sum that has been rounded.
    x = values["x"] if norm == plain else h
    return ours, call(reference, f"{plain}_forward", values | dict(x=x))[0]


def error_in_ulp(result, exact, eps):
    """The largest error, in units in the last place of the largest value of its row."""
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    ulp = np.ldexp(np.longdouble(eps), np.frexp(largest)[1] - 1)
    return float((np.abs(result.astype(np.longdouble) - exact) / ulp).max())


class Accuracy:
    """float16 and bfloat16 are rounded when they are stored: that alone is half a unit."""

    params = [OPS, DTYPES]
    param_names = ["op", "dtype"]

    def setup(self, op, dtype):
        if os.environ.get("FASTNORM_NUM_THREADS", "1") != "1":
            raise NotImplementedError("the bits are the same for any number of threads")
        self.results = [ours_and_exact(op, make_values(op, dtype, family)) for family in FAMILIES]

    def track_ulp(self, op, dtype):
        """Of the worst family."""
        return round(max(error_in_ulp(*results, EPS[dtype]) for results in self.results), 3)

    track_ulp.unit = "ulp"
