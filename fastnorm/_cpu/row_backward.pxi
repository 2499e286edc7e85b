"""Backward over rows, with wdy = dy * weight, x_hat = ((x - mean) - lo) * rstd:

    dx = rstd * (wdy - c2 - x_hat * c1),  c1 = mean(wdy * x_hat),  c2 = mean(wdy)
    dweight = sum over rows of dy * x_hat,  dbias = sum over rows of dy

rms_norm (centered is false): mean = lo = c2 = 0. A gradient dh that arrives at x itself is added to dx, and
alpha times the result is dresidual (residual forms). The saved mean is rounded; lo, the mean of
x - mean, gives back what it lost. Two sweeps over a group of rows: the sums of each row, then dx of
one after the other, step by step of columns, and what they add to dweight and dbias in between.

dweight and dbias: a chunk of rows depends on the shape alone. In a chunk, the rows of a group are
added in order in real, the groups in order in double (compensated where real is double); rows left
over at the end of a chunk are groups of one.

Channels (batch_norm) are rows of one weight each: it is taken out of the sums, which are then those
of dweight and dbias, and multiplied to dx last. Where their statistics are constants
(evaluation), only the sums are taken here: dx is then what evaluate() makes of dy.
"""

# What the second sweep needs to know of a row.
cdef struct gradient_row:
    source x, dy, dh
    char* dx
    char* dresidual
    real hi, lo, rstd, c1, c2
    real weight            # of the row, where it has one


cdef inline void block_gradient_sums(const char* x, const char* dy, const real* w, Py_ssize_t n, real hi, bint centered,
                                     int type, double* sum_d, double* sum_wdy, double* sum_wdy_d) noexcept nogil:
    """OUT: the folded sums of d, wdy and wdy * d over one block."""
    cdef lanes s, g, p
    lanes_gradient_sums(x, dy, w, n, hi, centered, type, &s, &g, &p)
    if centered:
        sum_d[0] = lanes_fold(s)
        sum_wdy[0] = lanes_fold(g)
    sum_wdy_d[0] = lanes_fold(p)


cdef inline void settle_gradient(const job* j, Py_ssize_t r, double sum_d, double sum_wdy, double sum_wdy_d, bint centered,
                                 real rstd, real* lo, real* c1, real* c2) noexcept nogil:
    """From the sums to what the second sweep needs."""
    cdef double mean_d = sum_d / j.n_cols if centered and not j.constant else 0
    cdef double wdy = sum_wdy if centered else 0
    cdef double wdy_d = sum_wdy_d - mean_d * wdy
    lo[0] = <real>mean_d
    if j.row_sums != NULL:
        j.row_sums[r] = <double>rstd * wdy_d
        j.row_sums[j.n_rows + r] = wdy
    c2[0] = <real>(wdy / j.n_cols)
    # rstd * c1, to be multiplied by x - mean: a rounding less than x_hat * c1.
    c1[0] = <real>scaled_mean(rstd, wdy_d, <double>j.n_cols)


cdef inline in_real column_weight(const job* j) noexcept nogil:
    """weight of the columns, or NULL."""
    if j.by_row:
        return NULL
    return <in_real>j.weight


cdef enum:
    # Buffers of a block: x, dy and dh of each row of a group, then dx and dresidual of one.
    GRADIENT_BUFFERS = 3 * GROUP + 2


cdef inline void open_gradient_row(const job* j, Py_ssize_t r, block* buffers, gradient_row* row) noexcept nogil:
    """buffers: three of the row."""
    row.x = open_row(&j.x, r, buffers[0].v, False)
    row.dy = open_row(&j.dy, r, buffers[1].v, False)
    row.dx = row_start(&j.dx, r)
    if j.dh.data != NULL:
        row.dh = open_row(&j.dh, r, buffers[2].v, False)
    if j.dresidual.data != NULL:
        row.dresidual = row_start(&j.dresidual, r)
    row.hi = (<real*>j.mean)[r] if j.centered else 0
    row.rstd = (<real*>j.rstd)[r]
    if j.by_row and j.weight != NULL:
        row.weight = (<in_real>j.weight)[r]


