// Tiles of A and B in shared memory, for `mma_in_place` and `mma_double`, from lines that begin
// anywhere. They are copied by 16 bytes that begin on 16 bytes: a line that begins within such a
// vector comes with what lies before it, and is shifted by so many elements in shared memory. What
// lies before the matrix itself is not read: a line's first elements are copied one by one.
//
// The including file has THREADS, and BK, the k of a step. Lane 4 g + t of a warp reads what lies in
// lines g of A and B across k, and in words t of k, and at multiples of 8 (of doubles, 4) from there.
#pragma once
#include "shared_memory.cuh"

constexpr int EACH = 16 / SIZE;  // elements of a vector

#if SIZE == 8
typedef double Element;
#elif SIZE == 4
typedef unsigned Element;
#else
typedef unsigned short Element;
#endif

// Starts a copy of 16 bytes, of which the first `real` are read and the others are zeros.
__device__ __forceinline__ void copy_vector(Shared to, const void* from, int real) {
#ifdef HYBRID_GEMM_EMULATOR
    __builtin_memset(to, 0, 16);
    __builtin_memcpy(to, from, real);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real)
                 : "memory");
#endif
}

// An operand's tile in a stage: BX lines along k, or BK lines across it. X is its side of C.
template <int BX, bool ALONG>
struct Tile {
    static constexpr int LINES = ALONG ? BX : BK, LENGTH = ALONG ? BK : BX;
    // Elements from line to line: a vector more, and no bank conflicts.
    static constexpr int PITCH =
        ALONG ? (SIZE == 8 ? 20 : 36 * 4 / SIZE) : BX + (SIZE == 8 ? 4 : 8);
    static constexpr int ELEMENTS = LINES * PITCH;
    static constexpr int VECTORS = LENGTH / EACH;  // of a line

    const Element* from;
    long long ld;
    int x0, x_end, k_end;
    int shift0, step;  // the shift of line 0, and by how much more that of the next one is
    int shifts[2];     // of the lines that this thread reads

    __device__ Tile(const void* matrix, long long ld_, int x0_, int x_end_, int k_end_)
        : from((const Element*)matrix), ld(ld_), x0(x0_), x_end(x_end_), k_end(k_end_) {
        shift0 = int((unsigned long long)matrix % 16 / SIZE);
        step = int(ld % EACH);
        // Their numbers differ by multiples of 8 from these; tiles begin at multiples of 16.
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        constexpr int LINES_A_WORD = SIZE < 4 ? 4 / SIZE : 1;  // that lie across k
        shifts[0] = shift(ALONG ? g : LINES_A_WORD * t);
        shifts[1] = shift(LINES_A_WORD * t + 1);
    }
    // Elements by which a line is shifted.
    __device__ __forceinline__ int shift(int line) const {
        return (shift0 + (line % EACH) * step) % EACH;
    }
    // Whether pairs of elements lie in one word.
    __device__ bool pairs() const { return SIZE == 4 || (shift0 | step) % 2 == 0; }

    __device__ __forceinline__ void load(Element* stage, int k0) const {
        const int line0 = ALONG ? x0 : k0, first = ALONG ? k0 : x0;
        const int lines = min(LINES, (ALONG ? x_end : k_end) - line0);
        const int length = (ALONG ? k_end : x_end) - first;
        const Element* const at = from + line0 * ld + first;
#pragma unroll 4
        for (int i = 0; i < (LINES * VECTORS + THREADS - 1) / THREADS; ++i) {
            const int t = threadIdx.x + i * THREADS;
            if (LINES * VECTORS % THREADS && t >= LINES * VECTORS) break;
            load_vector(stage, at, t / VECTORS, t % VECTORS, lines, length, first == 0);
        }
        if ((shift0 | step) && (int)threadIdx.x < LINES)  // a vector more
            load_vector(stage, at, threadIdx.x, VECTORS, lines, length, false);
    }

    __device__ __forceinline__ void load_vector(Element* stage, const Element* at, int line, int v,
                                                int lines, int length, bool begins) const {
        const int off = v * EACH - shift(line);  // of its first element, in the line
        const int real = line < lines ? max(0, min(16, (length - off) * SIZE)) : 0;
        Element* const to = stage + line * PITCH + v * EACH;
        if (begins && off < 0) {  // before it lies what is another's
            for (int e = -off; e < EACH; ++e)
                to[e] = e * SIZE < real ? at[line * ld + off + e] : Element(0);
            return;
        }
        copy_vector(shared_address(to), real ? at + line * ld + off : from - shift0, real);
    }

    // Where in a stage the element of line x across k at `p` along it lies, where both belong to this
    // thread.
    __device__ __forceinline__ int place(int x, int p) const {
        return (ALONG ? x * PITCH + p : p * PITCH + x) + shifts[0];
    }
};

// Calls use(stage) for the steps of k from `first` to `end`, one after the other, where `stage` has
// the step's tile of A, and that of B after it. Of STAGES in `ring`, all but one are on their way.
template <typename TileA, typename TileB, typename Use>
__device__ __forceinline__ void for_each_step(Element* ring, const TileA& a, const TileB& b,
                                              int first, int end, Use use) {
    constexpr int STAGE = TileA::ELEMENTS + TileB::ELEMENTS;
    int stage = 0, next = 0;  // that is used; that is filled
#pragma unroll 1
    for (int step = first - (STAGES - 1); step < end; ++step) {
        if (step >= first) {
            copies_wait<STAGES - 2>();
            __syncthreads();  // this step is there, and all are done with the one before
        }
        if (const int k0 = (step + STAGES - 1) * BK; step + STAGES - 1 < end) {
            a.load(ring + next * STAGE, k0);
            b.load(ring + next * STAGE + TileA::ELEMENTS, k0);
        }
        copies_commit();
        next = next == STAGES - 1 ? 0 : next + 1;
        if (step < first) continue;
        use(ring + stage * STAGE);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    copies_wait<0>();
    __syncthreads();
}
