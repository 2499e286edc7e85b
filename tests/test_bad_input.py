"""Every refusal: its type, that its message names the argument, and that nothing was changed."""

import decimal

import numpy as np
import pytest
from helpers import FLOATS, NORMS, backward_of, forward_of, is_centered, name_of

import fastnorm

AxisError = np.exceptions.AxisError
ROWS, COLUMNS = 4, 8


class Call:
    """A call whose arguments are fine until one is replaced; all arrays are watched for changes."""

    def __init__(self, norm, backward=False, dtype=np.float32):
        rng = np.random.default_rng(0)
        self.norm = norm
        self.function = backward_of(norm) if backward else forward_of(norm)
        x = rng.standard_normal((ROWS, COLUMNS)).astype(dtype)
        self.arguments = {"x": x, "weight": np.ones(COLUMNS, dtype), "out": np.full((ROWS, COLUMNS), 9, dtype)}
        if backward:
            names = ("mean", "rstd") if is_centered(norm) else ("rstd",)
            self.arguments["dy"] = x.copy()
            self.arguments.update(zip(names, forward_of(norm)(x)[1:], strict=True))
        elif is_centered(norm):
            self.arguments["bias"] = np.ones(COLUMNS, dtype)

    def refuses(self, error, *texts, **replaced):
        """The call with the arguments replaced raises the error; texts are in its message."""
        arguments = {**self.arguments, **replaced}
        arrays = [a for a in arguments.values() if isinstance(a, np.ndarray) and a.dtype != object]
        before = [a.tobytes() for a in arrays]
        with pytest.raises(error) as caught:
            self.function(**arguments)
        for text in texts:
            assert text in str(caught.value), f"{text!r} is not in {str(caught.value)!r}"
        assert [a.tobytes() for a in arrays] == before, "an array was changed"


def calls(norm):
    return Call(norm), Call(norm, backward=True)


def array_names(call):
    return [n for n, a in call.arguments.items() if isinstance(a, np.ndarray)]


every_norm = pytest.mark.parametrize("norm", NORMS, ids=name_of)


@every_norm
def test_the_untouched_calls_of_this_file_work(norm):
    for call in calls(norm):
        call.function(**call.arguments)
        call.function(**{k: v for k, v in call.arguments.items() if k != "out"})


@pytest.mark.parametrize(
    "dtype",
    [np.complex64, np.complex128, np.longdouble, object, "U3", "S3", "M8[s]", "m8[s]", "V2", [("a", "f4")]],
    ids=str,
)
@every_norm
def test_dtypes_that_are_not_supported_are_a_type_error_that_names_what_is(norm, dtype):
    for call in calls(norm):
        for name in array_names(call):
            bad = np.empty(call.arguments[name].shape, dtype)
            if name in ("out", "mean", "rstd"):
                call.refuses(TypeError, f"{name}:", "float32", **{name: bad})
            else:
                call.refuses(TypeError, f"{name}:", "float16", "bfloat16", "float32", "float64", **{name: bad})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4"])
