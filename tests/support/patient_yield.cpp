// A sched_yield for LD_PRELOAD that sleeps. Open MPI calls it each time it has found no message, so
// ranks that wait leave the cores to those that compute.
#include <time.h>

extern "C" int sched_yield() {
    const timespec pause = {0, 50'000};
    nanosleep(&pause, nullptr);
    return 0;
}
