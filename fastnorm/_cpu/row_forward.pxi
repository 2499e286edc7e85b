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


cdef inline vec sum_vec(const char* a, const char* b, Py_ssize_t i, Py_ssize_t n, vec factor, int type) noexcept nogil:
    """a + alpha * b of n columns from i on, at most a register."""
    cdef vec zero = vec_fill(0)
    return vec_add(vec_load_part_as(a, i, n, zero, type), vec_mul(factor, vec_load_part_as(b, i, n, zero, type)))


cdef inline void add_block(const char* a, const char* b, char* x, Py_ssize_t n, real alpha, int type) noexcept nogil:
    """x[:n] = a + alpha * b."""
    cdef vec factor = vec_fill(alpha)
    cdef Py_ssize_t i = 0
    while i + VEC_LANES <= n:
        vec_store_part_as(x, i, VEC_LANES, sum_vec(a, b, i, VEC_LANES, factor, type), type)
        i += VEC_LANES
    if i < n:
        vec_store_part_as(x, i, n - i, sum_vec(a, b, i, n - i, factor, type), type)


cdef void add_ahead(const addition* sum, Py_ssize_t c0, Py_ssize_t c1) noexcept nogil:
    """Columns c0 to c1 before the sums are taken."""
    cdef Py_ssize_t start = c0 * sizeof(real)
    add_block(sum.a + start, sum.b + start, sum.x + start, c1 - c0, sum.alpha, ST_REAL)


cdef inline lanes added_lanes(const addition* sum, Py_ssize_t c, lanes factor) noexcept nogil:
    """The lane group of column c, which is added up, stored, and needed at once."""
    cdef lanes t = lanes_add(lanes_load(<in_real>sum.a + c), lanes_mul(factor, lanes_load(<in_real>sum.b + c)))
    lanes_store(<real*>sum.x + c, t)
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


cdef inline void added_half_step(const addition* sum, Py_ssize_t c, lanes factor, lanes hi, bint centered,
                                 lanes* sum_d, lanes* sum_dd) noexcept nogil:
    """The same from column c of a sum on, which is added up for it."""
    half_step_sums(added_lanes(sum, c, factor), added_lanes(sum, c + LANES, factor), added_lanes(sum, c + 2 * LANES, factor),
                   added_lanes(sum, c + 3 * LANES, factor), hi, centered, sum_d, sum_dd)


cdef inline real first_mean(const char* x, Py_ssize_t n_cols, int type) noexcept nogil:
    """hi: the mean of the first step. Near the mean for most rows; settle() notices when not."""
    return <real>(first_sum(x, n_cols, type) / min(n_cols, <Py_ssize_t>STEP))


cdef inline void added_sums(const char* x, Py_ssize_t n, real hi, bint centered, int type, const addition* sum,
                            Py_ssize_t c0, lanes* s, lanes* q) noexcept nogil:
    """lanes_sums() of what starts at column c0 of a sum that is added up meanwhile."""
    cdef lanes factor = lanes_fill(sum.alpha), h = lanes_fill(hi)
    cdef lanes s0 = h, s1 = h, q0, q1
    cdef Py_ssize_t i = 0
    s[0] = q[0] = lanes_fill(0)
    while i + STEP <= n:
        if c0 + i >= sum.begin:
            added_half_step(sum, c0 + i, factor, h, centered, &s0, &q0)
            added_half_step(sum, c0 + i + HALF_STEP, factor, h, centered, &s1, &q1)
            if centered:
                s[0] = lanes_add(s[0], lanes_add(s0, s1))
            q[0] = lanes_add(q[0], lanes_add(q0, q1))
        else:
            lanes_add_step(x, i, STEP, hi, centered, type, s, q)
        i += STEP
    if i < n:
        if c0 + i >= sum.begin:
            add_ahead(sum, c0 + i, c0 + n)
        lanes_add_step(x, i, n - i, hi, centered, type, s, q)


