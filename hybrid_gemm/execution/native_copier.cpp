// Copies between ordinary host memory and GPUs through page-locked slots, by threads that need
// neither Python nor its lock. native_copier.py compiles and calls it.
//
// A ring is one direction of one GPU: a stream, slots, and a thread that waits for the stream's
// events in their order. A copy is cut into pieces that fit a slot. All rings share the threads
// that copy: they begin downloads wherever a slot is free, which takes no time, fill slots for
// uploads, which products wait for, and then empty slots of downloads. Who has nothing to copy
// makes the pages of memory that will be written.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "native_driver.h"

namespace {

constexpr size_t PAGE = 4096, HUGE_PAGE = 2 << 20;

struct Job : Request {
    size_t piece_width, piece_height, across, pieces, next = 0;  // `next` is to be handed out
    size_t issued = 0, left;
    bool begun = false;
    int status = 0;
};

struct Slot {
    char* memory;
    void* event;
    Job* job = nullptr;  // of a download that is on its way
    size_t piece = 0;
};

struct Ring {
    Driver driver;
    void *context, *stream;
    bool up;
    size_t slot_bytes;
    std::vector<Slot> slots;
    std::vector<Slot*> free;  // the last one used is taken first: it may still be in the cache
    std::deque<Slot*> flying, landed;  // copies that the stream has, and those of downloads done
    std::deque<Job*> jobs;             // with pieces to be handed out
    std::mutex order;                  // held from a piece's copy to its event
    std::condition_variable taken_off;
    bool starting = false;  // a download's piece: one after the other, for a piece that follows one
                            // of the next copy would wait for what that copy waits for
    bool closing = false;
    int status = 0;  // what the driver said when an event was waited for
};

struct Finished {
    uint64_t id;
    int status;
};

struct Fresh {  // memory without pages, from `at` on
    uint64_t id;
    char *at, *end;
    int busy = 0;  // threads that are at it
};

struct Pool {
    std::mutex mutex;  // over all rings but for `order`
    std::condition_variable work, done;
    std::vector<Ring*> rings;
    std::deque<Fresh*> fresh;  // in turn
    std::deque<Finished> finished;
    int threads = 0;
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

struct Piece {
    size_t x, y, width, height;  // in bytes and runs
    Piece(const Job& job, size_t number)
        : x(number % job.across * job.piece_width),
          y(number / job.across * job.piece_height),
          width(std::min(job.piece_width, job.width - x)),
          height(std::min(job.piece_height, job.height - y)) {}
};

// Between the slot, where runs lie one after the other, and the job's host memory.
void copy_on_host(const Job& job, const Piece& piece, char* slot, bool up) {
    char* host = job.host + piece.y * job.host_pitch + piece.x;
    for (size_t y = 0; y < piece.height; ++y, host += job.host_pitch, slot += piece.width) {
        if (up)
            memcpy(slot, host, piece.width);
        else
            copy_past_cache(host, slot, piece.width);
    }
#if defined(__SSE2__)
    if (!up) _mm_sfence();
#endif
}

// Starts a piece's copy between its slot and the device. `order` is held.
int start_copy(Ring& ring, Job& job, const Piece& piece, Slot& slot) {
    const Driver& call = ring.driver;
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

// --- with the pool's mutex held -------------------------------------------------------------

void end_piece(Pool& pool, Job* job) {
    if (--job->left) return;
    if (job->ended) {
        job->ended(job->run, job->event, job->status);
    } else {
        pool.finished.push_back({job->id, job->status});
        pool.done.notify_one();
    }
    delete job;
}

struct Task {
    enum { COPY, EMPTY, TOUCH } kind;
    Ring* ring;
};

// Of the rings that are ready, the one whose copy was asked for first.
template <class Ready, class Next>
Ring* earliest(Pool& pool, Ready ready, Next next) {
    Ring* found = nullptr;
    for (Ring* ring : pool.rings)
        if (ready(*ring) && (!found || next(*ring)->id < next(*found)->id)) found = ring;
    return found;
}

bool find_task(Pool& pool, Task& task) {
    const auto startable = [](Ring& r) {
        return !r.jobs.empty() && !r.free.empty() && !r.starting;
    };
    const auto front = [](Ring& r) { return r.jobs.front(); };
    Ring* ring = earliest(pool, [&](Ring& r) { return !r.up && startable(r); }, front);
    task = {Task::COPY, ring};
    if (!ring) task.ring = earliest(pool, [&](Ring& r) { return r.up && startable(r); }, front);
    if (task.ring) return true;
    ring = earliest(
        pool, [](Ring& r) { return !r.landed.empty(); },
        [](Ring& r) { return r.landed.front()->job; });
    task = {ring ? Task::EMPTY : Task::TOUCH, ring};
    return ring || !pool.fresh.empty();
}

// Makes the pages of the next piece. Each by a page fault of its own: where the system makes many
// in one call, nobody gets memory meanwhile, and the thread that starts all GPUs wants some.
void touch(Pool& pool, std::unique_lock<std::mutex>& lock) {
    Fresh* fresh = pool.fresh.front();
    pool.fresh.pop_front();
    char* const at = fresh->at;
    const size_t whole = reinterpret_cast<uintptr_t>(at) / HUGE_PAGE + 1;
    char* const end = std::min(fresh->end, reinterpret_cast<char*>(whole * HUGE_PAGE));
    fresh->at = end;
    ++fresh->busy;
    if (end != fresh->end) pool.fresh.push_back(fresh);
    lock.unlock();
    for (char* page = at; page < end; page += PAGE) {
        // Writes, or else there would be no page, and changes nothing: it may be in use already.
        char nothing = 0;
        __atomic_compare_exchange_n(page, &nothing, nothing, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
    }
    lock.lock();
    if (--fresh->busy || fresh->at != fresh->end) return;
    pool.finished.push_back({fresh->id, 0});
    pool.done.notify_one();
    delete fresh;
}

// Does a task; the mutex is let go meanwhile.
void perform(Pool& pool, Task task, std::unique_lock<std::mutex>& lock) {
    if (task.kind == Task::TOUCH) {
        touch(pool, lock);
        return;
    }
    Ring& ring = *task.ring;
    static thread_local void* context = nullptr;
    if (task.kind == Task::EMPTY) {
        Slot* slot = ring.landed.front();
        ring.landed.pop_front();
        Job* job = slot->job;
        if (ring.status && !job->status) job->status = ring.status;
        if (!job->status) {
            lock.unlock();
            copy_on_host(*job, Piece(*job, slot->piece), slot->memory, false);
            lock.lock();
        }
        ring.free.push_back(slot);
        end_piece(pool, job);
        return;
    }
    Job* job = ring.jobs.front();
    const size_t number = job->next++;
    if (job->next == job->pieces) ring.jobs.pop_front();
    ring.starting = !ring.up;
    Slot* slot = ring.free.back();
    ring.free.pop_back();
    const int stopped = __atomic_load_n(job->stopped, __ATOMIC_RELAXED);
    if (!job->status && (ring.status || stopped)) job->status = ring.status ? ring.status : STOPPED;
    int status = job->status;
    lock.unlock();
    const Piece piece(*job, number);
    if (!status && ring.up) copy_on_host(*job, piece, slot->memory, true);
    if (context != ring.context && !status) {
        status = ring.driver.set_context(ring.context);
        context = status ? nullptr : ring.context;
    }
    bool sent = false;
    {
        std::lock_guard<std::mutex> hold(ring.order);
        if (!status) status = start_copy(ring, *job, piece, *slot);
        sent = !status;
        if (++job->issued == job->pieces && sent)
            status = ring.driver.record(job->stop, ring.stream);
        lock.lock();
        if (sent) {  // here, so that events fly in the order of the stream
            slot->job = job;
            slot->piece = number;
            ring.flying.push_back(slot);
            ring.taken_off.notify_one();
        }
    }
    ring.starting = false;
    if (status && !job->status) job->status = status;
    if (!sent) ring.free.push_back(slot);
    if (ring.up || !sent) end_piece(pool, job);  // else it ends when its slot is emptied
}

void copy_for_ever(Pool& pool) {
    std::unique_lock<std::mutex> lock(pool.mutex);
    for (Task task;;) {
        if (find_task(pool, task))
            perform(pool, task, lock);
        else
            pool.work.wait(lock);
    }
}

void watch(Pool& pool, Ring* ring) {
    ring->driver.set_context(ring->context);
    std::unique_lock<std::mutex> lock(pool.mutex);
    for (;;) {
        ring->taken_off.wait(lock, [&] { return ring->closing || !ring->flying.empty(); });
        if (ring->flying.empty()) break;
        Slot* slot = ring->flying.front();
        ring->flying.pop_front();
        lock.unlock();
        const int status = ring->driver.synchronize(slot->event);
        lock.lock();
        if (status) ring->status = status;
        if (ring->up)
            ring->free.push_back(slot);
        else
            ring->landed.push_back(slot);
        pool.work.notify_one();
    }
    lock.unlock();
    delete ring;
}

}  // namespace

extern "C" {

void* pool_start() {
    return new Pool;  // for as long as the process lives
}

// Has at least so many threads from now on.
void pool_grow(Pool* pool, int threads) {
    std::lock_guard<std::mutex> lock(pool->mutex);
    for (; pool->threads < threads; ++pool->threads)
        std::thread(copy_for_ever, std::ref(*pool)).detach();
}

// Has the pages of size bytes made, of which there is one at least, by threads with nothing to copy.
void pool_touch(Pool* pool, uint64_t id, char* memory, size_t size) {
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        pool->fresh.push_back(new Fresh{id, memory, memory + size});
    }
    pool->work.notify_all();
}

// Blocks until a copy has ended, or pages are made; its id, and 0, STOPPED or what the driver said.
uint64_t pool_finished(Pool* pool, int* status) {
    std::unique_lock<std::mutex> lock(pool->mutex);
    pool->done.wait(lock, [&] { return !pool->finished.empty(); });
    const Finished finished = pool->finished.front();
    pool->finished.pop_front();
    *status = finished.status;
    return finished.id;
}

void* ring_open(Pool* pool, const Driver* driver, void* context, void* stream, int up, char* memory,
                size_t slot_bytes, int slots, void** events) {
    Ring* ring = new Ring;
    ring->driver = *driver;
    ring->context = context;
    ring->stream = stream;
    ring->up = up;
    ring->slot_bytes = slot_bytes;
    for (int i = 0; i < slots; ++i) ring->slots.push_back({memory + i * slot_bytes, events[i]});
    for (Slot& slot : ring->slots) ring->free.push_back(&slot);
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->rings.push_back(ring);
    std::thread(watch, std::ref(*pool), ring).detach();
    return ring;
}

// For a ring whose copies have all ended.
void ring_close(Pool* pool, Ring* ring) {
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->rings.erase(std::find(pool->rings.begin(), pool->rings.end(), ring));
    ring->closing = true;
    ring->taken_off.notify_one();
}

void ring_submit(Pool* pool, Ring* ring, const Request* request) {
    Job* job = new Job;
    static_cast<Request&>(*job) = *request;
    job->piece_width = std::min<size_t>(job->width, ring->slot_bytes);
    job->piece_height = std::min<size_t>(job->height, ring->slot_bytes / job->piece_width);
    job->across = (job->width + job->piece_width - 1) / job->piece_width;
    job->pieces = job->across * ((job->height + job->piece_height - 1) / job->piece_height);
    job->left = job->pieces;
    size_t startable = job->pieces;  // read now: the job may be gone once the mutex is free
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        startable = std::min(startable, ring->free.size());
        ring->jobs.push_back(job);
        *request->accepted = 1;
    }
    // Outside the mutex, which all that wake want, and no more threads than can begin: the caller
    // holds Python's lock. Each slot that becomes free wakes one more.
    for (; startable; --startable) pool->work.notify_one();
}
}