cdef inline void row_gradient_sums(const job* j, Py_ssize_t r, gradient_row* row, bint centered, int type) noexcept nogil:
    cdef in_real w = column_weight(j)
    cdef double a = 0, b = 0, c = 0
    cdef total d, wdy, wdy_d
    cdef Py_ssize_t c0 = 0, n
    d.sum = d.rest = wdy.sum = wdy.rest = wdy_d.sum = wdy_d.rest = 0
    while c0 < j.n_cols:
        n = min(<Py_ssize_t>BLOCK, j.n_cols - c0)
        block_gradient_sums(load_block(&row.x, c0, n, False, type), load_block(&row.dy, c0, n, False, type),
                            w + c0 if w != NULL else NULL, n, row.hi, centered, type, &a, &b, &c)
        d = total_add(d, a)
        wdy = total_add(wdy, b)
        wdy_d = total_add(wdy_d, c)
        c0 += BLOCK
    settle_gradient(j, r, total_value(d), total_value(wdy), total_value(wdy_d), centered, row.rstd, &row.lo, &row.c1, &row.c2)


cdef inline vec dx_vec(vec d, vec dy, vec w, vec rstd, vec c1, vec c2, bint centered, bint weighted) noexcept nogil:
    cdef vec wdy = vec_mul(dy, w) if weighted else dy
    if centered:
        wdy = vec_sub(wdy, c2)
    return vec_mul(vec_sub(wdy, vec_mul(d, c1)), rstd)


cdef inline void add_gradients(double* sums, Py_ssize_t partial_cols, vec a, Py_ssize_t n) noexcept nogil:
    """n values of dweight or dbias to their sums, and not a sum more: split_backward gives the columns of a row to several threads."""
    if n == VEC_LANES:
        vec_add_wide(sums, partial_cols, a)
    else:
        vec_add_wide_part(sums, partial_cols, a, n)


# The sums of dweight and dbias over the rows of a group, for one step of columns, with room for a register after them.
cdef struct group_sums:
    real[BLOCK + LANES] dweight
    real[BLOCK + LANES] dbias


# Where the columns of a step are: IN x, dy and, unless NULL, dh, OUT dx and, unless NULL, dresidual.
cdef struct gradient_columns:
    const char* x
    const char* dy
    const char* dh
    char* dx
    char* dresidual
    # What a later row will read there, or NULL.
    const char* x_ahead
    const char* dy_ahead
    const char* dh_ahead
    bint stream, stream_residual   # dx and dresidual past the cache
    real alpha
    bint by_row            # dx is to be multiplied by the weight of its row
    bint more              # there is more to do than what every call has: by_row, dh or dresidual
    const real* weight     # of the columns, or NULL
    group_sums* sums       # or NULL
    bint first             # the sums start with this row


cdef inline void add_to(real* sums, Py_ssize_t i, Py_ssize_t n, vec a, bint first) noexcept nogil:
    """sums[i:i+n] = a, or += a unless first. No others: what stands there for columns that do not exist may be NaN."""
    if not first:
        a = vec_add(vec_load_part_as(<const char*>sums, i, VEC_LANES, a, ST_REAL), a)
    vec_store_part_as(<char*>sums, i, n, a, ST_REAL)


cdef inline void store_result(char* p, Py_ssize_t i, Py_ssize_t n, vec a, bint stream, int type) noexcept nogil:
    if stream:
        vec_stream_as(p, i, a, type)
    else:
        vec_store_part_as(p, i, n, a, type)


# What stands in registers while the columns of a row are gone over.
cdef struct gradient_constants:
    vec hi, lo, rstd, c1, c2, weight, alpha


cdef inline gradient_constants constants_of(const gradient_columns* at, const gradient_row* row) noexcept nogil:
    cdef gradient_constants a
    a.hi = vec_fill(row.hi)
    a.lo = vec_fill(row.lo)
    a.rstd = vec_fill(row.rstd)
    a.c1 = vec_fill(row.c1)
    a.c2 = vec_fill(row.c2)
    a.weight = vec_fill(row.weight if at.by_row else 1)
    a.alpha = vec_fill(at.alpha)
    return a


