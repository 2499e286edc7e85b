"""What a kernel is given, and the table of kernels that each processor level fills in.

Plain C structs: the wing (row_norm.pyx) fills a job, the kernels of one level and arithmetic type
(row_norm.pxi) read it. "real" below is that arithmetic type: float or double.
"""

cdef enum:
    MAX_DIMS = 64      # NumPy's own limit

# How to reach element (row, column) of an array. Columns are the normalized axes in C order, rows
# all others; dimensions that can be walked with one stride are merged.
cdef struct view:
    char* data
    int type           # ST_* of storage.h
    bint swapped       # the other byte order
    Py_ssize_t itemsize
    bint direct        # native, and every row contiguous
    int row_ndim, col_ndim
    Py_ssize_t row_shape[MAX_DIMS]
    Py_ssize_t row_strides[MAX_DIMS]
    Py_ssize_t col_shape[MAX_DIMS]
    Py_ssize_t col_strides[MAX_DIMS]

cdef struct job:
    Py_ssize_t n_rows, n_cols
    bint centered          # about the mean (layer_norm) or about zero (rms_norm)
    bint stream            # store past the cache
    double eps
    view x                 # IN  what is normalized; OUT first of all where it is a sum
    view y                 # OUT forward
    view dy                # IN  backward
    view dx                # OUT backward; data is NULL if only the sums are wanted
    # Residual forms: x = addend + alpha * residual in forward; dh is added to dx, alpha times that is dresidual in
    # backward. Of what is not there, data is NULL.
    view addend, residual, dh, dresidual
    double alpha
    const void* weight     # IN  real[n_cols] or NULL
    const void* bias       # IN  real[n_cols] or NULL
    void* mean             # real[n_rows] or NULL: OUT forward, IN backward
    void* rstd             # real[n_rows] or NULL: OUT forward, IN backward
    # Channels: rows whose weight and bias (real[n_channels]) are those of the row; row r is of channel r % n_channels.
    bint by_row
    Py_ssize_t n_channels
    double* moments        # OUT forward: double[2, n_rows], mean and variance, or NULL
    double* row_sums       # OUT backward: double[2, n_rows], dweight and dbias, or NULL
    bint constant          # backward: the statistics do not depend on x
    # Evaluation: IN real[n_channels], the mean in two parts and rstd.
    const void* given_hi
    const void* given_lo
    const void* given_rstd
    # Backward: a chunk of rows adds up its dweight and dbias here. NULL: not wanted.
    Py_ssize_t rows_per_chunk
    Py_ssize_t partial_cols   # n_cols, or a little more
    double* dweight_partial   # OUT double[n_chunks, wide, partial_cols]; wide is 2 for double (sum, rest)
    double* dbias_partial

# What the second sweep needs to know of a row; real values, held as double.
cdef struct row_statistics:
    double hi, lo, rstd    # forward
    double c1, c2          # backward, with lo

# Rows in forward, chunks of rows in backward.
ctypedef void (*parts_kernel)(const job* j, Py_ssize_t begin, Py_ssize_t end) noexcept nogil
# Pieces of one long row, for several threads.
ctypedef void (*add_kernel)(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil
ctypedef double (*first_mean_kernel)(const job* j, Py_ssize_t r) noexcept nogil
ctypedef void (*forward_sums_kernel)(const job* j, Py_ssize_t r, Py_ssize_t block0, Py_ssize_t block1,
                                     double hi, double* sums) noexcept nogil
ctypedef int (*forward_settle_kernel)(const job* j, Py_ssize_t r, const double* sums, bint last,
                                      row_statistics* st) noexcept nogil
ctypedef void (*forward_apply_kernel)(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1,
                                      const row_statistics* st) noexcept nogil

ctypedef void (*backward_sums_kernel)(const job* j, Py_ssize_t r, Py_ssize_t block0, Py_ssize_t block1,
                                      double* sums) noexcept nogil
ctypedef void (*backward_settle_kernel)(const job* j, Py_ssize_t r, const double* sums, row_statistics* st) noexcept nogil
ctypedef void (*backward_apply_kernel)(const job* j, Py_ssize_t c0, Py_ssize_t c1, const row_statistics* st) noexcept nogil

cdef struct kernels:
    parts_kernel forward
    add_kernel add
    first_mean_kernel first_mean
    forward_sums_kernel forward_sums
    forward_settle_kernel forward_settle
    forward_apply_kernel forward_apply
    parts_kernel backward
    backward_sums_kernel backward_sums
    backward_settle_kernel backward_settle
    backward_apply_kernel backward_apply
    # The same for rows that lie next to each other in memory.
    parts_kernel axis_forward
    parts_kernel axis_backward
    # Forward with statistics that are given.
    parts_kernel evaluate
    parts_kernel axis_evaluate
