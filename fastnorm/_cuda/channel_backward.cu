// Backward over channels, x seen as (outer, n_channels, inner), with x_hat = ((x - mean) - lo) * rstd:
//
//     dx = weight * rstd * (dy - c2 - x_hat * c1),  c1 = mean(dy * x_hat),  c2 = mean(dy)
//     dweight = sum of dy * x_hat, dbias = sum of dy
//
// The saved mean is rounded; lo, the mean of x - mean, makes up for that. In evaluation the statistics are constants:
// lo = c1 = c2 = 0. Three kernels: the sums of slices of the channels (or of chunks of columns, see channels.cuh),
// those of each channel, dx. In training x and dy are read twice; in evaluation dx needs no x.
//
// KERNEL_STORAGE      float16, bfloat16, float32, float64
#include "channels.cuh"
#include "gradients.cuh"
#include "numbers.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;
const int VALUES = pack<S>::VALUES, GROUP = 4;
typedef slice_sums<real> channel_part;

// What dx needs of a channel; k = rstd * c1.
struct channel_gradient {
    real mean, lo, rstd, k, c2, weight;
    __device__ real dx(real dy, real x) const { return fused(-((x - mean) - lo), k, dy - c2) * rstd * weight; }
    // In evaluation.
    __device__ real dx(real dy) const { return dy * rstd * weight; }
};

// IN dy, x, mean[n_channels]; OUT parts[n_channels, n_slices]. A block a slice. Strides in bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_runs_gradient_sums(const char* dy, index_t dy_outer_stride, index_t dy_channel_stride, const char* x,
                           index_t x_outer_stride, index_t x_channel_stride, const char* mean, char* parts,
                           index_t outer, index_t inner, index_t width) {
    team t = open_team(THREADS, shared_memory());
    slice_place place(outer, inner, VALUES);
    share_of_runs<S> mine(place, t);
    row_packs<S, PACKS, share_of_runs<S>> x_packs(mine), dy_packs(mine);
    read_runs(x_packs, x + place.channel * x_channel_stride, x_outer_stride, (int)width);
    read_runs(dy_packs, dy + place.channel * dy_channel_stride, dy_outer_stride, (int)width);
    real m = read_by_all<real>(mean + place.channel * sizeof(real), t.rank == 0), ones[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) ones[i] = 1;
    gradient_sums<true, real> sums;
#pragma unroll
    for (int k = 0; k < PACKS; k++) sums.add(x_packs[k], dy_packs[k], ones, m, mine.valid(k), k);
    total<real> all[3] = {sums.d.result(), sums.wdy.result(), sums.wdy_d.result()};
    over_team(all, t, total_of((real)0), add());
    if (t.rank == 0) {
        channel_part part = {all[0], all[1], all[2]};
        write(parts + (index_t)blockIdx.x * sizeof(part), part);
    }
}

// IN dy, x[outer, n_columns], mean[n_channels]; OUT parts[n_columns, n_chunks]. A block has some columns and a chunk of
// rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_columns_gradient_sums(const char* dy, index_t dy_stride, const char* x, index_t x_stride, const char* mean,
                              char* parts, index_t outer, index_t n_columns, index_t inner, index_t rows_of_chunk,
                              index_t n_chunks, index_t across, index_t width) {
    share_of_columns<S> mine(outer, n_columns, inner, rows_of_chunk, (int)across);
    real m[VALUES];
    total<real> own[3][VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        m[i] = 0;
        if (i < mine.n) m[i] = read_by_all<real>(mean + mine.channel(mine.first + i) * sizeof(real), mine.level == 0);
        own[0][i] = own[1][i] = own[2][i] = total_of((real)0);
    }
    for (index_t row = mine.begin; row < mine.end; row += GROUP * mine.down) {
        pack<S> x_group[GROUP], dy_group[GROUP];
        read_group(x_group, mine, x, x_stride, row, (int)width);
        read_group(dy_group, mine, dy, dy_stride, row, (int)width);
        int left = mine.left<GROUP>(row);
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            real d[GROUP], g[GROUP];
#pragma unroll
            for (int j = 0; j < GROUP; j++) {
                d[j] = x_group[j].get(i) - (j < left ? m[i] : (real)0);
                g[j] = dy_group[j].get(i);
            }
            own[0][i] = added(own[0][i], total_of(pairwise(d)));
            own[1][i] = added(own[1][i], total_of(pairwise(g)));
            own[2][i] = added(own[2][i], total_of(pairwise_products(g, d)));
        }
    }
    // Over the levels of the block one kind after another, so that 48 KiB are enough for any type.
    int count = mine.count();
    total<real>* sums = reinterpret_cast<total<real>*>(shared_memory());
