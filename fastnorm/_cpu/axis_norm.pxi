"""The same formulas where the rows, not the columns, lie next to each other in memory (axis=0 of a
matrix): every lane group holds LANES rows at one column, a tile holds TILE rows.

The sums keep the order of lanes.h: column i of a step is added to the lane i mod LANES of each row,
so a tile keeps LANES accumulators per row and folds them at the end of a block. A tile is loaded
once and kept, packed, if all its columns fit TILE_BYTES: rows of a large matrix are a power of two
apart and would evict each other from the cache.
"""

cdef enum:
    TILE = 128
    TILE_BYTES = 1 << 20   # of a packed tile; there are two of them
    AHEAD = 16             # columns

cdef struct tile:
    const view* v
    const char* base       # its first row at column 0
    Py_ssize_t r, n        # its rows: r to r + n
    Py_ssize_t width       # n padded to whole lane groups
    real* packed           # [n_cols, width], or NULL: it does not fit
    real* columns          # [4, TILE], what is being looked at, where that cannot be in place
    bint is_packed, direct


cdef inline void load_tile_column(const tile* t, Py_ssize_t c, real* out) noexcept nogil:
    cdef const view* v = t.v
    cdef const char* p = t.base + offset(v.col_ndim, v.col_shape, v.col_strides, c)
    cdef Py_ssize_t k
    if v.col_ndim == 1:
        # The processor does not foresee strides of whole pages.
        for k in range(0, t.n * v.itemsize, 64):
            prefetch(p + AHEAD * v.col_strides[0] + k)
    load_run(p, v.row_strides[v.row_ndim - 1], v.type, v.swapped, t.n, out)


cdef inline void pack_tile_column(tile* t, Py_ssize_t c) noexcept nogil:
    load_tile_column(t, c, t.packed + c * t.width)


cdef inline const real* tile_column(const tile* t, Py_ssize_t c, int slot) noexcept nogil:
    """Column c of a tile, t.width values. slot: which of the four columns in use."""
    cdef const view* v = t.v
    if t.is_packed:
        return t.packed + c * t.width
    if t.direct:
        return <const real*>(t.base + offset(v.col_ndim, v.col_shape, v.col_strides, c))
    load_tile_column(t, c, t.columns + slot * TILE)
    return t.columns + slot * TILE


cdef inline Py_ssize_t run_left(const view* v, Py_ssize_t r) noexcept nogil:
    """Rows from r on that lie next to each other."""
    cdef Py_ssize_t length = v.row_shape[v.row_ndim - 1]
    return length - r % length


cdef inline Py_ssize_t tile_rows(Py_ssize_t n_cols) noexcept nogil:
    """How many rows a tile takes: fewer if that lets it be packed, but no less than two lane groups."""
    cdef Py_ssize_t rows = TILE
    while rows > 2 * LANES and n_cols * rows * sizeof(real) > TILE_BYTES:
        rows //= 2
    return rows if n_cols * rows * sizeof(real) <= TILE_BYTES else TILE


cdef inline tile open_tile(const job* j, Py_ssize_t r, Py_ssize_t r1, real* packed, real* columns) noexcept nogil:
    """The tile of x that starts at row r; ends on a whole cache line of y, so that the next one starts there."""
    cdef tile t
    cdef Py_ssize_t rows = tile_rows(j.n_cols), over
    t.v = &j.x
    t.base = row_start(&j.x, r)
    t.r = r
    t.n = min(rows, r1 - r, run_left(&j.x, r), run_left(&j.y, r))
    over = (<size_t>(row_start(&j.y, r) + t.n * j.y.itemsize) % 64) // j.y.itemsize
    if t.n == rows and over < t.n:
        t.n -= over
    t.width = (t.n + LANES - 1) // LANES * LANES
    t.packed = packed if j.n_cols * t.width * sizeof(real) <= TILE_BYTES else NULL
    t.columns = columns
    t.is_packed = False
    t.direct = j.x.type == ST_REAL and not j.x.swapped and t.n == t.width
    return t


