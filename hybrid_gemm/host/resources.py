"""Cores and memory of this host."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from . import cgroups


def cores() -> int:
    """The number of cores that this process may run on, or whose time it may use; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return min(found, cgroups.cores() or found)


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
