// What the block-tiled kernels share: a block of C is BM x BN, a step of K is BK, a thread owns
// TM x TN elements. Panel moves operands from global memory to shared memory; store_tile writes C.
//
//   BM  rows of C that a block computes
//   BN  columns of C that a block computes
//   BK  k of a step: what shared memory holds of A and B at once
//   TM  rows of C that a thread computes
//   TN  columns of C that a thread computes
#pragma once
#include "common.cuh"

constexpr int THREADS = (BM / TM) * (BN / TN);

// Enough blocks a multiprocessor to hide latency: 512 threads, where their sums fit in registers.
constexpr int BLOCKS = TM * TN * SIZE <= 256 && THREADS < 512 ? 512 / THREADS : 1;

// Sixteen bytes after each row of a tile that is written transposed: neighbours down a column
// then fall in distinct banks, and rows still begin on 16 bytes.
constexpr int PAD = 16 / SIZE;

// The WIDTH rows of op(A) (or columns of op(B)) that a block's tile needs, by BK of K at a time.
// In memory, neighbours run along K (ALONG_K: A as it is, B transposed) or along the width;
// either way each thread moves vectors of four neighbours, W_APART or P_APART apart.
template <int WIDTH, bool ALONG_K>
struct Panel {
    static constexpr int LINE = (ALONG_K ? BK : WIDTH) / 4;   // vectors in a row of memory
    static constexpr int VECTORS = WIDTH * BK / 4 / THREADS;  // a thread
    static constexpr int W_APART = ALONG_K ? THREADS / LINE : 0;
    static constexpr int P_APART = ALONG_K ? 0 : THREADS / LINE;
    const T* from;          // this thread's first vector
    long long step, apart;  // from it to the next step's, and to the next vector, in elements
    int edge;               // from the panel's beginning to the matrix's edge, across K
    bool vectors;           // rows in memory begin on 16 bytes
    Vec4 item[VECTORS];

    // Where in the panel this thread begins, across K and along K.
    __device__ static int w() { return ALONG_K ? threadIdx.x / LINE : threadIdx.x % LINE * 4; }
    __device__ static int p() { return ALONG_K ? threadIdx.x % LINE * 4 : threadIdx.x / LINE; }

    // The panel that begins `first` rows of op(A) (columns of op(B)) into a matrix of `extent`.
    __device__ Panel(const T* matrix, long long ld, long long first, int extent) {
        from = matrix + (ALONG_K ? (first + w()) * ld + p() : p() * ld + first + w());
        step = ALONG_K ? BK : BK * ld;
        apart = THREADS / LINE * ld;
        edge = int(extent - first);
        vectors = aligned(matrix, ld);
    }

    // Whether whole steps of K need no guards; the same for all threads of a block.
    __device__ bool inside() const { return vectors && edge >= WIDTH; }

    // The next BK of K into registers, where all of it is there.
    __device__ void fetch() {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) item[v] = *(const Vec4*)(from + v * apart);
        from += step;
    }

    // The next BK of K, of which `left` remain, into registers; zeros beyond the edges.
    __device__ void fetch(int left) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int across = edge - w() - v * W_APART, along = left - p() - v * P_APART;
            if (vectors && across >= (ALONG_K ? 1 : 4) && along >= (ALONG_K ? 4 : 1)) {
                item[v] = *(const Vec4*)(from + v * apart);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool real = across > (ALONG_K ? 0 : i) && along > (ALONG_K ? i : 0);
                    item[v].x[i] = real ? from[v * apart + i] : T(0);
                }
            }
        }
        from += step;
    }

    // What fetch brought, into a tile in shared memory whose element (w, p) is at
    // w * W_STEP + p * P_STEP.
    template <int W_STEP, int P_STEP>
    __device__ void put(T* tile) const {
        constexpr int STEP = ALONG_K ? P_STEP : W_STEP;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            T* to = tile + (w() + v * W_APART) * W_STEP + (p() + v * P_APART) * P_STEP;
            if (STEP == 1) {
                *(Vec4*)to = item[v];
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) to[i * STEP] = item[v].x[i];
            }
        }
    }
};

using PanelA = Panel<BM, !TRANS_A>;
using PanelB = Panel<BN, TRANS_B>;

// Fetches step after step of the `left` of K that remain, and calls `use` after each. Whole
// steps of a block inside the matrices have a loop of their own, without guards.
template <typename Use>
__device__ inline void for_each_step(PanelA& a, PanelB& b, int left, Use use) {
    if (a.inside() && b.inside()) {
        for (; left >= BK; left -= BK) {
            a.fetch();
            b.fetch();
            use();
        }
    }
    for (; left > 0; left -= BK) {
        a.fetch(left);
        b.fetch(left);
        use();
    }
}

// sum += the outer product of TM elements of a column of op(A) and TN of a row of op(B).
__device__ inline void add_outer(T (&sum)[TM][TN], const Vec4 (&a)[TM / 4],
                                 const Vec4 (&b)[TN / 4]) {
#pragma unroll
    for (int i = 0; i < TM; ++i) {
#pragma unroll
        for (int j = 0; j < TN; ++j) sum[i][j] += a[i / 4].x[i % 4] * b[j / 4].x[j % 4];
    }
}

// Four neighbours of a row of which `left` are in C, and the same written. `vectors`: rows begin
// on 16 bytes.
__device__ inline Vec4 read_vector(const T* from, int left, bool vectors) {
    if (vectors && left >= 4) return *(const Vec4*)from;
    Vec4 v = {};
#pragma unroll
    for (int x = 0; x < 4; ++x)
        if (x < left) v.x[x] = from[x];
    return v;
}

__device__ inline void write_vector(T* to, int left, bool vectors, const Vec4& v) {
    if (vectors && left >= 4) {
        *(Vec4*)to = v;
        return;
    }
#pragma unroll
    for (int x = 0; x < 4; ++x)
        if (x < left) to[x] = v.x[x];
}

// A thread's sums to C from (row, col) on: four rows or columns, then the next four ROW_STEP
// rows or COL_STEP columns further. What beta scales is read for four rows before these are
// written, so that its loads overlap.
template <int ROW_STEP, int COL_STEP>
__device__ inline void store_tile(int m, int n, T alpha, const T (&sum)[TM][TN], T beta, T* C,
                                  long long ldc, long long row, long long col) {
    constexpr int COLS = TN / 4;
    const bool vectors = aligned(C, ldc);
    const int right = int(n - col);  // columns from the first on
    T* to = C + row * ldc + col;
#pragma unroll
    for (int first = 0; first < TM; first += 4) {
        const int down = int(m - row) - first / 4 * ROW_STEP;  // rows from here on
        Vec4 c[4][COLS] = {};
        if (beta != T(0)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < COLS; ++j)
                    if (i < down)
                        c[i][j] =
                            read_vector(to + i * ldc + j * COL_STEP, right - j * COL_STEP, vectors);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i >= down) continue;
#pragma unroll
            for (int j = 0; j < COLS; ++j) {
                const T* s = &sum[first + i][4 * j];
                write_vector(to + i * ldc + j * COL_STEP, right - j * COL_STEP, vectors,
                             result(&c[i][j], Vec4{{s[0], s[1], s[2], s[3]}}, alpha, beta));
            }
        }
        to += ROW_STEP * ldc;
    }
}
