// Copies between ordinary host memory and GPUs through page-locked slots, by threads that need
// neither Python nor its lock. native_copier.py compiles and calls it.
//
// A ring is one direction of one GPU: a stream, and slots. A copy is cut into pieces that fit a
// slot. All rings share the threads that copy, of which as many are awake at most as the GPUs with
// something to copy want. They give each stream what it can have, one thread a ring at a time, for
// the driver would let others wait; they fill slots for uploads, which products wait for, and then
// empty slots of downloads. Who has nothing to copy asks the driver which copies are over, one
// thread for all, or makes the pages of memory that will be written.
#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>
#include "native_ring.h"

namespace {

constexpr size_t PAGE = 4096, HUGE_PAGE = 2 << 20;
// Smaller pieces take as long.
constexpr size_t LEAST_PIECE = 256 << 10;

struct Finished {
    uint64_t id;
    int status;
};

struct Fresh {  // memory without pages, from `at` on
    uint64_t id;
    const void* context;  // of the GPU for which they are made
    char *at, *end;
    int busy = 0;  // threads that are at it
};

struct Sleeper {  // a thread with nothing to do
    std::condition_variable given;
    bool called = false;
};

struct Pool {
    const std::vector<int> wanted;  // threads for one GPU, two, ...
    std::mutex mutex;               // over all rings
    std::condition_variable done, looked;
    std::vector<Ring*> rings;
    std::deque<Fresh*> fresh;  // in turn
    std::deque<Finished> finished;
    int threads = 0, closing = 0;
    std::vector<Sleeper*> asleep;  // the last one is woken first: always the same ones copy
    bool looking = false;          // a thread asks the driver, without the mutex

    explicit Pool(std::vector<int> threads_wanted) : wanted(std::move(threads_wanted)) {
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

// GPUs with something to do, and how many threads are for them together.
struct Busy {
    int gpus, threads;
};

Busy count_gpus(const Pool& pool, std::vector<const void*>& contexts) {
    std::sort(contexts.begin(), contexts.end());
    const size_t gpus = std::unique(contexts.begin(), contexts.end()) - contexts.begin();
    return {static_cast<int>(gpus), gpus ? pool.wanted[std::min(gpus, pool.wanted.size()) - 1] : 0};
}

Busy busy_now(const Pool& pool) {
    static thread_local std::vector<const void*> contexts;
    contexts.clear();
    for (const Ring* ring : pool.rings)
        if (!ring->jobs.empty() || ring->free.size() < ring->slots.size())
            contexts.push_back(ring->context);
    for (const Fresh* fresh : pool.fresh) contexts.push_back(fresh->context);
    return count_gpus(pool, contexts);
}

// How many more may be awake; negative: so many are too many.
int missing(const Pool& pool) {
    return busy_now(pool).threads - (pool.threads - static_cast<int>(pool.asleep.size()));
}

// So many sleeping threads, or as many as may be awake: to be notified.
std::vector<Sleeper*> call(Pool& pool, int most) {
    most = std::min({most, static_cast<int>(pool.asleep.size()), missing(pool)});
    std::vector<Sleeper*> found;
    for (; most > 0; --most) {
        found.push_back(pool.asleep.back());
        found.back()->called = true;
        pool.asleep.pop_back();
    }
    return found;
}

void notify(const std::vector<Sleeper*>& called) {
    for (Sleeper* sleeper : called) sleeper->given.notify_one();
}

void sleep(Pool& pool, Sleeper& self, std::unique_lock<std::mutex>& lock) {
    self.called = false;
    pool.asleep.push_back(&self);
    self.given.wait(lock, [&] { return self.called; });
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

// The next piece of a ring, in a slot. Its copy is left out where the job has a status. The first
// ones are small, so that the stream soon has something to do, and the last ones, so that all
// threads have one.
Slot* take_piece(const Pool& pool, Ring& ring) {
    Job* job = ring.jobs.front();
    Slot* slot = ring.free.back();
    ring.free.pop_back();
    slot->job = job;
    const Busy busy = busy_now(pool);                           // the job's GPU has something to do
    const int threads = std::max(1, busy.threads / busy.gpus);  // of this GPU
    // One GPU's link takes larger pieces faster. Several GPUs wait for the threads, which copy
    // smaller ones faster (docs/results/copy_pieces4_h200.json).
    const size_t whole = busy.gpus > 1 ? ring.slot_bytes / 2 : ring.slot_bytes;
    size_t most = ring.waiting / threads;
    if (ring.up && ring.handed_out++ < threads) most = std::min(most, whole / 4);
    most = std::min(whole, std::max(most, LEAST_PIECE));
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

// Asks the driver whether the next copy of each ring is over, and gives its slot on: how many
// others can do something now. The mutex is let go meanwhile, for a pause after `fruitless` looks.
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
    Sleeper self;
    int fruitless = 0;
    for (Task task;;) {
        if (missing(pool) < 0) {
            sleep(pool, self, lock);
            fruitless = 0;
            continue;
        }
        if (!pool.looking) {
            const int found = look(pool, fruitless, lock);
            if (found) fruitless = 0;
            notify(call(pool, found - 1));
        }
        if (find_task(pool, task)) {
            if (!pool.looking && something_flies(pool)) notify(call(pool, 1));
            perform(pool, task, lock);
            fruitless = 0;
        } else if (!pool.looking && something_flies(pool)) {
            ++fruitless;
        } else {
            sleep(pool, self, lock);
            fruitless = 0;
        }
    }
}

}  // namespace

extern "C" {

// `wanted` is how many threads are to copy for one GPU, for two, ..., for `gpus` and more.
void* pool_start(const int* wanted, int gpus) {
    return new Pool({wanted, wanted + gpus});  // for as long as the process lives
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
    std::vector<const void*> contexts;
    for (const Ring* each : pool->rings) contexts.push_back(each->context);
    for (const int threads = count_gpus(*pool, contexts).threads; pool->threads < threads;
         ++pool->threads)
        std::thread(copy_for_ever, std::ref(*pool)).detach();
    return ring;
}

// Has the pages of size bytes made, of which there is one at least, by threads with nothing to
// copy.
void ring_touch(Pool* pool, const Ring* ring, uint64_t id, char* memory, size_t size) {
    std::vector<Sleeper*> called;
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        pool->fresh.push_back(new Fresh{id, ring->context, memory, memory + size});
        called = call(*pool, size / HUGE_PAGE + 1);
    }
    notify(called);
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
    std::vector<Sleeper*> called;
    {
        std::lock_guard<std::mutex> lock(pool->mutex);
        if (ring->jobs.empty() && ring->filled.empty() && ring->flying.empty())
            ring->handed_out = 0;
        ring->waiting += job->left;
        ring->jobs.push_back(job);
        called = call(*pool, std::min(job->left / LEAST_PIECE + 1, ring->free.size()));
        *request->accepted = 1;
    }
    // Outside the mutex, which all that wake want, and no more threads than can begin: the caller
    // holds Python's lock. Each slot that becomes free wakes one more.
    notify(called);
}
}
