/* Storage types: how a run of stored values becomes the arithmetic type, and back.
 *
 * Arithmetic is float32 or float64 (real); float16 and bfloat16 are storage only. A value is
 * rounded to 16 bits once: from double this goes through a float rounded to odd, which keeps what
 * the last rounding needs to know.
 */
#ifndef FASTNORM_STORAGE_H
#define FASTNORM_STORAGE_H

#include <stdint.h>
#include "lanes.h"

enum {
    ST_FLOAT16, ST_BFLOAT16, ST_FLOAT32, ST_FLOAT64,
    ST_BOOL, ST_INT8, ST_UINT8, ST_INT16, ST_UINT16, ST_INT32, ST_UINT32, ST_INT64, ST_UINT64
};

static inline float float_of_bits(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
static inline uint32_t bits_of_float(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }

/* Without branches, so that it vectorizes at every level. */
static inline float float_of_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13;
    /* Normal: rebias the exponent. Inf and NaN need the bias twice. NaN becomes quiet. */
    uint32_t wide = rest + ((127 - 15) << 23);
    uint32_t special = rest >= (31u << 23) ? (uint32_t)(128 - 16) << 23 : 0;
    uint32_t quiet = rest > (31u << 23) ? 1u << 22 : 0;
    /* Subnormal: the fraction as an integer, scaled. Exact. */
    uint32_t small = bits_of_float((float)(int32_t)(h & 0x3ff) * 0x1p-24f);
    return float_of_bits(sign | (rest < (1u << 23) ? small : ((wide + special) | quiet)));
}

static inline uint16_t half_of_float(float f) {
    uint32_t b = bits_of_float(f), sign = (b >> 16) & 0x8000, a = b & 0x7fffffff;
    /* Normal: round to nearest even at bit 13, then rebias; a carry into infinity is right. */
    uint32_t normal = (a + 0xfff + ((a >> 13) & 1) - ((127u - 15) << 23)) >> 13;
    /* Below 2^-14: adding 0.5 leaves the fraction of the subnormal in the low bits, rounded. */
    uint32_t small = bits_of_float(float_of_bits(a) + 0.5f) - bits_of_float(0.5f);
    uint32_t r = a < (113u << 23) ? small : normal;
    r = a >= (143u << 23) ? 0x7c00 : r;
    r = a > (255u << 23) ? 0x7e00 | ((a >> 13) & 0x3ff) : r;
    return (uint16_t)(sign | r);
}

static inline float float_of_bfloat16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

static inline uint16_t bfloat16_of_float(float f) {
    uint32_t b = bits_of_float(f);
    uint32_t r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    return (uint16_t)((b & 0x7fffffff) > (255u << 23) ? (b >> 16) | 0x40 : r);
}

/* What a 16-bit rounding may start from: d itself where it fits, else d rounded to odd. */
static inline float float_to_odd(double d) {
    float f = (float)d;
    if ((double)f == d || d != d) return f;
    uint32_t b = bits_of_float(f);
    if (fabs((double)f) > fabs(d)) b -= 1;
    return float_of_bits(b | 1);
}
#define NARROW(a) (sizeof(real) == 8 ? float_to_odd((double)(a)) : (float)(a))

static inline uint16_t half_of_real(real a) { return half_of_float(NARROW(a)); }
static inline uint16_t bfloat16_of_real(real a) { return bfloat16_of_float(NARROW(a)); }
static inline real real_of_half(uint16_t h) { return (real)float_of_half(h); }
static inline real real_of_bfloat16(uint16_t h) { return (real)float_of_bfloat16(h); }
#define REAL_OF(a) ((real)(a))
#define FLOAT_OF(a) ((float)(a))
#define DOUBLE_OF(a) ((double)(a))

#define SWAP_1(a) (a)
#if defined(__GNUC__)
  #define SWAP_2(a) __builtin_bswap16(a)
  #define SWAP_4(a) __builtin_bswap32(a)
  #define SWAP_8(a) __builtin_bswap64(a)
