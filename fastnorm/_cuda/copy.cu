// Copies between any strides, alignments and types: what the other kernels take as it comes is rows of contiguous
// columns of a float type. Numbers are converted by way of double, and rounded once.
#include "numbers.cuh"

const int DIMS = 6;

// As bits if the types are the same, so that nothing happens to NaN; as a double otherwise.
__device__ inline uint64 read_element(const char* p, int type, int to, bool aligned) {
    if (type != to) return bits_of<uint64>(read_number(p, type, aligned));
    if (type == FLOAT64) return read_anywhere<uint64>(p, aligned);
    return type == FLOAT32 ? read_anywhere<uint32>(p, aligned) : read_anywhere<uint16>(p, aligned);
}

__device__ inline void write_element(char* p, uint64 bits, int from, int type, bool aligned) {
    if (from != type) return write_number(p, bits_of<double>(bits), type, aligned);
    if (type == FLOAT64) return write_anywhere<uint64>(p, bits, aligned);
    if (type == FLOAT32) return write_anywhere<uint32>(p, (uint32)bits, aligned);
    write_anywhere<uint16>(p, (uint16)bits, aligned);
}

struct place { index_t source, target; };

// Where element i of the first n_dims dimensions is; the last of them varies fastest.
__device__ inline place place_of(index_t i, const index_t (&shape)[DIMS], const index_t (&source)[DIMS],
                                 const index_t (&target)[DIMS], int n_dims) {
    place p = {0, 0};
#pragma unroll
    for (int d = DIMS - 1; d >= 0; d--)
        if (d < n_dims) {
            index_t k = i % shape[d];
            i /= shape[d];
            p.source += k * source[d];
            p.target += k * target[d];
        }
    return p;
}

#define STRIDED_ARGUMENTS                                                                                            \
    const char *source, char *target, index_t from, index_t to, index_t source_aligned, index_t target_aligned,      \
        index_t n0, index_t n1, index_t n2, index_t n3, index_t n4, index_t n5, index_t s0, index_t s1, index_t s2,  \
        index_t s3, index_t s4, index_t s5, index_t t0, index_t t1, index_t t2, index_t t3, index_t t4, index_t t5
#define STRIDED_ARRAYS                                                                                               \
    const index_t shape[DIMS] = {n0, n1, n2, n3, n4, n5}, sources[DIMS] = {s0, s1, s2, s3, s4, s5},                  \
                  targets[DIMS] = {t0, t1, t2, t3, t4, t5}

// IN source, OUT target: of one shape, strides in bytes. The last dimension is the one that is densest in both. A
// block has 1024 elements.
extern "C" __global__ void __launch_bounds__(256) copy_elements(STRIDED_ARGUMENTS) {
    STRIDED_ARRAYS;
    index_t count = 1;
    for (int d = 0; d < DIMS; d++) count *= shape[d];
    for (int k = 0; k < 4; k++) {
        index_t i = (index_t)blockIdx.x * 1024 + k * 256 + threadIdx.x;
        if (i >= count) return;
        place p = place_of(i, shape, sources, targets, DIMS);
        write_element(target + p.target, read_element(source + p.source, (int)from, (int)to, source_aligned != 0),
                      (int)from, (int)to, target_aligned != 0);
    }
}

// The same where dimension 4 is the densest of source and dimension 5 that of target: tiles of 32 x 32 elements of
// these two turn in shared memory, so that both sides are read and written in runs.
extern "C" __global__ void __launch_bounds__(256) copy_tiles(STRIDED_ARGUMENTS) {
    STRIDED_ARRAYS;
    const int TILE = 32, PITCH = 33, WARPS = 8;
    uint64* tile = reinterpret_cast<uint64*>(shared_memory());
    index_t across = (n5 + TILE - 1) / TILE, down = (n4 + TILE - 1) / TILE, block = blockIdx.x;
    index_t column = block % across * TILE, row = block / across % down * TILE;
    place outer = place_of(block / (across * down), shape, sources, targets, 4);
    int lane = threadIdx.x % TILE, warp = threadIdx.x / TILE;
    for (int k = warp; k < TILE; k += WARPS)
        if (row + lane < n4 && column + k < n5)
            tile[lane * PITCH + k] = read_element(source + outer.source + (row + lane) * s4 + (column + k) * s5, (int)from,
                                                  (int)to, source_aligned != 0);
    __syncthreads();
    for (int k = warp; k < TILE; k += WARPS)
        if (row + k < n4 && column + lane < n5)
            write_element(target + outer.target + (row + k) * t4 + (column + lane) * t5, tile[k * PITCH + lane], (int)from,
                          (int)to, target_aligned != 0);
}

// OUT target[count], contiguous.
extern "C" __global__ void __launch_bounds__(256) fill(char* target, index_t type, index_t item_size, index_t count,
                                                       double value) {
    index_t i = (index_t)blockIdx.x * 256 + threadIdx.x;
    if (i < count) write_float(target + i * item_size, (int)type, value);
}
