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
#include "adding.cuh"
#include "early_launch.cuh"

constexpr int LANES = 64, TEAMS = 16;

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
    const Sums to = {cols, alpha, scales ? exponent_a : nullptr, exponent_b, beta, (Out*)C, ldc};
    to.store(sum, row, col);
}