#else
  #define SWAP_2(a) (uint16_t)((a) << 8 | (a) >> 8)
  #define SWAP_4(a) ((uint32_t)SWAP_2((uint16_t)(a)) << 16 | SWAP_2((uint16_t)((a) >> 16)))
  #define SWAP_8(a) ((uint64_t)SWAP_4((uint32_t)(a)) << 32 | SWAP_4((uint32_t)((a) >> 32)))
#endif

/* memcpy moves the value: the address may be any byte. Four loops, so that the plain ones
 * (contiguous, native) vectorize. */
#define EACH_ELEMENT(p, stride, size, swapped, BODY, BODY_SWAPPED)                               \
    if (!(swapped)) {                                                                           \
        if ((stride) == (size)) for (ptrdiff_t i = 0; i < n; i++, p += (size)) { BODY }         \
        else for (ptrdiff_t i = 0; i < n; i++, p += (stride)) { BODY }                          \
    } else for (ptrdiff_t i = 0; i < n; i++, p += (stride)) { BODY_SWAPPED }

#define LOAD_CASE(ST, T, BITS, SIZE, CONVERT)                                                    \
    case ST: EACH_ELEMENT(p, stride, SIZE, swapped,                                             \
        T t; memcpy(&t, p, SIZE); out[i] = CONVERT(t);,                                         \
        BITS b; memcpy(&b, p, SIZE); b = (BITS)SWAP_##SIZE(b);                                  \
        T t; memcpy(&t, &b, SIZE); out[i] = CONVERT(t);) break;

#define STORE_CASE(ST, T, BITS, SIZE, CONVERT)                                                   \
    case ST: EACH_ELEMENT(p, stride, SIZE, swapped,                                             \
        T t = CONVERT(a[i]); memcpy(p, &t, SIZE);,                                              \
        T t = CONVERT(a[i]); BITS b; memcpy(&b, &t, SIZE);                                      \
        b = (BITS)SWAP_##SIZE(b); memcpy(p, &b, SIZE);) break;

#if defined(__F16C__)
/* Eight at a time; the rest falls to the scalar form, which gives the same bits. */
static inline ptrdiff_t load_halves(const char *p, ptrdiff_t n, real *out) {
    ptrdiff_t i = 0;
#if defined(__AVX512F__)
    if (sizeof(real) == 4)
        for (; i + 16 <= n; i += 16)
            _mm512_storeu_ps((float *)out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p + 2 * i))));
#endif
    for (; i + 8 <= n; i += 8) {
        __m256 f = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * i)));
        if (sizeof(real) == 4) _mm256_storeu_ps((float *)out + i, f);
        else {
            _mm256_storeu_pd((double *)out + i, _mm256_cvtps_pd(_mm256_castps256_ps128(f)));
            _mm256_storeu_pd((double *)out + i + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(f, 1)));
        }
    }
    return i;
}

