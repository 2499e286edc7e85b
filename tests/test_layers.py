"""The layers: what their functions compute, what they keep, what they refuse."""

import doctest

import numpy as np
import pytest
from helpers import BFLOAT16, assert_same_bits

import fastnorm
from fastnorm import layers
from fastnorm.layers import (
    BatchNorm,
    DeepNorm,
    DeepNormScales,
    LayerNorm,
    PostNorm,
    PreNorm,
    RMSNorm,
    deepnorm_scales,
)

LAYERS = [LayerNorm, RMSNorm, BatchNorm]
every_layer = pytest.mark.parametrize("kind", LAYERS, ids=lambda k: k.__name__)


def trained(kind, rng, shape=(6, 8), **options):
    """A layer with parameters that are not ones and zeros."""
    layer = kind(shape[-1], **options)
    for name in layer._parameters:
        getattr(layer, name)[...] += rng.standard_normal(shape[-1])
    return layer


@pytest.mark.parametrize("shape, normalized", [((6, 8), 8), ((6, 8), (8,)), ((2, 3, 4), (3, 4)), ((5,), 5)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_layers_are_their_functions(dtype, shape, normalized, rng):
    x, dy = rng.standard_normal((2, *shape)).astype(dtype)
    axis = tuple(range(-len(np.atleast_1d(normalized)), 0))
    layer = LayerNorm(normalized, eps=1e-3)
    layer.weight += rng.standard_normal(layer.weight.shape)
    layer.bias += rng.standard_normal(layer.bias.shape)
    y, mean, rstd = fastnorm.layer_norm_forward(x, layer.weight, layer.bias, axis=axis, eps=1e-3)
    assert_same_bits(layer(x), y)
    assert_same_bits(layer.forward(x), y)
    expected = fastnorm.layer_norm_backward(dy, x, mean, rstd, layer.weight, axis=axis)
    assert_same_bits((layer.backward(dy), layer.grad_weight, layer.grad_bias), expected)
    layer = RMSNorm(normalized)
    layer.weight += rng.standard_normal(layer.weight.shape)
    y, rstd = fastnorm.rms_norm_forward(x, layer.weight, axis=axis)
    assert_same_bits(layer(x), y)
    expected = fastnorm.rms_norm_backward(dy, x, rstd, layer.weight, axis=axis)
    assert_same_bits((layer.backward(dy), layer.grad_weight), expected)


@pytest.mark.parametrize("shape, axis", [((6, 8), 1), ((3, 8, 4), 1), ((2, 3, 8), -1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=lambda d: d.__name__)
def test_batch_norm_layers_are_their_function(dtype, shape, axis, rng):
    x, dy = rng.standard_normal((2, *shape)).astype(dtype)
    layer = BatchNorm(8, eps=1e-3, momentum=0.3, axis=axis)
    layer.weight += rng.standard_normal(8)
    layer.bias += rng.standard_normal(8)
    running = np.zeros(8), np.ones(8)
    for training in (True, True, False):
        assert (layer.train() if training else layer.eval()) is layer and layer.training == training
        options = {"axis": axis, "eps": 1e-3, "momentum": 0.3, "training": training}
        y, mean, rstd = fastnorm.batch_norm_forward(x, layer.weight, layer.bias, *running, **options)
        assert_same_bits(layer(x), y)
        assert_same_bits((layer.running_mean, layer.running_var), running)
        expected = fastnorm.batch_norm_backward(dy, x, mean, rstd, layer.weight, axis=axis, training=training)
        assert_same_bits((layer.backward(dy), layer.grad_weight, layer.grad_bias), expected)


def test_a_new_batch_norm_is_in_training_mode_with_running_statistics_of_its_dtype(rng):
    layer = BatchNorm(3, dtype=np.float32)
    assert layer.training and not layer.running_mean.any() and (layer.running_var == 1).all()
    assert layer.running_mean.dtype == layer.running_var.dtype == layer.bias.dtype == np.float32
    running_mean = layer.running_mean
    layer(rng.standard_normal((5, 3)))
    assert layer.running_mean is running_mean and running_mean.any() and running_mean.dtype == np.float32
    with pytest.raises(ValueError, match="values per channel"):
        layer(np.ones((1, 3)))
    assert layer.eval()(np.ones((1, 3))).shape == (1, 3)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm], ids=lambda k: k.__name__)
def test_parameters_start_at_one_and_zero_in_float64(kind):
    layer = kind((2, 3))
    assert layer.weight.shape == (2, 3) and layer.weight.dtype == np.float64 and (layer.weight == 1).all()
    assert layer.grad_weight is None
    if kind is LayerNorm:
        assert (layer.bias == 0).all() and layer.grad_bias is None and LayerNorm(3, bias=False).bias is None
    for dtype in (np.float16, BFLOAT16, np.float32):
        assert kind(3, dtype=dtype).weight.dtype == dtype


def test_a_layer_without_bias_has_no_gradient_for_one(rng):
    x = rng.standard_normal((6, 8))
    layer = LayerNorm(8, bias=False)
    assert_same_bits(layer(x), fastnorm.layer_norm(x))
    layer.backward(x)
    layer.update(0.1)
    assert layer.bias is None and layer.grad_bias is None and set(layer.state_dict()) == {"weight"}


@every_layer
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=lambda d: d.__name__)
def test_update_is_a_step_of_gradient_descent(kind, dtype, rng):
    layer = trained(kind, rng, dtype=dtype)
    x, dy = rng.standard_normal((2, 6, 8)).astype(dtype)
    before, weight = layer.state_dict(), layer.weight
    layer(x)
    layer.backward(dy)
    layer.update(0.5)
    assert layer.weight is weight
    for name in layer._parameters:
        expected = before[name] - 0.5 * getattr(layer, "grad_" + name)
        assert_same_bits(getattr(layer, name), expected.astype(dtype))


@every_layer
def test_gradients_are_replaced_by_the_next_backward(kind, rng):
    layer = trained(kind, rng)
    x, dy = rng.standard_normal((2, 6, 8))
    layer(x)
    layer.backward(dy)
    once = layer.grad_weight.copy()
    layer.backward(dy)
    assert_same_bits(layer.grad_weight, once)


@every_layer
def test_the_state_is_all_that_the_results_depend_on(kind, rng):
    layer = trained(kind, rng)
    x = rng.standard_normal((6, 8))
    layer(x)
    names = {"weight", "bias"} if kind is not RMSNorm else {"weight"}
    assert set(layer.state_dict()) == names | ({"running_mean", "running_var"} if kind is BatchNorm else set())
    other = kind(8)
    other.load_state_dict(layer.state_dict())
    if kind is BatchNorm:
        layer.eval()
        other.eval()
    assert_same_bits(layer(x), other(x))


@every_layer
def test_state_goes_through_a_file(kind, rng, tmp_path):
    layer, other = trained(kind, rng, dtype=np.float32), kind(8, dtype=np.float32)
    state = layer.state_dict()
    np.savez(tmp_path / "state.npz", **state)
    layer.weight += 1
    with np.load(tmp_path / "state.npz") as stored:
        other.load_state_dict(stored)
    assert_same_bits(other.weight, state["weight"])
    assert_same_bits(other.state_dict(), state)
    x = rng.standard_normal((6, 8)).astype(np.float32)
    layer.load_state_dict(state)
    assert_same_bits(layer(x), other(x))


@every_layer
def test_states_that_do_not_fit_are_refused_and_change_nothing(kind, rng):
    layer = trained(kind, rng)
    before = layer.state_dict()
    for state, error in (
        ({}, KeyError),
        ({**before, "more": np.ones(8)}, KeyError),
        ({**before, "weight": np.ones(7)}, ValueError),
        ({**before, layer._parameters[-1]: np.ones((1, 8))}, ValueError),
        ({**{n: a + 1 for n, a in before.items()}, layer._parameters[-1]: ["a"] * 8}, ValueError),
    ):
        with pytest.raises(error):
            layer.load_state_dict(state)
        assert_same_bits(layer.state_dict(), before)


@every_layer
def test_backward_and_update_need_what_comes_before(kind):
    layer = kind(3)
    with pytest.raises(RuntimeError, match=f"{kind.__name__}.backward: call forward first"):
        layer.backward(np.ones((2, 3)))
    with pytest.raises(RuntimeError, match=f"{kind.__name__}.update: no gradients"):
        layer.update(0.1)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm], ids=lambda k: k.__name__)
