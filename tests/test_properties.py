"""Whatever the dtype, shape, axes, strides, weight, bias and eps: the result is that of reference.py."""

import ml_dtypes
import numpy as np
from helpers import (
    BFLOAT16,
    FLOATS,
    INTEGERS,
    LAYOUTS,
    NORMS,
    backward_of,
    exact,
    exact_gradients,
    forward_of,
    is_centered,
)
from hypothesis import given
from hypothesis import strategies as st

import fastnorm

SIDES = st.one_of(st.integers(0, 4), st.sampled_from([1, 1, 7, 16, 17, 33, 40, 65]))
SHAPES = st.lists(SIDES, min_size=1, max_size=4).filter(lambda s: np.prod(s) <= 20_000)


@st.composite
def axes_of(draw, ndim):
    """None, an int, a tuple; negative or not."""
    if draw(st.booleans()):
        return draw(st.sampled_from([None, *range(-ndim, ndim)]))
    chosen = draw(st.permutations(range(ndim)))[: draw(st.integers(1, ndim))]
    return tuple(a - ndim if draw(st.booleans()) else a for a in chosen)


def laid_out(draw, a):
    layout = draw(st.sampled_from([None, *LAYOUTS]))
    if layout is None or a.size == 0 or a.ndim == 0:
        return a
    if draw(st.booleans()) and a.ndim > 1:
        # A stride of zero.
        k = draw(st.integers(0, a.ndim - 1))
        a = np.broadcast_to(a.take([0], axis=k), a.shape)
    return layout(a)