static inline ptrdiff_t store_halves(char *p, ptrdiff_t n, const real *a) {
    ptrdiff_t i = 0;
#if defined(__AVX512F__)
    if (sizeof(real) == 4)
        for (; i + 16 <= n; i += 16)
            _mm256_storeu_si256((__m256i *)(p + 2 * i),
                                _mm512_cvtps_ph(_mm512_loadu_ps((const float *)a + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    if (sizeof(real) == 4)
        for (; i + 8 <= n; i += 8)
            _mm_storeu_si128((__m128i *)(p + 2 * i),
                             _mm256_cvtps_ph(_mm256_loadu_ps((const float *)a + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}
#else
static inline ptrdiff_t load_halves(const char *p, ptrdiff_t n, real *out) { return 0; }
static inline ptrdiff_t store_halves(char *p, ptrdiff_t n, const real *a) { return 0; }
#endif

/* out[i] = the value at p + i * stride. IN p, stride in bytes, type (ST_*), swapped; OUT out */
static inline void load_run(const char *p, ptrdiff_t stride, int type, int swapped, ptrdiff_t n, real *out) {
    if (type == ST_FLOAT16 && stride == 2 && !swapped) {
        ptrdiff_t done = load_halves(p, n, out);
        p += 2 * done; out += done; n -= done;
    }
    switch (type) {
    LOAD_CASE(ST_FLOAT16, uint16_t, uint16_t, 2, real_of_half)
    LOAD_CASE(ST_BFLOAT16, uint16_t, uint16_t, 2, real_of_bfloat16)
    LOAD_CASE(ST_FLOAT32, float, uint32_t, 4, REAL_OF)
    LOAD_CASE(ST_FLOAT64, double, uint64_t, 8, REAL_OF)
    case ST_BOOL:
    LOAD_CASE(ST_UINT8, uint8_t, uint8_t, 1, REAL_OF)
    LOAD_CASE(ST_INT8, int8_t, uint8_t, 1, REAL_OF)
    LOAD_CASE(ST_INT16, int16_t, uint16_t, 2, REAL_OF)
    LOAD_CASE(ST_UINT16, uint16_t, uint16_t, 2, REAL_OF)
    LOAD_CASE(ST_INT32, int32_t, uint32_t, 4, REAL_OF)
    LOAD_CASE(ST_UINT32, uint32_t, uint32_t, 4, REAL_OF)
    LOAD_CASE(ST_INT64, int64_t, uint64_t, 8, REAL_OF)
    LOAD_CASE(ST_UINT64, uint64_t, uint64_t, 8, REAL_OF)
    }
}

/* The value at p + i * stride becomes a[i], rounded once. IN a, n, stride in bytes, type, swapped; OUT p */
static inline void store_run(char *p, ptrdiff_t stride, int type, int swapped, ptrdiff_t n, const real *a) {
    if (type == ST_FLOAT16 && stride == 2 && !swapped) {
        ptrdiff_t done = store_halves(p, n, a);
        p += 2 * done; a += done; n -= done;
    }
    switch (type) {
    STORE_CASE(ST_FLOAT16, uint16_t, uint16_t, 2, half_of_real)
    STORE_CASE(ST_BFLOAT16, uint16_t, uint16_t, 2, bfloat16_of_real)
    STORE_CASE(ST_FLOAT32, float, uint32_t, 4, FLOAT_OF)
    STORE_CASE(ST_FLOAT64, double, uint64_t, 8, DOUBLE_OF)
    }
}

/* Copy past the cache: whole cache lines, the rest as usual. IN p, n bytes; OUT q */
static inline void stream_bytes(char *q, const char *p, ptrdiff_t n) {
#if defined(__SSE2__)
    ptrdiff_t head = -(intptr_t)q & 63;
    if (head > n) head = n;
    memcpy(q, p, head);
    q += head; p += head; n -= head;
    for (; n >= 64; n -= 64, q += 64, p += 64) {
  #if defined(__AVX512F__)
        _mm512_stream_si512((void *)q, _mm512_loadu_si512(p));
  #else
        for (int k = 0; k < 64; k += 16)
            _mm_stream_si128((__m128i *)(q + k), _mm_loadu_si128((const __m128i *)(p + k)));
  #endif
    }
#endif
    memcpy(q, p, n);
}

/* Sums in double to contiguous native values, rounded once. IN a, n, type; OUT p */
static inline void store_doubles(char *p, int type, ptrdiff_t n, const double *a) {
    for (ptrdiff_t i = 0; i < n; i++)
        switch (type) {
        case ST_FLOAT16: ((uint16_t *)p)[i] = half_of_float(float_to_odd(a[i])); break;
        case ST_BFLOAT16: ((uint16_t *)p)[i] = bfloat16_of_float(float_to_odd(a[i])); break;
        case ST_FLOAT32: ((float *)p)[i] = (float)a[i]; break;
        default: ((double *)p)[i] = a[i];
        }
}

/* ----------------------------------------------------------------------------------------------
 * The same for one lane group in registers, for contiguous native arrays: real itself, and 16-bit
 * types where this level converts whole registers. type is a literal at every call, p is the start
 * of a row, i an index into it.
 */
enum { ST_REAL = sizeof(real) == 4 ? ST_FLOAT32 : ST_FLOAT64 };

#if defined(__GNUC__)
  #define BFLOAT16_LANES (sizeof(real) == 4)
#else
  #define BFLOAT16_LANES 0
#endif
#if defined(__F16C__)
  #define FLOAT16_LANES (sizeof(real) == 4)
#else
  #define FLOAT16_LANES 0
#endif

static inline int has_lanes(int type) {
    return type == ST_REAL || (type == ST_BFLOAT16 && BFLOAT16_LANES) || (type == ST_FLOAT16 && FLOAT16_LANES);
}

#define SIZE_OF(type) ((type) == ST_REAL ? (ptrdiff_t)sizeof(real) : 2)

#if defined(__GNUC__)
typedef uint32_t vec_bits __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vec_int __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vec_half __attribute__((vector_size(VEC_BYTES / 2)));
typedef uint16_t vec_half_anywhere __attribute__((vector_size(VEC_BYTES / 2), aligned(1), may_alias));
#endif

/* Of sixteen 16-bit values, those of register k. */
INLINE vec vec_of_bits16(const char *p, int k, int type) {
    p += k * (VEC_BYTES / 2);
#if defined(__F16C__)
    if (type == ST_FLOAT16) {
  #if defined(__AVX512F__)
        return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
  #else
        return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
  #endif
    }
#endif
    /* Shifted left into the upper half. The compiler's own widening takes three instructions more. */
#if defined(__AVX512F__)
    /* One shuffle: word i to the upper half of lane i, zeros below. */
    const __m512i spread = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8,
                                            7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return (vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, spread,
                                               _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p)));
#elif defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#elif defined(__SSE2__)
    return (vec)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)p));
#elif defined(__GNUC__)
    return (vec)(__builtin_convertvector(*(const vec_half_anywhere *)p, vec_bits) << 16);
#else
    return 0;
#endif
}

#if defined(__GNUC__)
INLINE vec_half bits16_of_vec(vec a, int type) {
#if defined(__F16C__)
    if (type == ST_FLOAT16) {
  #if defined(__AVX512F__)
        return (vec_half)_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT);
  #else
        return (vec_half)_mm256_cvtps_ph((__m256)a, _MM_FROUND_TO_NEAREST_INT);
  #endif
    }
#endif
    /* bfloat16_of_float(), all at once. */
    vec_bits b = (vec_bits)a, r = b + 0x7fff + ((b >> 16) & 1);
#if defined(__AVX512F__)
    /* Where it is NaN, a quiet one; then the upper word of each lane in one shuffle. */
    const __m512i gather = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                            31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)a, (__m512)a, _CMP_UNORD_Q);
    r = (vec_bits)_mm512_mask_or_epi32((__m512i)r, is_nan, (__m512i)b, _mm512_set1_epi32(0x400000));
    return (vec_half)_mm512_castsi512_si256(_mm512_permutexvar_epi16(gather, (__m512i)r));
