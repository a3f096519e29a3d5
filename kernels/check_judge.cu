/*---
summary = "counts the sums of a product that are beyond their bounds"
entry   = "check_judge"
role    = "check_judge"
# GROUPS  groups of columns
params  = [{GROUPS = 8}]
block   = ["256", "1", "1"]
grid    = ["ceil(m * GROUPS / 256)", "1", "1"]
dtypes  = ["float64"]
source  = "this project: docs/reliability.md"
---*/

// `wanted` and `squares` are what A and B give, m x GROUPS, in `shares` that are to be added;
// `got` and `got_squares` are of C, `before` and `before_squares` of C before, not read where beta is
// 0. `of_products` to `of_before` are variances, times the square of how many deviations are allowed.
extern "C" __global__ void __launch_bounds__(256)
    check_judge(int m, int shares, const double* wanted, const double* squares, const double* got,
                const double* got_squares, const double* before, const double* before_squares,
                double alpha, double beta, double of_products, double of_sums, double of_c,
                double of_before, double tiny, unsigned* bad) {
    const long long at = blockIdx.x * 256LL + threadIdx.x;
    if (at >= (long long)m * GROUPS) return;
    double sum = 0, square = 0;
    for (int share = 0; share < shares; ++share) {
        sum += wanted[(long long)share * m * GROUPS + at];
        square += squares[(long long)share * m * GROUPS + at];
    }
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
