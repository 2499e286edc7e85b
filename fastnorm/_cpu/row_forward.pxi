"""Forward over rows, with d = x - hi, hi a first guess of the mean, lo = mean(d):

    y = ((x - hi) - lo) * rstd * weight + bias,  rstd = 1 / sqrt(mean(d*d) - lo*lo + eps)

rms_norm (centered is false): hi = lo = 0. Two sweeps over a row: the sums, then y. All forms of a
row's memory (in place, strided, 16-bit, byte-swapped, scaled) come through load_block, so there is
one numeric body.
"""

cdef inline lanes sum4(lanes a, lanes b, lanes c, lanes d) noexcept nogil:
    return lanes_add(lanes_add(a, b), lanes_add(c, d))


cdef inline lanes square(lanes a) noexcept nogil:
    return lanes_mul(a, a)


cdef inline void half_step(const char* x, Py_ssize_t i, Py_ssize_t n, lanes hi, bint centered, int type,
                           lanes* sum_d, lanes* sum_dd) noexcept nogil:
    """The sums of d and d*d of four lane groups from i on, of which n values exist: the rest is hi, so that its d is zero."""
    cdef lanes a = lanes_load_part_as(x, i, n, hi, type)
    cdef lanes b = lanes_load_part_as(x, i + LANES, n - LANES, hi, type)
    cdef lanes c = lanes_load_part_as(x, i + 2 * LANES, n - 2 * LANES, hi, type)
    cdef lanes d = lanes_load_part_as(x, i + 3 * LANES, n - 3 * LANES, hi, type)
    if centered:
        a = lanes_sub(a, hi)
        b = lanes_sub(b, hi)
        c = lanes_sub(c, hi)
        d = lanes_sub(d, hi)
        sum_d[0] = sum4(a, b, c, d)
    sum_dd[0] = sum4(square(a), square(b), square(c), square(d))


