// Forward over channels, x seen as (outer, n_channels, inner):
//
//     y = ((x - hi) - lo) * rstd * weight + bias
//
// In training three kernels: the moments of slices of the channels (or of chunks of columns, see channels.cuh), the
// statistics of each channel from those, y. x is read twice. In evaluation two: the statistics are those that come in.
//
// KERNEL_STORAGE      float16, bfloat16, float32, float64
#include "channels.cuh"
#include "numbers.cuh"
#include "slices.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;
// Rows of columns that a thread has at a time: for the sums, and for y, which needs more numbers of each column.
const int VALUES = pack<S>::VALUES, GROUP = 8, APPLIED = 4;

// The moments of a part of a channel, and how many values that has.
struct channel_part { slice_moments moments; double length; };

// What y needs of a channel; hi, lo and rstd belong to x * 2^-exponent.
struct channel_scale {
    real hi, lo, rstd, weight, bias, exponent;
    __device__ real y(real x) const { return fused(((x - hi) - lo) * rstd, weight, bias); }
};

// IN x; OUT parts[n_channels, n_slices]. A block a slice. Strides in bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_runs_sums(const char* x, index_t outer_stride, index_t channel_stride, double eps, char* parts, index_t outer,
                  index_t inner, index_t width) {
    team t = open_team(THREADS, shared_memory());
    slice_place place(outer, inner, VALUES);
    row_packs<S, PACKS, share_of_runs<S>> packs(share_of_runs<S>(place, t));
    read_runs(packs, x + place.channel * channel_stride, outer_stride, (int)width);
    index_t length = place.length(VALUES);
    int exponent;
    bool finite;
    moments<real> m = measure_in_range<true>(packs, t, divisor<real>(length), eps, &exponent, &finite);
    if (t.rank == 0) {
        channel_part part = {slice_of(m, exponent), (double)length};
        write(parts + (index_t)blockIdx.x * sizeof(part), part);
    }
}

// Value i of each pack of a group times 2^-exponent, where it stands.
template <int N>
__device__ inline void scale_group(pack<S> (&group)[N], int i, int exponent) {
    power scale(exponent);
#pragma unroll
    for (int j = 0; j < N; j++) group[j].set(i, (real)scale.times(group[j].get(i)));
}

// The columns of a block while it sums them up. hi, exponents and sums are in shared memory.
struct column_block {
    share_of_columns<S> mine;
    const char* x;
    index_t stride;
    int width, count;
    real* hi;
    int* exponents;
    total<real>* sums;      // [2][down][count]

    __device__ column_block(const share_of_columns<S>& mine_, const char* x_, index_t stride_, int width_, char* memory)
        : mine(mine_), x(x_), stride(stride_), width(width_), count(mine_.count()) {
        hi = reinterpret_cast<real*>(memory);
        exponents = reinterpret_cast<int*>(hi + count);
        sums = reinterpret_cast<total<real>*>(exponents + count);
    }
    __device__ total<real>& sum(int which, int level, int c) const {
        return sums[(which * mine.down + level) * count + c];
    }
    __device__ int own(int i) const { return mine.at * VALUES + i; }
    __device__ total<real> over_levels(int which, int c) const {
        total<real> s = sum(which, 0, c);
        for (int level = 1; level < mine.down; level++) s = added(s, sum(which, level, c));
        return s;
    }
    __device__ double rows() const { return (double)(mine.end - mine.begin); }

