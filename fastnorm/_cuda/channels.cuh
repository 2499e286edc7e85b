// How threads share the values of a channel, x seen as (outer, n_channels, inner). Two ways:
//
//     runs      inner values lie next to each other: slices of a channel, a block each
//     columns   runs are shorter than is good for that (one value in channels-last arrays): the matrix of outer rows
//               and n_channels * inner columns, a thread a pack of columns; a channel has inner columns
//
// Which one, and the lengths of slices and chunks, follow from the shape alone.
#pragma once
#include "packs.cuh"

// Threads of a block in both; packs of a slice.
const int THREADS = 256, PACKS = 4, SLICE = THREADS * PACKS;

// a, or the largest number where it is infinite: the rstd of no variance and no eps, times a distance of zero, is zero then.
template <class real>
__device__ inline real at_most_largest(real a) {
    const real LARGEST = sizeof(real) == 4 ? (real)0x1.fffffep127 : (real)0x1.fffffffffffffp1023;
    return a > LARGEST ? LARGEST : a;
}

// Where a slice of a channel is: packs from number `first` on of those that its runs are cut into, the last pack of
// each run as long as what is left of it.
struct slice_place {
    index_t channel, first, packs_of_run, inner, outer;

    __device__ slice_place(index_t outer_, index_t inner_, int values_of_pack) : inner(inner_), outer(outer_) {
        packs_of_run = (inner + values_of_pack - 1) / values_of_pack;
        index_t n_slices = (outer * packs_of_run + SLICE - 1) / SLICE;
        channel = blockIdx.x / n_slices;
        first = blockIdx.x % n_slices * SLICE;
    }
    // Values of the channel before a pack.
    __device__ index_t before(index_t number, int values_of_pack) const {
        return number / packs_of_run * inner + number % packs_of_run * values_of_pack;
    }
    __device__ index_t length(int values_of_pack) const {
        index_t end = smaller(first + SLICE, outer * packs_of_run);
        return before(end, values_of_pack) - before(first, values_of_pack);
    }
};

// The share of a thread.
template <class S>
struct share_of_runs {
    index_t run[PACKS], start[PACKS];   // of pack k: the outer index, where in its run
    int n_valid[PACKS];

    __device__ share_of_runs(const slice_place& place, const team& t) {
        const int VALUES = pack<S>::VALUES;
        index_t first_run = place.first / place.packs_of_run, first_pack = place.first % place.packs_of_run;
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            // Short runs by a division of 32 bits; of the long ones a slice meets two at most.
            index_t number = first_pack + t.rank + k * THREADS, runs;
            if (place.packs_of_run < SLICE)
                runs = (uint32)number / (uint32)place.packs_of_run;
            else
                runs = number >= place.packs_of_run;
            run[k] = first_run + runs;
            start[k] = (number - runs * place.packs_of_run) * VALUES;
            n_valid[k] = run[k] < place.outer ? (int)smaller(place.inner - start[k], (index_t)VALUES) : 0;
        }
    }
    __device__ int count() const { return PACKS; }
    __device__ int valid(int k) const { return n_valid[k]; }
    // In bytes from the first value of the channel.
    __device__ index_t offset(int k, index_t outer_stride) const {
        return run[k] * outer_stride + start[k] * (index_t)sizeof(typename S::bits);
    }
};

template <class S>
__device__ inline void read_runs(row_packs<S, PACKS, share_of_runs<S>>& x, const char* channel, index_t outer_stride,
                                 int width) {
#pragma unroll
    for (int k = 0; k < PACKS; k++)
        x[k] = x.valid(k) > 0 ? read_pack<S>(channel + x.offset(k, outer_stride), x.valid(k), width) : pack<S>();
}

// The columns and rows of a thread: a pack of columns of `across` beside each other, and every down-th row of a chunk.
template <class S>
struct share_of_columns {
    static const int VALUES = pack<S>::VALUES;
    int across, down, at, level, n;     // n: columns that there are of the pack
    index_t chunk, first, begin, end, inner;

    __device__ share_of_columns(index_t outer, index_t n_columns, index_t inner_, index_t rows_of_chunk, int across_)
        : across(across_), down(THREADS / across_), at(threadIdx.x % across_), level(threadIdx.x / across_),
          inner(inner_) {
        index_t n_blocks = (n_columns + across * VALUES - 1) / (across * VALUES);
        chunk = blockIdx.x / n_blocks;
        first = (blockIdx.x % n_blocks * across + at) * VALUES;
        n = first < n_columns ? (int)smaller(n_columns - first, (index_t)VALUES) : 0;
        begin = chunk * rows_of_chunk;
        end = smaller(begin + rows_of_chunk, outer);
    }
    // Columns of the block; and which of all is number c of them.
    __device__ int count() const { return across * VALUES; }
    __device__ index_t column(int c) const { return first + (c - at * VALUES); }
    __device__ index_t channel(index_t column) const { return inner == 1 ? column : column / inner; }
    // Rows from one on, GROUP of them, that this thread still has.
    template <int GROUP>
    __device__ int left(index_t row) const {
        return row + level < end ? (int)smaller((end - row - level + down - 1) / down, (index_t)GROUP) : 0;
    }
};

// GROUP rows from one on, all on their way at the same time; what is not there is zero.
template <class S, int GROUP>
__device__ inline void read_group(pack<S> (&group)[GROUP], const share_of_columns<S>& mine, const char* x,
                                  index_t stride, index_t row, int width) {
    int left = mine.template left<GROUP>(row);
    const char* p = x + (row + mine.level) * stride + mine.first * (index_t)sizeof(typename S::bits);
#pragma unroll
    for (int j = 0; j < GROUP; j++)
        group[j] = mine.n > 0 && j < left ? read_pack<S>(p + j * mine.down * stride, mine.n, width) : pack<S>();
}

template <class S, int GROUP>
__device__ inline void write_group(char* y, const pack<S> (&group)[GROUP], const share_of_columns<S>& mine,
                                   index_t stride, index_t row, int width) {
    int left = mine.template left<GROUP>(row);
    char* p = y + (row + mine.level) * stride + mine.first * (index_t)sizeof(typename S::bits);
#pragma unroll
    for (int j = 0; j < GROUP; j++)
        if (mine.n > 0 && j < left) write_pack<S>(p + j * mine.down * stride, group[j], mine.n, width);
}
