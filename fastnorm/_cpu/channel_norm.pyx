"""The CPU wing for norms over channels: each channel is a row of the row kernels, with one weight and one bias."""
from cpython.exc cimport PyErr_CheckSignals
from libc.math cimport isfinite, isinf, sqrt
from libc.stdlib cimport free
cimport numpy as cnp

from fastnorm._cpu.isa cimport float32_kernels
from fastnorm._cpu.kernels cimport job, kernels
from fastnorm._cpu.row_norm cimport (STREAM_BYTES, allocate, as_row, data_or_null, kernels_of, open_nothing_else, open_view,
                                     rows_adjacent, run_backward, run_evaluate, run_forward, storage_type)

import numpy as np

cnp.import_array()

cdef extern from "storage.h" nogil:
    # This module's real is double (setup.py).
    void load_run(const char* p, Py_ssize_t stride, int type, int swapped, Py_ssize_t n, double* out)
    void store_run(char* p, Py_ssize_t stride, int type, int swapped, Py_ssize_t n, const double* a)
    void store_doubles(char* p, int type, Py_ssize_t n, const double* a)

# Values next to each other from which evaluation goes run by run.
cdef Py_ssize_t RUN_MIN = 8


cdef inline bint streams(cnp.ndarray source, cnp.ndarray result) noexcept:
    """Whether a result goes past the cache: large ones that are not computed in place."""
    return cnp.PyArray_NBYTES(result) >= STREAM_BYTES and cnp.PyArray_DATA(result) != cnp.PyArray_DATA(source)


cdef object channels_first(cnp.ndarray a, int axis):
    """The same array, a row for each channel."""
    if axis == 0:
        return a
    return a.transpose([axis] + [k for k in range(a.ndim) if k != axis])


cdef int open_channels(job* j, cnp.ndarray x, int axis, weight_row) except -1:
    """A job whose rows are the channels of x."""
    j.n_rows = x.shape[axis]
    j.n_cols = cnp.PyArray_SIZE(x) // j.n_rows
    j.centered = True
    j.eps = 0.0
    j.mean = j.rstd = NULL
    open_view(&j.x, channels_first(x, axis), x.ndim - 1)
    open_nothing_else(j)
    j.by_row = True
    j.n_channels = j.n_rows
    j.weight = data_or_null(weight_row)
    j.bias = NULL
    return 0


def channel_norm_forward(cnp.ndarray x, int axis, weight, bias, double eps, running_mean, running_var, double momentum,
                         cnp.ndarray y, mean, rstd, bint training):
    """Fill y, mean and rstd, update the running arrays. fastnorm._backend has the contract of all wings."""
    cdef const kernels* k = kernels_of(x)
    weight_row, bias_row = as_row(weight, 0.0, k), as_row(bias, 0.0, k)
    if training:
        train(k, x, axis, weight_row, bias_row, eps, running_mean, running_var, momentum, y, mean, rstd)
        return
    given_hi, given_lo, given_rstd = given_statistics(running_mean, running_var, eps, k)
    if mean is not None:
        mean[...] = given_hi
        rstd[...] = given_rstd
    if x.size:
        evaluate(k, x, axis, given_hi, given_lo, given_rstd, weight_row, bias_row, y)


cdef int train(const kernels* k, cnp.ndarray x, int axis, weight_row, bias_row, double eps, running_mean, running_var,
               double momentum, cnp.ndarray y, mean, rstd) except -1:
    """With the statistics of x."""
    cdef job j
    cdef double* moments = NULL
    cdef double unbiased
    cdef Py_ssize_t i
    open_channels(&j, x, axis, weight_row)
    j.bias = data_or_null(bias_row)
    j.eps = eps
    j.mean = data_or_null(mean)
    j.rstd = data_or_null(rstd)
    open_view(&j.y, channels_first(y, axis), y.ndim - 1)
    j.stream = streams(x, y)
    if running_mean is None:
        return run_forward(k, &j)
    moments = allocate(2 * j.n_rows)
    try:
        j.moments = moments
        run_forward(k, &j)
        unbiased = <double>j.n_cols / (j.n_cols - 1)
        for i in range(j.n_rows):
            moments[j.n_rows + i] *= unbiased
        # The last chance of a Ctrl-C: nothing can fail from here on.
        PyErr_CheckSignals()
        update(running_mean, momentum, moments)
        update(running_var, momentum, moments + j.n_rows)
    finally:
        free(moments)
    return 0


cdef void update(cnp.ndarray running, double momentum, const double* new) noexcept:
    """running = (1 - momentum) * running + momentum * new. Without a new value, or the old one, where its weight is zero:
    that would make a NaN of an infinity."""
    cdef char* p = <char*>cnp.PyArray_DATA(running)
    cdef Py_ssize_t n = running.shape[0], stride = cnp.PyArray_STRIDE(running, 0), i
    cdef int type = storage_type(running), swapped = not cnp.PyArray_ISNOTSWAPPED(running)
    cdef double value = 0
    if momentum == 0:
        return
    for i in range(n):
        load_run(p + i * stride, stride, type, swapped, 1, &value)
        value = new[i] if momentum == 1 else (1 - momentum) * value + momentum * new[i]
        store_run(p + i * stride, stride, type, swapped, 1, &value)


