// One reading of a matrix in host memory, and all the sums that a verdict takes from it:
// verify/floats.py and verify/integers.py say which; native_passes.py compiles and calls this.
//
// Threads take blocks of rows. A tile of at most 64 x 64 elements comes into the nearest cache, as
// numbers of the type that is summed in; then each of the sums takes it from there. In which order
// the numbers of a sum are added does not depend on the threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <type_traits>
#include <vector>

extern "C" {
// A matrix of any strides, in bytes, as real numbers: of a complex one each element is a block of
// `down` x `across`, each its real and its imaginary part times two `factors`, or the magnitudes of
// these. The latter lies so many bytes after the former; 0 where elements are real.
struct Source {
    const char* at;
    int64_t type, size, rows, cols, down_pitch, right_pitch, down, across, absolute;
    const double* factors;
    int64_t imaginary;
};

// A thin matrix with `width` columns, as many as fill vectors, by which another is multiplied, or
// its squares; of `classes` there is one for each row modulo 16. `made` is added to; to `walk` come
// the squares of its last `walk_width` columns after each segment.
struct Thin {
    const void* at;
    int64_t width, classes, squares;
    void* made;
    double* walk;
    int64_t walk_width;
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

#include "native_read.h"

#ifdef __AVX__
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
enum { SUM_FLOAT32, SUM_FLOAT64, SUM_UINT32, SUM_UINT64 };

constexpr int64_t SIDE = 64, CLASSES = 16;
constexpr int64_t HIGH =
    4 * SIDE;  // rows that meet the same part of a thin matrix, one after another

template <class T>
struct Sum {  // what sums of tiles are added to
    typedef T type;
};
template <>
struct Sum<float> {
    typedef double type;
};

template <class T>
struct Wide {
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    static constexpr int LANES = VECTOR_BYTES / sizeof(T);
};

template <class T>
using Tile = T[SIDE][SIDE];

// Rows of a tile, which lie in the matrix itself or are a `Tile`. They are read in whole vectors.
template <class T>
struct Rows {
    const T* at;
    int64_t pitch;
    const T* operator[](int64_t row) const { return at + row * pitch; }
};

inline int64_t whole_vectors(int64_t cols) { return (cols + CLASSES - 1) / CLASSES * CLASSES; }

// Copies `count` elements of any size, `pitch` bytes apart, beside one another.
inline void gather(const char* at, int64_t pitch, int64_t size, int64_t count, char* to) {
    for (int64_t i = 0; i < count; ++i) memcpy(to + i * size, at + i * pitch, size);
}

template <class T>
void read_strided(int type, const char* at, int64_t pitch, int64_t size, int64_t count, T* to) {
    if (pitch == size) return read(type, at, count, to);
    char some[SIDE * 8];
    switch (size) {  // of a constant size a copy is one instruction
        case 1:
            gather(at, pitch, 1, count, some);
            break;
        case 2:
            gather(at, pitch, 2, count, some);
            break;
        case 4:
            gather(at, pitch, 4, count, some);
            break;
        default:
            gather(at, pitch, 8, count, some);
    }
    read(type, some, count, to);
}

// Real numbers from the parts of complex ones: a stored element is a block of them.
template <class T>
void fill_parts(const Source& from, int64_t row, int64_t rows, int64_t col, int64_t cols,
                Tile<T>& to) {
    const T none[SIDE] = {};
    T real[SIDE], imaginary[SIDE];
    const int64_t half = from.imaginary ? from.imaginary : from.size, first = col / from.across;
    const int64_t count = (col + cols - 1) / from.across - first + 1;
    for (int64_t r = 0, stored = -1; r < rows; ++r) {
        if ((row + r) / from.down != stored) {
            stored = (row + r) / from.down;
            const char* at = from.at + stored * from.down_pitch + first * from.right_pitch;
            read_strided(from.type, at, from.right_pitch, half, count, real);
            if (from.imaginary)
                read_strided(from.type, at + half, from.right_pitch, half, count, imaginary);
        }
        const double* factors = from.factors + (row + r) % from.down * from.across * 2;
        for (int64_t part = 0; part < from.across; ++part) {
            const T x = static_cast<T>(factors[2 * part]);
            const T y = static_cast<T>(factors[2 * part + 1]);
            // From the first of the tile's columns that are this part of their element.
            int64_t c = ((part - col) % from.across + from.across) % from.across;
            const int64_t begin = (col + c) / from.across - first;
            const T* __restrict of_real = x == 0 ? none : real + begin;  // Inf times 0 is NaN
            const bool has_imaginary = from.imaginary && y != 0;
            const T* __restrict of_imaginary = has_imaginary ? imaginary + begin : none;
            for (int64_t i = 0; c < cols; ++i, c += from.across) {
                T a = x * of_real[i], b = y * of_imaginary[i];
                if constexpr (std::is_floating_point<T>::value)
                    if (from.absolute) a = std::abs(a), b = std::abs(b);
                to[r][c] = a + b;
            }
        }
    }
}

template <class T>
void fill(const Source& from, int64_t row, int64_t rows, int64_t col, int64_t cols, Tile<T>& to) {
    if (from.factors) {
        fill_parts(from, row, rows, col, cols, to);
    } else if (from.down_pitch == from.size && from.right_pitch != from.size) {
        T some[8][SIDE];
        for (int64_t c = 0; c < cols; c += 8) {
            const int64_t few = std::min<int64_t>(8, cols - c);
            for (int64_t i = 0; i < few; ++i) {
                const char* at = from.at + row * from.size + (col + c + i) * from.right_pitch;
                read(from.type, at, rows, some[i]);
            }
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t i = 0; i < 8; ++i) to[r][c + i] = some[i][r];
        }
    } else {
        for (int64_t r = 0; r < rows; ++r) {
            const char* at = from.at + (row + r) * from.down_pitch + col * from.right_pitch;
            if (from.right_pitch == from.size)
                for (int64_t i = 0; i < cols * from.size; i += 64)  // what this row has next
                    __builtin_prefetch(at + cols * from.size + i);
            read_strided(from.type, at, from.right_pitch, from.size, cols, to[r]);
        }
    }
    const int64_t wide = whole_vectors(cols);
    for (int64_t r = 0; r < rows; ++r) std::fill(to[r] + cols, to[r] + wide, T(0));
}

template <class T>
constexpr int type_of() {
    return std::is_same<T, float>::value ? FLOAT32 : std::is_same<T, double>::value ? FLOAT64 : -1;
}

// A tile as it lies, or read into `made`.
template <class T>
Rows<T> tile(const Source& from, int64_t row, int64_t rows, int64_t col, int64_t cols,
             Tile<T>& made) {
    const int64_t size = sizeof(T), pitch = from.down_pitch;
    if (from.factors || from.type != type_of<T>() || from.right_pitch != size || pitch % size ||
        reinterpret_cast<intptr_t>(from.at) % size || cols != whole_vectors(cols)) {
        fill(from, row, rows, col, cols, made);
        return {made[0], SIDE};
    }
    const char* at = from.at + row * pitch + col * size;
    for (int64_t r = 0; r < rows; ++r)  // what these rows have next
        for (int64_t i = 0; i < cols * size; i += 64)
            __builtin_prefetch(at + r * pitch + cols * size + i);
    return {reinterpret_cast<const T*>(at), pitch / size};
}

// --- products with thin matrices --------------------------------------------------------------

// Adds the products of four rows, of which each is 16 after the one before, with some columns. A
// lone vector is summed in two runs, as each addition waits for the one before.
template <class T, int VECTORS>
void add_products(const T* const* x, int64_t count, const T* thin, int64_t width,
                  typename Sum<T>::type* const* to) {
    typedef typename Wide<T>::Vector Vector;
    constexpr int LANES = Wide<T>::LANES;
    typedef typename Sum<T>::type Total
        __attribute__((vector_size(LANES * sizeof(typename Sum<T>::type)), aligned(4), may_alias));
    constexpr int RUNS = VECTORS == 1 ? 2 : 1;
    Vector sums[RUNS][4][VECTORS] = {};
    const auto add = [&](int64_t l, Vector(&run)[4][VECTORS]) {
        Vector of[VECTORS];
        for (int i = 0; i < VECTORS; ++i)
            of[i] = *reinterpret_cast<const Vector*>(thin + l * width + i * LANES);
        for (int r = 0; r < 4; ++r)
            for (int i = 0; i < VECTORS; ++i) run[r][i] += x[r][l] * of[i];
    };
    int64_t l = 0;
    for (; l + RUNS <= count; l += RUNS)
        for (int run = 0; run < RUNS; ++run) add(l + run, sums[run]);
    for (; l < count; ++l) add(l, sums[0]);
    for (int r = 0; r < 4; ++r)
        for (int i = 0; to[r] && i < VECTORS; ++i)
            for (int run = 0; run < RUNS; ++run)
                *reinterpret_cast<Total*>(to[r] + i * LANES) +=
                    __builtin_convertvector(sums[run][r][i], Total);
}

template <class T>
void add_thin(const Rows<T>& x, const Pass& pass, const Thin& thin, int64_t row, int64_t rows,
              int64_t col, int64_t cols) {
    typedef typename Sum<T>::type Total;
    constexpr int64_t LANES = Wide<T>::LANES;
    Total* made = static_cast<Total*>(thin.made) - pass.row_edges[0] * thin.width;
    const int64_t first = pass.col_edges[0], depth = pass.col_edges[pass.segments] - first;
    alignas(64) T panel[SIDE * 3 * LANES];  // columns that all rows meet, beside one another
    for (int64_t j = 0, vectors; j < thin.width; j += vectors * LANES) {
        vectors = std::min<int64_t>(3, (thin.width - j) / LANES);
        const T* at = static_cast<const T*>(thin.at) + (col - first) * thin.width + j;
        int64_t pitch = thin.width;
        if (thin.classes == 1 && pitch > 3 * LANES) {
            for (int64_t l = 0; l < cols; ++l)
                std::copy_n(at + l * pitch, vectors * LANES, panel + l * vectors * LANES);
            at = panel, pitch = vectors * LANES;
        }
        for (int64_t r = 0; r < std::min(rows, CLASSES); ++r) {
            const int64_t set = thin.classes > 1 ? (row + r) % CLASSES : 0;
            const T *with = at + set * depth * pitch, *of[4];
            Total* to[4];
            for (int64_t i = 0; i < 4; ++i) {
                const bool is_there = r + i * CLASSES < rows;  // if not, another is read
                of[i] = x[is_there ? r + i * CLASSES : r];
                to[i] = is_there ? made + (row + r + i * CLASSES) * thin.width + j : nullptr;
            }
            if (vectors == 3)
                add_products<T, 3>(of, cols, with, pitch, to);
            else if (vectors == 2)
                add_products<T, 2>(of, cols, with, pitch, to);
            else
                add_products<T, 1>(of, cols, with, pitch, to);
        }
    }
}

// --- other sums of floating point -------------------------------------------------------------

// Of a row the largest numbers of both signs, by their bits: those of positive numbers rise with
// them, and so do those of negative numbers, which are above all others without a sign.
template <class T>
struct Ends {
    typedef typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type Bits;
    typedef typename std::make_unsigned<Bits>::type Unsigned;
    typedef Bits Signed __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef Unsigned Vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    Signed most;
    Vector least;
};

template <class T>
void add_ends(const Rows<T>& x, int64_t rows, int64_t cols, Ends<T>* ends) {
    typedef typename Ends<T>::Signed Signed;
    typedef typename Ends<T>::Vector Vector;
    for (int64_t r = 0; r < rows; ++r) {
        Ends<T> of = ends[r];
        for (int64_t c = 0; c < cols; c += Wide<T>::LANES) {
            const Signed some = *reinterpret_cast<const Signed*>(x[r] + c);
            const Vector bits = reinterpret_cast<Vector>(some);
            of.most = some > of.most ? some : of.most;
            of.least = bits > of.least ? bits : of.least;
        }
        ends[r] = of;
    }
}

template <class T>
void end_ends(const Ends<T>& of, double* ends) {
    for (int i = 0; i < Wide<T>::LANES; ++i) {
        T x[2];
        const auto most = of.most[i];
        const auto least = of.least[i];
        memcpy(&x[0], &most, sizeof(T));
        memcpy(&x[1], &least, sizeof(T));
        for (int sign = 0; sign < 2; ++sign) {
            const double size = std::abs(static_cast<double>(x[sign]));
            const bool is_finite = size - size == 0;
            if (!is_finite) ends[2] = 1;
            if (is_finite && std::signbit(x[sign]) == sign) ends[sign] = std::max(ends[sign], size);
        }
    }
}

// The weighted sums of a tile's columns; of the `squares` by the squares of the weights.
template <class T>
void add_left(const Rows<T>& x, const T* weights, bool squares, int64_t rows, int64_t cols,
              double* made) {
    T sums[SIDE] = {};
    for (int64_t r = 0; r < rows; r += 4) {
        const T* row[4];
        T by[4];
        for (int64_t i = 0; i < 4; ++i) {  // beyond the last the first of them, by 0
            const bool is_there = r + i < rows;
            row[i] = x[is_there ? r + i : r];
            by[i] = is_there ? weights[r + i] : T(0);
            if (squares) by[i] *= by[i];
        }
        for (int64_t c = 0; c < cols; ++c)
            sums[c] +=
                (by[0] * row[0][c] + by[1] * row[1][c]) + (by[2] * row[2][c] + by[3] * row[3][c]);
    }
    for (int64_t c = 0; c < cols; ++c) made[c] += sums[c];
}

// Sums of a block's columns: in 16 lanes, by their numbers modulo 16, and of squares.
template <class T>
struct Folded {
    typename Wide<T>::Vector of[CLASSES / Wide<T>::LANES], squares;
};

template <class T>
void fold(const Pass& pass, const Rows<T>& x, const Tile<T>& squares, int64_t row, int64_t rows,
          int64_t col, int64_t cols, Folded<T>* made) {
    typedef typename Wide<T>::Vector Vector;
    constexpr int64_t LANES = Wide<T>::LANES, VECTORS = CLASSES / LANES;
    for (int64_t r = 0; r < rows; ++r) {
        Folded<T> sums = made[r];
        const int64_t set = pass.all_classes ? 0 : (row + r + pass.row_origin) % CLASSES;
        const T* weights = static_cast<const T*>(pass.weights) + set * pass.weights_width + col;
        for (int64_t c = 0; c < cols; c += CLASSES)
            for (int64_t i = 0; i < VECTORS; ++i) {
                const int64_t at = c + i * LANES;
                const Vector weight = *reinterpret_cast<const Vector*>(weights + at);
                sums.of[i] += weight * *reinterpret_cast<const Vector*>(x[r] + at);
                sums.squares += weight * weight * *reinterpret_cast<const Vector*>(squares[r] + at);
            }
        made[r] = sums;
    }
}

// Ends the sums of some rows' blocks. Where they are made for all classes, the lanes wait for the
// row's other blocks.
template <class T>
void end_fold(const Pass& pass, int64_t top, int64_t rows, int64_t block, const Folded<T>* sums,
              T* waiting) {
    constexpr int64_t LANES = Wide<T>::LANES;
    const uint64_t begin = pass.col_edges[block];
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = (top + r - pass.row_edges[0]) * pass.folded_width + block;
        T lanes[CLASSES], sum = 0, squares = 0;
        memcpy(lanes, sums[r].of, sizeof lanes);
        for (int64_t i = 0; i < LANES; ++i) squares += sums[r].squares[i];
        static_cast<T*>(pass.folded_squares)[at] = squares;
        for (uint64_t i = 0; i < CLASSES; ++i)
            if (pass.all_classes)
                waiting[((i + begin) % CLASSES * SIDE + r) * pass.segments + block] = lanes[i];
            else
                sum += lanes[i];
        if (!pass.all_classes) static_cast<T*>(pass.folded)[at] = sum;
    }
}

