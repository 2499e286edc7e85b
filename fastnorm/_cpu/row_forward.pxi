"""Forward over rows, with d = x - hi, hi a first guess of the mean, lo = mean(d):

    y = ((x - hi) - lo) * rstd * weight + bias,  rstd = 1 / sqrt(mean(d*d) - lo*lo + eps)

rms_norm (centered is false): hi = lo = 0. Two sweeps over a row: the sums, then y. All forms of a
row's memory (in place, strided, 16-bit, byte-swapped, scaled) come through load_block, so there is
one numeric body.

The residual forms store the sum x first, row by row, and then normalize what is stored, while it is
in the cache. Channels (batch_norm) are rows whose weight and bias are one number each.
"""

cdef inline lanes sum4(lanes a, lanes b, lanes c, lanes d) noexcept nogil:
    return lanes_add(lanes_add(a, b), lanes_add(c, d))


cdef inline lanes square(lanes a) noexcept nogil:
    return lanes_mul(a, a)


# A sum of real values that is added up while the sums of its norm are taken: x = a + alpha * b.
cdef struct addition:
    const char* a
    const char* b
    char* x
    real alpha
    Py_ssize_t begin       # the column from which it is not yet there


cdef inline lanes sum_lanes(const char* a, const char* b, Py_ssize_t i, Py_ssize_t n, lanes factor, int type) noexcept nogil:
    """a + alpha * b of n columns from i on, at most a lane group."""
    cdef lanes zero = lanes_fill(0)
    return lanes_add(lanes_load_part_as(a, i, n, zero, type), lanes_mul(factor, lanes_load_part_as(b, i, n, zero, type)))


cdef inline void add_block(const char* a, const char* b, char* x, Py_ssize_t n, real alpha, int type) noexcept nogil:
    """x[:n] = a + alpha * b."""
    cdef lanes factor = lanes_fill(alpha)
    cdef Py_ssize_t i = 0
    while i + LANES <= n:
        lanes_store_as(x, i, sum_lanes(a, b, i, LANES, factor, type), type)
        i += LANES
    if i < n:
        lanes_store_part_as(x, i, n - i, sum_lanes(a, b, i, n - i, factor, type), type)


