// Starts the launches of a prepared product, for other matrices laid out alike: one call from
// Python. launch_list.py makes these structures and keeps them.

#include <pthread.h>

#include <cstdint>
#include <cstring>
#include <mutex>

namespace {

// Where a launch has an address in A, B or C: in an argument, or in a tensor map that is one.
struct Place {
    void* at;
    int64_t offset;  // bytes from the matrix's first element
    int32_t matrix;  // 0 is A, 1 B, 2 C; others follow
    int32_t is_map;
};

struct Launch {
    const void* config;  // CUlaunchConfig; null: memory is cleared
    void* function;      // the kernel, or cuMemsetD8Async
    void** arguments;    // or a Clear
};

struct Clear {
    uint64_t at;
    size_t size;
    void* stream;
};
using Set = int (*)(uint64_t at, unsigned char value, size_t size, void* stream);

struct List {
    const Place* places;
    int64_t place_count;
    const Launch* launches;
    int64_t launch_count;
    int (*launch)(const void*, void*, void**, void**);  // cuLaunchKernelEx
    int (*replace)(void*, void*);                       // cuTensorMapReplaceAddress
    uint64_t* matrices;                                 // of which the arguments are now
    int64_t matrix_count;
    const uint64_t* busy;  // the thread that starts a product of the stream launch by launch, or 0
};
constexpr int BUSY = -1;  // what no driver says

int start(const List& list, const Launch& launch) {
    if (launch.config)
        return list.launch(launch.config, launch.function, launch.arguments, nullptr);
    const Clear* clear = reinterpret_cast<const Clear*>(launch.arguments);
    return reinterpret_cast<Set>(launch.function)(clear->at, 0, clear->size, clear->stream);
}

int put(List* list, const uint64_t* matrices) {
    for (int64_t i = 0; i < list->matrix_count; i++) {
        list->matrices[i] = 0;  // no matrix's, until all arguments are replaced
    }
    for (int64_t i = 0; i < list->place_count; i++) {
        const Place& place = list->places[i];
        uint64_t address = matrices[place.matrix] + place.offset;
        if (!place.is_map) {
            *static_cast<uint64_t*>(place.at) = address;
        } else if (int status = list->replace(place.at, reinterpret_cast<void*>(address))) {
            return status;
        }
    }
    for (int64_t i = 0; i < list->matrix_count; i++) {
        list->matrices[i] = matrices[i];
    }
    return 0;
}

// A product of cuBLAS's, but for the addresses of A, B and C.
struct LibraryProduct {
    void* call;
    void* handle;
    int64_t n, m, k, ldb, lda, ldc;
    const void* alpha;
    const void* beta;
    int32_t op_b, op_a;
    int32_t typed;  // call is cublasGemmEx_64, which takes what follows
    int32_t type_b, type_a, type_c, compute, algorithm;
    int64_t count;  // if not 0, cublasGemmStridedBatchedEx_64, which takes these too
    int64_t step_b, step_a, step_c;
    const int64_t (*starts)[3];  // bytes from A, B and C to each stack's first ones
    int64_t start_count;
};

using Plain = int (*)(void*, int, int, int64_t, int64_t, int64_t, const void*, const void*, int64_t,
                      const void*, int64_t, const void*, void*, int64_t);
using Typed = int (*)(void*, int, int, int64_t, int64_t, int64_t, const void*, const void*, int,
                      int64_t, const void*, int, int64_t, const void*, void*, int, int64_t, int,
                      int);
using Stack = int (*)(void*, int, int, int64_t, int64_t, int64_t, const void*, const void*, int,
                      int64_t, int64_t, const void*, int, int64_t, int64_t, const void*, void*, int,
                      int64_t, int64_t, int64_t, int, int);

int start_stacks(const LibraryProduct& p, uint64_t a, uint64_t b, uint64_t c) {
    for (int64_t i = 0; i < p.start_count; i++) {
        const int64_t* at = p.starts[i];
        const void* x = reinterpret_cast<const void*>(a + at[0]);
        const void* y = reinterpret_cast<const void*>(b + at[1]);
        void* z = reinterpret_cast<void*>(c + at[2]);
        int status = reinterpret_cast<Stack>(p.call)(
            p.handle, p.op_b, p.op_a, p.n, p.m, p.k, p.alpha, y, p.type_b, p.ldb, p.step_b, x,
            p.type_a, p.lda, p.step_a, p.beta, z, p.type_c, p.ldc, p.step_c, p.count, p.compute,
            p.algorithm);
        if (status) {
            return status;
        }
    }
    return 0;
}

}  // namespace

// What cuBLAS says: 0, or its status. Row-major C is column-major C^T = op(B)^T op(A)^T.
extern "C" int start_library_product(const LibraryProduct* p, uint64_t a, uint64_t b, uint64_t c) {
    const void* x = reinterpret_cast<const void*>(a);
    const void* y = reinterpret_cast<const void*>(b);
    void* z = reinterpret_cast<void*>(c);
    if (p->count) {
        return start_stacks(*p, a, b, c);
    }
    if (!p->typed) {
        return reinterpret_cast<Plain>(p->call)(p->handle, p->op_b, p->op_a, p->n, p->m, p->k,
                                                p->alpha, y, p->ldb, x, p->lda, p->beta, z, p->ldc);
    }
    return reinterpret_cast<Typed>(p->call)(p->handle, p->op_b, p->op_a, p->n, p->m, p->k, p->alpha,
                                            y, p->type_b, p->ldb, x, p->type_a, p->lda, p->beta, z,
                                            p->type_c, p->ldc, p->compute, p->algorithm);
}

// What the driver says of the first launch that fails, or 0, or BUSY where nothing was started.
// `matrices` are the addresses of all matrices, in their order.
extern "C" int start_list_at(List* list, const uint64_t* matrices) {
    // A list's arguments are one product's until all its launches are started, and launches of one
    // stream share its memory. Python's lock does not see to that where Python has none.
    static std::mutex starting;
    std::lock_guard<std::mutex> lock(starting);
    if (list->busy && *list->busy && *list->busy != (uint64_t)pthread_self()) {
        return BUSY;
    }
    if (std::memcmp(list->matrices, matrices, list->matrix_count * sizeof(uint64_t)) != 0) {
        if (int status = put(list, matrices)) {
            return status;
        }
    }
    for (int64_t i = 0; i < list->launch_count; i++) {
        if (int status = start(*list, list->launches[i])) {
            return status;
        }
    }
    return 0;
}

// As start_list_at, of a product of three matrices.
extern "C" int start_list(List* list, uint64_t a, uint64_t b, uint64_t c) {
    const uint64_t matrices[] = {a, b, c};
    return start_list_at(list, matrices);
}
