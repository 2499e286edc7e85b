/* The canonical summation, defined once. docs/architecture.md states it in words.
 *
 *   lane    a lane group is 64 bytes of the arithmetic type: LANES = 16 float32 or 8 float64
 *   step    eight lane groups in a row: element i of a step stands in lane i mod LANES
 *   block   eight steps: 4096 bytes, 1024 float32 or 512 float64
 *
 * One step adds ((g0 + g1) + (g2 + g3)) + ((g4 + g5) + (g6 + g7)) to each lane, one block is folded
 * in double lane pair by lane pair (distance LANES/2, ..., 2, 1), the blocks of a row are added in
 * order in compensated double (total_add). An element that does not exist counts as zero.
 *
 * Every processor level runs these same operations on the same operands: one 512-bit register,
 * two 256-bit ones, four 128-bit ones, or plain scalars. That is why the bits agree. Nothing here
 * may be reordered or contracted by the compiler: setup.py passes -ffp-contract=off.
 *
 * REAL (of REAL_BYTES) is float or double: each kernel module is one arithmetic type at one level.
 */
#ifndef FASTNORM_LANES_H
#define FASTNORM_LANES_H

#include <stddef.h>
#include <string.h>
#include <math.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef REAL
#define REAL float
#define REAL_BYTES 4
#endif
typedef REAL real;

enum {
    LANES = 64 / sizeof(real),
    HALF_STEP = 4 * LANES,
    STEP = 2 * HALF_STEP,
    BLOCK = 8 * STEP
};

#if defined(__GNUC__)
  #if defined(__AVX512F__)
    #define VEC_BYTES 64
  #elif defined(__AVX__)
    #define VEC_BYTES 32
  #else
    #define VEC_BYTES 16
  #endif
  typedef real vec __attribute__((vector_size(VEC_BYTES)));
  /* Arrays may start at any byte: NumPy's views do. */
  typedef real vec_anywhere __attribute__((vector_size(VEC_BYTES), aligned(1), may_alias));
  typedef real real_anywhere __attribute__((aligned(1), may_alias));
  #define VEC_FILL(a) ((vec){0} + (a))
  #define UNROLLED _Pragma("GCC unroll 16")
  #define NOT_UNROLLED _Pragma("GCC unroll 1")
  #define INLINE static inline __attribute__((always_inline))
  /* Kept out of the hot loops: what happens once a row at most. */
  #define APART static __attribute__((noinline, unused))
#else
  #define VEC_BYTES sizeof(real)
  typedef real vec;
  typedef real vec_anywhere;
  typedef real real_anywhere;
  #define VEC_FILL(a) (a)
  #define UNROLLED
  #define NOT_UNROLLED
  #define INLINE static inline
  #define APART static
#endif
#define N_VECS (64 / VEC_BYTES)
#define VEC_LANES ((ptrdiff_t)(VEC_BYTES / sizeof(real)))

typedef struct { vec v[N_VECS]; } lanes;

/* Room for one block, on whole cache lines: a store across two of them costs twice. */
#if defined(__GNUC__)
typedef struct { real v[BLOCK]; } __attribute__((aligned(64))) block;
#else
typedef struct { real v[BLOCK]; } block;
#endif

INLINE lanes lanes_fill(real a) {
    lanes r;
    UNROLLED for (int k = 0; k < N_VECS; k++) r.v[k] = VEC_FILL(a);
    return r;
}

INLINE lanes lanes_load(const real *p) {
    lanes r;
    UNROLLED for (int k = 0; k < N_VECS; k++) r.v[k] = *(const vec_anywhere *)(p + k * VEC_LANES);
    return r;
}

INLINE void lanes_store(real *p, lanes a) {
    UNROLLED for (int k = 0; k < N_VECS; k++) *(vec_anywhere *)(p + k * VEC_LANES) = a.v[k];
}

INLINE lanes lanes_add(lanes a, lanes b) {
    UNROLLED for (int k = 0; k < N_VECS; k++) a.v[k] = a.v[k] + b.v[k];
    return a;
}

INLINE lanes lanes_sub(lanes a, lanes b) {
    UNROLLED for (int k = 0; k < N_VECS; k++) a.v[k] = a.v[k] - b.v[k];
    return a;
}

INLINE lanes lanes_mul(lanes a, lanes b) {
    UNROLLED for (int k = 0; k < N_VECS; k++) a.v[k] = a.v[k] * b.v[k];
    return a;
}