cdef inline void apply_gradient_vec(const gradient_columns* at, const gradient_constants* row, Py_ssize_t i, Py_ssize_t n,
                                    bint plain, bint first, bint centered, bint stream, bint stream_residual, int type) noexcept nogil:
    """n columns from i on, at most a register: dx, and the part of the row in dweight and dbias. plain: with weight and these
    sums, and no more than that."""
    cdef bint weighted = plain or at.weight != NULL, more = not plain and at.more
    cdef vec zero = vec_fill(0)
    cdef vec wl = vec_load_part_as(<const char*>at.weight, i, n, zero, ST_REAL) if weighted else zero
    cdef vec g = vec_load_part_as(at.dy, i, n, zero, type)
    cdef vec d = vec_load_part_as(at.x, i, n, row.hi, type)
    cdef vec t
    if centered:
        d = vec_sub(vec_sub(d, row.hi), row.lo)
    t = dx_vec(d, g, wl, row.rstd, row.c1, row.c2, centered, weighted)
    if more:
        if at.by_row:
            t = vec_mul(t, row.weight)
        if at.dh != NULL:
            t = vec_add(t, vec_load_part_as(at.dh, i, n, zero, type))
    store_result(at.dx, i, n, t, stream, type)
    if more and at.dresidual != NULL:
        store_result(at.dresidual, i, n, vec_mul(t, row.alpha), stream_residual, type)
    if plain or at.sums != NULL:
        add_to(at.sums.dweight, i, n, vec_mul(g, vec_mul(d, row.rstd)), first)
        if centered:
            add_to(at.sums.dbias, i, n, g, first)


cdef void apply_gradient_part(const gradient_columns* at, const gradient_row* row, Py_ssize_t i, Py_ssize_t end,
                              bint centered, int type) noexcept nogil:
    """Columns i to end at the ends of a block, less than a cache line. Flags at run time, to have it once."""
    cdef gradient_constants constants = constants_of(at, row)
    while i < end:
        apply_gradient_vec(at, &constants, i, min(end - i, VEC_LANES), False, at.first, centered, False,
                           False, type)
        i += VEC_LANES


cdef inline void apply_gradient(const gradient_columns* columns, const gradient_row* row, Py_ssize_t n, bint centered,
                                int type) noexcept nogil:
    """dx of n columns of a row, and its part of dweight and dbias."""
    # Copies that nobody has an address of, or each store might have changed them.
    cdef gradient_columns at = columns[0]
    cdef gradient_constants constants = constants_of(&at, row)
    cdef Py_ssize_t i = 0, end, ahead
    cdef int k
    if at.stream:
        # Whole cache lines only.
        i = min(n, values_to_line(at.dx, type))
        end = i + whole_lines(n - i, type)
        apply_gradient_part(columns, row, 0, i, centered, type)
        while i < end:
            if at.x_ahead != NULL:
                ahead = i * SIZE_OF(type)
                prefetch(at.x_ahead + ahead)
                prefetch(at.dy_ahead + ahead)
                if at.dh_ahead != NULL:
                    prefetch(at.dh_ahead + ahead)
            for k in range(N_VECS):
                apply_gradient_vec(&at, &constants, i + k * VEC_LANES, VEC_LANES, False, at.first, centered, True,
                                   at.stream_residual, type)
            i += LANES
    # What is common: flags as literals, without the branches.
    if at.weight != NULL and at.sums != NULL and not at.more:
        if at.first:
            while i + VEC_LANES <= n:
                apply_gradient_vec(&at, &constants, i, VEC_LANES, True, True, centered, False, False, type)
                i += VEC_LANES
        else:
            while i + VEC_LANES <= n:
                apply_gradient_vec(&at, &constants, i, VEC_LANES, True, False, centered, False, False, type)
                i += VEC_LANES
    while i + VEC_LANES <= n:
        apply_gradient_vec(&at, &constants, i, VEC_LANES, False, at.first, centered, False, False, type)
        i += VEC_LANES
    if i < n:
        apply_gradient_part(columns, row, i, n, centered, type)


