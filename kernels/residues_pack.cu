/*---
summary = "op(A) and op(B) as integers, and these as residues of int8: rows along k, modulus after modulus"
entry   = "residues_pack"
role    = "residues_pack"
# SLICE  k that a block packs
params  = [{SLICE = 1024}]
block   = ["256", "1", "1"]
grid    = ["ceil(m / 32) + ceil(n / 32)", "max(1, ceil(k / SLICE))", "1"]
require = ["SLICE % 128 == 0"]
dtypes  = ["float64"]
source  = "this project: docs/fp64x.md"
---*/

// Row r of A goes to row r, column n of B to row place_of(n). A row has the residues modulo the
// first of the `count` moduli, then those modulo the next, k of each, rounded up to 128, with zeros
// beyond k.
#include "residues.cuh"
#include "source.cuh"

constexpr int HEIGHT = 32, STEP = 128;          // a tile: rows by k
constexpr int EACH = 16, ACROSS = STEP / EACH;  // k that a thread packs; such threads of a row
constexpr int CHUNK = EACH + 1;                 // in shared memory: no two of a half warp in a bank
constexpr int PITCH = ACROSS * CHUNK;

// Reads the tile of HEIGHT rows by STEP of k at (row0, k0), with k along its rows.
template <bool ALONG>
__device__ inline void load_tile(u64 (&tile)[HEIGHT][PITCH], const Source<u64, ALONG>& source,
                                 int row0, int k0, bool vectors) {
    constexpr int LINE = ALONG ? STEP : HEIGHT, WIDE = LINE / 4;  // of the tile, in memory
    const int t = threadIdx.x, p = t % WIDE * 4, line = t / WIDE;
    constexpr int EVERY = 256 / WIDE;
    Four<u64> four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int at = line + EVERY * i;
        four[i] = ALONG ? source.four(row0 + at, k0 + p, vectors)
                        : source.four(k0 + at, row0 + p, vectors);
    }
    __syncthreads();  // the tile before has been read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const int row = ALONG ? line + EVERY * i : p + x, k = ALONG ? p + x : line + EVERY * i;
            tile[row][k / EACH * CHUNK + k % EACH] = four[i].x[x];
        }
    }
    __syncthreads();
}

// Residues of EACH integers, which come plus 2^63, in words of four bytes.
__device__ __forceinline__ uint4 residues_of(const u64 (&x)[EACH], const unsigned* weights,
                                             int start, float p, float inverse) {
    const unsigned low = weights[0], high = weights[1];
    const auto at = [&](int i) {
        const int sum = dot_bytes((unsigned)x[i], low, dot_bytes(x[i] >> 32, high, start));
        return remainder(sum, p, inverse);
    };
    uint4 packed;
    packed.x = low_bytes(at(0), at(1), at(2), at(3));
    packed.y = low_bytes(at(4), at(5), at(6), at(7));
    packed.z = low_bytes(at(8), at(9), at(10), at(11));
    packed.w = low_bytes(at(12), at(13), at(14), at(15));
    return packed;
}

// Packs HEIGHT rows from `row0` on of A or, with `of_b`, columns of B, over a SLICE of k.
template <bool ALONG>
__device__ __forceinline__ void pack(const Source<u64, ALONG>& source, int row0, bool of_b,
                                     int bits, const int* norms, signed char* to, int count,
                                     const Modulus* moduli, u64 (&tile)[HEIGHT][PITCH]) {
    const bool vectors = source.vectors();
    const int pitch = (source.k + STEP - 1) / STEP * STEP;
    const int t = threadIdx.x, chunk = t % ACROSS, mine = t / ACROSS, row = row0 + mine;
    const double scale = row < source.rows ? two_to(shift_of(bits, norms[row])) : 0;
    const int place = of_b ? place_of(row) : row;
    signed char* const line = to + (long long)place * count * pitch + chunk * EACH;
    const int stop = min(pitch, (int)(blockIdx.y + 1) * SLICE);
    for (int k0 = blockIdx.y * SLICE; k0 < stop; k0 += STEP) {
        load_tile(tile, source, row0, k0, vectors);
        if (row >= source.rows) continue;
        u64 x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const double real = real_of(tile[mine][chunk * CHUNK + i]);
            x[i] = (u64)nearest_integer(real * scale) ^ 1ull << 63;
        }
        for (int i = 0; i < count; ++i) {
            const Modulus& one = moduli[i];
            *(uint4*)(line + (long long)i * pitch + k0) = residues_of(
                x, of_b ? one.b : one.a, of_b ? one.b_start : one.a_start, one.p, one.inverse);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 3)
    residues_pack(int m, int n, int k, const double* A, long long lda, const double* B,
                  long long ldb, signed char* to_a, signed char* to_b, const int* norms, int count,
                  int bits_a, int bits_b, const void* tables) {
    __shared__ u64 tile[HEIGHT][PITCH];
    const Modulus* const moduli = (const Modulus*)tables + count * MOST_MODULI;
    for_group<u64, HEIGHT>(
        blockIdx.x, m, n, k, A, lda, B, ldb, [&](const auto& source, int row0, bool of_b) {
            pack(source, row0, of_b, of_b ? bits_b : bits_a, norms + (of_b ? m : 0),
                 of_b ? to_b : to_a, count, moduli, tile);
        });
}
