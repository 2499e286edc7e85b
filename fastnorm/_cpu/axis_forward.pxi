"""The same formulas where the rows, not the columns, lie next to each other in memory (axis=0 of a
matrix): every lane group holds LANES rows at one column, a tile holds up to TILE rows.

The sums keep the order of lanes.h: column i of a step is added to the lane i mod LANES of each row,
so a tile keeps LANES accumulators per row and folds them at the end of a block. Tiles are wide:
memory is read in runs of 4 KiB, and packing narrow tiles into the cache was slower on every shape.
"""

cdef enum:
    TILE = 1024

# Rows r to r + n of one array.
cdef struct tile:
    const view* v
    const char* base       # row r at column 0
    Py_ssize_t r, n
    real* columns          # [8, TILE], what is being looked at, where that cannot be in place


# The totals of one sum for every row of a tile.
cdef struct tile_totals:
    double[TILE] sum
    double[TILE] rest


# What a thread works with.
cdef struct tile_scratch:
    real[16 * TILE] s      # [LANES, TILE]
    real[16 * TILE] q
    real[16 * TILE] p
    real[8 * TILE] x_columns
    real[8 * TILE] dy_columns
    real[TILE + 16] out_column
    real[TILE + 16] dresidual_column
    # Room for a lane group from any row.
    real[TILE + 16] hi
    real[TILE + 16] lo
    real[TILE + 16] rstd
    real[TILE + 16] weight # of the rows, where they have one each
    real[TILE + 16] bias
    real[TILE + 16] c1
    real[TILE + 16] c2
    tile_totals total_s, total_q, total_p


cdef inline Py_ssize_t rows_left(const view* v, Py_ssize_t r) noexcept nogil:
    """Rows from r on that lie next to each other."""
    return run_left(v.row_ndim, v.row_shape, r)


cdef inline Py_ssize_t to_whole_lines(const view* out, Py_ssize_t r, Py_ssize_t n, Py_ssize_t most) noexcept nogil:
    """n rows or somewhat fewer, to end on a whole cache line of out, unless there are no more than n."""
    cdef Py_ssize_t over = (<size_t>(row_start(out, r) + n * out.itemsize) % 64) // out.itemsize
    return n - over if n < most and over < n else n


cdef inline tile open_tile(const view* v, Py_ssize_t r, Py_ssize_t n, real* columns) noexcept nogil:
    cdef tile t
    t.v = v
    t.base = row_start(v, r)
    t.r = r
    t.n = n
    t.columns = columns
    return t


cdef inline const real* tile_column(const tile* t, Py_ssize_t c, int slot) noexcept nogil:
    """Column c of a tile. slot: which of the eight columns in use."""
    cdef const view* v = t.v
    cdef const char* p = t.base + offset(v.col_ndim, v.col_shape, v.col_strides, c)
    if v.type == ST_REAL and not v.swapped:
        return <const real*>p
    load_run(p, v.itemsize, v.type, v.swapped, t.n, t.columns + slot * TILE)
    return t.columns + slot * TILE


cdef inline void fold_and_add(const real* s, Py_ssize_t n, tile_totals* totals) noexcept nogil:
    """total_add() of the folded sums of every row."""
    cdef double[16] folded
    cdef Py_ssize_t i = 0, k
    cdef total t
    while i < n:
        lanes_fold_rows(s + i, TILE, folded)
        for k in range(LANES):
            t.sum = totals.sum[i + k]
            t.rest = totals.rest[i + k]
            t = total_add(t, folded[k])
            totals.sum[i + k] = t.sum
            totals.rest[i + k] = t.rest
        i += LANES


cdef inline double tile_total(const tile_totals* totals, Py_ssize_t i) noexcept nogil:
    cdef total t
    t.sum = totals.sum[i]
    t.rest = totals.rest[i]
    return total_value(t)


cdef inline lanes part_or(const real* a, Py_ssize_t i, Py_ssize_t n, lanes fill) noexcept nogil:
    """Rows i to i + LANES of a column as far as they exist; fill if the column does not."""
    return fill if a == NULL else lanes_load_part(a + i, n - i, fill)


