// y from the statistics of a row.
#pragma once
#include "statistics.cuh"

// The packs of a thread; first_column: where in the row they begin, y: there too.
template <bool CENTERED, class S, int PACKS>
__device__ inline void apply(const row_packs<S, PACKS>& x, const scale_of_row<typename S::real>& s, char* y,
                             const parameter_row<S>& weight, const parameter_row<S>& bias, index_t first_column, int width) {
    typedef typename S::real real;
    const int VALUES = pack<S>::VALUES;
#pragma unroll
    for (int k = 0; k < x.count(); k++) {
        int n = x.valid(k);
        if (n == 0) continue;
        real w[VALUES], b[VALUES];
        if (weight.data) weight.read(w, first_column + x.first(k), n);
        if (bias.data) bias.read(b, first_column + x.first(k), n);
        pack<S> out;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            real a = x[k].get(i);
            if (CENTERED) a = (a - s.hi) - s.lo;
            a *= s.rstd;
            if (weight.data && bias.data)
                a = fused(a, w[i], b[i]);
            else if (weight.data)
                a *= w[i];
            else if (bias.data)
                a += b[i];
            out.set(i, a);
        }
        write_pack(y + x.first(k) * sizeof(typename S::bits), out, n, width);
    }
}
