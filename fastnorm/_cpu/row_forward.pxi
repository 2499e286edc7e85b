"""Forward over rows, with d = x - hi, hi a first guess of the mean, lo = mean(d):

    y = ((x - hi) - lo) * rstd * weight + bias,  rstd = 1 / sqrt(mean(d*d) - lo*lo + eps)

rms_norm (centered is false): hi = lo = 0. Two sweeps over a row: the sums, then y. All forms of a
row's memory (in place, strided, 16-bit, byte-swapped, scaled) come through load_block, so there is
one numeric body.
"""

cdef inline real first_mean(const real* x, Py_ssize_t n_cols) noexcept nogil:
    """hi: the mean of the first step. Near the mean for most rows; settle() notices when not."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes s
    if n_cols >= STEP:
        s = lanes_add(lanes_add(lanes_load(x), lanes_load(x + LANES)),
                      lanes_add(lanes_load(x + 2 * LANES), lanes_load(x + 3 * LANES)))
        return lanes_fold(s) / <real>STEP
    s = lanes_add(lanes_add(lanes_load_part(x, n_cols, zero),
                            lanes_load_part(x + LANES, n_cols - LANES, zero)),
                  lanes_add(lanes_load_part(x + 2 * LANES, n_cols - 2 * LANES, zero),
                            lanes_load_part(x + 3 * LANES, n_cols - 3 * LANES, zero)))
    return lanes_fold(s) / <real>n_cols


cdef inline lanes sum4(lanes a, lanes b, lanes c, lanes d) noexcept nogil:
    return lanes_add(lanes_add(a, b), lanes_add(c, d))


cdef inline lanes square(lanes a) noexcept nogil:
    return lanes_mul(a, a)


cdef inline void block_sums(const real* x, Py_ssize_t n, real hi, bint centered, real* sum_d, real* sum_dd) noexcept nogil:
    """OUT sum_d, sum_dd: the folded sums of d and d*d over one block."""
    cdef lanes h = lanes_fill(hi)
    cdef lanes s = lanes_fill(0)
    cdef lanes q = s
    cdef lanes a, b, c, d
    cdef Py_ssize_t i = 0
    while i + STEP <= n:
        a = lanes_load(x + i)
        b = lanes_load(x + i + LANES)
        c = lanes_load(x + i + 2 * LANES)
        d = lanes_load(x + i + 3 * LANES)
        if centered:
            a = lanes_sub(a, h)
            b = lanes_sub(b, h)
            c = lanes_sub(c, h)
            d = lanes_sub(d, h)
            s = lanes_add(s, sum4(a, b, c, d))
        q = lanes_add(q, sum4(square(a), square(b), square(c), square(d)))
        i += STEP
    if i < n:
        # What is missing of the last step is hi, so that its d is zero.
        n -= i
        x += i
        a = lanes_load_part(x, n, h)
        b = lanes_load_part(x + LANES, n - LANES, h)
        c = lanes_load_part(x + 2 * LANES, n - 2 * LANES, h)
        d = lanes_load_part(x + 3 * LANES, n - 3 * LANES, h)
        if centered:
            a = lanes_sub(a, h)
            b = lanes_sub(b, h)
            c = lanes_sub(c, h)
            d = lanes_sub(d, h)
            s = lanes_add(s, sum4(a, b, c, d))
        q = lanes_add(q, sum4(square(a), square(b), square(c), square(d)))
    if centered:
        sum_d[0] = lanes_fold(s)
    sum_dd[0] = lanes_fold(q)


cdef inline int settle(double s, double q, Py_ssize_t n_cols, double eps, bint centered, bint last,
                       real* hi, real* lo, double* mean, double* rstd) noexcept nogil:
    """From the sums to the statistics. RECENTRE: hi lies far from the mean and was moved, sum once
    more (unless last). RESCUE: squares left the range of real."""
    cdef double shift = 0, square_mean = q / n_cols, variance, scale
    if centered:
        shift = s / n_cols
        if not last and shift * shift > 0.25 * square_mean and isfinite(square_mean):
            hi[0] = <real>(hi[0] + shift)
            return RECENTRE
    variance = square_mean - shift * shift
    if variance < 0:
        variance = 0
    scale = variance + eps
    lo[0] = <real>shift
    mean[0] = hi[0] + shift
    rstd[0] = 1.0 / sqrt(scale)
    if not (TINY_SQUARE <= scale < INFINITY):
        return RESCUE
    return SETTLED


cdef inline void row_sums(const source* src, Py_ssize_t n_cols, real hi, bint centered, bint again,
                          double* s, double* q) noexcept nogil:
    cdef real a = 0, b = 0
    cdef total ts, tq
    cdef Py_ssize_t c0, n
    if n_cols <= BLOCK:
        block_sums(load_block(src, 0, n_cols, again), n_cols, hi, centered, &a, &b)
        s[0] = a
        q[0] = b
        return
    ts.sum = ts.rest = tq.sum = tq.rest = 0
    c0 = 0
    while c0 < n_cols:
        n = min(<Py_ssize_t>BLOCK, n_cols - c0)
        block_sums(load_block(src, c0, n, again), n, hi, centered, &a, &b)
        if centered:
            ts = total_add(ts, a)
        tq = total_add(tq, b)
        c0 += BLOCK
    s[0] = total_value(ts)
    q[0] = total_value(tq)


cdef inline int sum_and_settle(const source* src, Py_ssize_t n_cols, double eps, bint centered, bint again,
                               real* hi, real* lo, double* mean, double* rstd) noexcept nogil:
    cdef double s = 0, q = 0
    cdef int verdict
    row_sums(src, n_cols, hi[0], centered, again, &s, &q)
    verdict = settle(s, q, n_cols, eps, centered, False, hi, lo, mean, rstd)
    if verdict == RECENTRE:
        row_sums(src, n_cols, hi[0], centered, True, &s, &q)
        verdict = settle(s, q, n_cols, eps, centered, True, hi, lo, mean, rstd)
    return verdict


@cython.cdivision(True)
cdef void rescue(source* src, Py_ssize_t n_cols, double eps, bint centered, real* hi, real* lo,
                 real* rstd, double* mean, double* saved_rstd) noexcept nogil:
    """Statistics of a row whose squares overflow, or underflow where eps does not hide it: of the
    row times a power of two, with eps times its square. src stays scaled for the second sweep."""
    cdef double largest = sqrt(eps), naive_sum = 0, scaled_eps
    cdef Py_ssize_t c0 = 0, n, k
    cdef const real* x
    cdef int exponent = 0
    while c0 < n_cols:
        n = min(<Py_ssize_t>BLOCK, n_cols - c0)
        x = load_block(src, c0, n, True)
        for k in range(n):
            naive_sum += x[k]
            # Written so that a NaN stays.
            largest = largest if fabs(<double>x[k]) <= largest else fabs(<double>x[k])
            if not isfinite(<double>x[k]):
                largest = INFINITY
        c0 += BLOCK
    if not isfinite(largest):
        # Inf or NaN in the row: it stays in this row, as IEEE arithmetic has it.
        if centered:
            mean[0] = naive_sum
        rstd[0] = <real>saved_rstd[0]
        return
    if largest > 0:
        frexp(largest, &exponent)
    exponent = -exponent
    src.scaled = True
    src.scale1 = ldexp(1.0, exponent // 2)
    src.scale2 = ldexp(1.0, exponent - exponent // 2)
    scaled_eps = eps * src.scale1 * src.scale1 * src.scale2 * src.scale2
    hi[0] = first_mean(load_block(src, 0, min(<Py_ssize_t>BLOCK, n_cols), False), n_cols) if centered else 0
    sum_and_settle(src, n_cols, scaled_eps, centered, False, hi, lo, mean, saved_rstd)
    # A constant row and eps = 0: x_hat is zero, not 0 * inf.
    rstd[0] = <real>saved_rstd[0] if isfinite(saved_rstd[0]) else 0
    mean[0] = mean[0] / src.scale1 / src.scale2
    saved_rstd[0] = saved_rstd[0] * src.scale1 * src.scale2


cdef inline lanes x_hat(lanes x, lanes hi, lanes lo, lanes rstd, bint centered) noexcept nogil:
    if centered:
        x = lanes_sub(lanes_sub(x, hi), lo)
    return lanes_mul(x, rstd)


cdef inline void apply_block(const real* x, real* y, Py_ssize_t n, real hi, real lo, real rstd,
                             const real* w, const real* b, bint centered, bint stream,
                             const char* ahead, Py_ssize_t ahead_size) noexcept nogil:
    """y = ((x - hi) - lo) * rstd * w + b over n columns. ahead: what the next row will read, ahead_size
    bytes a column, fetched while this one is written, since stores past the cache leave the memory
    bus idle otherwise."""
    cdef lanes h = lanes_fill(hi), l = lanes_fill(lo), r = lanes_fill(rstd), zero = lanes_fill(0)
    cdef lanes t
    cdef Py_ssize_t i = 0, k
    if stream and <size_t>y % sizeof(real) == 0:
        # Whole cache lines only; y may start inside one.
        k = min(n, <Py_ssize_t>((64 - <size_t>y % 64) % 64 // sizeof(real)))
        if k > 0:
            t = x_hat(lanes_load_part(x, k, zero), h, l, r, centered)
            if w != NULL:
                t = lanes_mul(t, lanes_load_part(w, k, zero))
            if b != NULL:
                t = lanes_add(t, lanes_load_part(b, k, zero))
            lanes_store_part(y, k, t)
        i = k
        while i + LANES <= n:
            prefetch(ahead + i * ahead_size)
            t = x_hat(lanes_load(x + i), h, l, r, centered)
            if w != NULL:
                t = lanes_mul(t, lanes_load(w + i))
            if b != NULL:
                t = lanes_add(t, lanes_load(b + i))
            lanes_stream(y + i, t)
            i += LANES
    else:
        while i + LANES <= n:
            if ahead != NULL:
                prefetch(ahead + i * ahead_size)
            t = x_hat(lanes_load(x + i), h, l, r, centered)
            if w != NULL:
                t = lanes_mul(t, lanes_load(w + i))
            if b != NULL:
                t = lanes_add(t, lanes_load(b + i))
            lanes_store(y + i, t)
            i += LANES
    if i < n:
        t = x_hat(lanes_load_part(x + i, n - i, zero), h, l, r, centered)
        if w != NULL:
            t = lanes_mul(t, lanes_load_part(w + i, n - i, zero))
        if b != NULL:
            t = lanes_add(t, lanes_load_part(b + i, n - i, zero))
        lanes_store_part(y + i, n - i, t)


# What the second sweep needs to know of a row.
cdef struct forward_row:
    source src
    char* y
    const char* ahead      # the row to fetch meanwhile, or NULL
    real hi, lo, rstd


cdef inline void open_forward_row(const job* j, Py_ssize_t r, Py_ssize_t distance, real* x_buffer, bint resident,
                                  forward_row* row) noexcept nogil:
    row.src = open_row(&j.x, r, x_buffer, resident)
    row.y = row_start(&j.y, r)
    row.ahead = NULL
    if j.stream and r + distance < j.n_rows and is_contiguous(&j.x):
        row.ahead = row_start(&j.x, r + distance)


cdef inline void row_statistics_of(const job* j, Py_ssize_t r, forward_row* row, bint centered) noexcept nogil:
    cdef double mean = 0, saved_rstd = 0
    cdef const real* x = load_block(&row.src, 0, min(<Py_ssize_t>BLOCK, j.n_cols), False)
    row.hi = first_mean(x, j.n_cols) if centered else 0
    row.lo = 0
    # A row of one block stands in the buffer already.
    if sum_and_settle(&row.src, j.n_cols, j.eps, centered, row.src.resident and j.n_cols <= BLOCK,
                      &row.hi, &row.lo, &mean, &saved_rstd) == SETTLED:
        row.rstd = <real>saved_rstd
    else:
        rescue(&row.src, j.n_cols, j.eps, centered, &row.hi, &row.lo, &row.rstd, &mean, &saved_rstd)
    if j.mean != NULL:
        (<real*>j.mean)[r] = <real>mean
    if j.rstd != NULL:
        (<real*>j.rstd)[r] = <real>saved_rstd


cdef inline void row_apply(const job* j, const forward_row* row, Py_ssize_t c0, Py_ssize_t n, bint centered,
                           real* y_buffer) noexcept nogil:
    """n columns from c0 on, at most a block, of a row of y."""
    cdef in_real w = <in_real>j.weight
    cdef in_real b = <in_real>j.bias
    cdef const real* x = load_block(&row.src, c0, n, True)
    cdef real* y = <real*>row.y + c0 if j.y.direct else y_buffer
    apply_block(x, y, n, row.hi, row.lo, row.rstd, w + c0 if w != NULL else NULL, b + c0 if b != NULL else NULL,
                centered, j.stream and j.y.direct,
                row.ahead + c0 * j.x.itemsize if row.ahead != NULL else NULL, j.x.itemsize)
    if not j.y.direct:
        store_columns(&j.y, row.y, c0, n, y, j.stream)


cdef inline void group_forward(const job* j, Py_ssize_t r, int n_rows, bint centered, bint resident, real* x_buffer,
                               real* y_buffer) noexcept nogil:
    """Rows side by side: each block of weight and bias is fetched once for all of them."""
    cdef forward_row[GROUP] rows
    cdef Py_ssize_t c0 = 0
    cdef int k
    for k in range(n_rows):
        open_forward_row(j, r + k, n_rows, x_buffer, resident, &rows[k])
        row_statistics_of(j, r + k, &rows[k], centered)
    while c0 < j.n_cols:
        for k in range(n_rows):
            row_apply(j, &rows[k], c0, min(<Py_ssize_t>BLOCK, j.n_cols - c0), centered, y_buffer)
        c0 += BLOCK


cdef void forward(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    cdef block[RESIDENT] x_buffer
    cdef block y_buffer
    cdef bint contiguous = is_contiguous(&j.x)
    # Strided rows are loaded once and kept; contiguous ones are cheap to load again from the cache.
    cdef bint resident = j.n_cols <= BLOCK or (not contiguous and j.n_cols <= RESIDENT * BLOCK)
    cdef int group = GROUP
    if j.n_cols <= BLOCK or not contiguous or GROUP * j.n_cols * j.x.itemsize > GROUP_BYTES:
        group = 1
    # The flag as a literal: two bodies, each without the branch.
    while r0 < r1:
        if j.centered:
            group_forward(j, r0, min(<Py_ssize_t>group, r1 - r0), True, resident, x_buffer[0].v, y_buffer.v)
        else:
            group_forward(j, r0, min(<Py_ssize_t>group, r1 - r0), False, resident, x_buffer[0].v, y_buffer.v)
        r0 += group
    if j.stream:
        stream_fence()


# One long row in pieces: the same blocks, the same order of adding them up.

cdef double piece_first_mean(const job* j, Py_ssize_t r) noexcept nogil:
    cdef block buffer
    cdef source src = open_row(&j.x, r, buffer.v, False)
    cdef const real* x = load_block(&src, 0, min(<Py_ssize_t>BLOCK, j.n_cols), False)
    return first_mean(x, j.n_cols) if j.centered else 0


cdef void piece_sums(const job* j, Py_ssize_t r, Py_ssize_t block0, Py_ssize_t block1, double hi, double* sums) noexcept nogil:
    """OUT sums[2 * block], sums[2 * block + 1]: of d and of d*d."""
    cdef block buffer
    cdef source src = open_row(&j.x, r, buffer.v, False)
    cdef Py_ssize_t k, c0, n
    cdef real a, b
    for k in range(block0, block1):
        c0 = k * BLOCK
        n = min(<Py_ssize_t>BLOCK, j.n_cols - c0)
        a = 0
        block_sums(load_block(&src, c0, n, False), n, <real>hi, j.centered, &a, &b)
        sums[2 * k] = a
        sums[2 * k + 1] = b


cdef int piece_settle(const job* j, Py_ssize_t r, const double* sums, bint last, row_statistics* st) noexcept nogil:
    cdef total s, q
    cdef real hi = <real>st.hi, lo = 0
    cdef double mean = 0, rstd = 0
    cdef Py_ssize_t k
    cdef int verdict
    s.sum = s.rest = q.sum = q.rest = 0
    for k in range((j.n_cols + BLOCK - 1) // BLOCK):
        s = total_add(s, sums[2 * k])
        q = total_add(q, sums[2 * k + 1])
    verdict = settle(total_value(s), total_value(q), j.n_cols, j.eps, j.centered, last, &hi, &lo, &mean, &rstd)
    st.hi = hi
    st.lo = lo
    st.rstd = <real>rstd
    if verdict == SETTLED:
        if j.mean != NULL:
            (<real*>j.mean)[r] = <real>mean
        if j.rstd != NULL:
            (<real*>j.rstd)[r] = <real>rstd
    return verdict


cdef void piece_apply(const job* j, Py_ssize_t r, Py_ssize_t c0, Py_ssize_t c1, const row_statistics* st) noexcept nogil:
    """Columns c0 (the start of a block) to c1."""
    cdef block x_buffer, y_buffer
    cdef forward_row row
    open_forward_row(j, r, 1, x_buffer.v, False, &row)
    row.hi = <real>st.hi
    row.lo = <real>st.lo
    row.rstd = <real>st.rstd
    while c0 < c1:
        row_apply(j, &row, c0, min(<Py_ssize_t>BLOCK, c1 - c0), j.centered, y_buffer.v)
        c0 += BLOCK
    if j.stream:
        stream_fence()