cdef object given_statistics(cnp.ndarray running_mean, cnp.ndarray running_var, double eps, const kernels* k):
    """(hi, lo, rstd) of the arithmetic type: the mean in two parts, since it may be wider than that."""
    cdef Py_ssize_t n = running_mean.shape[0], i
    wide_mean, wide_rstd = np.empty(n, np.float64), np.empty(n, np.float64)
    cdef double* m = <double*>cnp.PyArray_DATA(<cnp.ndarray>wide_mean)
    cdef double* v = <double*>cnp.PyArray_DATA(<cnp.ndarray>wide_rstd)
    cdef float* hi
    cdef float* lo
    cdef float* rstd
    load_run(<char*>cnp.PyArray_DATA(running_mean), cnp.PyArray_STRIDE(running_mean, 0), storage_type(running_mean),
             not cnp.PyArray_ISNOTSWAPPED(running_mean), n, m)
    load_run(<char*>cnp.PyArray_DATA(running_var), cnp.PyArray_STRIDE(running_var, 0), storage_type(running_var),
             not cnp.PyArray_ISNOTSWAPPED(running_var), n, v)
    for i in range(n):
        v[i] = 1.0 / sqrt(v[i] + eps)
    if k != float32_kernels:
        return wide_mean, np.zeros(n), wide_rstd
    parts = np.empty((3, n), np.float32)
    hi = <float*>cnp.PyArray_DATA(<cnp.ndarray>parts)
    lo = hi + n
    rstd = lo + n
    for i in range(n):
        hi[i] = <float>m[i]
        lo[i] = <float>(m[i] - hi[i]) if isfinite(m[i]) and isfinite(hi[i]) else 0
        rstd[i] = <float>v[i]
    return parts[0], parts[1], parts[2]


cdef object finite_rstd(cnp.ndarray rstd, const kernels* k):
    """rstd, the largest number where it is infinite (no variance, no eps): a value that is the mean gives bias then, and any
    other one something huge."""
    cdef Py_ssize_t i
    cdef bint finite = True
    for i in range(rstd.shape[0]):
        if k == float32_kernels:
            finite = finite and not isinf((<float*>cnp.PyArray_DATA(rstd))[i])
        else:
            finite = finite and not isinf((<double*>cnp.PyArray_DATA(rstd))[i])
    return rstd if finite else np.minimum(rstd, np.finfo(rstd.dtype).max)


cdef int evaluate(const kernels* k, cnp.ndarray x, int axis, cnp.ndarray given_hi, cnp.ndarray given_lo, object given_rstd,
                  weight_row, bias_row, cnp.ndarray y) except -1:
    """y = (x - mean) * rstd * weight + bias with statistics that are given."""
    cdef job j
    cdef Py_ssize_t inner = 1, size = cnp.PyArray_SIZE(x)
    cdef int i, after = x.ndim - 1 - axis
    open_channels(&j, x, axis, weight_row)
    j.bias = data_or_null(bias_row)
    given_rstd = finite_rstd(given_rstd, k)
    j.given_hi = cnp.PyArray_DATA(given_hi)
    j.given_lo = cnp.PyArray_DATA(given_lo)
    j.given_rstd = cnp.PyArray_DATA(<cnp.ndarray>given_rstd)
    j.stream = streams(x, y)
    open_view(&j.y, channels_first(y, axis), y.ndim - 1)
    if rows_adjacent(&j.x) and rows_adjacent(&j.y):
        return run_evaluate(k, &j, True)
    for i in range(axis + 1, x.ndim):
        inner *= x.shape[i]
    if inner >= RUN_MIN:
        # In the order of memory: rows are what stands before the runs, and there are many for each channel.
        open_view(&j.x, x, after)
        open_view(&j.y, y, after)
        j.n_cols = inner
        j.n_rows = size // inner
    return run_evaluate(k, &j, False)


def channel_norm_backward(cnp.ndarray dy, cnp.ndarray x, int axis, weight, cnp.ndarray mean, cnp.ndarray rstd, cnp.ndarray dx,
                          dweight, dbias, bint training):
    """Fill dx, dweight and dbias. fastnorm._backend has the contract of all wings."""
    cdef job j
    cdef const kernels* k = kernels_of(x)
    cdef double* row_sums = NULL
    weight_row = as_row(weight, 0.0, k)
    open_channels(&j, x, axis, weight_row)
    j.mean = cnp.PyArray_DATA(mean)
    j.rstd = cnp.PyArray_DATA(rstd)
    j.constant = not training
    # A chunk is a channel: nothing is added up across them.
    j.rows_per_chunk = 1
    j.partial_cols = 0
    j.dweight_partial = j.dbias_partial = NULL
    open_view(&j.dy, channels_first(dy, axis), dy.ndim - 1)
    open_view(&j.dx, channels_first(dx, axis), dx.ndim - 1)
    # As in row_norm_backward.
    j.stream = cnp.PyArray_NBYTES(dx) >= STREAM_BYTES and j.dx.data != j.x.data and j.dx.data != j.dy.data
    if not training:
        j.dx.data = NULL
    try:
        if dweight is not None:
            row_sums = allocate(2 * j.n_rows)
            j.row_sums = row_sums
        if training or dweight is not None:
            run_backward(k, &j)
        if dweight is not None:
            store_doubles(<char*>cnp.PyArray_DATA(<cnp.ndarray>dweight), storage_type(dweight), j.n_rows, row_sums)
            store_doubles(<char*>cnp.PyArray_DATA(<cnp.ndarray>dbias), storage_type(dbias), j.n_rows, row_sums + j.n_rows)
    finally:
        free(row_sums)
    if not training:
        # About zero, so that dx does not depend on x.
        zeros = np.zeros(j.n_channels, rstd.dtype)
        evaluate(k, dy, axis, zeros, zeros, rstd, weight_row, None, dx)