cdef inline real first_mean(const char* x, Py_ssize_t n_cols, int type) noexcept nogil:
    """hi: the mean of the first step. Near the mean for most rows; settle() notices when not."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes a, b, unused
    # About zero, d is x itself.
    half_step(x, 0, n_cols, zero, True, type, &a, &unused)
    half_step(x, HALF_STEP, n_cols - HALF_STEP, zero, True, type, &b, &unused)
    return <real>(lanes_fold(lanes_add(a, b)) / min(n_cols, <Py_ssize_t>STEP))


cdef inline void block_sums(const char* x, Py_ssize_t n, real hi, bint centered, int type, double* sum_d, double* sum_dd) noexcept nogil:
    """OUT sum_d, sum_dd: the folded sums of d and d*d over one block."""
    cdef lanes h = lanes_fill(hi)
    cdef lanes s = lanes_fill(0)
    cdef lanes q = s
    cdef lanes s0 = s, s1 = s, q0, q1
    cdef Py_ssize_t i = 0
    while i + STEP <= n:
        half_step(x, i, HALF_STEP, h, centered, type, &s0, &q0)
        half_step(x, i + HALF_STEP, HALF_STEP, h, centered, type, &s1, &q1)
        if centered:
            s = lanes_add(s, lanes_add(s0, s1))
        q = lanes_add(q, lanes_add(q0, q1))
        i += STEP
    if i < n:
        half_step(x, i, n - i, h, centered, type, &s0, &q0)
        half_step(x, i + HALF_STEP, n - i - HALF_STEP, h, centered, type, &s1, &q1)
        if centered:
            s = lanes_add(s, lanes_add(s0, s1))
        q = lanes_add(q, lanes_add(q0, q1))
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
    rstd[0] = reciprocal_root(scale)
    if not (TINY_SQUARE <= scale < INFINITY):
        return RESCUE
    return SETTLED


cdef inline void row_sums(const source* src, Py_ssize_t n_cols, real hi, bint centered, bint again, int type,
                          double* s, double* q) noexcept nogil:
    cdef double a = 0, b = 0
    cdef total ts, tq
    cdef Py_ssize_t c0 = 0, n
    while True:
        n = min(<Py_ssize_t>BLOCK, n_cols - c0)
        block_sums(load_block(src, c0, n, again, type), n, hi, centered, type, &a, &b)
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
                              real* hi, real* lo, double* mean, double* rstd) noexcept nogil:
    """About a hi that was moved. Flags at run time: it is rare."""
    cdef double s = 0, q = 0
    row_sums(src, n_cols, hi[0], centered, True, type, &s, &q)
    return settle(s, q, n_cols, eps, centered, True, hi, lo, mean, rstd)


cdef inline int sum_and_settle(const source* src, Py_ssize_t n_cols, double eps, bint centered, bint again, int type,
                               real* hi, real* lo, double* mean, double* rstd) noexcept nogil:
    cdef double s = 0, q = 0
    cdef int verdict
    row_sums(src, n_cols, hi[0], centered, again, type, &s, &q)
    verdict = settle(s, q, n_cols, eps, centered, False, hi, lo, mean, rstd)
    if verdict == RECENTRE:
        verdict = sum_again_and_settle(src, n_cols, eps, centered, type, hi, lo, mean, rstd)
    return verdict


cdef inline lanes x_hat(lanes x, lanes hi, lanes lo, lanes rstd, bint centered) noexcept nogil:
    if centered:
        x = lanes_sub(lanes_sub(x, hi), lo)
    return lanes_mul(x, rstd)


cdef inline lanes y_lanes(const char* x, Py_ssize_t i, Py_ssize_t n, lanes hi, lanes lo, lanes rstd, const real* w,
                          const real* b, bint centered, int type) noexcept nogil:
    """((x - hi) - lo) * rstd * w + b of n columns from i on, at most a lane group."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes t = x_hat(lanes_load_part_as(x, i, n, zero, type), hi, lo, rstd, centered)
    if w != NULL:
        t = lanes_mul(t, lanes_load_part(w + i, n, zero))
    if b != NULL:
        t = lanes_add(t, lanes_load_part(b + i, n, zero))
    return t


# What the second sweep needs to know of a row.
cdef struct forward_row:
    source src
    char* y
    const char* ahead      # the row to fetch meanwhile, or NULL
    real hi, lo, rstd
    bint done              # needed a scale of its own, and was finished with it


cdef inline void apply_block(const char* x, char* y, Py_ssize_t n, const forward_row* row, const real* w, const real* b,
                             bint centered, bint stream, int type, const char* ahead, Py_ssize_t ahead_size) noexcept nogil:
    """y over n columns. ahead: what a later row will read, ahead_size bytes a column, fetched while
    this one is written, since stores past the cache leave the memory bus idle otherwise."""
    cdef lanes h = lanes_fill(row.hi), l = lanes_fill(row.lo), r = lanes_fill(row.rstd)
    cdef Py_ssize_t i = 0, head, part
    if stream:
        # Whole cache lines only; y may start inside one.
        head = min(n, values_to_line(y, type))
        while i < head:
            part = min(head - i, <Py_ssize_t>LANES)
            lanes_store_part_as(y, i, part, y_lanes(x, i, part, h, l, r, w, b, centered, type), type)
            i += part
        while i + LANES <= n:
            prefetch(ahead + i * ahead_size)
            lanes_stream_as(y, i, y_lanes(x, i, LANES, h, l, r, w, b, centered, type), type)
            i += LANES
    else:
        while i + LANES <= n:
            if ahead != NULL:
                prefetch(ahead + i * ahead_size)
            lanes_store_as(y, i, y_lanes(x, i, LANES, h, l, r, w, b, centered, type), type)
            i += LANES
    if i < n:
        lanes_store_part_as(y, i, n - i, y_lanes(x, i, n - i, h, l, r, w, b, centered, type), type)


