"""The CPU wing for norms over rows: arrays in, threads and kernels chosen, OUT arrays filled."""
from cpython.exc cimport PyErr_CheckSignals
from cython.parallel cimport prange
from libc.stdlib cimport malloc, free
from libc.math cimport isfinite
cimport numpy as cnp

from fastnorm._cpu.kernels cimport forward_kernel, job, kernels, row_statistics, view
from fastnorm._cpu.isa cimport float32_kernels, float64_kernels

import os

import numpy as np

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
# Rows that a kernel across rows needs next to each other to be worth it.
cdef Py_ssize_t ADJACENT_MIN = 32
# dweight and dbias: rows in a chunk at least, chunks at most.
cdef Py_ssize_t MIN_CHUNK = 64
cdef Py_ssize_t MAX_CHUNKS = 64
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


cdef int open_view(view* v, cnp.ndarray a, int n_axes, const kernels* k) except -1:
    """The view of an array whose last n_axes axes are normalized."""
    cdef int n_rows = a.ndim - n_axes
    cdef const Py_ssize_t* shape = <const Py_ssize_t*>cnp.PyArray_DIMS(a)
    cdef const Py_ssize_t* strides = <const Py_ssize_t*>cnp.PyArray_STRIDES(a)
    v.data = <char*>cnp.PyArray_DATA(a)
    v.type = STORAGE[a.dtype.name]
    v.swapped = not cnp.PyArray_ISNOTSWAPPED(a)
    v.row_ndim = merge(shape, strides, n_rows, v.row_shape, v.row_strides)
    v.col_ndim = merge(shape + n_rows, strides + n_rows, n_axes, v.col_shape, v.col_strides)
    v.itemsize = a.itemsize
    v.direct = (v.type == (ST_FLOAT32 if k == float32_kernels else ST_FLOAT64) and not v.swapped and v.col_ndim == 1
                and (v.col_strides[0] == a.itemsize or v.col_shape[0] == 1))
    if v.col_shape[0] == 1 and v.col_ndim == 1:
        v.col_strides[0] = a.itemsize
    return 0


cdef inline void open_contiguous(view* v, void* data, int type, Py_ssize_t n_rows, Py_ssize_t n_cols, Py_ssize_t itemsize) noexcept:
    """The same for a native C-contiguous array of the arithmetic type."""
    v.data = <char*>data
    v.type = type
    v.swapped = False
    v.itemsize = itemsize
    v.direct = True
    v.row_ndim = v.col_ndim = 1
    v.row_shape[0] = n_rows
    v.row_strides[0] = n_cols * itemsize
    v.col_shape[0] = n_cols
    v.col_strides[0] = itemsize


cdef inline Py_ssize_t real_size(const kernels* k) noexcept nogil:
    return 4 if k == float32_kernels else 8


cdef inline void* data_or_null(object a):
    return NULL if a is None else cnp.PyArray_DATA(<cnp.ndarray>a)


cdef const kernels* open_job(job* j, cnp.ndarray x, int n_axes, weight, rstd, double eps, bint centered) except NULL:
    """What forward and backward have in common. The kernels are those of the arithmetic type of x."""
    cdef const kernels* k = float32_kernels if x.dtype.name in ("float32", "float16", "bfloat16") else float64_kernels
    cdef int i
    j.n_cols = 1
    for i in range(x.ndim - n_axes, x.ndim):
        j.n_cols *= x.shape[i]
    j.n_rows = cnp.PyArray_SIZE(x) // j.n_cols
    j.centered = centered
    j.eps = eps
    j.weight = data_or_null(weight)
    j.rstd = data_or_null(rstd)
    open_view(&j.x, x, n_axes, k)
    return k


cdef inline bint rows_adjacent(const view* v) noexcept nogil:
    """Whether rows lie next to each other in memory, enough of them for a kernel across them."""
    cdef int last = v.row_ndim - 1
    return not v.direct and v.row_strides[last] == v.itemsize and v.row_shape[last] >= ADJACENT_MIN


# ---------------------------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------------------------

# fastnorm._threads answers how many threads a call may use; wings do not look up to it.
cdef object thread_policy = None


def set_thread_policy(policy):
    """policy(): the number of threads for a call that is worth more than one."""
    global thread_policy
    thread_policy = policy


cdef int threads_for(Py_ssize_t size) except -1:
    """One inside somebody else's parallel region: another team would only get in the way."""
    if size < PARALLEL_MIN or not HAS_OPENMP or in_parallel():
        return 1
    return thread_policy()


