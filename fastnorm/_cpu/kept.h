/* Memory of large results, kept when they are freed and given to the next ones.
 *
 * The C library returns a large block to the system when it is freed, and the next one comes page by page, as it is first
 * written to: as much time again as a norm takes. Kept blocks have their pages. They are marked as free to the system
 * (MADV_FREE): where memory runs short it takes them back, and then they cost what a new block costs, no more.
 *
 * Bounded (keep_at_most) and oldest out first. Only where the system has what this needs; elsewhere nothing is kept.
 */
#ifndef FASTNORM_KEPT_H
#define FASTNORM_KEPT_H

#include <stdlib.h>
#include <string.h>

#if defined(__linux__)

#include <malloc.h>
#include <pthread.h>
#include <sys/mman.h>

#define CAN_KEEP 1

enum {
    KEPT_MAX = 16,             /* blocks */
    KEPT_ALIGNMENT = 1 << 21   /* of huge pages */
};

typedef struct { void *p; size_t size; } kept_block;

static kept_block kept[KEPT_MAX];   /* oldest first */
static int n_kept;
static size_t kept_bytes, kept_limit;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

/* A child of fork has no thread that could release what another one held. */
static void kept_forked(void) {
    pthread_mutex_t unlocked = PTHREAD_MUTEX_INITIALIZER;
    kept_lock = unlocked;
}

/* Take block i out of the list. */
static kept_block kept_out(int i) {
    kept_block b = kept[i];
    n_kept--;
    kept_bytes -= b.size;
    memmove(kept + i, kept + i + 1, (n_kept - i) * sizeof(kept_block));
    return b;
}

/* Release the oldest until there is room for so many bytes more, in a block of its own. */
static void kept_make_room(size_t size) {
    while (n_kept > 0 && (n_kept == KEPT_MAX || kept_bytes + size > kept_limit))
        free(kept_out(0).p);
}

static void release_all(void) {
    pthread_mutex_lock(&kept_lock);
    while (n_kept > 0) free(kept_out(0).p);
    pthread_mutex_unlock(&kept_lock);
}

static void keep_at_most(size_t bytes) {
    static int first = 1;
    if (first) pthread_atfork(NULL, NULL, kept_forked);
    first = 0;
    pthread_mutex_lock(&kept_lock);
    kept_limit = bytes;
    kept_make_room(0);
    pthread_mutex_unlock(&kept_lock);
}

static size_t bytes_kept(void) { return kept_bytes; }

/* The smallest block that is large enough, if not much larger, or a new one. What a block has is somewhat more than was
 * asked for: the C library counts what it left out for the alignment. */
static void *kept_malloc(void *context, size_t size) {
    void *p = NULL;
    int best = -1;
    (void)context;
    pthread_mutex_lock(&kept_lock);
    for (int i = 0; i < n_kept; i++)
        if (kept[i].size >= size && kept[i].size - size <= size / 8 + KEPT_ALIGNMENT
            && (best < 0 || kept[i].size < kept[best].size))
            best = i;
    if (best >= 0) p = kept_out(best).p;
    pthread_mutex_unlock(&kept_lock);
    if (p != NULL) return p;
    if (posix_memalign(&p, KEPT_ALIGNMENT, size)) {
        /* Blocks of other sizes may be in the way. */
        release_all();
        if (posix_memalign(&p, KEPT_ALIGNMENT, size)) return NULL;
    }
#if defined(MADV_HUGEPAGE)
    /* As NumPy does for arrays of this size: less to fault in. */
    madvise(p, size, MADV_HUGEPAGE);
#endif
    return p;
}

static void *kept_calloc(void *context, size_t n, size_t size) {
    (void)context;
    return calloc(n, size);
}

static void *kept_realloc(void *context, void *p, size_t size) {
    (void)context;
    return realloc(p, size);
}

/* size is what NumPy believes; what the block has is asked from the C library. */
static void kept_free(void *context, void *p, size_t size) {
    (void)context;
    size = p == NULL ? 0 : malloc_usable_size(p);
    pthread_mutex_lock(&kept_lock);
    if (size > 0 && size <= kept_limit) {
        kept_make_room(size);
#if defined(MADV_FREE)
        size_t inside = -(size_t)p & 4095;
        madvise((char *)p + inside, (size - inside) & ~(size_t)4095, MADV_FREE);
#endif
        kept[n_kept].p = p;
        kept[n_kept].size = size;
        n_kept++;
        kept_bytes += size;
        p = NULL;
    }
    pthread_mutex_unlock(&kept_lock);
    free(p);
}

#else

#define CAN_KEEP 0

static void keep_at_most(size_t bytes) { (void)bytes; }
static size_t bytes_kept(void) { return 0; }
static void *kept_malloc(void *context, size_t size) { (void)context; return malloc(size); }
static void *kept_calloc(void *context, size_t n, size_t size) { (void)context; return calloc(n, size); }
static void *kept_realloc(void *context, void *p, size_t size) { (void)context; return realloc(p, size); }
static void kept_free(void *context, void *p, size_t size) { (void)context; (void)size; free(p); }

#endif

#endif
