/*---
summary    = "residues multiplied on tensor cores of Hopper: int8 by wgmma, a TMA ring, one product a modulus"
entry      = "gemm_residues"
role       = "residues"
# BM, BN, SPAN, STAGES, CLUSTER: see ring.cuh
# MODULI   the most moduli that the host takes
params     = [{BM = 128, BN = 256, SPAN = 128, STAGES = 4, CLUSTER = 2, MODULI = 16}]
block      = ["128 + 2 * BM", "1", "1"]
grid       = ["CLUSTER * ceil(m / (CLUSTER * BM)) * ceil(n / BN)", "1", "1"]
tile       = ["BM", "BN"]
step       = "SPAN"
cluster    = "CLUSTER"
persistent = true
early      = true
tma        = [
    {operand = "A", along_k = ["SPAN", "BM"]},
    {operand = "B", along_k = ["SPAN", "BN / CLUSTER"]},
]
# alignment; the stages and their barriers
shared     = "1024 + STAGES * (16 + (BM + BN) * SPAN)"
rung       = 110
layouts    = ["nt"]
require    = [
    "BM % 64 == 0", "BM <= 192", "BN % 64 == 0", "BN <= 256", "CLUSTER <= 4", "STAGES >= 3",
    "BN % (8 * CLUSTER) == 0", "SPAN == 128", "MODULI <= 16",
    # sums fit in the registers of a block's threads
    "BM * BN <= 36864",
]
dtypes     = ["int8"]
arch       = "==90a"
runs_on    = ["cuda"]
source     = "this project: docs/fp64x.md"
---*/

// For each modulus p: R (m x n bytes, rows `ldr` apart, planes m * ldr) = A B modulo p, of least
// magnitude. A and B come as boxes of tensor maps over (k, rows): a row has the residues of all
// moduli one after the other, `steps` * 128 of each. Moduli are what ring.cuh calls shares.
// Columns of B lie as residues_pack.cu leaves them, so that each thread has sums of 16 neighbours.
#define KIND "k32.s32.s8.s8"
#define WAYS ""
#define INTEGERS
#define SHARES MODULI
#include "residues.cuh"
#include "wgmma.cuh"

constexpr int BK = SPAN, STEP = 32;  // k of a step, of an instruction
constexpr int A_BYTES = BM * BK, STAGE_BYTES = (BM + BN) * BK;
#include "ring.cuh"

// Starts the copies of one step into the stage at `to`: this block's rows of A, and its share of
// the cluster's columns of B.
__device__ __forceinline__ void load_step(unsigned to, const TensorMap& A, const TensorMap& B,
                                          int row, int col, int k, unsigned rank, unsigned full) {
    constexpr int SHARE = BN / CLUSTER;
    copy_box<1>(to, A, k, row + rank * BM, 0, full);
    copy_box<CLUSTER>(to + A_BYTES + rank * SHARE * BK, B, k, col + rank * SHARE, 0, full);
}

// sums += A B over `steps` stages.
__device__ __forceinline__ void multiply(int (&sums)[BN / 2], const Places& places, Ring& ring,
                                         unsigned a, unsigned b, int steps) {
    multiply_stages(places, ring, steps, [&](unsigned stage) {
#pragma unroll
        for (int k = 0; k < BK; k += STEP)
            wgmma(sums, descriptor<BK>(a + stage + k / 16), descriptor<BK>(b + stage + k / 16), 1);
    });
}

// Where residues go: `to` is the first of a plane.
struct Result {
    int m;
    signed char* to;
    long long ldr;

    // The warpgroup's 64 x BN at (row, col). Of each 8 columns of the tensor cores a thread has a
    // pair, in two rows; eight such pairs are 16 neighbours in R.
    __device__ __forceinline__ void store(const int (&sums)[BN / 2], int row, int col, int plane,
                                          const Modulus& modulus) const {
        const float p = modulus.p, inverse = modulus.inverse;
        const unsigned weights = modulus.sum;
        const int start = modulus.sum_start;
        const int lane = threadIdx.x % 32;
        row += threadIdx.x / 32 % 4 * 16 + lane / 4, col += lane % 4 * 16;
        const auto at = [&](int i) {
            return remainder(dot_bytes(sums[i], weights, start), p, inverse);
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (row + 8 * half >= m) return;
            signed char* const line = to + (plane * (long long)m + row + 8 * half) * ldr;
#pragma unroll
            for (int i = 2 * half; i < BN / 2; i += 32) {
                uint4 packed;
                packed.x = low_bytes(at(i), at(i + 1), at(i + 4), at(i + 5));
                packed.y = low_bytes(at(i + 8), at(i + 9), at(i + 12), at(i + 13));
                packed.z = low_bytes(at(i + 16), at(i + 17), at(i + 20), at(i + 21));
                packed.w = low_bytes(at(i + 24), at(i + 25), at(i + 28), at(i + 29));
                const int c = col + i / 32 * COLUMNS;
                if (c < ldr) *(uint4*)(line + c) = packed;
            }
        }
    }
};

// The role of a warpgroup that multiplies: its 64 x BN of all tiles, from the ring to R.
__device__ __forceinline__ void multiply_tiles(const Places& places, const Tiles& tiles,
                                               const int& consumer, unsigned rank,
                                               const Result& result, const Modulus* moduli) {
    const unsigned a = descriptor_of(places.stages + consumer * 64 * BK, 64 * BK);
    const unsigned b = descriptor_of(places.stages + A_BYTES, 64 * BK);
    Ring ring;
    for_each_part(tiles, [&](const Part& part) {
        int sums[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) sums[i] = BIAS;
        multiply(sums, places, ring, a, b, part.length);
        int row, col;
        tiles.at(part.t, row, col);
        result.store(sums, row + rank * BM + consumer * 64, col, part.share, moduli[part.share]);
    });
}

extern "C" __global__ void __launch_bounds__(128 + 2 * BM, 1) IN_CLUSTERS
    gemm_residues(const __grid_constant__ TensorMap A, const __grid_constant__ TensorMap B, int m,
                  int n, int steps, signed char* R, long long ldr, int count, const void* tables) {
    extern __shared__ char memory[];
    const Places places = places_in(memory);
    const unsigned rank = CLUSTER > 1 ? block_of_cluster() : 0;
    begin_block(places, true, A, B);

    const Tiles tiles = {m, n, count * steps, steps};
    const auto load = [&] {
        const auto load_one = [&](unsigned to, int row, int col, int step, unsigned full) {
            load_step(to, A, B, row, col, step * BK, rank, full);
        };
        load_tiles(places, tiles, wait_for_all, load_one);
    };
    take_roles(
        wait_for_all, load, [] {},
        [&](const int& consumer) {
            const Result result = {m, R, ldr};
            const Modulus* const moduli = (const Modulus*)tables + count * MOST_MODULI;
            multiply_tiles(places, tiles, consumer, rank, result, moduli);
        });
}