cdef inline void block_sums(const char* x, Py_ssize_t n, real hi, bint centered, int type, bint adds, const addition* sum,
                            Py_ssize_t c0, double* sum_d, double* sum_dd) noexcept nogil:
    """OUT sum_d, sum_dd: the folded sums of d and d*d over one block. adds: it starts at column c0 of a sum that is added up
    meanwhile, since arithmetic and waiting for memory overlap then."""
    cdef lanes s, q
    if adds:
        added_sums(x, n, hi, centered, type, sum, c0, &s, &q)
    else:
        lanes_sums(x, n, hi, centered, type, &s, &q)
    if centered:
        sum_d[0] = lanes_fold(s)
    sum_dd[0] = lanes_fold(q)


cdef inline int settle(double s, double q, Py_ssize_t n_cols, double eps, bint centered, bint last,
                       real* hi, real* lo, double* mean, double* variance, double* rstd) noexcept nogil:
    """From the sums to the statistics of a row. RECENTRE: hi was moved, sum once more."""
    cdef settled_rows row
    row.s[0] = s
    row.q[0] = q
    settle_rows(&row, 1, n_cols, eps, centered, last)
    if row.verdict[0] == RECENTRE:
        hi[0] = <real>(hi[0] + row.shift[0])
    lo[0] = <real>row.shift[0]
    mean[0] = hi[0] + row.shift[0]
    variance[0] = row.variance[0]
    rstd[0] = row.rstd[0]
    return <int>row.verdict[0]


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


# What stands in registers while the columns of a row are gone over. weight, bias: of the row, where it has one.
cdef struct forward_constants:
    vec hi, lo, rstd, weight, bias


cdef inline forward_constants forward_constants_of(const forward_row* row, const real* w, const real* b, bint by_row) noexcept nogil:
    cdef forward_constants a
    a.hi = vec_fill(row.hi)
    a.lo = vec_fill(row.lo)
    a.rstd = vec_fill(row.rstd)
    a.weight = vec_fill(w[0]) if by_row and w != NULL else a.rstd
    a.bias = vec_fill(b[0]) if by_row and b != NULL else a.rstd
    return a


cdef inline vec y_vec(const char* x, Py_ssize_t i, Py_ssize_t n, const forward_constants* row, const real* w, const real* b,
                      bint plain, bint centered, bint by_row, int type) noexcept nogil:
    """((x - hi) - lo) * rstd * w + b of n columns from i on, at most a register. by_row: w and b only say whether there are any;
    plain: there is w, and, if centered, b."""
    cdef vec zero = vec_fill(0)
    cdef vec t = vec_load_part_as(x, i, n, zero, type)
    if centered:
        t = vec_sub(vec_sub(t, row.hi), row.lo)
    t = vec_mul(t, row.rstd)
    if plain or w != NULL:
        t = vec_mul(t, row.weight if by_row else vec_load_part_as(<const char*>w, i, n, zero, ST_REAL))
    if centered if plain else b != NULL:
        t = vec_add(t, row.bias if by_row else vec_load_part_as(<const char*>b, i, n, zero, ST_REAL))
    return t


cdef void apply_part(const char* x, char* y, Py_ssize_t i, Py_ssize_t end, const forward_row* row, const real* w, const real* b,
                     bint centered, bint by_row, int type) noexcept nogil:
    """y of columns i to end at the ends of a block, less than a cache line. Flags at run time, to have it once; apart, since
    calls for parts of a register would push the constants of the loops out of theirs."""
    cdef forward_constants a = forward_constants_of(row, w, b, by_row)
    while i < end:
        vec_store_part_as(y, i, end - i, y_vec(x, i, end - i, &a, w, b, False, centered, by_row, type), type)
        i += VEC_LANES


cdef inline Py_ssize_t apply_whole(const char* x, char* y, Py_ssize_t i, Py_ssize_t end, const forward_constants* row, const real* w,
                                   const real* b, bint plain, bint centered, bint by_row, int type) noexcept nogil:
    """y of columns i to end as far as they are whole lane groups; where it ended."""
    cdef int k
    while i + LANES <= end:
        for k in range(N_VECS):
            vec_store_part_as(y, i + k * VEC_LANES, VEC_LANES,
                              y_vec(x, i + k * VEC_LANES, VEC_LANES, row, w, b, plain, centered, by_row, type), type)
        i += LANES
    return i