    // hi of each column: the mean of the first rows of the block
    __device__ void find_hi(const pack<S> (&group)[GROUP]) const {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            real v[GROUP];
#pragma unroll
            for (int j = 0; j < GROUP; j++) v[j] = group[j].get(i);
            sum(0, mine.level, own(i)) = total_of(pairwise(v));
        }
        __syncthreads();
        double n = (double)smaller(mine.end - mine.begin, (index_t)GROUP * mine.down);
        for (int c = threadIdx.x; c < count; c += THREADS) hi[c] = (real)(over_levels(0, c).value() / n);
        __syncthreads();
    }

    // The sums of d = x - hi and its squares over the rows of each thread. find: hi, too. scaled: of x * 2^-exponents.
    __device__ void sweep(bool find, bool scaled) const {
        real own_hi[VALUES];
        total<real> d_sum[VALUES], dd_sum[VALUES];
#pragma unroll
        for (int i = 0; i < VALUES; i++) d_sum[i] = dd_sum[i] = total_of((real)0);
        for (index_t row = mine.begin; row < mine.end; row += GROUP * mine.down) {
            pack<S> group[GROUP];
            read_group(group, mine, x, stride, row, width);
            if (scaled)
#pragma unroll
                for (int i = 0; i < VALUES; i++) scale_group(group, i, exponents[own(i)]);
            if (row == mine.begin) {
                if (find) find_hi(group);
#pragma unroll
                for (int i = 0; i < VALUES; i++) own_hi[i] = hi[own(i)];
            }
            int left = mine.left<GROUP>(row);
#pragma unroll
            for (int i = 0; i < VALUES; i++) {
                real d[GROUP];
#pragma unroll
                for (int j = 0; j < GROUP; j++) d[j] = group[j].get(i) - (j < left ? own_hi[i] : (real)0);
                d_sum[i] = added(d_sum[i], total_of(pairwise(d)));
                dd_sum[i] = added(dd_sum[i], total_of(pairwise_products(d, d)));
            }
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
            sum(0, mine.level, own(i)) = d_sum[i];
            sum(1, mine.level, own(i)) = dd_sum[i];
        }
        __syncthreads();
    }

    __device__ moments<real> moments_of(int c) const {
        moments<real> m = {hi[c], over_levels(0, c).value() / rows(), over_levels(1, c).value() / rows()};
        return m;
    }

    // As measure() does it: where hi lies far from the mean, once more about a better one.
    __device__ void measure_columns(team& t, bool scaled) const {
        for (bool first = true;; first = false) {
            sweep(first, scaled);
            real again[1] = {0};
            for (int c = threadIdx.x; first && c < count; c += THREADS) {
                moments<real> m = moments_of(c);
                if (m.lo * m.lo > 0.25 * m.square && is_finite(m.square)) {
                    hi[c] = (real)(m.hi + m.lo);
                    again[0] = 1;
                }
            }
            over_team(again, t, (real)0, larger());
            if (again[0] == 0) return;
        }
    }

    // Whether squares of a column left the range: then 2^exponents brings it back, as exponent_of_row() has it.
    __device__ bool find_exponents(team& t, double eps) const {
        real lost[1] = {0};
        for (int c = threadIdx.x; c < count; c += THREADS) {
            exponents[c] = out_of_range<real>(moments_of(c).variance() + eps);
            if (exponents[c]) lost[0] = 1;
        }
        over_team(lost, t, (real)0, larger());
        if (lost[0] == 0) return false;
        real largest[VALUES] = {};
        for (index_t row = mine.begin + mine.level; row < mine.end; row += mine.down) {
            const char* p = x + row * stride + mine.first * sizeof(S::bits);
            pack<S> a = mine.n > 0 ? read_pack<S>(p, mine.n, width) : pack<S>();
#pragma unroll
            for (int i = 0; i < VALUES; i++) largest[i] = larger()(largest[i], a.get(i) < 0 ? -a.get(i) : a.get(i));
        }
#pragma unroll
        for (int i = 0; i < VALUES; i++) sum(0, mine.level, own(i)) = total_of(largest[i]);
        __syncthreads();
        double root = sqrt(eps);
        for (int c = threadIdx.x; c < count; c += THREADS) {
            double most = 0;
            for (int level = 0; level < mine.down; level++) most = larger()(most, sum(0, level, c).sum);
            bool scale = exponents[c] && is_finite(most) && S::TYPE != FLOAT16;
            exponents[c] = scale ? exponent_of(most > root ? most : root) : 0;
        }
        __syncthreads();
        return true;
    }
};

