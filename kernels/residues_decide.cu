/*---
summary = "how many moduli a float64 product takes, or that it is made natively"
entry   = "residues_decide"
role    = "residues_decide"
# THREADS  of the one block
params  = [{THREADS = 512}]
block   = ["THREADS", "1", "1"]
grid    = ["1", "1", "1"]
dtypes  = ["float64"]
source  = "this project: docs/fp64x.md"
---*/

// One block. docs/fp64x.md proves the rules. "Row" is a row of A or a column of B:
//
//   measure    a bound of each row's norm, in eighths of log2; what all rows come to
//   fit        at which eighth the bounds of scaled norms lose least
//   overlap    how many large elements rows have at least
//   decide     the least count of moduli that is accurate enough
#include "residues.cuh"

constexpr int HEIGHTS = 32;    // powers of two below the bound of a norm
constexpr int FARTHEST = 400;  // exponents of largest magnitudes: no product leaves float64
// The error that rounding to integers leaves, root mean square over elements of C, relative to
// 2^-53 |A||B|: less than float64's own on normal data, which has the least.
constexpr double LEVEL = 0.5;

// What the rows of one operand come to.
struct Side {
    unsigned eighths;  // bits: which norm % 8 there are
    double flat;       // the least (sum of magnitudes)^2 / (k * sum of squares)
    int far;           // whether an exponent is out of range, or an element is Inf or NaN
    int eighth, loss;  // of bounds: bits % 8, and by how many eighths a row stays below at most
    unsigned least[HEIGHTS];  // elements of a row of at least 2^(bits / 8 - i), as scaled
};

struct Shared {
    Side sides[2];
    unsigned eighths[THREADS];
    double flat[THREADS];
    int far[THREADS];
    unsigned least[HEIGHTS][THREADS / 8];
};

__device__ inline int exponent_of(u64 bits) { return int(bits >> 52) - 1023; }

