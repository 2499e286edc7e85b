"""How to call fastnorm, and what one would use in its place, for every op: what `python -m fastnorm bench` and
benchmarks/ measure.

Only NumPy and public functions of fastnorm are imported here, and everything else when it is asked for: this file is
also loaded by its path, beside an older fastnorm.

What the peers are:

- numpy, cupy, jax: the formulas below, as one writes them with arrays; 16-bit arrays are widened to float32 first,
  without which NumPy would be wrong. JAX compiles them, on its CPU device. It has one pool of threads for the process,
  on all processors, whatever n_threads says (OWN_THREADS).
- numba: loops over rows, compiled with fastmath, in parallel if n_threads > 1; float32 and float64.
- torch: its native functions. They return fresh memory (mostly what was freed just before); only batch_norm has an out
  that is no copy. The backward of rms_norm is that of autograd, from a graph that was built outside of the call.
- onnxruntime: models of one node, bound to arrays that are there already.
- copy: np.copyto of an array like x; with threads, of as many parts of it at once.

In add_*, alpha is 1: onnxruntime has no other. In add_*_backward it is 0.5, so that dresidual is an array of its own.
"""
import functools
import importlib
import importlib.metadata
import importlib.util
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import fastnorm

OPS = (
    "layer_norm", "rms_norm", "layer_norm_backward", "rms_norm_backward",
    "add_layer_norm", "add_rms_norm", "add_layer_norm_backward", "add_rms_norm_backward",
    "batch_norm", "batch_norm_evaluation", "batch_norm_backward",
)
IMPLEMENTATIONS = ("fastnorm", "numpy", "numba", "torch", "jax", "onnxruntime", "cupy", "fastnorm cupy", "copy")
DTYPES = ("float16", "bfloat16", "float32", "float64")
# Those that n_threads does not reach.
OWN_THREADS = ("numpy", "jax", "cupy", "fastnorm cupy")

EPS = 1e-5
ALPHA = 0.5
MOMENTUM = 0.1
# Below that, waking threads costs more than they save.
PARALLEL_COPY_BYTES = 2**20


class Unavailable(NotImplementedError):
    """There is no such call here, and why: asv skips a benchmark whose setup raises this."""


# ---------------------------------------------------------------------------------------------
# What is here
# ---------------------------------------------------------------------------------------------

