// How a product of float32 in two parts is to be made, by what the rows of A and the columns of B
// ("rows" below) allow. docs/tensor-cores.md proves the rules.
#pragma once

// UNDECIDED: rows have been looked at, and the product that reads the state first decides.
enum Verdict { UNDECIDED = -1, FP16_SPLIT, TF32_SPLIT, STRICT };

// What the rows of an operand allow, each as the largest of a number that is 0 where nothing is
// known: exponents of the largest magnitudes of rows that are not zero, BIAS more and BIAS less
// them; exponents between a row's largest and smallest; elements of a row that are not within 2^-7
// of its largest; and those that the fp16 split would cut short.
enum Worst { HIGHEST, LOWEST, RANGE, SMALL, CUT };
constexpr int BIAS = 200;

// What one product, or one part of an operand that is split alone, leaves on the device. All is 0
// at first.
struct State {
    int verdict;
    int taken[3];          // products so far, by verdict
    unsigned hopeless;     // whether a row has shown that the fp16 split will not do
    unsigned worst[2][5];  // of A's rows, and of B's columns, by `Worst`
    int k, least_k_tf32;
};

// The rules. Where blocks gave up, rows have been counted in part, but the one that was hopeless is
// so already: 8 of its cut elements exceed k, and `large` cannot.
__device__ inline Verdict decide(const unsigned (&worst)[2][5], int k, int least_k_tf32) {
    const auto most = [&](int what) { return (int)max(worst[0][what], worst[1][what]); };
    const auto sum = [&](int what) { return (long long)worst[0][what] + worst[1][what]; };
    int doublings = 0;  // of 1, to k
#pragma unroll
    for (int i = 0; i < 31; ++i) doublings += k > 1 << i;
    const int highest[2] = {(int)worst[0][HIGHEST] - BIAS, (int)worst[1][HIGHEST] - BIAS};
    const bool none = !worst[0][HIGHEST] || !worst[1][HIGHEST];  // all of A or B is zero
    const bool moderate = most(LOWEST) - BIAS <= 76 && most(HIGHEST) - BIAS <= 96;
    if (!moderate || (!none && highest[0] + highest[1] + 2 + doublings > 127)) return STRICT;
    const long long large = (long long)k - sum(SMALL);
    if (sum(CUT) == 0 || 8 * sum(CUT) <= large) return FP16_SPLIT;
    const bool held = most(RANGE) <= 153 && sum(RANGE) <= 203;
    return held && k >= least_k_tf32 && doublings <= 24 ? TF32_SPLIT : STRICT;
}

// The verdict, for all threads of each block of the product that comes first after A and B were
// looked at. One thread of all writes it down for the launches behind.
__device__ inline Verdict verdict_of(State* state) {
    // A warp reads all words at once: blocks of the whole device ask one part of the cache for
    // them.
    constexpr int WORDS = sizeof(State) / sizeof(int);
    static_assert(WORDS <= 32, "a lane reads a word");
    const int lane = threadIdx.x % 32;
    union {
        int word[WORDS];
        State is;
    } now;
    const int mine = lane < WORDS ? ((const volatile int*)state)[lane] : 0;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) now.word[i] = __shfl_sync(~0u, mine, i);
    if (now.is.verdict != UNDECIDED) return (Verdict)now.is.verdict;
    const Verdict verdict = decide(now.is.worst, now.is.k, now.is.least_k_tf32);
    if (!blockIdx.x && !blockIdx.y && !blockIdx.z && !threadIdx.x) {
        state->verdict = verdict;
        ++state->taken[verdict];
    }
    return verdict;
}

// Forgets what the rows of the product allow, once the verdict is written and no block reads them.
__device__ inline void forget(State* state) {
#pragma unroll
    for (int i = 0; i < 10; ++i) state->worst[i / 5][i % 5] = 0;
    state->hopeless = 0;
}
