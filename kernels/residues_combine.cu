/*---
summary = "C from its residues by the Chinese remainder theorem: alpha * A B + beta * C in float64"
entry   = "residues_combine"
role    = "residues_combine"
# ROWS  rows of C that a thread makes four neighbours of, 8 apart
params  = [{ROWS = 2}]
block   = ["32", "8", "1"]
grid    = ["ceil(n / 128)", "ceil(m / (8 * ROWS))", "1"]
limits  = ["m <= 65535 * 8 * ROWS"]
dtypes  = ["float64"]
source  = "this project: docs/fp64x.md"
---*/

// An element of the integer product is x = sum of r_i (P / p_i) - q P, where r_i is its residue
// times the inverse of P / p_i, which B's residues have brought along, and q the whole number that
// makes |x| < P / 2. P / p_i and P come in three parts: sums of parts times r_i, below 2^53 of the
// part's unit, are exact in float64.
#include "residues.cuh"

struct alignas(16) Two {
    double x[2];
};

// What is the same for all elements: P in parts, its reciprocal, and tables of P / p_i.
struct Constants {
    double whole[3], reciprocal;
    const Modulus* moduli;  // in shared memory
    int count;
};

// The integer whose residues have the first bytes of `words`, as float64 nearest to it, or the one
// next to that where it lies within 2^-50 of the middle.
__device__ __forceinline__ void combine(double (&out)[4], const signed char* residues,
                                        long long plane, const Constants& constants) {
    constexpr int AHEAD = 4;  // words that are fetched together
    double sums[4][3] = {};
    for (int first = 0; first < constants.count; first += AHEAD) {
        unsigned words[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            const int at = min(first + i, constants.count - 1);
            words[i] = *(const unsigned*)(residues + at * plane) ^ 0x80808080;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= constants.count) break;
            const double* const part = constants.moduli[first + i].part;
            const double high = part[0], middle = part[1], low = part[2];
#pragma unroll
            for (int j = 0; j < 4; ++j) {  // the bits of 2^52 + x, for 8-bit x
                const double r = real_of(0x4330000000000000ull | (words[i] >> 8 * j & 255)) -
                                 (4503599627370496.0 + 128);
                sums[j][0] = fma(r, high, sums[j][0]);
                sums[j][1] = fma(r, middle, sums[j][1]);
                sums[j][2] = fma(r, low, sums[j][2]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const double quotient = nearest_whole(sums[j][0] * constants.reciprocal);
        const double high = fma(-quotient, constants.whole[0], sums[j][0]);
        const double middle = fma(-quotient, constants.whole[1], sums[j][1]);
        const double low = fma(-quotient, constants.whole[2], sums[j][2]);
        const double sum = high + middle, of_middle = sum - high;
        const double rest = (high - (sum - of_middle)) + (middle - of_middle);
        out[j] = sum + (rest + low);
    }
}

extern "C" __global__ void __launch_bounds__(256, 3)
    residues_combine(int m, int n, double alpha, const signed char* residues, long long ldr,
                     const int* norms, int count, int bits_a, int bits_b, double beta, double* C,
                     long long ldc, const void* tables, const double* wholes) {
    __shared__ Modulus moduli[MOST_MODULI];
    const int t = threadIdx.y * 32 + threadIdx.x;
    if (t < count) moduli[t] = ((const Modulus*)tables)[count * MOST_MODULI + t];
    __syncthreads();
    const double* const whole = wholes + 4 * count;
    const Constants constants = {
        {whole[0], whole[1], whole[2]},
        whole[3],
        moduli,
        count,
    };
    const int col = (blockIdx.x * 32 + threadIdx.x) * 4;
    if (col >= n) return;
    double of_columns[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
        of_columns[j] = two_to(-shift_of(bits_b, norms[m + min(col + j, n - 1)]));
    const bool vectors = ((u64)C | ldc * 8) % 16 == 0 && col + 4 <= n;
    for (int i = 0; i < ROWS; ++i) {
        const int row = (blockIdx.y * ROWS + i) * 8 + threadIdx.y;
        if (row >= m) return;
        double x[4];
        combine(x, residues + row * ldr + col, m * ldr, constants);
        const double of_row = two_to(-shift_of(bits_a, norms[row]));
        double* const to = C + row * ldc + col;
        Two two[2] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            x[j] = alpha * (x[j] * of_row * of_columns[j]);
            if (vectors && j % 2 == 0 && beta != 0) two[j / 2] = *(const Two*)(to + j);
            if (beta != 0 && col + j < n) x[j] += beta * (vectors ? two[j / 2].x[j % 2] : to[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (vectors && j % 2 == 0) *(Two*)(to + j) = {x[j], x[j + 1]};
            if (!vectors && col + j < n) to[j] = x[j];
        }
    }
}
