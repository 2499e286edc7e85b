// Runs a CUDA kernel on the processor, for tests: included before the kernel's source.
//
// Each CUDA thread is a fiber. A warp runs as far as it can before the next one gets its turn, in an order drawn from a
// seed, so that whoever forgets a barrier reads what nobody has written yet. Shared memory starts as NaN. Every access
// to global memory is checked against the arrays there are, and against what other blocks of the launch have touched,
// and counted. A barrier or shuffle that somebody misses is an error, not a hang.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <utility>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define FASTNORM_READ(pointer, bytes, counts) emulated_access(pointer, bytes, false, counts)
#define FASTNORM_WRITE(pointer, bytes) emulated_access(pointer, bytes, true, true)

namespace {

enum { WARP = 32, MAX_THREADS = 1024, STACK = 128 << 10, MAX_SHARED = 256 << 10, CANARY = 256, BARRIERS = 16 };

struct index3 { unsigned x, y, z; };

// An array in global memory. Of each byte: the block that wrote it last, and the one that read it last.
struct region {
    uintptr_t start, end;
    uint32_t *writer, *reader;
};

struct counters {
    int64_t read, written;
};

// What one warp-wide operation of 32 lanes needs.
struct rendezvous {
    int operation, arrived;
    uint64_t values[WARP];
};

struct fiber {
    void* stack_pointer;
    bool ready, done;
    unsigned turns;      // warp-wide operations so far
    index3 thread;
};

struct state {
    fiber fibers[MAX_THREADS];
    char* stacks;
    void* scheduler;
    fiber* current;
    int n_threads;
    index3 block, block_size, grid;
    rendezvous warps[MAX_THREADS / WARP][2];
    int barrier_arrived[BARRIERS], barrier_size[BARRIERS];
    bool waiting[BARRIERS][MAX_THREADS];
    const region* regions;
    int n_regions;
    const region* last;
    uint32_t first_serial, serial;
    counters* count;
    char error[512];
    uint64_t random;
    void (*call)(const uint64_t*);
    const uint64_t* arguments;
};

state now;
alignas(256) char shared_bytes[MAX_SHARED + CANARY];

#define threadIdx (now.current->thread)
#define blockIdx (now.block)
#define blockDim (now.block_size)
#define gridDim (now.grid)

// Saves what a function call must keep, changes stacks, and goes on there.
__attribute__((naked, noinline)) void change_stack(void** from, void* to) {
    asm volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}

void pause_fiber() { change_stack(&now.current->stack_pointer, now.scheduler); }

[[noreturn]] void fail_here() {
    now.current->ready = false;
    pause_fiber();
    abort();
}

template <class... A>
[[noreturn]] void fail(const char* format, A... a) {
    if (!now.error[0]) {
        int n = snprintf(now.error, sizeof now.error, format, a...);
        snprintf(now.error + n, sizeof now.error - n, " (block %u %u, thread %u)", now.block.x, now.block.y, threadIdx.x);
    }
    fail_here();
}

void fiber_main() {
    now.call(now.arguments);
    now.current->done = true;
    now.current->ready = false;
    pause_fiber();
}

uint64_t next_random() {
    now.random ^= now.random << 13;
    now.random ^= now.random >> 7;
    return now.random ^= now.random << 17;
}

template <class T>
void shuffle_order(T* order, int64_t n) {
    for (int64_t i = 0; i < n; i++) order[i] = (T)i;
    for (int64_t i = n - 1; i > 0; i--) std::swap(order[i], order[next_random() % (i + 1)]);
}

#define PLAIN __attribute__((no_sanitize("undefined")))

PLAIN void emulated_access(const void* pointer, size_t bytes, bool write, bool counts) {
    uintptr_t p = (uintptr_t)pointer;
    const region* r = now.last;
    if (!r || p < r->start || p + bytes > r->end) {
        for (r = now.regions; r < now.regions + now.n_regions; r++)
            if (p >= r->start && p + bytes <= r->end) break;
        if (r == now.regions + now.n_regions) fail("%s of %zu bytes outside of all arrays", write ? "write" : "read", bytes);
        now.last = r;
    }
    for (size_t i = p - r->start; i < p - r->start + bytes; i++) {
        if (r->writer[i] >= now.first_serial && r->writer[i] != now.serial)
            fail("%s of what another block writes", write ? "write" : "read");
        if (write && r->reader[i] >= now.first_serial && r->reader[i] != now.serial) fail("write of what another block reads");
        (write ? r->writer : r->reader)[i] = now.serial;
    }
    if (counts) (write ? now.count->written : now.count->read) += bytes;
}

char* emulated_shared_memory() { return shared_bytes; }

PLAIN void emulated_barrier(int id, int n_threads) {
    if (id < 0 || id >= BARRIERS || n_threads % WARP || n_threads <= 0) fail("barrier %d of %d threads", id, n_threads);
    if (now.barrier_arrived[id] && now.barrier_size[id] != n_threads) fail("barrier %d: two sizes", id);
    int me = now.current - now.fibers;
    now.barrier_size[id] = n_threads;
    if (++now.barrier_arrived[id] == n_threads) {
        now.barrier_arrived[id] = 0;
        for (int i = 0; i < now.n_threads; i++)
            if (now.waiting[id][i]) {
                now.waiting[id][i] = false;
                now.fibers[i].ready = true;
            }
        return;
    }
    now.waiting[id][me] = true;
    now.current->ready = false;
    pause_fiber();
}

void __syncthreads() { emulated_barrier(0, now.n_threads); }

// All lanes of a warp leave a value; each gets the values of all.
PLAIN const uint64_t* meet(int operation, uint64_t value) {
    int me = now.current - now.fibers, warp = me / WARP;
    rendezvous& r = now.warps[warp][now.current->turns++ % 2];
    if (r.arrived && r.operation != operation) fail("lanes of a warp do different things");
    r.operation = operation;
    r.values[me % WARP] = value;
    if (++r.arrived == WARP) {
        r.arrived = 0;
        for (int i = warp * WARP; i < (warp + 1) * WARP; i++) now.fibers[i].ready = true;
    } else {
        now.current->ready = false;
        pause_fiber();
    }
    return r.values;
}

template <class T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
    if (lanes != 0xffffffffu) fail("a shuffle of some lanes only");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = meet(1000 + mask, bits)[(threadIdx.x % WARP) ^ mask];
    memcpy(&value, &bits, sizeof value);
    return value;
}