#elif defined(__AVX2__)
    /* The same; the compiler's own narrowing takes the values out one by one. */
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32((__m256i)b, 16), _mm256_set1_epi32(0x40));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps((__m256)a, (__m256)a, _CMP_UNORD_Q));
    __m256i t = _mm256_blendv_epi8(_mm256_srli_epi32((__m256i)r, 16), quiet, is_nan);
    return (vec_half)_mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(t, t), 0x08));
#else
    r >>= 16;
    vec_bits nan = (vec_bits)((vec_int)(b & 0x7fffffff) > (255 << 23));
    return __builtin_convertvector((nan & ((b >> 16) | 0x40)) | (~nan & r), vec_half);
#endif
}
#endif

/* One register of values from p[i] on: n of them (none if n <= 0, all if n >= VEC_LANES), the rest fill. Nothing beyond is
 * read or written. */
APART vec vec_load_tail_as(const char *p, ptrdiff_t n, vec fill, int type) {
    union { vec v; real x[VEC_LANES]; } t = {fill};
    load_run(p, SIZE_OF(type), type, 0, n, t.x);
    return t.v;
}

INLINE vec vec_load_part_as(const char *p, ptrdiff_t i, ptrdiff_t n, vec fill, int type) {
    p += i * SIZE_OF(type);
    if (type == ST_REAL) return vec_load_part((const real *)p, n, fill);
    if (n >= VEC_LANES) return vec_of_bits16(p, 0, type);
    return n <= 0 ? fill : vec_load_tail_as(p, n, fill, type);
}

