// What only Hopper (sm_90a) has, each instruction behind a small function: barriers in shared
// memory (mbarrier), copies of boxes by the tensor memory accelerator (TMA), products of warpgroups
// (wgmma). BN, KIND and WAYS are the including file's; so is INTEGERS, where operands are int8.
#pragma once
#include "early_launch.cuh"

typedef unsigned long long u64;

// A tensor map: 128 bytes that tell TMA where a matrix lies and how large a box is copied at once.
// The host makes it with cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    u64 words[16];
};

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ unsigned block_of_cluster() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for every thread of the cluster; what they wrote to shared memory before is visible after.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;" ::
            : "memory");
}

// --- barriers in shared memory (mbarrier), by their address -------------------------------------

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes the initial state of barriers visible to the cluster and to TMA.
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once, and adds `bytes` to what copies must bring before the barrier's phase is over.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Arrives at the barrier that lies at this address in block `rank` of the cluster: what this thread
// has read may be overwritten once all have arrived. It hands on nothing that was written, and so
// needs no fence over the cluster.
__device__ __forceinline__ void barrier_arrive(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n.reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Waits until the barrier's phase (0 or 1) is over.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n.reg .pred over;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
        "@!over bra again;\n}" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// --- copies (TMA) -------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Starts copying the map's box at element (x, y, z), x contiguous, to shared memory of this block,
// or of all BLOCKS blocks of the cluster; the barrier at the same address there counts its bytes.
template <int BLOCKS>
__device__ __forceinline__ void copy_box(unsigned to, const TensorMap& map, int x, int y, int z,
                                         unsigned barrier) {
    if constexpr (BLOCKS == 1)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
            "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
            "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier),
            "h"(static_cast<unsigned short>((1 << BLOCKS) - 1))
            : "memory");
}

// Starts copying the box at `from` in shared memory to element (x, y, z) of the map, except what
// lies outside the matrix. It belongs to the group of stores that this thread commits next.
__device__ __forceinline__ void store_box(unsigned from, const TensorMap& map, int x, int y,
                                          int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(
            &map),
        "r"(x), "r"(y), "r"(z), "r"(from)
        : "memory");
}
__device__ __forceinline__ void stores_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int LEFT>  // groups of this thread's stores that may still read shared memory
__device__ __forceinline__ void stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Makes what this thread wrote to shared memory visible to the copies that are started after.
__device__ __forceinline__ void fence_for_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four matrices of 8 x 8 numbers of 16 bits; the addresses of a matrix's rows come from
// eight lanes.
__device__ __forceinline__ void store_matrices(unsigned to, unsigned a, unsigned b, unsigned c,
                                               unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

__device__ __forceinline__ unsigned short shared_half(unsigned from) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
    return x;
}

// --- warps and warpgroups -----------------------------------------------------------------------

// The number of the warp, in a way that shows the compiler one value in all lanes.
__device__ __forceinline__ int warp_number() {
    return __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
}

// Returns true in one lane of the warp, always the same. From elect.sync the compiler knows that
// one lane alone does what follows, and TMA's operands need no loop over lanes.
__device__ __forceinline__ bool elected() {
    unsigned is;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(is));
    return is;
}

// Sets how many registers each thread of this warpgroup has from here on.
template <int COUNT>
__device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Barriers by number, of so many threads: barrier_sync arrives and waits for all, barrier_signal
// arrives and goes on.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_signal(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- products of warpgroups (wgmma) -------------------------------------------------------------

// A descriptor says where a swizzled tile lies in shared memory: in rows of WIDTH bytes, and groups
// of eight rows. A tile that lies along k has a row of memory for each row; one that lies across k
// has a row of 64 elements for each k, and the next 64 elements begin `next` bytes further. The
// kernels keep its lower half alone: adding bytes / 16 to that is one instruction, making a
// descriptor takes several.
__device__ __forceinline__ unsigned descriptor_of(unsigned address, int next) {
    return (next >> 4) << 16 | (address & 0x3ffff) >> 4;
}
template <int WIDTH>
__device__ __forceinline__ u64 descriptor(unsigned tile) {
    static_assert(WIDTH == 128 || WIDTH == 64, "swizzles of 128 and 64 bytes");
    constexpr u64 swizzle = WIDTH == 128 ? 1 : 2;
    return swizzle << 62 | static_cast<u64>(8 * WIDTH >> 4) << 32 | tile;
}

// Products run asynchronously: begin orders them after accesses to their registers, commit closes a
// group of them, wait<LEFT> returns once all groups but the LEFT last are done.
__device__ __forceinline__ void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// sums (64 x BN of a warpgroup) += A (64 x k) B (k x BN) for the k of one instruction, A and B in
// tiles that descriptors a and b describe; with `add` = 0, sums = A B. The macros write the
// instruction's text, in which each of the BN / 2 sums of a thread has a name.
#ifdef INTEGERS
typedef int Sum;
#define HELD "+r"
#define SIGNS ""  // operands as they are: integers have no negated form
#else
typedef float Sum;
#define HELD "+f"
#define SIGNS ", 1, 1"
#endif
#define TEN(t) \
    "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9"
#define FOUR(d, i) HELD(d[i]), HELD(d[i + 1]), HELD(d[i + 2]), HELD(d[i + 3])
#define EIGHT(d, i) FOUR(d, i), FOUR(d, i + 4)
#define THIRTY_TWO(d, i) EIGHT(d, i), EIGHT(d, i + 8), EIGHT(d, i + 16), EIGHT(d, i + 24)
#define TEXT_30 TEN("") ", " TEN("1") ", " TEN("2")
#define TEXT_60 TEXT_30 ", " TEN("3") ", " TEN("4") ", " TEN("5")
#define TEXT_90 TEXT_60 ", " TEN("6") ", " TEN("7") ", " TEN("8")
#define TEXT_120 TEXT_90 ", " TEN("9") ", " TEN("10") ", " TEN("11")
#if BN == 64
#define NAMES TEXT_30 ", %30, %31"
#define SUMS(d) THIRTY_TWO(d, 0)
#define OPERANDS "%32, %33", "%34"
#elif BN == 128
#define NAMES TEXT_60 ", %60, %61, %62, %63"
#define SUMS(d) THIRTY_TWO(d, 0), THIRTY_TWO(d, 32)
#define OPERANDS "%64, %65", "%66"
#elif BN == 192
#define NAMES TEXT_90 ", %90, %91, %92, %93, %94, %95"
#define SUMS(d) THIRTY_TWO(d, 0), THIRTY_TWO(d, 32), THIRTY_TWO(d, 64)
#define OPERANDS "%96, %97", "%98"
#else
#define NAMES TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS(d) THIRTY_TWO(d, 0), THIRTY_TWO(d, 32), THIRTY_TWO(d, 64), THIRTY_TWO(d, 96)
#define OPERANDS "%128, %129", "%130"
#endif
// clang-format off
#define WGMMA_(tiles, add)                                                       \
    "{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\n"                             \
    "wgmma.mma_async.sync.aligned.m64n" TEXT(BN) KIND " {" NAMES "}, " tiles     \
    ", p" SIGNS WAYS ";\n}"
// clang-format on
#define WGMMA(given) WGMMA_(given)

__device__ __forceinline__ void wgmma(Sum (&sums)[BN / 2], u64 a, u64 b, int add) {
    asm volatile(WGMMA(OPERANDS) : SUMS(sums) : "l"(a), "l"(b), "r"(add));
}
