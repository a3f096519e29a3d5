// Copies between ordinary host memory and GPUs through page-locked slots, by threads that need
// neither Python nor its lock. native_copier.py compiles and calls it.
//
// A ring is one direction of one GPU: a stream, and slots. A copy is cut into pieces that fit a
// slot. All rings share the threads that copy. They give each stream what it can have, one thread a
// ring at a time, for the driver would let others wait; they fill slots for uploads, which products
// wait for, and then empty slots of downloads. Who has nothing to copy asks the driver which copies
// are over, one thread for all, or makes the pages of memory that will be written.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "native_driver.h"

namespace {

constexpr size_t PAGE = 4096, HUGE_PAGE = 2 << 20;
// Smaller pieces take as long.
constexpr size_t LEAST_PIECE = 256 << 10;
// The one thread that asks the driver sleeps in between after so many times in vain: some
// milliseconds, as between the pieces of a product that takes long.
constexpr int SPINS = 1000;
constexpr std::chrono::microseconds SLEEP(20);

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
    std::mutex mutex;  // over all rings
    std::condition_variable work, done, looked;
    std::vector<Ring*> rings;
    std::deque<Fresh*> fresh;  // in turn
    std::deque<Finished> finished;
    int threads = 0, idle = 0, closing = 0;
    bool looking = false;  // a thread asks the driver, without the mutex

