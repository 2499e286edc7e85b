"""Backward over rows, with wdy = dy * weight, x_hat = ((x - mean) - lo) * rstd:

    dx = rstd * (wdy - c2 - x_hat * c1),  c1 = mean(wdy * x_hat),  c2 = mean(wdy)
    dweight = sum over rows of dy * x_hat,  dbias = sum over rows of dy

rms_norm (centered is false): mean = lo = c2 = 0. The saved mean is rounded; lo, the mean of
x - mean, gives back what it lost. Two sweeps over a group of rows: the sums of each row, then dx
of all of them column by column, so that dweight and dbias are loaded and stored once per group.

dweight and dbias: a chunk of rows depends on the shape alone. In a chunk, the rows of a group are
added in order in real, the groups in order in double (compensated where real is double); rows left
over at the end of a chunk are groups of one.
"""

# What the second sweep needs to know of a row.
cdef struct gradient_row:
    source x, dy
    char* dx
    real hi, lo, rstd, c1, c2


cdef inline void gradient_half_step(const char* x, const char* dy, const real* w, Py_ssize_t i, Py_ssize_t n, lanes hi,
                                    bint centered, int type, lanes* sum_d, lanes* sum_wdy, lanes* sum_wdy_d) noexcept nogil:
    """The sums of d, wdy and wdy * d of four lane groups from i on, of which n values exist: the rest has d = 0 and wdy = 0."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes a = lanes_load_part_as(x, i, n, hi, type)
    cdef lanes b = lanes_load_part_as(x, i + LANES, n - LANES, hi, type)
    cdef lanes c = lanes_load_part_as(x, i + 2 * LANES, n - 2 * LANES, hi, type)
    cdef lanes d = lanes_load_part_as(x, i + 3 * LANES, n - 3 * LANES, hi, type)
    cdef lanes ga = lanes_load_part_as(dy, i, n, zero, type)
    cdef lanes gb = lanes_load_part_as(dy, i + LANES, n - LANES, zero, type)
    cdef lanes gc = lanes_load_part_as(dy, i + 2 * LANES, n - 2 * LANES, zero, type)
    cdef lanes gd = lanes_load_part_as(dy, i + 3 * LANES, n - 3 * LANES, zero, type)
    if w != NULL:
        ga = lanes_mul(ga, lanes_load_part(w + i, n, zero))
        gb = lanes_mul(gb, lanes_load_part(w + i + LANES, n - LANES, zero))
        gc = lanes_mul(gc, lanes_load_part(w + i + 2 * LANES, n - 2 * LANES, zero))
        gd = lanes_mul(gd, lanes_load_part(w + i + 3 * LANES, n - 3 * LANES, zero))
    if centered:
        a = lanes_sub(a, hi)
        b = lanes_sub(b, hi)
        c = lanes_sub(c, hi)
        d = lanes_sub(d, hi)
        sum_d[0] = sum4(a, b, c, d)
        sum_wdy[0] = sum4(ga, gb, gc, gd)
    sum_wdy_d[0] = sum4(lanes_mul(ga, a), lanes_mul(gb, b), lanes_mul(gc, c), lanes_mul(gd, d))


cdef inline void block_gradient_sums(const char* x, const char* dy, const real* w, Py_ssize_t n, real hi, bint centered,
                                     int type, double* sum_d, double* sum_wdy, double* sum_wdy_d) noexcept nogil:
    """OUT: the folded sums of d, wdy and wdy * d over one block."""
    cdef lanes h = lanes_fill(hi), zero = lanes_fill(0)
    cdef lanes s = zero, g = zero, p = zero
    cdef lanes s0 = zero, s1 = zero, g0 = zero, g1 = zero, p0, p1
    cdef Py_ssize_t i = 0
    while i < n:
        if i + STEP <= n:
            gradient_half_step(x, dy, w, i, HALF_STEP, h, centered, type, &s0, &g0, &p0)
            gradient_half_step(x, dy, w, i + HALF_STEP, HALF_STEP, h, centered, type, &s1, &g1, &p1)
        else:
            gradient_half_step(x, dy, w, i, n - i, h, centered, type, &s0, &g0, &p0)
            gradient_half_step(x, dy, w, i + HALF_STEP, n - i - HALF_STEP, h, centered, type, &s1, &g1, &p1)
        if centered:
            s = lanes_add(s, lanes_add(s0, s1))
            g = lanes_add(g, lanes_add(g0, g1))
        p = lanes_add(p, lanes_add(p0, p1))
        i += STEP
    if centered:
        sum_d[0] = lanes_fold(s)
        sum_wdy[0] = lanes_fold(g)
    sum_wdy_d[0] = lanes_fold(p)


cdef inline void settle_gradient(double sum_d, double sum_wdy, double sum_wdy_d, Py_ssize_t n_cols, bint centered,
                                 real rstd, real* lo, real* c1, real* c2) noexcept nogil:
    cdef double mean_d = sum_d / n_cols if centered else 0
    cdef double wdy = sum_wdy if centered else 0
    lo[0] = <real>mean_d
    c2[0] = <real>(wdy / n_cols)
    # rstd * c1, to be multiplied by x - mean: a rounding less than x_hat * c1.
    c1[0] = <real>scaled_mean(rstd, sum_wdy_d - mean_d * wdy, <double>n_cols)


cdef inline void open_gradient_row(const job* j, Py_ssize_t r, real* x_buffer, real* dy_buffer, gradient_row* row) noexcept nogil:
    # Buffers hold one block of each row of a group.
    row.x = open_row(&j.x, r, x_buffer, False)
    row.dy = open_row(&j.dy, r, dy_buffer, False)
    row.dx = row_start(&j.dx, r)
    row.hi = (<real*>j.mean)[r] if j.centered else 0
    row.rstd = (<real*>j.rstd)[r]


cdef inline void row_gradient_sums(const job* j, gradient_row* row, bint centered, int type) noexcept nogil:
    cdef in_real w = <in_real>j.weight
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
    settle_gradient(total_value(d), total_value(wdy), total_value(wdy_d), j.n_cols, centered, row.rstd,
                    &row.lo, &row.c1, &row.c2)


cdef inline lanes dx_lanes(lanes d, lanes dy, lanes w, lanes rstd, lanes c1, lanes c2, bint centered,
                           bint weighted) noexcept nogil:
    cdef lanes wdy = lanes_mul(dy, w) if weighted else dy
    if centered:
        wdy = lanes_sub(wdy, c2)
    return lanes_mul(lanes_sub(wdy, lanes_mul(d, c1)), rstd)


cdef inline void add_gradients(double* sums, Py_ssize_t partial_cols, lanes a, Py_ssize_t n) noexcept nogil:
    """n lanes of dweight or dbias to their sums, and not a sum more: split_backward gives the columns of a row to several threads."""
    if n == LANES:
        lanes_add_wide(sums, partial_cols, a)
    else:
        lanes_add_wide_part(sums, partial_cols, a, n)


cdef inline void apply_gradient_lanes(const in_bytes* x, const in_bytes* dy, const out_bytes* dx, const gradient_row* rows,
                                      Py_ssize_t i, Py_ssize_t n, const real* w, double* dweight, double* dbias,
                                      Py_ssize_t partial_cols, bint centered, bint stream, int type, int n_rows) noexcept nogil:
    """n columns from i on, at most one lane group: dx of a group of rows, their part of dweight and dbias."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes wl = lanes_load_part(w + i, n, zero) if w != NULL else zero
    cdef lanes dw = zero, db = zero
    cdef lanes g, d
    cdef lanes[GROUP] t
    cdef int k
    # All loads before all stores: rows a multiple of 4 KiB apart look alike to the processor, which
    # would hold a load back until the store before it is done.
    for k in range(n_rows):
        g = lanes_load_part_as(dy[k], i, n, zero, type)
        d = lanes_load_part_as(x[k], i, n, lanes_fill(rows[k].hi), type)
        if centered:
            d = lanes_sub(lanes_sub(d, lanes_fill(rows[k].hi)), lanes_fill(rows[k].lo))
        dw = lanes_add(dw, lanes_mul(g, lanes_mul(d, lanes_fill(rows[k].rstd))))
        t[k] = dx_lanes(d, g, wl, lanes_fill(rows[k].rstd), lanes_fill(rows[k].c1), lanes_fill(rows[k].c2), centered, w != NULL)
        if centered:
            db = lanes_add(db, g)
    for k in range(n_rows):
        if stream:
            lanes_stream_as(dx[k], i, t[k], type)
        else:
            lanes_store_part_as(dx[k], i, n, t[k], type)
    if dweight != NULL:
        add_gradients(dweight + i, partial_cols, dw, n)
        if centered:
            add_gradients(dbias + i, partial_cols, db, n)