# What to import for an implementation, and the distributions that may bring it.
_LIBRARIES = {
    "numba": ("numba", ("numba",)),
    "torch": ("torch", ("torch",)),
    "jax": ("jax", ("jax",)),
    "onnxruntime": ("onnxruntime", ("onnxruntime", "onnxruntime-gpu")),
    "cupy": ("cupy", ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")),
}


def installed():
    """The version of every implementation, or an `Unavailable` that says what is missing; nothing is imported."""
    found = {"fastnorm": fastnorm.__version__, "numpy": np.__version__, "copy": np.__version__}
    for name, library in _LIBRARIES.items():
        found[name] = _version(*library)
    if not is_here("onnx"):
        found["onnxruntime"] = Unavailable("onnx is not installed: it makes the models")
    found["fastnorm cupy"] = found["cupy"] if isinstance(found["cupy"], Unavailable) else fastnorm.__version__
    return {name: found[name] for name in IMPLEMENTATIONS}


def is_here(module):
    """Whether a module can be imported, without doing so."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(module, distributions):
    if not is_here(module):
        return Unavailable(f"{module} is not installed")
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "unknown"


def _library(name):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{name} is not installed" if not is_here(name) else f"{name}: {error}") from error


# ---------------------------------------------------------------------------------------------
# Arrays
# ---------------------------------------------------------------------------------------------

@dataclass
class Arrays:
    """The arguments of an op; those that it does not have are None. In add_*_backward, x is h, the sum."""
    op: str
    axis: int | tuple[int, ...]
    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    out: np.ndarray
    dy: np.ndarray | None = None
    residual: np.ndarray | None = None
    dh: np.ndarray | None = None
    residual_out: np.ndarray | None = None
    running_mean: np.ndarray | None = None
    running_var: np.ndarray | None = None

    @property
    def axes(self):
        """The axes that are normalized over."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        axes = {a % self.x.ndim for a in axes}
        if self.op.startswith("batch_norm"):
            axes = set(range(self.x.ndim)) - axes
        return tuple(sorted(axes))


def make_arrays(op, shape, dtype="float32", axis=None):
    """Arrays for an op, with a mean that is not 0.

    axis: what is normalized over, -1 if None; for batch_norm the channels, 1 if None. All memory has been written to,
    so that no page fault is timed.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    dtype = _dtype(dtype)
    batch = op.startswith("batch_norm")
    axis = (1 if batch else -1) if axis is None else axis
    if batch and not -len(shape) <= axis < len(shape):
        raise Unavailable(f"batch_norm needs an axis {axis} of channels")
    parameters = tuple(shape[a] for a in (axis if isinstance(axis, tuple) else (axis,)))
    rng = np.random.default_rng(0)
    values = functools.partial(_values, rng, dtype=dtype)
    arrays = Arrays(op, axis, values(shape, mean=0.5), values(parameters), values(parameters), np.ones(shape, dtype))
    if op.endswith("_backward"):
        arrays.dy = values(shape)
    if op.startswith("add_"):
        if op.endswith("_backward"):
            arrays.dh = values(shape)
        else:
            arrays.residual, arrays.residual_out = values(shape), np.ones(shape, dtype)
    if batch:
        arithmetic = np.float64 if dtype == np.float64 else np.float32
        arrays.running_mean = rng.standard_normal(parameters, dtype=arithmetic)
        arrays.running_var = 0.5 + rng.random(parameters, dtype=arithmetic)
    return arrays


def _dtype(name):
    if name == "bfloat16":
        return np.dtype(_library("ml_dtypes").bfloat16)
    return np.dtype(name)


def _values(rng, shape, *, dtype, mean=0.0):
    """Normal numbers; the same again after a million, since making them takes longer than the ops."""
    some = rng.standard_normal(min(math.prod(shape), 2**20), dtype=np.float32)
    some += np.float32(mean)
    return np.resize(some.astype(dtype), shape)


def bytes_moved(op, shape, dtype="float32"):
    """The least that has to go through memory: every array of the shape of x once. Parameters are not counted."""
    arrays = (5 if op.startswith("add_") else 3) if op.endswith("_backward") else 4 if op.startswith("add_") else 2
    itemsize = 2 if str(dtype) == "bfloat16" else np.dtype(dtype).itemsize
    return arrays * math.prod(shape) * itemsize


# ---------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------

def make_call(implementation, arrays, n_threads=1):
    """A call without arguments that does the op of the arrays once; it has been called once already.

    It returns what the op returns, in arrays of its library, and writes into arrays.out where it can. The number of
    threads is a setting of the process in most libraries: it is made here, and holds until the next make_call.

    Raises Unavailable, with the reason, if there is no such call here.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    make = globals()[f"_{implementation.replace(' ', '_')}"]
    if implementation == "fastnorm":
        call = make(arrays, n_threads)
        call()
        return call
    try:
        call = make(arrays, n_threads)
        call()
    except Unavailable:
        raise
    except Exception as error:
        # A peer says in its own way that it has no such op or dtype.
        text = (str(error).strip() or "without a word").splitlines()[0]
        raise Unavailable(f"{type(error).__name__}: {text[:160]}") from error
    return call


# ---- fastnorm -------------------------------------------------------------------------------

def _fastnorm(a, n_threads):
    fastnorm.set_num_threads(n_threads)
    return _ours(a)


def _public(name):
    """An older fastnorm may lack it."""
    if not hasattr(fastnorm, name):
        raise Unavailable(f"fastnorm {fastnorm.__version__} has no {name}")
    return getattr(fastnorm, name)


def _ours(a):
    """fastnorm's call, for arrays of NumPy or CuPy. Spelled out: unpacking arguments takes as long as a tiny call."""
    op, axis, x, dy, dh, residual, out, h_out = a.op, a.axis, a.x, a.dy, a.dh, a.residual, a.out, a.residual_out
    weight, bias = a.weight, a.bias
    if op in ("batch_norm", "batch_norm_evaluation"):
        f, training, mean, var = _public("batch_norm"), op == "batch_norm", a.running_mean, a.running_var
        return lambda: f(x, weight, bias, mean, var, training=training, axis=axis, out=out)
    f = _public(op)
    if op == "layer_norm":
        return lambda: f(x, weight, bias, axis=axis, out=out)
    if op == "rms_norm":
        return lambda: f(x, weight, axis=axis, out=out)
    if op == "add_layer_norm":
        return lambda: f(x, residual, weight, bias, axis=axis, out=out, residual_out=h_out)
    if op == "add_rms_norm":
        return lambda: f(x, residual, weight, axis=axis, out=out, residual_out=h_out)
    forward = _public(op.removeprefix("add_").replace("backward", "forward"))
    options = {"training": True} if op == "batch_norm_backward" else {}
    _, *statistics = forward(x, axis=axis, out=out, **options)
    mean, rstd = statistics[0], statistics[-1]
    if op in ("layer_norm_backward", "batch_norm_backward"):
        return lambda: f(dy, x, mean, rstd, weight, axis=axis, out=out)
    if op == "rms_norm_backward":
        return lambda: f(dy, x, rstd, weight, axis=axis, out=out)
    if op == "add_layer_norm_backward":
        return lambda: f(dy, dh, x, mean, rstd, weight, alpha=ALPHA, axis=axis, out=out)
    return lambda: f(dy, dh, x, rstd, weight, alpha=ALPHA, axis=axis, out=out)


def _fastnorm_cupy(a, n_threads):
    cupy = _cupy_with_a_device()
    on_device = {k: cupy.asarray(v) if isinstance(v, np.ndarray) else v for k, v in vars(a).items()}
    return _synchronized(cupy, _ours(Arrays(**on_device)))


def _cupy_with_a_device():
    cupy = _library("cupy")
    try:
        n = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise Unavailable("CuPy finds no device") from error
    if n == 0:
        raise Unavailable("CuPy finds no device")
    return cupy


def _synchronized(cupy, call):
    stream = cupy.cuda.get_current_stream()

    def synchronized():
        result = call()
        stream.synchronize()
        return result

    return synchronized


# ---- The formulas, as one writes them with NumPy, CuPy or JAX ---------------------------------
#
# axis: what is normalized over. weight and bias broadcast against x; for the last axis they do so as they are.

def numpy_layer_norm(x, weight, bias, axis=-1, eps=EPS):
    """y."""
    mean = x.mean(axis=axis, keepdims=True)
    var = x.var(axis=axis, keepdims=True)
    return (x - mean) / (var + eps) ** 0.5 * weight + bias


def numpy_rms_norm(x, weight, axis=-1, eps=EPS):
    """y."""
    return x / ((x * x).mean(axis=axis, keepdims=True) + eps) ** 0.5 * weight


def numpy_layer_norm_backward(dy, x, mean, rstd, weight, axis=-1):
    """dx, dweight and dbias."""
    rows = _other_axes(x, axis)
    x_hat = (x - mean) * rstd
    wdy = dy * weight
    dx = rstd * (wdy - wdy.mean(axis=axis, keepdims=True) - x_hat * (wdy * x_hat).mean(axis=axis, keepdims=True))
    return dx, (dy * x_hat).sum(axis=rows), dy.sum(axis=rows)


def numpy_rms_norm_backward(dy, x, rstd, weight, axis=-1):
    """dx and dweight."""
    x_hat = x * rstd
    wdy = dy * weight
    dx = rstd * (wdy - x_hat * (wdy * x_hat).mean(axis=axis, keepdims=True))
    return dx, (dy * x_hat).sum(axis=_other_axes(x, axis))


def numpy_add_layer_norm(x, residual, weight, bias, axis=-1):
    """y and h."""
    h = x + residual
    return numpy_layer_norm(h, weight, bias, axis), h


def numpy_add_rms_norm(x, residual, weight, axis=-1):
    """y and h."""
    h = x + residual
    return numpy_rms_norm(h, weight, axis), h


def numpy_add_layer_norm_backward(dy, dh, h, mean, rstd, weight, axis=-1):
    """dx, dresidual, dweight and dbias."""
    dx, dweight, dbias = numpy_layer_norm_backward(dy, h, mean, rstd, weight, axis)
    dx = dx + dh
    return dx, ALPHA * dx, dweight, dbias


def numpy_add_rms_norm_backward(dy, dh, h, rstd, weight, axis=-1):
    """dx, dresidual and dweight."""
    dx, dweight = numpy_rms_norm_backward(dy, h, rstd, weight, axis)
    dx = dx + dh
    return dx, ALPHA * dx, dweight


def numpy_batch_norm(x, weight, bias, running_mean, running_var, axis=0):
    """y and the new running statistics; axis: all but the channels."""
    mean = x.mean(axis=axis, keepdims=True)
    var = x.var(axis=axis, keepdims=True)
    y = (x - mean) * (weight / (var + EPS) ** 0.5) + bias
    n = x.size // mean.size
    running_mean = (1 - MOMENTUM) * running_mean + MOMENTUM * mean
    return y, running_mean, (1 - MOMENTUM) * running_var + MOMENTUM * n / (n - 1) * var


def numpy_batch_norm_evaluation(x, weight, bias, running_mean, running_var, axis=0):
    """y."""
    scale = weight / (running_var + EPS) ** 0.5
    return x * scale + (bias - running_mean * scale)


def numpy_batch_norm_backward(dy, x, mean, rstd, weight, axis=0):
    """dx, dweight and dbias."""
    x_hat = (x - mean) * rstd
    dweight, dbias = (dy * x_hat).sum(axis=axis, keepdims=True), dy.sum(axis=axis, keepdims=True)
    n = x.size // dweight.size
    dx = weight * rstd * (dy - dbias / n - x_hat * (dweight / n))
    return dx, dweight.reshape(-1), dbias.reshape(-1)


def _other_axes(x, axis):
    axes = {a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,))}
    return tuple(a for a in range(x.ndim) if a not in axes)