// At least 8 log2 of a row's norm, rounded up to the next quarter of log2 of its square.
__device__ inline int norm_of(const Row& row, int top) {
    const double squares = row.squares;  // 2^32 (norm / 2^top)^2, and more than 2^32
    const u64 bits = __builtin_bit_cast(u64, squares);
    const double mantissa = real_of((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    return 8 * top + 4 * (exponent_of(bits) - 32) + (mantissa > 1) + (mantissa > 1.189207115) +
           (mantissa > 1.414213562) + (mantissa > 1.681792830);
}

__device__ inline void measure(Side& side, const u64* largest, const Row* rows, int* norms,
                               int count, int k, Shared& shared) {
    const int t = threadIdx.x;
    unsigned eighths = 0;
    double flat = 1;
    int far = 0;
    for (int i = t; i < count; i += THREADS) {
        const int top = exponent_of(largest[i]);
        norms[i] = 0;
        if (!largest[i]) continue;
        if (top > FARTHEST || top < -FARTHEST) {
            far = 1;
            continue;
        }
        const Row row = rows[i];
        norms[i] = norm_of(row, top);
        eighths |= 1u << (norms[i] & 7);
        const double magnitudes = row.magnitudes / UNIT, squares = row.squares / UNIT;
        flat = min(flat, magnitudes * magnitudes / (squares * k));
    }
    shared.eighths[t] = eighths, shared.flat[t] = flat, shared.far[t] = far;
    __syncthreads();
    for (int x = THREADS / 2; x > 0; x /= 2) {
        if (t < x) {
            shared.eighths[t] |= shared.eighths[t + x];
            shared.flat[t] = min(shared.flat[t], shared.flat[t + x]);
            shared.far[t] |= shared.far[t + x];
        }
        __syncthreads();
    }
    if (t == 0) side.eighths = shared.eighths[0], side.flat = shared.flat[0];
    if (t == 0) side.far = shared.far[0];
    __syncthreads();
}

// Scaled by powers of two, a row's norm stays below 2^(bits / 8) by (bits - norm) % 8 eighths: the
// bits % 8 for which that is least over all rows.
__device__ inline void fit(Side& side) {
    side.eighth = 7, side.loss = 8;
    for (int eighth = 7; eighth >= 0; --eighth) {
        int loss = 0;
        for (int i = 0; i < 8; ++i) {
            if (side.eighths >> i & 1) loss = max(loss, (eighth - i) & 7);
        }
        if (loss < side.loss) side.eighth = eighth, side.loss = loss;
    }
}

// For each height h the fewest elements that a row has of at least 2^(bits / 8 - h), as scaled, for
// whole bits / 8: a row's levels lie `below` that.
__device__ inline void overlap(Side& side, const u64* largest, const Row* rows, const int* norms,
                               int count, Shared& shared) {
    const int t = threadIdx.x;
    unsigned least[HEIGHTS];
#pragma unroll
    for (int h = 0; h < HEIGHTS; ++h) least[h] = ~0u;
    for (int i = t; i < count; i += THREADS) {
        if (!largest[i]) continue;
        const int below = -(exponent_of(largest[i]) + shift_of(side.eighth, norms[i]));
        unsigned found = 0;
#pragma unroll
        for (int h = 0; h < HEIGHTS; ++h) {
            if (h >= below && h < below + LEVELS) found += rows[i].count[h - below];
            least[h] = min(least[h], found);
        }
    }
    for (int part = 0; part < 8; ++part) {  // of the threads: shared memory has no room for all
        if (t % 8 == part) {
#pragma unroll
            for (int h = 0; h < HEIGHTS; ++h)
                shared.least[h][t / 8] = part ? min(shared.least[h][t / 8], least[h]) : least[h];
        }
        __syncthreads();
    }
    if (t < HEIGHTS) {
        unsigned all = ~0u;
        for (int i = 0; i < THREADS / 8; ++i) all = min(all, shared.least[t][i]);
        side.least[t] = all;
    }
    __syncthreads();
}

// A lower bound of |A||B| in any element of C, in units of 2^(bits_a / 8 + bits_b / 8): of a row's
// elements and a column's, at least side_a.least + side_b.least - k are both large.
__device__ inline double least_product(const Side& a, const Side& b, int k) {
    double sum = 0;
    for (int i = 0; i < HEIGHTS; ++i) {
        for (int j = 0; j < HEIGHTS; ++j) {
            const double both =
                (double)min(a.least[i], (unsigned)k) + (double)min(b.least[j], (unsigned)k) - k;
            if (both > 0) sum += both * two_to(-2 - i - j);
        }
    }
    return sum;
}

// 2^(x / 8), at most one part in 2^20 too large.
__device__ inline double eighth_power(int x) {
    double power = two_to(x >> 3);
    if (x & 4) power *= 1.4142136;
    if (x & 2) power *= 1.1892072;
    if (x & 1) power *= 1.0905078;
    return power;
}

// The least count of moduli, at most `most`, that is accurate enough; 0 if there is none.
__device__ inline Decision decide(const Side& a, const Side& b, int k, const int* budgets,
                                  int least, int most) {
    const double product = least_product(a, b, k), root = sqrt_of(k), unit = two_to(-53);
    for (int count = least; count <= most && !a.far && !b.far; ++count) {
        const int whole = (budgets[count] - a.eighth - b.eighth) >> 3;
        const int whole_a = (whole + 1) >> 1, whole_b = whole >> 1;
        const int bits_a = 8 * whole_a + a.eighth, bits_b = 8 * whole_b + b.eighth;
        const double error = root * (eighth_power(bits_a) + eighth_power(bits_b)) / 2 + k / 4.0;
        if (!(error <= (k - 2.0) * unit * product * two_to(whole_a + whole_b))) continue;
        const double of_a = eighth_power(1 + a.loss - bits_a);
        const double of_b = eighth_power(1 + b.loss - bits_b);
        const double typical = (of_a * of_a + of_b * of_b) / (12 * a.flat * b.flat);
        if (typical <= LEVEL * LEVEL * unit * unit) return {count, bits_a, bits_b};
    }
    return {0, 0, 0};
}

extern "C" __global__ void __launch_bounds__(THREADS)
    residues_decide(int m, int n, int k, const unsigned long long* largest, const void* memory,
                    int* norms, const int* budgets, int least, int most, int* decision) {
    __shared__ Shared shared;
    const Row* const rows = (const Row*)memory;
    Side &a = shared.sides[0], &b = shared.sides[1];
    measure(a, largest, rows, norms, m, k, shared);
    measure(b, largest + m, rows + m, norms + m, n, k, shared);
    if (threadIdx.x < 2) fit(shared.sides[threadIdx.x]);
    __syncthreads();
    overlap(a, largest, rows, norms, m, shared);
    overlap(b, largest + m, rows + m, norms + m, n, shared);
    if (threadIdx.x) return;
    *(Decision*)decision = decide(a, b, k, budgets, least, most);
}
