// dweight and dbias from the partial sums of the blocks of backward: in a fixed order, in double (where that is the
// arithmetic type, with what additions round away), rounded once to the dtype of the result.
//
// KERNEL_STORAGE      float32, float64: of the partial sums
#include "storage.cuh"
#include "sums.cuh"

typedef KERNEL_STORAGE S;
typedef S::real real;

const int LANES = 32, WARPS = 8;

// IN partials[n_partials, n_sums, n_cols]; OUT dweight[n_cols], dbias[n_cols] of storage type `type`, dbias if n_sums
// is 2. A block has 32 columns of one of the two: blockIdx.y.
extern "C" __global__ void __launch_bounds__(LANES * WARPS)
finish_sums(const char* partials, char* dweight, char* dbias, index_t type, index_t item_size, index_t n_partials,
            index_t n_sums, index_t n_cols) {
    int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
    index_t column = (index_t)blockIdx.x * LANES + lane, which = blockIdx.y;
    total<real> sum = total_of((real)0);
    if (column < n_cols)
        for (index_t p = warp; p < n_partials; p += WARPS)
            sum = added(sum, total_of(read<real>(partials + ((p * n_sums + which) * n_cols + column) * sizeof(real))));
    total<real>* sums = reinterpret_cast<total<real>*>(shared_memory());
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || column >= n_cols) return;
    for (int w = 1; w < WARPS; w++) sum = added(sum, sums[w * LANES + lane]);
    write_float((which ? dbias : dweight) + column * item_size, (int)type, sum.value());
}
