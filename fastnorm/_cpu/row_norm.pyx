"""The CPU wing for norms over rows: arrays in, threads and kernels chosen, OUT arrays filled."""
from cpython.exc cimport PyErr_CheckSignals
from cython.parallel cimport prange
from libc.stdlib cimport malloc, free
from libc.string cimport memset
cimport numpy as cnp

from fastnorm._cpu.kernels cimport MAX_DIMS, job, kernels, row_statistics, view
from fastnorm._cpu.isa cimport float32_kernels, float64_kernels

import os

import numpy as np

from fastnorm import _threads

cnp.import_array()

cdef extern from "threads.h" nogil:
    int HAS_OPENMP
    int max_threads()
    int in_parallel()

cdef extern from "storage.h":
    enum:
        ST_FLOAT16, ST_BFLOAT16, ST_FLOAT32, ST_FLOAT64
        ST_BOOL, ST_INT8, ST_UINT8, ST_INT16, ST_UINT16, ST_INT32, ST_UINT32, ST_INT64, ST_UINT64

cdef dict STORAGE = {
    "float16": ST_FLOAT16, "bfloat16": ST_BFLOAT16, "float32": ST_FLOAT32, "float64": ST_FLOAT64, "bool": ST_BOOL,
    "int8": ST_INT8, "uint8": ST_UINT8, "int16": ST_INT16, "uint16": ST_UINT16,
    "int32": ST_INT32, "uint32": ST_UINT32, "int64": ST_INT64, "uint64": ST_UINT64,
}

# Values; below, starting threads costs more than it saves. docs/benchmarks.md has the sweep.
cdef Py_ssize_t PARALLEL_MIN = 1 << 16
# Values; between two such slices Ctrl-C is looked for: some ten milliseconds.
cdef Py_ssize_t SLICE = 1 << 25
# Values; the global lock is kept below: releasing it costs more than a tiny call may.
cdef Py_ssize_t RELEASE_MIN = 1 << 12
# Values; a row from here on may be split over threads.
cdef Py_ssize_t SPLIT_MIN = 1 << 16
# Bytes of output from which stores go past the cache, whatever cache size the machine reports.
cdef Py_ssize_t STREAM_BYTES = int(os.environ.get("FASTNORM_STREAM_BYTES") or 32 << 20)
# A block of values as lanes.h has it, in bytes.
cdef Py_ssize_t BLOCK_BYTES = 4096


# ---------------------------------------------------------------------------------------------
# Arrays to views
# ---------------------------------------------------------------------------------------------

cdef int merge(const Py_ssize_t* shape, const Py_ssize_t* strides, int ndim, Py_ssize_t* out_shape, Py_ssize_t* out_strides):
    """Drop dimensions of length 1 and merge neighbours that one stride can walk. At least one stays."""
    cdef int k, n = 0
    for k in range(ndim):
        if shape[k] == 1:
            continue
        if n and out_strides[n - 1] == shape[k] * strides[k]:
            out_shape[n - 1] *= shape[k]
            out_strides[n - 1] = strides[k]
        else:
            out_shape[n] = shape[k]
            out_strides[n] = strides[k]
            n += 1
    if n == 0:
        out_shape[0] = 1
        out_strides[0] = 0
        n = 1
    return n


cdef int open_view(view* v, cnp.ndarray a, int n_axes, int real_type) except -1:
    """The view of an array whose last n_axes axes are normalized."""
    cdef int n_rows = a.ndim - n_axes
    cdef const Py_ssize_t* shape = <const Py_ssize_t*>cnp.PyArray_DIMS(a)
    cdef const Py_ssize_t* strides = <const Py_ssize_t*>cnp.PyArray_STRIDES(a)
    v.data = <char*>cnp.PyArray_DATA(a)
    v.type = STORAGE[a.dtype.name]
    v.swapped = not cnp.PyArray_ISNOTSWAPPED(a)
    v.row_ndim = merge(shape, strides, n_rows, v.row_shape, v.row_strides)
    v.col_ndim = merge(shape + n_rows, strides + n_rows, n_axes, v.col_shape, v.col_strides)
    v.direct = (v.type == real_type and not v.swapped and v.col_ndim == 1
                and (v.col_strides[0] == a.itemsize or v.col_shape[0] == 1))
    if v.col_shape[0] == 1 and v.col_ndim == 1:
        v.col_strides[0] = a.itemsize
    return 0


