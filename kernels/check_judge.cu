/*---
summary = "counts the sums of a product that are beyond their bounds"
entry   = "check_judge"
role    = "check_judge"
# GROUPS  groups of columns
params  = [{GROUPS = 8}]
block   = ["256", "1", "1"]
grid    = ["ceil(m * GROUPS / 32)", "1", "1"]
dtypes  = ["float64"]
source  = "this project: docs/reliability.md"
---*/

constexpr int WARPS = 8;  // of a block, which has 32 sums; each takes some of the shares

// `wanted` and `squares` are what A and B give, m x GROUPS, in `shares` that are to be added;
// `got` and `got_squares` are of C, `before` and `before_squares` of C before, not read where beta is
// 0. `of_products` to `of_before` are variances, times the square of how many deviations are allowed.
extern "C" __global__ void __launch_bounds__(256)
    check_judge(int m, int shares, const double* wanted, const double* squares, const double* got,
                const double* got_squares, const double* before, const double* before_squares,
                double alpha, double beta, double of_products, double of_sums, double of_c,
                double of_before, double tiny, unsigned* bad) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long all = (long long)m * GROUPS, at = blockIdx.x * 32LL + lane;
    __shared__ double parts[WARPS][2][32];
    double sum = 0, square = 0;
    if (at < all) {
#pragma unroll 4
        for (int share = warp; share < shares; share += WARPS) {
            sum += wanted[share * all + at];
            square += squares[share * all + at];
        }
    }
    parts[warp][0][lane] = sum, parts[warp][1][lane] = square;
    __syncthreads();
    if (warp || at >= all) return;
    for (int other = 1; other < WARPS; ++other)
        sum += parts[other][0][lane], square += parts[other][1][lane];
    double error = got[at] - alpha * sum, sums = got_squares[at];
    double variance = of_products * square + of_c * sums;
    if (beta != 0) {
        error -= beta * before[at];
        const double added = beta * beta * before_squares[at];
        variance += of_before * added;
        sums = 2 * (sums + added);
    }
    variance += of_sums * sums;
    const double rest = (error < 0 ? -error : error) - tiny;
    const bool good = variance < 1e300 && (rest <= 0 || rest * rest <= variance);  // NaN is not
    if (!good) atomicAdd(bad, 1u);
}
