// The parts of backward, with wdy = dy * weight and x_hat = ((x - mean) - lo) * rstd:
//
//     dx = rstd * (wdy - c2 - x_hat * c1),  c1 = mean(wdy * x_hat),  c2 = mean(wdy)
//     dweight = sum of dy * x_hat over rows, dbias = sum of dy
//
// With a gradient dh that arrives at x from elsewhere it is added to dx, and dresidual is alpha times that.
// The saved mean is rounded; lo, the mean of x - mean, makes up for that. rms_norm: mean = lo = c2 = 0.
#pragma once
#include "packs.cuh"

template <class real>
struct gradient_row {
    real mean, rstd, lo, k, c2;      // k = rstd * c1
};

// The sums of d = x - mean, wdy and wdy * d over the packs of a thread; without CENTERED only the last.
template <bool CENTERED, class real>
struct gradient_sums {
    running_sum<real> d, wdy, wdy_d;

    template <class S>
    __device__ void add(const pack<S>& x, const pack<S>& dy, const real (&w)[pack<S>::VALUES], real mean, int n, int k) {
        const int VALUES = pack<S>::VALUES;
        real a[VALUES], g[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            a[i] = x.get(i) - (CENTERED && i < n ? mean : (real)0);
            g[i] = dy.get(i) * w[i];
        }
        if (CENTERED) {
            d.add(pairwise(a), k);
            wdy.add(pairwise(g), k);
        }
        wdy_d.add(pairwise_products(g, a), k);
    }

    // Over all threads of the row.
    __device__ void settle(gradient_row<real>& r, team& t, const divisor<real>& n) {
        if (CENTERED) {
            total<real> sums[3] = {d.result(), wdy.result(), wdy_d.result()};
            over_team(sums, t, total_of((real)0), ::add());
            settle_from(r, sums[0], sums[1], sums[2], n);
        } else {
            total<real> sums[1] = {wdy_d.result()};
            over_team(sums, t, total_of((real)0), ::add());
            settle_from(r, total_of((real)0), total_of((real)0), sums[0], n);
        }
    }

    static __device__ void settle_from(gradient_row<real>& r, total<real> d, total<real> wdy, total<real> wdy_d,
                                       const divisor<real>& n) {
        double lo = n.divide(d.value());
        r.lo = (real)lo;
        r.c2 = (real)n.divide(wdy.value());
        // rstd * c1, to be multiplied by x - mean: a rounding less than x_hat * c1.
        r.k = (real)scaled_mean(r.rstd, wdy_d.value() - lo * wdy.value(), n);
    }
};

// The sums of one slice, and those of count slices put together by a team in a fixed order. OUT all
template <class real>
struct slice_sums { total<real> d, wdy, wdy_d; };

template <class real>
__device__ inline void put_together(total<real> (&all)[3], const char* slices, index_t count, team& t) {
    for (int i = 0; i < 3; i++) all[i] = total_of((real)0);
    for (index_t k = t.rank; k < count; k += t.size) {
        slice_sums<real> s = read<slice_sums<real>>(slices + k * sizeof(s));
        all[0] = added(all[0], s.d);
        all[1] = added(all[1], s.wdy);
        all[2] = added(all[2], s.wdy_d);
    }
    over_team(all, t, total_of((real)0), add());
}

// A sum over rows and what its additions rounded away, so that any number of rows may be added up.
template <class real>
struct column_sum {
    real sum, rest;
    __device__ void add(real a) {
        real s = sum + a, z = s - sum;
        rest += (sum - (s - z)) + (a - z);
        sum = s;
    }
};

__device__ inline total<float> total_of(column_sum<float> a) {
    total<float> t = {is_finite(a.sum) ? (double)a.sum + (double)a.rest : (double)a.sum};
    return t;
}
__device__ inline total<double> total_of(column_sum<double> a) {
    total<double> t = {a.sum, a.rest};
    return t;
}

// dx of one pack before it is rounded, and what its columns add to dweight. OUT dx, weight_terms
template <bool CENTERED, class S>
__device__ inline void gradient_pack(typename S::real (&dx)[pack<S>::VALUES],
                                     typename S::real (&weight_terms)[pack<S>::VALUES], const pack<S>& x,
                                     const pack<S>& dy, const typename S::real (&w)[pack<S>::VALUES],
                                     const gradient_row<typename S::real>& r) {
    typedef typename S::real real;
#pragma unroll
    for (int i = 0; i < pack<S>::VALUES; i++) {
        real g = dy.get(i), d = x.get(i), wdy = g * w[i];
        if (CENTERED) {
            d = (d - r.mean) - r.lo;
            wdy -= r.c2;
        }
        weight_terms[i] = g * (d * r.rstd);
        dx[i] = fused(-d, r.k, wdy) * r.rstd;
    }
}

// n values of dx, and of dresidual if there is one: alpha times what has not been rounded to storage yet.
template <class S>
__device__ inline void write_gradients(char* dx, char* dresidual, const typename S::real (&a)[pack<S>::VALUES],
                                       typename S::real alpha, int n, int width) {
    pack<S> out;
#pragma unroll
    for (int i = 0; i < pack<S>::VALUES; i++) out.set(i, a[i]);
    write_pack(dx, out, n, width);
    if (!dresidual) return;
#pragma unroll
    for (int i = 0; i < pack<S>::VALUES; i++) out.set(i, alpha * a[i]);
    write_pack(dresidual, out, n, width);
}

// weight as both sweeps need it: ones if there is none. OUT w
template <class S>
__device__ inline void read_weight(typename S::real (&w)[pack<S>::VALUES], const parameter_row<S>& weight, index_t first,
                                   int n) {
#pragma unroll
    for (int i = 0; i < pack<S>::VALUES; i++) w[i] = 1;
    if (weight.data && n > 0) weight.read(w, first, n);
}

// n values of a row of partial sums. Their address is a multiple of the size of real.
template <class S>
__device__ inline void write_partials(char* p, const typename S::real (&a)[pack<S>::VALUES], int n) {
    typedef typename S::real real;
    typedef typename stored<real>::type wide;
    const int PART = pack<wide>::VALUES;
#pragma unroll
    for (int k = 0; k < pack<S>::VALUES; k += PART) {
        pack<wide> part;
#pragma unroll
        for (int i = 0; i < PART; i++) part.set(i, a[k + i]);
        if (n > k) write_pack<wide>(p + k * sizeof(real), part, n - k, width_of<real>(p));
    }
}
