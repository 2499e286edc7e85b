"""Memory for results. That of large ones is kept when they are freed (kept.h), by way of NumPy's own hook for
allocators (NEP 49): the arrays are plain, own their data, and return it here wherever they die.
"""
from cpython.pycapsule cimport PyCapsule_New
from cpython.ref cimport PyObject
from libc.string cimport strcpy
cimport numpy as cnp

import os

import numpy as np

cnp.import_array()

cdef extern from "kept.h":
    bint CAN_KEEP
    void keep_at_most(size_t bytes)
    size_t bytes_kept()
    void* kept_malloc(void* context, size_t size) noexcept
    void* kept_calloc(void* context, size_t n, size_t size) noexcept
    void* kept_realloc(void* context, void* p, size_t size) noexcept
    void kept_free(void* context, void* p, size_t size) noexcept

cdef extern from "numpy/arrayobject.h":
    PyObject* PyDataMem_DefaultHandler

# Bytes of a result from which its memory is kept. Of what is smaller glibc keeps the pages itself (M_MMAP_THRESHOLD).
cdef Py_ssize_t KEPT_MIN = 1 << 25


def bytes_from_environment(name, default):
    """An environment variable as a number; empty means unset. No address space has more than fit."""
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise ImportError(f"{name}={text!r}: expected a number of bytes")
    return min(int(text), 1 << 62)


cdef cnp.PyDataMem_Handler handler
strcpy(handler.name, "fastnorm")
handler.version = 1
handler.allocator.ctx = NULL
handler.allocator.malloc = kept_malloc
handler.allocator.calloc = kept_calloc
handler.allocator.realloc = kept_realloc
handler.allocator.free = kept_free
cdef object capsule = PyCapsule_New(&handler, "mem_handler", NULL)

cdef size_t limit = bytes_from_environment("FASTNORM_KEEP_BYTES", 256 << 20)
keep_at_most(limit)
cdef bint keeps = CAN_KEEP and limit > 0


cdef bint is_kept(Py_ssize_t n_bytes):
    """Whoever has given NumPy an allocator of their own wants that one."""
    cdef object current
    if not keeps or n_bytes < KEPT_MIN:
        return False
    current = cnp.PyDataMem_GetHandler()
    return <PyObject*>current == PyDataMem_DefaultHandler


cdef cnp.ndarray new_like(cnp.ndarray x):
    """A new C-contiguous array of the shape and type of one in native byte order."""
    cdef object before
    if not is_kept(cnp.PyArray_NBYTES(x)):
        return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(x), cnp.PyArray_DIMS(x), cnp.PyArray_TYPE(x), 0)
    before = cnp.PyDataMem_SetHandler(capsule)
    try:
        return cnp.PyArray_EMPTY(cnp.PyArray_NDIM(x), cnp.PyArray_DIMS(x), cnp.PyArray_TYPE(x), 0)
    finally:
        cnp.PyDataMem_SetHandler(before)


def empty(tuple shape, dtype):
    """numpy.empty for results."""
    cdef object before
    cdef Py_ssize_t n_bytes = dtype.itemsize
    for n in shape:
        n_bytes *= n
    if not is_kept(n_bytes):
        return np.empty(shape, dtype)
    before = cnp.PyDataMem_SetHandler(capsule)
    try:
        return np.empty(shape, dtype)
    finally:
        cnp.PyDataMem_SetHandler(before)


def kept_now():
    """Bytes that are kept and in no array."""
    return bytes_kept()


def constants(**changes):
    """As row_norm.constants."""
    global KEPT_MIN
    KEPT_MIN = changes.get("KEPT_MIN", KEPT_MIN)
    return dict(KEPT_MIN=KEPT_MIN)
