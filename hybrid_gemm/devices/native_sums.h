// The sums that native_sums.cpp shares out, for one kind of CPU: it includes this once for each, in
// a namespace of its own. So there is no guard, and nothing else is included here.

// Eight elements, as many as there are groups, in vectors of this CPU's size.
template <class T>
struct Eight {
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    static constexpr int COUNT = 64 / VECTOR_BYTES;
    Vector part[COUNT];
};

template <class T>
void operator+=(Eight<T>& x, const Eight<T>& y) {
    for (int i = 0; i < x.COUNT; ++i) x.part[i] += y.part[i];
}

template <class T>
T total(const Eight<T>& sums) {
    T x[8];
    memcpy(x, &sums, sizeof x);
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// --- sums of squares of words -----------------------------------------------------------------

template <class Word>
uint64_t squares_of(const char* at, int64_t count) {
    typedef Word Unaligned __attribute__((aligned(1), may_alias));
    const Unaligned* from = reinterpret_cast<const Unaligned*>(at);
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += static_cast<uint64_t>(from[i]) * from[i];
    return sum;
}

// The upper and lower halves of words of 8 bytes are squared by themselves.
inline uint64_t squares_of_long(const char* at, int64_t count) {
    typedef uint64_t Unaligned __attribute__((aligned(1), may_alias));
    const Unaligned* from = reinterpret_cast<const Unaligned*>(at);
    uint64_t low = 0, high = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t lower = static_cast<uint32_t>(from[i]), upper = from[i] >> 32;
        low += static_cast<uint64_t>(lower) * lower;
        high += static_cast<uint64_t>(upper) * upper;
    }
    return low + high * 0x9E3779B97F4A7C15u;
}

// A piece of the matrix: some rows, or a part of one.
inline void lines(const Cut& job, int64_t piece) {
    const int64_t row = piece / job.parts * job.rows_each;
    const int64_t begin = piece % job.parts * job.cols_each;
    const int64_t end = std::min(job.rows, row + job.rows_each);
    const int64_t count = std::min(job.cols - begin, job.cols_each);
    uint64_t* sums = static_cast<uint64_t*>(job.of);
    for (int64_t i = row; i < end; ++i) {
        const char* at = job.at + i * job.pitch + begin * job.size;
        uint64_t sum;
        switch (job.size) {
            case 1:
                sum = squares_of<uint8_t>(at, count);
                break;
            case 2:
                sum = squares_of<uint16_t>(at, count);
                break;
            case 4:
                sum = squares_of<uint32_t>(at, count);
                break;
            default:
                sum = squares_of_long(at, count);
        }
        __atomic_fetch_add(&sums[i], sum, __ATOMIC_RELAXED);
    }
}

// --- weighted sums of groups ------------------------------------------------------------------

// Adds elements, one or a vector, to both sums. Of floating point the second is that of squares, of
// integers that by the upper halves of the weights.
template <class T, class Some>
void add(const Some& x, const Some& weight, Some& of, Some& second) {
    const Some product = x * weight;
    of += product;
    if constexpr (std::is_floating_point<T>::value)
        second += product * product;
    else
        second += x * (weight >> 32);
}

// Sums of a group of one row: two of each kind, for neither would add at once what it adds.
template <class T>
struct Group {
    Eight<T> of[2], second[2];
};

// Adds `count` elements, a multiple of 8, to a group.
template <class T>
void add_run(const T* x, const T* weights, int64_t count, Group<T>& group) {
    typedef typename Eight<T>::Vector Vector;
    constexpr int PARTS = Eight<T>::COUNT, LANES = 8 / PARTS;
    constexpr int TWICE = PARTS <= 2 ? 2 : 1;  // as there are registers
    Eight<T> of[TWICE], second[TWICE];
    for (int j = 0; j < TWICE; ++j) of[j] = group.of[j], second[j] = group.second[j];
    const auto add_eights = [&](int64_t at, int eights) __attribute__((always_inline)) {
        for (int j = 0; j < eights; ++j)
            for (int p = 0; p < PARTS; ++p) {
                const int64_t i = at + 8 * j + LANES * p;
                add<T, Vector>(*reinterpret_cast<const Vector*>(x + i),
                               *reinterpret_cast<const Vector*>(weights + i), of[j].part[p],
                               second[j].part[p]);
            }
    };
    int64_t i = 0;
    for (; i + 8 * TWICE <= count; i += 8 * TWICE) add_eights(i, TWICE);
    if (i < count) add_eights(i, 1);
    for (int j = 0; j < TWICE; ++j) group.of[j] = of[j], group.second[j] = second[j];
}

