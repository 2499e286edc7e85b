"""The early exit of the halls for the common case: plain arrays (exact ndarray, native, C-contiguous)
of one float type, normalized along the last axis, nothing empty, nothing overlapping. With a 16-bit
type, parameters may be float32 as well.

Both functions return None for anything else, and for whatever deserves an error: the hall finds the
words. They check as C does, so that a tiny call costs no more than one of np.add.
"""
from libc.stdlib cimport free, malloc
cimport numpy as cnp

from fastnorm._cpu.isa cimport float32_kernels, float64_kernels
from fastnorm._cpu.kernels cimport MAX_DIMS, job, kernels, view
from fastnorm._cpu.results cimport new_like
from fastnorm._cpu.row_norm cimport (STREAM_BYTES, bfloat16_number, finish_sums, open_contiguous, open_nothing_else,
                                     open_partials, run_backward, run_forward)

cnp.import_array()

cdef extern from "storage.h" nogil:
    enum:
        ST_FLOAT16, ST_BFLOAT16, ST_FLOAT32, ST_FLOAT64
    # This module's real is float.
    void load_run(const char* p, Py_ssize_t stride, int type, int swapped, Py_ssize_t n, float* out)


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


cdef inline int real_number(int type_num) noexcept:
    """The type number of the arithmetic type; -1 for what is not the common case."""
    if type_num == cnp.NPY_FLOAT32 or type_num == cnp.NPY_FLOAT64:
        return type_num
    return cnp.NPY_FLOAT32 if type_num == cnp.NPY_FLOAT16 or type_num == bfloat16_number() else -1


cdef inline void open_like_x(job* j, view* v, void* data) noexcept:
    """An array of the shape and type of x."""
    open_contiguous(v, data, j.x.type, j.n_rows, j.n_cols, j.x.itemsize)


cdef const kernels* open_common(job* j, object x) except? NULL:
    """NULL if x is not the common case."""
    cdef cnp.ndarray a
    cdef int type_num, real_num, ndim
    cdef Py_ssize_t size
    if type(x) is not cnp.ndarray:
        return NULL
    a = <cnp.ndarray>x
    type_num = cnp.PyArray_TYPE(a)
    real_num = real_number(type_num)
    ndim = cnp.PyArray_NDIM(a)
    size = cnp.PyArray_SIZE(a)
    if real_num < 0 or ndim == 0 or size == 0 or not is_plain(x, type_num):
        return NULL
    j.n_cols = cnp.PyArray_DIM(a, ndim - 1)
    j.n_rows = size // j.n_cols
    open_contiguous(&j.x, cnp.PyArray_DATA(a),
                    ST_FLOAT32 if type_num == cnp.NPY_FLOAT32 else ST_FLOAT64 if type_num == cnp.NPY_FLOAT64
                    else ST_FLOAT16 if type_num == cnp.NPY_FLOAT16 else ST_BFLOAT16,
                    j.n_rows, j.n_cols, cnp.PyArray_ITEMSIZE(a))
    open_nothing_else(j)
    return float32_kernels if real_num == cnp.NPY_FLOAT32 else float64_kernels


cdef inline bint is_output(object out, cnp.ndarray x) noexcept:
    return (is_plain(out, cnp.PyArray_TYPE(x)) and cnp.PyArray_ISWRITEABLE(<cnp.ndarray>out)
            and cnp.PyArray_SAMESHAPE(<cnp.ndarray>out, x))


cdef inline cnp.ndarray new_column(cnp.ndarray x, int real_num):
    cdef cnp.npy_intp[MAX_DIMS] shape
    cdef int k, ndim = cnp.PyArray_NDIM(x)
    for k in range(ndim - 1):
        shape[k] = cnp.PyArray_DIM(x, k)
    shape[ndim - 1] = 1
    return cnp.PyArray_EMPTY(ndim, shape, real_num, 0)


cdef inline bint is_finite(object a) noexcept:
    return type(a) is float and <double>a - <double>a == 0.0


cdef cnp.ndarray output_or_new(object out, cnp.ndarray x, cnp.ndarray other):
    """out, or a new array if it is None, which may be x or other; None if it is not the common case."""
    if out is None:
        return new_like(x)
    if not is_output(out, x) or not same_or_apart(<cnp.ndarray>out, x):
        return None
    return <cnp.ndarray>out if other is None or same_or_apart(<cnp.ndarray>out, other) else None