cdef void add_ahead(const addition* sum, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    """Columns c0 to c1 before the sums are taken."""
    cdef Py_ssize_t start = c0 * sizeof(real)
    add_block(sum.a + start, sum.b + start, sum.x + start, c1 - c0, sum.alpha, ST_REAL)


cdef inline lanes added_lanes(const addition* sum, Py_ssize_t c, lanes factor) noexcept nogil:
    """The lane group of column c, which is added up, stored, and needed at once."""
    cdef lanes t = sum_lanes(sum.a, sum.b, c, LANES, factor, ST_REAL)
    lanes_store_as(sum.x, c, t, ST_REAL)
    return t


cdef inline void half_step_sums(lanes a, lanes b, lanes c, lanes d, lanes hi, bint centered, lanes* sum_d, lanes* sum_dd) noexcept nogil:
    """The sums of d and d*d of four lane groups."""
    if centered:
        a = lanes_sub(a, hi)
        b = lanes_sub(b, hi)
        c = lanes_sub(c, hi)
        d = lanes_sub(d, hi)
        sum_d[0] = sum4(a, b, c, d)
    sum_dd[0] = sum4(square(a), square(b), square(c), square(d))


cdef inline void half_step(const char* x, Py_ssize_t i, Py_ssize_t n, lanes hi, bint centered, int type,
                           lanes* sum_d, lanes* sum_dd) noexcept nogil:
    """The same from column i on, of which n exist: the rest is hi, so that its d is zero."""
    half_step_sums(lanes_load_part_as(x, i, n, hi, type), lanes_load_part_as(x, i + LANES, n - LANES, hi, type),
                   lanes_load_part_as(x, i + 2 * LANES, n - 2 * LANES, hi, type),
                   lanes_load_part_as(x, i + 3 * LANES, n - 3 * LANES, hi, type), hi, centered, sum_d, sum_dd)


cdef inline void added_half_step(const addition* sum, Py_ssize_t c, lanes factor, lanes hi, bint centered,
                                 lanes* sum_d, lanes* sum_dd) noexcept nogil:
    """The same from column c of a sum on, which is added up for it."""
    half_step_sums(added_lanes(sum, c, factor), added_lanes(sum, c + LANES, factor), added_lanes(sum, c + 2 * LANES, factor),
                   added_lanes(sum, c + 3 * LANES, factor), hi, centered, sum_d, sum_dd)


cdef inline real first_mean(const char* x, Py_ssize_t n_cols, int type) noexcept nogil:
    """hi: the mean of the first step. Near the mean for most rows; settle() notices when not."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes a, b, unused
    # About zero, d is x itself.
    half_step(x, 0, n_cols, zero, True, type, &a, &unused)
    half_step(x, HALF_STEP, n_cols - HALF_STEP, zero, True, type, &b, &unused)
    return <real>(lanes_fold(lanes_add(a, b)) / min(n_cols, <Py_ssize_t>STEP))


cdef void last_step(const char* x, Py_ssize_t i, Py_ssize_t n, const lanes* h, bint centered, int type,
                    lanes* s, lanes* q) noexcept nogil:
    """Less than a step. Flags at run time, to have it once."""
    cdef lanes s0, s1, q0, q1
    half_step(x, i, n - i, h[0], centered, type, &s0, &q0)
    half_step(x, i + HALF_STEP, n - i - HALF_STEP, h[0], centered, type, &s1, &q1)
    if centered:
        s[0] = lanes_add(s[0], lanes_add(s0, s1))
    q[0] = lanes_add(q[0], lanes_add(q0, q1))


cdef inline void added_sums(const char* x, Py_ssize_t n_steps, lanes h, bint centered, int type, const addition* sum,
                            Py_ssize_t c0, lanes* s, lanes* q) noexcept nogil:
    """lanes_sums() of what starts at column c0 of a sum that is added up meanwhile."""
    cdef lanes factor = lanes_fill(sum.alpha)
    cdef lanes s0 = h, s1 = h, q0, q1
    cdef Py_ssize_t i = 0
    while i < n_steps * STEP:
        if c0 + i >= sum.begin:
            added_half_step(sum, c0 + i, factor, h, centered, &s0, &q0)
            added_half_step(sum, c0 + i + HALF_STEP, factor, h, centered, &s1, &q1)
        else:
            half_step(x, i, HALF_STEP, h, centered, type, &s0, &q0)
            half_step(x, i + HALF_STEP, HALF_STEP, h, centered, type, &s1, &q1)
        if centered:
            s[0] = lanes_add(s[0], lanes_add(s0, s1))
        q[0] = lanes_add(q[0], lanes_add(q0, q1))
        i += STEP


cdef inline void block_sums(const char* x, Py_ssize_t n, real hi, bint centered, int type, bint adds, const addition* sum,
                            Py_ssize_t c0, double* sum_d, double* sum_dd) noexcept nogil:
    """OUT sum_d, sum_dd: the folded sums of d and d*d over one block. adds: it starts at column c0 of a sum that is added up
    meanwhile, since arithmetic and waiting for memory overlap then."""
    cdef lanes h = lanes_fill(hi)
    cdef lanes s = lanes_fill(0)
    cdef lanes q = s
    cdef Py_ssize_t i = n // STEP * STEP
    if adds:
        added_sums(x, n // STEP, h, centered, type, sum, c0, &s, &q)
    else:
        lanes_sums(x, n // STEP, h, centered, type, &s, &q)
    if i < n:
        if adds and c0 + i >= sum.begin:
            add_ahead(sum, c0 + i, c0 + n)
        last_step(x, i, n, &h, centered, type, &s, &q)
    if centered:
        sum_d[0] = lanes_fold(s)
    sum_dd[0] = lanes_fold(q)


cdef inline int settle(double s, double q, Py_ssize_t n_cols, double eps, bint centered, bint last,
                       real* hi, real* lo, double* mean, double* variance, double* rstd) noexcept nogil:
    """From the sums to the statistics. RECENTRE: hi lies far from the mean and was moved, sum once
    more (unless last). RESCUE: squares left the range of real."""
    cdef double shift = 0, square_mean = q / n_cols, scale
    if centered:
        shift = s / n_cols
        if not last and shift * shift > 0.25 * square_mean and isfinite(square_mean):
            hi[0] = <real>(hi[0] + shift)
            return RECENTRE
    variance[0] = square_mean - shift * shift
    if variance[0] < 0:
        variance[0] = 0
    scale = variance[0] + eps
    lo[0] = <real>shift
    mean[0] = hi[0] + shift
    rstd[0] = reciprocal_root(scale)
    if not (TINY_SQUARE <= scale < INFINITY):
        return RESCUE
    return SETTLED


cdef inline void row_sums(const source* src, Py_ssize_t n_cols, real hi, bint centered, bint again, int type,
                          bint adds, const addition* sum, double* s, double* q) noexcept nogil:
    cdef double a = 0, b = 0
    cdef total ts, tq
    cdef Py_ssize_t c0 = 0, n
    while True:
        n = min(<Py_ssize_t>BLOCK, n_cols - c0)
        block_sums(load_block(src, c0, n, again, type), n, hi, centered, type, adds, sum, c0, &a, &b)
        if c0 == 0:
            ts.sum = a
            tq.sum = b
            ts.rest = tq.rest = 0
        else:
            ts = total_add(ts, a)
            tq = total_add(tq, b)
        c0 += BLOCK
        if c0 >= n_cols:
            break
    s[0] = total_value(ts)
    q[0] = total_value(tq)


cdef int sum_again_and_settle(const source* src, Py_ssize_t n_cols, double eps, bint centered, int type,
                              real* hi, real* lo, double* mean, double* variance, double* rstd) noexcept nogil:
    """About a hi that was moved. Flags at run time: it is rare."""
    cdef double s = 0, q = 0
    row_sums(src, n_cols, hi[0], centered, True, type, False, NULL, &s, &q)
    return settle(s, q, n_cols, eps, centered, True, hi, lo, mean, variance, rstd)


cdef inline int sum_and_settle(const source* src, Py_ssize_t n_cols, double eps, bint centered, bint again, int type,
                               bint adds, const addition* sum, real* hi, real* lo, double* mean, double* variance, double* rstd) noexcept nogil:
    cdef double s = 0, q = 0
    cdef int verdict
    row_sums(src, n_cols, hi[0], centered, again, type, adds, sum, &s, &q)
    verdict = settle(s, q, n_cols, eps, centered, False, hi, lo, mean, variance, rstd)
    if verdict == RECENTRE:
        verdict = sum_again_and_settle(src, n_cols, eps, centered, type, hi, lo, mean, variance, rstd)
    return verdict


cdef inline lanes x_hat(lanes x, lanes hi, lanes lo, lanes rstd, bint centered) noexcept nogil:
    if centered:
        x = lanes_sub(lanes_sub(x, hi), lo)
    return lanes_mul(x, rstd)


cdef inline lanes y_lanes(const char* x, Py_ssize_t i, Py_ssize_t n, lanes hi, lanes lo, lanes rstd, const real* w,
                          const real* b, lanes row_w, lanes row_b, bint centered, bint by_row, int type) noexcept nogil:
    """((x - hi) - lo) * rstd * w + b of n columns from i on, at most a lane group. by_row: w and b only say whether there
    are any; they are row_w and row_b."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes t = x_hat(lanes_load_part_as(x, i, n, zero, type), hi, lo, rstd, centered)
    if w != NULL:
        t = lanes_mul(t, row_w if by_row else lanes_load_part(w + i, n, zero))
    if b != NULL:
        t = lanes_add(t, row_b if by_row else lanes_load_part(b + i, n, zero))
    return t


# What the second sweep needs to know of a row.
cdef struct forward_row:
    source src
    char* y
    # The row to fetch meanwhile, or NULL; of a sum, both rows that it adds.
    const char* x_ahead
    const char* residual_ahead
    real hi, lo, rstd
    bint done              # needed a scale of its own, and was finished with it


cdef inline void fetch(const char* x, const char* residual, Py_ssize_t bytes) noexcept nogil:
    if x != NULL:
        prefetch(x + bytes)
    if residual != NULL:
        prefetch(residual + bytes)


cdef inline void apply_block(const char* x, char* y, Py_ssize_t n, const forward_row* row, const real* w, const real* b,
                             bint centered, bint by_row, bint stream, int type, const char* x_ahead,
                             const char* residual_ahead, Py_ssize_t ahead_size) noexcept nogil:
    """y over n columns. x_ahead, residual_ahead: what a later row will read, ahead_size bytes a column, fetched while
    this one is written, since stores past the cache leave the memory bus idle otherwise."""
    cdef lanes h = lanes_fill(row.hi), l = lanes_fill(row.lo), r = lanes_fill(row.rstd), wl = r, bl = r
    cdef Py_ssize_t i = 0, head, part
    if by_row and w != NULL:
        wl = lanes_fill(w[0])
    if by_row and b != NULL:
        bl = lanes_fill(b[0])
    if stream:
        # Whole cache lines only; y may start inside one.
        head = min(n, values_to_line(y, type))
        while i < head:
            part = min(head - i, <Py_ssize_t>LANES)
            lanes_store_part_as(y, i, part, y_lanes(x, i, part, h, l, r, w, b, wl, bl, centered, by_row, type), type)
            i += part
        while i + LANES <= n:
            fetch(x_ahead, residual_ahead, i * ahead_size)
            lanes_stream_as(y, i, y_lanes(x, i, LANES, h, l, r, w, b, wl, bl, centered, by_row, type), type)
            i += LANES
    else:
        while i + LANES <= n:
            lanes_store_as(y, i, y_lanes(x, i, LANES, h, l, r, w, b, wl, bl, centered, by_row, type), type)
            i += LANES
    if i < n:
        lanes_store_part_as(y, i, n - i, y_lanes(x, i, n - i, h, l, r, w, b, wl, bl, centered, by_row, type), type)


cdef inline bint is_sum(const job* j) noexcept nogil:
    """Whether x is to be made of addend and residual."""
    return j.residual.data != NULL


cdef inline int type_of_sum(const job* j) noexcept nogil:
    """The storage type of addend, residual and x if they share one and can be read in place; else -1."""
    if is_sum(j) and in_place(&j.addend, j.residual.type) and in_place(&j.residual, j.x.type) and j.x.direct and has_lanes(j.x.type):
        return j.x.type
    return -1


cdef inline void open_forward_row(const job* j, Py_ssize_t r, Py_ssize_t distance, real* x_buffer, bint resident,
                                  forward_row* row) noexcept nogil:
    cdef Py_ssize_t later = min(r + distance, j.n_rows - 1)
    row.src = open_row(&j.x, r, x_buffer, resident)
    row.y = row_start(&j.y, r)
    row.done = False
    row.x_ahead = row.residual_ahead = NULL
    if j.stream and is_sum(j):
        if type_of_sum(j) >= 0:
            row.x_ahead = row_start(&j.addend, later)
            row.residual_ahead = row_start(&j.residual, later)
    elif j.stream and j.x.col_strides[j.x.col_ndim - 1] == j.x.itemsize:
        row.x_ahead = row_start(&j.x, later)


cdef inline void save_statistics(const job* j, Py_ssize_t r, double mean, double variance, double rstd) noexcept nogil:
    if j.mean != NULL:
        (<real*>j.mean)[r] = <real>mean
    if j.rstd != NULL:
        (<real*>j.rstd)[r] = <real>rstd
    if j.moments != NULL:
        j.moments[r] = mean
        j.moments[j.n_rows + r] = variance


cdef inline const real* at_column(const void* row, Py_ssize_t c) noexcept nogil:
    return <in_real>row + c if row != NULL else NULL


cdef inline void row_apply(const job* j, const forward_row* row, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t n, bint centered,
                           bint by_row, int type, real* y_buffer) noexcept nogil:
    """n columns from c0 on, at most a block, of row r of y."""
    cdef Py_ssize_t first = r % j.n_channels if by_row else c0
    cdef const char* x = load_block(&row.src, c0, n, True, type)
    cdef bint y_in_place = type != ST_REAL or block_in_place(&j.y, c0, n)
    cdef bint stream
    cdef const char* x_ahead = NULL
    cdef const char* residual_ahead = NULL
    cdef char* y = <char*>y_buffer
    if y_in_place:
        y = row.y + offset(j.y.col_ndim, j.y.col_shape, j.y.col_strides, c0)
    stream = j.stream and y_in_place and <size_t>y % SIZE_OF(type) == 0
    if row.x_ahead != NULL:
        x_ahead = row.x_ahead + offset(j.x.col_ndim, j.x.col_shape, j.x.col_strides, c0)
    if row.residual_ahead != NULL:
        residual_ahead = row.residual_ahead + c0 * j.residual.itemsize
    apply_block(x, y, n, row, at_column(j.weight, first), at_column(j.bias, first), centered, by_row, stream, type, x_ahead,
                residual_ahead, j.x.itemsize)
    if not y_in_place:
        store_columns(&j.y, row.y, c0, n, y_buffer, j.stream)


cdef inline Py_ssize_t forward_span(const job* j, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    """Columns from c0 on for one step of the second sweep: a block, or what lies next to each other in x and y."""
    cdef Py_ssize_t n = min(<Py_ssize_t>BLOCK, c1 - c0)
    if j.x.col_ndim == 1 and j.y.col_ndim == 1:
        return n
    return within_run(&j.y, c0, within_run(&j.x, c0, n))


cdef inline void rows_apply(const job* j, const forward_row* rows, Py_ssize_t r, int n_rows, Py_ssize_t c0, Py_ssize_t c1,
                            bint centered, bint by_row, int type, real* y_buffer) noexcept nogil:
    cdef Py_ssize_t n
    cdef int k
    while c0 < c1:
        n = forward_span(j, c0, c1)
        for k in range(n_rows):
            if not rows[k].done:
                row_apply(j, &rows[k], r + k, c0, n, centered, by_row, type, y_buffer)
        c0 += n


cdef void apply_rows(const job* j, const forward_row* rows, Py_ssize_t r, int n_rows, Py_ssize_t c0, Py_ssize_t c1, int type,
                     real* y_buffer) noexcept nogil:
    """The second sweep: columns c0 (the start of a block) to c1 of rows r to r + n_rows of y."""
    # Flags as literals: a body for each, without the branches.
    if FLOAT16_LANES and type == ST_FLOAT16:
        if j.by_row:
            rows_apply(j, rows, r, n_rows, c0, c1, True, True, ST_FLOAT16, y_buffer)
        elif j.centered:
            rows_apply(j, rows, r, n_rows, c0, c1, True, False, ST_FLOAT16, y_buffer)
        else:
            rows_apply(j, rows, r, n_rows, c0, c1, False, False, ST_FLOAT16, y_buffer)
    elif BFLOAT16_LANES and type == ST_BFLOAT16:
        if j.by_row:
            rows_apply(j, rows, r, n_rows, c0, c1, True, True, ST_BFLOAT16, y_buffer)
        elif j.centered:
            rows_apply(j, rows, r, n_rows, c0, c1, True, False, ST_BFLOAT16, y_buffer)
        else:
            rows_apply(j, rows, r, n_rows, c0, c1, False, False, ST_BFLOAT16, y_buffer)
    elif j.by_row:
        rows_apply(j, rows, r, n_rows, c0, c1, True, True, ST_REAL, y_buffer)
    elif j.centered:
        rows_apply(j, rows, r, n_rows, c0, c1, True, False, ST_REAL, y_buffer)
    else:
        rows_apply(j, rows, r, n_rows, c0, c1, False, False, ST_REAL, y_buffer)


# ---------------------------------------------------------------------------------------------
# x = addend + alpha * residual, for the residual forms: in the cache when the norm of it begins
# ---------------------------------------------------------------------------------------------

cdef inline void add_past_the_cache(const char* a, const char* b, char* x, Py_ssize_t n, real alpha, real* keep) noexcept nogil:
    """The same, past the cache, with a copy in keep for the norm that comes next: n values and room for a lane group."""
    cdef lanes factor = lanes_fill(alpha), t
    # Whole cache lines only; x may start inside one.
    cdef Py_ssize_t i = 0, head = min(n, values_to_line(x, ST_REAL)), part
    while i < head:
        part = min(head - i, <Py_ssize_t>LANES)
        t = sum_lanes(a, b, i, part, factor, ST_REAL)
        lanes_store(keep + i, t)
        lanes_store_part_as(x, i, part, t, ST_REAL)
        i += part
    while i + LANES <= n:
        t = sum_lanes(a, b, i, LANES, factor, ST_REAL)
        lanes_store(keep + i, t)
        lanes_stream_as(x, i, t, ST_REAL)
        i += LANES
    if i < n:
        t = sum_lanes(a, b, i, n - i, factor, ST_REAL)
        lanes_store(keep + i, t)
        lanes_store_part_as(x, i, n - i, t, ST_REAL)


cdef void add_columns(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    """Columns c0 to c1 of row r of the sum, whatever the arrays are like."""
    cdef block a_buffer, b_buffer
    cdef const char* a = row_start(&j.addend, r)
    cdef const char* b = row_start(&j.residual, r)
    cdef char* x = row_start(&j.x, r)
    cdef Py_ssize_t n
    while c0 < c1:
        n = min(<Py_ssize_t>BLOCK, c1 - c0)
        load_columns(&j.addend, a, c0, n, a_buffer.v)
        load_columns(&j.residual, b, c0, n, b_buffer.v)
        add_block(<char*>a_buffer.v, <char*>b_buffer.v, <char*>a_buffer.v, n, <real>j.alpha, ST_REAL)
        store_columns(&j.x, x, c0, n, a_buffer.v, False)
        c0 += BLOCK


cdef inline bint keeps_sum(const job* j) noexcept nogil:
    """Whether the sum goes past the cache, and a copy of the row stays in a buffer."""
    return (j.stream and type_of_sum(j) == ST_REAL and j.n_cols <= RESIDENT * BLOCK
            and (<size_t>j.x.data | <size_t>j.x.row_strides[0]) % sizeof(real) == 0 and j.x.row_ndim == 1)


cdef void add_part(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1, real* keep) noexcept nogil:
    """Columns c0 to c1 of row r of the sum. keep: where a copy stays, if it goes past the cache, or NULL."""
    cdef int type = type_of_sum(j)
    cdef Py_ssize_t start = c0 * j.x.itemsize, n = c1 - c0
    cdef const char* a = row_start(&j.addend, r) + start
    cdef const char* b = row_start(&j.residual, r) + start
    cdef char* x = row_start(&j.x, r) + start
    # Flags as literals: a body for each, without the branches.
    if keep != NULL:
        add_past_the_cache(a, b, x, n, <real>j.alpha, keep)
    elif type == ST_REAL:
        add_block(a, b, x, n, <real>j.alpha, ST_REAL)
    elif FLOAT16_LANES and type == ST_FLOAT16:
        add_block(a, b, x, n, <real>j.alpha, ST_FLOAT16)
    elif BFLOAT16_LANES and type == ST_BFLOAT16:
        add_block(a, b, x, n, <real>j.alpha, ST_BFLOAT16)
    else:
        add_columns(j, r, c0, c1)


cdef void rescue(const job* j, Py_ssize_t r) noexcept nogil:
    """A row whose squares overflow, or underflow where eps does not hide it: the row times a power of
    two, with eps times its square. Rare, so all in one place and through buffers."""
    cdef block x_buffer, y_buffer
    cdef forward_row row
    cdef double largest = sqrt(j.eps), naive_sum = 0, eps = j.eps, mean = 0, variance = 0, rstd = 0
    cdef Py_ssize_t c0, n, k
    cdef bint finite = True
    cdef in_real x
    cdef int exponent = 0
    open_forward_row(j, r, 0, x_buffer.v, False, &row)
    c0 = 0
    while c0 < j.n_cols:
        n = min(<Py_ssize_t>BLOCK, j.n_cols - c0)
        x = <in_real>load_block(&row.src, c0, n, False, ST_REAL)
        for k in range(n):
            naive_sum += x[k]
            largest = max(largest, fabs(<double>x[k]))
            finite = finite and isfinite(<double>x[k])
        c0 += BLOCK
    # Inf and NaN stay in their row, as IEEE arithmetic has it, without a scale.
    if finite:
        if largest > 0:
            frexp(largest, &exponent)
        row.src.scaled = True
        row.src.scale1 = ldexp(1.0, -exponent // 2)
        row.src.scale2 = ldexp(1.0, -exponent - -exponent // 2)
        eps = eps * row.src.scale1 * row.src.scale1 * row.src.scale2 * row.src.scale2
    row.hi = row.lo = 0
    if j.centered:
        row.hi = first_mean(load_block(&row.src, 0, min(<Py_ssize_t>BLOCK, j.n_cols), False, ST_REAL), j.n_cols, ST_REAL)
    sum_and_settle(&row.src, j.n_cols, eps, j.centered, False, ST_REAL, False, NULL, &row.hi, &row.lo, &mean, &variance, &rstd)
    # A constant row whose eps is zero, or is with the scale: x_hat is zero, not 0 * inf.
    row.rstd = <real>rstd if not finite or isfinite(<double><real>rstd) else 0
    apply_rows(j, &row, r, 1, 0, j.n_cols, ST_REAL, y_buffer.v)
    if finite:
        mean = mean / row.src.scale1 / row.src.scale2
        variance = variance / row.src.scale1 / row.src.scale2 / row.src.scale1 / row.src.scale2
        rstd = rstd * row.src.scale1 * row.src.scale2
    elif j.centered:
        mean = naive_sum
    save_statistics(j, r, mean, variance, rstd)


cdef inline void row_sweep(const job* j, Py_ssize_t r, forward_row* row, bint adds, addition* sum, bint centered,
                           int type) noexcept nogil:
    """The first sweep: the statistics of a row. adds: of a sum that is to be added up for it."""
    cdef double mean = 0, variance = 0, rstd = 0
    cdef const char* x = load_block(&row.src, 0, min(<Py_ssize_t>BLOCK, j.n_cols), False, type)
    if adds and centered:
        # What hi is made of.
        sum.begin = min(<Py_ssize_t>STEP, j.n_cols)
        add_ahead(sum, 0, sum.begin)
    row.hi = first_mean(x, j.n_cols, type) if centered else 0
    row.lo = 0
    # A row of one block stands in the buffer already.
    if sum_and_settle(&row.src, j.n_cols, j.eps, centered, row.src.resident and j.n_cols <= BLOCK, type, adds, sum,
                      &row.hi, &row.lo, &mean, &variance, &rstd) == SETTLED:
        row.rstd = <real>rstd
        save_statistics(j, r, mean, variance, rstd)
    else:
        rescue(j, r)
        row.done = True


cdef inline void group_forward(const job* j, Py_ssize_t r, int n_rows, bint adds, bint centered, int type, bint resident, bint keeps,
                               real* x_buffer, real* y_buffer) noexcept nogil:
    """Rows side by side: none waits for the square root of another."""
    cdef forward_row[GROUP] rows
    cdef addition sum
    cdef int k
    for k in range(n_rows):
        open_forward_row(j, r + k, n_rows, x_buffer, resident, &rows[k])
        if adds:
            sum.a = row_start(&j.addend, r + k)
            sum.b = row_start(&j.residual, r + k)
            sum.x = row_start(&j.x, r + k)
            sum.alpha = <real>j.alpha
            sum.begin = 0
        elif is_sum(j):
            add_part(j, r + k, 0, j.n_cols, x_buffer if keeps else NULL)
            rows[k].src.loaded = keeps
        row_sweep(j, r + k, &rows[k], adds, &sum, centered, type)
    apply_rows(j, rows, r, n_rows, 0, j.n_cols, type, y_buffer)


cdef inline void rows_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1, bint adds, bint centered, int type) noexcept nogil:
    """adds: all rows are sums that are added up in step with their norm."""
    # A block more: what is kept of a sum is stored in whole lane groups.
    cdef block[RESIDENT + 1] x_buffer
    cdef block y_buffer
    cdef bint contiguous = is_contiguous(&j.x)
    cdef bint keeps = not adds and is_sum(j) and type == ST_REAL and keeps_sum(j)
    # Strided rows are loaded once and kept; contiguous ones are cheap to load again from the cache.
    cdef bint resident = keeps or j.n_cols <= BLOCK or (not contiguous and j.n_cols <= RESIDENT * BLOCK)
    # Longer rows keep the processor busy alone, and reads and writes of memory overlap better row by row.
    cdef int group = GROUP if in_place(&j.x, type) and not keeps and j.n_cols * j.x.itemsize <= SHORT_BYTES else 1
    while r0 < r1:
        group_forward(j, r0, min(<Py_ssize_t>group, r1 - r0), adds, centered, type, resident, keeps, x_buffer[0].v, y_buffer.v)
        r0 += group


cdef void transposed_rows_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1, real* x_buffer) noexcept nogil:
    """As rows_forward(), where rows of x lie next to each other and those of y do not: LANES rows are
    loaded together, into x_buffer[LANES, apart_in_cache(n_cols)]."""
    cdef block y_buffer
    cdef forward_row row
    cdef Py_ssize_t n
    cdef int k
    while r0 < r1:
        n = min(<Py_ssize_t>LANES, r1 - r0, run_left(j.x.row_ndim, j.x.row_shape, r0))
        if is_sum(j):
            for k in range(n):
                add_part(j, r0 + k, 0, j.n_cols, NULL)
        load_rows(&j.x, r0, n, j.n_cols, x_buffer)
        for k in range(n):
            open_forward_row(j, r0 + k, 1, x_buffer + k * apart_in_cache(j.n_cols), True, &row)
            row.src.loaded = True
            row_sweep(j, r0 + k, &row, False, NULL, j.centered, ST_REAL)
            apply_rows(j, &row, r0 + k, 1, 0, j.n_cols, ST_REAL, y_buffer.v)
        r0 += n


cdef void forward(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    cdef int type = type_in_place(&j.x, &j.y, &j.y)
    cdef real* rows = NULL
    if not is_contiguous(&j.x) and j.x.row_strides[j.x.row_ndim - 1] == j.x.itemsize and r1 - r0 >= LANES:
        if LANES * j.n_cols * sizeof(real) <= TRANSPOSED_BYTES:
            rows = <real*>malloc(LANES * apart_in_cache(j.n_cols) * sizeof(real))
    # Flags as literals: a body for each, without the branches.
    if rows != NULL:
        transposed_rows_forward(j, r0, r1, rows)
        free(rows)
    elif FLOAT16_LANES and type == ST_FLOAT16:
        if j.centered:
            rows_forward(j, r0, r1, False, True, ST_FLOAT16)
        else:
            rows_forward(j, r0, r1, False, False, ST_FLOAT16)
    elif BFLOAT16_LANES and type == ST_BFLOAT16:
        if j.centered:
            rows_forward(j, r0, r1, False, True, ST_BFLOAT16)
        else:
            rows_forward(j, r0, r1, False, False, ST_BFLOAT16)
    elif type_of_sum(j) == ST_REAL and not keeps_sum(j):
        if j.centered:
            rows_forward(j, r0, r1, True, True, ST_REAL)
        else:
            rows_forward(j, r0, r1, True, False, ST_REAL)
    elif j.centered:
        rows_forward(j, r0, r1, False, True, ST_REAL)
    else:
        rows_forward(j, r0, r1, False, False, ST_REAL)
    if j.stream:
        stream_fence()


cdef void sums_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    """forward() of rows whose sum is stored: adding it up once more would be wrong where it lies in place of a summand."""
    cdef job stored = j[0]
    stored.residual.data = NULL
    forward(&stored, r0, r1)


cdef void evaluate(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    """Rows with the statistics of their channel: the second sweep alone."""
    cdef block x_buffer, y_buffer
    cdef forward_row row
    cdef int type = type_in_place(&j.x, &j.y, &j.y)
    # Far enough ahead for memory to answer in time, whatever the length of a row.
    cdef Py_ssize_t distance = 1 + 4096 // (j.n_cols * j.x.itemsize), r, channel
    for r in range(r0, r1):
        open_forward_row(j, r, distance, x_buffer.v, False, &row)
        channel = r % j.n_channels
        row.hi = (<in_real>j.given_hi)[channel]
        row.lo = (<in_real>j.given_lo)[channel]
        row.rstd = (<in_real>j.given_rstd)[channel]
        apply_rows(j, &row, r, 1, 0, j.n_cols, type, y_buffer.v)
    if j.stream:
        stream_fence()


# One long row in pieces: the same blocks, the same order of adding them up.

cdef void piece_add(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    add_part(j, r, c0, c1, NULL)


cdef double piece_first_mean(const job* j, Py_ssize_t r) noexcept nogil:
    cdef block buffer
    cdef source src = open_row(&j.x, r, buffer.v, False)
    if not j.centered:
        return 0
    return first_mean(load_block(&src, 0, min(<Py_ssize_t>BLOCK, j.n_cols), False, ST_REAL), j.n_cols, ST_REAL)


cdef void piece_sums(const job* j, Py_ssize_t r, Py_ssize_t block0, Py_ssize_t block1, double hi, double* sums) noexcept nogil:
    """OUT sums[2 * block], sums[2 * block + 1]: of d and of d*d."""
    cdef block buffer
    cdef source src = open_row(&j.x, r, buffer.v, False)
    cdef Py_ssize_t k, c0, n
    cdef double a, b
    for k in range(block0, block1):
        c0 = k * BLOCK
        n = min(<Py_ssize_t>BLOCK, j.n_cols - c0)
        a = 0
        block_sums(load_block(&src, c0, n, False, ST_REAL), n, <real>hi, j.centered, ST_REAL, False, NULL, c0, &a, &b)
        sums[2 * k] = a
        sums[2 * k + 1] = b


cdef int piece_settle(const job* j, Py_ssize_t r, const double* sums, bint last, row_statistics* st) noexcept nogil:
    cdef total s, q
    cdef real hi = <real>st.hi, lo = 0
    cdef double mean = 0, variance = 0, rstd = 0
    cdef Py_ssize_t k
    cdef int verdict
    s.sum = s.rest = q.sum = q.rest = 0
    for k in range((j.n_cols + BLOCK - 1) // BLOCK):
        s = total_add(s, sums[2 * k])
        q = total_add(q, sums[2 * k + 1])
    verdict = settle(total_value(s), total_value(q), j.n_cols, j.eps, j.centered, last, &hi, &lo, &mean, &variance, &rstd)
    st.hi = hi
    st.lo = lo
    st.rstd = <real>rstd
    if verdict == SETTLED:
        save_statistics(j, r, mean, variance, rstd)
    return verdict


cdef void piece_apply(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1, const row_statistics* st) noexcept nogil:
    """Columns c0 (the start of a block) to c1."""
    cdef block x_buffer, y_buffer
    cdef forward_row row
    open_forward_row(j, r, 1, x_buffer.v, False, &row)
    row.hi = <real>st.hi
    row.lo = <real>st.lo
    row.rstd = <real>st.rstd
    apply_rows(j, &row, r, 1, c0, c1, ST_REAL, y_buffer.v)
    if j.stream:
        stream_fence()
