"""What the examples share: a few layers without normalization, a loss, the data, a training loop, the figures.

The layers keep to the protocol of fastnorm.layers: ``forward(x)``, ``backward(dy)``, which returns dx and keeps the
gradients of the parameters, and ``update(learning_rate)``.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

# One look for each kind of curve, all to be told apart without colour.
STYLES = [
    {"color": "black", "linestyle": "-", "marker": "o"},
    {"color": "tab:blue", "linestyle": "--", "marker": "s"},
    {"color": "tab:orange", "linestyle": ":", "marker": "^"},
    {"color": "tab:green", "linestyle": "-.", "marker": "D"},
]


class Linear:
    """x @ weight + bias. The weights start normal, with variance gain**2 / n_in."""

    def __init__(self, n_in, n_out, rng, *, gain=1.0, bias=True, dtype=np.float64):
        self.weight = (rng.standard_normal((n_in, n_out)) * gain / np.sqrt(n_in)).astype(dtype)
        self.bias = np.zeros(n_out, dtype) if bias else None
        self.grad_weight = self.grad_bias = None

    def forward(self, x):
        self._x = x
        y = x @ self.weight
        return y if self.bias is None else np.add(y, self.bias, out=y)

    def backward(self, dy):
        # One product for all leading axes: a batch of sequences is a longer batch.
        rows, d_rows = self._x.reshape(-1, self._x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        self.grad_weight = rows.T @ d_rows
        if self.bias is not None:
            self.grad_bias = d_rows.sum(axis=0)
        return dy @ self.weight.T

    def update(self, learning_rate):
        self.weight -= learning_rate * self.grad_weight
        if self.bias is not None:
            self.bias -= learning_rate * self.grad_bias


class ReLU:
    """max(x, 0)."""

    def forward(self, x):
        self._positive = x > 0
        return x * self._positive

    def backward(self, dy):
        return dy * self._positive

    def update(self, learning_rate):
        """Nothing to learn here."""


class GELU:
    """x * Phi(x), with the usual approximation of the normal distribution function by tanh."""

    def forward(self, x):
        self._x = x
        self._tanh = np.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x * x * x))
        return 0.5 * x * (1 + self._tanh)

    def backward(self, dy):
        x, tanh = self._x, self._tanh
        slope = np.sqrt(2 / np.pi).astype(x.dtype) * (1 + 3 * 0.044715 * x * x)
        return dy * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)

    def update(self, learning_rate):
        """Nothing to learn here."""


class Sequential:
    """Layers one after the other."""

    def __init__(self, *layers):
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, dy):
        for layer in reversed(self.layers):
            dy = layer.backward(dy)
        return dy

    def update(self, learning_rate):
        for layer in self.layers:
            layer.update(learning_rate)


def softmax(x):
    """Along the last axis, without overflow."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def softmax_cross_entropy(logits, labels):
    """The mean loss over the cases, in nats, and its gradient with respect to the logits."""
    probabilities = softmax(logits)
    cases = np.arange(len(labels))
    loss = -np.log(np.maximum(probabilities[cases, labels], np.finfo(logits.dtype).tiny)).mean()
    probabilities[cases, labels] -= 1
    probabilities /= len(labels)
    return float(loss), probabilities


def digits(dtype=np.float32, n_test=360):
    """scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels in 0 to 1, shuffled once and for all.

    Returns x and labels to train on, then x and labels to test on.
    """
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, labels = (data.data[order] / 16).astype(dtype), data.target[order]
    return x[n_test:], labels[n_test:], x[:n_test], labels[:n_test]


def batches(n_cases, batch_size, rng):
    """Indices of one pass over the cases in random order. What does not fill a batch is left out of this pass."""
    order = rng.permutation(n_cases)
    return order[: n_cases // batch_size * batch_size].reshape(-1, batch_size)


def train_step(network, x, labels, learning_rate):
    """One step of gradient descent; returns the loss before it."""
    loss, dy = softmax_cross_entropy(network.forward(x), labels)
    network.backward(dy)
    network.update(learning_rate)
    return loss


def error_rate(network, x, labels):
    """The share of cases that are classified wrongly."""
    return float((network.forward(x).argmax(axis=-1) != labels).mean())


def save(figure, name):
    """Write the figure to the path given on the command line, else to examples/NAME.png."""
    # Whoever builds the gallery takes the figures by itself.
    if "sphinx_gallery" in sys.modules:
        return
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name(f"{name}.png")
    figure.savefig(path, dpi=150)
    print(f"\nplot: {path}")
