// A pack is 16 bytes of one row: what a thread reads and writes at a time. Pack j belongs to thread j modulo the
// size of the team, whatever the width of the accesses.
#pragma once
#include "storage.cuh"
#include "sums.cuh"

struct alignas(16) words4 { uint32 w[4]; };
struct alignas(8) words2 { uint32 w[2]; };

template <class S>
struct pack {
    typedef typename S::real real;
    typedef typename S::bits bits;
    static const int VALUES = 16 / sizeof(bits);
    uint32 words[4];

    __device__ pack() : words() {}
    __device__ real get(int i) const { return S::widen(bits_at(i, bits(0))); }
    __device__ void set(int i, real value) { set_bits(i, S::narrow(value)); }

    __device__ uint16 bits_at(int i, uint16) const { return (uint16)(words[i / 2] >> 16 * (i % 2)); }
    __device__ float bits_at(int i, float) const { return bits_of<float>(words[i]); }
    __device__ double bits_at(int i, double) const {
        return bits_of<double>((uint64)words[2 * i + 1] << 32 | words[2 * i]);
    }
    __device__ void set_bits(int i, uint16 value) {
        uint32 shift = 16 * (i % 2);
        words[i / 2] = (words[i / 2] & ~(0xffffu << shift)) | (uint32)value << shift;
    }
    __device__ void set_bits(int i, float value) { words[i] = bits_of<uint32>(value); }
    __device__ void set_bits(int i, double value) {
        words[2 * i] = (uint32)bits_of<uint64>(value);
        words[2 * i + 1] = (uint32)(bits_of<uint64>(value) >> 32);
    }
};

// The first n values of a pack at p; the others are zero. width: of the accesses in bytes, p is a multiple of it.
template <class S>
__device__ inline pack<S> read_pack(const char* p, int n, int width) {
    typedef typename S::bits bits;
    pack<S> a;
    if (n >= pack<S>::VALUES && width == 16) {
        words4 v = read<words4>(p);
#pragma unroll
        for (int i = 0; i < 4; i++) a.words[i] = v.w[i];
    } else if (n >= pack<S>::VALUES && width == 8) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            words2 v = read<words2>(p + 4 * i);
            a.words[i] = v.w[0];
            a.words[i + 1] = v.w[1];
        }
    } else if (n >= pack<S>::VALUES && width == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) a.words[i] = read<uint32>(p + 4 * i);
    } else {
#pragma unroll
        for (int i = 0; i < pack<S>::VALUES; i++)
            if (i < n) a.set_bits(i, read<bits>(p + i * sizeof(bits)));
    }
    return a;
}

template <class S>
__device__ inline void write_pack(char* p, const pack<S>& a, int n, int width) {
    typedef typename S::bits bits;
    if (n >= pack<S>::VALUES && width == 16) {
        words4 v;
#pragma unroll
        for (int i = 0; i < 4; i++) v.w[i] = a.words[i];
        write<words4>(p, v);
    } else if (n >= pack<S>::VALUES && width == 8) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            words2 v;
            v.w[0] = a.words[i];
            v.w[1] = a.words[i + 1];
            write<words2>(p + 4 * i, v);
        }
    } else if (n >= pack<S>::VALUES && width == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) write<uint32>(p + 4 * i, a.words[i]);
    } else {
#pragma unroll
        for (int i = 0; i < pack<S>::VALUES; i++)
            if (i < n) write<bits>(p + i * sizeof(bits), a.bits_at(i, bits(0)));
    }
}

template <class bits>
__device__ inline int width_of(const char* p) {
    return (bits_of<uint64>(p) & 15) == 0 ? 16 : (int)sizeof(bits);
}

// weight or bias: of the storage type of x or of its arithmetic type.
template <class S>
struct parameter_row {
    typedef typename S::real real;
    typedef typename stored<real>::type wide;
    static const int VALUES = pack<S>::VALUES;
    const char* data;
    bool narrow;
    real offset;        // is added to each value
    int width;

    __device__ parameter_row(const char* data_, bool narrow_, real offset_)
        : data(data_), narrow(narrow_), offset(offset_),
          width(narrow_ ? width_of<typename S::bits>(data_) : width_of<real>(data_)) {}

