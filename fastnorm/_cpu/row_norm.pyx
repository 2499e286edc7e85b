"""The CPU wing for norms over rows: arrays in, threads and kernels chosen, OUT arrays filled."""
from cpython.exc cimport PyErr_CheckSignals
from cython.parallel cimport prange
from libc.stdlib cimport malloc, free
from libc.math cimport isfinite
from libc.string cimport memset
cimport numpy as cnp

from fastnorm._cpu.kernels cimport job, kernels, parts_kernel, row_statistics, view
from fastnorm._cpu.isa cimport float32_kernels, float64_kernels

import numpy as np

from fastnorm._cpu.results import bytes_from_environment

cnp.import_array()

cdef extern from "threads.h" nogil:
    int HAS_OPENMP
    int max_threads()
    int in_parallel()

cdef extern from "storage.h":
    enum:
        ST_FLOAT16, ST_BFLOAT16, ST_FLOAT32, ST_FLOAT64
        ST_BOOL, ST_INT8, ST_UINT8, ST_INT16, ST_UINT16, ST_INT32, ST_UINT32, ST_INT64, ST_UINT64
    void store_doubles(char* p, int type, Py_ssize_t n, const double* a) nogil

# The type number of bfloat16, known once the first such array was checked. It is NumPy's to give out.
cdef int bfloat16_seen = -1


cdef int bfloat16_number() noexcept:
    return bfloat16_seen


cdef int storage_type(cnp.ndarray a) except -1:
    """ST_* of an array; its dtype was checked."""
    global bfloat16_seen
    cdef int type_num = cnp.PyArray_TYPE(a), size = cnp.PyArray_ITEMSIZE(a)
    if type_num == cnp.NPY_FLOAT32:
        return ST_FLOAT32
    if type_num == cnp.NPY_FLOAT64:
        return ST_FLOAT64
    if type_num == cnp.NPY_FLOAT16:
        return ST_FLOAT16
    if type_num == cnp.NPY_BOOL:
        return ST_BOOL
    if cnp.PyTypeNum_ISUNSIGNED(type_num):
        return ST_UINT8 if size == 1 else ST_UINT16 if size == 2 else ST_UINT32 if size == 4 else ST_UINT64
    if cnp.PyTypeNum_ISSIGNED(type_num):
        return ST_INT8 if size == 1 else ST_INT16 if size == 2 else ST_INT32 if size == 4 else ST_INT64
    # The one type that is not NumPy's own: bfloat16 of ml_dtypes.
    bfloat16_seen = type_num
    return ST_BFLOAT16


# What decides about speed alone. benchmarks/tuning.py shows both sides of each decision, docs/architecture.md has figures.
# Values for each thread at least. From twice as many on, two threads gain even where the second one has to be woken.
cdef Py_ssize_t THREAD_MIN = 1 << 16
# Values; between two such slices Ctrl-C is looked for: some ten milliseconds.
cdef Py_ssize_t SLICE = 1 << 25
# Values; the global lock is kept below: releasing it costs more than a tiny call may.
cdef Py_ssize_t RELEASE_MIN = 1 << 12
# Values; a row from here on may be split over threads.
cdef Py_ssize_t SPLIT_MIN = 1 << 16
# Bytes of a result from which stores go past the cache, whatever cache size the machine reports: where whoever reads the
# result next gains as well, or loses nothing.
cdef Py_ssize_t STREAM_BYTES = bytes_from_environment("FASTNORM_STREAM_BYTES", 8 << 20)
# Rows that a kernel across rows needs next to each other to be worth it.
cdef Py_ssize_t ADJACENT_MIN = 16

# What a kernel across rows takes at once (TILE): cut into less, it would go over the same memory again and again.
cdef Py_ssize_t TILE_ROWS = 1024
# dweight and dbias: rows in a chunk at least, chunks at most. They decide about bits.
cdef Py_ssize_t MIN_CHUNK = 64
cdef Py_ssize_t MAX_CHUNKS = 64
# A block of values as lanes.h has it, in bytes.
cdef Py_ssize_t BLOCK_BYTES = 4096


