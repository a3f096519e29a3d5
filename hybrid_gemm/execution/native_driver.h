// What the native threads share: functions of CUDA's driver, and copies that threads are given.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

struct Side {  // of a CUDA_MEMCPY2D
    size_t x, y;
    int type;
    const void* host;
    uint64_t device;
    void* array;
    size_t pitch;
};
struct Copy2D {
    Side from, to;
    size_t width, height;
};
constexpr int UNIFIED = 4;      // CU_MEMORYTYPE_UNIFIED: the address tells where it is
constexpr int STOPPED = -1;     // a status beside the driver's
constexpr int NOT_READY = 600;  // CUDA_ERROR_NOT_READY: an event is yet to come

struct Driver {  // addresses of the driver's functions
    int (*set_context)(void* context);
    int (*copy)(uint64_t to, uint64_t from, size_t size, void* stream);
    int (*copy_2d)(const Copy2D*, void* stream);
    int (*record)(void* event, void* stream);
    int (*wait)(void* stream, void* event, unsigned);
    int (*query)(void* event);
};

struct Request {  // as native_copier.py gives it; height runs of width bytes
    uint64_t id;
    char* host;
    uint64_t host_pitch;
    uint64_t device, device_pitch;
    uint64_t width, height;
    void *after, *start, *stop;  // events: what to wait for (or null), what to record
    const int* stopped;          // not 0: the rest need not be copied
    int* accepted;               // set when a ring has it
    // Called at the copy's end, if given, by whoever ends it; otherwise Python is told.
    void (*ended)(void* run, uint64_t event, int status);
    void* run;
    uint64_t event;
};

// A thread that asks again and again sleeps in between after so many times in vain: some
// milliseconds, as between the pieces of a product that takes long.
constexpr int SPINS = 1000;
constexpr std::chrono::microseconds SLEEP(20);

inline void pause_after(int fruitless) {
    if (!fruitless) return;
    if (fruitless > SPINS) {
        std::this_thread::sleep_for(SLEEP);
    } else {
#if defined(__SSE2__)
        for (int i = 0; i < 100; ++i) _mm_pause();
#else
        std::this_thread::yield();
#endif
    }
}

}  // namespace