cdef object common_forward(object x, object residual, object alpha, object weight, object bias, object eps, object out,
                           object residual_out, bint centered, bint with_statistics, bint fused):
    cdef job j
    cdef const kernels* k = open_common(&j, x)
    cdef cnp.ndarray xa, ra = None, y, h = None, mean = None, rstd = None
    cdef int type_num, real_num
    cdef float* widened = NULL
    cdef bint widen_weight, widen_bias
    if k == NULL or type(eps) is not float:
        return None
    xa = <cnp.ndarray>x
    type_num = cnp.PyArray_TYPE(xa)
    real_num = real_number(type_num)
    j.eps = <double>eps
    widen_weight = not is_row(weight, real_num, j.n_cols)
    widen_bias = not is_row(bias, real_num, j.n_cols)
    if (not 0 <= j.eps < float("inf") or (widen_weight and not is_row(weight, type_num, j.n_cols))
            or (widen_bias and not is_row(bias, type_num, j.n_cols))):
        return None
    if fused:
        if not is_plain(residual, type_num) or not cnp.PyArray_SAMESHAPE(<cnp.ndarray>residual, xa) or not is_finite(alpha):
            return None
        ra = <cnp.ndarray>residual
        h = output_or_new(residual_out, xa, ra)
        if h is None or (residual_out is not None and not (apart(h, weight) and apart(h, bias))):
            return None
    y = output_or_new(out, xa, ra)
    if y is None or (out is not None and not (apart(y, weight) and apart(y, bias))):
        return None
    if fused and (out is not None or residual_out is not None) and not apart(y, h):
        return None
    j.mean = j.rstd = NULL
    if with_statistics:
        rstd = new_column(xa, real_num)
        j.rstd = cnp.PyArray_DATA(rstd)
        if centered:
            mean = new_column(xa, real_num)
            j.mean = cnp.PyArray_DATA(mean)
    j.centered = centered
    j.weight = data(weight)
    j.bias = data(bias)
    open_like_x(&j, &j.y, cnp.PyArray_DATA(y))
    j.stream = cnp.PyArray_NBYTES(y) >= STREAM_BYTES and j.y.data != j.x.data
    if fused:
        # What is normalized is h; x is added to it.
        open_like_x(&j, &j.addend, j.x.data)
        open_like_x(&j, &j.residual, cnp.PyArray_DATA(ra))
        j.x.data = <char*>cnp.PyArray_DATA(h)
        j.alpha = <double>alpha
        j.stream = (j.stream and j.y.data != j.residual.data and j.x.data != j.addend.data
                    and j.x.data != j.residual.data)
    if widen_weight or widen_bias:
        widened = <float*>malloc(2 * j.n_cols * sizeof(float))
        if widened == NULL:
            raise MemoryError
    try:
        if widen_weight:
            load_run(<const char*>j.weight, 2, j.x.type, False, j.n_cols, widened)
            j.weight = widened
        if widen_bias:
            load_run(<const char*>j.bias, 2, j.x.type, False, j.n_cols, widened + j.n_cols)
            j.bias = widened + j.n_cols
        run_forward(k, &j)
    finally:
        free(widened)
    if fused:
        return (y, h, mean, rstd) if with_statistics else (y, h)
    return (y, mean, rstd) if with_statistics else y


cdef inline cnp.ndarray new_row(const job* j, int type_num):
    cdef cnp.npy_intp n = j.n_cols
    return cnp.PyArray_EMPTY(1, &n, type_num, 0)


cdef object common_backward(object dy, object dh, object x, object mean, object rstd, object weight, object alpha,
                            bint param_grads, object out, bint centered, bint fused):
    cdef job j
    cdef const kernels* k = open_common(&j, x)
    cdef cnp.ndarray xa, dx, dresidual = None, dweight = None, dbias = None
    cdef double* partials
    cdef int type_num, real_num
    if k == NULL:
        return None
    xa = <cnp.ndarray>x
    type_num = cnp.PyArray_TYPE(xa)
    real_num = real_number(type_num)
    if not is_row(weight, real_num, j.n_cols):
        return None
    j.weight = data(weight)
    if not is_plain(dy, type_num) or not cnp.PyArray_SAMESHAPE(<cnp.ndarray>dy, xa):
        return None
    if not is_column(rstd, real_num, xa) or (centered and not is_column(mean, real_num, xa)):
        return None
    if dh is not None and (not is_plain(dh, type_num) or not cnp.PyArray_SAMESHAPE(<cnp.ndarray>dh, xa)):
        return None
    if fused and not is_finite(alpha):
        return None
    dx = output_or_new(out, xa, <cnp.ndarray>dy)
    if dx is None or (out is not None and not (apart(dx, weight) and apart(dx, rstd) and (not centered or apart(dx, mean))
                                               and (dh is None or same_or_apart(dx, <cnp.ndarray>dh)))):
        return None
    j.centered = centered
    j.mean = data(mean) if centered else NULL
    j.rstd = data(rstd)
    open_like_x(&j, &j.dy, data(dy))
    open_like_x(&j, &j.dx, cnp.PyArray_DATA(dx))
    # As in row_norm_backward.
    j.stream = cnp.PyArray_NBYTES(dx) >= STREAM_BYTES and j.dx.data != j.x.data and j.dx.data != j.dy.data
    if dh is not None:
        open_like_x(&j, &j.dh, data(dh))
        j.stream = j.stream and j.dx.data != j.dh.data
    if fused:
        dresidual = new_like(xa)
        open_like_x(&j, &j.dresidual, cnp.PyArray_DATA(dresidual))
        j.alpha = <double>alpha
    partials = open_partials(&j, k, param_grads)
    try:
        run_backward(k, &j)
        if param_grads:
            dweight = new_row(&j, real_num if weight is None else cnp.PyArray_TYPE(<cnp.ndarray>weight))
            finish_sums(&j, k, j.dweight_partial, dweight)
            if centered:
                dbias = new_row(&j, cnp.PyArray_TYPE(<cnp.ndarray>dweight))
                finish_sums(&j, k, j.dbias_partial, dbias)
        return dx, dresidual, dweight, dbias
    finally:
        free(partials)
