// One reading of a matrix, and all the sums that a verdict takes from it, for one kind of CPU: it is
// included after native_sums.h, in the same namespaces. verify/sums.py says what the sums are.
//
// A tile of at most 64 x 64 elements is read into the nearest cache, as numbers of the type that is
// summed in, and scaled; then each of the sums takes it from there.

constexpr int64_t SIDE = 64, CLASSES = 16;
constexpr int64_t HIGH = 4 * SIDE;  // rows that meet the same part of a thin matrix, one after another

template <class T>
struct Sum {  // what sums of tiles are added to
    typedef T type;
};
template <>
struct Sum<float> {
    typedef double type;
};

template <class T>
using Tile = T[SIDE][SIDE];

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
    T real[SIDE], imaginary[SIDE];
    const int64_t half = from.size / 2, first = col / from.across;
    const int64_t count = (col + cols - 1) / from.across - first + 1;
    for (int64_t r = 0, stored = -1; r < rows; ++r) {
        if ((row + r) / from.down != stored) {
            stored = (row + r) / from.down;
            const char* at = from.at + stored * from.down_pitch + first * from.right_pitch;
            read_strided(from.type, at, from.right_pitch, half, count, real);
            read_strided(from.type, at + half, from.right_pitch, half, count, imaginary);
        }
        const double* factors = from.factors + (row + r) % from.down * from.across * 2;
        for (int64_t part = 0; part < from.across; ++part) {
            const T x = static_cast<T>(factors[2 * part]);
            const T y = static_cast<T>(factors[2 * part + 1]);
            // From the first of the tile's columns that are this part of their element.
            int64_t c = ((part - col) % from.across + from.across) % from.across;
            for (; c < cols; c += from.across) {
                const int64_t i = (col + c) / from.across - first;
                T a = x == 0 ? 0 : x * real[i], b = y == 0 ? 0 : y * imaginary[i];
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
    const int64_t wide = (cols + CLASSES - 1) / CLASSES * CLASSES;
    if constexpr (std::is_floating_point<T>::value) {
        const T* across = static_cast<const T*>(from.col_scale);
        for (int64_t r = 0; r < rows && across; ++r) {
            const T down = static_cast<const T*>(from.row_scale)[row + r];
            for (int64_t c = 0; c < cols; ++c) {  // 0 leaves out Inf and NaN, too
                const T factor = down * across[col + c];
                to[r][c] = factor == 0 ? 0 : to[r][c] * factor;
            }
        }
    }
    for (int64_t r = 0; r < rows; ++r) std::fill(to[r] + cols, to[r] + wide, T(0));
    for (int64_t r = rows; r < SIDE; ++r) std::fill(to[r], to[r] + wide, T(0));
}

// --- products with thin matrices --------------------------------------------------------------

template <class T>
struct Wide {
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    static constexpr int LANES = VECTOR_BYTES / sizeof(T);
};

// Adds the products of four rows, of which each is 16 after the one before, with some columns.
template <class T, int VECTORS>
void add_products(const T* x, int64_t count, const T* thin, int64_t width,
                  typename Sum<T>::type* const* to) {
    typedef typename Wide<T>::Vector Vector;
    constexpr int LANES = Wide<T>::LANES;
    Vector sums[4][VECTORS] = {};
    for (int64_t l = 0; l < count; ++l) {
        Vector of[VECTORS];
        for (int i = 0; i < VECTORS; ++i)
            of[i] = *reinterpret_cast<const Vector*>(thin + l * width + i * LANES);
        for (int r = 0; r < 4; ++r)
            for (int i = 0; i < VECTORS; ++i) sums[r][i] += x[r * CLASSES * SIDE + l] * of[i];
    }
    for (int r = 0; r < 4; ++r)
        if (to[r])
            for (int i = 0; i < VECTORS; ++i)
                for (int j = 0; j < LANES; ++j) to[r][i * LANES + j] += sums[r][i][j];
}

template <class T>
void add_thin(const Tile<T>& x, const Pass& pass, const Thin& thin, int64_t row, int64_t rows,
              int64_t col, int64_t cols) {
    typedef typename Sum<T>::type Total;
    constexpr int64_t LANES = Wide<T>::LANES;
    Total* made = static_cast<Total*>(thin.made) - pass.row_edges[0] * thin.width;
    const int64_t first = pass.col_edges[0], depth = pass.col_edges[pass.segments] - first;
    for (int64_t r = 0; r < std::min(rows, CLASSES); ++r) {
        const int64_t set = thin.classes > 1 ? (row + r) % CLASSES : 0;
        const T* with = static_cast<const T*>(thin.at) + (set * depth + col - first) * thin.width;
        for (int64_t j = 0; j < thin.width; j += 3 * LANES) {
            Total* to[4];
            for (int64_t i = 0; i < 4; ++i)
                to[i] = r + i * CLASSES < rows ? made + (row + r + i * CLASSES) * thin.width + j
                                               : nullptr;
            if (thin.width - j >= 3 * LANES)
                add_products<T, 3>(x[r], cols, with + j, thin.width, to);
            else if (thin.width - j == 2 * LANES)
                add_products<T, 2>(x[r], cols, with + j, thin.width, to);
            else
                add_products<T, 1>(x[r], cols, with + j, thin.width, to);
        }
    }
}

// --- other sums of floating point -------------------------------------------------------------

template <class T>
void add_ends(const Tile<T>& x, int64_t rows, int64_t cols, double (*ends)[3]) {
    typedef typename Wide<T>::Vector Vector;
    for (int64_t r = 0; r < rows; ++r) {
        Vector most = {}, least = {}, strange = {};
        for (int64_t c = 0; c < cols; c += Wide<T>::LANES) {  // as wide as was filled
            const Vector some = *reinterpret_cast<const Vector*>(x[r] + c);
            most = some > most ? some : most;
            least = some < least ? some : least;
            strange += some - some;  // NaN, of Inf and NaN
        }
        for (int i = 0; i < Wide<T>::LANES; ++i) {
            ends[r][0] = std::max<double>(ends[r][0], most[i]);
            ends[r][1] = std::max<double>(ends[r][1], -least[i]);
            if (strange[i] != 0) ends[r][2] = 1;
        }
    }
}

// The weighted sums of a tile's columns; of the `squares` by the squares of the weights.
template <class T>
void add_left(const Tile<T>& x, const T* weights, bool squares, int64_t rows, int64_t cols,
              double* made) {
    T sums[SIDE] = {};
    for (int64_t r = 0; r < rows; ++r) {
        const T weight = squares ? weights[r] * weights[r] : weights[r];
        for (int64_t c = 0; c < cols; ++c) sums[c] += weight * x[r][c];
    }
    for (int64_t c = 0; c < cols; ++c) made[c] += sums[c];
}

// Sums of a block's columns: in 16 lanes, by their numbers modulo 16, and of squares.
template <class T>
struct Folded {
    T of[CLASSES], squares[CLASSES];
};

template <class T>
void fold(const Tile<T>& x, const Tile<T>& squares, const T* weights, int64_t rows, int64_t cols,
          Folded<T>* made) {
    for (int64_t r = 0; r < rows; ++r) {
        Folded<T> sums = made[r];
        for (int64_t c = 0; c < cols; c += CLASSES)
            for (int64_t i = 0; i < CLASSES; ++i) {
                const T weight = weights[c + i];
                sums.of[i] += weight * x[r][c + i];
                sums.squares[i] += weight * weight * squares[r][c + i];
            }
        made[r] = sums;
    }
}

// Of a row and a block: the sums with the signs of its class, or of all.
template <class T>
void end_fold(const Pass& pass, int64_t row, int64_t block, int64_t begin, const Folded<T>& sums) {
    T x[CLASSES], squares = 0;
    for (int64_t i = 0; i < CLASSES; ++i) {
        x[(i + begin + pass.col_origin) % CLASSES] = sums.of[i];
        squares += sums.squares[i];
    }
    for (int64_t half = 1; half < CLASSES; half *= 2)  // times a Hadamard matrix
        for (int64_t i = 0; i < CLASSES; ++i)
            if (!(i & half)) {
                const T a = x[i], b = x[i + half];
                x[i] = a + b, x[i + half] = a - b;
            }
    const int64_t height = pass.row_edges[pass.blocks] - pass.row_edges[0];
    const int64_t at = (row - pass.row_edges[0]) * pass.folded_width + block;
    T* made = static_cast<T*>(pass.folded) + at;
    if (pass.all_classes)
        for (int64_t i = 0; i < CLASSES; ++i) made[i * height * pass.folded_width] = x[i];
    else
        *made = x[(row + pass.row_origin) % CLASSES];
    static_cast<T*>(pass.folded_squares)[at] = squares;
}

// C less beta C before, and the noise that its rounding leaves in sums; or of A and B squares.
template <class T>
void squares_of(const Pass& pass, int64_t row, int64_t rows, int64_t col, int64_t cols, Tile<T>& x,
                Tile<T>& made) {
    const T of_sums = pass.of_sums, of_c = pass.of_c, of_before = pass.of_before;
    const int64_t wide = (cols + CLASSES - 1) / CLASSES * CLASSES;
    if (!pass.before.at) {
        const T factor = of_sums + of_c;
        for (int64_t r = 0; r < SIDE; ++r)
            for (int64_t c = 0; c < wide; ++c) made[r][c] = factor * x[r][c] * x[r][c];
        return;
    }
    alignas(64) Tile<T> before, size;
    fill(pass.before, row, rows, col, cols, before);
    fill(pass.before_size.at ? pass.before_size : pass.before, row, rows, col, cols, size);
    for (int64_t r = 0; r < SIDE; ++r)
        for (int64_t c = 0; c < wide; ++c) {
            const T own = x[r][c];
            x[r][c] -= before[r][c];
            made[r][c] = of_sums * x[r][c] * x[r][c] + of_c * own * own +
                         of_before * size[r][c] * size[r][c];
        }
}

// --- a block of rows ---------------------------------------------------------------------------

template <class T>
void pass_block(const Pass& pass, int64_t block) {
    constexpr bool FLOATS = std::is_floating_point<T>::value;
    alignas(64) Tile<T> x, squares;
    std::vector<Folded<T>> folded(FLOATS && pass.folded ? HIGH : 0);
    const T *left = static_cast<const T*>(pass.left), *weights = static_cast<const T*>(pass.weights);
    const auto add_tile = [&](int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t top) {
        const bool squared = FLOATS && col / pass.chunk % pass.every == 0;
        fill(pass.x, row, rows, col, cols, x);
        if constexpr (FLOATS) {
            if (pass.ends) add_ends(x, rows, cols, pass.ends + row);
            if (squared) squares_of(pass, row, rows, col, cols, x, squares);
            const int64_t first = pass.col_edges[0];
            const int64_t at = block * (pass.col_edges[pass.segments] - first) + col - first;
            if (left) add_left(x, left + row, false, rows, cols, pass.of_left + at);
            if (left && squared)
                add_left(squares, left + row, true, rows, cols, pass.of_left_squares + at);
            if (weights) fold(x, squares, weights + col, rows, cols, folded.data() + (row - top));
        }
        for (int64_t i = 0; i < pass.thins; ++i)
            if (!pass.thin[i].squares)
                add_thin(x, pass, pass.thin[i], row, rows, col, cols);
            else if (squared)
                add_thin(squares, pass, pass.thin[i], row, rows, col, cols);
    };
    const auto end_segment = [&](int64_t top, int64_t rows, int64_t segment) {
        if constexpr (FLOATS) {
            for (int64_t r = 0; weights && r < rows; ++r)
                end_fold(pass, top + r, segment, pass.col_edges[segment], folded[r]);
            for (int64_t i = 0; i < pass.thins; ++i)
                if (double* walk = pass.thin[i].walk) {
                    const double* made = static_cast<const double*>(pass.thin[i].made);
                    const int64_t width = pass.thin[i].width;
                    const int64_t begin = (top - pass.row_edges[0]) * width;
                    for (int64_t j = begin; j < begin + rows * width; ++j)
                        walk[j] += made[j] * made[j];
                }
        }
    };
    const int64_t end = pass.row_edges[block + 1];
    for (int64_t top = pass.row_edges[block]; top < end; top += HIGH) {
        const int64_t stop = std::min(end, top + HIGH);
        for (int64_t segment = 0; segment < pass.segments; ++segment) {
            for (Folded<T>& sums : folded) memset(&sums, 0, sizeof sums);
            const int64_t last = pass.col_edges[segment + 1];
            for (int64_t col = pass.col_edges[segment]; col < last; col += SIDE)
                for (int64_t row = top; row < stop; row += SIDE)
                    add_tile(row, std::min(SIDE, stop - row), col, std::min(SIDE, last - col), top);
            end_segment(top, stop - top, segment);
        }
    }
}

void work_pass(const Pass& pass, int64_t block) {
    switch (pass.type) {
        case SUM_FLOAT32:
            return pass_block<float>(pass, block);
        case SUM_FLOAT64:
            return pass_block<double>(pass, block);
        case SUM_UINT32:
            return pass_block<uint32_t>(pass, block);
        default:
            return pass_block<uint64_t>(pass, block);
    }
}
