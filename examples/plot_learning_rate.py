"""
The implicit learning rate
==========================

Layer normalization does not see the length of the weights in front of it, only their direction. So the length is free
to do something else: it divides the learning rate, and grows with every step. Section 5.2 of "Layer Normalization"
(arXiv:1607.06450) calls that an implicit reduction of the learning rate. Here it is measured.
"""

import matplotlib.pyplot as plt
import numpy as np
from networks import STYLES, Linear, ReLU, Sequential, batches, digits, save, softmax_cross_entropy

from fastnorm.layers import LayerNorm

# %%
# What follows from the invariance
# --------------------------------
#
# Let the loss depend on the weights through ``layer_norm(x @ weights)`` alone. It is the same for ``weights`` and for
# ``k * weights``, and therefore
#
# - the gradient at ``k * weights`` is 1/k of the gradient at ``weights``: the same change of the loss takes k times the
#   way;
# - it is orthogonal to the weights, all of them taken as one vector: there is no change along the ray.
#
# A step of length ``learning_rate * gradient`` at a right angle to weights of length ``norm`` turns them by
# ``arctan(learning_rate * gradient / norm)``, and since the gradient goes with 1/norm, small angles go with 1/norm².
# What counts is ``learning_rate / norm²``.
#
# The network: digits, 64 inputs, one hidden layer of 32 units, normalized, with ``eps=0`` so that the invariance is
# exact.


def make_network(factor=1.0, normalized=True, seed=0):
    """Its first weights are those of the seed times factor; nothing else depends on it."""
    rng = np.random.default_rng(seed)
    first = Linear(64, 32, rng, bias=not normalized)
    rest = [ReLU(), Linear(32, 10, rng)]
    first.weight *= factor
    return Sequential(first, LayerNorm(32, eps=0.0), *rest) if normalized else Sequential(first, *rest)


def backward(network, x, labels):
    """Fills in the gradients; returns the loss."""
    loss, dy = softmax_cross_entropy(network.forward(x), labels)
    network.backward(dy)
    return loss


def angle(a, b):
    """Between two arrays taken as vectors, in radians; of full precision where it is small."""
    a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
    return 2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b))


# %%
# One step
# --------


def one_step(factor, learning_rate=0.01, normalized=True):
    """The norm of the first weights, the angle that a step turns them by, and that between gradient and weights."""
    x, labels, _, _ = digits(np.float64)
    network = make_network(factor, normalized)
    first = network.layers[0]
    backward(network, x, labels)
    before = first.weight.copy()
    first.update(learning_rate)
    return np.linalg.norm(before), angle(before, first.weight), angle(before, first.grad_weight)


FACTORS = np.geomspace(0.1, 10, 9)


def slope(norms, angles):
    """The power of the norm that the angle goes with."""
    return np.polyfit(np.log(norms), np.log(angles), 1)[0]


if __name__ == "__main__":
    steps = {
        normalized: np.array([one_step(f, normalized=normalized) for f in FACTORS]).T for normalized in (True, False)
    }
    print("one step, learning rate 0.01\n\nnorm of weights   angle, layer norm   gradient to weights   angle, no norm")
    for (norm, turned, right), without in zip(steps[True].T, steps[False][1], strict=True):
        print(f"{norm:15.2f}{turned:20.2e}{np.degrees(right):21.10f}°{without:17.2e}")
    print(f"\nangle ~ norm ** {slope(*steps[True][:2]):.4f} with layer norm")

# %%
# Training
# --------
#
# Now many steps, with one learning rate for the first weights and another, always the same, for all else. If only
# learning_rate / norm² counts, weights three times as long with nine times the learning rate go the same way: the same
# losses step by step, but for rounding.
#
# The norm does not stay what it is. Each step is at a right angle to the weights, so by Pythagoras the square of the
# norm grows by the square of the step, and the steps get smaller in angle as training goes on.


def train(factor=1.0, learning_rate=0.1, n_epochs=30, seed=0):
    """By step: the loss, the norm of the first weights, the angle by which the step turned them."""
    x, labels, _, _ = digits(np.float64)
    network, rng = make_network(factor, seed=seed), np.random.default_rng(seed)
    first, *others = network.layers
    history = []
    for _ in range(n_epochs):
        for batch in batches(len(x), 64, rng):
            loss, before = backward(network, x[batch], labels[batch]), first.weight.copy()
            first.update(learning_rate)
            for layer in others:
                layer.update(0.1)
            history.append((loss, np.linalg.norm(before), angle(before, first.weight)))
    return np.array(history).T