cdef void apply_gradient_part(const in_bytes* x, const in_bytes* dy, const out_bytes* dx, const gradient_row* rows,
                              Py_ssize_t i, Py_ssize_t n, const real* w, double* dweight, double* dbias,
                              Py_ssize_t partial_cols, bint centered, int type, int n_rows) noexcept nogil:
    """At the ends of a block, less than a lane group. Flags at run time, to have it once."""
    apply_gradient_lanes(x, dy, dx, rows, i, n, w, dweight, dbias, partial_cols, centered, False, type, n_rows)


cdef inline void apply_gradient(const in_bytes* x, const in_bytes* dy, const out_bytes* dx, const gradient_row* rows, Py_ssize_t n,
                                const real* w, double* dweight, double* dbias, Py_ssize_t partial_cols,
                                bint centered, bint stream, int type, int n_rows, const in_bytes* ahead) noexcept nogil:
    """dx of n columns of a group of rows, their part of dweight and dbias. ahead: what the next group
    will read, fetched while this one computes."""
    cdef Py_ssize_t i = 0, head, part
    cdef int k
    if stream:
        # Whole cache lines only; all rows start at the same place inside one.
        head = min(n, values_to_line(dx[0], type))
        while i < head:
            part = min(head - i, <Py_ssize_t>LANES)
            apply_gradient_part(x, dy, dx, rows, i, part, w, dweight, dbias, partial_cols, centered, type, n_rows)
            i += part
        while i + LANES <= n:
            if ahead != NULL:
                for k in range(2 * n_rows):
                    prefetch(ahead[k] + i * SIZE_OF(type))
            apply_gradient_lanes(x, dy, dx, rows, i, LANES, w, dweight, dbias, partial_cols, centered, True, type, n_rows)
            i += LANES
    while i + LANES <= n:
        apply_gradient_lanes(x, dy, dx, rows, i, LANES, w, dweight, dbias, partial_cols, centered, False, type, n_rows)
        i += LANES
    if i < n:
        apply_gradient_part(x, dy, dx, rows, i, n - i, w, dweight, dbias, partial_cols, centered, type, n_rows)