bool __any_sync(unsigned lanes, bool value) {
    if (lanes != 0xffffffffu) fail("a vote of some lanes only");
    const uint64_t* votes = meet(2000, value);
    for (int i = 0; i < WARP; i++)
        if (votes[i]) return true;
    return false;
}

void start_fiber(int i) {
    fiber& f = now.fibers[i];
    // As change_stack() leaves it: six registers, then the address to return to; aligned as after a call.
    void** top = (void**)(now.stacks + (size_t)(i + 1) * STACK) - 2;
    *top = (void*)fiber_main;
    f.stack_pointer = top - 6;
    f.ready = true;
    f.done = false;
    f.turns = 0;
    f.thread = {(unsigned)i, 0, 0};
}

PLAIN bool run_warp(int warp) {
    bool ran = false, again = true;
    while (again && !now.error[0]) {
        again = false;
        for (int i = warp * WARP; i < (warp + 1) * WARP; i++)
            if (now.fibers[i].ready && !now.error[0]) {
                now.current = &now.fibers[i];
                change_stack(&now.scheduler, now.current->stack_pointer);
                ran = again = true;
            }
    }
    return ran;
}

PLAIN void run_block(size_t shared) {
    int n_warps = now.n_threads / WARP, order[MAX_THREADS / WARP];
    memset(shared_bytes, 0xff, shared);
    memset(shared_bytes + shared, 0xa5, CANARY);
    memset(now.warps, 0, sizeof now.warps);
    memset(now.barrier_arrived, 0, sizeof now.barrier_arrived);
    memset(now.waiting, 0, sizeof now.waiting);
    for (int i = 0; i < now.n_threads; i++) start_fiber(i);
    shuffle_order(order, n_warps);
    // From the first warp again whenever one has moved: warps drift apart as far as barriers let them.
    for (int k = 0; k < n_warps && !now.error[0];) k = run_warp(order[k]) ? 0 : k + 1;
    for (int i = 0; i < now.n_threads && !now.error[0]; i++)
        if (!now.fibers[i].done) {
            now.current = &now.fibers[i];
            snprintf(now.error, sizeof now.error, "deadlock: thread %d of block %u waits for others that have ended or wait elsewhere", i,
                     now.block.x);
        }
    for (int i = 0; i < CANARY && !now.error[0]; i++)
        if ((unsigned char)shared_bytes[shared + i] != 0xa5)
            snprintf(now.error, sizeof now.error, "write beyond shared memory (block %u)", now.block.x);
}

