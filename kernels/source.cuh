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