cdef inline void group_apply(const job* j, gradient_row* rows, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1, double* dweight,
                             double* dbias, real* dx_buffer, bint centered, int type, int n_rows) noexcept nogil:
    """Columns c0 (the start of a block) to c1 of the group of rows that starts at r."""
    cdef in_real w = <in_real>j.weight
    cdef in_bytes[GROUP] x
    cdef in_bytes[GROUP] dy
    cdef out_bytes[GROUP] dx
    cdef in_bytes[2 * GROUP] ahead
    cdef Py_ssize_t n, first
    cdef int k
    cdef bint stream
    cdef bint dx_in_place = type != ST_REAL or in_place(&j.dx, ST_REAL)
    cdef bint fetch = j.stream and in_place(&j.x, type) and in_place(&j.dy, type) and r + 2 * n_rows <= j.n_rows
    while c0 < c1:
        n = min(<Py_ssize_t>BLOCK, c1 - c0)
        stream = j.stream and dx_in_place
        for k in range(n_rows):
            x[k] = load_block(&rows[k].x, c0, n, False, type)
            dy[k] = load_block(&rows[k].dy, c0, n, False, type)
            dx[k] = rows[k].dx + c0 * SIZE_OF(type) if dx_in_place else <char*>(dx_buffer + k * BLOCK)
            stream = stream and (<size_t>dx[k] - <size_t>dx[0]) % 64 == 0 and <size_t>dx[k] % SIZE_OF(type) == 0
            if fetch:
                ahead[2 * k] = row_start(&j.x, r + n_rows + k) + c0 * SIZE_OF(type)
                ahead[2 * k + 1] = row_start(&j.dy, r + n_rows + k) + c0 * SIZE_OF(type)
        apply_gradient(x, dy, dx, rows, n, w + c0 if w != NULL else NULL, dweight + c0 if dweight != NULL else NULL,
                       dbias + c0 if dbias != NULL else NULL, j.partial_cols, centered, stream, type, n_rows,
                       ahead if fetch else NULL)
        if not dx_in_place:
            for k in range(n_rows):
                store_columns(&j.dx, rows[k].dx, c0, n, <real*>dx[k], j.stream)
        c0 += BLOCK