// Kinds of arguments as CuPy packs Python's numbers: 8 bytes each, i and p from int, d from float.
template <class T> struct kind { static const char value = '?'; };
template <> struct kind<long long> { static const char value = 'i'; };
template <> struct kind<double> { static const char value = 'd'; };
template <class T> struct kind<T*> { static const char value = 'p'; };

template <class T>
T unpack(uint64_t bits) {
    T value;
    static_assert(sizeof value == 8, "CuPy packs 8 bytes");
    memcpy(&value, &bits, 8);
    return value;
}

template <class F, F f> struct entry;
template <class... A, void (*f)(A...)>
struct entry<void (*)(A...), f> {
    template <size_t... I>
    static void call_with(const uint64_t* a, std::index_sequence<I...>) { f(unpack<A>(a[I])...); }
    static void call(const uint64_t* a) { call_with(a, std::index_sequence_for<A...>()); }
    static constexpr char kinds[] = {kind<A>::value..., 0};
};

}  // namespace

// UBSan's own hooks: a finding ends the launch.
extern "C" void __ubsan_get_current_report_data(const char** kind, const char** message, const char** file, unsigned* line,
                                                unsigned* column, char** address);
extern "C" void __ubsan_on_report() {
    const char *kind, *message, *file;
    unsigned line, column;
    char* address;
    __ubsan_get_current_report_data(&kind, &message, &file, &line, &column, &address);
    fail("%s: %s, line %u", kind, message, line);
}

extern "C" const char* emulated_launch(void (*call)(const uint64_t*), const unsigned* grid, unsigned threads, size_t shared,
                                       const uint64_t* arguments, const region* regions, int n_regions, uint32_t serial,
                                       uint64_t seed, counters* count) {
    if (!now.stacks) {
        now.stacks = (char*)mmap(0, (size_t)MAX_THREADS * STACK, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (now.stacks == MAP_FAILED) return "no memory for stacks";
    }
    now.call = call;
    now.arguments = arguments;
    now.n_threads = (int)threads;
    now.block_size = {threads, 1, 1};
    now.grid = {grid[0], grid[1], 1};
    now.regions = regions;
    now.n_regions = n_regions;
    now.last = 0;
    now.first_serial = serial;
    now.count = count;
    now.random = seed * 2654435761u + 88172645463325252u;
    now.error[0] = 0;
    int64_t n_blocks = (int64_t)grid[0] * grid[1];
    int64_t* order = (int64_t*)malloc(n_blocks * sizeof(int64_t));
    shuffle_order(order, n_blocks);
    for (int64_t k = 0; k < n_blocks && !now.error[0]; k++) {
        now.block = {(unsigned)(order[k] % grid[0]), (unsigned)(order[k] / grid[0]), 0};
        now.serial = serial + (uint32_t)k;
        run_block(shared);
    }
    free(order);
    return now.error[0] ? now.error : 0;
}

#define EMULATED_KERNEL(name)                                                                    \
    extern "C" void emulated_call_##name(const uint64_t* a) { entry<decltype(&name), &name>::call(a); } \
    extern "C" const char* emulated_kinds_##name() { return entry<decltype(&name), &name>::kinds; }
