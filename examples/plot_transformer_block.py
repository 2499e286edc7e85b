"""
A transformer block from scratch
================================

Causal self-attention and a feed-forward network, each in a Pre-LN residual block, forward and backward in NumPy.
Central differences say whether the gradients are right; a stopwatch around the norms says how much of a training step
is theirs, with fastnorm's layers and with the same formulas in plain NumPy.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from networks import GELU, Linear, Sequential, save, softmax

import fastnorm
from fastnorm.layers import LayerNorm, PreNorm

# %%
# Attention
# ---------
#
# Of shape (batch, tokens, width) in and out. The heads are cut out of the width and moved beside the batch, so that
# each product is one call of matmul. The backward of softmax is the pattern of the norms again: the gradient minus a
# mean of it, here weighted by the probabilities.


class Attention:
    """Causal self-attention with several heads."""

    def __init__(self, width, n_heads, rng, dtype):
        self.n_heads = n_heads
        self.to_qkv = Linear(width, 3 * width, rng, dtype=dtype)
        self.to_y = Linear(width, width, rng, dtype=dtype)

    def _split(self, x):
        """(batch, tokens, width) to (batch, heads, tokens, width of a head)."""
        batch, tokens, width = x.shape
        return x.reshape(batch, tokens, self.n_heads, width // self.n_heads).swapaxes(1, 2)

    def _join(self, x):
        batch, heads, tokens, head_width = x.shape
        return x.swapaxes(1, 2).reshape(batch, tokens, heads * head_width)

    def forward(self, x):
        q, k, v = (self._split(part) for part in np.split(self.to_qkv.forward(x), 3, axis=-1))
        # A Python float, unlike a NumPy scalar, leaves float32 what it is.
        self._scale = float(q.shape[-1]) ** -0.5
        scores = self._scale * (q @ k.swapaxes(-1, -2))
        # No token looks at a later one.
        scores[..., np.triu(np.ones(scores.shape[-2:], bool), k=1)] = -np.inf
        self._saved = q, k, v, softmax(scores)
        return self.to_y.forward(self._join(self._saved[3] @ v))

    def backward(self, dy):
        q, k, v, probabilities = self._saved
        d_mixed = self._split(self.to_y.backward(dy))
        d_probabilities = d_mixed @ v.swapaxes(-1, -2)
        mean = (d_probabilities * probabilities).sum(axis=-1, keepdims=True)
        d_scores = self._scale * probabilities * (d_probabilities - mean)
        parts = d_scores @ k, d_scores.swapaxes(-1, -2) @ q, probabilities.swapaxes(-1, -2) @ d_mixed
        return self.to_qkv.backward(np.concatenate([self._join(part) for part in parts], axis=-1))

    def update(self, learning_rate):
        self.to_qkv.update(learning_rate)
        self.to_y.update(learning_rate)


# %%
# The block
# ---------
#
# ``x + attention(norm(x))``, then the same with the feed-forward network: two ``PreNorm`` of fastnorm.layers one after
# the other. A sublayer is anything with forward, backward and update, so the attention above fits as it is.


def make_block(width, n_heads, rng, dtype, norm=LayerNorm):
    feed_forward = Sequential(
        Linear(width, 4 * width, rng, dtype=dtype), GELU(), Linear(4 * width, width, rng, dtype=dtype)
    )
    return Sequential(
        PreNorm(Attention(width, n_heads, rng, dtype), norm(width, dtype=dtype)),
        PreNorm(feed_forward, norm(width, dtype=dtype)),
    )


def parts_of(block):
    """Whatever has parameters, by name."""
    attention, feed_forward = block.layers
    return {
        "attention norm": attention.norm,
        "queries, keys, values": attention.sublayer.to_qkv,
        "attention output": attention.sublayer.to_y,
        "feed-forward norm": feed_forward.norm,
        "feed-forward in": feed_forward.sublayer.layers[0],
        "feed-forward out": feed_forward.sublayer.layers[2],
    }


# %%
# Are the gradients right?
# ------------------------
#
# The loss is a fixed random combination of the outputs. Each value of a sample is moved up and down by h; half the
# difference of the losses, divided by h, is the derivative up to an error of the order of h squared. In float64, with h
# = 1e-5, some nine digits should agree, relative to the largest derivative of that array.


def central_differences(loss, values, positions, h=1e-5):
    """The derivatives of loss() by values at these positions, which are changed in place and put back."""
    derivatives = []
    for position in positions:
        kept = values.flat[position]
        values.flat[position] = kept + h
        above = loss()
        values.flat[position] = kept - h
        below = loss()
        values.flat[position] = kept
        derivatives.append((above - below) / (2 * h))
    return np.array(derivatives)


def gradient_errors(seed=0, shape=(2, 5, 12), n_heads=3, n_sampled=20):
    """For x and each parameter: the largest error of the gradient at some positions, over the largest derivative."""
    rng = np.random.default_rng(seed)
    block = make_block(shape[-1], n_heads, rng, np.float64)
    x, dy = rng.standard_normal((2, *shape))
    for part in parts_of(block).values():
        # Weights of one and biases of zero would hide a factor that was forgotten.
        part.weight += 0.3 * rng.standard_normal(part.weight.shape)
        part.bias += 0.3 * rng.standard_normal(part.bias.shape)
    block.forward(x)
    pairs = {"x": (x, block.backward(dy))}
    for name, part in parts_of(block).items():
        pairs |= {f"{name}, weight": (part.weight, part.grad_weight), f"{name}, bias": (part.bias, part.grad_bias)}
    errors = {}
    for name, (values, gradient) in pairs.items():
        positions = rng.choice(values.size, min(n_sampled, values.size), replace=False)
        expected = central_differences(lambda: (block.forward(x) * dy).sum(), values, positions)
        errors[name] = np.abs(gradient.flat[positions] - expected).max() / np.abs(expected).max()
    return errors


if __name__ == "__main__":
    print("relative error of the gradients against central differences:")
    for name, error in gradient_errors().items():
        print(f"  {name:<32}{error:.1e}")

# %%
# How much of the time are the norms?
# -----------------------------------
#
# The same block with norms in plain NumPy, the formulas of the documentation as one would write them down, and a
# stopwatch around either. Both on one thread: plain NumPy has no more, and the threads of the matrix products are still
# spinning when a norm begins, so that more of them would wait for a core.


class NumpyLayerNorm:
    """The layer norm of fastnorm.layers in plain NumPy."""

    def __init__(self, width, *, eps=1e-5, dtype=np.float64):
        self.weight, self.bias, self.eps = np.ones(width, dtype), np.zeros(width, dtype), eps

    def forward(self, x):
        d = x - x.mean(axis=-1, keepdims=True)
        self._rstd = 1 / np.sqrt((d * d).mean(axis=-1, keepdims=True) + self.eps)
        self._x_hat = d * self._rstd
        return self._x_hat * self.weight + self.bias

    def backward(self, dy):
        x_hat, rows = self._x_hat, tuple(range(dy.ndim - 1))
        self.grad_weight, self.grad_bias = (dy * x_hat).sum(axis=rows), dy.sum(axis=rows)
        wdy = dy * self.weight
        c1, c2 = (wdy * x_hat).mean(axis=-1, keepdims=True), wdy.mean(axis=-1, keepdims=True)
        return self._rstd * (wdy - c2 - x_hat * c1)

    def update(self, learning_rate):
        self.weight -= learning_rate * self.grad_weight
        self.bias -= learning_rate * self.grad_bias


NORMS = {"norms: NumPy": NumpyLayerNorm, "norms: fastnorm": LayerNorm}


class Stopwatch:
    """A layer, and the seconds that its forward and backward have taken."""

    def __init__(self, layer):
        self.layer, self.seconds = layer, 0.0

    def _timed(self, method, argument):
        start = time.perf_counter()
        result = method(argument)
        self.seconds += time.perf_counter() - start
        return result

    def forward(self, x):
        return self._timed(self.layer.forward, x)

    def backward(self, dy):
        return self._timed(self.layer.backward, dy)

    def update(self, learning_rate):
        self.layer.update(learning_rate)


def watched_block(norm, shape, n_heads):
    """A block with a stopwatch around each norm and each sublayer."""
    block = make_block(shape[-1], n_heads, np.random.default_rng(0), np.float32, norm)
    for residual in block.layers:
        residual.norm, residual.sublayer = Stopwatch(residual.norm), Stopwatch(residual.sublayer)
    return block


def one_round(block, x, dy):
    """Seconds of one forward and backward: norms, attention, feed-forward, the whole."""
    watches = [watch for residual in block.layers for watch in (residual.norm, residual.sublayer)]
    for watch in watches:
        watch.seconds = 0.0
    start = time.perf_counter()
    block.forward(x)
    block.backward(dy)
    whole = time.perf_counter() - start
    norm_1, attention, norm_2, feed_forward = (watch.seconds for watch in watches)
    return norm_1 + norm_2, attention, feed_forward, whole


def milliseconds(shape=(4, 128, 256), n_heads=8, repeats=10):
    """The medians of one_round for either kind of norm. They take turns, so that both meet the same machine."""
    blocks = {name: watched_block(norm, shape, n_heads) for name, norm in NORMS.items()}
    x, dy = np.random.default_rng(1).standard_normal((2, *shape), dtype=np.float32)
    rounds = {name: [] for name in blocks}
    with fastnorm.num_threads(1):
        for _ in range(repeats + 2):
            for name, block in blocks.items():
                rounds[name].append(one_round(block, x, dy))
    # The first rounds meet cold caches and memory that nobody has touched.
    return {name: 1000 * np.median(seconds[2:], axis=0) for name, seconds in rounds.items()}


def plot(times):
    """Left the whole block; what is neither norm nor sublayer are the residual additions. Right the norms alone."""
    figure, (whole, alone) = plt.subplots(1, 2, figsize=(10, 3), layout="constrained", width_ratios=(3, 1), sharey=True)
    looks = [
        ("norms", "black", ""),
        ("attention", "0.8", "//"),
        ("feed-forward", "0.95", ".."),
        ("additions", "white", ""),
    ]
    values = np.array(list(times.values()))
    parts = np.column_stack([values[:, :3], values[:, 3] - values[:, :3].sum(axis=1)])
    left = np.zeros(len(parts))
    for part, (label, color, hatch) in zip(parts.T, looks, strict=True):
        whole.barh(list(times), part, left=left, color=color, hatch=hatch, edgecolor="black", label=label)
        left += part
    alone.barh(list(times), parts[:, 0], color="black")
    whole.set_xlabel("forward and backward of one block, ms")
    alone.set_xlabel("norms alone, ms")
    figure.legend(*whole.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    times = milliseconds()
    print("batch 4, 128 tokens, width 256, 8 heads, float32; milliseconds\n")
    for name, (norms, attention, feed_forward, whole) in times.items():
        print(
            f"{name:<18}norms {norms:6.2f} ({norms / whole:5.1%})   attention {attention:6.1f}   "
            f"feed-forward {feed_forward:6.1f}   whole {whole:6.1f}"
        )
    save(plot(times), "transformer_block")

# %%
# The times are those of the machine that made this page; run the script for those of yours. Most of a block are its
# matrix products and what stands between them (softmax, GELU), so faster norms shorten the whole by a few percent at
# most. The products grow with the square of the width, the norms with the width: in a wider block their share is
# smaller still, in a narrower one larger.
