// What a kernel sees of the emulator: included before its source, compiled with it. emulator.cpp runs it.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define FASTNORM_READ(pointer, bytes, counts) emulated_access(pointer, bytes, false, counts)
#define FASTNORM_WRITE(pointer, bytes) emulated_access(pointer, bytes, true, true)

struct emulated_index { unsigned x, y, z; };

extern "C" {
extern emulated_index emulated_thread, emulated_block, emulated_block_size, emulated_grid;
void emulated_access(const void* pointer, size_t bytes, bool write, bool counts);
char* emulated_shared_memory();
void emulated_barrier(int id, int n_threads);
const uint64_t* emulated_meet(int operation, uint64_t value);
[[noreturn]] void emulated_failure(const char* format, ...);
}

#define threadIdx emulated_thread
#define blockIdx emulated_block
#define blockDim emulated_block_size
#define gridDim emulated_grid

static inline void __syncthreads() { emulated_barrier(0, (int)blockDim.x); }

template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
    if (lanes != 0xffffffffu) emulated_failure("a shuffle of some lanes only");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = emulated_meet(1000 + mask, bits)[(threadIdx.x % 32) ^ mask];
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline bool __any_sync(unsigned lanes, bool value) {
    if (lanes != 0xffffffffu) emulated_failure("a vote of some lanes only");
    const uint64_t* votes = emulated_meet(2000, value);
    for (int i = 0; i < 32; i++)
        if (votes[i]) return true;
    return false;
}

// Kinds of arguments as CuPy packs Python's numbers: 8 bytes each, i and p from int, d from float.
template <class T> struct emulated_kind { static const char value = '?'; };
template <> struct emulated_kind<long long> { static const char value = 'i'; };
template <> struct emulated_kind<double> { static const char value = 'd'; };
template <class T> struct emulated_kind<T*> { static const char value = 'p'; };

template <class T>
T emulated_argument(uint64_t bits) {
    T value;
    static_assert(sizeof value == 8, "CuPy packs 8 bytes");
    memcpy(&value, &bits, 8);
    return value;
}

template <size_t... I> struct emulated_indices {};
template <size_t N, size_t... I> struct emulated_count : emulated_count<N - 1, N - 1, I...> {};
template <size_t... I> struct emulated_count<0, I...> { typedef emulated_indices<I...> indices; };

template <class F, F f> struct emulated_entry;
template <class... A, void (*f)(A...)>
struct emulated_entry<void (*)(A...), f> {
    template <size_t... I>
    static void call_with(const uint64_t* a, emulated_indices<I...>) { f(emulated_argument<A>(a[I])...); }
    static void call(const uint64_t* a) { call_with(a, typename emulated_count<sizeof...(A)>::indices()); }
    static constexpr char kinds[] = {emulated_kind<A>::value..., 0};
};

#define EMULATED_KERNEL(name)                                                                                        \
    extern "C" void emulated_call_##name(const uint64_t* a) { emulated_entry<decltype(&name), &name>::call(a); } \
    extern "C" const char* emulated_kinds_##name() { return emulated_entry<decltype(&name), &name>::kinds; }

// UBSan's own hooks: a finding ends the launch.
extern "C" void __ubsan_get_current_report_data(const char** kind, const char** message, const char** file, unsigned* line,
                                                unsigned* column, char** address);
extern "C" void __ubsan_on_report() {
    const char *kind, *message, *file;
    unsigned line, column;
    char* address;
    __ubsan_get_current_report_data(&kind, &message, &file, &line, &column, &address);
    emulated_failure("%s: %s, line %u", kind, message, line);
}
