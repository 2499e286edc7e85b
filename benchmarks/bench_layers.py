"""Layers: forward, backward and the update of what they hold, into fresh memory as networks call them."""
import functools

import numpy as np

from .common import parse

# Of n features in the last axis.
LAYERS = {
    "LayerNorm": lambda layers, n: layers.LayerNorm(n, dtype=np.float32),
    "RMSNorm": lambda layers, n: layers.RMSNorm(n, dtype=np.float32),
    "BatchNorm": lambda layers, n: layers.BatchNorm(n, dtype=np.float32),
    "PreNorm": lambda layers, n: layers.PreNorm(Identity(), layers.LayerNorm(n, dtype=np.float32)),
    "PostNorm": lambda layers, n: layers.PostNorm(Identity(), layers.RMSNorm(n, dtype=np.float32)),
    "DeepNorm": lambda layers, n: layers.DeepNorm(Identity(), n, alpha=2.0, dtype=np.float32),
}


class Identity:
    """A sublayer that costs nothing."""

    def forward(self, x):
        return x

    __call__ = backward = forward

    def update(self, learning_rate):
        pass


@functools.lru_cache(maxsize=1)
def make(layer, shape):
    """The layer after a forward and a backward, and the array that it gets."""
    try:
        from fastnorm import layers
    except ImportError:
        raise NotImplementedError("this commit has no layers") from None
    shape, _ = parse(shape)
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    made = LAYERS[layer](layers, shape[-1])
    made.forward(x)
    made.backward(x)
    return made, x


class Layers:
    """BatchNorm in training."""

    params = [list(LAYERS), ["forward", "backward", "update"], ["32x768", "4096x768"]]
    param_names = ["layer", "step", "shape"]
    repeat = (10, 100, 1.0)

    def setup(self, layer, step, shape):
        made, x = make(layer, shape)
        argument = 1e-3 if step == "update" else x
        self.call = functools.partial(getattr(made, step), argument)

    def time_call(self, layer, step, shape):
        self.call()
