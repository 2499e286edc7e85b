"""What the early exit for the common case and the wing's other half (channel_norm.pyx) share with the wing."""
cimport numpy as cnp

from fastnorm._cpu.kernels cimport job, kernels, view

cdef Py_ssize_t STREAM_BYTES
cdef int bfloat16_number() noexcept
cdef int storage_type(cnp.ndarray a) except -1
cdef const kernels* kernels_of(cnp.ndarray x) except NULL
cdef double* allocate(Py_ssize_t n) except NULL
cdef void* data_or_null(object a) noexcept
cdef object as_row(object parameter, double offset, const kernels* k)
cdef void open_contiguous(view* v, void* data, int type, Py_ssize_t n_rows, Py_ssize_t n_cols, Py_ssize_t itemsize) noexcept
cdef int open_view(view* v, cnp.ndarray a, int n_axes) except -1
cdef void open_nothing_else(job* j) noexcept
cdef bint rows_adjacent(const view* v) noexcept nogil
cdef int run_forward(const kernels* k, const job* j) except -1
cdef int run_evaluate(const kernels* k, const job* j, bint across) except -1
cdef int run_backward(const kernels* k, const job* j) except -1
cdef double* open_partials(job* j, const kernels* k, bint param_grads) except NULL
cdef int finish_sums(const job* j, const kernels* k, double* partials, cnp.ndarray out) except -1
