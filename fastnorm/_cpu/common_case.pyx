"""The early exit of the halls for the common case: plain arrays (exact ndarray, native, C-contiguous)
of float32 or float64 alone, normalized along the last axis, nothing empty, nothing overlapping.

Both functions return None for anything else, and for whatever deserves an error: the hall finds the
words. They check as C does, so that a tiny call costs no more than one of np.add.
"""
from libc.stdlib cimport free
cimport numpy as cnp

from fastnorm._cpu.isa cimport float32_kernels, float64_kernels
from fastnorm._cpu.kernels cimport MAX_DIMS, job, kernels
from fastnorm._cpu.row_norm cimport STREAM_BYTES, add_chunks, open_contiguous, open_partials, run_backward, run_forward

cnp.import_array()

cdef extern from "storage.h":
    enum:
        ST_FLOAT32, ST_FLOAT64


cdef inline bint is_plain(object a, int type_num) noexcept:
    return (type(a) is cnp.ndarray and cnp.PyArray_TYPE(<cnp.ndarray>a) == type_num
            and cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>a) and cnp.PyArray_ISNOTSWAPPED(<cnp.ndarray>a))


cdef inline bint is_row(object a, int type_num, Py_ssize_t n_cols) noexcept:
    """weight or bias: None, or one row."""
    return a is None or (is_plain(a, type_num) and cnp.PyArray_NDIM(<cnp.ndarray>a) == 1
                         and cnp.PyArray_DIM(<cnp.ndarray>a, 0) == n_cols)


cdef inline bint is_column(object a, int type_num, cnp.ndarray x) noexcept:
    """mean or rstd: the shape of x but for the last axis, which is 1."""
    cdef int k, last = cnp.PyArray_NDIM(x) - 1
    if not is_plain(a, type_num) or cnp.PyArray_NDIM(<cnp.ndarray>a) != last + 1 or cnp.PyArray_DIM(<cnp.ndarray>a, last) != 1:
        return False
    for k in range(last):
        if cnp.PyArray_DIM(<cnp.ndarray>a, k) != cnp.PyArray_DIM(x, k):
            return False
    return True


cdef inline void* data(object a) noexcept:
    return NULL if a is None else cnp.PyArray_DATA(<cnp.ndarray>a)


cdef inline bint apart(cnp.ndarray a, object b) noexcept:
    """Whether no byte of a is one of b."""
    cdef char* p = <char*>cnp.PyArray_DATA(a)
    cdef char* q = <char*>data(b)
    return q == NULL or p + cnp.PyArray_NBYTES(a) <= q or q + cnp.PyArray_NBYTES(<cnp.ndarray>b) <= p


cdef inline bint same_or_apart(cnp.ndarray a, cnp.ndarray b) noexcept:
    """For arrays of one shape and type."""
    return cnp.PyArray_DATA(a) == cnp.PyArray_DATA(b) or apart(a, b)


cdef const kernels* open_common(job* j, object x, object weight) except? NULL:
    """NULL if x and weight are not the common case."""
    cdef cnp.ndarray a
    cdef int type_num, ndim
    cdef Py_ssize_t size
    if type(x) is not cnp.ndarray:
        return NULL
    a = <cnp.ndarray>x
    type_num = cnp.PyArray_TYPE(a)
    ndim = cnp.PyArray_NDIM(a)
    size = cnp.PyArray_SIZE(a)
    if not (type_num == cnp.NPY_FLOAT32 or type_num == cnp.NPY_FLOAT64) or ndim == 0 or size == 0 or not is_plain(x, type_num):
        return NULL
    j.n_cols = cnp.PyArray_DIM(a, ndim - 1)
    j.n_rows = size // j.n_cols
    if not is_row(weight, type_num, j.n_cols):
        return NULL
    j.weight = data(weight)
    open_contiguous(&j.x, cnp.PyArray_DATA(a), ST_FLOAT32 if type_num == cnp.NPY_FLOAT32 else ST_FLOAT64,
                    j.n_rows, j.n_cols, cnp.PyArray_ITEMSIZE(a))
    return float32_kernels if type_num == cnp.NPY_FLOAT32 else float64_kernels


cdef inline bint is_output(object out, cnp.ndarray x) noexcept:
    return (is_plain(out, cnp.PyArray_TYPE(x)) and cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out)
            and cnp.PyArray_SAMESHAPE(<cnp.ndarray>out, x))


cdef inline cnp.ndarray new_like(cnp.ndarray x):
    return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(x), cnp.PyArray_DIMS(x), cnp.PyArray_TYPE(x), 0)