cdef inline void tile_step(const tile* t, Py_ssize_t c, Py_ssize_t n_cols, const real* hi, bint centered, bint first,
                           real* s, real* q) noexcept nogil:
    """Add the columns c, c + LANES, ... of a step, one lane, as far as they exist. first: of a block."""
    cdef in_real[8] columns
    cdef lanes h, sum_d, sum_dd
    cdef lanes[8] x
    cdef Py_ssize_t i = 0
    cdef int k
    for k in range(8):
        columns[k] = tile_column(t, c + k * LANES, k) if c + k * LANES < n_cols else NULL
    while i < t.n:
        h = lanes_load(hi + i)
        for k in range(8):
            x[k] = part_or(columns[k], i, t.n, h)
            if centered:
                x[k] = lanes_sub(x[k], h)
        if centered:
            sum_d = lanes_add(sum4(x[0], x[1], x[2], x[3]), sum4(x[4], x[5], x[6], x[7]))
            lanes_store(s + i, sum_d if first else lanes_add(lanes_load(s + i), sum_d))
        sum_dd = lanes_add(sum4(square(x[0]), square(x[1]), square(x[2]), square(x[3])),
                           sum4(square(x[4]), square(x[5]), square(x[6]), square(x[7])))
        lanes_store(q + i, sum_dd if first else lanes_add(lanes_load(q + i), sum_dd))
        i += LANES


cdef void tile_first_mean(const tile* t, Py_ssize_t n_cols, tile_scratch* w) noexcept nogil:
    """first_mean() of every row. d is x itself when hi is zero."""
    cdef Py_ssize_t i
    cdef Py_ssize_t count = min(n_cols, <Py_ssize_t>STEP)
    cdef int l
    memset(w.hi, 0, sizeof(w.hi))
    memset(w.s, 0, sizeof(w.s))
    for l in range(<int>min(n_cols, <Py_ssize_t>LANES)):
        tile_step(t, l, min(n_cols, <Py_ssize_t>STEP), w.hi, True, True, w.s + l * TILE, w.q + l * TILE)
    memset(&w.total_s, 0, sizeof(tile_totals))
    fold_and_add(w.s, t.n, &w.total_s)
    for i in range(t.n):
        w.hi[i] = <real>(w.total_s.sum[i] / count)


cdef void tile_sums(const tile* t, Py_ssize_t n_cols, bint centered, tile_scratch* w) noexcept nogil:
    """OUT w.total_s, w.total_q."""
    cdef Py_ssize_t block = 0, step, c
    cdef int l
    memset(&w.total_s, 0, sizeof(tile_totals))
    memset(&w.total_q, 0, sizeof(tile_totals))
    while block < n_cols:
        if n_cols - block < LANES:
            memset(w.s, 0, sizeof(w.s))
            memset(w.q, 0, sizeof(w.q))
        step = block
        while step < min(block + BLOCK, n_cols):
            for l in range(<int>min(n_cols - step, <Py_ssize_t>LANES)):
                # The flag as a literal: two bodies, each without the branch.
                if centered:
                    tile_step(t, step + l, n_cols, w.hi, True, step == block, w.s + l * TILE, w.q + l * TILE)
                else:
                    tile_step(t, step + l, n_cols, w.hi, False, step == block, w.s + l * TILE, w.q + l * TILE)
            step += STEP
        if centered:
            fold_and_add(w.s, t.n, &w.total_s)
        fold_and_add(w.q, t.n, &w.total_q)
        block += BLOCK


cdef int tile_settle(const job* j, const tile* t, bint last, tile_scratch* w) noexcept nogil:
    """settle() of every row; the worst verdict."""
    cdef Py_ssize_t i
    cdef double mean = 0, variance = 0, rstd = 0
    cdef int verdict, worst = SETTLED
    for i in range(t.n):
        verdict = settle(tile_total(&w.total_s, i), tile_total(&w.total_q, i), j.n_cols, j.eps,
                         j.centered, last, &w.hi[i], &w.lo[i], &mean, &variance, &rstd)
        worst = max(worst, verdict)
        w.rstd[i] = <real>rstd
        if verdict == SETTLED:
            save_statistics(j, t.r + i, mean, variance, rstd)
    return worst


