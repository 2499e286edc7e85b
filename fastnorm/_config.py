"""What runs here: versions, processor level, threads, devices."""
import numpy as np

from fastnorm import _cpu
from fastnorm._threads import get_num_threads

__version__ = "0.1.0"


def show_config(mode="print"):
    """Show what fastnorm runs on.

    Parameters
    ----------
    mode : {"print", "dict"}
        Print one line for each entry, or return them.

    Returns
    -------
    dict or None
        With mode "dict": "version"; "isa", the processor level in use; "isa_levels", those that
        this build and processor have, narrowest first; "num_threads" as `get_num_threads` has it;
        "openmp", whether this build can use threads; "numpy" and "cupy", their versions, None if
        not installed; "gpus", the names of the devices that CuPy finds.

    Raises
    ------
    ValueError
        Another mode.

    Examples
    --------
    >>> import fastnorm
    >>> fastnorm.show_config("dict")["isa_levels"][0]
    'baseline'
    """
    if mode not in ("print", "dict"):
        raise ValueError(f"mode: expected 'print' or 'dict', got {mode!r}")
    cupy, gpus = _cupy()
    config = {
        "version": __version__,
        "isa": _cpu.level,
        "isa_levels": list(_cpu.levels),
        "num_threads": get_num_threads(),
        "openmp": _cpu.has_openmp,
        "numpy": np.__version__,
        "cupy": cupy,
        "gpus": gpus,
    }
    if mode == "dict":
        return config
    for key, value in config.items():
        text = ", ".join(value) if isinstance(value, list) else value
        print(f"{key:12s} {'none' if text in (None, '') else text}")
    return None


def _cupy():
    """Version and device names; CuPy may be absent, broken, or without a device."""
    try:
        import cupy
    except Exception:
        return None, []
    try:
        runtime = cupy.cuda.runtime
        devices = range(runtime.getDeviceCount())
        return cupy.__version__, [runtime.getDeviceProperties(k)["name"].decode() for k in devices]
    except Exception:
        return cupy.__version__, []