def _formula(a):
    """The formula of an op, and its arguments as arrays of NumPy."""
    axes = a.axes
    ours = a.axis if isinstance(a.axis, tuple) else (a.axis,)
    ours = {k % a.x.ndim for k in ours}
    weight, bias, running_mean, running_var = (
        None if p is None else p.reshape([n if k in ours else 1 for k, n in enumerate(a.x.shape)])
        for p in (a.weight, a.bias, a.running_mean, a.running_var))
    parameters = (weight,) if "rms" in a.op else (weight, bias)
    if a.op.endswith("_backward"):
        first = (a.dy, a.x) if a.dh is None else (a.dy, a.dh, a.x)
        arguments = (*first, *_statistics(a, axes), weight)
    elif a.op.startswith("batch_norm"):
        arguments = (a.x, weight, bias, running_mean, running_var)
    elif a.residual is not None:
        arguments = (a.x, a.residual, *parameters)
    else:
        arguments = (a.x, *parameters)
    formula = functools.partial(globals()[f"numpy_{a.op}"], axis=axes)
    return _in_float32(formula, a.x) if a.x.dtype.itemsize == 2 else formula, arguments


def _statistics(a, axes):
    """mean and rstd of x, for rms_norm rstd only, in the arithmetic type."""
    x = a.x.astype(np.float64)
    dtype = np.float64 if a.x.dtype == np.float64 else np.float32
    if "rms" in a.op:
        return ((1 / np.sqrt((x * x).mean(axis=axes, keepdims=True) + EPS)).astype(dtype),)
    mean, var = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
    return mean.astype(dtype), (1 / np.sqrt(var + EPS)).astype(dtype)


