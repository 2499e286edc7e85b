// Single numbers of any type, address and stride: what copies move, and one value a channel.
#pragma once
#include "storage.cuh"

typedef unsigned char uint8;

template <class T>
__device__ inline T read_anywhere(const char* p, bool aligned) {
    if (aligned) return read<T>(p);
    union { T value; uint8 bytes[sizeof(T)]; } u;
    for (int i = 0; i < (int)sizeof(T); i++) u.bytes[i] = read<uint8>(p + i);
    return u.value;
}

template <class T>
__device__ inline void write_anywhere(char* p, T value, bool aligned) {
    if (aligned) return write<T>(p, value);
    union { T value; uint8 bytes[sizeof(T)]; } u;
    u.value = value;
    for (int i = 0; i < (int)sizeof(T); i++) write<uint8>(p + i, u.bytes[i]);
}

__device__ inline double read_number(const char* p, int type, bool aligned) {
    switch (type) {
    case FLOAT16: return float16_to_float(read_anywhere<uint16>(p, aligned));
    case BFLOAT16: return bfloat16_to_float(read_anywhere<uint16>(p, aligned));
    case FLOAT32: return read_anywhere<float>(p, aligned);
    case FLOAT64: return read_anywhere<double>(p, aligned);
    case BOOL: return read_anywhere<uint8>(p, aligned) != 0;
    case INT8: return read_anywhere<signed char>(p, aligned);
    case UINT8: return read_anywhere<uint8>(p, aligned);
    case INT16: return read_anywhere<short>(p, aligned);
    case UINT16: return read_anywhere<uint16>(p, aligned);
    case INT32: return read_anywhere<int>(p, aligned);
    case UINT32: return read_anywhere<uint32>(p, aligned);
    case INT64: return (double)read_anywhere<index_t>(p, aligned);
    default: return (double)read_anywhere<uint64>(p, aligned);
    }
}

// A double rounded once to any float type.
__device__ inline void write_number(char* p, double a, int type, bool aligned) {
    switch (type) {
    case FLOAT16: return write_anywhere<uint16>(p, float_to_float16(double_to_odd_float(a)), aligned);
    case BFLOAT16: return write_anywhere<uint16>(p, float_to_bfloat16(double_to_odd_float(a)), aligned);
    case FLOAT32: return write_anywhere<float>(p, (float)a, aligned);
    default: return write_anywhere<double>(p, a, aligned);
    }
}

// One number a channel; data may be null. The macro has the arguments of a kernel.
#define NUMBERS(name) char *name, index_t name##_type, index_t name##_stride, index_t name##_aligned
#define NUMBERS_OF(name) numbers(name, (int)name##_type, name##_stride, name##_aligned != 0)
struct numbers {
    char* data;
    int type;
    index_t stride;
    bool aligned;
    __device__ numbers(char* data_, int type_, index_t stride_, bool aligned_)
        : data(data_), type(type_), stride(stride_), aligned(aligned_) {}
    __device__ double get(index_t i) const { return read_number(data + i * stride, type, aligned); }
    __device__ void set(index_t i, double a) const { write_number(data + i * stride, a, type, aligned); }
};
