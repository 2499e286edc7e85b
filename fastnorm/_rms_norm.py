from cython.cimports.fastnorm._row_norm import forward

def rms_norm(x, weight=None, *, axis=-1, eps=1e-5, weight_offset=0.0, out=None):
    """Doc."""
    return forward(x, weight, None, axis, eps, weight_offset, out, False, False)