#pragma unroll
    for (int which = 0; which < 3; which++) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) sums[mine.level * count + mine.at * VALUES + i] = own[which][i];
        __syncthreads();
        for (int c = threadIdx.x; c < count; c += THREADS) {
            if (mine.column(c) >= n_columns) continue;
            total<real> s = sums[c];
            for (int level = 1; level < mine.down; level++) s = added(s, sums[level * count + c]);
            write(parts + (mine.column(c) * n_chunks + mine.chunk) * sizeof(channel_part) + which * sizeof(s), s);
        }
        __syncthreads();
    }
}

// IN parts[n_channels, n_parts], mean, rstd, weight; OUT gradients[n_channels], dweight, dbias. Without parts, in
// evaluation, no sums are wanted; weight may be null. n_values: of a channel. A team of threads a channel.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_gradient_settle(const char* parts, index_t n_parts, index_t n_values, NUMBERS(weight), const char* mean,
                        const char* rstd, char* gradients, char* dweight, char* dbias, index_t type, index_t item_size,
                        index_t n_channels, index_t training, index_t team_size) {
    team t = open_team((int)team_size, shared_memory());
    index_t c = (index_t)blockIdx.x * (THREADS / t.size) + t.number;
    total<real> all[3] = {total_of((real)0), total_of((real)0), total_of((real)0)};
    if (parts) put_together(all, parts + c * n_parts * sizeof(channel_part), c < n_channels ? n_parts : 0, t);
    if (t.rank > 0 || c >= n_channels) return;
    divisor<real> n(n_values);
    gradient_row<real> r = {read<real>(mean + c * sizeof(real)), read<real>(rstd + c * sizeof(real)), 0, 0, 0};
    double lo = 0;
    if (training) {
        lo = n.divide(all[0].value());
        gradient_sums<true, real>::settle_from(r, all[0], all[1], all[2], n);
    }
    numbers weights = NUMBERS_OF(weight);
    channel_gradient gradient = {r.mean, r.lo, training ? r.rstd : at_most_largest(r.rstd), r.k, r.c2, weight ? (real)weights.get(c) : (real)1};
    write(gradients + c * sizeof(gradient), gradient);
    if (dweight) write_float(dweight + c * item_size, (int)type, r.rstd * (all[2].value() - lo * all[1].value()));
    if (dbias) write_float(dbias + c * item_size, (int)type, all[1].value());
}

// IN dy, x, gradients[n_channels]; OUT dx, which may be dy or x. A block a slice. In evaluation x is null.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_runs_gradient_apply(const char* dy, index_t dy_outer_stride, index_t dy_channel_stride, const char* x,
                            index_t x_outer_stride, index_t x_channel_stride, const char* gradients, char* dx,
                            index_t dx_outer_stride, index_t dx_channel_stride, index_t outer, index_t inner,
                            index_t width) {
    team t = open_team(THREADS, shared_memory());
    slice_place place(outer, inner, VALUES);
    share_of_runs<S> mine(place, t);
    row_packs<S, PACKS, share_of_runs<S>> x_packs(mine), dy_packs(mine);
    if (x) read_runs(x_packs, x + place.channel * x_channel_stride, x_outer_stride, (int)width);
    read_runs(dy_packs, dy + place.channel * dy_channel_stride, dy_outer_stride, (int)width);
    channel_gradient r = read_by_all<channel_gradient>(gradients + place.channel * sizeof(r), t.rank == 0);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (mine.valid(k) == 0) continue;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            real g = dy_packs[k].get(i);
            dy_packs[k].set(i, x ? r.dx(g, x_packs[k].get(i)) : r.dx(g));
        }
        write_pack<S>(dx + place.channel * dx_channel_stride + mine.offset(k, dx_outer_stride), dy_packs[k],
                      mine.valid(k), (int)width);
    }
}

// IN dy, x[outer, n_columns], gradients[n_channels]; OUT dx[outer, n_columns], which may be dy or x. Blocks as in
// channel_columns_gradient_sums. In evaluation x is null.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_columns_gradient_apply(const char* dy, index_t dy_stride, const char* x, index_t x_stride,
                               const char* gradients, char* dx, index_t dx_stride, index_t outer, index_t n_columns,
                               index_t inner, index_t rows_of_chunk, index_t across, index_t width) {
    share_of_columns<S> mine(outer, n_columns, inner, rows_of_chunk, (int)across);
    channel_gradient r[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        r[i] = channel_gradient();
        if (i < mine.n)
            r[i] = read_by_all<channel_gradient>(gradients + mine.channel(mine.first + i) * sizeof(r[i]),
                                                 mine.level == 0);
    }
    for (index_t row = mine.begin; row < mine.end; row += GROUP * mine.down) {
        pack<S> x_group[GROUP], dy_group[GROUP];
        if (x) read_group(x_group, mine, x, x_stride, row, (int)width);
        read_group(dy_group, mine, dy, dy_stride, row, (int)width);
#pragma unroll
        for (int j = 0; j < GROUP; j++)
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                real g = dy_group[j].get(i);
                dy_group[j].set(i, x ? r[i].dx(g, x_group[j].get(i)) : r[i].dx(g));
            }
        write_group(dx, dy_group, mine, dx_stride, row, (int)width);
    }
}
