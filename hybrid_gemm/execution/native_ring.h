// A ring, which is one direction of one GPU: its slots, its jobs, and how a piece of a job is
// copied. Part of native_copier.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "native_driver.h"

namespace {

struct Piece {  // in bytes and runs
    size_t x, y, width, height;
    size_t bytes() const { return width * height; }
};

struct Job : Request {
    size_t x = 0, y = 0;             // where the next piece begins
    size_t unsent = width * height;  // bytes that the stream does not have
    size_t left = width * height;    // and bytes that are not where they should be
    bool begun = false;
    int status = 0;
    explicit Job(const Request& request) : Request(request) {}
};

struct Slot {
    char* memory;
    void* event;
    Job* job = nullptr;
    Piece piece = {};
};

struct Ring {
    Driver driver;
    void *context, *stream;
    bool up;
    size_t slot_bytes;
    std::vector<Slot> slots;
    std::deque<Slot*> free;  // the last one used is taken first: it may still be in the cache
    std::deque<Slot*> filled, flying, landed;  // of uploads; what the stream has; of downloads done
    std::deque<Job*> jobs;                     // with pieces to be handed out
    size_t waiting = 0;                        // bytes of jobs that are not handed out
    int handed_out = 0;                        // pieces, since nothing was under way
    bool sending = false;                      // by a thread
    int status = 0;                            // what the driver said of a copy
};

// Past the cache: what is copied is not read soon, and a line that is written whole need not be
// fetched first.
void copy_past_cache(char* to, const char* from, size_t size) {
#if defined(__SSE2__)
    const size_t head = std::min(size, static_cast<size_t>(-reinterpret_cast<intptr_t>(to) & 15));
    memcpy(to, from, head);
    size_t at = head;
    for (; at + 64 <= size; at += 64) {
        __m128i part[4];
        for (int i = 0; i < 4; ++i)
            part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at) + i);
        for (int i = 0; i < 4; ++i)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + i, part[i]);
    }
    memcpy(to + at, from + at, size - at);
#else
    memcpy(to, from, size);
#endif
}

// Between the slot, where runs lie one after the other, and the job's host memory.
void copy_on_host(const Slot& slot, bool up) {
    const Job& job = *slot.job;
    const Piece& piece = slot.piece;
    char *host = job.host + piece.y * job.host_pitch + piece.x, *here = slot.memory;
    for (size_t y = 0; y < piece.height; ++y, host += job.host_pitch, here += piece.width) {
        if (up)
            memcpy(here, host, piece.width);
        else
            copy_past_cache(host, here, piece.width);
    }
#if defined(__SSE2__)
    if (!up) _mm_sfence();
#endif
}

// Starts a piece's copy between its slot and the device.
int start_copy(Ring& ring, Slot& slot) {
    const Driver& call = ring.driver;
    Job& job = *slot.job;
    const Piece& piece = slot.piece;
    if (!job.begun) {
        if (job.after)
            if (int status = call.wait(ring.stream, job.after, 0)) return status;
        if (int status = call.record(job.start, ring.stream)) return status;
        job.begun = true;
    }
    const uint64_t here = reinterpret_cast<uint64_t>(slot.memory);
    const uint64_t there = job.device + piece.y * job.device_pitch + piece.x;
    const uint64_t from = ring.up ? here : there, to = ring.up ? there : here;
    int status;
    if (piece.height == 1 || job.device_pitch == piece.width) {
        status = call.copy(to, from, piece.width * piece.height, ring.stream);
    } else {
        Copy2D copy = {{0, 0, UNIFIED, nullptr, from, nullptr, job.device_pitch},
                       {0, 0, UNIFIED, nullptr, to, nullptr, job.device_pitch},
                       piece.width,
                       piece.height};
        (ring.up ? copy.from : copy.to).pitch = piece.width;  // the slot's
        status = call.copy_2d(&copy, ring.stream);
    }
    if (status) return status;
    return call.record(slot.event, ring.stream);
}

// The next piece of a job of so many bytes: whole runs where they fit.
Piece next_piece(Job& job, size_t most) {
    Piece piece = {job.x, job.y, job.width, 1};
    if (job.x || job.width > most)
        piece.width = std::min(most, job.width - job.x);
    else
        piece.height = std::min(most / job.width, job.height - job.y);
    job.x += piece.width;
    if (job.x < job.width) return piece;
    job.x = 0;
    job.y += piece.height;
    return piece;
}

}  // namespace
