"""Normalization layers at the speed of a memory copy, for NumPy arrays, forward and backward."""
from fastnorm._config import __version__, show_config
from fastnorm._layer_norm import layer_norm, layer_norm_backward, layer_norm_forward
from fastnorm._rms_norm import rms_norm, rms_norm_backward, rms_norm_forward
from fastnorm._threads import get_num_threads, num_threads, set_num_threads

__all__ = [
    "__version__",
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