@pytest.mark.parametrize("shape", [0, True, -1, (), (3, 0), 1.5, (2.0,), None, "3"], ids=repr)
def test_bad_shapes_are_refused(kind, shape):
    with pytest.raises((ValueError, TypeError)):
        kind(shape)


@every_layer
@pytest.mark.parametrize("dtype", [int, complex, object, np.longdouble], ids=str)
def test_bad_dtypes_are_refused(kind, dtype):
    with pytest.raises(TypeError, match="^dtype: "):
        kind(3, dtype=dtype)


@every_layer
def test_input_of_another_width_is_refused(kind):
    with pytest.raises(ValueError, match=r"weight: .*\(3,\).*4"):
        kind(3)(np.ones((2, 4)))


@pytest.mark.parametrize("number", [0, -2, 2.0, True, (3,), None], ids=repr)
def test_a_bad_number_of_channels_is_refused(number):
    with pytest.raises(ValueError, match="^num_features: "):
        BatchNorm(number)


class Linear:
    def __init__(self, matrix):
        self.matrix = matrix

    def forward(self, x):
        self.x = x
        return x @ self.matrix

    def backward(self, dy):
        self.gradient = self.x.T @ dy
        return dy @ self.matrix.T

    def update(self, learning_rate):
        self.matrix -= learning_rate * self.gradient


