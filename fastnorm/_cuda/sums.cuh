// Sums over a row, and from sums to statistics. The threads of a row are a power of two up to 32 lanes of a
// warp, or whole warps. Which thread adds what depends on n_cols alone: a row has the same bits in any batch.
#pragma once
#include "device.cuh"

// One part of a sum: a double, and where that is the arithmetic type itself, what additions rounded away.
template <class real> struct total;

template <> struct total<float> {
    double sum;
    __device__ double value() const { return sum; }
};

template <> struct total<double> {
    double sum, rest;
    // When sum + rest would be NaN although sum is infinite, sum alone says it.
    __device__ double value() const { return is_finite(sum) ? sum + rest : sum; }
};

__device__ inline total<float> total_of(float a) { total<float> t = {(double)a}; return t; }
__device__ inline total<double> total_of(double a) { total<double> t = {a, 0.0}; return t; }
__device__ inline total<float> added(total<float> a, total<float> b) { a.sum += b.sum; return a; }
__device__ inline float added(float a, float b) { return a + b; }
__device__ inline double added(double a, double b) { return a + b; }

// Knuth's TwoSum. The same whichever comes first, so that all lanes of a butterfly agree.
__device__ inline total<double> added(total<double> a, total<double> b) {
    double s = a.sum + b.sum, z = s - a.sum;
    total<double> t = {s, (a.rest + b.rest) + ((a.sum - (s - z)) + (b.sum - z))};
    return t;
}

__device__ inline float from_lane(float a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
__device__ inline double from_lane(double a, int mask) { return __shfl_xor_sync(0xffffffffu, a, mask); }
__device__ inline total<float> from_lane(total<float> a, int mask) {
    a.sum = from_lane(a.sum, mask);
    return a;
}
__device__ inline total<double> from_lane(total<double> a, int mask) {
    a.sum = from_lane(a.sum, mask);
    a.rest = from_lane(a.rest, mask);
    return a;
}

// The threads that share a row.
struct team {
    int size;           // a power of two up to 32, or a multiple of 32
    int rank;           // of this thread, 0 to size - 1
    int number;         // of the team in its block
    char* slots;        // shared memory of the team, SLOTS_BYTES; unused up to 32 threads
    int turn;           // which half of the slots is next: one barrier is enough for each sum
};

// What a warp leaves for the others: up to three totals of 16 bytes, twice.
const int SLOT_BYTES = 48, SLOTS_BYTES = 2 * 32 * SLOT_BYTES;

__device__ inline team open_team(int size, char* slots) {
    team t;
    t.size = size;
    t.rank = threadIdx.x % size;
    t.number = threadIdx.x / size;
    t.slots = slots + (size > 32 ? t.number * SLOTS_BYTES : 0);
    t.turn = 0;
    return t;
}

__device__ inline void wait(const team& t) {
    if (t.size > 32) barrier(t.number + 1, t.size);
}

struct add { template <class T> __device__ T operator()(T a, T b) const { return added(a, b); } };
// The larger one, NaN if there is one.
struct larger { template <class T> __device__ T operator()(T a, T b) const { return a >= b || !(a == a) ? a : b; } };

// Each of the N parts put together over the team; every thread has the result.
template <class Operation, class T, int N>
__device__ inline void over_team(T (&parts)[N], team& t, T nothing, Operation combine) {
    for (int mask = smaller(t.size, 32) / 2; mask > 0; mask /= 2)
        for (int i = 0; i < N; i++) parts[i] = combine(parts[i], from_lane(parts[i], mask));
    if (t.size <= 32) return;
    static_assert(N * sizeof(T) <= SLOT_BYTES, "a slot holds it");
    char* slots = t.slots + t.turn * 32 * SLOT_BYTES;
    t.turn ^= 1;
    int lane = t.rank % 32, n_warps = t.size / 32, top = 1;
    if (lane == 0)
        for (int i = 0; i < N; i++) reinterpret_cast<T*>(slots + t.rank / 32 * SLOT_BYTES)[i] = parts[i];
    wait(t);
    while (top < n_warps) top *= 2;
    // Every top lanes hold all parts, so that each ends with the whole.
    int from = lane & (top - 1);
    for (int i = 0; i < N; i++)
        parts[i] = from < n_warps ? reinterpret_cast<const T*>(slots + from * SLOT_BYTES)[i] : nothing;
    for (int mask = top / 2; mask > 0; mask /= 2)
        for (int i = 0; i < N; i++) parts[i] = combine(parts[i], from_lane(parts[i], mask));
}

// A sum within a thread: in the arithmetic type over a few packs at a time, then as a total.
template <class real>
struct running_sum {
    // Few enough additions in float that their rounding stays below the last place of the result.
    static const int FLUSH = sizeof(real) == 4 ? 4 : 1;
    real part;
    total<real> sum;
    __device__ running_sum() : part(0), sum(total_of((real)0)) {}
    // a belongs to pack k of this thread.
    __device__ void add(real a, int k) {
        part += a;
        if (k % FLUSH == FLUSH - 1) flush();
    }
    __device__ void flush() {
        sum = added(sum, total_of(part));
        part = 0;
    }
    __device__ total<real> result() {
        flush();
        return sum;
    }
};

// Values in pairs, then pairs of pairs: the shortest chain of roundings.
template <class real, int N>
__device__ inline real pairwise(const real (&a)[N]) {
    real s[N];
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = a[i];
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int i = 0; i + step < N; i += 2 * step) s[i] += s[i + step];
    return s[0];
}

