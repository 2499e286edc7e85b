// Backward of rows that fit into registers: dx, dresidual, and partial sums for dweight and dbias. x, dy and dh are read
// once.
// Each block goes through rows blockIdx, blockIdx + gridDim, ... with a team of threads a row; a thread keeps its
// columns, and with them its sums, for all of them. No atomics: each block leaves one row of partial sums.
//
// KERNEL_STORAGE, KERNEL_CENTERED, KERNEL_THREADS as in row_forward.cu
// KERNEL_PACKS        packs of x that a thread keeps in registers
// KERNEL_SHARED_SUMS  1: the sums over rows are in shared memory, where they do not fit into registers
#include "gradients.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;
const bool CENTERED = KERNEL_CENTERED;
const int PACKS = KERNEL_PACKS, THREADS = KERNEL_THREADS;
const bool SHARED_SUMS = KERNEL_SHARED_SUMS;
// Whether the next row is on its way while this one is computed; with fewer registers for each thread there is no room.
const bool AHEAD = PACKS * THREADS <= 1024;

const int VALUES = pack<S>::VALUES, N_SUMS = CENTERED ? 2 : 1;

// The sums over rows of one thread. Number 0 is dweight, 1 is dbias.
struct sums_in_registers {
    column_sum<real> own[PACKS][N_SUMS][VALUES];
    __device__ explicit sums_in_registers(char*, const share<S>&) : own() {}
    __device__ void add(int k, int which, const real (&a)[VALUES]) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) own[k][which][i].add(a[i]);
    }
    __device__ column_sum<real> get(int k, int which, int i) const { return own[k][which][i]; }
};

// The same in shared memory, which only this thread touches: 16 bytes of one kind after another, a pack beside the
// next, so that neighbouring threads use neighbouring banks.
struct sums_in_shared {
    typedef pack<stored<real>::type> chunk;
    static const int CHUNKS = VALUES / chunk::VALUES;
    chunk* own;
    int n_packs, rank, step;
    __device__ sums_in_shared(char* memory, const share<S>& s)
        : own(reinterpret_cast<chunk*>(memory)), n_packs((int)((s.n_cols + VALUES - 1) / VALUES)), rank(s.rank), step(s.step) {
        for (int k = 0; k < PACKS; k++)
            for (int part = 0; part < N_SUMS * 2 * CHUNKS; part++)
                if (rank + k * step < n_packs) at(k, part) = chunk();
    }
    __device__ chunk& at(int k, int part) const { return own[part * n_packs + rank + k * step]; }
    __device__ void add(int k, int which, const real (&a)[VALUES]) {
        if (rank + k * step >= n_packs) return;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            chunk sum = at(k, (which * 2) * CHUNKS + c), rest = at(k, (which * 2 + 1) * CHUNKS + c);
#pragma unroll
            for (int i = 0; i < chunk::VALUES; i++) {
                column_sum<real> s = {sum.get(i), rest.get(i)};
                s.add(a[c * chunk::VALUES + i]);
                sum.set(i, s.sum);
                rest.set(i, s.rest);
            }
            at(k, (which * 2) * CHUNKS + c) = sum;
            at(k, (which * 2 + 1) * CHUNKS + c) = rest;
        }
    }
    __device__ column_sum<real> get(int k, int which, int i) const {
        int c = i / chunk::VALUES;
        column_sum<real> s = {at(k, (which * 2) * CHUNKS + c).get(i % chunk::VALUES),
                              at(k, (which * 2 + 1) * CHUNKS + c).get(i % chunk::VALUES)};
        return s;
    }
};

template <bool SHARED> struct choose_sums { typedef sums_in_registers type; };
template <> struct choose_sums<true> { typedef sums_in_shared type; };
typedef choose_sums<SHARED_SUMS>::type row_sums;

// The sums of all teams of the block, in a fixed order, to one row of partial sums. Warps that share columns go one
// after another through memory[N_SUMS][n_cols].
__device__ inline void leave_partials(const row_sums& sums, const team& t, const share<S>& mine, char* partials, char* memory) {
    int unit_size = t.size < 32 ? 32 : t.size, unit = threadIdx.x / unit_size, n_units = blockDim.x / unit_size;
    bool last = unit == n_units - 1, owner = t.size >= 32 || threadIdx.x % 32 < t.size;
    total<real>* merged = reinterpret_cast<total<real>*>(memory);
    for (int turn = 0; turn < n_units; turn++) {
        // All lanes of a warp keep step for the shuffles.
        if (unit == turn)
#pragma unroll(SHARED_SUMS ? 1 : PACKS)
            for (int k = 0; k < PACKS; k++) {
                int n = mine.valid(k);
                index_t first = mine.first(k);
#pragma unroll
                for (int which = 0; which < N_SUMS; which++) {
                    real out[VALUES];
#pragma unroll
                    for (int i = 0; i < VALUES; i++) {
                        // Where this thread has no such pack its sums are nobody's.
                        total<real> a = n > 0 ? total_of(sums.get(k, which, i)) : total_of((real)0);
                        for (int mask = t.size; mask < 32; mask *= 2) a = added(a, from_lane(a, mask));
                        total<real>& m = merged[which * mine.n_cols + first + i];
                        if (owner && i < n && n_units > 1) {
                            if (turn > 0) a = added(m, a);
                            if (!last) m = a;
                        }
                        out[i] = (real)a.value();
                    }
                    if (owner && last && n > 0)
                        write_partials<S>(partials + (which * mine.n_cols + first) * sizeof(real), out, n);
                }
            }
        if (n_units > 1) __syncthreads();
    }
}

