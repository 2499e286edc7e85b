// Forward of rows of any length, a slice of THREADS * PACKS packs at a time. Three kernels: the moments of each
// slice, the statistics of each row from those, y. x is read twice; with a residual, x and residual are read once, and
// h is written and read again.
//
// KERNEL_STORAGE, KERNEL_CENTERED, KERNEL_PACKS, KERNEL_THREADS as in row_forward.cu
#include "apply.cuh"
#include "slices.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;
const bool CENTERED = KERNEL_CENTERED;
const int PACKS = KERNEL_PACKS, THREADS = KERNEL_THREADS;

// One row: x * 2^-exponent is what hi, lo and rstd belong to.
struct row_scale { double hi, lo, rstd, exponent; };

const index_t SLICE = (index_t)THREADS * PACKS * pack<S>::VALUES;

__device__ inline index_t n_slices(index_t n_cols) { return (n_cols + SLICE - 1) / SLICE; }
__device__ inline index_t slice_length(index_t slice, index_t n_cols) { return smaller(SLICE, n_cols - slice * SLICE); }

// IN x, residual[n_rows, n_cols]; OUT h[n_rows, n_cols], slices[n_rows, n_slices]. A block a slice. residual and h may
// be null together; without slices only h is wanted.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
slice_forward_sums(const char* x, index_t x_stride, const char* residual, index_t residual_stride, double alpha, char* h,
                   index_t h_stride, double eps, char* slices, index_t n_cols, index_t width) {
    team t = open_team(THREADS, shared_memory());
    index_t row = blockIdx.x / n_slices(n_cols), slice = blockIdx.x % n_slices(n_cols);
    row_packs<S, PACKS> packs(slice_length(slice, n_cols), t, 0);
    index_t offset = slice * SLICE * sizeof(S::bits);
    read_packs(packs, x + row * x_stride + offset, true, (int)width);
    if (residual) {
        add_packs(packs, residual + row * residual_stride + offset, (real)alpha, true, (int)width);
        write_packs(h + row * h_stride + offset, packs, true, (int)width);
        if (!slices) return;
    }
    divisor<real> n(packs.n_cols);
    int exponent;
    bool finite;
    moments<real> m = measure_in_range<CENTERED>(packs, t, n, eps, &exponent, &finite);
    if (t.rank == 0) write(slices + (index_t)blockIdx.x * sizeof(slice_moments), slice_of(m, exponent));
}

struct slices_of_row {
    const char* first;
    index_t count, n_cols;
    __device__ slice_moments get(index_t k) const { return read<slice_moments>(first + k * sizeof(slice_moments)); }
    __device__ double length(index_t k) const { return (double)slice_length(k, n_cols); }
};

// IN slices[n_rows, n_slices]; OUT rows[n_rows], mean[n_rows], rstd[n_rows]. A block a row.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
slice_forward_settle(const char* slices, double eps, char* rows, char* mean, char* rstd, index_t n_cols) {
    team t = open_team(THREADS, shared_memory());
    index_t row = blockIdx.x, count = n_slices(n_cols);
    slices_of_row mine = {slices + row * count * sizeof(slice_moments), count, n_cols};
    int exponent;
    moments<real> m = put_together<CENTERED>(mine, t, divisor<real>(n_cols), &exponent);
    scale_of_row<real> s = settle(m, eps, exponent, is_finite(m.square));
    if (t.rank == 0) {
        row_scale r = {s.hi, s.lo, s.rstd, (double)exponent};
        write(rows + row * sizeof(r), r);
        if (mean) write<real>(mean + row * sizeof(real), (real)s.saved_mean);
        if (rstd) write<real>(rstd + row * sizeof(real), (real)s.saved_rstd);
    }
}

// IN x[n_rows, n_cols], rows[n_rows], weight[n_cols], bias[n_cols]; OUT y[n_rows, n_cols]. A block a slice.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
slice_forward_apply(const char* x, index_t x_stride, const char* rows, const char* weight, index_t weight_is_narrow,
                    double weight_offset, const char* bias, index_t bias_is_narrow, char* y, index_t y_stride,
                    index_t n_cols, index_t width) {
    team t = open_team(THREADS, shared_memory());
    index_t row = blockIdx.x / n_slices(n_cols), slice = blockIdx.x % n_slices(n_cols), first = slice * SLICE;
    row_packs<S, PACKS> packs(slice_length(slice, n_cols), t, 0);
    read_packs(packs, x + row * x_stride + first * sizeof(S::bits), true, (int)width);
    row_scale r = read_by_all<row_scale>(rows + row * sizeof(r), t.rank == 0);
    scale_packs(packs, (int)r.exponent);
    scale_of_row<real> s = {(real)r.hi, (real)r.lo, (real)r.rstd, 0, 0};
    apply<CENTERED>(packs, s, y + row * y_stride + first * sizeof(S::bits),
                    parameter_row<S>(weight, weight_is_narrow != 0, (real)weight_offset),
                    parameter_row<S>(bias, bias_is_narrow != 0, 0), first, (int)width);
}
