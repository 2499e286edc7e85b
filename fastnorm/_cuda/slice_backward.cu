// Backward of rows of any length. Three kernels: the sums of each slice of THREADS * PACKS packs, those of each row,
// then dx and partial sums for dweight and dbias, where a block keeps THREADS packs of columns for all its rows.
// x and dy are read twice, dh once.
//
// KERNEL_STORAGE, KERNEL_CENTERED, KERNEL_PACKS, KERNEL_THREADS as in row_forward.cu
#include "gradients.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;
const bool CENTERED = KERNEL_CENTERED;
const int PACKS = KERNEL_PACKS, THREADS = KERNEL_THREADS;

const int VALUES = pack<S>::VALUES, N_SUMS = CENTERED ? 2 : 1;
const index_t SLICE = (index_t)THREADS * PACKS * VALUES, COLUMNS = (index_t)THREADS * VALUES;

struct row_scale { real mean, rstd, lo, k, c2; };

__device__ inline index_t n_slices(index_t n_cols) { return (n_cols + SLICE - 1) / SLICE; }

// IN dy, x[n_rows, n_cols], weight[n_cols], mean[n_rows]; OUT slices[n_rows, n_slices]. A block a slice.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
slice_backward_sums(const char* dy, index_t dy_stride, const char* x, index_t x_stride, const char* weight,
                    index_t weight_is_narrow, double weight_offset, const char* mean, char* slices, index_t n_cols,
                    index_t width) {
    team t = open_team(THREADS, shared_memory());
    index_t row = blockIdx.x / n_slices(n_cols), first = blockIdx.x % n_slices(n_cols) * SLICE;
    index_t length = smaller(SLICE, n_cols - first);
    row_packs<S, PACKS> x_packs(length, t, 0), dy_packs(length, t, 0);
    read_packs(x_packs, x + row * x_stride + first * sizeof(S::bits), true, (int)width);
    read_packs(dy_packs, dy + row * dy_stride + first * sizeof(S::bits), true, (int)width);
    parameter_row<S> weights(weight, weight_is_narrow != 0, (real)weight_offset);
    real m = CENTERED ? read_by_all<real>(mean + row * sizeof(real), t.rank == 0) : (real)0;
    gradient_sums<CENTERED, real> sums;
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        real w[VALUES];
        read_weight<S>(w, weights, first + x_packs.first(k), x_packs.valid(k));
        sums.add(x_packs[k], dy_packs[k], w, m, x_packs.valid(k), k);
    }
    total<real> all[3] = {sums.d.result(), sums.wdy.result(), sums.wdy_d.result()};
    over_team(all, t, total_of((real)0), add());
    if (t.rank == 0) {
        slice_sums<real> s = {all[0], all[1], all[2]};
        write(slices + (index_t)blockIdx.x * sizeof(s), s);
    }
}

// IN slices[n_rows, n_slices], mean[n_rows], rstd[n_rows]; OUT rows[n_rows]. A block a row.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
slice_backward_settle(const char* slices, const char* mean, const char* rstd, char* rows, index_t n_cols) {
    team t = open_team(THREADS, shared_memory());
    index_t row = blockIdx.x, count = n_slices(n_cols);
    total<real> all[3];
    put_together(all, slices + row * count * sizeof(slice_sums<real>), count, t);
    gradient_row<real> r = {0, read_by_all<real>(rstd + row * sizeof(real), t.rank == 0), 0, 0, 0};
    if (CENTERED) r.mean = read_by_all<real>(mean + row * sizeof(real), t.rank == 0);
    gradient_sums<CENTERED, real>::settle_from(r, all[0], all[1], all[2], divisor<real>(n_cols));
    if (t.rank == 0) {
        row_scale s = {r.mean, r.rstd, r.lo, r.k, r.c2};
        write(rows + row * sizeof(s), s);
    }
}

// IN dy, dh, x[n_rows, n_cols], rows[n_rows], weight[n_cols]; OUT dx, dresidual[n_rows, n_cols],
// partials[n_chunks, N_SUMS, n_cols]. A block has one run of columns and one chunk of rows. dh, weight, dresidual and
// partials may be null; dx may be dy, dh or x.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
slice_backward_apply(const char* dy, index_t dy_stride, const char* dh, index_t dh_stride, const char* x, index_t x_stride,
                     const char* rows, const char* weight, index_t weight_is_narrow, double weight_offset, double alpha,
                     char* dx, index_t dx_stride, char* dresidual, index_t dresidual_stride, char* partials,
                     index_t n_rows, index_t n_cols, index_t rows_per_chunk, index_t width) {
    index_t n_runs = (n_cols + COLUMNS - 1) / COLUMNS, chunk = blockIdx.x / n_runs;
    index_t first = (blockIdx.x % n_runs * THREADS + threadIdx.x) * VALUES;
    index_t row = chunk * rows_per_chunk, end = smaller(row + rows_per_chunk, n_rows);
    int n = first < n_cols ? (int)smaller(n_cols - first, (index_t)VALUES) : 0;
    if (n == 0) return;
    index_t offset = first * sizeof(S::bits);
    real w[VALUES];
    read_weight<S>(w, parameter_row<S>(weight, weight_is_narrow != 0, (real)weight_offset), first, n);
    column_sum<real> weight_sums[VALUES] = {}, bias_sums[VALUES] = {};
    pack<S> next_x = read_pack<S>(x + row * x_stride + offset, n, (int)width);
    pack<S> next_dy = read_pack<S>(dy + row * dy_stride + offset, n, (int)width), next_dh;
    if (dh) next_dh = read_pack<S>(dh + row * dh_stride + offset, n, (int)width);
    for (; row < end; row++) {
        pack<S> x_pack = next_x, dy_pack = next_dy, dh_pack = next_dh;
        if (row + 1 < end) {
            next_x = read_pack<S>(x + (row + 1) * x_stride + offset, n, (int)width);
            next_dy = read_pack<S>(dy + (row + 1) * dy_stride + offset, n, (int)width);
            if (dh) next_dh = read_pack<S>(dh + (row + 1) * dh_stride + offset, n, (int)width);
        }
        row_scale s = read_by_all<row_scale>(rows + row * sizeof(s), threadIdx.x == 0);
        gradient_row<real> r = {s.mean, s.rstd, s.lo, s.k, s.c2};
        real terms[VALUES], values[VALUES];
        gradient_pack<CENTERED>(values, terms, x_pack, dy_pack, w, r);
        if (dh)
#pragma unroll
            for (int i = 0; i < VALUES; i++) values[i] += dh_pack.get(i);
        write_gradients<S>(dx + row * dx_stride + offset, dresidual ? dresidual + row * dresidual_stride + offset : 0,
                           values, (real)alpha, n, (int)width);
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            weight_sums[i].add(terms[i]);
            if (CENTERED) bias_sums[i].add(dy_pack.get(i));
        }
    }
    if (!partials) return;
    char* mine = partials + (chunk * N_SUMS * n_cols + first) * sizeof(real);
    real out[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) out[i] = (real)total_of(weight_sums[i]).value();
    write_partials<S>(mine, out, n);
    if (!CENTERED) return;
#pragma unroll
    for (int i = 0; i < VALUES; i++) out[i] = (real)total_of(bias_sums[i]).value();
    write_partials<S>(mine + n_cols * sizeof(real), out, n);
}
