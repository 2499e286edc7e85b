"""The tests of the CPU wing, on the CUDA wing: same functions, same oracles, without the longest rows."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy", reason="CuPy is not installed; pip install -e '.[test-cuda]' brings it")

from device import module_over_device  # noqa: E402
from hypothesis import settings  # noqa: E402

TESTS = Path(__file__).parent.parent
MODULES = [
    "accuracy",
    "onnx",
    "gradients",
    "properties",
    "bits",
    "layouts",
    "types",
    "empty",
    "bad_input",
    "residual",
    "batch_norm",
]
# Long enough for every path: rows in slices, too.
LONGEST = 70_003
# Calls that each of the property tests makes up.
EXAMPLES = 100

NO_SUCH_ARRAY = "CuPy has no arrays like that"
CPU_PROMISE = "promised of the CPU wing only"
NUMPY_ONLY = "about what NumPy's wing accepts besides arrays"
LEFT_OUT = {
    "test_dtypes_that_are_not_supported_are_a_type_error_that_names_what_is": NO_SUCH_ARRAY,
    "test_small_types_of_ml_dtypes_are_refused": NO_SUCH_ARRAY,
    "test_out_that_is_read_only_is_refused_as_numpy_does": NO_SUCH_ARRAY,
    "test_out_may_be_a_memory_map": NO_SUCH_ARRAY,
    "test_subclasses_come_back_as_plain_arrays": NO_SUCH_ARRAY,
    "test_masked_arrays_and_matrices_are_refused": NO_SUCH_ARRAY,
    "test_arrays_of_many_dimensions": NO_SUCH_ARRAY,
    "test_read_only_inputs_are_accepted": NO_SUCH_ARRAY,
    "test_every_processor_level_gives_the_same_bits": CPU_PROMISE,
    "test_stores_past_the_cache_give_the_same_bits": CPU_PROMISE,
    "test_any_number_of_threads_gives_the_same_bits": CPU_PROMISE,
    "test_nothing_beyond_the_arrays_is_read": "the emulator looks at every access",
    "test_large_results_into_odd_addresses_and_strides": CPU_PROMISE,
    "test_more_elements_than_32_bits_count": "gigabytes; test_launches.py has it for a GPU",
    "test_lists_and_tuples_are_arrays": NUMPY_ONLY,
    "test_layouts_of_this_suite_keep_the_values": "about the tests themselves",
    "test_the_longdouble_oracle_agrees_with_mpmath": "about the tests themselves",
    # Sums of blocks are float32 before they are added up in double, and then rounded: float32 or wider, as promised.
    "test_a_16_bit_gradient_is_rounded_once_from_the_double_sum": CPU_PROMISE,
    # dy of another dtype goes another way there, and the sums of two ways need not have the same last bits.
    "test_weight_bias_and_dy_are_rounded_to_the_arithmetic_type_and_no_further": CPU_PROMISE,
    "test_a_long_sum_of_float32_ones_does_not_stall": "2**24 rows; test_launches.py has it shorter",
    # The way of a call follows from all its dtypes, and with it the last bits of statistics; test_fused_rows.py.
    "test_dtypes_of_x_and_residual_may_differ": CPU_PROMISE,
    # The two ways over channels, and the kernels over rows, add up in orders of their own.
    "test_a_channel_is_a_row_of_layer_norm": CPU_PROMISE,
    "test_an_axis_is_the_same_however_the_array_lies": CPU_PROMISE,
    "test_running_arrays_in_the_other_byte_order": NO_SUCH_ARRAY,
    "test_running_arrays_that_cannot_be_updated_are_refused_in_training_only": NO_SUCH_ARRAY,
    "test_what_only_numpy_has_is_refused_by_name": NO_SUCH_ARRAY,
    "test_memory_maps_and_bfloat16": NO_SUCH_ARRAY,
    "test_a_running_mean_wider_than_x_keeps_its_digits": NUMPY_ONLY,
    "test_lists_and_bfloat16_streams": NUMPY_ONLY,
}


# Of parametrized tests: rows, or statistics, below the normal numbers of float32, which a GPU takes for zero.
FLUSHED = ("float32-1e-41", "float32-1e-44", "float32--1e-42", "statistics_of_huge_rows")


@pytest.fixture(autouse=True)
def not_flushed(request, device):
    if not device.is_emulated and any(part in request.node.name for part in FLUSHED):
        pytest.skip("CuPy compiles with flush-to-zero")


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
    for layouts in (helpers.LAYOUTS, helpers.WRITABLE_LAYOUTS):
        layouts[:] = [m for m in layouts if m.__name__ not in ("byte_swapped", "read_only")]
    unused = set(LEFT_OUT)
    for module in MODULES:
        loaded = load(f"test_{module}", {**over_device, "helpers": helpers})
        for name, test in vars(loaded).items():
            if name.startswith("test_") and name not in LEFT_OUT:
                made_up = hasattr(test, "hypothesis")
                globals()[f"test_{module}_{name[5:]}"] = settings(max_examples=EXAMPLES)(test) if made_up else test
            unused.discard(name)
    assert not unused, f"no such tests: {unused}"


collect()