cdef inline cnp.ndarray new_column(cnp.ndarray x):
    cdef cnp.npy_intp[MAX_DIMS] shape
    cdef int k, ndim = cnp.PyArray_NDIM(x)
    for k in range(ndim - 1):
        shape[k] = cnp.PyArray_DIM(x, k)
    shape[ndim - 1] = 1
    return cnp.PyArray_EMPTY(ndim, shape, cnp.PyArray_TYPE(x), 0)


cdef object common_forward(object x, object weight, object bias, object eps, object out, bint centered, bint with_statistics):
    cdef job j
    cdef const kernels* k = open_common(&j, x, weight)
    cdef cnp.ndarray xa, y, mean = None, rstd = None
    if k == NULL or type(eps) is not float:
        return None
    xa = <cnp.ndarray>x
    j.eps = <double>eps
    if not 0 <= j.eps < float("inf") or not is_row(bias, cnp.PyArray_TYPE(xa), j.n_cols):
        return None
    j.bias = data(bias)
    if out is None:
        y = new_like(xa)
    else:
        if not is_output(out, xa):
            return None
        y = <cnp.ndarray>out
        if not (same_or_apart(y, xa) and apart(y, weight) and apart(y, bias)):
            return None
    j.mean = j.rstd = NULL
    if with_statistics:
        rstd = new_column(xa)
        j.rstd = cnp.PyArray_DATA(rstd)
        if centered:
            mean = new_column(xa)
            j.mean = cnp.PyArray_DATA(mean)
    j.centered = centered
    j.y = j.x
    j.y.data = <char*>cnp.PyArray_DATA(y)
    j.stream = cnp.PyArray_NBYTES(y) >= STREAM_BYTES and j.y.data != j.x.data
    run_forward(k, &j)
    return (y, mean, rstd) if with_statistics else y


cdef object round_row(const job* j, const double* sums, int type_num):
    """dweight or dbias from its sums."""
    cdef cnp.npy_intp n = j.n_cols
    cdef cnp.ndarray a = cnp.PyArray_EMPTY(1, &n, type_num, 0)
    cdef float* f = <float*>cnp.PyArray_DATA(a)
    cdef double* d = <double*>cnp.PyArray_DATA(a)
    cdef Py_ssize_t i
    if type_num == cnp.NPY_FLOAT32:
        for i in range(n):
            f[i] = <float>sums[i]
    else:
        for i in range(n):
            d[i] = sums[i]
    return a


cdef object common_backward(object dy, object x, object mean, object rstd, object weight, bint param_grads, object out,
                            bint centered):
    cdef job j
    cdef const kernels* k = open_common(&j, x, weight)
    cdef cnp.ndarray xa, dx
    cdef double* partials
    cdef int type_num
    if k == NULL:
        return None
    xa = <cnp.ndarray>x
    type_num = cnp.PyArray_TYPE(xa)
    if not is_plain(dy, type_num) or not cnp.PyArray_SAMESHAPE(<cnp.ndarray>dy, xa):
        return None
    if not is_column(rstd, type_num, xa) or (centered and not is_column(mean, type_num, xa)):
        return None
    if out is None:
        dx = new_like(xa)
    else:
        if not is_output(out, xa):
            return None
        dx = <cnp.ndarray>out
        if not (same_or_apart(dx, xa) and same_or_apart(dx, <cnp.ndarray>dy) and apart(dx, weight) and apart(dx, rstd)
                and (not centered or apart(dx, mean))):
            return None
    j.centered = centered
    j.mean = data(mean) if centered else NULL
    j.rstd = data(rstd)
    j.dy = j.dx = j.x
    j.dy.data = <char*>data(dy)
    j.dx.data = <char*>cnp.PyArray_DATA(dx)
    j.stream = cnp.PyArray_NBYTES(dx) >= STREAM_BYTES and j.dx.data != j.x.data and j.dx.data != j.dy.data
    partials = open_partials(&j, k)
    try:
        if not param_grads:
            j.dweight_partial = j.dbias_partial = NULL
            run_backward(k, &j)
            return dx, None, None
        run_backward(k, &j)
        add_chunks(&j, k, j.dweight_partial)
        dweight = round_row(&j, j.dweight_partial, type_num)
        if not centered:
            return dx, dweight, None
        add_chunks(&j, k, j.dbias_partial)
        return dx, dweight, round_row(&j, j.dbias_partial, type_num)
    finally:
        free(partials)
