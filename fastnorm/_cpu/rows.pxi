"""What the kernels of one module share: the arithmetic type (real) with its lanes, and the way from
(row, column) of an array to memory. real is float or double; the flags of a module decide."""
cimport cython
from libc.math cimport sqrt, fabs, ldexp, isfinite, frexp
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset
from cpython.pycapsule cimport PyCapsule_New
from fastnorm._cpu.kernels cimport view, job, row_statistics, kernels, parts_kernel

cdef extern from "lanes.h" nogil:
    ctypedef double real
    ctypedef const real* in_real "const real*"
    ctypedef struct lanes:
        pass
    ctypedef struct vec:
        pass
    ctypedef struct block:
        real* v
    ctypedef struct total:
        double sum, rest
    enum:
        LANES
        N_VECS             # registers of a lane group
        HALF_STEP
        STEP
        BLOCK
    Py_ssize_t VEC_LANES   # in one register
    lanes lanes_fill(real a)
    lanes lanes_load(const real* p)
    lanes lanes_load_part(const real* p, Py_ssize_t n, lanes fill)
    void lanes_store(real* p, lanes a)
    void lanes_stream(real* p, lanes a)
    void stream_fence()
    void prefetch(const void* p)
    lanes lanes_add(lanes a, lanes b)
    lanes lanes_sub(lanes a, lanes b)
    lanes lanes_mul(lanes a, lanes b)
    double lanes_fold(lanes a)
    void lanes_fold_rows(const real* s, Py_ssize_t distance, double* out)
    ctypedef struct settled_rows:
        double* s
        double* q
        double* shift
        double* variance
        double* rstd
        Py_ssize_t* verdict
    enum:
        SIDE               # rows side by side in forward, at most
        SETTLED
        RECENTRE
        RESCUE
    void settle_rows(settled_rows* rows, int side, Py_ssize_t n_cols, double eps, bint centered, bint last)
    double scaled_mean(double r, double a, double n)
    total total_add(total t, double a)
    double total_value(total t)
    vec vec_fill(real a)
    vec vec_add(vec a, vec b)
    vec vec_sub(vec a, vec b)
    vec vec_mul(vec a, vec b)
    void vec_store(real* p, vec a)
    void vec_stream(real* p, vec a)
    void vec_add_wide(double* sums, Py_ssize_t rests, vec a)
    void vec_add_wide_part(double* sums, Py_ssize_t rests, vec a, Py_ssize_t n)

cdef extern from "storage.h" nogil:
    enum:
        ST_FLOAT16
        ST_BFLOAT16
        ST_REAL
    # Constants: what a module cannot need is not compiled.
    bint FLOAT16_LANES
    bint BFLOAT16_LANES
    bint has_lanes(int type)
    Py_ssize_t SIZE_OF(int type)
    double first_sum(const char* x, Py_ssize_t n, int type)
    void lanes_add_step(const char* x, Py_ssize_t i, Py_ssize_t n, real hi, bint centered, int type, lanes* sum_d, lanes* sum_dd)
    void lanes_sums(const char* x, Py_ssize_t n, real hi, bint centered, int type, lanes* sum_d, lanes* sum_dd)
    void lanes_gradient_sums(const char* x, const char* dy, const real* w, Py_ssize_t n, real hi, bint centered, int type,
                             lanes* sum_d, lanes* sum_wdy, lanes* sum_wdy_d)
    void lanes_store_part_as(char* p, Py_ssize_t i, Py_ssize_t n, lanes a, int type)
    vec vec_load_part_as(const char* p, Py_ssize_t i, Py_ssize_t n, vec fill, int type)
    void vec_store_part_as(char* p, Py_ssize_t i, Py_ssize_t n, vec a, int type)
    void vec_stream_as(char* p, Py_ssize_t i, vec a, int type)
    Py_ssize_t values_to_line(const char* p, int type)
    Py_ssize_t whole_lines(Py_ssize_t n, int type)
    void load_run(const char* p, Py_ssize_t stride, int type, int swapped, Py_ssize_t n, real* out)
    void store_run(char* p, Py_ssize_t stride, int type, int swapped, Py_ssize_t n, const real* a)
    void stream_bytes(char* q, const char* p, Py_ssize_t n)

cdef enum:
    RESIDENT = 8       # blocks of a row that is loaded once and kept, if it cannot be read in place
    GROUP = 4          # rows side by side; in backward they share the accumulators of dweight and dbias
    SHORT_RUN = 32     # columns next to each other that are worth a step of their own
    SHORT_BYTES = 8192 # of rows side by side in forward, unless one has more
    TRANSPOSED_BYTES = 1 << 20   # of rows that are loaded together


