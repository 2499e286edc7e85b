// What only a GPU has, behind names with a plain C++ form, so that the same kernels run on a CPU in tests.
// Threads, shuffles and barriers keep CUDA's own names; whoever runs the kernels on a CPU provides those.
// No CUDA header is needed, here or elsewhere.
#pragma once

typedef long long index_t;          // rows, columns, strides in bytes: never 32 bits
typedef unsigned short uint16;
typedef unsigned int uint32;
typedef unsigned long long uint64;

#ifdef __CUDA_ARCH__
#define FASTNORM_READ(pointer, bytes, counts)
#define FASTNORM_WRITE(pointer, bytes)
#endif

// Every access to global memory goes through these three, so that a test can count bytes and check bounds.
template <class T>
__device__ inline T read(const void* p) {
    FASTNORM_READ(p, sizeof(T), true);
    return *static_cast<const T*>(p);
}

// What all threads of a row read from one address: one transfer, that of the first of them.
template <class T>
__device__ inline T read_by_all(const void* p, bool is_first) {
    FASTNORM_READ(p, sizeof(T), is_first);
    return *static_cast<const T*>(p);
}

template <class T>
__device__ inline void write(void* p, T value) {
    FASTNORM_WRITE(p, sizeof(T));
    *static_cast<T*>(p) = value;
}

// The dynamic shared memory of the block: the only kind that is used.
__device__ inline char* shared_memory() {
#ifdef __CUDA_ARCH__
    extern __shared__ uint4 fastnorm_shared[];
    return reinterpret_cast<char*>(fastnorm_shared);
#else
    return emulated_shared_memory();
#endif
}

// A barrier of some whole warps of a block. Barrier 0 is that of __syncthreads().
__device__ inline void barrier(int id, int n_threads) {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.sync %0, %1;" : : "r"(id), "r"(n_threads) : "memory");
#else
    emulated_barrier(id, n_threads);
#endif
}

__device__ inline bool any_lane(bool value) { return __any_sync(0xffffffffu, value); }

// 1 / sqrt(a) to within a few units in the last place.
__device__ inline float rough_reciprocal_root(float a) {
#ifdef __CUDA_ARCH__
    return rsqrtf(a);
#else
    return 1.0f / sqrtf(a);
#endif
}

// Kernels are compiled without contraction: a product and a sum are rounded once exactly where this stands.
__device__ inline float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fused(double a, double b, double c) { return fma(a, b, c); }

template <class To, class From>
__device__ inline To bits_of(From a) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    union { From from; To to; } u;
    u.from = a;
    return u.to;
}

// From the exponent alone: not by isfinite(), which a compiler may assume to be true.
__device__ inline bool is_finite(float a) { return (bits_of<uint32>(a) & 0x7f800000u) != 0x7f800000u; }
__device__ inline bool is_finite(double a) { return (bits_of<uint64>(a) >> 52 & 0x7ff) != 0x7ff; }

template <class T>
__device__ inline T smaller(T a, T b) { return b < a ? b : a; }
