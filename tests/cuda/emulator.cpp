// Runs a CUDA kernel on the processor, for tests; emulator.h is what the kernel sees of it.
//
// Each CUDA thread is a fiber. A warp runs as far as it can before the next one gets its turn, in an order drawn from a
// seed, so that whoever forgets a barrier reads what nobody has written yet. Shared memory starts as NaN. Every access
// to global memory is checked against the arrays there are, and against what other blocks of the launch have touched,
// and counted. A barrier or shuffle that somebody misses is an error, not a hang.
#include <algorithm>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <utility>

namespace {

// Stacks are no power of two apart: the lanes of a warp would fight for a few lines of the cache.
enum { WARP = 32, MAX_WARPS = 32, STACK = (128 << 10) + 17 * 64, MAX_SHARED = 256 << 10, CANARY = 256, BARRIERS = 16 };
// Entries of a small cache of arrays by address.
enum { RECENT = 64 };

struct index3 { unsigned x, y, z; };

// An array in global memory, and the memory around it that stays as it is. Of each byte: the block that wrote it last,
// and the one that read it last. Most launches read an array or write it, not both: then one of the two need not be
// looked at.
struct region {
    uintptr_t start, end, guard_start, guard_end;
    int32_t *writer, *reader;
    int64_t is_written, is_read;
};

struct counters {
    int64_t read, written;
};

// What one warp-wide operation of 32 lanes needs.
struct rendezvous {
    int operation, arrived;
    uint64_t values[WARP];
};

struct warp {
    void* stack_pointers[WARP];
    unsigned turns[WARP];      // warp-wide operations of each lane so far
    uint32_t ready, done;      // lanes, a bit each
    rendezvous meetings[2];
};

struct barrier {
    int arrived, size;
    uint32_t waiting[MAX_WARPS];
};

struct state {
    warp warps[MAX_WARPS];
    barrier barriers[BARRIERS];
    int n_warps;
    char* stacks;
    void* scheduler;
    warp* current;
    int lane;
    region *regions, *recent[RECENT];
    int n_regions;
    int32_t first_serial, serial;
    counters* count;
    char error[512];
    uint64_t random;
    void (*call)(const uint64_t*);
    const uint64_t* arguments;
};

state now;
alignas(256) char shared_bytes[MAX_SHARED + CANARY];

}  // namespace

extern "C" index3 emulated_thread, emulated_block, emulated_block_size, emulated_grid;
index3 emulated_thread, emulated_block, emulated_block_size, emulated_grid;