cdef void tile_first_mean(const tile* t, Py_ssize_t n_cols, real* hi, real* s) noexcept nogil:
    """first_mean() of every row. s: LANES * TILE scratch."""
    cdef Py_ssize_t width = t.width, i
    cdef lanes zero = lanes_fill(0)
    cdef real count = <real>min(n_cols, <Py_ssize_t>STEP)
    cdef const real* a
    cdef const real* b
    cdef const real* c
    cdef const real* d
    cdef int l
    for l in range(LANES):
        a = tile_column(t, l, 0) if l < n_cols else NULL
        b = tile_column(t, l + LANES, 1) if l + LANES < n_cols else NULL
        c = tile_column(t, l + 2 * LANES, 2) if l + 2 * LANES < n_cols else NULL
        d = tile_column(t, l + 3 * LANES, 3) if l + 3 * LANES < n_cols else NULL
        i = 0
        while i < width:
            lanes_store(s + l * TILE + i, sum4(lanes_load(a + i) if a != NULL else zero,
                                               lanes_load(b + i) if b != NULL else zero,
                                               lanes_load(c + i) if c != NULL else zero,
                                               lanes_load(d + i) if d != NULL else zero))
            i += LANES
    fold_tile(s, width)
    for i in range(width):
        hi[i] = s[i] / count


cdef inline void fold_tile(real* s, Py_ssize_t width) noexcept nogil:
    """lanes_fold() of every row: s[:width] = the fold of s[0], s[TILE], ..., s[(LANES - 1) * TILE]."""
    cdef Py_ssize_t i
    cdef int n = LANES // 2, l
    while n > 0:
        for l in range(n):
            i = 0
            while i < width:
                lanes_store(s + l * TILE + i, lanes_add(lanes_load(s + l * TILE + i), lanes_load(s + (l + n) * TILE + i)))
                i += LANES
        n //= 2


cdef inline void tile_total(double* sums, double* rest, const real* a, Py_ssize_t width) noexcept nogil:
    """total_add() of every row."""
    cdef Py_ssize_t i
    cdef total t
    for i in range(width):
        t.sum = sums[i]
        t.rest = rest[i]
        t = total_add(t, a[i])
        sums[i] = t.sum
        rest[i] = t.rest


cdef inline void tile_step(const tile* t, Py_ssize_t c, Py_ssize_t n_cols, const real* hi, bint centered,
                           real* s, real* q) noexcept nogil:
    """Add the four columns c, c + LANES, ... of one lane, as far as they exist."""
    cdef lanes zero = lanes_fill(0)
    cdef lanes h, x0, x1, x2, x3
    cdef const real* a = tile_column(t, c, 0)
    cdef const real* b = tile_column(t, c + LANES, 1) if c + LANES < n_cols else NULL
    cdef const real* e = tile_column(t, c + 2 * LANES, 2) if c + 2 * LANES < n_cols else NULL
    cdef const real* f = tile_column(t, c + 3 * LANES, 3) if c + 3 * LANES < n_cols else NULL
    cdef Py_ssize_t i = 0
    while i < t.width:
        h = lanes_load(hi + i) if centered else zero
        x0 = lanes_load(a + i)
        x1 = lanes_load(b + i) if b != NULL else h
        x2 = lanes_load(e + i) if e != NULL else h
        x3 = lanes_load(f + i) if f != NULL else h
        if centered:
            x0 = lanes_sub(x0, h)
            x1 = lanes_sub(x1, h)
            x2 = lanes_sub(x2, h)
            x3 = lanes_sub(x3, h)
            lanes_store(s + i, lanes_add(lanes_load(s + i), sum4(x0, x1, x2, x3)))
        lanes_store(q + i, lanes_add(lanes_load(q + i), sum4(square(x0), square(x1), square(x2), square(x3))))
        i += LANES


# What a thread works with; about 100 KiB, and the packed tiles.
cdef struct tile_scratch:
    real[16 * 128] s
    real[16 * 128] q
    real[16 * 128] p
    real[4 * 128] x_columns
    real[4 * 128] dy_columns
    real[128] y_column
    # Room for a lane group from any row.
    real[128 + 16] hi
    real[128 + 16] lo
    real[128 + 16] rstd
    double[128] sum_s
    double[128] rest_s
    double[128] sum_q
    double[128] rest_q
    double[128] sum_p
    double[128] rest_p