/* The same for one register: where a loop needs more of them than a processor has if it goes by whole lane groups. */
INLINE vec vec_fill(real a) { return VEC_FILL(a); }
INLINE vec vec_add(vec a, vec b) { return a + b; }
INLINE vec vec_sub(vec a, vec b) { return a - b; }
INLINE vec vec_mul(vec a, vec b) { return a * b; }
INLINE void vec_store(real *p, vec a) { *(vec_anywhere *)p = a; }

/* Store past the cache, for outputs that would only push other data out of it. p is aligned to the size of what is stored. */
INLINE void vec_stream(real *p, vec a) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)p, (__m512i)a);
#elif defined(__AVX__)
    _mm256_stream_si256((__m256i *)p, (__m256i)a);
#elif defined(__SSE2__)
    _mm_stream_si128((__m128i *)p, (__m128i)a);
#else
    *(vec_anywhere *)p = a;
#endif
}

INLINE void lanes_stream(real *p, lanes a) {
    UNROLLED for (int k = 0; k < N_VECS; k++) vec_stream(p + k * VEC_LANES, a.v[k]);
}

INLINE void stream_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

INLINE void prefetch(const void *p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 0, 2);
#endif
}

/* The first n lanes of a register from p, 0 < n < VEC_LANES, the rest fill. Reads nothing beyond. */
APART vec vec_load_tail(const real *p, ptrdiff_t n, vec fill) {
#if defined(__AVX512F__)
    unsigned mask = (1u << n) - 1;
    if (sizeof(real) == 4) return (vec)_mm512_mask_loadu_ps((__m512)fill, (__mmask16)mask, p);
    return (vec)_mm512_mask_loadu_pd((__m512d)fill, (__mmask8)mask, p);
#elif defined(__AVX2__) && REAL_BYTES == 4
    static const int mask[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    __m256i m = _mm256_loadu_si256((const __m256i *)(mask + 8 - n));
    return (vec)_mm256_blendv_ps((__m256)fill, _mm256_maskload_ps((const float *)p, m), (__m256)m);
#elif defined(__AVX2__)
    static const long long mask[8] = {-1, -1, -1, -1};
    __m256i m = _mm256_loadu_si256((const __m256i *)(mask + 4 - n));
    return (vec)_mm256_blendv_pd((__m256d)fill, _mm256_maskload_pd((const double *)p, m), (__m256d)m);
#else
    union { vec v; real x[VEC_LANES]; } t = {fill};
    for (ptrdiff_t k = 0; k < n; k++) t.x[k] = ((const real_anywhere *)p)[k];
    return t.v;
#endif
}

APART void vec_store_tail(real *p, ptrdiff_t n, vec a) {
#if defined(__AVX512F__)
    unsigned mask = (1u << n) - 1;
    if (sizeof(real) == 4)
        _mm512_mask_storeu_ps(p, (__mmask16)mask, (__m512)a);
    else
        _mm512_mask_storeu_pd(p, (__mmask8)mask, (__m512d)a);
#else
    union { vec v; real x[VEC_LANES]; } t = {a};
    /* Halves by memcpy of a constant size: a register each, where a loop would go one by one. */
    const real *q = t.x;
    if (n & 4) { memcpy(p, q, 4 * sizeof(real)); p += 4; q += 4; }
    if (n & 2) { memcpy(p, q, 2 * sizeof(real)); p += 2; q += 2; }
    if (n & 1) memcpy(p, q, sizeof(real));
#endif
}

/* The same for any n: none if n <= 0, all if n >= VEC_LANES. */
INLINE vec vec_load_part(const real *p, ptrdiff_t n, vec fill) {
    if (n >= VEC_LANES) return *(const vec_anywhere *)p;
    return n <= 0 ? fill : vec_load_tail(p, n, fill);
}

INLINE void vec_store_part(real *p, ptrdiff_t n, vec a) {
    if (n >= VEC_LANES) *(vec_anywhere *)p = a;
    else if (n > 0) vec_store_tail(p, n, a);
}

/* And for a lane group. */
INLINE lanes lanes_load_part(const real *p, ptrdiff_t n, lanes fill) {
    UNROLLED for (int k = 0; k < N_VECS; k++)
        fill.v[k] = vec_load_part(p + k * VEC_LANES, n - k * VEC_LANES, fill.v[k]);
    return fill;
}

/* a + b, and what that rounds away (Knuth). */
INLINE double two_sum(double a, double b, double *rest) {
    double s = a + b, z = s - a;
    *rest = (a - (s - z)) + (b - z);
    return s;
}

/* Eight doubles in pairs at distance 4, 2, 1. Where real is double, what the additions round away is
 * added up in the same order and put back at the end. */
INLINE double fold8(const double *x) {
    double s[8], e[8], f;
    for (int k = 0; k < 4; k++) s[k] = two_sum(x[k], x[k + 4], &e[k]);
    for (int k = 0; k < 2; k++) { s[4 + k] = two_sum(s[k], s[k + 2], &f); e[4 + k] = (e[k] + e[k + 2]) + f; }
    s[6] = two_sum(s[4], s[5], &f);
    e[6] = (e[4] + e[5]) + f;
    return sizeof(real) == 4 || !isfinite(s[6]) ? s[6] : s[6] + e[6];
}

/* In double, lane pairs at distance LANES/2, then half of that, down to one. */
INLINE double lanes_fold(lanes a) {
#if REAL_BYTES == 4 && defined(__AVX__)
    /* fold8() in registers. Lane i and lane i + 8 meet in the widening. */
  #if defined(__AVX512F__)
    __m512 v = (__m512)a.v[0];
    __m512d t = _mm512_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)));
    __m256d h = _mm256_add_pd(_mm512_castpd512_pd256(t), _mm512_extractf64x4_pd(t, 1));
  #else
    __m256 v = (__m256)a.v[0], w = (__m256)a.v[1];
    __m256d h = _mm256_add_pd(
        _mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_castps256_ps128(w))),
        _mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)), _mm256_cvtps_pd(_mm256_extractf128_ps(w, 1))));
  #endif
    __m128d q = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return q[0] + q[1];