cdef inline void open_forward_row(const job* j, Py_ssize_t r, Py_ssize_t distance, real* x_buffer, bint resident,
                                  forward_row* row) noexcept nogil:
    row.src = open_row(&j.x, r, x_buffer, resident)
    row.y = row_start(&j.y, r)
    row.done = False
    row.ahead = NULL
    if j.stream and is_contiguous(&j.x):
        row.ahead = row_start(&j.x, min(r + distance, j.n_rows - 1))


cdef inline void save_statistics(const job* j, Py_ssize_t r, double mean, double rstd) noexcept nogil:
    if j.mean != NULL:
        (<real*>j.mean)[r] = <real>mean
    if j.rstd != NULL:
        (<real*>j.rstd)[r] = <real>rstd


cdef inline void row_apply(const job* j, const forward_row* row, Py_ssize_t c0, Py_ssize_t n, bint centered, int type,
                           real* y_buffer) noexcept nogil:
    """n columns from c0 on, at most a block, of a row of y."""
    cdef in_real w = <in_real>j.weight
    cdef in_real b = <in_real>j.bias
    cdef const char* x = load_block(&row.src, c0, n, True, type)
    cdef bint y_in_place = type != ST_REAL or in_place(&j.y, ST_REAL)
    cdef bint stream
    cdef char* y = row.y + c0 * SIZE_OF(type) if y_in_place else <char*>y_buffer
    if w != NULL:
        w += c0
    if b != NULL:
        b += c0
    stream = j.stream and y_in_place and row.ahead != NULL and <size_t>y % SIZE_OF(type) == 0
    apply_block(x, y, n, row, w, b, centered, stream, type,
                row.ahead + c0 * j.x.itemsize if row.ahead != NULL else NULL, j.x.itemsize)
    if not y_in_place:
        store_columns(&j.y, row.y, c0, n, y_buffer, j.stream)


cdef void rescue(const job* j, Py_ssize_t r) noexcept nogil:
    """A row whose squares overflow, or underflow where eps does not hide it: the row times a power of
    two, with eps times its square. Rare, so all in one place and through buffers."""
    cdef block x_buffer, y_buffer
    cdef forward_row row
    cdef double largest = sqrt(j.eps), naive_sum = 0, eps = j.eps, mean = 0, rstd = 0
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
    sum_and_settle(&row.src, j.n_cols, eps, j.centered, False, ST_REAL, &row.hi, &row.lo, &mean, &rstd)
    # A constant row whose eps is zero, or is with the scale: x_hat is zero, not 0 * inf.
    row.rstd = <real>rstd if not finite or isfinite(<double><real>rstd) else 0
    c0 = 0
    while c0 < j.n_cols:
        row_apply(j, &row, c0, min(<Py_ssize_t>BLOCK, j.n_cols - c0), j.centered, ST_REAL, y_buffer.v)
        c0 += BLOCK
    if finite:
        mean = mean / row.src.scale1 / row.src.scale2
        rstd = rstd * row.src.scale1 * row.src.scale2
    elif j.centered:
        mean = naive_sum
    save_statistics(j, r, mean, rstd)


cdef inline void row_sweep(const job* j, Py_ssize_t r, forward_row* row, bint centered, int type) noexcept nogil:
    """The first sweep: the statistics of a row."""
    cdef double mean = 0, rstd = 0
    cdef const char* x = load_block(&row.src, 0, min(<Py_ssize_t>BLOCK, j.n_cols), False, type)
    row.hi = first_mean(x, j.n_cols, type) if centered else 0
    row.lo = 0
    # A row of one block stands in the buffer already.
    if sum_and_settle(&row.src, j.n_cols, j.eps, centered, row.src.resident and j.n_cols <= BLOCK, type,
                      &row.hi, &row.lo, &mean, &rstd) == SETTLED:
        row.rstd = <real>rstd
        save_statistics(j, r, mean, rstd)
    else:
        rescue(j, r)
        row.done = True