APART void vec_store_tail_as(char *p, ptrdiff_t n, vec a, int type) {
    union { vec v; real x[VEC_LANES]; } t = {a};
    store_run(p, SIZE_OF(type), type, 0, n, t.x);
}

INLINE void vec_store_part_as(char *p, ptrdiff_t i, ptrdiff_t n, vec a, int type) {
    p += i * SIZE_OF(type);
    if (type == ST_REAL) { vec_store_part((real *)p, n, a); return; }
    if (n < VEC_LANES) { if (n > 0) vec_store_tail_as(p, n, a, type); return; }
#if defined(__GNUC__)
    *(vec_half_anywhere *)p = bits16_of_vec(a, type);
#endif
}

/* And for a lane group. */
INLINE void lanes_store_part_as(char *p, ptrdiff_t i, ptrdiff_t n, lanes a, int type) {
    UNROLLED for (int k = 0; k < N_VECS; k++) {
        ptrdiff_t at = k * VEC_LANES;
        vec_store_part_as(p, i + at, n - at, a.v[k], type);
    }
}

/* Of the eight lane groups of a step, what stands in register k: of whole groups (a literal, so that there is no branch for
 * each) and of one of which rest values exist; what does not exist is fill. */
INLINE void vec_load_step_as(const char *p, ptrdiff_t i, int whole, ptrdiff_t rest, int k, vec fill, int type, vec *d) {
    i += k * VEC_LANES;
    UNROLLED for (int g = 0; g < 8; g++)
        d[g] = g < whole  ? vec_load_part_as(p, i + g * LANES, VEC_LANES, fill, type)
             : g == whole ? vec_load_part_as(p, i + g * LANES, rest - k * VEC_LANES, fill, type) : fill;
}

/* Of less than a step: STATEMENT with the number of whole lane groups as a literal. */
#define WITH_WHOLE_GROUPS(n, STATEMENT)        \
    switch ((size_t)(n) / LANES) {             \
    case 0: { enum { WHOLE = 0 }; STATEMENT; break; } \
    case 1: { enum { WHOLE = 1 }; STATEMENT; break; } \
    case 2: { enum { WHOLE = 2 }; STATEMENT; break; } \
    case 3: { enum { WHOLE = 3 }; STATEMENT; break; } \
    case 4: { enum { WHOLE = 4 }; STATEMENT; break; } \
    case 5: { enum { WHOLE = 5 }; STATEMENT; break; } \
    case 6: { enum { WHOLE = 6 }; STATEMENT; break; } \
    case 7: { enum { WHOLE = 7 }; STATEMENT; break; } \
    }

/* Whether there is a second half of a step. Its zeros would change no sum that starts at zero. */
#define HAS_SECOND_HALF(whole, rest) ((whole) > 4 || ((whole) == 4 && (rest) > 0))

INLINE vec vec_sum_step(const vec *d, int whole, ptrdiff_t rest) {
    vec half = (d[0] + d[1]) + (d[2] + d[3]);
    return HAS_SECOND_HALF(whole, rest) ? half + ((d[4] + d[5]) + (d[6] + d[7])) : half;
}

/* Add d and d*d of a step from x[i] on, or what there is of it; centered: d = x - hi, else x itself. */
INLINE void vec_add_step(const char *x, ptrdiff_t i, int whole, ptrdiff_t rest, int k, vec hi, int centered, int type,
                         vec *sum_d, vec *sum_dd) {
    vec d[8];
    vec_load_step_as(x, i, whole, rest, k, hi, type, d);
    if (centered) {
        UNROLLED for (int g = 0; g < 8; g++) d[g] = d[g] - hi;
        *sum_d = *sum_d + vec_sum_step(d, whole, rest);
    }
    UNROLLED for (int g = 0; g < 8; g++) d[g] = d[g] * d[g];
    *sum_dd = *sum_dd + vec_sum_step(d, whole, rest);
}

