// Sums of matrices in host memory, by which products and copies are checked; native_sums.py
// compiles and calls this.
//
// A matrix is cut into pieces, which threads take one after the other. In which order the numbers
// of a sum are added depends on the matrix alone, so threads change no bit of it. What is added is
// float64, or uint64 modulo 2^64.
#include <algorithm>
#include <atomic>
#include <cmath>
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

enum What { LINES, SUMS, PRODUCT };
// As native_sums.py counts them: of floating point, then of integers.
enum Type {
    FLOAT16,
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    UINT8,
    UINT16,
    UINT32,
    UINT64
};

}  // namespace

extern "C" {
// A matrix and what is to be made of it. `pitch` is in bytes, from one row to the next, or where
// `across` is set from one column to the next: the elements of the other are neighbours.
struct Job {
    int64_t what, type, size, across;
    const char* at;
    int64_t rows, cols, pitch, width;  // of a group
    const void *weights, *more;        // of columns; or their sums, of products
    void *of, *second;
    int64_t shares;  // of k, each with sums of its own
    int64_t threads;
};

// A matrix of any strides, in bytes, as real numbers: of a complex one each element is a block of
// `down` x `across`, each its real and its imaginary part times two `factors`, or the magnitudes of
// these.
struct Source {
    const char* at;
    int64_t type, size, rows, cols, down_pitch, right_pitch, down, across, absolute;
    const double* factors;
};

// A thin matrix with `width` columns, as many as fill vectors, by which another is multiplied, or
// its squares; of `classes` there is one for each row modulo 16. `made` is added to; to `walk` come
// its squares after each segment.
struct Thin {
    const void* at;
    int64_t width, classes, squares;
    void* made;
    double* walk;
};

// One reading, of blocks of rows and segments of columns, and what is made of it.
struct Pass {
    int64_t type, threads;
    Source x, before, before_size;
    const int64_t *row_edges, *col_edges;
    int64_t blocks, segments;
    int64_t chunk, every;  // squares are summed of one in `every` chunks of columns
    int64_t thins;
    Thin thin[2];
    const void* left;  // weights of rows
    double *of_left, *of_left_squares;
    const void* weights;  // of columns: for each class of rows, or those of the first for all
    void *folded, *folded_squares;
    int64_t weights_width, folded_width, all_classes, row_origin;
    double (*ends)[3];  // of each row the largest, the least but for its sign, whether one is Inf
    int64_t is_c;
    double beta, of_sums, of_c, of_before;
};
}

namespace {

enum { SUM_FLOAT32, SUM_FLOAT64, SUM_UINT32, SUM_UINT64 };

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
#include "native_sums.h"
#include "native_passes.h"
#undef VECTOR_BYTES
}  // namespace avx2
#pragma GCC pop_options
#endif
namespace any {
#define VECTOR_BYTES 16
#include "native_sums.h"
#include "native_passes.h"
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
    if (job.what == PRODUCT) {
        job.parts = job.shares;
        job.cols_each = pieces(job.cols, job.shares);
    }
    if (job.across) {
        job.rows_each = TALL;
        // Fewer, if there would not be enough for all threads.
        while (job.rows_each > 32 && pieces(job.rows, job.rows_each) < 2 * job.threads)
            job.rows_each /= 2;
        return pieces(job.rows, job.rows_each) * (job.what == SUMS ? GROUPS : job.parts);
    }
    if (job.what == LINES && row_bytes > PIECE) {
        job.cols_each = PIECE / job.size;
        job.parts = pieces(job.cols, job.cols_each);
    } else if (job.what == SUMS && row_bytes > PIECE) {
        job.cols_each = job.width;
        job.parts = GROUPS;
    } else if (job.what == PRODUCT) {
        while (job.rows_each > 8 && pieces(job.rows, job.rows_each) * job.parts < 2 * job.threads)
            job.rows_each /= 2;
    }
    return pieces(job.rows, job.rows_each) * job.parts;
}

// Does so many pieces of work, by at most so many threads; all are done on return.
template <class Work>
void share_out(int64_t count, int64_t threads, const Work& work) {
    std::atomic<int64_t> next(0);
    const auto some = [&] {
        for (int64_t piece; (piece = next.fetch_add(1)) < count;) work(piece);
    };
    std::vector<std::thread> others;
    try {
        for (int64_t i = 1; i < std::min(threads, count); ++i) others.emplace_back(some);
    } catch (const std::exception&) {  // the system has no more threads: those there are do it
    }
    some();
    for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" {

void make_sums(const Job* given) {
    Cut job(*given);
    const int64_t count = cut(job);
    const auto work = has_avx2() ? avx2::work : any::work;
    share_out(count, job.threads, [&](int64_t piece) { work(job, piece); });
}

void make_pass(const Pass* pass) {
    const auto work = has_avx2() ? avx2::work_pass : any::work_pass;
    share_out(pass->blocks, pass->threads, [&](int64_t i) { work(*pass, i); });
}
}
