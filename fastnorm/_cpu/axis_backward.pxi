"""Backward where the rows lie next to each other in memory: the formulas of row_backward.pxi on the
tiles of axis_forward.pxi.

dweight and dbias keep their order: rows in groups of four within a chunk. Along a column, the rows
of a group are neighbours, so the products of a column are kept and added up group by group.
"""

cdef inline void tile_gradient_step(const tile* x, const tile* dy, Py_ssize_t c, Py_ssize_t n_cols, const real* weight,
                                    const real* hi, bint centered, bint first, real* s, real* g, real* p) noexcept nogil:
    """Add the columns c, c + LANES, ... of a step, one lane, as far as they exist. first: of a block."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes h, sum_d, sum_wdy, sum_wdy_d
    cdef lanes[8] d, wdy
    cdef in_real[8] x_column
    cdef in_real[8] dy_column
    cdef Py_ssize_t i = 0
    cdef int k
    for k in range(8):
        x_column[k] = dy_column[k] = NULL
        if c + k * LANES < n_cols:
            x_column[k] = tile_column(x, c + k * LANES, k)
            dy_column[k] = tile_column(dy, c + k * LANES, k)
    while i < x.n:
        h = lanes_load(hi + i)
        for k in range(8):
            d[k] = part_or(x_column[k], i, x.n, h)
            if centered:
                d[k] = lanes_sub(d[k], h)
            wdy[k] = part_or(dy_column[k], i, x.n, zero)
            if weight != NULL and dy_column[k] != NULL:
                wdy[k] = lanes_mul(wdy[k], lanes_fill(weight[c + k * LANES]))
        if centered:
            sum_d = lanes_add(sum4(d[0], d[1], d[2], d[3]), sum4(d[4], d[5], d[6], d[7]))
            lanes_store(s + i, sum_d if first else lanes_add(lanes_load(s + i), sum_d))
            sum_wdy = lanes_add(sum4(wdy[0], wdy[1], wdy[2], wdy[3]), sum4(wdy[4], wdy[5], wdy[6], wdy[7]))
            lanes_store(g + i, sum_wdy if first else lanes_add(lanes_load(g + i), sum_wdy))
        for k in range(8):
            d[k] = lanes_mul(wdy[k], d[k])
        sum_wdy_d = lanes_add(sum4(d[0], d[1], d[2], d[3]), sum4(d[4], d[5], d[6], d[7]))
        lanes_store(p + i, sum_wdy_d if first else lanes_add(lanes_load(p + i), sum_wdy_d))
        i += LANES


cdef void tile_gradient_sums(const job* j, const tile* x, const tile* dy, bint centered, tile_scratch* w) noexcept nogil:
    """OUT w.total_s, total_q, total_p: of d, wdy and wdy * d."""
    cdef in_real weight = column_weight(j)
    cdef Py_ssize_t block = 0, step
    cdef int l
    memset(&w.total_s, 0, sizeof(tile_totals))
    memset(&w.total_q, 0, sizeof(tile_totals))
    memset(&w.total_p, 0, sizeof(tile_totals))
    while block < j.n_cols:
        if j.n_cols - block < LANES:
            memset(w.s, 0, sizeof(w.s))
            memset(w.q, 0, sizeof(w.q))
            memset(w.p, 0, sizeof(w.p))
        step = block
        while step < min(block + BLOCK, j.n_cols):
            for l in range(<int>min(j.n_cols - step, <Py_ssize_t>LANES)):
                tile_gradient_step(x, dy, step + l, j.n_cols, weight, w.hi, centered, step == block,
                                   w.s + l * TILE, w.q + l * TILE, w.p + l * TILE)
            step += STEP
        if centered:
            fold_and_add(w.s, x.n, &w.total_s)
            fold_and_add(w.q, x.n, &w.total_q)
        fold_and_add(w.p, x.n, &w.total_p)
        block += BLOCK


cdef inline void add_groups(const real* a, Py_ssize_t n, double* sums, Py_ssize_t partial_cols) noexcept nogil:
    """sums[0] += a[:n] in the order of chunk_backward, as vec_add_wide() does for one column."""
    cdef Py_ssize_t i = 0
    cdef double s = sums[0], rest = 0, t, z, new
    if sizeof(real) == 8:
        rest = sums[partial_cols]
    while i < n:
        if i + GROUP <= n:
            t = ((a[i] + a[i + 1]) + a[i + 2]) + a[i + 3]
            i += GROUP
        else:
            t = a[i]
            i += 1
        new = s + t
        if sizeof(real) == 8:
            z = new - s
            rest += (s - (new - z)) + (t - z)
        s = new
    sums[0] = s
    if sizeof(real) == 8:
        sums[partial_cols] = rest


cdef inline void add_column(const job* j, Py_ssize_t r, Py_ssize_t n, Py_ssize_t c, const real* a, double* partials) noexcept nogil:
    """Add a[:n], of rows r to r + n at column c, to the partial sums of their chunks."""
    cdef Py_ssize_t chunk = r // j.rows_per_chunk, part
    while n > 0:
        part = min(n, (chunk + 1) * j.rows_per_chunk - r)
        add_groups(a, part, chunk_partial(j, partials, chunk) + c, j.partial_cols)
        chunk += 1
        r += part
        a += part
        n -= part


cdef inline vec vec_at(const real* a, Py_ssize_t i) noexcept nogil:
    """A register of a[i:], which has room for one."""
    return vec_load_part_as(<const char*>a, i, VEC_LANES, vec_fill(0), ST_REAL)


cdef inline void tile_gradient_column(const real* x, const real* dy, const real* dh, real* dx, real* dresidual, Py_ssize_t n,
                                      const tile_scratch* w, const real* weight, real alpha, bint by_row, bint centered,
                                      bint stream,
                                      real* products) noexcept nogil:
    """dx, dresidual and dy * x_hat of one column of n rows."""
    cdef vec zero = vec_fill(0)
    cdef vec wl = vec_fill(weight[0]) if weight != NULL else zero
    cdef vec d, g, t
    cdef Py_ssize_t i = 0, part
    while i < n:
        part = min(n - i, VEC_LANES)
        if stream and values_to_line(<char*>(dx + i), ST_REAL) % VEC_LANES != 0:
            # Past the cache in whole registers only; dx may start inside one.
            part = min(part, values_to_line(<char*>(dx + i), ST_REAL) % VEC_LANES)
        d = vec_load_part_as(<const char*>x, i, part, zero, ST_REAL)
        if centered:
            d = vec_sub(vec_sub(d, vec_at(w.hi, i)), vec_at(w.lo, i))
        g = vec_load_part_as(<const char*>dy, i, part, zero, ST_REAL)
        vec_store_part_as(<char*>products, i, VEC_LANES, vec_mul(g, vec_mul(d, vec_at(w.rstd, i))), ST_REAL)
        t = dx_vec(d, g, wl, vec_at(w.rstd, i), vec_at(w.c1, i), vec_at(w.c2, i), centered, weight != NULL)
        if by_row:
            t = vec_mul(t, vec_at(w.weight, i))
        if dh != NULL:
            t = vec_add(t, vec_load_part_as(<const char*>dh, i, part, zero, ST_REAL))
        if stream and part == VEC_LANES:
            vec_stream(dx + i, t)
        else:
            vec_store_part_as(<char*>dx, i, part, t, ST_REAL)
        if dresidual != NULL:
            vec_store_part_as(<char*>dresidual, i, part, vec_mul(t, vec_fill(alpha)), ST_REAL)
        i += part


# A result of a tile, column by column.
cdef struct tile_output:
    const view* v          # NULL: not wanted
    char* base
    bint plain             # in place, or by way of a column of scratch
    real* scratch


cdef inline tile_output open_output(const view* v, Py_ssize_t r, real* scratch) noexcept nogil:
    cdef tile_output out
    out.v = v if v.data != NULL else NULL
    out.base = row_start(v, r) if v.data != NULL else NULL
    out.plain = v.data != NULL and v.type == ST_REAL and not v.swapped
    out.scratch = scratch
    return out


cdef inline char* output_column(const tile_output* out, Py_ssize_t c) noexcept nogil:
    return out.base + offset(out.v.col_ndim, out.v.col_shape, out.v.col_strides, c)


cdef inline real* begin_column(const tile_output* out, Py_ssize_t c) noexcept nogil:
    """Where column c is computed; NULL if it is not wanted."""
    if out.v == NULL:
        return NULL
    return <real*>output_column(out, c) if out.plain else out.scratch


cdef inline void end_column(const tile_output* out, Py_ssize_t c, Py_ssize_t n) noexcept nogil:
    if out.v != NULL and not out.plain:
        store_run(output_column(out, c), out.v.itemsize, out.v.type, out.v.swapped, n, out.scratch)


cdef void tile_backward(const job* j, Py_ssize_t r, Py_ssize_t n, tile_scratch* w) noexcept nogil:
    cdef in_real weight = column_weight(j)
    cdef tile x = open_tile(&j.x, r, n, w.x_columns)
    cdef tile dy = open_tile(&j.dy, r, n, w.dy_columns)
    cdef tile dh
    cdef tile_output dx = open_output(&j.dx, r, w.out_column)
    cdef tile_output dresidual = open_output(&j.dresidual, r, w.dresidual_column)
    cdef const real* dy_column
    cdef const real* dh_column = NULL
    cdef real* dx_column
    cdef bint stream, by_row = j.by_row and j.weight != NULL
    cdef Py_ssize_t c, i
    if j.dh.data != NULL:
        dh = open_tile(&j.dh, r, n, w.dy_columns)
    memset(w.hi, 0, sizeof(w.hi))
    if j.centered:
        memcpy(w.hi, <real*>j.mean + r, n * sizeof(real))
    memcpy(w.rstd, <real*>j.rstd + r, n * sizeof(real))
    # The flags as literals: two bodies, each without the branches.
    if j.centered:
        tile_gradient_sums(j, &x, &dy, True, w)
    else:
        tile_gradient_sums(j, &x, &dy, False, w)
    for i in range(n):
        settle_gradient(j, r + i, tile_total(&w.total_s, i), tile_total(&w.total_q, i), tile_total(&w.total_p, i),
                        j.centered, w.rstd[i], &w.lo[i], &w.c1[i], &w.c2[i])
    if j.dx.data == NULL:
        return
    tile_parameters(j, &x, w)
    # Backwards, as tile_apply().
    for c in range(j.n_cols - 1, -1, -1):
        dx_column = begin_column(&dx, c)
        stream = j.stream and dx.plain and <size_t>dx_column % sizeof(real) == 0
        dy_column = tile_column(&dy, c, 0)
        if j.dh.data != NULL:
            # Another slot of what dy uses, too.
            dh_column = tile_column(&dh, c, 1)
        # dx may be dy: what dbias needs is added up first.
        if j.dbias_partial != NULL and j.centered:
            add_column(j, r, n, c, dy_column, j.dbias_partial)
        if j.centered:
            tile_gradient_column(tile_column(&x, c, 0), dy_column, dh_column, dx_column, begin_column(&dresidual, c), n, w,
                                 at_column(weight, c), <real>j.alpha, by_row, True, stream, w.p)
        else:
            tile_gradient_column(tile_column(&x, c, 0), dy_column, dh_column, dx_column, begin_column(&dresidual, c), n, w,
                                 at_column(weight, c), <real>j.alpha, by_row, False, stream, w.p)
        if j.dweight_partial != NULL:
            add_column(j, r, n, c, w.p, j.dweight_partial)
        end_column(&dx, c, n)
        end_column(&dresidual, c, n)


cdef void axis_backward(const job* j, Py_ssize_t chunk0, Py_ssize_t chunk1) noexcept nogil:
    """As backward(), for views whose rows are contiguous in runs of whole groups (wing: rows_adjacent)."""
    cdef tile_scratch* w = <tile_scratch*>malloc(sizeof(tile_scratch))
    cdef Py_ssize_t r = chunk0 * j.rows_per_chunk, end = min(chunk1 * j.rows_per_chunk, j.n_rows), most, n
    if w == NULL:
        # Slow, but right.
        backward(j, chunk0, chunk1)
        return
    while r < end:
        most = min(end - r, rows_left(&j.x, r), rows_left(&j.dy, r), rows_left(&j.dx, r))
        if j.dh.data != NULL:
            most = min(most, rows_left(&j.dh, r))
        if j.dresidual.data != NULL:
            most = min(most, rows_left(&j.dresidual, r))
        n = to_whole_lines(&j.dx, r, min(most, <Py_ssize_t>TILE), most)
        if n < most:
            n = n // GROUP * GROUP
        tile_backward(j, r, n, w)
        r += n
    if j.stream:
        stream_fence()
    free(w)