/* The same for all registers of a lane group, n values. */
INLINE void lanes_add_step(const char *x, ptrdiff_t i, ptrdiff_t n, real hi, int centered, int type, lanes *sum_d, lanes *sum_dd) {
    vec h = VEC_FILL(hi);
#define ADD_STEP(whole, rest)                      \
    UNROLLED for (int k = 0; k < N_VECS; k++)      \
        vec_add_step(x, i, whole, rest, k, h, centered, type, &sum_d->v[k], &sum_dd->v[k])
    if (n == STEP) ADD_STEP(8, 0);
    else WITH_WHOLE_GROUPS(n, ADD_STEP(WHOLE, n & (LANES - 1)))
#undef ADD_STEP
}

/* The sums of d and d*d over n values from x on. A register of lanes at a time, over all steps, as in the next ones: a
 * processor with sixteen registers, two or four of them for a lane group, could not hold all that a step takes.
 * IN x, n, hi, centered, type; OUT sum_d (if centered), sum_dd */
INLINE void lanes_sums(const char *x, ptrdiff_t n, real hi, int centered, int type, lanes *sum_d, lanes *sum_dd) {
    vec h = VEC_FILL(hi);
    ptrdiff_t whole = n & -(ptrdiff_t)STEP;
    /* Register by register: copying a group of zeros would go in pieces that the next load would wait for. */
    UNROLLED for (int k = 0; k < N_VECS; k++) sum_d->v[k] = sum_dd->v[k] = VEC_FILL((real)0);
    for (int k = 0; whole && k < N_VECS; k++) {
        vec s = VEC_FILL((real)0), q = s;
        for (ptrdiff_t i = 0; i < whole; i += STEP) vec_add_step(x, i, 8, 0, k, h, centered, type, &s, &q);
        sum_d->v[k] = s;
        sum_dd->v[k] = q;
    }
    if (whole < n) lanes_add_step(x, whole, n - whole, hi, centered, type, sum_d, sum_dd);
}

INLINE lanes lanes_first_sum(const char *x, int whole, ptrdiff_t rest, int type) {
    vec zero = VEC_FILL((real)0), d[8];
    lanes s;
    UNROLLED for (int k = 0; k < N_VECS; k++) {
        vec_load_step_as(x, 0, whole, rest, k, zero, type, d);
        s.v[k] = zero + vec_sum_step(d, whole, rest);
    }
    return s;
}

/* The sum of the first step of n values, or of what there is of it. */
INLINE double first_sum(const char *x, ptrdiff_t n, int type) {
    if (n >= STEP) return lanes_fold(lanes_first_sum(x, 8, 0, type));
    WITH_WHOLE_GROUPS(n, return lanes_fold(lanes_first_sum(x, WHOLE, n & (LANES - 1), type)))
    return 0;
}

