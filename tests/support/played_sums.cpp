// What threads of a warpgroup do with C, played one after another on the CPU by the kernels' own
// text, for a sanitizer to watch; where they exchange values, again and again until each has got
// what the other sends. RESULT is a file with the struct `Result` of wgmma_result.cuh, or
// with ACROSS that of wgmma_across.cu. Each element of C is compared, and what lies around it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#define __device__
#define __forceinline__ inline
typedef unsigned long long u64;
static struct {
    int x;
} threadIdx;
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static void __syncwarp() {}
static std::vector<unsigned> sent[128];  // by each thread
static size_t exchanged[128];
static bool settled;  // nobody sent anything new
static unsigned __shfl_xor_sync(unsigned, unsigned value, int bit) {
    std::vector<unsigned>&mine = sent[threadIdx.x], &theirs = sent[threadIdx.x ^ bit];
    const size_t i = exchanged[threadIdx.x]++;
    if (i == mine.size()) mine.push_back(~value);
    settled = settled && mine[i] == value;
    mine[i] = value;
    return i < theirs.size() ? theirs[i] : 0;
}
static int min(int a, int b) { return a < b ? a : b; }
static float scaled(float x, int) { return x; }  // by no power of two

constexpr int TERMS = 1;
#if OUT == 2  // bfloat16
typedef unsigned short Out;
static float widened(Out x) {
    const unsigned bits = unsigned(x) << 16;
    float made;
    memcpy(&made, &bits, 4);
    return made;
}
static Out narrowed(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits >> 16;
}
#else
typedef float Out;
static float widened(Out x) { return x; }
static Out narrowed(float x) { return x; }
#endif

#include RESULT

#ifdef ACROSS
constexpr bool BY_COLUMNS = TURNED;  // C is stored so
#else
constexpr bool BY_COLUMNS = false;
#endif
constexpr float ALPHA = 2;
constexpr Out AROUND = Out(77);

static float old_of(int r, int c) { return (7 * r + 3 * c) % 11 - 5; }
static float sum_of(int r, int c) { return (r + c) % 5; }

// The row and the column, in its warpgroup's 64 x BN, of a thread's i-th sum.
static int row_of(int i) {
#ifdef ACROSS
    return my_row() + i / 2 % 2;
#else
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
#endif
}
static int col_of(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// So many elements of a C of m x n were wrong, which begins `off` elements after 16 bytes and has
// rows (or columns) of `pad` more than it needs.
static long played(int m, int n, int pad, int off, float beta) {
    const int lines = BY_COLUMNS ? n : m, length = BY_COLUMNS ? m : n;
    const long long ld = length + pad, size = off + (lines - 1) * ld + length;
    Out* const memory = static_cast<Out*>(malloc(size * sizeof(Out)));  // ends where C does
    for (long long i = 0; i < size; ++i) memory[i] = AROUND;
    Out* const C = memory + off;
    const auto at = [&](int r, int c) -> Out& { return C[BY_COLUMNS ? c * ld + r : r * ld + c]; };
    for (int r = 0; r < m; ++r)
        for (int c = 0; c < n; ++c) at(r, c) = narrowed(beta == 0 ? NAN : old_of(r, c));
#ifdef ACROSS
    const Result result = {m, n, ALPHA, beta, C, ld};
#else
    const Result result = {m, n, ALPHA, beta, nullptr, nullptr, C, ld};
#endif
    long wrong = 0;
    for (int row = 0; row < (m + 127) / 128 * 128; row += 64) {
        for (int col = 0; col < n; col += BN) {
            const long before = wrong;
            settled = true;
            for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) {
                exchanged[threadIdx.x] = 0;
                float sums[BN / 2];
                for (int i = 0; i < BN / 2; ++i) sums[i] = sum_of(row + row_of(i), col + col_of(i));
#ifdef ACROSS
                result.store(sums, row, col);
#else
                result.scale(sums, row, col);  // storing exchanges sums between threads
                for (int i = 0; i < BN / 2; ++i) {
                    const int r = row + row_of(i), c = col + col_of(i);
                    const float old = beta == 0 ? 0 : beta * old_of(r, c);
                    wrong += r < m && c < n && sums[i] != ALPHA * sum_of(r, c) + old;
                }
#endif
            }
            if (!settled) wrong = before, col -= BN;  // once more
        }
    }
#ifdef ACROSS
    for (int r = 0; r < m; ++r) {
        for (int c = 0; c < n; ++c) {
            const float old = beta == 0 ? 0 : beta * old_of(r, c);
            wrong += at(r, c) != ALPHA * sum_of(r, c) + old;
            at(r, c) = AROUND;
        }
    }
    for (long long i = 0; i < size; ++i) wrong += memory[i] != AROUND;
#endif
    free(memory);
    return wrong;
}

// Each pair of places in memory and sides; the next m, or n, has the next third of places. Where a
// product is wrong the others are not made.
int main() {
    const int heights[] = {1, 2, 7, 63, 64, 65, 129}, pads[] = {0, 1, 2, 3, 8};
    const int widths[] = {1, 2, 7, 64, 65, BN - 1, BN, BN + 1, 2 * BN + 6};
    long wrong = 0, products = 0;
    for (int i = 0; i < 7; ++i) {
        for (int j = 0; j < 9; ++j) {
            for (int place = (i + j) % 3; place < 15 && !wrong; place += 3) {
                const int pad = pads[place % 5], off = place / 5;
                for (float beta : {0.f, 3.f}) {
                    wrong += played(heights[i], widths[j], pad, off, beta), ++products;
                }
            }
        }
    }
    printf("%ld products, %ld elements wrong\n", products, wrong);
    return wrong != 0;
}