@pytest.mark.parametrize("norm", LAYERS, ids=lambda k: k.__name__)
def test_pre_norm_is_its_formula(norm, rng):
    block = PreNorm(Linear(rng.standard_normal((5, 5))), trained(norm, rng, (3, 5)))
    x = rng.standard_normal((3, 5))
    np.testing.assert_allclose(block(x), x + block.norm(x) @ block.sublayer.matrix)


@pytest.mark.parametrize("alpha", [1.0, 2.5])
@pytest.mark.parametrize("norm", LAYERS, ids=lambda k: k.__name__)
def test_post_norm_is_its_formula(norm, alpha, rng):
    """Fused with a norm over rows, and what the parts give with any other."""
    block = PostNorm(Linear(rng.standard_normal((5, 5))), trained(norm, rng, (3, 5)), alpha)
    x = rng.standard_normal((3, 5))
    assert_same_bits(block(x), block.norm(x @ block.sublayer.matrix + alpha * x))


def test_deep_norm_is_post_norm_with_a_layer_norm(rng):
    matrix, x, dy = rng.standard_normal((5, 5)), *rng.standard_normal((2, 3, 5))
    deep, post = DeepNorm(Linear(matrix), 5, alpha=1.7), PostNorm(Linear(matrix), LayerNorm(5), alpha=1.7)
    assert isinstance(deep.norm, LayerNorm)
    assert_same_bits(deep(x), post(x))
    assert_same_bits(deep.backward(dy), post.backward(dy))
    assert DeepNorm(Linear(matrix), (5,), alpha=2.0, dtype=np.float32).norm.weight.dtype == np.float32