def max_openmp_threads():
    """What OpenMP would use for a call from this thread now; 1 in a build without it."""
    return max_threads()


has_openmp = bool(HAS_OPENMP)


cdef inline Py_ssize_t share(Py_ssize_t n, int t, int n_threads) noexcept nogil:
    """Where the part of thread t begins. Whole lane groups of rows, where there are enough."""
    cdef Py_ssize_t unit = 64 if n >= 256 * n_threads else 1
    return n if t == n_threads else n // unit * t // n_threads * unit


cdef inline Py_ssize_t n_blocks(Py_ssize_t n_cols, Py_ssize_t block) noexcept nogil:
    return (n_cols + block - 1) // block


cdef double* allocate(Py_ssize_t n) except NULL:
    cdef double* p = <double*>malloc(n * sizeof(double))
    if p == NULL:
        raise MemoryError(f"{n} doubles")
    return p


# ---------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------

cdef int split_row(const kernels* k, const job* j, Py_ssize_t r, Py_ssize_t block, int n_threads, double* sums) except -1:
    """One long row: the sums of its blocks, then its columns, each part on a thread of its own."""
    cdef Py_ssize_t blocks = n_blocks(j.n_cols, block)
    cdef row_statistics st
    cdef int t, verdict = 1
    cdef bint last = False
    with nogil:
        st.hi = k.first_mean(j, r)
        while verdict == 1:
            for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                k.forward_sums(j, r, share(blocks, t, n_threads), share(blocks, t + 1, n_threads), st.hi, sums)
            verdict = k.forward_settle(j, r, sums, last, &st)
            last = True
        if verdict == 0:
            for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                k.forward_apply(j, r, share(blocks, t, n_threads) * block,
                                min(share(blocks, t + 1, n_threads) * block, j.n_cols), &st)
        else:
            k.forward(j, r, r + 1)
    PyErr_CheckSignals()
    return 0


cdef int run_forward(const kernels* k, const job* j) except -1:
    cdef Py_ssize_t n_rows = j.n_rows, size = n_rows * j.n_cols, r, rows, step
    cdef Py_ssize_t block = BLOCK_BYTES // real_size(k)
    cdef forward_kernel forward = k.forward
    cdef int n_threads, t
    cdef double* sums
    if size < RELEASE_MIN:
        forward(j, 0, n_rows)
        return 0
    n_threads = threads_for(size)
    if rows_adjacent(&j.x) and rows_adjacent(&j.y):
        forward = k.axis_forward
    elif n_threads > 1 and n_rows < 4 * n_threads and j.n_cols >= SPLIT_MIN:
        sums = allocate(2 * n_blocks(j.n_cols, block))
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
                forward(j, r, r + rows)
            else:
                for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                    forward(j, r + share(rows, t, n_threads), r + share(rows, t + 1, n_threads))
        r += rows
        if r < n_rows:
            PyErr_CheckSignals()
    return 0


def row_norm_forward(cnp.ndarray x, int n_axes, weight, bias, double eps, cnp.ndarray y, mean, rstd, bint centered):
    """Fill y, mean and rstd. fastnorm._backend has the contract of all wings."""
    cdef job j
    cdef const kernels* k = open_job(&j, x, n_axes, weight, rstd, eps, centered)
    j.bias = data_or_null(bias)
    j.mean = data_or_null(mean)
    open_view(&j.y, y, n_axes, k)
    j.stream = cnp.PyArray_NBYTES(y) >= STREAM_BYTES and cnp.PyArray_DATA(y) != cnp.PyArray_DATA(x)
    run_forward(k, &j)


# ---------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------