# ---------------------------------------------------------------------------------------------
# Views: from (row, column) to memory
# ---------------------------------------------------------------------------------------------

cdef inline Py_ssize_t offset(int ndim, const Py_ssize_t* shape, const Py_ssize_t* strides, Py_ssize_t i) noexcept nogil:
    """Bytes from the start to the element of C-order index i."""
    cdef Py_ssize_t bytes = 0
    cdef int k
    if ndim == 1:
        return i * strides[0]
    for k in range(ndim - 1, -1, -1):
        bytes += (i % shape[k]) * strides[k]
        i = i // shape[k]
    return bytes


cdef inline bint is_contiguous(const view* v) noexcept nogil:
    """Whether the columns of a row lie next to each other."""
    return v.col_ndim == 1 and v.col_strides[0] == v.itemsize


cdef inline char* row_start(const view* v, Py_ssize_t r) noexcept nogil:
    return v.data + offset(v.row_ndim, v.row_shape, v.row_strides, r)


# A walk over the columns of a row, in runs along the last dimension.
cdef struct run:
    Py_ssize_t begin       # bytes from the start of the row
    Py_ssize_t first       # the same, of the first column of the last dimension
    Py_ssize_t length


cdef inline run first_run(const view* v, Py_ssize_t c0, Py_ssize_t n) noexcept nogil:
    """From column c0 on, at most n columns."""
    cdef run a
    cdef int last = v.col_ndim - 1
    cdef Py_ssize_t inside = 0 if last == 0 else c0 % v.col_shape[last]
    a.begin = offset(v.col_ndim, v.col_shape, v.col_strides, c0)
    a.first = a.begin - inside * v.col_strides[last]
    a.length = n if last == 0 else min(n, v.col_shape[last] - inside)
    return a


cdef inline void next_run(const view* v, Py_ssize_t c, Py_ssize_t n, run* a) noexcept nogil:
    """From column c on, where the run before ended. Two dimensions are the common case, and division is slow."""
    if v.col_ndim == 2:
        a.first += v.col_strides[0]
        a.begin = a.first
        a.length = min(n, v.col_shape[1])
    elif n > 0:
        a[0] = first_run(v, c, n)


