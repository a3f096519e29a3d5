// Operands of any storage order as the passes read them: four neighbours in memory at a time.
#pragma once

// Four neighbours in memory.
template <typename E>
struct alignas(4 * sizeof(E)) Four {
    E x[4];
};

// An operand as it lies: line after line. ALONG: a line is a row, and runs along k; otherwise
// a line has one k of all rows.
template <typename E, bool ALONG>
struct Source {
    const E* from;
    long long ld;
    int rows, k;

    __device__ bool vectors() const {
        return (unsigned long long)from % sizeof(Four<E>) == 0 && ld % 4 == 0;
    }
    // Four from (line, at) on; zeros beyond the matrix.
    __device__ Four<E> four(long long line, int at, bool vectors) const {
        const int lines = ALONG ? rows : k, length = ALONG ? k : rows;
        Four<E> out = {};
        if (line >= lines || at >= length) return out;
        const E* const p = from + line * ld + at;
        if (vectors && at + 4 <= length) return *(const Four<E>*)p;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (at + i < length) out.x[i] = p[i];
        }
        return out;
    }
};

// Calls body(source, row0, of_b) for one group of HEIGHT rows of op(A) or, once these are through,
// HEIGHT columns of op(B): from row (or column) `row0` on of the operand that `source` reads.
template <typename E, int HEIGHT, typename Body>
__device__ __forceinline__ void for_group(int group, int m, int n, int k, const void* A,
                                          long long lda, const void* B, long long ldb, Body body) {
    const int groups_a = (m + HEIGHT - 1) / HEIGHT;
    if (group < groups_a) {
        const Source<E, !TRANS_A> source = {(const E*)A, lda, m, k};
        body(source, group * HEIGHT, false);
    } else {
        const Source<E, TRANS_B> source = {(const E*)B, ldb, n, k};
        body(source, (group - groups_a) * HEIGHT, true);
    }
}