def test_small_types_of_ml_dtypes_are_refused(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    call = Call(fastnorm.layer_norm)
    call.refuses(TypeError, "x:", dtype, x=np.zeros((ROWS, COLUMNS), getattr(ml_dtypes, dtype)))


class Foreign:
    """An array of another library."""

    shape, dtype, ndim = (ROWS, COLUMNS), np.dtype(np.float32), 2

    def __dlpack__(self):
        raise AssertionError("nothing is transferred silently")

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("nothing is transferred silently")


@pytest.mark.parametrize(
    "value",
    [Foreign(), None, "text", b"bytes", {1: 2}, {1, 2}, memoryview(b"1234"), object()],
    ids=lambda v: type(v).__name__,
)
@every_norm
def test_what_is_no_array_is_a_type_error_that_names_from_dlpack(norm, value):
    for call in calls(norm):
        for name in array_names(call):
            if value is None and name in ("weight", "bias", "out"):
                continue
            texts = () if name == "out" else ("from_dlpack",)
            call.refuses(TypeError, f"{name}:", *texts, **{name: value})


@every_norm
def test_strings_and_ragged_lists_are_refused(norm):
    call = Call(norm)
    call.refuses(TypeError, "x:", x=["a", "b"], out=None)
    call.refuses(ValueError, x=[[1.0, 2.0], [3.0]], out=None)
    call.refuses(TypeError, "x:", x=[1j, 2.0], out=None)
    call.refuses(TypeError, "x:", x=[None, 2.0], out=None)
    call.refuses(TypeError, "x:", x=[decimal.Decimal(1)], out=None)


@pytest.mark.parametrize(
    "shape", [(7,), (9,), (1,), (16,), (8, 1), (1, 8), (), (0,), (ROWS, COLUMNS), (ROWS,)], ids=str
)
@pytest.mark.parametrize("dtype", FLOATS + [np.dtype(int)], ids=name_of)
@every_norm
def test_parameters_have_exactly_the_normalized_shape(norm, dtype, shape):
    """S07: length 1 is not broadcast; both shapes are in the message."""
    for call in calls(norm):
        for name in ("weight", "bias"):
            if name in call.arguments:
                call.refuses(ValueError, f"{name}:", str(shape), str((COLUMNS,)), **{name: np.ones(shape, dtype)})
                call.refuses(
                    ValueError, f"{name}:", str(shape), str((COLUMNS,)), **{name: np.ones(shape, dtype), "out": None}
                )


@every_norm
def test_parameters_of_several_axes_have_their_shape_in_the_order_of_x(norm):
    x = np.ones((2, 3, 4))
    for axis in ((1, 2), (2, 1)):
        norm(x, np.ones((3, 4)), axis=axis)
        with pytest.raises(ValueError, match=r"weight: .*\(4, 3\).*\(3, 4\)"):
            norm(x, np.ones((4, 3)), axis=axis)
        with pytest.raises(ValueError, match=r"weight: .*\(12,\).*\(3, 4\)"):
            norm(x, np.ones(12), axis=axis)


@pytest.mark.parametrize(
    "shape",
    [
        (ROWS, COLUMNS - 1),
        (ROWS + 1, COLUMNS),
        (COLUMNS, ROWS),
        (ROWS * COLUMNS,),
        (1, COLUMNS),
        (ROWS, 1),
        (1, ROWS, COLUMNS),
        (),
    ],
    ids=str,
)
@every_norm
def test_out_and_dy_have_exactly_the_shape_of_x(norm, shape):
    for call in calls(norm):
        for name in ("out", "dy"):
            if name in call.arguments:
                for dtype in (np.float32, np.float64):
                    call.refuses(
                        ValueError, f"{name}:", str(shape), str((ROWS, COLUMNS)), **{name: np.ones(shape, dtype)}
                    )


@pytest.mark.parametrize(
    "shape", [(ROWS,), (1, ROWS), (ROWS, 2), (ROWS + 1, 1), (1, 1), (1,), (), (ROWS, COLUMNS), (ROWS, 1, 1)], ids=str
)
@every_norm
def test_statistics_have_exactly_the_shape_that_forward_gives(norm, shape):
    call = Call(norm, backward=True)
    for name in ("mean", "rstd"):
        if name in call.arguments:
            call.refuses(ValueError, f"{name}:", str(shape), str((ROWS, 1)), **{name: np.ones(shape, np.float32)})


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@every_norm
def test_statistics_have_exactly_the_dtype_that_forward_gives(norm, dtype):
    call = Call(norm, backward=True, dtype=dtype)
    right = call.arguments["rstd"].dtype
    for name in ("mean", "rstd"):
        if name in call.arguments:
            for wrong in FLOATS + [np.dtype(int)]:
                if wrong != right:
                    call.refuses(TypeError, f"{name}:", right.name, wrong.name, **{name: np.ones((ROWS, 1), wrong)})


@pytest.mark.parametrize("dtype", [int, np.int32, np.uint8, bool], ids=lambda d: np.dtype(d).name)
@every_norm
def test_out_of_integers_is_refused_as_numpy_does(norm, dtype):
    for call in calls(norm):
        call.refuses(TypeError, "out:", "same_kind", np.dtype(dtype).name, out=np.zeros((ROWS, COLUMNS), dtype))


@every_norm
def test_out_that_is_read_only_is_refused_as_numpy_does(norm):
    for call in calls(norm):
        for dtype in (np.float32, np.float64):
            out = np.full((ROWS, COLUMNS), 9, dtype)
            out.setflags(write=False)
            call.refuses(ValueError, "out:", "output array is read-only", out=out)
        call.refuses(
            ValueError, "out:", "output array is read-only", out=np.broadcast_to(np.float32(1), (ROWS, COLUMNS))
        )


@pytest.mark.parametrize(
    "out",
    [[[0.0] * COLUMNS] * ROWS, (np.zeros((ROWS, COLUMNS), np.float32),), 3.0, "out"],
    ids=["list", "tuple", "float", "text"],
)
@every_norm
def test_out_is_an_array(norm, out):
    for call in calls(norm):
        call.refuses(TypeError, "out:", out=out)


@pytest.mark.parametrize(
    "axis, error",
    [
        (2, AxisError),
        (-3, AxisError),
        ((0, 2), AxisError),
        (10**30, (AxisError, OverflowError, ValueError)),
        ((0, 0), ValueError),
        ((1, -1), ValueError),
        ((), ValueError),
        ([], ValueError),
        (1.0, TypeError),
        ("1", TypeError),
        ((0, 1.5), TypeError),
        (1j, TypeError),
    ],
    ids=str,
)
@every_norm
def test_an_axis_that_does_not_exist_or_repeats_is_refused(norm, axis, error):
    for call in calls(norm):
        call.refuses(error, axis=axis)
        call.refuses(error, axis=axis, out=None)


@every_norm
def test_the_message_about_an_axis_names_it(norm):
    for call in calls(norm):
        call.refuses(AxisError, "axis", "2", axis=2)
        call.refuses(ValueError, "axis", "repeated", axis=(0, 0))
        call.refuses(ValueError, "axis", "()", axis=())


@pytest.mark.parametrize(
    "eps, error",
    [
        (-1e-5, ValueError),
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
        (-float("inf"), ValueError),
        (np.float32("nan"), ValueError),
        (10**400, ValueError),
        (None, TypeError),
        ("1e-5", TypeError),
        (b"1", TypeError),
        (1j, TypeError),
        ([], TypeError),
        ([1e-5], TypeError),
        (np.ones(2), TypeError),
        (object(), TypeError),
    ],
    ids=lambda v: repr(v)[:12],
)
@every_norm
def test_eps_is_a_finite_number_of_at_least_0(norm, eps, error):
    call = Call(norm)
    call.refuses(error, "eps", eps=eps)
    call.refuses(error, "eps", eps=eps, out=None, axis=0, weight=None, bias=None) if is_centered(
        norm
    ) else call.refuses(error, "eps", eps=eps, out=None, axis=0, weight=None)


@pytest.mark.parametrize("value", ["1", None, 1j, [1.0], np.ones(2)], ids=repr)
def test_weight_offset_is_a_number(value):
    for call in calls(fastnorm.rms_norm):
        call.refuses(TypeError, "weight_offset", weight_offset=value)


def test_weight_offset_without_weight_is_refused():
    for call in calls(fastnorm.rms_norm):
        for out in (None, call.arguments["out"]):
            call.refuses(ValueError, "weight_offset", weight=None, weight_offset=1.0, out=out)
            call.function(**{**call.arguments, "weight": None, "weight_offset": 0.0, "out": None})


@every_norm
def test_names_are_keywords_where_the_signature_says_so(norm):
    x = np.ones((2, 3))
    with pytest.raises(TypeError):
        norm(x, None, None, -1) if is_centered(norm) else norm(x, None, -1)
    with pytest.raises(TypeError):
        norm(x, eps=1e-5, gamma=None)
    with pytest.raises(TypeError):
        norm()


def test_rms_norm_has_no_bias():
    with pytest.raises(TypeError):
        fastnorm.rms_norm(np.ones(3), bias=np.ones(3))


@every_norm
def test_empty_input_is_checked_like_any_other(norm):
    x = np.empty((0, 3), np.float32)
    for arguments, error in (
        ({"weight": np.ones(4)}, ValueError),
        ({"out": np.empty((0, 4))}, ValueError),
        ({"axis": 2}, AxisError),
        ({"eps": -1.0}, ValueError),
        ({"weight": np.ones(3, complex)}, TypeError),
    ):
        with pytest.raises(error):
            norm(x, **arguments)
    with pytest.raises(ValueError):
        backward_of(norm)(np.empty((0, 4), np.float32), x, *forward_of(norm)(x)[1:])


@every_norm
def test_an_error_comes_before_anything_is_computed(norm):
    """Also for arrays that would take the early exit, and with out the same as x."""
    for size in (3, 70_000):
        x = np.ones((2, size), np.float32)
        for arguments in ({"eps": -1.0}, {"weight": np.ones(size + 1, np.float32)}, {"axis": (0, 0)}):
            keep = x.copy()
            with pytest.raises(ValueError):
                norm(x, out=x, **arguments)
            assert (x == keep).all()
