// Moments of slices, and from those the moments of the whole: of a row, or of a channel.
#pragma once
#include "statistics.cuh"

// One slice: about hi, times 2^exponent (its squares twice that). A slice of zeros has no exponent of its own.
struct slice_moments { double hi, lo, square, exponent; };
const double NO_EXPONENT = -4096;

// exponent, finite: as measure_in_range() has them.
template <class real>
__device__ inline slice_moments slice_of(const moments<real>& m, int exponent) {
    bool zeros = m.hi == 0 && m.square == 0;
    // hi alone says it when there is an infinity.
    slice_moments s = {m.hi, is_finite(m.hi) ? m.lo : 0, m.square, zeros ? NO_EXPONENT : (double)exponent};
    return s;
}

// A slice as the whole sees it: times 2^-exponent.
__device__ inline slice_moments rescaled(slice_moments s, double exponent) {
    if (s.exponent == exponent || s.exponent == NO_EXPONENT) return s;
    // Further apart than that, nothing is left of it.
    power scale((int)smaller(exponent - s.exponent, 2044.0));
    slice_moments r = {scale.times(s.hi), scale.times(s.lo), scale.times_square(s.square), exponent};
    return r;
}

// The moments of n values from those of their slices: slices.get(k) for k below slices.count, of slices.length(k)
// values. OUT whole_exponent: they are those of the values times 2^-whole_exponent.
template <bool CENTERED, class real, class Slices>
__device__ inline moments<real> put_together(const Slices& slices, team& t, const divisor<real>& n, int* whole_exponent) {
    // The largest exponent that a slice was scaled by, and the largest of what stands in any.
    double exponent[2] = {NO_EXPONENT, NO_EXPONENT};
    for (index_t k = t.rank; k < slices.count; k += t.size) {
        slice_moments s = slices.get(k);
        exponent[0] = larger()(exponent[0], s.exponent);
        double size = fabs(s.hi) + fabs(s.lo) + sqrt(s.square);
        if (s.exponent != NO_EXPONENT && is_finite(size))
            exponent[1] = larger()(exponent[1], s.exponent + exponent_of(size));
    }
    over_team(exponent, t, NO_EXPONENT, larger());
    if (exponent[0] == NO_EXPONENT) exponent[0] = 0;
    // Each slice may be in range and the sums over all of them not.
    if (exponent[1] > 480) exponent[0] = exponent[1];
    *whole_exponent = (int)exponent[0];

    moments<real> m = {0, 0, 0};
    if (CENTERED) {
        double sum[1] = {0};
        for (index_t k = t.rank; k < slices.count; k += t.size) {
            slice_moments s = rescaled(slices.get(k), exponent[0]);
            sum[0] += (s.hi + s.lo) * slices.length(k);
        }
        over_team(sum, t, 0.0, add());
        m.hi = (real)n.divide(sum[0]);
    }
    // Both as sums of doubles with what they round away.
    total<double> sums[2] = {total_of(0.0), total_of(0.0)};
    for (index_t k = t.rank; k < slices.count; k += t.size) {
        slice_moments s = rescaled(slices.get(k), exponent[0]);
        double length = slices.length(k), d = (s.hi - m.hi) + s.lo, variance = s.square - s.lo * s.lo;
        sums[0] = added(sums[0], total_of(d * length));
        sums[1] = added(sums[1], total_of(((variance < 0 ? 0 : variance) + d * d) * length));
    }
    over_team(sums, t, total_of(0.0), add());
    m.lo = CENTERED ? n.divide(sums[0].value()) : 0;
    m.square = n.divide(sums[1].value());
    return m;
}