cdef inline Py_ssize_t gradient_span(const job* j, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    """Columns from c0 on for one step of the second sweep: a block, or what lies next to each other in x, dy and dx."""
    cdef Py_ssize_t n = min(<Py_ssize_t>BLOCK, c1 - c0)
    if j.x.col_ndim == 1 and j.dy.col_ndim == 1 and j.dx.col_ndim == 1:
        return n
    return within_run(&j.dx, c0, within_run(&j.dy, c0, within_run(&j.x, c0, n)))


cdef inline char* place(const view* v, char* row, Py_ssize_t c0, bint is_in_place, real* buffer) noexcept nogil:
    """Where a result from column c0 on is put: in its place, or in a buffer."""
    return row + offset(v.col_ndim, v.col_shape, v.col_strides, c0) if is_in_place else <char*>buffer


cdef inline bint on_lines(const char* p, const char* first, int type) noexcept nogil:
    """Whether p lies in its cache line as the first result does, and can be stored past the cache."""
    return (<size_t>p - <size_t>first) % 64 == 0 and <size_t>p % SIZE_OF(type) == 0


cdef inline void row_apply_gradient(const job* j, gradient_row* row, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t n, group_sums* sums,
                                    bint first, block* buffers, bint centered, int type) noexcept nogil:
    """n columns from c0 on, a step, of row r; first: of a group. buffers: one for dx, one for dresidual."""
    cdef in_real w = column_weight(j)
    cdef gradient_columns at
    cdef bint dx_in_place = type != ST_REAL or block_in_place(&j.dx, c0, n)
    cdef bint dresidual_in_place = j.dresidual.data != NULL and (type != ST_REAL or block_in_place(&j.dresidual, c0, n))
    cdef Py_ssize_t start = c0 * SIZE_OF(type)
    at.alpha = <real>j.alpha
    at.by_row = j.by_row and j.weight != NULL
    at.weight = w + c0 if w != NULL else NULL
    at.sums = sums
    at.first = first
    at.more = at.by_row or j.dh.data != NULL or j.dresidual.data != NULL
    at.x = load_block(&row.x, c0, n, False, type)
    at.dy = load_block(&row.dy, c0, n, False, type)
    at.dh = load_block(&row.dh, c0, n, False, type) if j.dh.data != NULL else NULL
    at.dx = place(&j.dx, row.dx, c0, dx_in_place, buffers[0].v)
    at.dresidual = NULL
    if j.dresidual.data != NULL:
        at.dresidual = place(&j.dresidual, row.dresidual, c0, dresidual_in_place, buffers[1].v)
    at.stream = j.stream and dx_in_place and on_lines(at.dx, at.dx, type)
    at.stream_residual = at.stream and dresidual_in_place and on_lines(at.dresidual, at.dx, type)
    at.x_ahead = at.dy_ahead = at.dh_ahead = NULL
    if at.stream and in_place(&j.x, type) and in_place(&j.dy, type) and r + GROUP < j.n_rows:
        # What the next group will read: stores past the cache leave the memory bus idle otherwise.
        at.x_ahead = row_start(&j.x, r + GROUP) + start
        at.dy_ahead = row_start(&j.dy, r + GROUP) + start
        if j.dh.data != NULL and in_place(&j.dh, type):
            at.dh_ahead = row_start(&j.dh, r + GROUP) + start
    apply_gradient(&at, row, n, centered, type)
    if not dx_in_place:
        store_columns(&j.dx, row.dx, c0, n, <real*>at.dx, j.stream)
    if j.dresidual.data != NULL and not dresidual_in_place:
        store_columns(&j.dresidual, row.dresidual, c0, n, <real*>at.dresidual, j.stream)


cdef void close_sums(const job* j, const group_sums* sums, Py_ssize_t n, double* dweight, double* dbias,
                     bint centered) noexcept nogil:
    """Add n sums of a group to those of its chunk."""
    cdef vec zero = vec_fill(0)
    cdef Py_ssize_t i = 0, part
    while i < n:
        part = min(n - i, VEC_LANES)
        add_gradients(dweight + i, j.partial_cols, vec_load_part_as(<const char*>sums.dweight, i, VEC_LANES, zero, ST_REAL), part)
        if centered:
            add_gradients(dbias + i, j.partial_cols, vec_load_part_as(<const char*>sums.dbias, i, VEC_LANES, zero, ST_REAL), part)
        i += VEC_LANES


cdef inline void group_apply(const job* j, gradient_row* rows, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1, double* dweight,
                             double* dbias, block* buffers, bint centered, int type, int n_rows) noexcept nogil:
    """Columns c0 (the start of a block) to c1 of the group of rows that starts at r."""
    cdef group_sums sums
    cdef group_sums* wanted = &sums if dweight != NULL else NULL
    cdef Py_ssize_t n
    cdef int k
    while c0 < c1:
        n = gradient_span(j, c0, c1)
        for k in range(n_rows):
            row_apply_gradient(j, &rows[k], r + k, c0, n, wanted, k == 0, buffers, centered, type)
        if wanted != NULL:
            close_sums(j, wanted, n, dweight + c0, dbias + c0 if centered else NULL, centered)
        c0 += n


cdef inline double* chunk_partial(const job* j, double* partials, Py_ssize_t chunk) noexcept nogil:
    if partials == NULL:
        return NULL
    return partials + chunk * j.partial_cols * (2 if sizeof(real) == 8 else 1)


cdef inline void group_backward(const job* j, Py_ssize_t r, double* dweight, double* dbias, block* buffers, bint centered,
                                int type, int n_rows) noexcept nogil:
    """The group of rows that starts at r."""
    cdef gradient_row[GROUP] rows
    cdef group_sums sums
    cdef group_sums* wanted = &sums if dweight != NULL else NULL
    # A row of one step is still in the first cache after its sums.
    cdef bint at_once = j.dx.data != NULL and gradient_span(j, 0, j.n_cols) == j.n_cols
    cdef int k
    for k in range(n_rows):
        open_gradient_row(j, r + k, buffers + 3 * k, &rows[k])
        row_gradient_sums(j, r + k, &rows[k], centered, type)
        if at_once:
            row_apply_gradient(j, &rows[k], r + k, 0, j.n_cols, wanted, k == 0, buffers + 3 * GROUP, centered, type)
    if at_once and wanted != NULL:
        close_sums(j, wanted, j.n_cols, dweight, dbias, centered)
    elif not at_once and j.dx.data != NULL:
        group_apply(j, rows, r, 0, j.n_cols, dweight, dbias, buffers + 3 * GROUP, centered, type, n_rows)


cdef inline void chunk_backward(const job* j, Py_ssize_t chunk, bint centered, int type, block* buffers) noexcept nogil:
    cdef double* dweight = chunk_partial(j, j.dweight_partial, chunk)
    cdef double* dbias = chunk_partial(j, j.dbias_partial, chunk)
    cdef Py_ssize_t r = chunk * j.rows_per_chunk
    cdef Py_ssize_t end = min(r + j.rows_per_chunk, j.n_rows)
    cdef int n_rows
    while r < end:
        n_rows = GROUP if r + GROUP <= end else 1
        group_backward(j, r, dweight, dbias, buffers, centered, type, n_rows)
        r += n_rows


cdef inline int gradient_type(const job* j) noexcept nogil:
    """The storage type for which kernels are instantiated, as type_in_place() has it."""
    cdef int type = type_in_place(&j.x, &j.dy, &j.dx)
    if j.dh.data != NULL and not in_place(&j.dh, type) or j.dresidual.data != NULL and not in_place(&j.dresidual, type):
        return ST_REAL
    return type


cdef void backward(const job* j, Py_ssize_t chunk0, Py_ssize_t chunk1) noexcept nogil:
    """Chunks chunk0 to chunk1. Their partial sums start at zero."""
    cdef block[GRADIENT_BUFFERS] buffers
    cdef Py_ssize_t chunk
    cdef int type = gradient_type(j)
    for chunk in range(chunk0, chunk1):
        # Flags as literals: a body for each, without the branches.
        if FLOAT16_LANES and type == ST_FLOAT16:
            if j.centered:
                chunk_backward(j, chunk, True, ST_FLOAT16, buffers)
            else:
                chunk_backward(j, chunk, False, ST_FLOAT16, buffers)
        elif BFLOAT16_LANES and type == ST_BFLOAT16:
            if j.centered:
                chunk_backward(j, chunk, True, ST_BFLOAT16, buffers)
            else:
                chunk_backward(j, chunk, False, ST_BFLOAT16, buffers)
        elif j.centered:
            chunk_backward(j, chunk, True, ST_REAL, buffers)
        else:
            chunk_backward(j, chunk, False, ST_REAL, buffers)
    if j.stream:
        stream_fence()


# Few long rows in pieces: the sums of blocks of one row, then columns of all rows.

cdef void piece_gradient_sums(const job* j, Py_ssize_t r, Py_ssize_t block0, Py_ssize_t block1, double* sums) noexcept nogil:
    """OUT sums[3 * block + 0, 1, 2]: of d, wdy and wdy * d."""
    cdef in_real w = column_weight(j)
    cdef block[3] buffers
    cdef gradient_row row
    cdef double a = 0, b = 0, c = 0
    cdef Py_ssize_t k, c0, n
    open_gradient_row(j, r, buffers, &row)
    for k in range(block0, block1):
        c0 = k * BLOCK
        n = min(<Py_ssize_t>BLOCK, j.n_cols - c0)
        block_gradient_sums(load_block(&row.x, c0, n, False, ST_REAL), load_block(&row.dy, c0, n, False, ST_REAL),
                            w + c0 if w != NULL else NULL, n, row.hi, j.centered, ST_REAL, &a, &b, &c)
        sums[3 * k] = a
        sums[3 * k + 1] = b
        sums[3 * k + 2] = c


cdef void piece_gradient_settle(const job* j, Py_ssize_t r, const double* sums, row_statistics* st) noexcept nogil:
    cdef total d, wdy, wdy_d
    cdef real lo, c1, c2
    cdef Py_ssize_t k
    d.sum = d.rest = wdy.sum = wdy.rest = wdy_d.sum = wdy_d.rest = 0
    for k in range((j.n_cols + BLOCK - 1) // BLOCK):
        d = total_add(d, sums[3 * k])
        wdy = total_add(wdy, sums[3 * k + 1])
        wdy_d = total_add(wdy_d, sums[3 * k + 2])
    settle_gradient(j, r, total_value(d), total_value(wdy), total_value(wdy_d), j.centered, (<real*>j.rstd)[r],
                    &lo, &c1, &c2)
    st.lo = lo
    st.c1 = c1
    st.c2 = c2


cdef inline void restore(const row_statistics* st, gradient_row* row) noexcept nogil:
    row.lo = <real>st.lo
    row.c1 = <real>st.c1
    row.c2 = <real>st.c2


cdef void piece_gradient_apply(const job* j, Py_ssize_t c0, Py_ssize_t c1, const row_statistics* st) noexcept nogil:
    """Columns c0 (the start of a block) to c1 of all rows, in the order of chunk_backward."""
    cdef block[GRADIENT_BUFFERS] buffers
    cdef gradient_row[GROUP] rows
    cdef double* dweight
    cdef double* dbias
    cdef Py_ssize_t r = 0, end = 0, chunk = 0
    cdef int k, n_rows
    while r < j.n_rows:
        dweight = chunk_partial(j, j.dweight_partial, chunk)
        dbias = chunk_partial(j, j.dbias_partial, chunk)
        chunk += 1
        end = min(end + j.rows_per_chunk, j.n_rows)
        while r < end:
            n_rows = GROUP if r + GROUP <= end else 1
            for k in range(n_rows):
                open_gradient_row(j, r + k, buffers + 3 * k, &rows[k])
                restore(st + r + k, &rows[k])
            group_apply(j, rows, r, c0, c1, dweight, dbias, buffers + 3 * GROUP, j.centered, ST_REAL, n_rows)
            r += n_rows
    if j.stream:
        stream_fence()
