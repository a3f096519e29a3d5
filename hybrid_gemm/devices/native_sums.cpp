// Sums of matrices in host memory, by which products and copies are checked; native_sums.py
// compiles and calls this.
//
// A matrix is cut into pieces, which threads take one after the other. In which order the numbers
// of a sum are added depends on the matrix alone, so threads change no bit of it. What is added is
// float64, or uint64 modulo 2^64.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t GROUPS = 8;         // of columns: as in checksums.py
constexpr int64_t RUN = 512;          // elements of a row that are read at once, a multiple of 8
constexpr int64_t TALL = 256;         // rows that are, where the elements of columns are neighbours
constexpr int64_t PIECE = 256 << 10;  // bytes that a thread takes at a time

enum What { LINES, SUMS };

}  // namespace

extern "C" {
// A matrix and what is to be made of it. `pitch` is in bytes, from one row to the next, or where
// `across` is set from one column to the next: the elements of the other are neighbours.
struct Job {
    int64_t what, type, size, across;
    const char* at;
    int64_t rows, cols, pitch, width;  // of a group
    const void* weights;               // of columns
    void *of, *second;
    int64_t threads;
};
}

namespace {

struct Cut : Job {
    // A piece has so many rows, and one of so many parts of the columns.
    int64_t rows_each = 1, cols_each = 0, parts = 1;
    explicit Cut(const Job& job) : Job(job) {}
};

#if defined(__x86_64__) && !defined(WITHOUT_AVX2)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define VECTOR_BYTES 32
#include "native_read.h"
#include "native_sums.h"
#undef VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options
#endif
namespace any {
#define VECTOR_BYTES 16
#include "native_read.h"
#include "native_sums.h"
#undef VECTOR_BYTES
}  // namespace any

bool has_avx2() {
#if defined(__x86_64__) && !defined(WITHOUT_AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

#if !defined(__x86_64__) || defined(WITHOUT_AVX2)
namespace avx2 = any;
#endif

int64_t pieces(int64_t whole, int64_t each) { return (whole + each - 1) / each; }

// Says how the matrix is cut, and into how many pieces.
int64_t cut(Cut& job) {
    const int64_t row_bytes = std::max<int64_t>(1, job.cols * job.size);
    job.rows_each = std::max<int64_t>(1, PIECE / row_bytes);
    job.cols_each = job.cols;
    if (job.across) {
        job.rows_each = TALL;
        // Fewer, if there would not be enough for all threads.
        while (job.rows_each > 32 && pieces(job.rows, job.rows_each) < 2 * job.threads)
            job.rows_each /= 2;
        return pieces(job.rows, job.rows_each) * GROUPS;
    }
    if (job.what == LINES && row_bytes > PIECE) {
        job.cols_each = PIECE / job.size;
        job.parts = pieces(job.cols, job.cols_each);
    } else if (job.what == SUMS && row_bytes > PIECE) {
        job.cols_each = job.width;
        job.parts = GROUPS;
    }
    return pieces(job.rows, job.rows_each) * job.parts;
}

}  // namespace

extern "C" {

// Makes the sums.
void make_sums(const Job* given) {
    Cut job(*given);
    const int64_t count = cut(job);
    const auto work = has_avx2() ? avx2::work : any::work;
    any::share_out(count, job.threads, [&](int64_t piece) { work(job, piece); });
}
}