@st.composite
def calls(draw):
    shape = tuple(draw(SHAPES))
    axis = draw(axes_of(len(shape)))
    axes = tuple(range(len(shape))) if axis is None else tuple(sorted(a % len(shape) for a in np.atleast_1d(axis)))
    dtype = draw(st.sampled_from(FLOATS * 3 + INTEGERS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale, mean = draw(st.sampled_from([0.1, 1.0, 50.0])), draw(st.sampled_from([0.0, 1.0, 100.0]))
    numbers = rng.standard_normal(shape) * scale + mean
    if dtype.kind in "biu":
        numbers = np.clip(np.rint(numbers), 0 if dtype.kind != "i" else -100, 100)
    x = laid_out(draw, numbers.astype(dtype))
    parameter_dtypes = st.sampled_from([None, *FLOATS, np.dtype(np.int32)])
    parameters = []
    for _ in range(2):
        d = draw(parameter_dtypes)
        values = rng.standard_normal([shape[a] for a in axes]) * 2 + 1
        parameters.append(None if d is None else laid_out(draw, values.astype(d)))
    dy = laid_out(draw, (rng.standard_normal(shape) + 1).astype(draw(st.sampled_from(FLOATS))))
    eps = draw(st.sampled_from([1e-5, 1e-3, 0.5, np.float64(1e-5), np.float32(1e-3), 1]))
    return draw(st.sampled_from(NORMS)), x, dy, axis, axes, *parameters, eps


def as_native(a):
    """NumPy cannot cast byte-swapped bfloat16; the oracle and the comparison need it."""
    if a is not None and a.dtype.name == "bfloat16" and not a.dtype.isnative:
        return np.array(a, order="C").view(np.uint16).byteswap().view(BFLOAT16)
    return a


def snapshot(arrays):
    return [None if a is None else as_native(a).tobytes() for a in arrays]


def tolerance(dtype):
    return {"float16": 2e-3, "bfloat16": 2e-2, "float32": 4e-6}.get(dtype.name, 1e-13)


def assert_close(result, wanted, dtype, scale=1.0):
    wanted = wanted.astype(float)
    atol = tolerance(dtype) * scale * max(1.0, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(result.astype(float), wanted, rtol=tolerance(dtype), atol=atol)


def assert_plain(result, shape, dtype):
    assert type(result) is np.ndarray and result.shape == shape and result.dtype == dtype
    assert result.dtype.isnative and result.flags.c_contiguous and result.flags.writeable


def dtypes_of(x):
    """(result, arithmetic type)."""
    if x.dtype.kind in "biu":
        return np.dtype(float), np.dtype(float)
    return x.dtype.newbyteorder("="), np.dtype(float if x.dtype.name == "float64" else np.float32)


@given(calls())
def test_forward_is_the_formula(call):
    norm, x, _, axis, axes, weight, bias, eps = call
    affine = (weight, bias) if is_centered(norm) else (weight,)
    before = snapshot([x, *affine])
    y, *statistics = forward_of(norm)(x, *affine, axis=axis, eps=eps)
    assert snapshot([x, *affine]) == before
    result, arithmetic = dtypes_of(x)
    assert_plain(y, x.shape, result)
    keepdims = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    for s in statistics:
        assert_plain(s, keepdims, arithmetic)
    if x.size:
        wanted = exact(forward_of(norm), as_native(x), *map(as_native, affine), axis=axes, eps=float(eps))
        assert_close(y, wanted[0], result)
        for s, w in zip(statistics, wanted[1:], strict=True):
            assert_close(s, w, arithmetic)


@given(calls())
def test_backward_is_the_formula(call):
    norm, x, dy, axis, axes, weight, _, eps = call
    _, *statistics = forward_of(norm)(x, axis=axis, eps=eps)
    before = snapshot([x, dy, weight, *statistics])
    dx, *params = backward_of(norm)(dy, x, *statistics, weight, axis=axis)
    assert snapshot([x, dy, weight, *statistics]) == before
    result, arithmetic = dtypes_of(x)
    assert_plain(dx, x.shape, result)
    parameter_dtype = arithmetic if weight is None else dtypes_of(weight)[0]
    for p in params:
        assert_plain(p, tuple(x.shape[a] for a in axes), parameter_dtype)
    if x.size:
        wanted = exact_gradients(norm, as_native(dy), as_native(x), as_native(weight), axis=axes, eps=float(eps))
        rstd = float(np.max(statistics[-1]))
        largest = rstd * (1 if weight is None else float(np.abs(as_native(weight).astype(float)).max())) * 5
        assert_close(dx, wanted[0], result, scale=max(1.0, largest))
        # x_hat of a row with a large mean and hardly a spread has the digits that x has.
        for p, w in zip(params, wanted[1:], strict=True):
            assert_close(p, w, min((parameter_dtype, arithmetic), key=lambda d: ml_dtypes.finfo(d).bits), scale=10)
    else:
        for p in params:
            assert not p.astype(float).any()


@given(calls(), st.sampled_from(FLOATS))
def test_out_receives_what_is_returned_without_it(call, out_dtype):
    norm, x, _, axis, _, weight, _, eps = call
    out = np.zeros(x.shape, out_dtype)
    assert norm(x, weight, axis=axis, eps=eps, out=out) is out
    wide = norm(x, weight, axis=axis, eps=eps, out=np.zeros(x.shape, dtypes_of(x)[1]))
    plain = norm(x, weight, axis=axis, eps=eps)
    assert out.tobytes() == (plain if out_dtype == plain.dtype else wide.astype(out_dtype)).tobytes() or (
        # Casts of ml_dtypes from double go through float: here ours is the better one.
        out_dtype == BFLOAT16 and wide.dtype == np.float64
    )


@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from(FLOATS))
def test_any_row_length_agrees_with_the_formula(columns, rows, dtype):
    rng = np.random.default_rng(columns * 64 + rows)
    x = (rng.standard_normal((rows, columns)) + 1).astype(dtype)
    for norm in NORMS:
        for axis in (0, 1):
            assert_close(norm(x, axis=axis), exact(norm, x, axis=axis), dtype)


def test_the_strategies_cover_empty_arrays_and_scalars_are_refused():
    """0-d input has no axis; test_bad_input.py has the error."""
    assert fastnorm.layer_norm(np.empty((0, 3))).shape == (0, 3)