#else
    union { lanes l; real x[LANES]; } u = {a};
    double x[8];
    for (int k = 0; k < 8; k++) x[k] = sizeof(real) == 4 ? (double)u.x[k] + (double)u.x[k + LANES / 2] : (double)u.x[k];
    return fold8(x);
#endif
}

/* One total of a row: a double and what its additions rounded away (Knuth's TwoSum). */
typedef struct { double sum, rest; } total;

INLINE total total_add(total t, double a) {
    double s = t.sum + a, z = s - t.sum;
    t.rest += (t.sum - (s - z)) + (a - z);
    t.sum = s;
    return t;
}

/* lanes_fold() of LANES rows at once: lane l of row i is s[l * distance + i]. OUT out */
INLINE void lanes_fold_rows(const real *s, ptrdiff_t distance, double *out) {
    double t[LANES][8];
    for (int l = 0; l < 8; l++)
        for (int i = 0; i < LANES; i++)
            t[i][l] = sizeof(real) == 4 ? (double)s[l * distance + i] + (double)s[(l + LANES / 2) * distance + i]
                                        : (double)s[l * distance + i];
    for (int i = 0; i < LANES; i++) out[i] = fold8(t[i]);
}

/* When sum + rest would be NaN although sum is infinite, sum alone says it. */
INLINE double total_value(total t) {
    return isfinite(t.sum) ? t.sum + t.rest : t.sum;
}

/* sums[i] += a[i] in double; where real is double itself, what that rounds away goes to sums[rests + i]. */
INLINE void vec_add_wide(double *sums, ptrdiff_t rests, vec a) {
#if defined(__GNUC__)
    /* Half a register of real at a time: what becomes a register of double. Left to itself the compiler goes one by one. */
    typedef real half __attribute__((vector_size(VEC_BYTES / 2)));
    typedef double wide __attribute__((vector_size(VEC_BYTES / 2 / sizeof(real) * sizeof(double))));
    typedef double wide_anywhere __attribute__((vector_size(VEC_BYTES / 2 / sizeof(real) * sizeof(double)), aligned(8), may_alias));
    enum { WIDE = VEC_BYTES / 2 / sizeof(real) };
    union { vec v; half h[2]; } u = {a};
    UNROLLED for (int h = 0; h < 2; h++) {
        wide_anywhere *p = (wide_anywhere *)(sums + h * WIDE);
        /* One instruction each, where the compiler's own takes four. */
#if defined(__AVX512F__) && REAL_BYTES == 4
        wide t = (wide)_mm512_cvtps_pd((__m256)u.h[h]);
#elif defined(__AVX__) && REAL_BYTES == 4
        wide t = (wide)_mm256_cvtps_pd((__m128)u.h[h]);
#else
        wide t = __builtin_convertvector(u.h[h], wide);
#endif
        wide old = *p, s = old + t;
        *p = s;
        if (sizeof(real) == 8) {
            wide z = s - old;
            wide_anywhere *rest = (wide_anywhere *)(sums + rests + h * WIDE);
            *rest += (old - (s - z)) + (t - z);
        }
    }
#else
    total t = {*sums, 0};
    t = total_add(t, a);
    *sums = t.sum;
    if (sizeof(real) == 8) sums[rests] += t.rest;
#endif
}

