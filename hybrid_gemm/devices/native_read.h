// Numbers of any type as those that sums are made of, and pieces of work for threads. Files include
// this in namespaces of their own, so there is no guard, and nothing is included.

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

// Reads `count` neighbours of any type as float64 or uint64.
template <class From, class T>
void widen(const char* at, int64_t count, T* __restrict to) {
    typedef From Unaligned __attribute__((aligned(1), may_alias));
    const Unaligned* from = reinterpret_cast<const Unaligned*>(at);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

inline float as_float(uint32_t bits) {
    float made;
    memcpy(&made, &bits, sizeof made);
    return made;
}

// Those of float16. Numbers without a leading 1 are made from a number that has one, since some
// CPUs take long for such numbers of their own.
template <class T>
void widen_halves(const char* at, int64_t count, T* __restrict to) {
    typedef uint16_t Unaligned __attribute__((aligned(1), may_alias));
    const Unaligned* from = reinterpret_cast<const Unaligned*>(at);
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t half = from[i], bits = (half & 0x7fff) << 13, exponent = half & 0x7c00;
        const float small = as_float(bits + (113u << 23)) - as_float(113u << 23);
        uint32_t made;
        memcpy(&made, &small, sizeof made);
        const uint32_t is_small = -static_cast<uint32_t>(exponent == 0);      // all ones, or none
        const uint32_t is_last = -static_cast<uint32_t>(exponent == 0x7c00);  // Inf or NaN
        const uint32_t large = bits + (112u << 23) + (is_last & (112u << 23));
        made = (made & is_small) | (large & ~is_small) | (half & 0x8000) << 16;
        to[i] = as_float(made);
    }
}

template <class T>
void widen_upper_halves(const char* at, int64_t count, T* __restrict to) {
    typedef uint16_t Unaligned __attribute__((aligned(1), may_alias));
    const Unaligned* from = reinterpret_cast<const Unaligned*>(at);
    for (int64_t i = 0; i < count; ++i) to[i] = as_float(static_cast<uint32_t>(from[i]) << 16);
}

template <class T>
__attribute__((noinline)) void read(int type, const char* at, int64_t count, T* to) {
    switch (type) {
        case INT8:
            return widen<int8_t>(at, count, to);
        case INT16:
            return widen<int16_t>(at, count, to);
        case INT32:
            return widen<int32_t>(at, count, to);
        case INT64:
            return widen<int64_t>(at, count, to);
        case UINT8:
            return widen<uint8_t>(at, count, to);
        case UINT16:
            return widen<uint16_t>(at, count, to);
        case UINT32:
            return widen<uint32_t>(at, count, to);
        case UINT64:
            return widen<uint64_t>(at, count, to);
    }
    if constexpr (std::is_floating_point<T>::value) switch (type) {
            case FLOAT16:
                return widen_halves(at, count, to);
            case BFLOAT16:
                return widen_upper_halves(at, count, to);
            case FLOAT32:
                return widen<float>(at, count, to);
            default:
                return widen<double>(at, count, to);
        }
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
