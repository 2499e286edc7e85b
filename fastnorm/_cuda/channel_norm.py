"""The CUDA wing for norms over channels: arrays in, kernels and their geometry chosen, OUT arrays filled.

Only allocations and our own kernels, all on the current stream, as in row_norm. Forward asks for all kernels and all
memory before it launches anything: what can fail there has not touched the running arrays.
"""
import cupy

from fastnorm._cuda import devices, geometry, sources, views
from fastnorm._cuda.copies import storage_number
from fastnorm._cuda.geometry import SLICE_THREADS, SLOTS_BYTES

# Numbers of channel_scale and of channel_gradient.
_NUMBERS_OF_SCALE = 6


def channel_norm_forward(x, axis, weight, bias, eps, running_mean, running_var, momentum, y, mean, rstd, training):
    """Fill y, mean and rstd, and update the running arrays. fastnorm._backend has the contract of all wings."""
    dtype, arithmetic = views.storage(x.dtype, y.dtype)
    n_channels = x.shape[axis]
    kernel = _kernels("channel_forward.cu", dtype)
    affine = (*views.numbers(weight), *views.numbers(bias))
    running = (*views.numbers(running_mean), *views.numbers(running_var))
    statistics = views.pointer(mean), views.pointer(rstd), n_channels
    evaluate = kernel("channel_evaluate")
    if x.size == 0:
        evaluate((-(-n_channels // SLICE_THREADS),), (SLICE_THREADS,), (eps, *affine, *running, 0, *statistics))
        return
    outer, inner, plan = _plan(x, axis, dtype)
    x_view = views.channels(x, axis, inner, dtype, plan.way == "columns")
    y_view = views.channels(y, axis, inner, dtype, plan.way == "columns", fresh=True)
    width = views.width(x_view, y_view)
    scales = cupy.empty(n_channels * _NUMBERS_OF_SCALE, arithmetic)
    apply = kernel(f"channel_{plan.way}_apply")
    if training:
        sums, settle = kernel(f"channel_{plan.way}_sums"), kernel("channel_settle")
        # Five doubles for each part.
        parts = cupy.empty(n_channels * plan.parts * 5, views.FLOAT64)
        sums((plan.blocks,), (SLICE_THREADS,),
             (*_strides(plan, x_view), eps, parts.data.ptr, *_extents(plan, outer, n_channels, inner, True), width),
             shared_mem=plan.forward_memory)
        team = geometry.settling_team(plan.parts)
        settle((-(-n_channels * team // SLICE_THREADS),), (SLICE_THREADS,),
               (parts.data.ptr, plan.parts, outer * inner, eps, *affine, *running, momentum, scales.data.ptr,
                *statistics, team), shared_mem=SLOTS_BYTES)
    else:
        evaluate((-(-n_channels // SLICE_THREADS),), (SLICE_THREADS,),
                 (eps, *affine, *running, scales.data.ptr, *statistics))
    apply((plan.blocks,), (SLICE_THREADS,),
          (*_strides(plan, x_view), scales.data.ptr, *_strides(plan, y_view),
           *_extents(plan, outer, n_channels, inner, False), width), shared_mem=SLOTS_BYTES)
    views.deliver(y_view, y)


def channel_norm_backward(dy, x, axis, weight, mean, rstd, dx, dweight, dbias, training):
    """Fill dx, dweight and dbias. fastnorm._backend has the contract of all wings."""
    with_sums = training or dweight is not None or dbias is not None
    dtype, arithmetic = views.storage(x.dtype, dx.dtype, dy.dtype)
    n_channels = x.shape[axis]
    kernel = _kernels("channel_backward.cu", dtype)
    outer, inner, plan = _plan(x, axis, dtype)
    columns = plan.way == "columns"
    dy_view = views.channels(dy, axis, inner, dtype, columns)
    # In evaluation x counts for dweight alone.
    x_view = views.NO_CHANNELS
    if with_sums:
        x_view = dy_view if x is dy else views.channels(x, axis, inner, dtype, columns)
    dx_view = views.channels(dx, axis, inner, dtype, columns, fresh=True)
    width = views.width(dy_view, x_view, dx_view)
    gradients = cupy.empty(n_channels * _NUMBERS_OF_SCALE, arithmetic)
    parts = None
    if with_sums:
        # Three totals for each part, of one double or two.
        parts = cupy.empty(n_channels * plan.parts * 3 * (1 if arithmetic is views.FLOAT32 else 2), views.FLOAT64)
        kernel(f"channel_{plan.way}_gradient_sums")(
            (plan.blocks,), (SLICE_THREADS,),
            (*_strides(plan, dy_view), *_strides(plan, x_view), mean.data.ptr, parts.data.ptr,
             *_extents(plan, outer, n_channels, inner, True), width), shared_mem=plan.backward_memory)
    team = geometry.settling_team(plan.parts) if with_sums else 1
    any_sum = dbias if dweight is None else dweight
    types = (0, 0) if any_sum is None else (storage_number(any_sum.dtype), any_sum.itemsize)
    kernel("channel_gradient_settle")(
        (-(-n_channels * team // SLICE_THREADS),), (SLICE_THREADS,),
        (views.pointer(parts), plan.parts, outer * inner, *views.numbers(weight), mean.data.ptr, rstd.data.ptr,
         gradients.data.ptr, views.pointer(dweight), views.pointer(dbias), *types, n_channels, int(training), team),
        shared_mem=SLOTS_BYTES)
    kernel(f"channel_{plan.way}_gradient_apply")(
        (plan.blocks,), (SLICE_THREADS,),
        (*_strides(plan, dy_view), *_strides(plan, x_view if training else views.NO_CHANNELS), gradients.data.ptr,
         *_strides(plan, dx_view), *_extents(plan, outer, n_channels, inner, False), width), shared_mem=SLOTS_BYTES)
    views.deliver(dx_view, dx)


def _kernels(source, dtype):
    """The kernels of a source by their names."""
    number = devices.current()
    return lambda name: sources.kernel(number, source, name, storage=dtype.name)


def _plan(x, axis, dtype):
    """(outer, inner, the plan) of x seen as (outer, n_channels, inner)."""
    outer = inner = 1
    for n in x.shape[:axis]:
        outer *= n
    for n in x.shape[axis + 1:]:
        inner *= n
    return outer, inner, geometry.channel_plan(outer, x.shape[axis], inner, dtype.itemsize)


def _strides(plan, view):
    """Pointer and strides as the kernels of that way take them."""
    return view[1:] if plan.way == "runs" else view[1:3]


def _extents(plan, outer, n_channels, inner, with_parts):
    """The extents, likewise; with_parts: also where the sums of a chunk go."""
    if plan.way == "runs":
        return outer, inner
    chunks = (plan.chunks,) if with_parts else ()
    return outer, n_channels * inner, inner, plan.rows_of_chunk, *chunks, plan.across