// IN dy, dh, x[n_rows, n_cols], weight[n_cols], mean[n_rows], rstd[n_rows];
// OUT dx, dresidual[n_rows, n_cols], partials[gridDim, N_SUMS, n_cols]. Strides in bytes; dh, weight, dresidual and
// partials may be null. dx may be dy, dh or x.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
row_backward(const char* dy, index_t dy_stride, const char* dh, index_t dh_stride, const char* x, index_t x_stride,
             const char* weight, index_t weight_is_narrow, double weight_offset, const char* mean, const char* rstd,
             double alpha, char* dx, index_t dx_stride, char* dresidual, index_t dresidual_stride, char* partials,
             index_t n_rows, index_t n_cols, index_t width, index_t team_size) {
    team t = open_team((int)team_size, shared_memory());
    int n_teams = blockDim.x / t.size;
    char* memory = shared_memory() + (t.size > 32 ? n_teams * SLOTS_BYTES : 0);
    divisor<real> n(n_cols);
    row_packs<S, PACKS> next_x(n_cols, t, 0), next_dy(n_cols, t, 0);
    row_sums sums(memory, next_x);
    parameter_row<S> weights(weight, weight_is_narrow != 0, (real)weight_offset);
    real w[SHARED_SUMS ? 1 : PACKS][VALUES];
    if (!SHARED_SUMS)
#pragma unroll
        for (int k = 0; k < PACKS; k++) read_weight<S>(w[k], weights, next_x.first(k), next_x.valid(k));

    // All teams take as many turns as the first, so that barriers and shuffles find everybody.
    index_t row = (index_t)blockIdx.x * n_teams + t.number, step = (index_t)gridDim.x * n_teams;
    if (AHEAD) {
        read_packs(next_x, x + row * x_stride, row < n_rows, (int)width);
        read_packs(next_dy, dy + row * dy_stride, row < n_rows, (int)width);
    }
    for (; row - t.number < n_rows; row += step) {
        bool here = row < n_rows;
        row_packs<S, PACKS> x_row = next_x, dy_row = next_dy;
        if (AHEAD) {
            read_packs(next_x, x + (row + step) * x_stride, row + step < n_rows, (int)width);
            read_packs(next_dy, dy + (row + step) * dy_stride, row + step < n_rows, (int)width);
        } else {
            read_packs(x_row, x + row * x_stride, here, (int)width);
            read_packs(dy_row, dy + row * dy_stride, here, (int)width);
        }
        // On its way while the row is summed up.
        row_packs<S, PACKS> dh_row(n_cols, t, 0);
        if (dh) read_packs(dh_row, dh + row * dh_stride, here, (int)width);
        gradient_row<real> r = {0, 0, 0, 0, 0};
        if (here) {
            if (CENTERED) r.mean = read_by_all<real>(mean + row * sizeof(real), t.rank == 0);
            r.rstd = read_by_all<real>(rstd + row * sizeof(real), t.rank == 0);
        }
        gradient_sums<CENTERED, real> row_total;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            real (&wr)[VALUES] = w[SHARED_SUMS ? 0 : k];
            if (SHARED_SUMS) read_weight<S>(wr, weights, x_row.first(k), x_row.valid(k));
            row_total.add(x_row[k], dy_row[k], wr, r.mean, x_row.valid(k), k);
        }
        row_total.settle(r, t, n);
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            real (&wr)[VALUES] = w[SHARED_SUMS ? 0 : k];
            if (SHARED_SUMS) read_weight<S>(wr, weights, x_row.first(k), x_row.valid(k));
            real out[VALUES], weight_terms[VALUES], bias_terms[VALUES];
            gradient_pack<CENTERED>(out, weight_terms, x_row[k], dy_row[k], wr, r);
            if (dh)
#pragma unroll
                for (int i = 0; i < VALUES; i++) out[i] += dh_row[k].get(i);
            if (here && x_row.valid(k) > 0) {
                index_t offset = x_row.first(k) * sizeof(S::bits);
                write_gradients<S>(dx + row * dx_stride + offset,
                                   dresidual ? dresidual + row * dresidual_stride + offset : 0, out, (real)alpha,
                                   x_row.valid(k), (int)width);
            }
            if (!partials || !here) continue;
            sums.add(k, 0, weight_terms);
            if (CENTERED) {
#pragma unroll
                for (int i = 0; i < VALUES; i++) bias_terms[i] = dy_row[k].get(i);
                sums.add(k, N_SUMS - 1, bias_terms);
            }
        }
    }
    if (partials)
        leave_partials(sums, t, next_x, partials + (index_t)blockIdx.x * N_SUMS * n_cols * sizeof(real), memory);
}
