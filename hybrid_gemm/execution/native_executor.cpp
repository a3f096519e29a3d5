// Carries out a run's commands by a thread for each lane, which needs neither Python nor its lock.
// native_executor.py makes these structures, keeps them, and starts runs of them.
//
// A lane's commands are carried out in their order. One that needs an event waits until that is
// recorded, by another lane's thread or by the threads that copy: to the driver, an event that was
// not yet recorded is over. All of them wait for commands before them in the run's list, so the
// first one that is not done can go on, and each run ends.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "native_driver.h"

namespace {

constexpr int OUT_OF_MEMORY = 2;  // CUDA_ERROR_OUT_OF_MEMORY

enum Kind : int32_t { RECORD, WAIT, COPY, START, HAND_OVER };

struct Command {
    int32_t kind;
    int32_t host;         // COPY, HAND_OVER: which of the host's matrices is one side; -1: none
    int32_t writes_host;  // whether that is where bytes go
    int32_t event;        // RECORD, WAIT: which; HAND_OVER: what the copy waits for; -1: nothing
    int32_t start, stop;  // HAND_OVER: events before and after
    int64_t number;       // in the run's list
    void* where;          // a stream; HAND_OVER: a ring of native_copier.cpp
    uint64_t to, to_pitch, from, from_pitch, width, height;  // of the host's side: from its start
    int (*function)(void* list, uint64_t, uint64_t, uint64_t);  // START: as in launch_list.cpp
    void* list;
    uint64_t addresses[3];
    int64_t flops;
};

struct Lane {  // a worker's commands, or some that belong together
    void* context;
    const Command* commands;
    int64_t count;
};

struct Program {
    Driver driver;
    void (*submit)(void* pool, void* ring, const Request*);  // ring_submit of native_copier.cpp
    void* pool;
    const Lane* lanes;
    int64_t lane_count, event_count, host_count;
};

struct State {  // what Python is told
    int32_t status;
    int32_t wrote;   // whether anything was on its way to the host
    int64_t failed;  // the number of the command that did; -1: a copy by other threads
    int64_t flops;   // of products that were started
};

struct Waiter {  // a lane's thread that waits for an event
    int32_t event;
    int64_t number;  // of the command that waits, in the run's list
    std::condition_variable woken = {};
};

struct Run {
    const Program* program;
    std::vector<void*> events;
    std::vector<uint64_t> hosts;
    uint64_t first;  // number of the copies
    int* stopped;
    std::mutex mutex;              // over what follows
    std::condition_variable over;  // nothing is left
    std::vector<char> recorded;    // by event
    std::vector<Waiter*> waiting;
    State state = {0, 0, -1, 0};
    int64_t left;  // lanes, and copies that other threads have
    int accepted = 0;
};

struct Task {
    Run* run;
    const Lane* lane;
};

struct Threads {  // of the process: those of earlier runs wait for the lanes of later ones
    std::mutex mutex;
    std::condition_variable given;
    std::deque<Task> tasks;
    size_t spare = 0;  // threads that carry out nothing, or soon will
};

bool is_stopped(const Run& run) { return __atomic_load_n(run.stopped, __ATOMIC_RELAXED); }

// With the mutex held.
void stop(Run& run) {
    __atomic_store_n(run.stopped, 1, __ATOMIC_RELAXED);
    for (Waiter* waiter : run.waiting) waiter->woken.notify_one();
}

// With the mutex held.
void fail(Run& run, int status, int64_t number) {
    if (!run.state.status) {
        run.state.status = status;
        run.state.failed = number;
    }
    stop(run);
}

// With the mutex held. Wakes no other threads than those that wait for it: with several workers on
// a GPU there are hundreds of events, and a dozen threads.
void mark_recorded(Run& run, int32_t event) {
    run.recorded[event] = 1;
    for (Waiter* waiter : run.waiting)
        if (waiter->event == event) waiter->woken.notify_one();
}

// With the mutex held: a lane, or a copy that other threads have, has ended.
void end_one(Run& run) {
    if (!--run.left) run.over.notify_all();
}

// With the mutex held: the thread that waits for what comes first in the run's list, or null.
Waiter* first_of(const Run& run) {
    const auto before = [](const Waiter* x, const Waiter* y) { return x->number < y->number; };
    const auto found = std::min_element(run.waiting.begin(), run.waiting.end(), before);
    return found == run.waiting.end() ? nullptr : *found;
}

// Blocks until the event that a command needs is recorded; false where the run stops before. The
// first of all that wait asks again and again: to be woken takes as long as copying a piece.
bool await(Run& run, int64_t number, int32_t event) {
    std::unique_lock<std::mutex> lock(run.mutex);
    const auto goes_on = [&] { return run.recorded[event] || is_stopped(run); };
    if (goes_on()) return run.recorded[event];
    Waiter self{event, number};
    run.waiting.push_back(&self);
    for (int fruitless = 0; !goes_on();) {
        if (first_of(run) != &self) {
            self.woken.wait(lock);
            continue;
        }
        lock.unlock();
        pause_after(++fruitless);
        lock.lock();
    }
    run.waiting.erase(std::find(run.waiting.begin(), run.waiting.end(), &self));
    if (Waiter* next = first_of(run)) next->woken.notify_one();
    return run.recorded[event];
}

// Called by the threads that copy.
void copy_ended(void* context, uint64_t event, int status) {
    Run& run = *static_cast<Run*>(context);
    std::lock_guard<std::mutex> lock(run.mutex);
    if (!status) mark_recorded(run, static_cast<int32_t>(event));
    if (status > 0) fail(run, status, -1);
    end_one(run);
}

void hand_over(Run& run, const Command& c, uint64_t to, uint64_t from) {
    const bool up = !c.writes_host;
    Request request = {};
    request.id = run.first + c.number;
    request.host = reinterpret_cast<char*>(up ? from : to);
    request.host_pitch = up ? c.from_pitch : c.to_pitch;
    request.device = up ? to : from;
    request.device_pitch = up ? c.to_pitch : c.from_pitch;
    request.width = c.width;
    request.height = c.height;
    request.after = c.event < 0 ? nullptr : run.events[c.event];
    request.start = run.events[c.start];
    request.stop = run.events[c.stop];
    request.stopped = run.stopped;
    request.accepted = &run.accepted;
    request.ended = copy_ended;
    request.run = &run;
    request.event = c.stop;
    {
        std::lock_guard<std::mutex> lock(run.mutex);
        ++run.left;
    }
    run.program->submit(run.program->pool, c.where, &request);
}

int copy(const Driver& call, const Command& c, uint64_t to, uint64_t from) {
    if (c.height == 1) return call.copy(to, from, c.width, c.where);
    const Copy2D copy = {{0, 0, UNIFIED, nullptr, from, nullptr, c.from_pitch},
                         {0, 0, UNIFIED, nullptr, to, nullptr, c.to_pitch},
                         c.width,
                         c.height};
    return call.copy_2d(&copy, c.where);
}

// What the driver, or a library, says of a command.
int perform(Run& run, const Command& c) {
    const Driver& call = run.program->driver;
    const uint64_t host = c.host < 0 ? 0 : run.hosts[c.host];
    const uint64_t to = c.to + (c.writes_host ? host : 0);
    const uint64_t from = c.from + (c.writes_host ? 0 : host);
    if (c.writes_host) {
        std::lock_guard<std::mutex> lock(run.mutex);
        run.state.wrote = 1;
    }
    switch (c.kind) {
        case RECORD: {
            const int status = call.record(run.events[c.event], c.where);
            std::lock_guard<std::mutex> lock(run.mutex);
            if (!status) mark_recorded(run, c.event);
            return status;
        }
        case WAIT:
            return await(run, c.number, c.event) ? call.wait(c.where, run.events[c.event], 0) : 0;
        case COPY:
            return copy(call, c, to, from);
        case HAND_OVER:
            if (c.event >= 0 && !await(run, c.number, c.event)) return 0;
            hand_over(run, c, to, from);
            return 0;
        default:
            break;
    }
    const uint64_t* at = c.addresses;
    if (int status = c.function(c.list, at[0], at[1], at[2])) return status;
    std::lock_guard<std::mutex> lock(run.mutex);
    run.state.flops += c.flops;
    return 0;
}

void carry_out(Threads& threads, Run& run, const Lane& lane) {
    int64_t number = -1;
    int status = run.program->driver.set_context(lane.context);
    for (int64_t i = 0; i < lane.count && !status && !is_stopped(run); ++i) {
        number = lane.commands[i].number;
        status = perform(run, lane.commands[i]);
    }
    {  // before the run ends, or the next one would have a thread made for it
        std::lock_guard<std::mutex> lock(threads.mutex);
        ++threads.spare;
    }
    std::lock_guard<std::mutex> lock(run.mutex);
    if (status) fail(run, status, number);
    end_one(run);
}

void serve(Threads& threads) {
    std::unique_lock<std::mutex> lock(threads.mutex);
    for (;;) {
        threads.given.wait(lock, [&] { return !threads.tasks.empty(); });
        --threads.spare;
        const Task task = threads.tasks.front();
        threads.tasks.pop_front();
        lock.unlock();
        carry_out(threads, *task.run, *task.lane);
        lock.lock();
    }
}

// Has each lane carried out by a thread of its own: they wait for each other. How many are given;
// fewer than asked for where the system has no more threads.
int64_t give(Threads& threads, Run& run, const Lane* lanes, int64_t count) {
    std::lock_guard<std::mutex> lock(threads.mutex);
    for (int64_t i = 0; i < count; ++i) {
        if (threads.tasks.size() == threads.spare) try {
                std::thread(serve, std::ref(threads)).detach();
                ++threads.spare;
            } catch (const std::system_error&) {
                return i;
            }
        threads.tasks.push_back({&run, &lanes[i]});
        threads.given.notify_one();
    }
    return count;
}

}  // namespace