def test_a_sum_and_a_row_do_not_take_each_other_for_their_forward(rng):
    layer = LayerNorm(5)
    layer.forward_sum(*rng.standard_normal((2, 3, 5)))
    with pytest.raises(RuntimeError, match="LayerNorm.backward: call forward first"):
        layer.backward(np.ones((3, 5)))
    layer(np.ones((3, 5)))
    with pytest.raises(RuntimeError, match="LayerNorm.backward_sum: call forward_sum first"):
        layer.backward_sum(np.ones((3, 5)))


def test_the_state_of_a_block_is_that_of_its_parts(rng, tmp_path):
    def make():
        return PostNorm(LayerNorm(4), RMSNorm(4))

    block, x = make(), rng.standard_normal((3, 4))
    block.sublayer.bias += 1
    block.norm.weight += rng.standard_normal(4)
    assert set(block.state_dict()) == {"sublayer.weight", "sublayer.bias", "norm.weight"}
    np.savez(tmp_path / "block.npz", **block.state_dict())
    other = make()
    with np.load(tmp_path / "block.npz") as stored:
        other.load_state_dict(stored)
    assert_same_bits(other(x), block(x))
    for bad in ({"norm.weight": np.ones(4)}, {**block.state_dict(), "more": np.ones(4)}):
        with pytest.raises(KeyError):
            other.load_state_dict(bad)


def test_a_norm_that_overrides_forward_is_called_by_it(rng):
    class Doubled(LayerNorm):
        def forward(self, x):
            return 2 * super().forward(x)

    x = rng.standard_normal((3, 5))
    matrix = rng.standard_normal((5, 5))
    assert_same_bits(PostNorm(Linear(matrix), Doubled(5))(x), 2 * LayerNorm(5)(x @ matrix + 1.0 * x))


@pytest.mark.parametrize("block", [PreNorm, PostNorm, lambda f, n: PostNorm(f, n, 1.7)], ids=["pre", "post", "deep"])
@pytest.mark.parametrize("norm", LAYERS, ids=lambda k: k.__name__)
def test_blocks_have_the_gradients_of_their_formulas(norm, block, rng):
    """Central differences through the block, the sublayer a linear map."""
    block = block(Linear(rng.standard_normal((5, 5))), trained(norm, rng, (3, 5)))
    x, dy = rng.standard_normal((2, 3, 5))
    block(x)
    dx, wanted = block.backward(dy), np.empty_like(x)
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-6
        wanted[i] = ((block(x + step) - block(x - step)) * dy).sum() / 2e-6
    np.testing.assert_allclose(dx, wanted, rtol=1e-6, atol=1e-8)
    matrix, weight = block.sublayer.matrix.copy(), block.norm.weight.copy()
    block.update(0.1)
    assert (block.sublayer.matrix != matrix).any() and (block.norm.weight != weight).any()


def test_the_examples_run():
    assert doctest.testmod(layers).failed == 0
    assert all(getattr(layers, name).__doc__ for name in layers.__all__)


def test_deepnorm_scales_are_those_of_the_paper():
    """Figure 2 of arXiv 2203.00555, by hand for some numbers of layers."""
    assert deepnorm_scales(18) == (DeepNormScales(36**0.25, 144**-0.25), None)
    assert deepnorm_scales(0, 6) == (None, DeepNormScales(12**0.25, 48**-0.25))
    encoder, decoder = deepnorm_scales(16, 1)
    assert encoder == pytest.approx((0.81 * 2, 0.87 / 2)) and decoder == pytest.approx((3**0.25, 12**-0.25))
    encoder, decoder = deepnorm_scales(6, 18)
    assert encoder == pytest.approx((0.81 * (6**4 * 18) ** (1 / 16), 0.87 * (6**4 * 18) ** (-1 / 16)))
    assert decoder == pytest.approx((54**0.25, 216**-0.25))
    for bad in ((0, 0), (-1, 3), (3, -1)):
        with pytest.raises(ValueError, match="n_encoder_layers"):
            deepnorm_scales(*bad)