cdef inline void open_contiguous(view* v, void* data, int type, Py_ssize_t n_rows, Py_ssize_t n_cols, Py_ssize_t itemsize) noexcept:
    """The same for a native C-contiguous array of the arithmetic type."""
    v.data = <char*>data
    v.type = type
    v.swapped = False
    v.direct = True
    v.row_ndim = v.col_ndim = 1
    v.row_shape[0] = n_rows
    v.row_strides[0] = n_cols * itemsize
    v.col_shape[0] = n_cols
    v.col_strides[0] = itemsize


# ---------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------

cdef int split_row(const kernels* k, const job* j, Py_ssize_t r, Py_ssize_t block, int n_threads, double* sums) except -1:
    """One long row on several threads: the blocks' sums, then the blocks' results. The same bits as on one."""
    cdef Py_ssize_t n_blocks = (j.n_cols + block - 1) // block
    cdef row_statistics st
    cdef int t, verdict
    with nogil:
        st.hi = k.first_mean(j, r)
        for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
            k.forward_sums(j, r, n_blocks * t // n_threads, n_blocks * (t + 1) // n_threads, st.hi, sums)
        verdict = k.forward_settle(j, r, sums, False, &st)
        if verdict == 1:
            for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                k.forward_sums(j, r, n_blocks * t // n_threads, n_blocks * (t + 1) // n_threads, st.hi, sums)
            verdict = k.forward_settle(j, r, sums, True, &st)
        if verdict == 0:
            for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                k.forward_apply(j, r, n_blocks * t // n_threads * block,
                                min(n_blocks * (t + 1) // n_threads * block, j.n_cols), &st)
        else:
            k.forward(j, r, r + 1)
    PyErr_CheckSignals()
    return 0


cdef int run_forward(const kernels* k, const job* j, Py_ssize_t block) except -1:
    cdef Py_ssize_t n_rows = j.n_rows, size = n_rows * j.n_cols, r, rows, step
    cdef int n_threads, t
    cdef double* sums
    if size < RELEASE_MIN:
        k.forward(j, 0, n_rows)
        return 0
    n_threads = 1
    if size >= PARALLEL_MIN and not in_parallel():
        n_threads = _threads.threads_for(size)
    if n_threads > 1 and n_rows < 4 * n_threads and j.n_cols >= SPLIT_MIN:
        sums = <double*>malloc(2 * sizeof(double) * ((j.n_cols + block - 1) // block))
        if sums == NULL:
            raise MemoryError
        try:
            for r in range(n_rows):
                split_row(k, j, r, block, n_threads, sums)
        finally:
            free(sums)
        return 0
    n_threads = min(n_threads, n_rows)
    step = max(1, SLICE // max(1, j.n_cols)) * n_threads
    r = 0
    while r < n_rows:
        rows = min(step, n_rows - r)
        with nogil:
            if n_threads == 1:
                k.forward(j, r, r + rows)
            else:
                for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                    k.forward(j, r + rows * t // n_threads, r + rows * (t + 1) // n_threads)
        r += rows
        if r < n_rows:
            PyErr_CheckSignals()
    return 0


def row_norm_forward(cnp.ndarray x, int n_axes, weight, bias, double eps, cnp.ndarray y, mean, rstd, bint centered):
    """Fill y, mean and rstd. See fastnorm._backend for the contract of all wings."""
    cdef job j
    cdef bint double_precision = y.dtype.itemsize == 8
    raise NotImplementedError


cdef inline bint is_plain(object a, int type_num) noexcept:
    """An exact ndarray of the type, native and C-contiguous."""
    return (type(a) is cnp.ndarray and cnp.PyArray_TYPE(<cnp.ndarray>a) == type_num
            and cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>a) and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>a))


cdef inline bint apart(cnp.ndarray a, cnp.ndarray b) noexcept:
    cdef char* p = <char*>cnp.PyArray_DATA(a)
    cdef char* q = <char*>cnp.PyArray_DATA(b)
    return p + cnp.PyArray_NBYTES(a) <= q or q + cnp.PyArray_NBYTES(b) <= p


cdef object common_forward(object x, object weight, object bias, object eps, object out, bint centered):
    """The common case, without the checks that it does not need: plain arrays of one arithmetic
    type, normalized along the last axis. None if this is not that case."""
    cdef job j
    cdef int type_num, ndim
    cdef Py_ssize_t n_cols, size
    cdef cnp.ndarray xa, ya
    if type(x) is not cnp.ndarray or type(eps) is not float:
        return None
    xa = <cnp.ndarray>x
    type_num = cnp.PyArray_TYPE(xa)
    ndim = cnp.PyArray_NDIM(xa)
    size = cnp.PyArray_SIZE(xa)
    if not (type_num == cnp.NPY_FLOAT32 or type_num == cnp.NPY_FLOAT64) or ndim == 0 or size == 0 or not is_plain(x, type_num):
        return None
    n_cols = cnp.PyArray_DIM(xa, ndim - 1)
    j.eps = <double>eps
    if not 0 <= j.eps < float("inf"):
        return None
    j.weight = NULL
    j.bias = NULL
    if weight is not None:
        if not is_plain(weight, type_num) or cnp.PyArray_NDIM(weight) != 1 or cnp.PyArray_DIM(weight, 0) != n_cols:
            return None
        j.weight = cnp.PyArray_DATA(<cnp.ndarray>weight)
    if bias is not None:
        if not is_plain(bias, type_num) or cnp.PyArray_NDIM(bias) != 1 or cnp.PyArray_DIM(bias, 0) != n_cols:
            return None
        j.bias = cnp.PyArray_DATA(<cnp.ndarray>bias)
    if out is None:
        ya = cnp.PyArray_EMPTY(ndim, cnp.PyArray_DIMS(xa), type_num, 0)
    else:
        if not is_plain(out, type_num) or not cnp.PyArray_ISWRITEABLE(out) or not cnp.PyArray_SAMESHAPE(out, xa):
            return None
        ya = <cnp.ndarray>out
        if not ((cnp.PyArray_DATA(ya) == cnp.PyArray_DATA(xa) or apart(ya, xa))
                and (weight is None or apart(ya, weight)) and (bias is None or apart(ya, bias))):
            return None
    j.n_cols = n_cols
    j.n_rows = size // n_cols
    j.centered = centered
    j.stream = False
    if size * cnp.PyArray_ITEMSIZE(xa) >= STREAM_BYTES:
        j.stream = cnp.PyArray_DATA(ya) != cnp.PyArray_DATA(xa)
    j.mean = j.rstd = NULL
    open_contiguous(&j.x, cnp.PyArray_DATA(xa), ST_FLOAT32 if type_num == cnp.NPY_FLOAT32 else ST_FLOAT64,
                    j.n_rows, n_cols, cnp.PyArray_ITEMSIZE(xa))
    j.y = j.x
    j.y.data = <char*>cnp.PyArray_DATA(ya)
    run_forward(float32_kernels if type_num == cnp.NPY_FLOAT32 else float64_kernels, &j,
                BLOCK_BYTES // cnp.PyArray_ITEMSIZE(xa))
    return ya


def openmp():
    """Whether this build can use more than one thread."""
    return bool(HAS_OPENMP)


def openmp_max_threads():
    """What OpenMP would use for a call from this thread now."""
    return max_threads()