def _in_float32(formula, x):
    """A formula for 16-bit arrays: its results of the shape of x are rounded, the others stay float32."""
    dtype, shape = x.dtype, x.shape

    def widened(*arrays):
        results = formula(*(v if v.dtype == "float32" else v.astype("float32") for v in arrays))
        if not isinstance(results, tuple):
            return results.astype(dtype)
        return tuple(r.astype(dtype) if r.shape == shape else r for r in results)

    return widened


def _numpy(a, n_threads):
    formula, arguments = _formula(a)
    return lambda: formula(*arguments)


def _cupy(a, n_threads):
    cupy = _cupy_with_a_device()
    formula, arguments = _formula(a)
    arguments = [cupy.asarray(v) for v in arguments]
    return _synchronized(cupy, lambda: formula(*arguments))


def _jax(a, n_threads):
    if a.x.dtype == np.float64:
        raise Unavailable("no float64 unless the whole process is set to it")
    jax = _library("jax")
    formula, arguments = _formula(a)
    cpu = jax.devices("cpu")[0]
    arguments = [jax.device_put(v, cpu) for v in arguments]
    compiled = jax.jit(formula)
    return lambda: jax.block_until_ready(compiled(*arguments))


# ---- Peers that know the last axis only --------------------------------------------------------

def _matrix(a, v):
    """A view of rows and columns."""
    if a.axes != (a.x.ndim - 1,):
        raise Unavailable("called for the last axis only")
    return None if v is None else v.reshape(-1, a.x.shape[-1])