/* Add d, wdy and wdy * d of a step of columns from i on, or what there is of it; w is NULL for ones. */
INLINE void vec_add_gradient_step(const char *x, const char *dy, const real *w, ptrdiff_t i, int whole, ptrdiff_t rest, int k, vec hi,
                                  int centered, int type, vec *sum_d, vec *sum_wdy, vec *sum_wdy_d) {
    vec zero = VEC_FILL((real)0), half_d[2] = {zero, zero}, half_wdy[2] = {zero, zero}, half_wdy_d[2] = {zero, zero};
    i += k * VEC_LANES;
    UNROLLED for (int half = 0; half < 2; half++) {
        if (half && !HAS_SECOND_HALF(whole, rest)) break;
        vec d[4], g[4];
        UNROLLED for (int m = 0; m < 4; m++) {
            int group = 4 * half + m;
            ptrdiff_t at = i + group * LANES;
            ptrdiff_t there = group < whole ? VEC_LANES : group == whole ? rest - k * VEC_LANES : 0;
            d[m] = vec_load_part_as(x, at, there, hi, type);
            g[m] = vec_load_part_as(dy, at, there, zero, type);
            if (w != NULL) g[m] = g[m] * vec_load_part(w + at, there, zero);
            if (centered) d[m] = d[m] - hi;
        }
        half_d[half] = (d[0] + d[1]) + (d[2] + d[3]);
        half_wdy[half] = (g[0] + g[1]) + (g[2] + g[3]);
        half_wdy_d[half] = (g[0] * d[0] + g[1] * d[1]) + (g[2] * d[2] + g[3] * d[3]);
    }
    if (centered) {
        *sum_d = *sum_d + (half_d[0] + half_d[1]);
        *sum_wdy = *sum_wdy + (half_wdy[0] + half_wdy[1]);
    }
    *sum_wdy_d = *sum_wdy_d + (half_wdy_d[0] + half_wdy_d[1]);
}

/* Their sums over n columns.
 * IN x, dy, w, n, hi, centered, type; OUT sum_d, sum_wdy (if centered), sum_wdy_d */
INLINE void lanes_gradient_sums(const char *x, const char *dy, const real *w, ptrdiff_t n, real hi, int centered, int type,
                                lanes *sum_d, lanes *sum_wdy, lanes *sum_wdy_d) {
    vec h = VEC_FILL(hi);
    ptrdiff_t whole = n & -(ptrdiff_t)STEP;
    UNROLLED for (int k = 0; k < N_VECS; k++) sum_d->v[k] = sum_wdy->v[k] = sum_wdy_d->v[k] = VEC_FILL((real)0);
    for (int k = 0; whole && k < N_VECS; k++) {
        vec s = VEC_FILL((real)0), t = s, p = s;
        for (ptrdiff_t i = 0; i < whole; i += STEP) vec_add_gradient_step(x, dy, w, i, 8, 0, k, h, centered, type, &s, &t, &p);
        sum_d->v[k] = s;
        sum_wdy->v[k] = t;
        sum_wdy_d->v[k] = p;
    }
#define ADD_REST(whole_groups, rest)               \
    UNROLLED for (int k = 0; k < N_VECS; k++)      \
        vec_add_gradient_step(x, dy, w, whole, whole_groups, rest, k, h, centered, type, &sum_d->v[k], &sum_wdy->v[k], &sum_wdy_d->v[k])
    if (whole < n) WITH_WHOLE_GROUPS(n - whole, ADD_REST(WHOLE, n & (LANES - 1)))
#undef ADD_REST
}

/* Past the cache. The address is a multiple of what is stored. */
INLINE void vec_stream_as(char *p, ptrdiff_t i, vec a, int type) {
    if (type == ST_REAL) { vec_stream((real *)p + i, a); return; }
#if defined(__AVX__) && !defined(__AVX512F__)
    /* Measured: bfloat16, which takes more instructions to convert, loses by it with AVX2. */
    if (type == ST_BFLOAT16) { vec_store_part_as(p, i, VEC_LANES, a, type); return; }
#endif
#if defined(__AVX__)
    vec_half t = bits16_of_vec(a, type);
  #if defined(__AVX512F__)
    _mm256_stream_si256((__m256i *)(p + i * 2), (__m256i)t);
  #else
    _mm_stream_si128((__m128i *)(p + i * 2), (__m128i)t);
  #endif
#else
    /* Eight bytes at a time are not worth it. */
    vec_store_part_as(p, i, VEC_LANES, a, type);
#endif
}

/* Values up to the next whole cache line. */
INLINE ptrdiff_t values_to_line(const char *p, int type) {
    return (-(intptr_t)p & 63) / SIZE_OF(type);
}

/* Of n values that start with a cache line, those in whole ones. A line of which a part is stored past the cache makes the
 * processor wait for memory: measured, 600 ns. */
INLINE ptrdiff_t whole_lines(ptrdiff_t n, int type) {
    return n & -(64 / SIZE_OF(type));
}

#endif