RUNS = {"norm x 1, rate 0.1": (1, 0.1), "norm x 3, rate 0.1": (3, 0.1), "norm x 3, rate 0.9": (3, 0.9)}
RATES = (0.1, 1.0, 10.0, 100.0)


def smooth(values, n=22):
    """The mean of each epoch of 22 steps."""
    return values.reshape(-1, n).mean(axis=1)


def plot(steps, runs, growth):
    figure, ((one, loss), (norm, turn)) = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for style, normalized, label in zip(STYLES, (True, False), ("layer norm", "no norm"), strict=False):
        one.plot(*steps[normalized][:2], label=label, **style)
    norms, epochs = steps[True][0], np.arange(1, 1 + len(smooth(growth[RATES[0]][0])))
    one.plot(norms, steps[True][1][-1] * (norms / norms[-1]) ** -2, color="0.6", lw=4, zorder=0, label="1 / norm²")
    for i, (name, history) in enumerate(runs.items()):
        # The third lies on the first: markers without a line.
        loss.plot(
            epochs,
            smooth(history[0]),
            label=name,
            markevery=3,
            **{**STYLES[i], **({"linestyle": "none"} if i == 2 else {})},
        )
    for style, (rate, (_, norms, angles)) in zip(STYLES, growth.items(), strict=True):
        norm.plot(epochs, smooth(norms), label=f"rate {rate:g}", markevery=4, **style)
        turn.plot(epochs, smooth(angles), label=f"rate {rate:g}", markevery=4, **style)
    one.set(title="One step", xlabel="norm of the weights", ylabel="angle, rad", xscale="log", yscale="log")
    loss.set(title="Three times the norm, a ninth of the rate", xlabel="epoch", ylabel="loss, nats", yscale="log")
    norm.set(title="The norm grows", xlabel="epoch", ylabel="norm of the weights", yscale="log")
    turn.set(title="The steps turn less", xlabel="epoch", ylabel="angle of a step, rad", yscale="log")
    # One legend is enough for the lower two, and in the left one there is no room.
    for axes in (one, loss, turn):
        axes.legend(frameon=False)
    return figure


if __name__ == "__main__":
    runs = {name: train(*arguments) for name, arguments in RUNS.items()}
    losses = [history[0] for history in runs.values()]
    print(
        f"largest difference of the losses of 'norm x 1, rate 0.1' and 'norm x 3, rate 0.9': "
        f"{np.abs(losses[0] - losses[2]).max():.1e}"
    )
    growth = {rate: train(learning_rate=rate) for rate in RATES}
    print("\nfirst weights    norm            angle of a step, by epoch    loss")
    print("learning rate    start     end   first        last           last epoch")
    for rate, (loss, norms, angles) in growth.items():
        first, *_, last = smooth(angles)
        print(f"{rate:<15g}{norms[0]:7.2f}{norms[-1]:8.2f}   {first:<12.4f} {last:<14.4f} {smooth(loss)[-1]:.3f}")
    save(plot(steps, runs, growth), "learning_rate")

# %%
# What is seen
# ------------
#
# One step: the angle goes with 1/norm² over four decades, and the gradient is at a right angle to the weights to ten
# digits. The fitted power is -1.998 rather than -2 since the largest angle, 0.2, is not small. Without normalization
# the angle falls more slowly than with 1/norm, and the function changes with the norm.
#
# Training: nine times the learning rate makes up for three times the norm to the last bits of the loss, while three
# times the norm alone is a ninth of the learning rate.
#
# The growth of the norm undoes a learning rate that was too large. The four rates span a factor of a thousand; after 30
# epochs a step turns the weights by 0.007 to 0.014 with all of them. The smallest gets there because the gradients get
# smaller, with hardly any growth; the others because their norm has doubled, or is six or 27 times what it was. The
# largest pays for its first steps, which turned the weights by large angles: its loss ends at 0.07, those of the others
# at 0.03 to 0.04. Weight decay would shrink the norm again: under a norm it regularizes nothing, it keeps the learning
# rate up.