// Gives the lanes of some rows the signs of each class, which are those of a Hadamard matrix.
template <class T>
void end_rows(const Pass& pass, int64_t top, int64_t rows, T* lanes) {
    const int64_t height = pass.row_edges[pass.blocks] - pass.row_edges[0];
    const int64_t each = SIDE * pass.segments;
    for (int64_t half = 1; half < CLASSES; half *= 2)
        for (int64_t i = 0; i < CLASSES; ++i) {
            if (i & half) continue;
            T* __restrict x = lanes + i * each, * __restrict y = lanes + (i + half) * each;
            for (int64_t j = 0; j < rows * pass.segments; ++j) {
                const T a = x[j], b = y[j];
                x[j] = a + b, y[j] = a - b;
            }
        }
    for (int64_t set = 0; set < CLASSES; ++set)
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row = set * height + top + r - pass.row_edges[0];
            std::copy_n(lanes + set * each + r * pass.segments, pass.segments,
                        static_cast<T*>(pass.folded) + row * pass.folded_width);
        }
}

// Squares of A and B; or C less beta C before, and the noise that its rounding leaves in sums.
template <class T>
void squares_of(const Rows<T>& x, int64_t rows, int64_t cols, Tile<T>& made) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < whole_vectors(cols); ++c) made[r][c] = x[r][c] * x[r][c];
}