# ---- numba -----------------------------------------------------------------------------------

def _numba(a, n_threads):
    numba = _library("numba")
    if a.op.startswith("batch_norm"):
        raise Unavailable("no kernel of batch_norm was written for it")
    if a.x.dtype.itemsize == 2:
        raise Unavailable("no 16-bit floats on a CPU")
    numba.set_num_threads(n_threads)
    x, dy, dh, residual, out, h = (_matrix(a, v) for v in (a.x, a.dy, a.dh, a.residual, a.out, a.residual_out))
    weight, bias, centered = a.weight, a.bias, "layer" in a.op
    add, parallel = a.op.startswith("add_"), n_threads > 1
    if not a.op.endswith("_backward"):
        kernel = _numba_forward(centered, add, parallel)
        others = (residual, h) if add else (x, x)
        results = (a.out, a.residual_out) if add else a.out

        def forward():
            kernel(x, *others, weight, bias, out)
            return results

        return forward
    kernel = _numba_backward(centered, add, parallel)
    statistics = [v.reshape(-1) for v in _statistics(a, a.axes)]
    mean, rstd = statistics[0], statistics[-1]
    dresidual = np.ones_like(x) if add else x
    results = (a.out, dresidual.reshape(a.x.shape)) if add else (a.out,)
    dh = dh if add else dy

    def backward():
        dweight, dbias = kernel(dy, dh, x, mean, rstd, weight, out, dresidual, n_threads)
        return (*results, dweight, dbias) if centered else (*results, dweight)

    return backward


@functools.cache
def _numba_forward(centered, add, parallel):
    """The kernel of rows; what is not wanted of it costs nothing, for the flags are constants to the compiler."""
    numba = _library("numba")

    @numba.njit(parallel=parallel, fastmath=True)
    def forward(x, residual, h, weight, bias, y):
        n_rows, n_cols = x.shape
        real = x.dtype.type
        for i in numba.prange(n_rows):
            mean, total = real(0), real(0)
            for j in range(n_cols):
                value = x[i, j]
                if add:
                    value += residual[i, j]
                    h[i, j] = value
                total += value if centered else value * value
            if centered:
                mean, total = total / real(n_cols), real(0)
                for j in range(n_cols):
                    total += (h[i, j] - mean) * (h[i, j] - mean)
            rstd = real(1) / np.sqrt(total / real(n_cols) + real(EPS))
            for j in range(n_cols):
                if centered:
                    y[i, j] = (h[i, j] - mean) * rstd * weight[j] + bias[j]
                else:
                    y[i, j] = h[i, j] * rstd * weight[j]

    return forward