cdef void load_columns(const view* v, const char* row, Py_ssize_t c0, Py_ssize_t n, real* out) noexcept nogil:
    """out[:n] = columns c0 to c0 + n of the row, in runs along the last dimension."""
    cdef Py_ssize_t stride = v.col_strides[v.col_ndim - 1]
    cdef bint plain = v.type == ST_REAL and not v.swapped and stride == v.itemsize
    cdef bint short = v.col_ndim > 1 and v.col_shape[v.col_ndim - 1] <= 4096 // <Py_ssize_t>sizeof(real)
    cdef const char* ahead
    cdef Py_ssize_t k
    cdef run a = first_run(v, c0, n)
    while n > 0:
        if plain:
            memcpy(out, row + a.begin, a.length * sizeof(real))
            if short:
                # Where runs are short, the processor does not see them coming. What follows a run is mostly the next
                # row's, which is needed next.
                ahead = row + a.begin + a.length * <Py_ssize_t>sizeof(real)
                for k in range(a.length * <Py_ssize_t>sizeof(real) // 64 + 1):
                    prefetch(ahead + 64 * k)
        else:
            load_run(row + a.begin, stride, v.type, v.swapped, a.length, out)
        c0 += a.length
        out += a.length
        n -= a.length
        next_run(v, c0, n, &a)


cdef void store_columns(const view* v, char* row, Py_ssize_t c0, Py_ssize_t n, const real* values, bint stream) noexcept nogil:
    """Columns c0 to c0 + n, at most a block, of the row = values[:n]; stream: past the cache if they are contiguous."""
    cdef block[2] narrow
    cdef run a
    if stream and is_contiguous(v):
        store_run(<char*>narrow, v.itemsize, v.type, v.swapped, n, values)
        stream_bytes(row + c0 * v.itemsize, <char*>narrow, n * v.itemsize)
        return
    a = first_run(v, c0, n)
    while n > 0:
        store_run(row + a.begin, v.col_strides[v.col_ndim - 1], v.type, v.swapped, a.length, values)
        c0 += a.length
        values += a.length
        n -= a.length
        next_run(v, c0, n, &a)


cdef inline Py_ssize_t apart_in_cache(Py_ssize_t n_cols) noexcept nogil:
    """A distance of rows in a buffer that does not send them all to the same place of the cache."""
    return (n_cols + LANES - 1) // LANES * LANES + LANES


cdef void load_rows(const view* v, Py_ssize_t r, Py_ssize_t n_rows, Py_ssize_t n_cols, real* out) noexcept nogil:
    """out[n_rows, apart_in_cache(n_cols)] = rows that lie next to each other in memory, at most LANES:
    one cache line of each column, used for all of them."""
    cdef real[16] column
    cdef const char* base = row_start(v, r)
    cdef const char* p
    cdef const real* values
    cdef Py_ssize_t c, k, distance = apart_in_cache(n_cols)
    for c in range(n_cols):
        p = base + offset(v.col_ndim, v.col_shape, v.col_strides, c)
        values = <const real*>p
        if v.type != ST_REAL or v.swapped:
            load_run(p, v.itemsize, v.type, v.swapped, n_rows, column)
            values = column
        elif v.col_ndim == 1:
            prefetch(p + 16 * v.col_strides[0])
        for k in range(n_rows):
            out[k * distance + c] = values[k]


# One row to read: in place, or loaded through a buffer block by block, scaled by a power of two
# (in two factors, since one may be out of range).
cdef struct source:
    const view* v
    const char* row
    real* buffer
    bint resident, loaded, scaled
    double scale1, scale2


cdef inline source open_row(const view* v, Py_ssize_t r, real* buffer, bint resident) noexcept nogil:
    """resident: the buffer has room for the whole row and keeps it; loaded: it stands there already."""
    cdef source src
    src.v = v
    src.row = row_start(v, r)
    src.buffer = buffer
    src.resident = resident
    src.loaded = False
    src.scaled = False
    src.scale1 = 1.0
    src.scale2 = 1.0
    return src


cdef inline bint in_place(const view* v, int type) noexcept nogil:
    return v.direct and v.type == type


cdef inline Py_ssize_t run_left(int ndim, const Py_ssize_t* shape, Py_ssize_t i) noexcept nogil:
    """Elements from the C-order index i on that one stride can walk."""
    return shape[0] - i if ndim == 1 else shape[ndim - 1] - i % shape[ndim - 1]


cdef inline bint block_in_place(const view* v, Py_ssize_t c0, Py_ssize_t n) noexcept nogil:
    """Whether n columns from c0 on lie next to each other as real values."""
    cdef int last = v.col_ndim - 1
    if v.type != ST_REAL:
        return False
    return v.direct or (not v.swapped and v.col_strides[last] == v.itemsize
                        and run_left(v.col_ndim, v.col_shape, c0) >= n)


cdef inline Py_ssize_t within_run(const view* v, Py_ssize_t c0, Py_ssize_t n) noexcept nogil:
    """n columns from c0 on, or fewer if these can be read or written in place; short runs are not worth it."""
    cdef int last = v.col_ndim - 1
    if last == 0 or v.type != ST_REAL or v.swapped or v.col_strides[last] != v.itemsize or v.col_shape[last] < SHORT_RUN:
        return n
    return min(n, run_left(v.col_ndim, v.col_shape, c0))


cdef inline int type_in_place(const view* a, const view* b, const view* c) noexcept nogil:
    """The storage type for which kernels are instantiated: that of the arrays if they share one that
    needs no buffer, else real, with buffers for those that are something else."""
    if in_place(a, b.type) and in_place(b, c.type) and c.direct and has_lanes(a.type):
        return a.type
    return ST_REAL


cdef inline const char* load_block(const source* src, Py_ssize_t c0, Py_ssize_t n, bint again, int type) noexcept nogil:
    """Columns c0 to c0 + n, at most a block, as values of the type (a literal): in place, or in the
    buffer as real. again: they were loaded before, with the same scale."""
    cdef real* out
    cdef Py_ssize_t k
    if type != ST_REAL:
        return src.row + c0 * SIZE_OF(type)
    out = src.buffer + c0 if src.resident else src.buffer
    if src.loaded:
        return <const char*>out
    if not src.scaled and block_in_place(src.v, c0, n):
        return src.row + offset(src.v.col_ndim, src.v.col_shape, src.v.col_strides, c0)
    if again and src.resident:
        return <const char*>out
    load_columns(src.v, src.row, c0, n, out)
    if src.scaled:
        for k in range(n):
            out[k] = <real>(<double>out[k] * src.scale1 * src.scale2)
    return <const char*>out
