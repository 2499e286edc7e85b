"""The examples: the table that is computed in full, of the others what their texts claim, on reduced sizes."""

import importlib

import numpy as np
import pytest
from helpers import ROOT, run_python

from fastnorm.layers import BatchNorm, LayerNorm

EXAMPLES = ROOT / "examples"
if not EXAMPLES.exists():
    pytest.skip("no examples beside the package", allow_module_level=True)

matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")
# No test opens a window.
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NAMES = sorted(path.stem for path in EXAMPLES.glob("plot_*.py"))


@pytest.fixture
def example(monkeypatch):
    """An example by name, imported as its neighbours see it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    plt.close("all")


def run_script(name, plot):
    """What the script prints, without a display; a warning is an error there, too."""
    nowhere = {"DISPLAY": None, "WAYLAND_DISPLAY": None, "MPLBACKEND": None}
    script = EXAMPLES / f"{name}.py"
    return run_python(script, timeout=600, arguments=[str(plot)], PYTHONWARNINGS="error", **nowhere).stdout


def assert_slopes_of(layer, x, rng, tolerance=1e-8):
    """The dx of a layer, and its gradient of the weights, against central differences."""
    dy, h = rng.standard_normal(layer.forward(x).shape), 1e-6
    pairs = [(x, layer.backward(dy))]
    if hasattr(layer, "weight"):
        pairs += [(layer.weight, layer.grad_weight), (layer.bias, layer.grad_bias)]
    for values, gradient in pairs:
        expected = np.empty_like(values)
        for i in range(values.size):
            losses = []
            for step in (h, -h):
                kept = values.flat[i]
                values.flat[i] = kept + step
                losses.append((layer.forward(x) * dy).sum())
                values.flat[i] = kept
            expected.flat[i] = (losses[0] - losses[1]) / (2 * h)
        np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


# ---- what they share ------------------------------------------------------------------------------


def test_gradients_of_the_shared_layers(example, rng):
    networks = example("networks")
    x = rng.standard_normal((2, 3, 4))
    linear = networks.Linear(4, 5, rng)
    linear.bias += rng.standard_normal(5)
    for layer in (linear, networks.ReLU(), networks.GELU(), networks.Sequential(networks.GELU(), linear)):
        assert_slopes_of(layer, x, rng)


def test_gradient_of_the_loss(example, rng):
    networks = example("networks")
    logits, labels, h = rng.standard_normal((4, 3)), np.array([0, 2, 1, 1]), 1e-6
    loss, gradient = networks.softmax_cross_entropy(logits, labels)
    assert loss == pytest.approx(
        -np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[range(4), labels].mean()
    )
    for i in range(logits.size):
        up, down = logits.copy(), logits.copy()
        up.flat[i] += h
        down.flat[i] -= h
        slope = (
            (networks.softmax_cross_entropy(up, labels)[0] - networks.softmax_cross_entropy(down, labels)[0]) / 2 / h
        )
        assert gradient.flat[i] == pytest.approx(slope, abs=1e-9)


def test_batches_are_full_and_hold_no_case_twice(example, rng):
    networks = example("networks")
    cases = networks.batches(103, 10, rng)
    assert cases.shape == (10, 10) and len(np.unique(cases)) == 100 and 0 <= cases.min() and cases.max() < 103
    x, labels, x_test, labels_test = networks.digits()
    assert (len(x), len(labels), len(x_test), len(labels_test)) == (1437, 1437, 360, 360)
    assert x.dtype == np.float32 and 0 <= x.min() and x.max() <= 1
    assert not (x[:, None] == x_test[:20]).all(axis=-1).any()


# ---- invariances ----------------------------------------------------------------------------------

YES, NO = "Invariant", "No"
# Table 1 of arXiv:1607.06450: the weight matrix re-scaled and re-centered, a weight vector re-scaled, the data set
# re-scaled and re-centered, a single training case re-scaled.
TABLE_1 = {
    "Batch norm": [YES, NO, YES, YES, YES, NO],
    "Weight norm": [YES, NO, YES, NO, NO, NO],
    "Layer norm": [YES, YES, NO, YES, NO, YES],
}


@pytest.mark.parametrize("seed", range(5))
def test_invariances_are_those_of_the_paper(example, seed):
    invariances = example("plot_invariances")
    assert {name: invariances.verdicts(norm, seed) for name, norm in invariances.NORMS.items()} == TABLE_1
    assert invariances.PAPER == TABLE_1
    assert invariances.verdicts(invariances.rms_norm, seed) == [YES, NO, NO, YES, NO, YES]


def test_invariances_are_computed_from_what_has_changed(example, rng):
    """Each change does change x or weights, and nothing is called invariant that only nearly is."""
    invariances = example("plot_invariances")
    x, weights = rng.standard_normal((5, 4)), rng.standard_normal((3, 4))
    names = ["scale_weight_matrix", "shift_weight_matrix", "scale_weight_vector", "scale_dataset", "shift_dataset"]
    assert [change.__name__ for change in invariances.CHANGES.values()] == [*names, "scale_one_case"]
    for change in invariances.CHANGES.values():
        other_x, other_weights = change(x, weights, rng)
        assert (other_x is x) != (other_weights is weights)
        assert not np.array_equal(other_x, x) or not np.array_equal(other_weights, weights)
    eps_shows = invariances.relative_change(invariances.layer_norm, invariances.scale_dataset, eps=1e-5)
    assert 1e-8 < eps_shows < 1e-5
    with pytest.raises(ArithmeticError, match="neither"):
        invariances.verdict(eps_shows)


def test_invariances_print_and_plot(tmp_path):
    printed = run_script("plot_invariances", tmp_path / "plot.png")
    rows = {line[:18].strip(): line[18:].split() for line in printed.splitlines() if " norm " in line}
    assert {name: rows[name] for name in TABLE_1} == TABLE_1
    assert "Weight matrix     Weight matrix     Weight vector     Dataset           Dataset" in printed
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# ---- batch size -----------------------------------------------------------------------------------


def test_small_batches_hurt_batch_norm_only(example):
    batch_size = example("plot_batch_size")
    results = batch_size.experiment(seeds=[0], n_epochs=4)
    assert {key: history.shape for key, history in results.items()} == {
        (norm, size): (1, 3, 4) for norm in ("LayerNorm", "BatchNorm") for size in (128, 4)
    }
    steps, evaluated, wrong = ({key: history[0, i] for key, history in results.items()} for i in range(3))
    for key in results:
        assert steps[key][-1] < 0.7 * steps[key][0] and wrong[key][-1] < 0.15
    assert steps["BatchNorm", 4][-1] > 3 * steps["LayerNorm", 4][-1]
    assert evaluated["BatchNorm", 4][-1] > 1.3 * evaluated["LayerNorm", 4][-1]
    # The noise is that of the batches: gone in evaluation.
    assert evaluated["BatchNorm", 4][-1] < 0.5 * steps["BatchNorm", 4][-1]
    assert steps["BatchNorm", 128][-1] < steps["LayerNorm", 128][-1]
    assert len(batch_size.plot(results).axes) == 3


def test_batch_norm_is_evaluated_one_by_one(example):
    """In evaluation a case does not see the others, in training it does."""
    batch_size, networks = example("plot_batch_size"), example("networks")
    x = networks.digits()[0][:64]
    for norm, depends in ((BatchNorm, True), (LayerNorm, False)):
        network, norms = batch_size.make_network(norm, np.random.default_rng(0))
        for training in (True, False):
            batch_size.set_training(norms, training)
            same = np.allclose(network.forward(x)[:8], network.forward(x[:8]), atol=1e-5)
            assert same != (depends and training)


# ---- depth ----------------------------------------------------------------------------------------


def test_depth_before_the_first_step(example):
    depth = example("plot_depth")
    starts = {kind: [depth.at_the_start(kind, 48, seed) for seed in range(3)] for kind in depth.KINDS}
    norms = {kind: np.median([each[0] for each in seeds], axis=0) for kind, seeds in starts.items()}
    cosines = {kind: np.median([each[1] for each in seeds], axis=0)[-1] for kind, seeds in starts.items()}
    assert all(each.shape == (48,) for each in norms.values())
    assert norms["Pre-LN"][0] > 3 * norms["Pre-LN"][-1]
    assert norms["DeepNorm"].max() < 2.5 * norms["DeepNorm"].min() and norms["DeepNorm"].max() < norms["Pre-LN"].min()
    assert norms["Post-LN"][0] > 0.3 * norms["Post-LN"][-1]
    assert cosines["Post-LN"] > 0.85 > 0.8 > max(cosines["Pre-LN"], cosines["DeepNorm"])


def test_depth_in_training(example):
    depth = example("plot_depth")
    trainings = {}
    for n_blocks, kinds in ((6, depth.KINDS), (48, depth.KINDS)):
        for kind in kinds:
            losses, error = depth.train(kind, n_blocks, seed=0, n_epochs=4)
            trainings[kind, n_blocks] = losses[None], [error]
            if (kind, n_blocks) == ("Post-LN", 48):
                assert losses[-1] > 2.2 and error > 0.8
            else:
                assert losses[-1] < 1.0 and error < 0.5
    starts = {kind: [values[None] for values in depth.at_the_start(kind, 48, 0)] for kind in depth.KINDS}
    assert len(depth.plot(starts, trainings).axes) == 4


def test_depth_has_the_constants_of_deepnorm(example, rng):
    """48 blocks are 24 layers of a transformer."""
    depth = example("plot_depth")
    deep, plain = (depth.make_block(kind, 48, np.random.default_rng(0)) for kind in ("DeepNorm", "Post-LN"))
    assert deep.alpha == pytest.approx(48**0.25) and plain.alpha == 1.0
    for i in (0, 2):
        ratio = deep.sublayer.layers[i].weight / plain.sublayer.layers[i].weight
        np.testing.assert_allclose(ratio, (8 * 24) ** -0.25, rtol=1e-5)


# ---- a transformer block --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_the_transformer_block(example, seed):
    errors = example("plot_transformer_block").gradient_errors(seed)
    assert len(errors) == 13
    assert max(errors.values()) < 1e-7, errors


def test_a_token_of_the_transformer_block_sees_no_later_one(example, rng):
    block = example("plot_transformer_block").make_block(12, 3, rng, np.float64)
    x = rng.standard_normal((2, 6, 12))
    changed = x.copy()
    # Not by a constant: the norms would take that away again.
    changed[:, 3:] += rng.standard_normal((2, 3, 12))
    y, other = block.forward(x), block.forward(changed)
    np.testing.assert_allclose(other[:, :3], y[:, :3], rtol=1e-12)
    assert (np.abs(other[:, 3:] - y[:, 3:]).max(axis=(0, 2)) > 1e-3).all()


def test_both_norms_of_the_transformer_block_are_the_same(example, rng):
    module = example("plot_transformer_block")
    x, dy = rng.standard_normal((2, 2, 6, 12)).astype(np.float32)
    results = []
    for norm in module.NORMS.values():
        block = module.make_block(12, 3, np.random.default_rng(0), np.float32, norm)
        y, dx = block.forward(x), block.backward(dy)
        assert y.dtype == dx.dtype == np.float32
        gradients = [g for part in module.parts_of(block).values() for g in (part.grad_weight, part.grad_bias)]
        block.update(0.1)
        results.append([y, dx, *gradients, block.forward(x)])
    assert len(module.NORMS) == 2
    for ours, plain in zip(*results, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_times_of_the_transformer_block(example):
    """Nothing about their size: parts of a whole, and a plot of them."""
    module = example("plot_transformer_block")
    times = module.milliseconds(shape=(2, 8, 16), n_heads=2, repeats=3)
    assert list(times) == list(module.NORMS)
    for values in times.values():
        assert values.shape == (4,) and (values > 0).all() and values[:3].max() < values[3]
    assert len(module.plot(times).axes) == 2


# ---- implicit learning rate -----------------------------------------------------------------------


def test_a_step_turns_by_one_over_the_squared_norm(example):
    module = example("plot_learning_rate")
    norms, angles, right = np.array([module.one_step(factor) for factor in module.FACTORS]).T
    np.testing.assert_allclose(np.tan(angles) * norms**2, np.tan(angles[0]) * norms[0] ** 2, rtol=1e-9)
    np.testing.assert_allclose(right, np.pi / 2, atol=1e-12)
    assert module.slope(norms[2:], angles[2:]) == pytest.approx(-2, abs=1e-3)
    plain = np.array([module.one_step(factor, normalized=False) for factor in module.FACTORS]).T
    assert module.slope(*plain[:2]) > -1.2 and np.abs(plain[2] - np.pi / 2).max() > 1e-3


def test_rate_over_squared_norm_is_all_that_counts(example):
    module = example("plot_learning_rate")
    loss, norms, angles = module.train(1, 0.1, n_epochs=3)
    other_loss, other_norms, other_angles = module.train(3, 0.9, n_epochs=3)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-11)
    np.testing.assert_allclose(other_norms, 3 * norms, rtol=1e-11)
    np.testing.assert_allclose(other_angles, angles, rtol=1e-9)
    slow_loss, _, slow_angles = module.train(3, 0.1, n_epochs=3)
    assert slow_angles[0] == pytest.approx(angles[0] / 9, rel=1e-3) and slow_loss[-1] > 1.3 * loss[-1]


def test_the_norm_grows_by_pythagoras_and_undoes_the_rate(example):
    module = example("plot_learning_rate")
    last = {}
    for rate in (1.0, 100.0):
        _, norms, angles = module.train(learning_rate=rate, n_epochs=8)
        assert (np.diff(norms) > 0).all()
        np.testing.assert_allclose(norms[1:], norms[:-1] / np.cos(angles[:-1]), rtol=1e-9)
        last[rate] = module.smooth(angles)[-1]
    # A hundred times the rate does not turn the weights any faster.
    assert last[100.0] < 2 * last[1.0]


# ---- as scripts -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_examples_run_as_scripts(name, tmp_path):
    plot = tmp_path / "plot.png"
    assert f"plot: {plot}" in run_script(name, plot)
    assert plot.stat().st_size > 10_000


def test_the_examples_are_listed():
    listed = (EXAMPLES / "README.md").read_text()
    assert NAMES and all(f"[{name}.py]({name}.py)" in listed for name in NAMES)
