"""The CUDA wing for norms over rows: arrays in, kernels and their geometry chosen, OUT arrays filled.

All kernel arguments are pointers, 64-bit integers and doubles, which is what CuPy makes of Python's numbers.
Only allocations and our own kernels, all on the current stream: what was called before can be captured in a graph.
"""
from functools import lru_cache

import cupy

from fastnorm._cuda import devices, geometry, sources, views
from fastnorm._cuda.copies import copy, storage_number


def row_norm_forward(x, residual, alpha, n_axes, weight, weight_offset, bias, eps, y, h, mean, rstd, centered):
    """Fill y, h, mean and rstd; without y only h. fastnorm._backend has the contract of all wings."""
    fused = residual is not None
    dtype, arithmetic = views.storage((h if fused else x).dtype, (h if y is None else y).dtype)
    if fused and not _sums_as_stored(dtype, arithmetic, x.dtype, residual.dtype, h.dtype):
        wide = cupy.empty(h.shape, arithmetic)
        row_norm_forward(x, residual, alpha, n_axes, None, 0.0, None, 0.0, None, wide, None, None, False)
        copy(wide, h)
        x, residual, fused = h, None, False
    n_rows, n_cols = _size(x, n_axes)
    x_rows = views.rows(x, n_axes, n_cols, dtype)
    residual_rows, h_rows = views.NO_ROWS, views.NO_ROWS
    if fused:
        residual_rows = views.rows(residual, n_axes, n_cols, dtype)
        h_rows = views.rows(h, n_axes, n_cols, dtype, fresh=True)
    y_rows = views.NO_ROWS if y is None else views.rows(y, n_axes, n_cols, dtype, fresh=True)
    # The arrays stay alive by these names until the kernels are launched.
    weight, *weight_arguments = _parameter(weight, dtype, arithmetic)
    bias, *bias_arguments = _parameter(bias, dtype, arithmetic)
    width = views.width(x_rows, residual_rows, h_rows, y_rows)
    program = _program("forward", devices.current(), n_cols, dtype, centered)
    plan, launch = program.plan, program.launch
    inputs = (x_rows.pointer, x_rows.stride, residual_rows.pointer, residual_rows.stride, alpha)
    mean_pointer, rstd_pointer = views.pointer(mean), views.pointer(rstd)
    if plan.source == "row_forward":
        launch("row_forward", -(-n_rows // plan.teams),
               (*inputs, *weight_arguments, weight_offset, *bias_arguments, eps, y_rows.pointer, y_rows.stride,
                h_rows.pointer, h_rows.stride, mean_pointer, rstd_pointer, n_rows, n_cols, width, plan.team))
    elif y is None:
        launch("slice_forward_sums", n_rows * geometry.slices_of(n_cols, dtype.itemsize),
               (*inputs, h_rows.pointer, h_rows.stride, eps, 0, n_cols, width))
    else:
        n_slices = geometry.slices_of(n_cols, dtype.itemsize)
        slices, scales = cupy.empty(n_rows * n_slices * 4, views.FLOAT64), cupy.empty(n_rows * 4, views.FLOAT64)
        launch("slice_forward_sums", n_rows * n_slices,
               (*inputs, h_rows.pointer, h_rows.stride, eps, slices.data.ptr, n_cols, width))
        launch("slice_forward_settle", n_rows,
               (slices.data.ptr, eps, scales.data.ptr, mean_pointer, rstd_pointer, n_cols))
        normalized = h_rows if fused else x_rows
        launch("slice_forward_apply", n_rows * n_slices,
               (normalized.pointer, normalized.stride, scales.data.ptr, *weight_arguments, weight_offset,
                *bias_arguments, y_rows.pointer, y_rows.stride, n_cols, width))
    if fused:
        views.deliver(h_rows, h)
    if y is not None:
        views.deliver(y_rows, y)


def row_norm_backward(dy, dh, x, n_axes, weight, weight_offset, mean, rstd, alpha, dx, dresidual, dweight, dbias,
                      centered):
    """Fill dx, dresidual, dweight and dbias. fastnorm._backend has the contract of all wings."""
    others = [a.dtype for a in (dx, dy, dh, dresidual) if a is not None]
    dtype, arithmetic = views.storage(x.dtype, *others)
    n_rows, n_cols = _size(x, n_axes)
    dy_rows = views.rows(dy, n_axes, n_cols, dtype)
    x_rows = dy_rows if dy is x else views.rows(x, n_axes, n_cols, dtype)
    dh_rows = views.NO_ROWS if dh is None else views.rows(dh, n_axes, n_cols, dtype)
    dx_rows = views.rows(dx, n_axes, n_cols, dtype, fresh=True)
    dresidual_rows = views.NO_ROWS if dresidual is None else views.rows(dresidual, n_axes, n_cols, dtype, fresh=True)
    weight, *weight_arguments = _parameter(weight, dtype, arithmetic)
    width = views.width(dy_rows, dh_rows, x_rows, dx_rows, dresidual_rows)
    number = devices.current()
    multiprocessors = devices.properties(number).multiprocessors
    program = _program("backward", number, n_cols, dtype, centered)
    plan, launch = program.plan, program.launch
    n_sums = 2 if centered else 1
    dy_argument, x_argument = (dy_rows.pointer, dy_rows.stride), (x_rows.pointer, x_rows.stride)
    inputs = (*dy_argument, dh_rows.pointer, dh_rows.stride, *x_argument)
    outputs = (alpha, dx_rows.pointer, dx_rows.stride, dresidual_rows.pointer, dresidual_rows.stride)
    mean_pointer, rstd_pointer = views.pointer(mean), rstd.data.ptr
    if plan.source == "row_backward":
        n_partials = geometry.backward_blocks(plan, n_rows, multiprocessors, dweight is not None)
        partials = _partials(dweight, n_partials, n_sums, n_cols, arithmetic)
        launch("row_backward", n_partials,
               (*inputs, *weight_arguments, weight_offset, mean_pointer, rstd_pointer, *outputs,
                views.pointer(partials), n_rows, n_cols, width, plan.team))
    else:
        n_slices = geometry.slices_of(n_cols, dtype.itemsize)
        runs, rows_per_chunk, n_partials = geometry.backward_chunks(n_rows, n_cols, dtype.itemsize, multiprocessors)
        partials = _partials(dweight, n_partials, n_sums, n_cols, arithmetic)
        # Three totals for each slice, of one double or two; five numbers for each row.
        slices = cupy.empty(n_rows * n_slices * 3 * (1 if arithmetic is views.FLOAT32 else 2), views.FLOAT64)
        scales = cupy.empty(n_rows * 5, arithmetic)
        launch("slice_backward_sums", n_rows * n_slices,
               (*dy_argument, *x_argument, *weight_arguments, weight_offset, mean_pointer, slices.data.ptr, n_cols,
                width))
        launch("slice_backward_settle", n_rows, (slices.data.ptr, mean_pointer, rstd_pointer, scales.data.ptr, n_cols))
        launch("slice_backward_apply", runs * n_partials,
               (*inputs, scales.data.ptr, *weight_arguments, weight_offset, *outputs, views.pointer(partials), n_rows,
                n_cols, rows_per_chunk, width))
    if dweight is not None:
        finish = sources.kernel(number, "finish_sums.cu", "finish_sums", storage=arithmetic.name)
        finish((-(-n_cols // 32), n_sums), (256,),
               (partials.data.ptr, dweight.data.ptr, views.pointer(dbias), storage_number(dweight.dtype),
                dweight.itemsize, n_partials, n_sums, n_cols), shared_mem=256 * 2 * arithmetic.itemsize)
    views.deliver(dx_rows, dx)
    if dresidual is not None:
        views.deliver(dresidual_rows, dresidual)


class Program:
    """The kernels for rows of one length, dtype and device."""

    def __init__(self, number, plan, dtype, centered):
        self.number, self.plan = number, plan
        self.macros = {"storage": dtype.name, "centered": int(centered), **dict(plan.macros)}
        self.kernels = {}

    def launch(self, name, blocks, arguments):
        kernel = self.kernels.get(name)
        if kernel is None:
            large = self.plan.shared_memory > sources.STATIC_LIMIT
            kernel = sources.kernel(self.number, self.plan.source + ".cu", name, large, **self.macros)
            self.kernels[name] = kernel
        kernel((blocks,), (self.plan.threads,), arguments, shared_mem=self.plan.shared_memory)


@lru_cache(4096)
def _program(direction, number, n_cols, dtype, centered):
    shared_memory = devices.properties(number).shared_memory
    plan = (geometry.forward_plan(n_cols, dtype.itemsize, shared_memory) if direction == "forward"
            else geometry.backward_plan(n_cols, dtype.itemsize, centered, shared_memory))
    return Program(number, plan, dtype, centered)


def _sums_as_stored(dtype, arithmetic, x, residual, h):
    """Whether kernels that work on dtype find in x and residual all their digits, and round the sum to that of h."""
    return h == dtype and (dtype == arithmetic or x == residual == dtype)


def _size(x, n_axes):
    n_cols = 1
    for n in x.shape[x.ndim - n_axes:]:
        n_cols *= n
    return x.size // n_cols, n_cols


def _parameter(a, dtype, arithmetic):
    """(owner, pointer, is of the storage type rather than of the arithmetic type); both dtypes are read as they are,
    others are converted."""
    if a is None:
        return None, 0, 0
    if a.dtype not in (dtype, arithmetic) or not a.flags.c_contiguous or a.data.ptr % a.itemsize:
        row = cupy.empty(a.shape, arithmetic)
        copy(a, row)
        a = row
    return a, a.data.ptr, int(a.dtype != arithmetic)


def _partials(dweight, n_partials, n_sums, n_cols, arithmetic):
    return None if dweight is None else cupy.empty(n_partials * n_sums * n_cols, arithmetic)