cdef inline double total_of(double sum, double rest) noexcept nogil:
    cdef total t
    t.sum = sum
    t.rest = rest
    return total_value(t)


cdef void tile_sums(const tile* t, Py_ssize_t n_cols, bint centered, tile_scratch* w) noexcept nogil:
    """OUT w.sum_s, rest_s, sum_q, rest_q."""
    cdef Py_ssize_t block = 0, step, c, width = t.width
    memset(w.sum_s, 0, sizeof(w.sum_s))
    memset(w.rest_s, 0, sizeof(w.rest_s))
    memset(w.sum_q, 0, sizeof(w.sum_q))
    memset(w.rest_q, 0, sizeof(w.rest_q))
    while block < n_cols:
        memset(w.s, 0, sizeof(w.s))
        memset(w.q, 0, sizeof(w.q))
        step = block
        while step < min(block + BLOCK, n_cols):
            for c in range(step, min(step + LANES, n_cols)):
                # The flag as a literal: two bodies, each without the branch.
                if centered:
                    tile_step(t, c, n_cols, w.hi, True, w.s + (c - step) * TILE, w.q + (c - step) * TILE)
                else:
                    tile_step(t, c, n_cols, w.hi, False, w.s + (c - step) * TILE, w.q + (c - step) * TILE)
            step += STEP
        if centered:
            fold_tile(w.s, width)
            tile_total(w.sum_s, w.rest_s, w.s, width)
        fold_tile(w.q, width)
        tile_total(w.sum_q, w.rest_q, w.q, width)
        block += BLOCK


cdef int tile_settle(const job* j, Py_ssize_t r, Py_ssize_t n, bint last, tile_scratch* w) noexcept nogil:
    """settle() of every row; the worst verdict. Saved statistics are written once all rows are settled."""
    cdef Py_ssize_t i
    cdef double mean = 0, rstd = 0
    cdef int verdict, worst = SETTLED
    for i in range(n):
        verdict = settle(total_of(w.sum_s[i], w.rest_s[i]), total_of(w.sum_q[i], w.rest_q[i]), j.n_cols, j.eps,
                         j.centered, last, &w.hi[i], &w.lo[i], &mean, &rstd)
        worst = max(worst, verdict)
        w.rstd[i] = <real>rstd
        if verdict == SETTLED:
            if j.mean != NULL:
                (<real*>j.mean)[r + i] = <real>mean
            if j.rstd != NULL:
                (<real*>j.rstd)[r + i] = <real>rstd
    return worst


cdef inline lanes tile_y(const real* x, Py_ssize_t i, Py_ssize_t n, const tile_scratch* w, lanes weight, lanes bias, bint weighted,
                         bint biased, bint centered) noexcept nogil:
    """y of n rows from i on at one column, at most LANES."""
    cdef lanes t = x_hat(lanes_load_part(x + i, n, weight), lanes_load(w.hi + i), lanes_load(w.lo + i), lanes_load(w.rstd + i), centered)
    if weighted:
        t = lanes_mul(t, weight)
    if biased:
        t = lanes_add(t, bias)
    return t


cdef inline void tile_apply_column(const real* x, real* y, Py_ssize_t n, const tile_scratch* w, const real* weight,
                                   const real* bias, bint centered, bint stream) noexcept nogil:
    """One column of n rows."""
    cdef lanes wl = lanes_fill(weight[0]) if weight != NULL else lanes_fill(0)
    cdef lanes bl = lanes_fill(bias[0]) if bias != NULL else lanes_fill(0)
    cdef Py_ssize_t i = 0
    if stream:
        # Whole cache lines only; y may start inside one.
        i = min(n, values_to_line(<char*>y, ST_REAL))
        lanes_store_part_as(<char*>y, 0, i, tile_y(x, 0, i, w, wl, bl, weight != NULL, bias != NULL, centered), ST_REAL)
        while i + LANES <= n:
            lanes_stream(y + i, tile_y(x, i, LANES, w, wl, bl, weight != NULL, bias != NULL, centered))
            i += LANES
    while i < n:
        lanes_store_part_as(<char*>y, i, n - i, tile_y(x, i, n - i, w, wl, bl, weight != NULL, bias != NULL, centered), ST_REAL)
        i += LANES


