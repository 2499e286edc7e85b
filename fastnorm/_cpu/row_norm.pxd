"""What the early exit for the common case shares with the wing."""
cimport numpy as cnp

from fastnorm._cpu.kernels cimport job, kernels, view

cdef Py_ssize_t STREAM_BYTES
cdef int bfloat16_number() noexcept
cdef void open_contiguous(view* v, void* data, int type, Py_ssize_t n_rows, Py_ssize_t n_cols, Py_ssize_t itemsize) noexcept
cdef int run_forward(const kernels* k, const job* j) except -1
cdef int run_backward(const kernels* k, const job* j) except -1
cdef double* open_partials(job* j, const kernels* k, bint param_grads) except NULL
cdef int finish_sums(const job* j, const kernels* k, double* partials, cnp.ndarray out) except -1
