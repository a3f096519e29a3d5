/*---
summary    = "C from what the shares of k left of a product on tensor cores, added in their order"
entry      = "sum_shares"
role       = "shares"
# OUT: see numbers.cuh
params     = [{OUT = 4}, {OUT = 2}]
# k is the number of shares; a team of 64 threads for each four of them, and 16 at most
block      = ["64", "min(16, ceil(k / 4))", "1"]
grid       = ["ceil(m * ceil(n / 4) / 64)", "1", "1"]
early      = true
require    = ["OUT % 2 == 0", "OUT <= 4"]
dtypes     = ["float16", "bfloat16", "tfloat32"]
source     = "this project: docs/tensor-cores.md"
---*/

// C = alpha 2^(exponent_a[i] + exponent_b[j]) (parts[0] + parts[1] + ...) + beta C. `parts` are
// float32 matrices of rows x cols, one below the other, whose rows begin `ldp` elements apart, a
// multiple of 4. With `wanted` from 0 on nothing happens unless that is the verdict; exponents are
// read if `scales`.
//
// A thread adds four neighbours of a row. Where there are many shares, the threads of a block form
// teams, each of which adds a run of the shares; the first team adds the teams' sums. So the order
// depends on the number of shares alone.
#include "early_launch.cuh"
#include "numbers.cuh"

constexpr int LANES = 64, TEAMS = 16;

template <typename E>
struct alignas(4 * sizeof(E)) Four {
    E x[4];
};

__device__ __forceinline__ void add(Four<float>& sum, const Four<float>& more) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sum.x[i] += more.x[i];
}

// The next `count` shares' four, each `apart` elements after the one before.
__device__ __forceinline__ Four<float> sum_of(const float* from, long long apart, int count) {
    Four<float> sum = {};
    int s = 0;
    for (; s + 4 <= count; s += 4) {  // four loads in flight; the additions keep their order
        Four<float> part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) part[i] = *(const Four<float>*)(from + (s + i) * apart);
#pragma unroll
        for (int i = 0; i < 4; ++i) add(sum, part[i]);
    }
    for (; s < count; ++s) add(sum, *(const Four<float>*)(from + s * apart));
    return sum;
}

// Stores the first `count` of four sums.
__device__ __forceinline__ void store(const Four<float>& sum, int count, float alpha, float beta,
                                      Out* to, bool vectors) {
    Four<Out> out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float old = beta != 0 && i < count ? beta * widened(to[i]) : 0;
        out.x[i] = narrowed(beta == 0 ? alpha * sum.x[i] : alpha * sum.x[i] + old);
    }
    if (vectors && count >= 4) {
        *(Four<Out>*)to = out;
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i < count) to[i] = out.x[i];
    }
}

extern "C" __global__ void __launch_bounds__(LANES * TEAMS)
    sum_shares(int rows, int cols, int shares, const float* parts, long long ldp, float alpha,
               const int* exponent_a, const int* exponent_b, int scales, float beta, void* C,
               long long ldc, const int* verdict, int wanted) {
    alignas(16) __shared__ float sums[TEAMS][LANES][4];
    wait_for_launch_before();
    if (wanted >= 0 && *verdict != wanted) return;
    const int fours = (cols + 3) / 4, lane = threadIdx.x, team = threadIdx.y, teams = blockDim.y;
    const long long mine = (long long)blockIdx.x * LANES + lane;
    const int row = int(mine / fours), col = int(mine % fours) * 4;
    const int each = (shares + teams - 1) / teams, first = min(team * each, shares);
    const bool real = row < rows;

    Four<float> sum = {};
    if (real)
        sum = sum_of(parts + ((long long)first * rows + row) * ldp + col, rows * ldp,
                     min(each, shares - first));
    if (teams > 1) {
        Four<float>* const of_team = (Four<float>*)sums[0];
        if (team) of_team[team * LANES + lane] = sum;
        __syncthreads();
        if (team) return;
        for (int t = 1; t < teams; ++t) add(sum, of_team[t * LANES + lane]);
    }
    if (!real) return;
    Out* const to = (Out*)C + row * ldc + col;
    if (scales) {
        const int of_row = exponent_a[row];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (col + i < cols) sum.x[i] = scaled(sum.x[i], of_row + exponent_b[col + i]);
        }
    }
    const bool vectors = (ldc % 4 == 0) && (unsigned long long)C % sizeof(Four<Out>) == 0;
    store(sum, cols - col, alpha, beta, to, vectors);
}