def constants(**changes):
    """Those of the above that decide about speed alone, by name, after changes to some: for benchmarks/tuning.py."""
    global THREAD_MIN, SPLIT_MIN, STREAM_BYTES, ADJACENT_MIN, RELEASE_MIN
    THREAD_MIN = changes.get("THREAD_MIN", THREAD_MIN)
    SPLIT_MIN = changes.get("SPLIT_MIN", SPLIT_MIN)
    STREAM_BYTES = changes.get("STREAM_BYTES", STREAM_BYTES)
    ADJACENT_MIN = changes.get("ADJACENT_MIN", ADJACENT_MIN)
    RELEASE_MIN = changes.get("RELEASE_MIN", RELEASE_MIN)
    return dict(THREAD_MIN=THREAD_MIN, SPLIT_MIN=SPLIT_MIN, STREAM_BYTES=STREAM_BYTES, ADJACENT_MIN=ADJACENT_MIN,
                RELEASE_MIN=RELEASE_MIN)


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


cdef int open_view(view* v, cnp.ndarray a, int n_axes) except -1:
    """The view of an array whose last n_axes axes are normalized."""
    cdef int n_rows = a.ndim - n_axes
    cdef const Py_ssize_t* shape = <const Py_ssize_t*>cnp.PyArray_DIMS(a)
    cdef const Py_ssize_t* strides = <const Py_ssize_t*>cnp.PyArray_STRIDES(a)
    v.data = <char*>cnp.PyArray_DATA(a)
    v.type = storage_type(a)
    v.swapped = not cnp.PyArray_ISNOTSWAPPED(a)
    v.row_ndim = merge(shape, strides, n_rows, v.row_shape, v.row_strides)
    v.col_ndim = merge(shape + n_rows, strides + n_rows, n_axes, v.col_shape, v.col_strides)
    v.itemsize = a.itemsize
    if v.col_shape[0] == 1:
        v.col_strides[0] = a.itemsize
    v.direct = not v.swapped and v.col_ndim == 1 and v.col_strides[0] == a.itemsize
    return 0


cdef void open_contiguous(view* v, void* data, int type, Py_ssize_t n_rows, Py_ssize_t n_cols, Py_ssize_t itemsize) noexcept:
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


cdef void* data_or_null(object a) noexcept:
    return NULL if a is None else cnp.PyArray_DATA(<cnp.ndarray>a)


cdef object as_row(object parameter, double offset, const kernels* k):
    """weight or bias as kernels read it: contiguous, of the arithmetic type, offset added in it."""
    if parameter is None:
        return None
    cdef object real = np.float32 if k == float32_kernels else np.float64
    row = np.ascontiguousarray(parameter, dtype=real).reshape(-1)
    return row if offset == 0.0 else row + real(offset)


cdef inline bint is_float32_arithmetic(int type) noexcept:
    return type == ST_FLOAT32 or type == ST_FLOAT16 or type == ST_BFLOAT16


cdef const kernels* kernels_of(cnp.ndarray x) except NULL:
    """Those of the arithmetic type of x."""
    return float32_kernels if is_float32_arithmetic(storage_type(x)) else float64_kernels


cdef int open_job(job* j, cnp.ndarray x, int n_axes, weight_row, rstd, double eps, bint centered) except -1:
    """What forward and backward have in common."""
    cdef int i
    j.n_cols = 1
    for i in range(x.ndim - n_axes, x.ndim):
        j.n_cols *= x.shape[i]
    j.n_rows = cnp.PyArray_SIZE(x) // j.n_cols
    j.centered = centered
    j.eps = eps
    j.weight = data_or_null(weight_row)
    j.rstd = data_or_null(rstd)
    open_view(&j.x, x, n_axes)
    open_nothing_else(j)
    return 0


