/*---
summary = "counts the sums of a product that are beyond their bounds"
entry   = "check_judge"
role    = "check_judge"
# GROUPS  groups of columns
params  = [{GROUPS = 8}]
block   = ["256", "1", "1"]
grid    = ["ceil(m * GROUPS * (1 + 7 * min(1, max(0, k - 7))) / 256)", "1", "1"]
dtypes  = ["float64"]
source  = "this project: docs/reliability.md"
---*/

// `wanted` and `squares` are what A and B give, m x GROUPS, in `shares` that are to be added;
// `got` and `got_squares` are of C, `before` and `before_squares` of C before, not read where beta is
// 0. `of_products` to `of_before` are variances, times the square of how many deviations are allowed.
// `shares` is k to the launch: from 8 on, 8 threads of a block, which lie 32 apart, add up a sum's.
extern "C" __global__ void __launch_bounds__(256)
    check_judge(int m, int shares, const double* wanted, const double* squares, const double* got,
                const double* got_squares, const double* before, const double* before_squares,
                double alpha, double beta, double of_products, double of_sums, double of_c,
                double of_before, double tiny, unsigned* bad) {
    const int apart = shares < 8 ? 1 : 8, wide = 256 / apart, part = threadIdx.x / wide;
    const long long all = (long long)m * GROUPS;
    const long long at = (long long)blockIdx.x * wide + threadIdx.x % wide;
    __shared__ double parts[2][256];
    double sum = 0, square = 0;
    if (at < all) {
#pragma unroll 4
        for (int share = part; share < shares; share += apart) {
            sum += wanted[share * all + at];
            square += squares[share * all + at];
        }
    }
    parts[0][threadIdx.x] = sum, parts[1][threadIdx.x] = square;
    __syncthreads();
    if (part || at >= all) return;
    for (int other = wide + threadIdx.x; other < 256; other += wide)
        sum += parts[0][other], square += parts[1][other];
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