cdef inline lanes tile_y(const real* x, Py_ssize_t i, Py_ssize_t n, const tile_scratch* w, lanes weight, lanes bias,
                         bint weighted, bint biased, bint centered, bint by_row) noexcept nogil:
    """y of n rows from i on at one column, at most LANES."""
    cdef lanes t = x_hat(lanes_load_part(x + i, n, weight), lanes_load(w.hi + i), lanes_load(w.lo + i),
                         lanes_load(w.rstd + i), centered)
    if weighted:
        t = lanes_mul(t, lanes_load(w.weight + i) if by_row else weight)
    if biased:
        t = lanes_add(t, lanes_load(w.bias + i) if by_row else bias)
    return t


cdef inline void tile_apply_column(const real* x, real* y, Py_ssize_t n, const tile_scratch* w, const real* weight,
                                   const real* bias, bint centered, bint by_row, bint stream) noexcept nogil:
    """One column of n rows. by_row: what weight and bias point to stands in w."""
    cdef bint weighted = weight != NULL, biased = bias != NULL
    cdef lanes wl = lanes_fill(weight[0]) if weighted and not by_row else lanes_fill(0)
    cdef lanes bl = lanes_fill(bias[0]) if biased and not by_row else lanes_fill(0)
    cdef Py_ssize_t i = 0
    if stream:
        # Whole cache lines only; y may start inside one.
        i = min(n, values_to_line(<char*>y, ST_REAL))
        lanes_store_part_as(<char*>y, 0, i, tile_y(x, 0, i, w, wl, bl, weighted, biased, centered, by_row), ST_REAL)
        while i + LANES <= n:
            lanes_stream(y + i, tile_y(x, i, LANES, w, wl, bl, weighted, biased, centered, by_row))
            i += LANES
    else:
        while i + LANES <= n:
            lanes_store(y + i, tile_y(x, i, LANES, w, wl, bl, weighted, biased, centered, by_row))
            i += LANES
    lanes_store_part_as(<char*>y, i, n - i, tile_y(x, i, n - i, w, wl, bl, weighted, biased, centered, by_row), ST_REAL)


cdef void tile_parameters(const job* j, const tile* x, tile_scratch* w) noexcept nogil:
    """weight and bias of the rows, where they have one each."""
    if j.by_row and j.weight != NULL:
        memcpy(w.weight, <in_real>j.weight + x.r, x.n * sizeof(real))
    if j.by_row and j.bias != NULL:
        memcpy(w.bias, <in_real>j.bias + x.r, x.n * sizeof(real))


cdef void tile_apply(const job* j, const tile* x, tile_scratch* w) noexcept nogil:
    cdef in_real weight = <in_real>j.weight
    cdef in_real bias = <in_real>j.bias
    cdef const view* v = &j.y
    cdef char* base = row_start(v, x.r)
    cdef char* p
    cdef const real* column
    cdef bint plain = v.type == ST_REAL and not v.swapped
    cdef bint stream
    cdef real* y
    cdef Py_ssize_t c
    tile_parameters(j, x, w)
    # Backwards: the sums ended at the last column, and what was read last is still in the cache.
    for c in range(j.n_cols - 1, -1, -1):
        column = tile_column(x, c, 0)
        p = base + offset(v.col_ndim, v.col_shape, v.col_strides, c)
        y = <real*>p if plain else w.out_column
        stream = j.stream and plain and <size_t>p % sizeof(real) == 0
        # The flags as literals: a body for each, without the branches.
        if j.by_row:
            tile_apply_column(column, y, x.n, w, weight, bias, True, True, stream)
        elif j.centered:
            tile_apply_column(column, y, x.n, w, at_column(weight, c), at_column(bias, c), True, False, stream)
        else:
            tile_apply_column(column, y, x.n, w, at_column(weight, c), at_column(bias, c), False, False, stream)
        if not plain:
            store_run(p, v.itemsize, v.type, v.swapped, x.n, y)


