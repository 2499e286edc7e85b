"""Peak memory of a process that normalizes a large array into memory that is there."""
from .common import BACKWARD, FORWARD, OPS, make_arrays


class Peak:
    """x, dy and out are 64 MiB each, the interpreter some 30: a temporary that grows with the rows stands out."""

    params = [FORWARD + BACKWARD, ["4096x4096 axis 1", "4096x4096 axis 0", "transposed"]]
    param_names = ["op", "case"]

    def setup(self, op, case):
        axis = 0 if case.endswith("axis 0") else 1
        arrays = make_arrays((4096, 4096), "float32", axis)
        if case == "transposed":
            arrays = arrays._replace(x=arrays.x.T, dy=arrays.dy.T)
        self.call = OPS["fastnorm"][op](arrays, axis)

    def peakmem_call(self, op, case):
        self.call()
