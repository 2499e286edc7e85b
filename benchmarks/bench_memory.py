"""Peak memory of a process that normalizes a large array into memory that is there."""
from .common import OPS, make_arrays, peers


class Peak:
    """x, dy and out are 64 MiB each, the interpreter some 30: a temporary that grows with the rows stands out."""

    params = [OPS, ["4096x4096 axis 1", "4096x4096 axis 0", "transposed"]]
    param_names = ["op", "case"]

    def setup(self, op, case):
        arrays = make_arrays(op, "4096x4096 axis 1" if case == "transposed" else case)
        if case == "transposed":
            arrays.x, arrays.dy = arrays.x.T, None if arrays.dy is None else arrays.dy.T
        self.call = peers.make_call("fastnorm", arrays)

    def peakmem_call(self, op, case):
        self.call()
