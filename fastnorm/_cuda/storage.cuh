// Storage types: how numbers lie in memory, and the arithmetic type that they are computed in. float16 and
// bfloat16 are 16-bit integers here; the conversions are instructions on a GPU and plain C++ elsewhere.
#pragma once
#include "device.cuh"

// As fastnorm._cuda.copies numbers them.
enum storage_type { FLOAT16, BFLOAT16, FLOAT32, FLOAT64, BOOL, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64 };

__device__ inline float float16_to_float(uint16 bits) {
#ifdef __CUDA_ARCH__
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#else
    uint32 sign = (uint32)(bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return bits_of<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // As a float32 of the same digits it is 2^112 too small.
    float f = bits_of<float>(magnitude << 13) * 0x1p112f;
    return bits_of<float>(sign | bits_of<uint32>(f));
#endif
}

// Round a positive finite number to a multiple of 2^-SHIFT of the last place of what is kept: nearest, ties to even.
template <int SHIFT>
__device__ inline uint32 round_bits(uint32 bits) {
    return (bits + ((1u << (SHIFT - 1)) - 1) + (bits >> SHIFT & 1)) >> SHIFT;
}

__device__ inline uint16 float_to_float16(float a) {
#ifdef __CUDA_ARCH__
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(a));
    return bits;
#else
    uint32 bits = bits_of<uint32>(a), sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16)(sign | 0x7fffu);
    if (bits >= 0x47800000u) return (uint16)(sign | 0x7c00u);
    // Subnormal there: the addition rounds to a multiple of 2^-24.
    if (bits < 0x38800000u) return (uint16)(sign | (bits_of<uint32>(bits_of<float>(bits) + 0.5f) - 0x3f000000u));
    return (uint16)(sign | round_bits<13>(bits - 0x38000000u));
#endif
}

__device__ inline float bfloat16_to_float(uint16 bits) { return bits_of<float>((uint32)bits << 16); }

// sm_75 has no instruction for it, and these few integer ones cost less than a call.
__device__ inline uint16 float_to_bfloat16(float a) {
    uint32 bits = bits_of<uint32>(a);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16)(bits >> 16 | 0x40u);
    return (uint16)round_bits<16>(bits);
}

// A double rounded to odd: rounding that once more, to fewer digits, is rounding once.
__device__ inline float double_to_odd_float(double a) {
    float f = (float)a;
    if (!is_finite(a) || (double)f == a) return f;
    uint32 bits = bits_of<uint32>(f);
    if (!is_finite(f)) return bits_of<float>(bits - 1);
    // Towards zero, then the last bit set.
    bool away = (double)f > 0 ? (double)f > a : (double)f < a;
    if (f == 0) return bits_of<float>((a < 0 ? 0x80000000u : 0u) | 1u);
    return bits_of<float>((away ? bits - 1 : bits) | 1u);
}

struct float16 {
    typedef float real;
    typedef uint16 bits;
    static const storage_type TYPE = FLOAT16;
    static __device__ real widen(bits a) { return float16_to_float(a); }
    static __device__ bits narrow(real a) { return float_to_float16(a); }
};

struct bfloat16 {
    typedef float real;
    typedef uint16 bits;
    static const storage_type TYPE = BFLOAT16;
    static __device__ real widen(bits a) { return bfloat16_to_float(a); }
    static __device__ bits narrow(real a) { return float_to_bfloat16(a); }
};

struct float32 {
    typedef float real;
    typedef float bits;
    static const storage_type TYPE = FLOAT32;
    static __device__ real widen(bits a) { return a; }
    static __device__ bits narrow(real a) { return a; }
};

struct float64 {
    typedef double real;
    typedef double bits;
    static const storage_type TYPE = FLOAT64;
    static __device__ real widen(bits a) { return a; }
    static __device__ bits narrow(real a) { return a; }
};

// The storage type of an arithmetic type.
template <class real> struct stored;
template <> struct stored<float> { typedef float32 type; };
template <> struct stored<double> { typedef float64 type; };

// A double rounded once to any float type.
__device__ inline void write_float(char* p, int type, double a) {
    switch (type) {
    case FLOAT16: return write<uint16>(p, float_to_float16(double_to_odd_float(a)));
    case BFLOAT16: return write<uint16>(p, float_to_bfloat16(double_to_odd_float(a)));
    case FLOAT32: return write<float>(p, (float)a);
    default: return write<double>(p, a);
    }
}
