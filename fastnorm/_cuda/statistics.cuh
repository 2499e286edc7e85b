// The statistics of a row: two passes over what is in registers, the mean to twice the precision.
//
//     hi   near the mean         d = x - hi
//     lo   mean(d)               var = mean(d * d) - lo * lo
//
// hi is a plain sum over n. Where it lies far from the mean for all that (the mean is 1e7 times the spread),
// it becomes hi + lo and the pass is done again. rms_norm: hi = lo = 0. Never mean(x * x) - mean(x)^2.
#pragma once
#include "packs.cuh"

template <class real>
struct moments {
    real hi;
    double lo, square;      // mean(d), mean(d * d)
    __device__ double variance() const {
        double v = square - lo * lo;
        return v < 0 ? 0 : v;
    }
};

template <bool CENTERED, class S, int PACKS, class SHARE>
__device__ inline moments<typename S::real> measure(const row_packs<S, PACKS, SHARE>& x, team& t,
                                                    const divisor<typename S::real>& n) {
    typedef typename S::real real;
    const int VALUES = pack<S>::VALUES;
    moments<real> m = {0, 0, 0};
    if (CENTERED) {
        real sum[1] = {0};
#pragma unroll
        for (int k = 0; k < x.count(); k++) {
            // What lies beyond the row was read as zero.
            real v[VALUES];
#pragma unroll
            for (int i = 0; i < VALUES; i++) v[i] = x[k].get(i);
            sum[0] += pairwise(v);
        }
        over_team(sum, t, (real)0, add());
        m.hi = sum[0] / (real)n.n;
    }
    for (bool first = true;; first = false) {
        running_sum<real> d, dd;
#pragma unroll
        for (int k = 0; k < x.count(); k++) {
            int n_valid = x.valid(k);
            real v[VALUES];
#pragma unroll
            for (int i = 0; i < VALUES; i++) v[i] = x[k].get(i) - (CENTERED && i < n_valid ? m.hi : (real)0);
            if (CENTERED) d.add(pairwise(v), k);
            dd.add(pairwise_products(v, v), k);
        }
        if (!CENTERED) {
            total<real> sums[1] = {dd.result()};
            over_team(sums, t, total_of((real)0), add());
            m.square = n.divide(sums[0].value());
            return m;
        }
        total<real> sums[2] = {d.result(), dd.result()};
        over_team(sums, t, total_of((real)0), add());
        m.lo = n.divide(sums[0].value());
        m.square = n.divide(sums[1].value());
        bool again = first && m.lo * m.lo > 0.25 * m.square && is_finite(m.square);
        // All lanes keep step; a row that is done gets the same numbers once more.
        if (!any_lane(again)) return m;
        if (again) m.hi = (real)(m.hi + m.lo);
    }
}

// Whether squares have left the range of real.
template <class real>
__device__ inline bool out_of_range(double variance_and_eps) {
    return !(tiny_square((real)0) <= variance_and_eps && is_finite(variance_and_eps));
}

// The power of two that brings a row whose squares left the range back into it; finite: whether the row is.
template <class S, int PACKS, class SHARE>
__device__ inline int exponent_of_row(const row_packs<S, PACKS, SHARE>& x, team& t, double eps, bool* finite) {
    typedef typename S::real real;
    real largest[1] = {0};
#pragma unroll
    for (int k = 0; k < x.count(); k++)
        for (int i = 0; i < pack<S>::VALUES; i++) {
            real a = x[k].get(i);
            largest[0] = larger()(largest[0], a < 0 ? -a : a);
        }
    over_team(largest, t, (real)0, larger());
    *finite = is_finite(largest[0]);
    // Squares of float16 numbers are in range whatever they are.
    if (!*finite || S::TYPE == FLOAT16) return 0;
    double root = sqrt(eps);
    return exponent_of(largest[0] > root ? (double)largest[0] : root);
}

// x * 2^-exponent, where it stands.
template <class S, int PACKS, class SHARE>
__device__ inline void scale_packs(row_packs<S, PACKS, SHARE>& x, int exponent) {
    if (exponent == 0) return;
    power scale(exponent);
#pragma unroll
    for (int k = 0; k < x.count(); k++)
#pragma unroll
        for (int i = 0; i < pack<S>::VALUES; i++) x[k].set(i, (typename S::real)scale.times(x[k].get(i)));
}

// What y needs of a row.
template <class real>
struct scale_of_row {
    real hi, lo, rstd;
    double saved_mean, saved_rstd;
};

template <class real>
__device__ inline scale_of_row<real> settle(const moments<real>& m, double eps, int exponent, bool finite) {
    scale_of_row<real> s;
    power scale(exponent);
    double variance = m.variance(), rstd = reciprocal_root(variance + scale.times_square(eps), (real)0);
    s.hi = m.hi;
    s.lo = (real)m.lo;
    // A constant row with eps = 0: x_hat is zero, not 0 * inf.
    s.rstd = finite && !is_finite((real)rstd) ? (real)0 : (real)rstd;
    // The mean of a row with an infinity is that infinity.
    s.saved_mean = finite ? scale.divide(m.hi + m.lo) : (double)m.hi;
    // A constant row again: eps alone counts, and may not survive being scaled.
    s.saved_rstd = variance == 0 ? reciprocal_root(eps, (real)0) : scale.times(rstd);
    return s;
}

// The moments of x about its centre. Where squares leave the range of real, x is multiplied in place by the power of
// two that brings them back. OUT exponent: x is what it was times 2^-exponent; finite: whether all of it is.
template <bool CENTERED, class S, int PACKS, class SHARE>
__device__ inline moments<typename S::real> measure_in_range(row_packs<S, PACKS, SHARE>& x, team& t,
                                                             const divisor<typename S::real>& n, double eps,
                                                             int* exponent, bool* finite) {
    typedef typename S::real real;
    *exponent = 0;
    *finite = true;
    for (bool first = true;; first = false) {
        moments<real> m = measure<CENTERED>(x, t, n);
        bool lost = first && out_of_range<real>(m.variance() + eps);
        // All lanes keep step, here and in measure(); a row that is in range gets the same numbers once more.
        if (!any_lane(lost)) return m;
        bool all_finite;
        int e = exponent_of_row(x, t, eps, &all_finite);
        if (lost) {
            *exponent = e;
            *finite = all_finite;
            scale_packs(x, e);
        }
    }
}
