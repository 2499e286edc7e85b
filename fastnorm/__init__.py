from fastnorm._layer_norm import layer_norm
from fastnorm._rms_norm import rms_norm