template <class real, int N>
__device__ inline real pairwise_products(const real (&a)[N], const real (&b)[N]) {
    real s[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) s[i] = fused(a[2 * i], b[2 * i], a[2 * i + 1] * b[2 * i + 1]);
    return pairwise(s);
}

// What a number of columns is good for: divisions by it without dividing, where float is the arithmetic type
// (double divisions are slow on most GPUs).
template <class real> struct divisor;

template <> struct divisor<float> {
    double n, inverse;
    __device__ explicit divisor(index_t count) : n((double)count) {
        double guess = 1.0f / (float)count;
        inverse = guess * (2.0 - n * guess);
    }
    // Rounded as a division is: what divides exactly, as sums of equal values do, comes out exact.
    __device__ double divide(double a) const {
        double q = a * inverse;
        return is_finite(q) ? fused(fused(-q, n, a), inverse, q) : q;
    }
};

template <> struct divisor<double> {
    double n;
    __device__ explicit divisor(index_t count) : n((double)count) {}
    __device__ double divide(double a) const { return a / n; }
};

// 1 / sqrt(a), good to more digits than real has.
__device__ inline double reciprocal_root(double a, float) {
    if (!(0x1p-120 < a && a < 0x1p120)) return 1.0 / sqrt(a);
    double r = rough_reciprocal_root((float)a);
    return fused(0.5 * r, fused(-a * r, r, 1.0), r);
}

// One Newton step with an exact residual makes it better than the two operations round.
__device__ inline double reciprocal_root(double a, double) {
    double r = 1.0 / sqrt(a);
    if (!(1e-100 < a && a < 1e100)) return r;
    double p = r * r, pe = fused(r, r, -p), q = a * p, qe = fused(a, p, -q);
    return r + 0.5 * r * (((1.0 - q) - qe) - a * pe);
}

// r * r * (a / n), likewise.
__device__ inline double scaled_mean(float r, double a, const divisor<float>& n) {
    return (double)r * r * n.divide(a);
}
__device__ inline double scaled_mean(double r, double a, const divisor<double>& n) {
    double q = n.divide(a), p = r * r, pe = fused(r, r, -p), te = fused(-q, n.n, a), k = p * q, ke = fused(p, q, -k);
    double better = k + (ke + p * (te / n.n) + pe * q);
    return is_finite(better) ? better : k;
}

// Mean squares plus eps below this may have lost bits to underflow; such rows are scaled and done again.
__device__ inline double tiny_square(float) { return 0x1p-100; }
__device__ inline double tiny_square(double) { return 0x1p-960; }

// 2^exponent, for normal numbers.
__device__ inline double power_of_two(int exponent) { return bits_of<double>((uint64)(exponent + 1023) << 52); }

// A multiplication by 2^-exponent in two steps, each of them in range.
struct power {
    double first, second;
    __device__ explicit power(int exponent) {
        int half = -exponent / 2;
        first = power_of_two(half);
        second = power_of_two(-exponent - half);
    }
    __device__ double times(double a) const { return a * first * second; }
    __device__ double times_square(double a) const { return a * first * first * second * second; }
    __device__ double divide(double a) const { return a / first / second; }
};

// e with 2^(e - 1) <= a < 2^e; 0 for 0.
__device__ inline int exponent_of(double a) {
    if (a == 0) return 0;
    int more = 0;
    if (a < 0x1p-1022) {
        a *= 0x1p100;
        more = -100;
    }
    return (int)(bits_of<uint64>(a) >> 52 & 0x7ff) - 1022 + more;
}