    Pool() {
#if defined(__GLIBC__)
        // It is held for less time than it takes to sleep and be woken.
        pthread_mutexattr_t how;
        pthread_mutexattr_init(&how);
        pthread_mutexattr_settype(&how, PTHREAD_MUTEX_ADAPTIVE_NP);
        pthread_mutex_init(mutex.native_handle(), &how);
        pthread_mutexattr_destroy(&how);
#endif
    }
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

// --- with the pool's mutex held -------------------------------------------------------------

void end_piece(Pool& pool, const Slot& slot) {
    Job* job = slot.job;
    if (job->left -= slot.piece.bytes()) return;
    if (job->ended) {
        job->ended(job->run, job->event, job->status);
    } else {
        pool.finished.push_back({job->id, job->status});
        pool.done.notify_one();
    }
    delete job;
}

struct Task {
    enum { SEND, FILL, EMPTY, TOUCH } kind;
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

bool is_startable(const Ring& ring) { return !ring.jobs.empty() && !ring.free.empty(); }

bool is_sendable(const Ring& ring) { return ring.up ? !ring.filled.empty() : is_startable(ring); }

bool find_task(Pool& pool, Task& task) {
    const auto front = [](Ring& r) { return r.jobs.front(); };
    const auto of_front = [&](Ring& r) { return r.up ? r.filled.front()->job : front(r); };
    const auto sendable = [](Ring& r) { return !r.sending && is_sendable(r); };
    const auto fillable = [](Ring& r) { return r.up && is_startable(r); };
    const auto has_landed = [](Ring& r) { return !r.landed.empty(); };
    const auto of_landed = [](Ring& r) { return r.landed.front()->job; };
    if (Ring* ring = earliest(pool, sendable, of_front))
        task = {Task::SEND, ring};
    else if (Ring* ring = earliest(pool, fillable, front))
        task = {Task::FILL, ring};
    else if (Ring* ring = earliest(pool, has_landed, of_landed))
        task = {Task::EMPTY, ring};
    else if (!pool.fresh.empty())
        task = {Task::TOUCH, nullptr};
    else
        return false;
    return true;
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

// The next piece of a ring, in a slot. Its copy is left out where the job has a status. The first
// ones are small, so that the stream soon has something to do, and the last ones, so that all
// threads have one.
Slot* take_piece(const Pool& pool, Ring& ring) {
    Job* job = ring.jobs.front();
    Slot* slot = ring.free.back();
    ring.free.pop_back();
    slot->job = job;
    const int threads = std::max(1, pool.threads);
    size_t most = ring.waiting / threads;
    if (ring.up && ring.handed_out++ < threads) most = std::min(most, ring.slot_bytes / 4);
    most = std::min(ring.slot_bytes, std::max(most, LEAST_PIECE));
    slot->piece = next_piece(*job, most);
    ring.waiting -= slot->piece.bytes();
    if (job->y == job->height) ring.jobs.pop_front();
    const int stopped = __atomic_load_n(job->stopped, __ATOMIC_RELAXED);
    if (!job->status && (ring.status || stopped)) job->status = ring.status ? ring.status : STOPPED;
    return slot;
}

// Gives the ring's stream all that it can have; the mutex is let go meanwhile.
void send(Pool& pool, Ring& ring, std::unique_lock<std::mutex>& lock) {
    ring.sending = true;
    static thread_local void* context = nullptr;
    while (is_sendable(ring)) {
        Slot* slot = ring.up ? ring.filled.front() : take_piece(pool, ring);
        if (ring.up) ring.filled.pop_front();
        Job* job = slot->job;
        int status = job->status;
        const bool last = !(job->unsent -= slot->piece.bytes());
        lock.unlock();
        if (context != ring.context && !status) {
            status = ring.driver.set_context(ring.context);
            context = status ? nullptr : ring.context;
        }
        if (!status) status = start_copy(ring, *slot);
        const bool sent = !status;
        if (sent && last) status = ring.driver.record(job->stop, ring.stream);
        lock.lock();
        if (status && !job->status) job->status = status;
        if (sent)
            ring.flying.push_back(slot);
        else
            ring.free.push_back(slot);
        if (ring.up || !sent) end_piece(pool, *slot);  // else it ends when its slot is emptied
    }
    ring.sending = false;
}

void fill(Pool& pool, Ring& ring, std::unique_lock<std::mutex>& lock) {
    Slot* slot = take_piece(pool, ring);
    if (!slot->job->status) {
        lock.unlock();
        copy_on_host(*slot, true);
        lock.lock();
    }
    ring.filled.push_back(slot);
}

void empty(Pool& pool, Ring& ring, std::unique_lock<std::mutex>& lock) {
    Slot* slot = ring.landed.front();
    ring.landed.pop_front();
    Job* job = slot->job;
    if (ring.status && !job->status) job->status = ring.status;
    if (!job->status) {
        lock.unlock();
        copy_on_host(*slot, false);
        lock.lock();
    }
    ring.free.push_back(slot);
    end_piece(pool, *slot);
}

// Does a task; the mutex is let go meanwhile.
void perform(Pool& pool, Task task, std::unique_lock<std::mutex>& lock) {
    switch (task.kind) {
        case Task::SEND:
            return send(pool, *task.ring, lock);
        case Task::FILL:
            return fill(pool, *task.ring, lock);
        case Task::EMPTY:
            return empty(pool, *task.ring, lock);
        case Task::TOUCH:
            return touch(pool, lock);
    }
}

bool something_flies(const Pool& pool) {
    for (const Ring* ring : pool.rings)
        if (!ring->flying.empty()) return true;
    return false;
}

void pause_after(int fruitless) {
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

// Asks the driver whether the next copy of each ring is over, and gives its slot on: how many others
// can do something now. The mutex is let go meanwhile, for a pause after `fruitless` looks.
int look(Pool& pool, int fruitless, std::unique_lock<std::mutex>& lock) {
    struct Next {
        Ring* ring;
        void* event;
        int status;
    };
    static thread_local std::vector<Next> all;
    all.clear();
    for (Ring* ring : pool.rings)
        if (!ring->flying.empty()) all.push_back({ring, ring->flying.front()->event, 0});
    if (all.empty()) return 0;
    pool.looking = true;
    lock.unlock();
    pause_after(fruitless);
    for (Next& next : all) next.status = next.ring->driver.query(next.event);
    lock.lock();
    pool.looking = false;
    if (pool.closing) pool.looked.notify_all();
    int found = 0;
    for (auto [ring, event, status] : all) {
        if (status == NOT_READY) continue;
        if (status) ring->status = status;
        (ring->up ? ring->free : ring->landed).push_back(ring->flying.front());
        ring->flying.pop_front();
        found += !ring->up || !ring->jobs.empty();
    }
    return found;
}

void copy_for_ever(Pool& pool) {
    std::unique_lock<std::mutex> lock(pool.mutex);
    int fruitless = 0;
    for (Task task;;) {
        if (!pool.looking) {
            const int found = look(pool, fruitless, lock);
            if (found) fruitless = 0;
            for (int others = std::min(found - 1, pool.idle); others > 0; --others)
                pool.work.notify_one();
        }
        if (find_task(pool, task)) {
            if (pool.idle && !pool.looking && something_flies(pool)) pool.work.notify_one();
            perform(pool, task, lock);
            fruitless = 0;
        } else if (!pool.looking && something_flies(pool)) {
            ++fruitless;
        } else {
            ++pool.idle;
            pool.work.wait(lock);
            --pool.idle;
            fruitless = 0;
        }
    }
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
    return ring;
}

// For a ring whose copies have all ended. Blocks while its events are asked for.
void ring_close(Pool* pool, Ring* ring) {
    std::unique_lock<std::mutex> lock(pool->mutex);
    ++pool->closing;
    pool->looked.wait(lock, [&] { return !pool->looking; });
    --pool->closing;
    pool->rings.erase(std::find(pool->rings.begin(), pool->rings.end(), ring));
    delete ring;
}

void ring_submit(Pool* pool, Ring* ring, const Request* request) {
    Job* job = new Job(*request);
    size_t woken;
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        if (ring->jobs.empty() && ring->filled.empty() && ring->flying.empty())
            ring->handed_out = 0;
        ring->waiting += job->left;
        woken = std::min({job->left / LEAST_PIECE + 1, ring->free.size(), size_t(pool->idle)});
        ring->jobs.push_back(job);
        *request->accepted = 1;
    }
    // Outside the mutex, which all that wake want, and no more threads than can begin: the caller
    // holds Python's lock. Each slot that becomes free wakes one more.
    for (; woken; --woken) pool->work.notify_one();
}
}