cdef inline void apply_block(const char* x, char* y, Py_ssize_t n, const forward_row* row, const real* w, const real* b,
                             bint centered, bint by_row, bint stream, int type, const char* x_ahead,
                             const char* residual_ahead, Py_ssize_t ahead_size) noexcept nogil:
    """y over n columns. x_ahead, residual_ahead: what a later row will read, ahead_size bytes a column, fetched while
    this one is written, since stores past the cache leave the memory bus idle otherwise."""
    cdef forward_constants a = forward_constants_of(row, w, b, by_row)
    cdef Py_ssize_t i = 0, end
    cdef int k
    if stream:
        # Whole cache lines only (of 16-bit values that is two lane groups); y may start inside one.
        i = min(n, values_to_line(y, type))
        end = i + whole_lines(n - i, type)
        apply_part(x, y, 0, i, row, w, b, centered, by_row, type)
        while i < end:
            fetch(x_ahead, residual_ahead, i * ahead_size)
            for k in range(N_VECS):
                vec_stream_as(y, i + k * VEC_LANES,
                              y_vec(x, i + k * VEC_LANES, VEC_LANES, &a, w, b, False, centered, by_row, type), type)
            i += LANES
    # What is common: flags as literals, without the branches.
    elif not by_row and w != NULL and (b != NULL) == centered:
        i = apply_whole(x, y, i, n, &a, w, b, True, centered, by_row, type)
    else:
        i = apply_whole(x, y, i, n, &a, w, b, False, centered, by_row, type)
    if i < n:
        apply_part(x, y, i, n, row, w, b, centered, by_row, type)


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
    """The same, past the cache, with a copy in keep for the norm that comes next: n values and room for a register."""
    cdef vec factor = vec_fill(alpha), t
    # Whole cache lines only; x may start inside one.
    cdef Py_ssize_t i = 0, head = min(n, values_to_line(x, ST_REAL)), end = head + (n - head) // LANES * LANES, part
    while i < n:
        part = min(head - i if i < head else n - i, VEC_LANES)
        t = sum_vec(a, b, i, part, factor, ST_REAL)
        vec_store(keep + i, t)
        if head <= i < end:
            vec_stream(<real*>x + i, t)
        else:
            vec_store_part_as(x, i, part, t, ST_REAL)
        i += part


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


cdef inline bint is_near(const job* j, int type) noexcept nogil:
    """Whether rows are of a block at most, each of x and y in one piece. Sums only if they are short: longer ones
    are better added up in step with their norm."""
    return (j.n_cols <= BLOCK and in_place(&j.x, type) and in_place(&j.y, type) and not j.by_row
            and (not is_sum(j) or (j.n_cols < 2 * STEP and type_of_sum(j) == type and not j.stream)))


cdef int settle_near_row_again(const job* j, Py_ssize_t r, double shift, int type, forward_row* row) noexcept nogil:
    """About a hi that lies shift farther."""
    cdef double mean = 0, variance = 0, rstd = 0
    cdef source src = open_row(&j.x, r, NULL, False)
    cdef int verdict
    row.hi = <real>(row.hi + shift)
    verdict = sum_again_and_settle(&src, j.n_cols, j.eps, j.centered, type, &row.hi, &row.lo, &mean, &variance, &rstd)
    row.rstd = <real>rstd
    save_statistics(j, r, mean, variance, rstd)
    return verdict


