// Forward of rows that fit into the registers of a team of threads, or into the shared memory of a block:
//
//     y = ((h - hi) - lo) * rstd * weight + bias,  h = x + alpha * residual as it is stored
//
// x and residual are read once, h and y written once. Without residual, h is x. rms_norm (CENTERED = 0): about zero.
//
// KERNEL_STORAGE      float16, bfloat16, float32, float64
// KERNEL_CENTERED     1, 0
// KERNEL_PACKS        packs of 16 bytes that a thread keeps in registers; 0: the row is in shared memory
// KERNEL_THREADS      most threads of a block
#include "apply.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;
const bool CENTERED = KERNEL_CENTERED;
const int PACKS = KERNEL_PACKS, THREADS = KERNEL_THREADS;

// IN x, residual[n_rows, n_cols], weight[n_cols], bias[n_cols]; OUT y, h[n_rows, n_cols], mean[n_rows], rstd[n_rows].
// Strides in bytes. weight, bias, mean and rstd may be null, also residual and h together; without y only h is wanted.
// y and h may each be x or residual. team_size: threads of a row.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
row_forward(const char* x, index_t x_stride, const char* residual, index_t residual_stride, double alpha,
            const char* weight, index_t weight_is_narrow, double weight_offset, const char* bias, index_t bias_is_narrow,
            double eps, char* y, index_t y_stride, char* h, index_t h_stride, char* mean, char* rstd, index_t n_rows,
            index_t n_cols, index_t width, index_t team_size) {
    team t = open_team((int)team_size, shared_memory());
    index_t row = (index_t)blockIdx.x * (blockDim.x / t.size) + t.number;
    bool here = row < n_rows;
    row_packs<S, PACKS> packs(n_cols, t, shared_memory() + SLOTS_BYTES);
    read_packs(packs, x + row * x_stride, here, (int)width);
    if (residual) {
        add_packs(packs, residual + row * residual_stride, (real)alpha, here, (int)width);
        // Now, since packs may be scaled in place below.
        write_packs(h + row * h_stride, packs, here, (int)width);
        if (!y) return;
    }
    int exponent;
    bool finite;
    divisor<real> n(n_cols);
    moments<real> m = measure_in_range<CENTERED>(packs, t, n, eps, &exponent, &finite);
    scale_of_row<real> s = settle(m, eps, exponent, finite);
    if (!here) return;
    apply<CENTERED>(packs, s, y + row * y_stride, parameter_row<S>(weight, weight_is_narrow != 0, (real)weight_offset),
                    parameter_row<S>(bias, bias_is_narrow != 0, 0), 0, (int)width);
    if (t.rank == 0) {
        if (mean) write<real>(mean + row * sizeof(real), (real)s.saved_mean);
        if (rstd) write<real>(rstd + row * sizeof(real), (real)s.saved_rstd);
    }
}
