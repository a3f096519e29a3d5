// What the native threads share: functions of CUDA's driver, and copies that threads are given.
#pragma once

#include <cstddef>
#include <cstdint>

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

}  // namespace
