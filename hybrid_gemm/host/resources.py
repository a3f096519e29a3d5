"""Cores and memory of this host."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator

from . import cgroups


def cores() -> int:
    """The number of cores that this process may run on, or whose time it may use; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return min(found, cgroups.cores() or found)


class OthersTime:
    """What other processes have of this one's cores from now on."""

    def __init__(self) -> None:
        self._began = _times()

    def share(self) -> float | None:
        """As a share of the cores' time, and no more than is sure; None where the system does not
        tell."""
        now = _times()
        if now is None or self._began is None:
            return None
        clock, *taken = (b - a for a, b in zip(self._began, now, strict=True))
        *busy, own = taken
        others = sum(busy) - own - len(busy) / os.sysconf("SC_CLK_TCK")  # counted in whole ticks
        return max(0.0, others) / (clock * len(busy))


def _times() -> list[float] | None:
    """Seconds: of the clock, that each core was busy on which this process may run, and that this
    process had of them. None where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/stat") as lines:
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        found = [time.perf_counter()]
        for name, *ticks in map(str.split, lines):
            if name in mine:
                # What a virtual machine did not get counts, too.
                user, nice, system, _idle, _waiting, *more = map(int, ticks[:8])
                found.append((user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK"))
        return [*found, sum(os.times()[:4])] if len(found) > 1 else None
    return None


def memory_available() -> int:
    """Bytes of host memory that can be allocated without swapping, and within the limits that a
    container, a batch system or `ulimit` sets."""
    left = [_memory_of_host(), cgroups.memory_left(), *_left_by_ulimit()]
    return min(x for x in left if x is not None)


def _left_by_ulimit() -> Iterator[int]:
    """What `ulimit -v` and `ulimit -d` leave to this process, where they are set."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as sizes:
        used = [int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in sizes.read().split()]
        for limit, place in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
            most, _hard = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                yield max(0, most - used[place])


def _memory_of_host() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
