/* A malloc for LD_PRELOAD that counts large blocks and lets chosen ones fail.
 *
 * Blocks of `least` bytes or more are counted from `allocations_arm` on. Of these number
 * `fail_at` gets no memory, and with `all` every later one neither; 0 lets none fail.
 * `allocations_live` is the bytes of large blocks that are not freed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static size_t least = 32768;
static atomic_long seen, live;
static long fail_at;
static int armed, all;

void allocations_arm(long number, int also_later) {
    atomic_store(&seen, 0);
    fail_at = number, all = also_later, armed = 1;
}

void allocations_disarm(void) { armed = 0; }

long allocations_seen(void) { return atomic_load(&seen); }

long allocations_live(void) { return atomic_load(&live); }

static int fails(size_t size) {
    if (!armed || size < least) return 0;
    const long number = atomic_fetch_add(&seen, 1) + 1;
    if (!fail_at || (all ? number < fail_at : number != fail_at)) return 0;
    errno = ENOMEM;
    return 1;
}

static void* counted(void* block, int sign) {
    const size_t size = block ? malloc_usable_size(block) : 0;
    if (size >= least) atomic_fetch_add(&live, sign * (long)size);
    return block;
}

void* malloc(size_t size) { return fails(size) ? NULL : counted(__libc_malloc(size), 1); }

void* calloc(size_t count, size_t size) {
    return fails(count * size) ? NULL : counted(__libc_calloc(count, size), 1);
}

void* realloc(void* block, size_t size) {
    if (fails(size)) return NULL;
    counted(block, -1);
    void* moved = __libc_realloc(block, size);
    if (!moved && size) counted(block, 1);
    return counted(moved, 1);
}

void* memalign(size_t align, size_t size) {
    return fails(size) ? NULL : counted(__libc_memalign(align, size), 1);
}

void* aligned_alloc(size_t align, size_t size) { return memalign(align, size); }

int posix_memalign(void** block, size_t align, size_t size) {
    void* made = memalign(align, size);
    if (!made) return ENOMEM;
    *block = made;
    return 0;
}

void free(void* block) {
    counted(block, -1);
    __libc_free(block);
}