@functools.cache
def _numba_backward(centered, add, parallel):
    """The same; every thread has a part of the rows, and sums of its own for dweight and dbias."""
    numba = _library("numba")

    @numba.njit(parallel=parallel, fastmath=True)
    def backward(dy, dh, x, mean, rstd, weight, dx, dresidual, n_parts):
        n_rows, n_cols = x.shape
        real = x.dtype.type
        dweight, dbias = np.zeros((n_parts, n_cols), x.dtype), np.zeros((n_parts, n_cols), x.dtype)
        for part in numba.prange(n_parts):
            for i in range(part * n_rows // n_parts, (part + 1) * n_rows // n_parts):
                shift = mean[i] if centered else real(0)
                c1, c2 = real(0), real(0)
                for j in range(n_cols):
                    wdy = dy[i, j] * weight[j]
                    c1 += wdy * (x[i, j] - shift) * rstd[i]
                    if centered:
                        c2 += wdy
                c1, c2 = c1 / real(n_cols), c2 / real(n_cols)
                for j in range(n_cols):
                    x_hat = (x[i, j] - shift) * rstd[i]
                    value = rstd[i] * (dy[i, j] * weight[j] - c2 - x_hat * c1)
                    if add:
                        value += dh[i, j]
                        dresidual[i, j] = real(ALPHA) * value
                    dx[i, j] = value
                    dweight[part, j] += dy[i, j] * x_hat
                    if centered:
                        dbias[part, j] += dy[i, j]
        return dweight.sum(axis=0), dbias.sum(axis=0)

    return backward


# ---- PyTorch ---------------------------------------------------------------------------------

def _torch(a, n_threads):
    torch = _library("torch")
    torch.set_num_threads(n_threads)
    if a.op.startswith("batch_norm"):
        return _torch_batch_norm(torch, a)
    _matrix(a, a.x)
    x, weight, bias, dy = (_tensor(torch, v) for v in (a.x, a.weight, a.bias, a.dy))
    return (_torch_backward if a.op.endswith("_backward") else _torch_forward)(torch, a, x, weight, bias, dy)


def _tensor(torch, v):
    """The same memory. None of these wants a gradient, so that no graph is built."""
    if v is None:
        return None
    if v.dtype.name == "bfloat16":
        return torch.from_numpy(v.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(v)


def _torch_forward(torch, a, x, weight, bias, _):
    columns = x.shape[-1:]
    if "layer" in a.op:
        f = torch.nn.functional.layer_norm
        arguments = columns, weight, bias, EPS
    else:
        f = torch.nn.functional.rms_norm
        arguments = columns, weight, EPS
    if a.residual is None:
        return lambda: f(x, *arguments)
    residual, h = _tensor(torch, a.residual), _tensor(torch, a.residual_out)

    def add_norm():
        torch.add(x, residual, out=h)
        return f(h, *arguments), h

    return add_norm


def _torch_backward(torch, a, x, weight, bias, dy):
    columns = x.shape[-1:]
    if "layer" in a.op:
        f = torch.ops.aten.native_layer_norm_backward
        _, mean, rstd = torch.native_layer_norm(x, columns, weight, bias, EPS)
        wanted = [True, True, True]

        def norm_backward():
            return f(dy, x, columns, mean, rstd, weight, bias, wanted)
    else:
        # On the CPU there is no native one.
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = torch.nn.functional.rms_norm(leaves[0], columns, leaves[1], EPS)

        def norm_backward():
            return torch.autograd.grad(y, leaves, dy, retain_graph=True)
    if a.dh is None:
        return norm_backward
    dh, dresidual = _tensor(torch, a.dh), torch.ones_like(x)

    def add_norm_backward():
        dx, *gradients = norm_backward()
        dx.add_(dh)
        torch.mul(dx, ALPHA, out=dresidual)
        return dx, dresidual, *gradients

    return add_norm_backward


def _torch_batch_norm(torch, a):
    channels_last = a.axis in (-1, a.x.ndim - 1) and a.x.ndim in (4, 5)
    if a.axis != 1 and not channels_last:
        raise Unavailable("channels on axis 1, or last in images, only")
    # Its channels_last format is the view that has them on axis 1.
    x, out, dy = (None if v is None else _tensor(torch, v).movedim(a.axis, 1) for v in (a.x, a.out, a.dy))
    # Beside 16-bit images it wants all parameters in one dtype.
    weight, bias, mean, var = (_tensor(torch, v.astype(a.running_mean.dtype, copy=False))
                               for v in (a.weight, a.bias, a.running_mean, a.running_var))
    if a.op == "batch_norm_backward":
        f = torch.ops.aten.native_batch_norm_backward
        _, save_mean, save_rstd = torch.ops.aten.native_batch_norm(x, weight, bias, None, None, True, MOMENTUM, EPS)
        wanted = [True, True, True]

        def backward():
            dx, *gradients = f(dy, x, weight, None, None, save_mean, save_rstd, True, EPS, wanted)
            return dx.movedim(1, a.axis), *gradients

        return backward
    f, training = torch.ops.aten.native_batch_norm.out, a.op == "batch_norm"
    saved = [torch.zeros_like(mean) for _ in range(2)] if training else [mean.new_zeros(0) for _ in range(2)]
    y = out.movedim(1, a.axis)

    def forward():
        f(x, weight, bias, mean, var, training, MOMENTUM, EPS, out=out, save_mean=saved[0], save_invstd=saved[1])
        return y

    return forward


# ---- onnxruntime -----------------------------------------------------------------------------

# The node, its domain, inputs and outputs. Of onnx's own RMSNormalization the CPU has no kernel, but of this one.
_NODES = {
    "layer_norm": ("LayerNormalization", "", ("x", "weight", "bias"), ("out",)),
    "rms_norm": ("SimplifiedLayerNormalization", "", ("x", "weight"), ("out",)),
    "add_layer_norm": ("SkipLayerNormalization", "com.microsoft", ("x", "residual", "weight", "bias"),
                       ("out", "", "", "residual_out")),
    "add_rms_norm": ("SkipSimplifiedLayerNormalization", "com.microsoft", ("x", "residual", "weight"),
                     ("out", "", "", "residual_out")),
    "batch_norm_evaluation": ("BatchNormalization", "",
                              ("x", "weight", "bias", "running_mean", "running_var"), ("out",)),
}


def _onnxruntime(a, n_threads):
    if a.op not in _NODES:
        raise Unavailable("no gradients, no training")
    if a.x.dtype.name == "bfloat16":
        raise Unavailable("no bfloat16 arrays")
    if a.op == "batch_norm_evaluation" and a.axis != 1:
        raise Unavailable("channels on axis 1 only")
    onnxruntime = _library("onnxruntime")
    _, _, inputs, outputs = _NODES[a.op]
    arrays = {name: getattr(a, name) for name in (*inputs, *outputs) if name}
    if not a.op.startswith("batch_norm"):
        # The nodes with a residual want three dimensions.
        arrays = {k: v if v.ndim == 1 else _matrix(a, v)[None] for k, v in arrays.items()}
    # BatchNormalization wants its parameters in the dtype of x.
    arrays = {k: v.astype(a.x.dtype, copy=False) for k, v in arrays.items()}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = n_threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(_model(a, arrays), options, providers=["CPUExecutionProvider"])
    values = {k: onnxruntime.OrtValue.ortvalue_from_numpy(v) for k, v in arrays.items()}
    binding = session.io_binding()
    for name in inputs:
        binding.bind_ortvalue_input(name, values[name])
    for name in filter(None, outputs):
        binding.bind_ortvalue_output(name, values[name])
    results = a.out if a.residual is None else (a.out, a.residual_out)
    run = session.run_with_iobinding

    def call():
        run(binding)
        return results

    # What is bound is memory of these.
    call.arrays = arrays
    return call


def _model(a, arrays):
    """A model of one node, in bytes."""
    helper = _library("onnx.helper")
    name, domain, inputs, outputs = _NODES[a.op]
    options = {} if domain or a.op.startswith("batch_norm") else {"axis": -1}
    node = helper.make_node(name, inputs, outputs, domain=domain, epsilon=EPS, **options)
    kind = helper.np_dtype_to_tensor_dtype(a.x.dtype)
    described = [[helper.make_tensor_value_info(k, kind, arrays[k].shape) for k in names if k]
                 for names in (inputs, outputs)]
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], a.op, *described), opset_imports=versions,
                             ir_version=8).SerializeToString()