    // n values from column first on. OUT out
    __device__ void read(real (&out)[VALUES], index_t first, int n) const {
        if (narrow) {
            pack<S> a = read_pack<S>(data + first * sizeof(typename S::bits), n, width);
#pragma unroll
            for (int i = 0; i < VALUES; i++) out[i] = a.get(i);
        } else {
            const int PART = pack<wide>::VALUES;
#pragma unroll
            for (int k = 0; k < VALUES; k += PART) {
                pack<wide> a = read_pack<wide>(data + (first + k) * sizeof(real), n - k, width);
#pragma unroll
                for (int i = 0; i < PART; i++) out[k + i] = a.get(i);
            }
        }
        if (offset != 0)
#pragma unroll
            for (int i = 0; i < VALUES; i++) out[i] += offset;
    }
};

// Which columns a thread has, of one row or of a slice of it.
template <class S>
struct share {
    index_t n_cols;
    int rank, step;
    __device__ share(index_t n, const team& t) : n_cols(n), rank(t.rank), step(t.size) {}
    // The first column of pack k, and how many of its values there are.
    __device__ index_t first(int k) const { return (index_t)(rank + k * step) * pack<S>::VALUES; }
    __device__ int valid(int k) const {
        index_t rest = n_cols - first(k);
        return rest < 0 ? 0 : (int)smaller(rest, (index_t)pack<S>::VALUES);
    }
};

// The packs of a thread: in registers, or with PACKS = 0 in shared memory. SHARE: which ones they are.
template <class S, int PACKS, class SHARE = share<S>>
struct row_packs : SHARE {
    pack<S> own[PACKS];
    __device__ row_packs(index_t n, const team& t, char*) : SHARE(n, t) {}
    __device__ explicit row_packs(const SHARE& mine) : SHARE(mine) {}
    __device__ int count() const { return PACKS; }
    __device__ pack<S>& operator[](int k) { return own[k]; }
    __device__ const pack<S>& operator[](int k) const { return own[k]; }
};

template <class S>
struct row_packs<S, 0, share<S>> : share<S> {
    pack<S>* own;
    int packs;
    __device__ row_packs(index_t n, const team& t, char* memory)
        : share<S>(n, t), own(reinterpret_cast<pack<S>*>(memory) + t.rank),
          packs((int)((n + pack<S>::VALUES - 1) / pack<S>::VALUES)) {}
    __device__ int count() const { return (packs - this->rank + this->step - 1) / this->step; }
    __device__ pack<S>& operator[](int k) { return own[k * this->step]; }
    __device__ const pack<S>& operator[](int k) const { return own[k * this->step]; }
};

// What is not there (here: whether the row is) reads as zero.
template <class S, int PACKS>
__device__ inline void read_packs(row_packs<S, PACKS>& x, const char* row, bool here, int width) {
#pragma unroll
    for (int k = 0; k < x.count(); k++) {
        int n = here ? x.valid(k) : 0;
        x[k] = n > 0 ? read_pack<S>(row + x.first(k) * sizeof(typename S::bits), n, width) : pack<S>();
    }
}

// x + alpha * residual as it is stored, in the place of x: the product and the sum are rounded each.
template <class S, int PACKS>
__device__ inline void add_packs(row_packs<S, PACKS>& x, const char* residual, typename S::real alpha, bool here, int width) {
#pragma unroll
    for (int k = 0; k < x.count(); k++) {
        int n = here ? x.valid(k) : 0;
        if (n == 0) continue;
        pack<S> r = read_pack<S>(residual + x.first(k) * sizeof(typename S::bits), n, width);
#pragma unroll
        for (int i = 0; i < pack<S>::VALUES; i++) x[k].set(i, x[k].get(i) + alpha * r.get(i));
    }
}

template <class S, int PACKS>
__device__ inline void write_packs(char* row, const row_packs<S, PACKS>& x, bool here, int width) {
#pragma unroll
    for (int k = 0; k < x.count(); k++) {
        int n = here ? x.valid(k) : 0;
        if (n > 0) write_pack(row + x.first(k) * sizeof(typename S::bits), x[k], n, width);
    }
}