cdef inline void near_rows_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1, bint centered, int type) noexcept nogil:
    """rows_forward() of rows that are near: several side by side, so that none waits for the sums or the root of another."""
    cdef settled_rows rows
    cdef forward_row row
    cdef const char* ahead
    cdef char* x[SIDE]
    cdef char* y
    cdef real[SIDE] hi
    cdef Py_ssize_t n_cols = j.n_cols, verdict
    cdef bint sums = is_sum(j)
    # Of shorter rows, the parts of cache lines at their ends would cost more than it gains.
    cdef bint stream = j.stream and n_cols * SIZE_OF(type) >= SHORT_BYTES // SIDE
    cdef int k, n_rows, side = <int>max(1, min(<Py_ssize_t>SIDE, SHORT_BYTES // (n_cols * SIZE_OF(type))))
    memset(&row, 0, sizeof(row))
    for k in range(SIDE):
        # Rows that are not there are settled, too.
        hi[k] = rows.s[k] = 0
        rows.q[k] = n_cols
    while r0 < r1:
        n_rows = <int>min(<Py_ssize_t>side, r1 - r0)
        for k in range(n_rows):
            x[k] = row_start(&j.x, r0 + k)
            if sums:
                add_part(j, r0 + k, 0, n_cols, NULL)
            if centered:
                rows.s[k] = first_sum(x[k], n_cols, type)
        if centered:
            for k in range(SIDE):
                hi[k] = <real>(rows.s[k] / min(n_cols, <Py_ssize_t>STEP))
        for k in range(n_rows):
            block_sums(x[k], n_cols, hi[k], centered, type, False, NULL, 0, &rows.s[k], &rows.q[k])
        settle_rows(&rows, SIDE, n_cols, j.eps, centered, False)
        for k in range(n_rows):
            row.hi = hi[k]
            row.lo = <real>rows.shift[k]
            row.rstd = <real>rows.rstd[k]
            verdict = rows.verdict[k]
            if verdict == SETTLED:
                save_statistics(j, r0 + k, hi[k] + rows.shift[k], rows.variance[k], rows.rstd[k])
            elif verdict == RECENTRE:
                verdict = settle_near_row_again(j, r0 + k, rows.shift[k], type, &row)
            if verdict == RESCUE:
                rescue(j, r0 + k)
                continue
            y = row_start(&j.y, r0 + k)
            ahead = row_start(&j.x, min(r0 + k + n_rows, j.n_rows - 1)) if stream else NULL
            apply_block(x[k], y, n_cols, &row, <in_real>j.weight, <in_real>j.bias, centered, False,
                        stream and <size_t>y % SIZE_OF(type) == 0, type, ahead, NULL, SIZE_OF(type))
        r0 += n_rows


cdef void near_layer_float16(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    if FLOAT16_LANES:
        near_rows_forward(j, r0, r1, True, ST_FLOAT16)


cdef void near_rms_float16(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    if FLOAT16_LANES:
        near_rows_forward(j, r0, r1, False, ST_FLOAT16)


cdef void near_layer_bfloat16(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    if BFLOAT16_LANES:
        near_rows_forward(j, r0, r1, True, ST_BFLOAT16)


cdef void near_rms_bfloat16(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    if BFLOAT16_LANES:
        near_rows_forward(j, r0, r1, False, ST_BFLOAT16)


cdef void near_layer_real(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    near_rows_forward(j, r0, r1, True, ST_REAL)


cdef void near_rms_real(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    near_rows_forward(j, r0, r1, False, ST_REAL)


# Called by way of pointers, which the compiler can't inline: in one function these loops would push each other's constants out
# of the registers (7 to 10 percent more instructions for 64x768).
cdef parts_kernel near_forward[6]
near_forward[0] = near_rms_float16
near_forward[1] = near_layer_float16
near_forward[2] = near_rms_bfloat16
near_forward[3] = near_layer_bfloat16
near_forward[4] = near_rms_real
near_forward[5] = near_layer_real


cdef inline parts_kernel near_kernel(bint centered, int type) noexcept nogil:
    return near_forward[(0 if type == ST_FLOAT16 else 2 if type == ST_BFLOAT16 else 4) + (1 if centered else 0)]


cdef inline void rows_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1, bint adds, bint centered, int type) noexcept nogil:
    """adds: all rows are sums that are added up in step with their norm."""
    # A block more: what is kept of a sum is stored in whole registers.
    cdef block[RESIDENT + 1] x_buffer
    cdef block y_buffer
    cdef bint contiguous = is_contiguous(&j.x)
    cdef bint keeps = not adds and is_sum(j) and type == ST_REAL and keeps_sum(j)
    # Strided rows are loaded once and kept; contiguous ones are cheap to load again from the cache.
    cdef bint resident = keeps or j.n_cols <= BLOCK or (not contiguous and j.n_cols <= RESIDENT * BLOCK)
    # Longer rows keep the processor busy alone, and reads and writes of memory overlap better row by row.
    cdef int group = GROUP if in_place(&j.x, type) and not keeps and j.n_cols * j.x.itemsize <= SHORT_BYTES // SIDE else 1
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
    elif is_near(j, type):
        near_kernel(j.centered, type)(j, r0, r1)
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