template <class T>
Rows<T> noise_of(const Pass& pass, const Rows<T>& x, int64_t row, int64_t rows, int64_t col,
                 int64_t cols, Tile<T>& difference, Tile<T>& made) {
    const T of_sums = pass.of_sums, of_c = pass.of_c, of_before = pass.of_before, beta = pass.beta;
    const int64_t wide = whole_vectors(cols);
    if (!pass.before.at) {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < wide; ++c) made[r][c] = (of_sums + of_c) * x[r][c] * x[r][c];
        return x;
    }
    alignas(64) Tile<T> before, size;
    fill(pass.before, row, rows, col, cols, before);
    fill(pass.before_size.at ? pass.before_size : pass.before, row, rows, col, cols, size);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < wide; ++c) {
            const T own = x[r][c], by_beta = beta * size[r][c];
            const T product = own - beta * before[r][c];
            difference[r][c] = product;
            made[r][c] =
                of_sums * product * product + of_c * own * own + of_before * by_beta * by_beta;
        }
    return {difference[0], SIDE};
}

// --- some blocks of rows -----------------------------------------------------------------------

template <class T>
void pass_blocks(const Pass& pass, int64_t from, int64_t to) {
    constexpr bool FLOATS = std::is_floating_point<T>::value;
    alignas(64) Tile<T> own, squares;
    const T* left = static_cast<const T*>(pass.left);
    const int64_t high = pass.weights ? SIDE : HIGH, first = pass.col_edges[0];
    std::vector<Folded<T>> folded(pass.weights ? SIDE : 0);
    std::vector<T> waiting(pass.all_classes ? SIDE * pass.segments * CLASSES : 0);
    std::vector<Ends<T>> ends(pass.ends ? HIGH : 0);
    struct Part {  // of a block of rows
        int64_t row, rows, block;
    };
    const auto add_tile = [&](const Part& part, int64_t col, int64_t cols, int64_t top) {
        const int64_t row = part.row, rows = part.rows;
        const bool squared = FLOATS && col / pass.chunk % pass.every == 0;
        Rows<T> x = tile(pass.x, row, rows, col, cols, own);
        if constexpr (FLOATS) {
            if (pass.ends) add_ends(x, rows, cols, ends.data() + (row - top));
            if (pass.is_c)
                x = noise_of(pass, x, row, rows, col, cols, own, squares);
            else if (squared)
                squares_of(x, rows, cols, squares);
            const int64_t at = part.block * (pass.col_edges[pass.segments] - first) + col - first;
            if (left) add_left(x, left + row, false, rows, cols, pass.of_left + at);
            if (left && squared)
                add_left<T>({squares[0], SIDE}, left + row, true, rows, cols,
                            pass.of_left_squares + at);
            if (pass.weights)
                fold(pass, x, squares, row, rows, col, cols, folded.data() + (row - top));
        }
        for (int64_t i = 0; i < pass.thins; ++i)
            if (!pass.thin[i].squares)
                add_thin(x, pass, pass.thin[i], row, rows, col, cols);
            else if (squared)
                add_thin<T>({squares[0], SIDE}, pass, pass.thin[i], row, rows, col, cols);
    };
    const auto end_segment = [&](int64_t top, int64_t rows, int64_t segment) {
        if constexpr (FLOATS) {
            if (pass.weights) end_fold(pass, top, rows, segment, folded.data(), waiting.data());
            for (int64_t i = 0; i < pass.thins; ++i)
                if (double* walk = pass.thin[i].walk) {
                    const int64_t width = pass.thin[i].walk_width, of = pass.thin[i].width;
                    const double* made = static_cast<const double*>(pass.thin[i].made);
                    for (int64_t r = top - pass.row_edges[0]; rows > 0; ++r, --rows) {
                        const double* last = made + (r + 1) * of - width;
                        for (int64_t j = 0; j < width; ++j)
                            walk[r * width + j] += last[j] * last[j];
                    }
                }
        }
    };
    std::vector<Part> parts;
    for (int64_t block = from; block < to; ++block) {
        const int64_t end = pass.row_edges[block + 1];
        for (int64_t row = pass.row_edges[block]; row < end; row += SIDE)
            parts.push_back({row, std::min(SIDE, end - row), block});
    }
    for (size_t next = 0, after; next < parts.size(); next = after) {
        after = std::min<size_t>(parts.size(), next + high / SIDE);
        const int64_t top = parts[next].row, stop = parts[after - 1].row + parts[after - 1].rows;
        std::fill(ends.begin(), ends.end(), Ends<T>{});
        for (int64_t segment = 0; segment < pass.segments; ++segment) {
            std::fill(folded.begin(), folded.end(), Folded<T>{});
            const int64_t last = pass.col_edges[segment + 1];
            for (int64_t col = pass.col_edges[segment]; col < last; col += SIDE)
                for (size_t i = next; i < after; ++i)
                    add_tile(parts[i], col, std::min(SIDE, last - col), top);
            end_segment(top, stop - top, segment);
        }
        if constexpr (FLOATS) {
            if (pass.all_classes) end_rows(pass, top, stop - top, waiting.data());
            for (int64_t row = top; pass.ends && row < stop; ++row)
                end_ends(ends[row - top], pass.ends[row]);
        }
    }
}

void work(const Pass& pass, int64_t from, int64_t to) {
    switch (pass.type) {
        case SUM_FLOAT32:
            return pass_blocks<float>(pass, from, to);
        case SUM_FLOAT64:
            return pass_blocks<double>(pass, from, to);
        case SUM_UINT32:
            return pass_blocks<uint32_t>(pass, from, to);
        default:
            return pass_blocks<uint64_t>(pass, from, to);
    }
}

}  // namespace

extern "C" {

void make_pass(const Pass* pass) {
    // Neighbours together, where there are enough for all threads: they meet the same thin matrix.
    const int64_t each =
        std::max<int64_t>(1, std::min(pass->blocks / (4 * pass->threads), HIGH / SIDE));
    share_out((pass->blocks + each - 1) / each, pass->threads,
              [&](int64_t i) { work(*pass, i * each, std::min(pass->blocks, (i + 1) * each)); });
}
}