/* The same for the first n values; it touches no sum after them, which may be another thread's. */
APART void vec_add_wide_part(double *sums, ptrdiff_t rests, vec a, ptrdiff_t n) {
    union { vec v; real x[VEC_LANES]; } u = {a};
    for (ptrdiff_t k = 0; k < n; k++) {
        total t = {sums[k], 0};
        t = total_add(t, u.x[k]);
        sums[k] = t.sum;
        if (sizeof(real) == 8) sums[rests + k] += t.rest;
    }
}

/* a * b, and what that rounds away (Dekker: halves of 26 bits). */
static inline double two_product(double a, double b, double *rest) {
    double c = a * 134217729.0, ah = c - (c - a), al = a - ah;
    double d = b * 134217729.0, bh = d - (d - b), bl = b - bh;
    double p = a * b;
    *rest = ((ah * bh - p) + ah * bl + al * bh) + al * bl;
    return p;
}

/* 1 / sqrt(a). Where real is double, better than the two operations round: one Newton step with an exact residual. */
static inline double reciprocal_root(double a) {
    double r = 1.0 / sqrt(a), pe, qe;
    if (sizeof(real) == 4 || !(1e-100 < a && a < 1e100)) return r;
    double p = two_product(r, r, &pe);
    double q = two_product(a, p, &qe);
    return r + 0.5 * r * (((1.0 - q) - qe) - a * pe);
}

/* r * r * (a / n), likewise. */
static inline double scaled_mean(double r, double a, double n) {
    double q = a / n, plain = r * r * q, pe, te, ke;
    if (sizeof(real) == 4) return plain;
    double p = two_product(r, r, &pe), t = two_product(q, n, &te), k = two_product(p, q, &ke);
    double better = k + (ke + p * (((a - t) - te) / n) + pe * q);
    return isfinite(better) ? better : plain;
}

/* mean(d*d) + eps below this may have lost bits to underflow: such rows are scaled and done again.
 * Squares lose bits below 2^-126 (2^-1022); the margin keeps the loss under the last bit. */
#define TINY_SQUARE (sizeof(real) == 4 ? 0x1p-100 : 0x1p-960)

/* What becomes of rows whose sums of d and d*d are s and q. RECENTRE: hi lies far from the mean. RESCUE: squares left the range
 * of real. */
enum { SETTLED, RECENTRE, RESCUE };
/* Rows side by side at most. */
enum { SIDE = 8 };
typedef struct {
    double s[SIDE], q[SIDE];
    double shift[SIDE], variance[SIDE], rstd[SIDE];   /* shift: mean(d), from hi to the mean */
    ptrdiff_t verdict[SIDE];
} settled_rows;

/* Without branches and in registers of several rows: a division and a root cost as much for four of them as for one.
 * IN s, q of the first side rows (a literal), n_cols, eps, centered, last: there will be no other hi; OUT the rest of rows */
INLINE void settle_rows(settled_rows *rows, int side, ptrdiff_t n_cols, double eps, int centered, int last) {
    double n = (double)n_cols;
    NOT_UNROLLED for (int k = 0; k < side; k++) {
        double shift = centered ? rows->s[k] / n : 0, square_mean = rows->q[k] / n;
        double variance = square_mean - shift * shift, scale;
        variance = variance < 0 ? 0 : variance;
        scale = variance + eps;
        rows->shift[k] = shift;
        rows->variance[k] = variance;
        rows->rstd[k] = reciprocal_root(scale);
        rows->verdict[k] = centered && !last && (shift * shift > 0.25 * square_mean) & (square_mean < INFINITY) ? RECENTRE
                         : (scale >= TINY_SQUARE) & (scale < INFINITY) ? SETTLED : RESCUE;
    }
}

#endif