// Of rows whose elements are neighbours. A piece is some rows, or a part of the groups of one.
template <class T>
void sums_along(const Cut& job, int64_t piece) {
    alignas(64) T x[RUN];
    const T* weights = static_cast<const T*>(job.weights);
    const int64_t row = piece / job.parts * job.rows_each;
    const int64_t begin = piece % job.parts * job.cols_each;
    const int64_t end = std::min(job.cols, begin + job.cols_each);
    for (int64_t i = row; i < std::min(job.rows, row + job.rows_each); ++i) {
        Group<T> groups[GROUPS];
        memset(groups, 0, sizeof groups);
        for (int64_t j = begin; j < end; j += RUN) {
            const int64_t count = std::min(RUN, end - j), whole = (count + 7) / 8 * 8;
            read(job.type, job.at + i * job.pitch + j * job.size, count, x);
            std::fill(x + count, x + whole, T(0));  // there are weights for all of a group
            for (int64_t at = j; at < j + whole;) {
                const int64_t group = at / job.width;
                const int64_t next = std::min(j + whole, (group + 1) * job.width);
                add_run(x + (at - j), weights + at, next - at, groups[group]);
                at = next;
            }
        }
        const int64_t first = begin / job.width;
        const int64_t last = job.parts == 1 ? GROUPS : first + job.cols_each / job.width;
        for (int64_t g = first; g < std::min(last, GROUPS); ++g) {
            Group<T>& group = groups[g];
            group.of[0] += group.of[1];
            group.second[0] += group.second[1];
            static_cast<T*>(job.of)[i * GROUPS + g] = total(group.of[0]);
            static_cast<T*>(job.second)[i * GROUPS + g] = total(group.second[0]);
        }
    }
}

// Of rows whose elements are not neighbours, those of columns are. A piece is a group of some rows.
template <class T>
void sums_across(const Cut& job, int64_t piece) {
    alignas(64) T x[4][TALL], of[TALL] = {}, second[TALL] = {};
    const int64_t row = piece / GROUPS * job.rows_each, group = piece % GROUPS;
    const int64_t rows = std::min(job.rows - row, job.rows_each);
    const int64_t end = std::min(job.cols, (group + 1) * job.width);
    const T* weights = static_cast<const T*>(job.weights);
    for (int64_t j = group * job.width; j < end; j += 4) {
        for (int64_t c = 0; c < 4; ++c) {
            if (j + c < end)
                read(job.type, job.at + (j + c) * job.pitch + row * job.size, rows, x[c]);
            else
                std::fill(x[c], x[c] + rows, T(0));
        }
        const T w0 = weights[j], w1 = weights[j + 1], w2 = weights[j + 2], w3 = weights[j + 3];
        for (int64_t i = 0; i < rows; ++i) {
            T sum = of[i], other = second[i];
            add<T, T>(x[0][i], w0, sum, other);
            add<T, T>(x[1][i], w1, sum, other);
            add<T, T>(x[2][i], w2, sum, other);
            add<T, T>(x[3][i], w3, sum, other);
            of[i] = sum, second[i] = other;
        }
    }
    for (int64_t i = 0; i < rows; ++i) {
        static_cast<T*>(job.of)[(row + i) * GROUPS + group] = of[i];
        static_cast<T*>(job.second)[(row + i) * GROUPS + group] = second[i];
    }
}

template <class T>
void weighted(const Cut& job, int64_t piece) {
    job.across ? sums_across<T>(job, piece) : sums_along<T>(job, piece);
}

void work(const Cut& job, int64_t piece) {
    if (job.what == LINES)
        lines(job, piece);
    else if (job.type < INT8)
        weighted<double>(job, piece);
    else
        weighted<uint64_t>(job, piece);
}