cdef inline void group_forward(const job* j, Py_ssize_t r, int n_rows, bint centered, int type, bint resident,
                               real* x_buffer, real* y_buffer) noexcept nogil:
    """Rows side by side: none waits for the square root of another."""
    cdef forward_row[GROUP] rows
    cdef Py_ssize_t c0 = 0
    cdef int k
    for k in range(n_rows):
        open_forward_row(j, r + k, n_rows, x_buffer, resident, &rows[k])
        row_sweep(j, r + k, &rows[k], centered, type)
    while c0 < j.n_cols:
        for k in range(n_rows):
            if not rows[k].done:
                row_apply(j, &rows[k], c0, min(<Py_ssize_t>BLOCK, j.n_cols - c0), centered, type, y_buffer)
        c0 += BLOCK


cdef inline void rows_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1, bint centered, int type) noexcept nogil:
    cdef block[RESIDENT] x_buffer
    cdef block y_buffer
    cdef bint contiguous = is_contiguous(&j.x)
    # Strided rows are loaded once and kept; contiguous ones are cheap to load again from the cache.
    cdef bint resident = j.n_cols <= BLOCK or (not contiguous and j.n_cols <= RESIDENT * BLOCK)
    # Longer rows keep the processor busy alone, and reads and writes of memory overlap better row by row.
    cdef int group = GROUP if in_place(&j.x, type) and j.n_cols * j.x.itemsize <= SHORT_BYTES else 1
    while r0 < r1:
        group_forward(j, r0, min(<Py_ssize_t>group, r1 - r0), centered, type, resident, x_buffer[0].v, y_buffer.v)
        r0 += group


cdef void transposed_rows_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1, real* x_buffer) noexcept nogil:
    """As rows_forward(), where rows of x lie next to each other and those of y do not: LANES rows are
    loaded together, into x_buffer[LANES, apart_in_cache(n_cols)]."""
    cdef block y_buffer
    cdef forward_row row
    cdef Py_ssize_t run = j.x.row_shape[j.x.row_ndim - 1], n, c0
    cdef int k
    while r0 < r1:
        n = min(<Py_ssize_t>LANES, r1 - r0, run - r0 % run)
        load_rows(&j.x, r0, n, j.n_cols, x_buffer)
        for k in range(n):
            open_forward_row(j, r0 + k, 1, x_buffer + k * apart_in_cache(j.n_cols), True, &row)
            row.src.loaded = True
            row_sweep(j, r0 + k, &row, j.centered, ST_REAL)
            c0 = 0
            while c0 < j.n_cols and not row.done:
                row_apply(j, &row, c0, min(<Py_ssize_t>BLOCK, j.n_cols - c0), j.centered, ST_REAL, y_buffer.v)
                c0 += BLOCK
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
            rows_forward(j, r0, r1, True, ST_FLOAT16)
        else:
            rows_forward(j, r0, r1, False, ST_FLOAT16)
    elif BFLOAT16_LANES and type == ST_BFLOAT16:
        if j.centered:
            rows_forward(j, r0, r1, True, ST_BFLOAT16)
        else:
            rows_forward(j, r0, r1, False, ST_BFLOAT16)
    elif j.centered:
        rows_forward(j, r0, r1, True, ST_REAL)
    else:
        rows_forward(j, r0, r1, False, ST_REAL)
    if j.stream:
        stream_fence()


# One long row in pieces: the same blocks, the same order of adding them up.

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
        block_sums(load_block(&src, c0, n, False, ST_REAL), n, <real>hi, j.centered, ST_REAL, &a, &b)
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
        save_statistics(j, r, mean, rstd)
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
        row_apply(j, &row, c0, min(<Py_ssize_t>BLOCK, c1 - c0), j.centered, ST_REAL, y_buffer.v)
        c0 += BLOCK
    if j.stream:
        stream_fence()