cdef inline double* chunk_partial(const job* j, double* partials, Py_ssize_t chunk) noexcept nogil:
    if partials == NULL:
        return NULL
    return partials + chunk * j.partial_cols * (2 if sizeof(real) == 8 else 1)


cdef inline void chunk_backward(const job* j, Py_ssize_t chunk, bint centered, int type, block* buffers) noexcept nogil:
    cdef gradient_row[GROUP] rows
    cdef double* dweight = chunk_partial(j, j.dweight_partial, chunk)
    cdef double* dbias = chunk_partial(j, j.dbias_partial, chunk)
    cdef Py_ssize_t r = chunk * j.rows_per_chunk
    cdef Py_ssize_t end = min(r + j.rows_per_chunk, j.n_rows)
    cdef int k
    while r < end:
        if r + GROUP <= end:
            for k in range(GROUP):
                open_gradient_row(j, r + k, buffers[2 * k].v, buffers[2 * k + 1].v, &rows[k])
                row_gradient_sums(j, &rows[k], centered, type)
            group_apply(j, rows, r, 0, j.n_cols, dweight, dbias, buffers[2 * GROUP].v, centered, type, GROUP)
            r += GROUP
        else:
            open_gradient_row(j, r, buffers[0].v, buffers[1].v, &rows[0])
            row_gradient_sums(j, &rows[0], centered, type)
            group_apply(j, rows, r, 0, j.n_cols, dweight, dbias, buffers[2 * GROUP].v, centered, type, 1)
            r += 1


cdef void backward(const job* j, Py_ssize_t chunk0, Py_ssize_t chunk1) noexcept nogil:
    """Chunks chunk0 to chunk1. Their partial sums start at zero."""
    cdef block[3 * GROUP] buffers
    cdef Py_ssize_t chunk
    cdef int type = type_in_place(&j.x, &j.dy, &j.dx)
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
    cdef in_real w = <in_real>j.weight
    cdef block[2] buffers
    cdef gradient_row row
    cdef double a = 0, b = 0, c = 0
    cdef Py_ssize_t k, c0, n
    open_gradient_row(j, r, buffers[0].v, buffers[1].v, &row)
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
    settle_gradient(total_value(d), total_value(wdy), total_value(wdy_d), j.n_cols, j.centered, (<real*>j.rstd)[r],
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
    cdef block[3 * GROUP] buffers
    cdef gradient_row[GROUP] rows
    cdef double* dweight
    cdef double* dbias
    cdef Py_ssize_t r = 0, end = 0, chunk = 0
    cdef int k
    while r < j.n_rows:
        dweight = chunk_partial(j, j.dweight_partial, chunk)
        dbias = chunk_partial(j, j.dbias_partial, chunk)
        chunk += 1
        end = min(end + j.rows_per_chunk, j.n_rows)
        while r < end:
            if r + GROUP <= end:
                for k in range(GROUP):
                    open_gradient_row(j, r + k, buffers[2 * k].v, buffers[2 * k + 1].v, &rows[k])
                    restore(st + r + k, &rows[k])
                group_apply(j, rows, r, c0, c1, dweight, dbias, buffers[2 * GROUP].v, j.centered, ST_REAL, GROUP)
                r += GROUP
            else:
                open_gradient_row(j, r, buffers[0].v, buffers[1].v, &rows[0])
                restore(st + r, &rows[0])
                group_apply(j, rows, r, c0, c1, dweight, dbias, buffers[2 * GROUP].v, j.centered, ST_REAL, 1)
                r += 1
    if j.stream:
        stream_fence()
