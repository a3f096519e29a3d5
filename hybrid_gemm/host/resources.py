"""Cores and memory of this host."""

from __future__ import annotations

import contextlib
import os

from . import cgroups


def cores() -> int:
    """The number of cores that this process may run on, or whose time it may use; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        found = len(os.sched_getaffinity(0))
    else:
        found = os.cpu_count() or 1
    return min(found, cgroups.cores() or found)


def memory_available() -> int:
    """Bytes of host memory that can be allocated without swapping, and within the limit that a
    container or a batch system sets."""
    left, found = cgroups.memory_left(), _memory_of_host()
    return found if left is None else min(left, found)


def _memory_of_host() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