namespace {

// Saves what a function call must keep, changes stacks, and goes on there.
__attribute__((naked, noinline)) void change_stack(void** from, void* to) {
    asm volatile(
        "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
        "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
        "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}

void go_to_lane(void** from, int lane) {
    now.lane = lane;
    emulated_thread.x = (unsigned)((now.current - now.warps) * WARP + lane);
    change_stack(from, now.current->stack_pointers[lane]);
}

// The next lane of the warp that can go on has its turn; without one, the next warp.
void pause_lane() {
    void** from = &now.current->stack_pointers[now.lane];
    uint32_t ready = now.current->ready, later = ready & -2u << now.lane;
    if (ready && !now.error[0])
        go_to_lane(from, __builtin_ctz(later ? later : ready));
    else
        change_stack(from, now.scheduler);
}

void stop_lane() { now.current->ready &= ~(1u << now.lane); }

void lane_main() {
    now.call(now.arguments);
    now.current->done |= 1u << now.lane;
    stop_lane();
    pause_lane();
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

region* region_of(uintptr_t start, uintptr_t end) {
    region* after = std::upper_bound(now.regions, now.regions + now.n_regions, start,
                                     [](uintptr_t p, const region& r) { return p < r.start; });
    return after > now.regions && end <= after[-1].end ? after - 1 : 0;
}

// Blocks have ascending serial numbers in the order in which they run.
template <size_t BYTES>
bool touched_by_others(const int32_t* who) {
    int touched = 0;
    for (size_t i = 0; i < BYTES; i++) touched |= (who[i] >= now.first_serial) & (who[i] < now.serial);
    return touched != 0;
}

}  // namespace

extern "C" [[noreturn]] void emulated_failure(const char* format, ...) {
    if (!now.error[0]) {
        va_list rest;
        va_start(rest, format);
        int n = vsnprintf(now.error, sizeof now.error, format, rest);
        va_end(rest);
        snprintf(now.error + n, sizeof now.error - n, " (block %u %u, thread %u)", emulated_block.x, emulated_block.y,
                 emulated_thread.x);
    }
    stop_lane();
    pause_lane();
    abort();
}

namespace {

template <size_t BYTES>
void touch(region* r, uintptr_t p, bool write) {
    int32_t *writer = r->writer + (p - r->start), *reader = r->reader + (p - r->start), *mine = write ? writer : reader;
    if (r->is_written && touched_by_others<BYTES>(writer))
        emulated_failure("%s of what another block writes", write ? "write" : "read");
    if (write && r->is_read && touched_by_others<BYTES>(reader)) emulated_failure("write of what another block reads");
    (write ? r->is_written : r->is_read) = 1;
    for (size_t i = 0; i < BYTES; i++) mine[i] = now.serial;
}

}  // namespace

extern "C" void emulated_access(const void* pointer, size_t bytes, bool write, bool counts) {
    uintptr_t p = (uintptr_t)pointer;
    // By pages: a kernel turns from one array to another all the time.
    region *&recent = now.recent[p / 4096 % RECENT], *r = recent;
    if (!r || p < r->start || p + bytes > r->end) {
        r = region_of(p, p + bytes);
        if (!r) emulated_failure("%s of %zu bytes outside of all arrays", write ? "write" : "read", bytes);
        recent = r;
    }
    switch (bytes) {
    case 1: touch<1>(r, p, write); break;
    case 2: touch<2>(r, p, write); break;
    case 4: touch<4>(r, p, write); break;
    case 8: touch<8>(r, p, write); break;
    case 16: touch<16>(r, p, write); break;
    default: for (size_t i = 0; i < bytes; i++) touch<1>(r, p + i, write);
    }
    if (counts) (write ? now.count->written : now.count->read) += (int64_t)bytes;
}

extern "C" char* emulated_shared_memory() { return shared_bytes; }

extern "C" void emulated_barrier(int id, int n_threads) {
    if (id < 0 || id >= BARRIERS || n_threads % WARP || n_threads <= 0) emulated_failure("barrier %d of %d threads", id, n_threads);
    barrier& b = now.barriers[id];
    if (b.arrived && b.size != n_threads) emulated_failure("barrier %d: two sizes", id);
    b.size = n_threads;
    if (++b.arrived == n_threads) {
        b.arrived = 0;
        for (int i = 0; i < now.n_warps; i++) {
            now.warps[i].ready |= b.waiting[i];
            b.waiting[i] = 0;
        }
        return;
    }
    b.waiting[now.current - now.warps] |= 1u << now.lane;
    stop_lane();
    pause_lane();
}

// All lanes of a warp leave a value; each gets the values of all.
extern "C" const uint64_t* emulated_meet(int operation, uint64_t value) {
    warp& w = *now.current;
    rendezvous& r = w.meetings[w.turns[now.lane]++ % 2];
    if (r.arrived && r.operation != operation) emulated_failure("lanes of a warp do different things");
    r.operation = operation;
    r.values[now.lane] = value;
    if (++r.arrived == WARP) {
        r.arrived = 0;
        w.ready = ~0u;
    } else {
        stop_lane();
        pause_lane();
    }
    return r.values;
}

namespace {

void start_warp(int i) {
    warp& w = now.warps[i];
    for (int lane = 0; lane < WARP; lane++) {
        // As change_stack() leaves it: six registers, then the address to return to; aligned as after a call.
        void** top = (void**)(now.stacks + (size_t)(i * WARP + lane + 1) * STACK) - 2;
        *top = (void*)lane_main;
        w.stack_pointers[lane] = top - 6;
        w.turns[lane] = 0;
    }
    w.ready = ~0u;
    w.done = 0;
    w.meetings[0].arrived = w.meetings[1].arrived = 0;
}

bool run_warp(int i) {
    now.current = &now.warps[i];
    if (!now.current->ready) return false;
    go_to_lane(&now.scheduler, __builtin_ctz(now.current->ready));
    return true;
}

void look_for_deadlock() {
    for (int i = 0; i < now.n_warps; i++)
        if (uint32_t left = ~now.warps[i].done)
            return (void)snprintf(now.error, sizeof now.error,
                                  "deadlock: thread %d of block %u waits for others that have ended or wait elsewhere",
                                  i * WARP + __builtin_ctz(left), emulated_block.x);
}

void look_beyond_shared_memory(size_t shared) {
    for (int i = 0; i < CANARY; i++)
        if ((unsigned char)shared_bytes[shared + i] != 0xa5)
            return (void)snprintf(now.error, sizeof now.error, "write beyond shared memory (block %u)", emulated_block.x);
}

bool is_guard(uintptr_t start, uintptr_t end) {
    return std::all_of((const unsigned char*)start, (const unsigned char*)end, [](unsigned char c) { return c == 0xff; });
}

void look_around_arrays() {
    for (const region* r = now.regions; r < now.regions + now.n_regions; r++)
        if (!is_guard(r->guard_start, r->start) || !is_guard(r->end, r->guard_end))
            return (void)snprintf(now.error, sizeof now.error, "memory around an array was written");
}

void run_block(size_t shared) {
    int order[MAX_WARPS];
    memset(shared_bytes, 0xff, shared);
    memset(shared_bytes + shared, 0xa5, CANARY);
    memset(now.barriers, 0, sizeof now.barriers);
    for (int i = 0; i < now.n_warps; i++) start_warp(i);
    shuffle_order(order, now.n_warps);
    // From the first warp again whenever one has moved: warps drift apart as far as barriers let them.
    for (int k = 0; k < now.n_warps && !now.error[0];) k = run_warp(order[k]) ? 0 : k + 1;
    if (!now.error[0]) look_for_deadlock();
    if (!now.error[0]) look_beyond_shared_memory(shared);
}

}  // namespace

extern "C" const char* emulated_launch(void (*call)(const uint64_t*), const unsigned* grid, unsigned threads, size_t shared,
                                       const uint64_t* arguments, region* regions, int n_regions, int32_t serial,
                                       uint64_t seed, counters* count) {
    if (!now.stacks) {
        now.stacks = (char*)mmap(0, (size_t)MAX_WARPS * WARP * STACK, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (now.stacks == MAP_FAILED) return "no memory for stacks";
    }
    now.call = call;
    now.arguments = arguments;
    now.n_warps = (int)threads / WARP;
    emulated_block_size = {threads, 1, 1};
    emulated_grid = {grid[0], grid[1], 1};
    now.regions = regions;
    now.n_regions = n_regions;
    std::fill_n(now.recent, (int)RECENT, (region*)0);
    now.first_serial = serial;
    now.count = count;
    now.random = seed * 2654435761u + 88172645463325252u;
    now.error[0] = 0;
    int64_t n_blocks = (int64_t)grid[0] * grid[1];
    int64_t* order = (int64_t*)malloc(n_blocks * sizeof(int64_t));
    shuffle_order(order, n_blocks);
    for (int64_t k = 0; k < n_blocks && !now.error[0]; k++) {
        emulated_block = {(unsigned)(order[k] % grid[0]), (unsigned)(order[k] / grid[0]), 0};
        now.serial = serial + (int32_t)k;
        run_block(shared);
    }
    free(order);
    if (!now.error[0]) look_around_arrays();
    return now.error[0] ? now.error : 0;
}