cdef void tile_apply(const job* j, const tile* x, tile* following, tile_scratch* w) noexcept nogil:
    """y of a tile, while the following tile (or NULL) is packed: its reads and these writes overlap."""
    cdef in_real weight = <in_real>j.weight
    cdef in_real bias = <in_real>j.bias
    cdef const view* v = &j.y
    cdef char* base = row_start(v, x.r)
    cdef char* p
    cdef const real* column
    cdef bint plain = v.type == ST_REAL and not v.swapped
    cdef bint stream = j.stream and plain and <size_t>base % sizeof(real) == 0
    cdef real* y
    cdef Py_ssize_t c
    for c in range(j.n_cols):
        if following != NULL:
            pack_tile_column(following, c)
        column = tile_column(x, c, 0)
        p = base + offset(v.col_ndim, v.col_shape, v.col_strides, c)
        y = <real*>p if plain else w.y_column
        # The flag as a literal: two bodies, each without the branch.
        if j.centered:
            tile_apply_column(column, y, x.n, w, weight + c if weight != NULL else NULL,
                              bias + c if bias != NULL else NULL, True, stream)
        else:
            tile_apply_column(column, y, x.n, w, weight + c if weight != NULL else NULL,
                              bias + c if bias != NULL else NULL, False, stream)
        if not plain:
            store_run(p, v.row_strides[v.row_ndim - 1], v.type, v.swapped, x.n, y)
    if following != NULL:
        following.is_packed = True


cdef void tile_forward(const job* j, tile* x, tile* following, tile_scratch* w) noexcept nogil:
    cdef int verdict
    cdef Py_ssize_t c
    if x.packed != NULL and not x.is_packed:
        for c in range(j.n_cols):
            pack_tile_column(x, c)
        x.is_packed = True
    memset(w.hi, 0, sizeof(w.hi))
    memset(w.lo, 0, sizeof(w.lo))
    if j.centered:
        tile_first_mean(x, j.n_cols, w.hi, w.s)
    tile_sums(x, j.n_cols, j.centered, w)
    verdict = tile_settle(j, x.r, x.n, False, w)
    if verdict == RECENTRE:
        # Rows that were settled keep their hi, so they come out the same once more.
        tile_sums(x, j.n_cols, j.centered, w)
        verdict = tile_settle(j, x.r, x.n, True, w)
    if verdict == SETTLED:
        tile_apply(j, x, following, w)
    else:
        # Rare: a row needs its own scale. Row by row then, with the same bits.
        forward(j, x.r, x.r + x.n)


cdef void axis_forward(const job* j, Py_ssize_t r0, Py_ssize_t r1) noexcept nogil:
    """As forward(), for views whose rows are contiguous (wing: rows_adjacent)."""
    cdef tile_scratch* w = <tile_scratch*>malloc(sizeof(tile_scratch))
    cdef real* packed = <real*>malloc(2 * TILE_BYTES)
    cdef tile x, following
    cdef tile* next_tile
    if w == NULL or packed == NULL:
        # Slow, but right.
        forward(j, r0, r1)
    elif r0 < r1:
        x = open_tile(j, r0, r1, packed, w.x_columns)
        while True:
            next_tile = NULL
            if x.r + x.n < r1:
                following = open_tile(j, x.r + x.n, r1, packed if x.packed != packed else packed + TILE_BYTES // sizeof(real),
                                      w.x_columns)
                if following.packed != NULL:
                    next_tile = &following
            tile_forward(j, &x, next_tile, w)
            if x.r + x.n >= r1:
                break
            x = following
    if j.stream:
        stream_fence()
    free(packed)
    free(w)
