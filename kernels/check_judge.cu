/*---
summary = "counts the sums of a product that are beyond their bounds"
entry   = "check_judge"
role    = "check_judge"
# GROUPS  groups of columns
# SUMS    1: those of floating point, in float64; 2: those of integers, modulo 2^64
params  = [{GROUPS = 8, SUMS = 1}, {GROUPS = 8, SUMS = 2}]
block   = ["256", "1", "1"]
grid    = ["ceil(m * GROUPS * (1 + 7 * min(1, max(0, k - 7))) / 256)", "1", "1"]
require = ["SUMS <= 2"]
dtypes  = ["float64"]
source  = "this project: docs/reliability.md"
---*/

#if SUMS == 2
typedef unsigned long long Sum;
#else
typedef double Sum;
#endif

// One of m x GROUPS sums, and the second sum of its row and group.
struct Place {
    long long at;
    Sum sum, second;
    bool mine;  // whether this thread judges it
};

// `wanted` and `seconds` are what A and B give, m x GROUPS, in `shares` that are to be added.
// `shares` is k to the launch: from 8 on, 8 threads of a block, which lie 32 apart, add up a sum's.
__device__ __forceinline__ Place place(int m, int shares, const Sum* wanted, const Sum* seconds) {
    const int apart = shares < 8 ? 1 : 8, wide = 256 / apart, part = threadIdx.x / wide;
    const long long all = (long long)m * GROUPS;
    const long long at = (long long)blockIdx.x * wide + threadIdx.x % wide;
    __shared__ Sum parts[2][256];
    Sum sum = 0, second = 0;
    if (at < all) {
#pragma unroll 4
        for (int share = part; share < shares; share += apart) {
            sum += wanted[share * all + at];
            second += seconds[share * all + at];
        }
    }
    parts[0][threadIdx.x] = sum, parts[1][threadIdx.x] = second;
    __syncthreads();
    const bool mine = !part && at < all;
    for (int other = wide + threadIdx.x; mine && other < 256; other += wide)
        sum += parts[0][other], second += parts[1][other];
    return {at, sum, second, mine};
}

// `got` and `got_seconds` are of C, `before` and `before_seconds` of C before, not read where beta
// is 0.
#if SUMS == 2
// They are to be equal in the bits of `mask`, which are those of C.
extern "C" __global__ void __launch_bounds__(256)
    check_judge(int m, int shares, const Sum* wanted, const Sum* seconds, const Sum* got,
                const Sum* got_seconds, const Sum* before, const Sum* before_seconds, Sum alpha,
                Sum beta, Sum mask, unsigned* bad) {
    const Place of = place(m, shares, wanted, seconds);
    if (!of.mine) return;
    Sum error = got[of.at] - alpha * of.sum, other = got_seconds[of.at] - alpha * of.second;
    if (beta) {
        error -= beta * before[of.at];
        other -= beta * before_seconds[of.at];
    }
    if ((error | other) & mask) atomicAdd(bad, 1u);
}
#else
// `of_products` to `of_before` are variances, times the square of how many deviations are allowed.
extern "C" __global__ void __launch_bounds__(256)
    check_judge(int m, int shares, const Sum* wanted, const Sum* seconds, const Sum* got,
                const Sum* got_seconds, const Sum* before, const Sum* before_seconds, Sum alpha,
                Sum beta, Sum of_products, Sum of_sums, Sum of_c, Sum of_before, Sum tiny,
                unsigned* bad) {
    const Place of = place(m, shares, wanted, seconds);
    if (!of.mine) return;
    Sum error = got[of.at] - alpha * of.sum, sums = got_seconds[of.at];
    Sum variance = of_products * of.second + of_c * sums;
    if (beta != 0) {
        error -= beta * before[of.at];
        const Sum added = beta * (beta * before_seconds[of.at]);
        variance += of_before * added;
        sums = 2 * (sums + added);
    }
    variance += of_sums * sums;
    const Sum rest = (error < 0 ? -error : error) - tiny;
    const bool good = variance < 1e300 && (rest <= 0 || rest * rest <= variance);  // NaN is not
    if (!good) atomicAdd(bad, 1u);
}
#endif