// IN x[outer, n_columns]; OUT parts[n_columns, n_chunks]. A block has some columns and a chunk of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_columns_sums(const char* x, index_t stride, double eps, char* parts, index_t outer, index_t n_columns,
                     index_t inner, index_t rows_of_chunk, index_t n_chunks, index_t across, index_t width) {
    team t = open_team(THREADS, shared_memory());
    share_of_columns<S> mine(outer, n_columns, inner, rows_of_chunk, (int)across);
    column_block block(mine, x, stride, (int)width, shared_memory() + SLOTS_BYTES);
    // Once more if squares left the range.
    bool scaled = false;
    while (true) {
        block.measure_columns(t, scaled);
        if (scaled || !block.find_exponents(t, eps)) break;
        scaled = true;
    }
    for (int c = threadIdx.x; c < block.count; c += THREADS) {
        if (mine.column(c) >= n_columns) continue;
        channel_part part = {slice_of(block.moments_of(c), scaled ? block.exponents[c] : 0), block.rows()};
        write(parts + (mine.column(c) * n_chunks + mine.chunk) * sizeof(part), part);
    }
}

struct parts_of_channel {
    const char* first;
    index_t count;
    __device__ const char* at(index_t k) const { return first + k * sizeof(channel_part); }
    __device__ slice_moments get(index_t k) const { return read<slice_moments>(at(k)); }
    __device__ double length(index_t k) const { return read<double>(at(k) + sizeof(slice_moments)); }
};

__device__ inline void leave_channel(index_t c, const scale_of_row<real>& s, int exponent, const numbers& weight,
                                     const numbers& bias, char* scales, char* mean, char* rstd) {
    channel_scale scale = {s.hi, s.lo, s.rstd, weight.data ? (real)weight.get(c) : (real)1,
                           bias.data ? (real)bias.get(c) : (real)0, (real)exponent};
    if (scales) write(scales + c * sizeof(scale), scale);
    if (mean) write<real>(mean + c * sizeof(real), (real)s.saved_mean);
    if (rstd) write<real>(rstd + c * sizeof(real), (real)s.saved_rstd);
}

// Without a new value, or the old one, where its weight is zero: that would make a NaN of an infinity.
__device__ inline void update(const numbers& running, index_t c, double momentum, double value) {
    if (momentum == 0) return;
    running.set(c, momentum == 1 ? value : (1 - momentum) * running.get(c) + momentum * value);
}

// IN parts[n_channels, n_parts], weight, bias; OUT scales[n_channels], mean, rstd; running_mean and running_var are
// updated. All but parts and scales may be null. n_values: of a channel. A team of threads a channel.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_settle(const char* parts, index_t n_parts, index_t n_values, double eps, NUMBERS(weight), NUMBERS(bias),
               NUMBERS(running_mean), NUMBERS(running_var), double momentum, char* scales, char* mean, char* rstd,
               index_t n_channels, index_t team_size) {
    team t = open_team((int)team_size, shared_memory());
    index_t c = (index_t)blockIdx.x * (THREADS / t.size) + t.number;
    parts_of_channel mine = {parts + c * n_parts * sizeof(channel_part), c < n_channels ? n_parts : 0};
    int exponent;
    moments<real> m = put_together<true>(mine, t, divisor<real>(n_values), &exponent);
    scale_of_row<real> s = settle(m, eps, exponent, is_finite(m.square));
    if (t.rank > 0 || c >= n_channels) return;
    leave_channel(c, s, exponent, NUMBERS_OF(weight), NUMBERS_OF(bias), scales, mean, rstd);
    if (!running_mean) return;
    // After weight and bias were read: they may be the same arrays.
    numbers means = NUMBERS_OF(running_mean), variances = NUMBERS_OF(running_var);
    power scale(exponent);
    // That of n - 1, with one rounding only that counts.
    double variance = scale.divide(scale.divide(m.variance()));
    variance += variance / ((double)n_values - 1);
    update(means, c, momentum, s.saved_mean);
    update(variances, c, momentum, variance);
}

