/* A malloc for LD_PRELOAD that counts large blocks and lets chosen ones fail.
 *
 * Blocks of `least` bytes or more are counted from `allocations_arm` on. Of these number
 * `fail_at` gets no memory, and with `all` every later one neither; 0 lets none fail.
 * `allocations_live` is the bytes of large blocks that are not freed. Left out is what the dynamic
 * linker takes, for threads' variables: without it, that ends the process.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern void* __libc_malloc(size_t);
extern void* __libc_calloc(size_t, size_t);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);
extern void __libc_free(void*);

static size_t least = 32768;
static atomic_long seen, live;
static long fail_at;
static int armed, all;
static uintptr_t linker_begin, linker_end;

static int look_at(struct dl_phdr_info* info, size_t size, void* unused) {
    (void)size, (void)unused;
    if (!info->dlpi_name || !strstr(info->dlpi_name, "/ld-")) return 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)* const part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        linker_begin = info->dlpi_addr + part->p_vaddr;
        linker_end = linker_begin + part->p_memsz;
    }
    return 1;
}

__attribute__((constructor)) static void find_linker(void) { dl_iterate_phdr(look_at, NULL); }

void allocations_arm(long number, int also_later) {
    atomic_store(&seen, 0);
    fail_at = number, all = also_later, armed = 1;
}

void allocations_disarm(void) { armed = 0; }

long allocations_seen(void) { return atomic_load(&seen); }

long allocations_live(void) { return atomic_load(&live); }

static int fails(size_t size, void* caller) {
    const uintptr_t from = (uintptr_t)caller;
    if (!armed || size < least || (linker_begin <= from && from < linker_end)) return 0;
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

#define CALLER __builtin_return_address(0)

void* malloc(size_t size) { return fails(size, CALLER) ? NULL : counted(__libc_malloc(size), 1); }

void* calloc(size_t count, size_t size) {
    return fails(count * size, CALLER) ? NULL : counted(__libc_calloc(count, size), 1);
}

void* realloc(void* block, size_t size) {
    if (fails(size, CALLER)) return NULL;
    counted(block, -1);
    void* moved = __libc_realloc(block, size);
    if (!moved && size) counted(block, 1);
    return counted(moved, 1);
}

static void* aligned(size_t align, size_t size, void* caller) {
    return fails(size, caller) ? NULL : counted(__libc_memalign(align, size), 1);
}

void* memalign(size_t align, size_t size) { return aligned(align, size, CALLER); }

void* aligned_alloc(size_t align, size_t size) { return aligned(align, size, CALLER); }

int posix_memalign(void** block, size_t align, size_t size) {
    void* made = aligned(align, size, CALLER);
    if (!made) return ENOMEM;
    *block = made;
    return 0;
}

void free(void* block) {
    counted(block, -1);
    __libc_free(block);
}