# ---- A copy ----------------------------------------------------------------------------------

def _copy(a, n_threads):
    x, out = _copy_arrays(a.x)
    if n_threads == 1 or x.nbytes < PARALLEL_COPY_BYTES:
        def copy():
            np.copyto(out, x)
            return out

        return copy
    (first_out, first), *others = zip(np.array_split(out, n_threads), np.array_split(x, n_threads), strict=True)
    pool = _copy_pool(n_threads - 1)

    def parallel_copy():
        running = [pool.submit(np.copyto, *pair) for pair in others]
        np.copyto(first_out, first)
        for part in running:
            part.result()
        return out

    return parallel_copy


def _copy_arrays(x):
    """The values of x as bytes, and as many to copy them to, half a page apart from where they would hinder each other.

    Where the target lies some bytes further than the source, but for whole pages, some processors (Zen 3) copy at a
    thirtieth of their speed: that would be no roof.
    """
    page, n = 4096, x.nbytes
    memory = np.ones(2 * n + 3 * page, np.uint8)
    start = -memory.ctypes.data % page
    out = memory[start:start + n]
    start += -(-n // page) * page + page // 2
    source = memory[start:start + n]
    source[...] = x.reshape(-1).view(np.uint8)
    return source, out


@functools.cache
def _copy_pool(n_threads):
    return ThreadPoolExecutor(n_threads, "copy")