cdef int split_backward(const kernels* k, const job* j, int n_threads) except -1:
    """Few long rows: the sums of each row by blocks, then all rows by columns."""
    cdef Py_ssize_t block = BLOCK_BYTES // real_size(k), blocks = n_blocks(j.n_cols, block), r
    cdef double* sums = allocate(3 * blocks)
    cdef row_statistics* statistics
    cdef int t
    try:
        statistics = <row_statistics*>allocate(j.n_rows * (sizeof(row_statistics) // sizeof(double)))
        try:
            with nogil:
                for r in range(j.n_rows):
                    for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                        k.backward_sums(j, r, share(blocks, t, n_threads), share(blocks, t + 1, n_threads), sums)
                    k.backward_settle(j, r, sums, &statistics[r])
                for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                    k.backward_apply(j, share(blocks, t, n_threads) * block,
                                     min(share(blocks, t + 1, n_threads) * block, j.n_cols), statistics)
        finally:
            free(statistics)
    finally:
        free(sums)
    PyErr_CheckSignals()
    return 0


cdef int run_backward(const kernels* k, const job* j) except -1:
    cdef Py_ssize_t chunks = (j.n_rows + j.rows_per_chunk - 1) // j.rows_per_chunk, c, count, step
    cdef Py_ssize_t size = j.n_rows * j.n_cols
    cdef int n_threads = threads_for(size), t
    if n_threads > 1 and chunks < 4 * n_threads and j.n_cols >= SPLIT_MIN:
        return split_backward(k, j, n_threads)
    n_threads = min(n_threads, chunks)
    step = max(1, SLICE // (j.rows_per_chunk * j.n_cols)) * n_threads
    c = 0
    while c < chunks:
        count = min(step, chunks - c)
        with nogil:
            for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                k.backward(j, c + share(count, t, n_threads), c + share(count, t + 1, n_threads))
        c += count
        if c < chunks:
            PyErr_CheckSignals()
    return 0


def row_norm_backward(cnp.ndarray dy, cnp.ndarray x, int n_axes, weight, mean, cnp.ndarray rstd, cnp.ndarray dx,
                      dweight, dbias, bint centered):
    """Fill dx, dweight and dbias. fastnorm._backend has the contract of all wings."""
    cdef job j
    cdef const kernels* k = open_job(&j, x, n_axes, weight, rstd, 0.0, centered)
    cdef Py_ssize_t lanes = 64 // real_size(k), wide = real_size(k) // 4, chunks
    j.mean = data_or_null(mean)
    open_view(&j.dy, dy, n_axes, k)
    open_view(&j.dx, dx, n_axes, k)
    j.stream = (cnp.PyArray_NBYTES(dx) >= STREAM_BYTES and cnp.PyArray_DATA(dx) != cnp.PyArray_DATA(x)
                and cnp.PyArray_DATA(dx) != cnp.PyArray_DATA(dy))
    j.rows_per_chunk = max(MIN_CHUNK, (j.n_rows + MAX_CHUNKS - 1) // MAX_CHUNKS)
    j.rows_per_chunk = (j.rows_per_chunk + 3) // 4 * 4
    j.partial_cols = (j.n_cols + lanes - 1) // lanes * lanes
    j.dweight_partial = j.dbias_partial = NULL
    chunks = (j.n_rows + j.rows_per_chunk - 1) // j.rows_per_chunk
    if dweight is not None:
        # IN OUT partial: double[2, chunks, wide, columns], wide for what a double sum rounds away
        partial = np.zeros((2, chunks, wide, j.partial_cols))
        j.dweight_partial = <double*>cnp.PyArray_DATA(<cnp.ndarray>partial)
        j.dbias_partial = j.dweight_partial + chunks * wide * j.partial_cols
    run_backward(k, &j)
    if dweight is not None:
        add_chunks(partial[0], dweight)
        if dbias is not None:
            add_chunks(partial[1], dbias)


cdef int add_chunks(cnp.ndarray partial, cnp.ndarray sums) except -1:
    """sums = the chunks' partial sums added in order, compensated. IN partial [chunks, wide, columns], OUT double sums"""
    cdef Py_ssize_t n_cols = sums.shape[0], chunks = partial.shape[0], wide = partial.shape[1], columns = partial.shape[2]
    cdef const double* p = <const double*>cnp.PyArray_DATA(partial)
    cdef double* s = <double*>cnp.PyArray_DATA(sums)
    cdef double* rest = allocate(n_cols)
    cdef Py_ssize_t i, k
    cdef double a, z
    with nogil:
        for i in range(n_cols):
            s[i] = 0
            rest[i] = 0
        for k in range(chunks):
            for i in range(n_cols):
                a = s[i] + p[i]
                z = a - s[i]
                rest[i] = rest[i] + ((s[i] - (a - z)) + (p[i] - z))
                s[i] = a
            if wide == 2:
                for i in range(n_cols):
                    rest[i] = rest[i] + p[columns + i]
            p += wide * columns
        for i in range(n_cols):
            if isfinite(s[i]):
                s[i] = s[i] + rest[i]
    free(rest)
    return 0


# ---------------------------------------------------------------------------------------------
# The common case, at the price of a ufunc call
# ---------------------------------------------------------------------------------------------

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
    run_forward(float32_kernels if type_num == cnp.NPY_FLOAT32 else float64_kernels, &j)
    return ya