cdef void tile_add(const job* j, const tile* x, tile_scratch* w) noexcept nogil:
    """The sum, for the rows of a tile."""
    cdef tile a = open_tile(&j.addend, x.r, x.n, w.x_columns)
    cdef tile b = open_tile(&j.residual, x.r, x.n, w.dy_columns)
    cdef const view* v = &j.x
    cdef char* p
    cdef bint plain = v.type == ST_REAL and not v.swapped
    cdef Py_ssize_t c
    for c in range(j.n_cols):
        p = <char*>x.base + offset(v.col_ndim, v.col_shape, v.col_strides, c)
        add_block(<const char*>tile_column(&a, c, 0), <const char*>tile_column(&b, c, 0), p if plain else <char*>w.out_column,
                  x.n, <real>j.alpha, ST_REAL)
        if not plain:
            store_run(p, v.itemsize, v.type, v.swapped, x.n, w.out_column)


cdef void tile_forward(const job* j, const tile* x, tile_scratch* w) noexcept nogil:
    cdef int verdict
    if is_sum(j):
        tile_add(j, x, w)
    memset(w.lo, 0, sizeof(w.lo))
    memset(w.hi, 0, sizeof(w.hi))
    if j.centered:
        tile_first_mean(x, j.n_cols, w)
    tile_sums(x, j.n_cols, j.centered, w)
    verdict = tile_settle(j, x, False, w)
    if verdict == RECENTRE:
        # Rows that were settled keep their hi, so they come out the same once more.
        tile_sums(x, j.n_cols, j.centered, w)
        verdict = tile_settle(j, x, True, w)
    if verdict == SETTLED:
        tile_apply(j, x, w)
    else:
        # Rare: a row needs its own scale. Row by row then, with the same bits.
        sums_forward(j, x.r, x.r + x.n)


cdef void axis_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    """As forward(), for views whose rows are contiguous (wing: rows_adjacent)."""
    cdef tile_scratch* w = <tile_scratch*>malloc(sizeof(tile_scratch))
    cdef tile x
    cdef Py_ssize_t most
    if w == NULL:
        # Slow, but right.
        forward(j, r0, r1)
        return
    while r0 < r1:
        most = min(r1 - r0, rows_left(&j.x, r0), rows_left(&j.y, r0))
        if is_sum(j):
            most = min(most, rows_left(&j.addend, r0), rows_left(&j.residual, r0))
        x = open_tile(&j.x, r0, to_whole_lines(&j.y, r0, min(most, <Py_ssize_t>TILE), most), w.x_columns)
        tile_forward(j, &x, w)
        r0 += x.n
    if j.stream:
        stream_fence()
    free(w)


cdef void axis_evaluate(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    """As evaluate(), for views whose rows are contiguous: one row for each channel."""
    cdef tile_scratch* w = <tile_scratch*>malloc(sizeof(tile_scratch))
    cdef tile x
    cdef Py_ssize_t most
    if w == NULL:
        # Slow, but right.
        evaluate(j, r0, r1)
        return
    while r0 < r1:
        most = min(r1 - r0, rows_left(&j.x, r0), rows_left(&j.y, r0))
        x = open_tile(&j.x, r0, to_whole_lines(&j.y, r0, min(most, <Py_ssize_t>TILE), most), w.x_columns)
        memcpy(w.hi, <in_real>j.given_hi + r0, x.n * sizeof(real))
        memcpy(w.lo, <in_real>j.given_lo + r0, x.n * sizeof(real))
        memcpy(w.rstd, <in_real>j.given_rstd + r0, x.n * sizeof(real))
        tile_apply(j, &x, w)
        r0 += x.n
    if j.stream:
        stream_fence()
    free(w)