extern "C" {

void* threads_open() {
    return new Threads;  // for as long as the process lives
}

// Starts a run with these events, and with the addresses of the host's matrices. Its copies have
// numbers from `first` on. Where `stopped` is set meanwhile, the rest is left out.
void run_begin(Threads* threads, const Program* program, void** events, const uint64_t* hosts,
               uint64_t first, int* stopped, Run** going) {
    Run* run = new Run;
    run->program = program;
    run->events.assign(events, events + program->event_count);
    run->hosts.assign(hosts, hosts + program->host_count);
    run->first = first;
    run->stopped = stopped;
    run->recorded.assign(program->event_count, 0);
    run->left = program->lane_count;
    *going = run;
    const int64_t given = give(*threads, *run, program->lanes, program->lane_count);
    if (given == program->lane_count) return;
    std::lock_guard<std::mutex> lock(run->mutex);
    run->left -= program->lane_count - given;
    fail(*run, OUT_OF_MEMORY, -1);
}

// Blocks until all was started and the copies of other threads have ended, or for so long; whether
// it has. Tells how far it has come.
int run_wait(Run* run, int milliseconds, State* state) {
    std::unique_lock<std::mutex> lock(run->mutex);
    const auto over = [&] { return run->left == 0; };
    run->over.wait_for(lock, std::chrono::milliseconds(milliseconds), over);
    *state = run->state;
    return over();
}

// Has the rest left out, if there is a run.
void run_stop(Run* run) {
    if (!run) return;
    std::lock_guard<std::mutex> lock(run->mutex);
    stop(*run);
}

// Blocks until it is over, tells how far it came, and forgets it.
void run_end(Run* run, State* state) {
    if (!run) return;
    {
        std::unique_lock<std::mutex> lock(run->mutex);
        run->over.wait(lock, [&] { return run->left == 0; });
        *state = run->state;
    }
    delete run;
}
}