cdef void open_nothing_else(job* j) noexcept:
    """No residual, no channels: what most calls do not have."""
    j.addend.data = j.residual.data = j.dh.data = j.dresidual.data = NULL
    j.alpha = 1.0
    j.by_row = j.constant = False
    j.n_channels = 1
    j.moments = j.row_sums = NULL


cdef bint rows_adjacent(const view* v) noexcept nogil:
    """Whether rows lie next to each other in memory, enough of them for a kernel across them."""
    cdef int last = v.row_ndim - 1
    return not v.direct and v.row_strides[last] == v.itemsize and v.row_shape[last] >= ADJACENT_MIN


cdef inline bint across(const view* v, const job* j) noexcept nogil:
    """Whether backward can go across the rows: also, no group of four, whose gradients are added up together, straddles
    two runs of neighbours."""
    cdef Py_ssize_t run = v.row_shape[v.row_ndim - 1]
    return rows_adjacent(v) and (run == j.n_rows or run % 4 == 0 or j.by_row)


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
    if size < 2 * THREAD_MIN or not HAS_OPENMP or in_parallel():
        return 1
    return min(<Py_ssize_t>thread_policy(), size // THREAD_MIN)


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


cdef inline Py_ssize_t n_chunks(const job* j) noexcept nogil:
    return (j.n_rows + j.rows_per_chunk - 1) // j.rows_per_chunk


cdef double* allocate(Py_ssize_t n) except NULL:
    cdef double* p = <double*>malloc(n * sizeof(double))
    if p == NULL:
        raise MemoryError(f"{n} doubles")
    return p


cdef int run_parts(parts_kernel kernel, const job* j, Py_ssize_t parts, Py_ssize_t size, Py_ssize_t least, int n_threads) except -1:
    """A kernel over its parts (rows; chunks of rows in backward) of so many values each, in contiguous shares for
    the threads and in slices of at least so many parts between which Ctrl-C is looked for."""
    cdef Py_ssize_t step = max(least, SLICE // size) * n_threads, done = 0, n
    cdef int t
    while done < parts:
        n = min(step, parts - done)
        with nogil:
            if n_threads == 1:
                kernel(j, done, done + n)
            else:
                for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                    kernel(j, done + share(n, t, n_threads), done + share(n, t + 1, n_threads))
        done += n
        if done < parts:
            PyErr_CheckSignals()
    return 0


# ---------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------

cdef int split_rows(const kernels* k, const job* j, Py_ssize_t block, int n_threads) except -1:
    """Few long rows, each of them on all threads."""
    cdef double* sums = allocate(2 * n_blocks(j.n_cols, block))
    cdef job stored = j[0]
    cdef Py_ssize_t r, blocks = n_blocks(j.n_cols, block)
    cdef int t
    # Once a sum is stored it is a row like any other.
    stored.residual.data = NULL
    try:
        for r in range(j.n_rows):
            if j.residual.data != NULL:
                for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1, nogil=True):
                    k.add(j, r, share(blocks, t, n_threads) * block,
                          min(share(blocks, t + 1, n_threads) * block, j.n_cols))
            split_row(k, &stored, r, block, n_threads, sums)
    finally:
        free(sums)
    return 0


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
    cdef Py_ssize_t n_rows = j.n_rows, size = n_rows * j.n_cols
    cdef parts_kernel forward = k.forward
    cdef int n_threads
    if size < RELEASE_MIN:
        forward(j, 0, n_rows)
        return 0
    n_threads = threads_for(size)
    if (rows_adjacent(&j.x) and rows_adjacent(&j.y)
            and (j.residual.data == NULL or rows_adjacent(&j.addend) and rows_adjacent(&j.residual))):
        forward = k.axis_forward
    elif n_threads > 1 and n_rows < 4 * n_threads and j.n_cols >= SPLIT_MIN:
        return split_rows(k, j, BLOCK_BYTES // real_size(k), n_threads)
    return run_parts(forward, j, n_rows, j.n_cols, TILE_ROWS if forward == k.axis_forward else 1, min(n_threads, n_rows))


cdef inline double given(const kernels* k, const void* values, Py_ssize_t i) noexcept nogil:
    return (<const float*>values)[i] if real_size(k) == 4 else (<const double*>values)[i]


cdef int split_evaluate(const kernels* k, const job* j, int n_threads) except -1:
    """Few long rows with given statistics, each of them on all threads."""
    cdef Py_ssize_t block = BLOCK_BYTES // real_size(k), blocks = n_blocks(j.n_cols, block), r, channel
    cdef row_statistics st
    cdef int t
    for r in range(j.n_rows):
        with nogil:
            channel = r % j.n_channels
            st.hi = given(k, j.given_hi, channel)
            st.lo = given(k, j.given_lo, channel)
            st.rstd = given(k, j.given_rstd, channel)
            for t in prange(n_threads, num_threads=n_threads, schedule="static", chunksize=1):
                k.forward_apply(j, r, share(blocks, t, n_threads) * block,
                                min(share(blocks, t + 1, n_threads) * block, j.n_cols), &st)
        PyErr_CheckSignals()
    return 0


cdef int run_evaluate(const kernels* k, const job* j, bint across) except -1:
    """across: a row is a channel, and rows lie next to each other."""
    cdef int n_threads = threads_for(j.n_rows * j.n_cols)
    if n_threads > 1 and not across and j.n_rows < 4 * n_threads and j.n_cols >= SPLIT_MIN:
        return split_evaluate(k, j, n_threads)
    return run_parts(k.axis_evaluate if across else k.evaluate, j, j.n_rows, j.n_cols, TILE_ROWS if across else 1,
                     min(n_threads, j.n_rows))


cdef inline bint same_data(cnp.ndarray a, b) noexcept:
    return b is not None and cnp.PyArray_DATA(a) == cnp.PyArray_DATA(<cnp.ndarray>b)


def round_doubles(cnp.ndarray source, cnp.ndarray target):
    """target = source rounded once; both contiguous, of float64 and of a float type. ml_dtypes goes by way of float32."""
    store_doubles(<char*>cnp.PyArray_DATA(target), storage_type(target), cnp.PyArray_SIZE(source),
                  <double*>cnp.PyArray_DATA(source))


def row_norm_forward(cnp.ndarray x, residual, double alpha, int n_axes, weight, double weight_offset, bias, double eps,
                     cnp.ndarray y, h, mean, rstd, bint centered):
    """Fill y, h, mean and rstd. fastnorm._backend has the contract of all wings."""
    cdef job j
    # What is normalized.
    cdef cnp.ndarray rows = x if residual is None else h
    cdef const kernels* k = kernels_of(rows)
    weight_row, bias_row = as_row(weight, weight_offset, k), as_row(bias, 0.0, k)
    open_job(&j, rows, n_axes, weight_row, rstd, eps, centered)
    j.bias = data_or_null(bias_row)
    j.mean = data_or_null(mean)
    open_view(&j.y, y, n_axes)
    j.stream = cnp.PyArray_NBYTES(y) >= STREAM_BYTES and not same_data(y, x) and not same_data(y, residual)
    if residual is not None:
        open_view(&j.addend, x, n_axes)
        open_view(&j.residual, residual, n_axes)
        j.alpha = alpha
        j.stream = j.stream and not same_data(rows, x) and not same_data(rows, residual)
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
                if j.dx.data != NULL:
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
    cdef Py_ssize_t chunks = n_chunks(j), size = j.n_rows * j.n_cols
    cdef int n_threads = threads_for(size)
    cdef parts_kernel backward = k.backward
    if size < RELEASE_MIN:
        backward(j, 0, chunks)
        return 0
    if (across(&j.x, j) and across(&j.dy, j) and (j.dx.data == NULL or across(&j.dx, j))
            and (j.dh.data == NULL or across(&j.dh, j)) and (j.dresidual.data == NULL or across(&j.dresidual, j))):
        backward = k.axis_backward
    elif n_threads > 1 and chunks < 4 * n_threads and j.n_cols >= SPLIT_MIN:
        return split_backward(k, j, n_threads)
    return run_parts(backward, j, chunks, j.rows_per_chunk * j.n_cols,
                     max(1, TILE_ROWS // j.rows_per_chunk) if backward == k.axis_backward else 1, min(n_threads, chunks))


cdef double* open_partials(job* j, const kernels* k, bint param_grads) except NULL:
    """Chunks of rows, by the shape alone, and zeroed partial sums for them if wanted; the caller frees them."""
    cdef Py_ssize_t lanes = 64 // real_size(k), size, count
    cdef double* partials
    j.rows_per_chunk = (max(MIN_CHUNK, (j.n_rows + MAX_CHUNKS - 1) // MAX_CHUNKS) + 3) // 4 * 4
    j.partial_cols = (j.n_cols + lanes - 1) // lanes * lanes
    j.dweight_partial = j.dbias_partial = NULL
    if not param_grads:
        return allocate(1)
    size = n_chunks(j) * j.partial_cols * real_size(k) // 4
    count = 2 * size if j.centered else size
    partials = allocate(count)
    memset(partials, 0, count * sizeof(double))
    j.dweight_partial = partials
    if j.centered:
        j.dbias_partial = partials + size
    return partials


cdef void add_chunks(const job* j, const kernels* k, double* partials) noexcept nogil:
    """Add the chunks up in order, into the first of them; where real is double, with what that rounds away."""
    cdef Py_ssize_t columns = j.partial_cols, i, chunk
    cdef bint compensated = real_size(k) == 8
    cdef double* sums = partials
    cdef double* rest = partials + columns
    cdef double* p = partials
    cdef double a, z
    for chunk in range(1, n_chunks(j)):
        p += (2 if compensated else 1) * columns
        if not compensated:
            for i in range(columns):
                sums[i] += p[i]
            continue
        for i in range(columns):
            a = sums[i] + p[i]
            z = a - sums[i]
            rest[i] += ((sums[i] - (a - z)) + (p[i] - z)) + p[columns + i]
            sums[i] = a
    if compensated:
        for i in range(columns):
            if isfinite(sums[i]):
                sums[i] += rest[i]


cdef int finish_sums(const job* j, const kernels* k, double* partials, cnp.ndarray out) except -1:
    """dweight or dbias from its partial sums."""
    cdef int type = storage_type(out)
    with nogil:
        add_chunks(j, k, partials)
        store_doubles(<char*>cnp.PyArray_DATA(out), type, j.n_cols, partials)
    return 0


def row_norm_backward(cnp.ndarray dy, dh, cnp.ndarray x, int n_axes, weight, double weight_offset, mean, cnp.ndarray rstd,
                      double alpha, cnp.ndarray dx, dresidual, dweight, dbias, bint centered):
    """Fill dx, dresidual, dweight and dbias. fastnorm._backend has the contract of all wings."""
    cdef job j
    cdef const kernels* k = kernels_of(x)
    cdef double* partials
    weight_row = as_row(weight, weight_offset, k)
    open_job(&j, x, n_axes, weight_row, rstd, 0.0, centered)
    partials = open_partials(&j, k, dweight is not None)
    try:
        j.mean = data_or_null(mean)
        open_view(&j.dy, dy, n_axes)
        open_view(&j.dx, dx, n_axes)
        if dh is not None:
            open_view(&j.dh, dh, n_axes)
        if dresidual is not None:
            open_view(&j.dresidual, dresidual, n_axes)
            j.alpha = alpha
        j.stream = (cnp.PyArray_NBYTES(dx) >= STREAM_BYTES and not same_data(dx, x) and not same_data(dx, dy)
                    and not same_data(dx, dh))
        run_backward(k, &j)
        if dweight is not None:
            finish_sums(&j, k, j.dweight_partial, dweight)
        if dbias is not None:
            finish_sums(&j, k, j.dbias_partial, dbias)
    finally:
        free(partials)
