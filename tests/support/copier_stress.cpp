// The threads that copy, for a sanitizer to watch: rings of a played driver, whose streams work in
// threads of their own, are given copies of random sizes, some of which are stopped, and closed.
// What is copied is compared. `copier_stress SECONDS SEED`
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <map>
#include <random>

#include "../../hybrid_gemm/execution/native_copier.cpp"

namespace {

struct Event {
    std::atomic<int> recorded{0}, done{0};
};

struct Stream {
    std::mutex mutex;
    std::condition_variable given;
    std::deque<std::function<void()>> todo;
    bool over = false;
    std::thread thread{[this] { work(); }};

    void work() {
        for (;;) {
            std::function<void()> next;
            {
                std::unique_lock<std::mutex> lock(mutex);
                given.wait(lock, [&] { return over || !todo.empty(); });
                if (todo.empty()) return;
                next = std::move(todo.front());
                todo.pop_front();
            }
            next();
        }
    }
    int give(std::function<void()> what) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            todo.push_back(std::move(what));
        }
        given.notify_one();
        return 0;
    }
    ~Stream() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            over = true;
        }
        given.notify_one();
        thread.join();
    }
};

Stream& of(void* stream) { return *static_cast<Stream*>(stream); }

const Driver driver = {
    [](void*) { return 0; },
    [](uint64_t to, uint64_t from, size_t size, void* stream) {
        return of(stream).give([=] { memcpy((void*)to, (void*)from, size); });
    },
    [](const Copy2D* given, void* stream) {
        return of(stream).give([c = *given] {
            for (size_t y = 0; y < c.height; ++y)
                memcpy((void*)(c.to.device + y * c.to.pitch),
                       (void*)(c.from.device + y * c.from.pitch), c.width);
        });
    },
    [](void* event, void* stream) {
        Event* e = static_cast<Event*>(event);
        const int number = ++e->recorded;
        return of(stream).give([=] { e->done = number; });
    },
    [](void* stream, void* event, unsigned) {
        Event* e = static_cast<Event*>(event);
        const int number = e->recorded;
        return of(stream).give([=] {
            while (e->done < number) std::this_thread::yield();
        });
    },
    [](void* event) {
        Event* e = static_cast<Event*>(event);
        return e->done == e->recorded ? 0 : NOT_READY;
    },
};

struct Copy {
    std::vector<char> host, device;
    size_t width, height, pitch;
    Event after, start, stop;
    int stopped = 0, accepted = 0;
    bool up;
    std::promise<int> ended;

    bool is_right() const {
        for (size_t y = 0; y < height; ++y)
            if (memcmp(&host[y * pitch], &device[y * width], width)) return false;
        return true;
    }
};

void said(void* run, uint64_t, int status) { static_cast<Copy*>(run)->ended.set_value(status); }

constexpr int SLOTS = 6, SLOT = 3000;

struct Opened {
    Stream stream;
    std::vector<char> memory = std::vector<char>(SLOTS * SLOT);
    Event events[SLOTS];
    Ring* ring;
};

}  // namespace

int main(int, char** args) {
    std::mt19937 random(atoi(args[2]));
    const auto draw = [&](int from, int to) { return int(random() % (to - from + 1)) + from; };
    const int wanted[] = {2, 5};
    Pool* pool = static_cast<Pool*>(pool_start(wanted, 2));
    char gpus[2];
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(atoi(args[1]));
    int copies = 0, stopped = 0;
    while (std::chrono::steady_clock::now() < until) {
        std::deque<Opened> rings(4);
        for (Opened& x : rings) {
            void* events[SLOTS];
            for (int i = 0; i < SLOTS; ++i) events[i] = &x.events[i];
            const int up = &x - &rings[0] < 2;
            x.ring =
                static_cast<Ring*>(ring_open(pool, &driver, &gpus[(&x - &rings[0]) % 2], &x.stream,
                                             up, x.memory.data(), SLOT, SLOTS, events));
        }
        std::deque<Copy> given(40);
        for (Copy& x : given) {
            const int i = draw(0, 3);
            x.up = i < 2;
            x.width = draw(1, 9000), x.height = draw(1, 9), x.pitch = x.width + draw(0, 1) * 77;
            x.host.assign(x.pitch * x.height, x.up ? 1 : 0);
            x.device.assign(x.width * x.height, x.up ? 0 : 2);
            Request request = {};
            request.id = copies++;
            request.host = x.host.data(), request.host_pitch = x.pitch;
            request.device = (uint64_t)x.device.data(), request.device_pitch = x.width;
            request.width = x.width, request.height = x.height;
            if (draw(0, 1)) driver.record(&x.after, &rings[draw(0, 3)].stream);
            request.after = x.after.recorded ? &x.after : nullptr;
            request.start = &x.start, request.stop = &x.stop;
            request.stopped = &x.stopped, request.accepted = &x.accepted;
            request.ended = said, request.run = &x;
            ring_submit(pool, rings[i].ring, &request);
            if (!draw(0, 9)) __atomic_store_n(&x.stopped, 1, __ATOMIC_RELAXED);
        }
        std::vector<int> statuses;
        for (Copy& x : given) statuses.push_back(x.ended.get_future().get());
        for (Opened& x : rings) ring_close(pool, x.ring);
        rings.clear();  // their streams have done all
        for (size_t i = 0; i < given.size(); ++i) {
            stopped += statuses[i] == STOPPED;
            if (statuses[i] != STOPPED && (statuses[i] || !given[i].is_right())) return 3;
        }
    }
    printf("%d copies, %d stopped\n", copies, stopped);
    fflush(stdout);
    _Exit(copies > 100 && stopped && stopped < copies / 2 ? 0 : 4);  // the threads stay
}
