"""Normalization layers at the speed of a memory copy, for NumPy and CuPy arrays, forward and backward."""
from fastnorm._batch_norm import batch_norm, batch_norm_backward, batch_norm_forward
from fastnorm._config import __version__, show_config
from fastnorm._layer_norm import (
    add_layer_norm,
    add_layer_norm_backward,
    add_layer_norm_forward,
    layer_norm,
    layer_norm_backward,
    layer_norm_forward,
)
from fastnorm._rms_norm import (
    add_rms_norm,
    add_rms_norm_backward,
    add_rms_norm_forward,
    rms_norm,
    rms_norm_backward,
    rms_norm_forward,
)
from fastnorm._threads import get_num_threads, num_threads, set_num_threads

__all__ = [
    "__version__",
    "add_layer_norm",
    "add_layer_norm_backward",
    "add_layer_norm_forward",
    "add_rms_norm",
    "add_rms_norm_backward",
    "add_rms_norm_forward",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_forward",
    "get_num_threads",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "num_threads",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "set_num_threads",
    "show_config",
]