// IN running_mean, running_var, weight, bias; OUT scales[n_channels], mean, rstd. A thread a channel. weight, bias and
// all outputs may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_evaluate(double eps, NUMBERS(weight), NUMBERS(bias), NUMBERS(running_mean), NUMBERS(running_var), char* scales,
                 char* mean, char* rstd, index_t n_channels) {
    index_t c = (index_t)blockIdx.x * THREADS + threadIdx.x;
    if (c >= n_channels) return;
    double m = NUMBERS_OF(running_mean).get(c), r = reciprocal_root(NUMBERS_OF(running_var).get(c) + eps, (real)0);
    // Where x - mean could leave the range, a quarter of both does not.
    int exponent = fabs(m) > (sizeof(real) == 4 ? 0x1p125 : 0x1p1021) ? 2 : 0;
    power scale(exponent);
    scale_of_row<real> s = {(real)scale.times(m), 0, at_most_largest((real)scale.divide(r)), m, r};
    if (is_finite(s.hi)) s.lo = (real)(scale.times(m) - s.hi);
    leave_channel(c, s, exponent, NUMBERS_OF(weight), NUMBERS_OF(bias), scales, mean, rstd);
}

// IN x, scales[n_channels]; OUT y, which may be x. A block a slice.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_runs_apply(const char* x, index_t x_outer_stride, index_t x_channel_stride, const char* scales, char* y,
                   index_t y_outer_stride, index_t y_channel_stride, index_t outer, index_t inner, index_t width) {
    team t = open_team(THREADS, shared_memory());
    slice_place place(outer, inner, VALUES);
    row_packs<S, PACKS, share_of_runs<S>> packs(share_of_runs<S>(place, t));
    read_runs(packs, x + place.channel * x_channel_stride, x_outer_stride, (int)width);
    channel_scale s = read_by_all<channel_scale>(scales + place.channel * sizeof(s), t.rank == 0);
    scale_packs(packs, (int)s.exponent);
#pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (packs.valid(k) == 0) continue;
#pragma unroll
        for (int i = 0; i < VALUES; i++) packs[k].set(i, s.y(packs[k].get(i)));
        write_pack<S>(y + place.channel * y_channel_stride + packs.offset(k, y_outer_stride), packs[k], packs.valid(k),
                      (int)width);
    }
}

__device__ inline channel_scale scale_of(const share_of_columns<S>& mine, const char* scales, int i) {
    return read_by_all<channel_scale>(scales + mine.channel(mine.first + i) * sizeof(channel_scale), mine.level == 0);
}

// IN x[outer, n_columns], scales[n_channels]; OUT y[outer, n_columns], which may be x. Blocks as in
// channel_columns_sums.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_columns_apply(const char* x, index_t x_stride, const char* scales, char* y, index_t y_stride, index_t outer,
                      index_t n_columns, index_t inner, index_t rows_of_chunk, index_t across, index_t width) {
    share_of_columns<S> mine(outer, n_columns, inner, rows_of_chunk, (int)across);
    channel_scale s[VALUES];
    bool scaled = false;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        s[i] = i < mine.n ? scale_of(mine, scales, i) : channel_scale();
        scaled |= s[i].exponent != 0;
    }
    for (index_t row = mine.begin; row < mine.end; row += APPLIED * mine.down) {
        pack<S> group[APPLIED];
        read_group(group, mine, x, x_stride, row, (int)width);
        // Rare enough to read the exponents again, which leaves more registers to the others.
        if (scaled)
#pragma unroll
            for (int i = 0; i < VALUES; i++)
                if (i < mine.n) scale_group(group, i, (int)scale_of(mine, scales, i).exponent);
#pragma unroll
        for (int j = 0; j < APPLIED; j++)
#pragma unroll
            for (int i = 0; i < VALUES; i++) group[j].set(i, s[i].y(group[j].get(i)));
        write_group(y, group, mine, y_stride, row, (int)width);
    }
}
