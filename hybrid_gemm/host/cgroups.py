"""What Linux's control groups leave to this process: by them containers and batch systems limit
memory and cores, of which the host has more."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # bytes; version 1 has a number near 2^63 where there is no limit


def memory_left() -> int | None:
    """The bytes that may still be allocated, with pages of files that can be dropped; None where no
    group limits them."""
    left = [_left(*files) for files in _memory_limits()]
    return min((x for x in left if x is not None), default=None)


def _left(limit: Path, used: Path) -> int | None:
    most, now = _number(limit), _number(used)
    if most is None or now is None:
        return None
    found = dict(line.split() for line in _lines(limit.with_name("memory.stat")))
    files = found.get("total_inactive_file", found.get("inactive_file", "0"))  # version 1, 2
    return max(0, most - now + int(files))


@functools.cache
def cores() -> int | None:
    """The cores whose time this process may use, rounded up; None where no group limits it."""
    found: list[float] = []
    for folder in _folders("cpu"):
        quota = _lines(folder / "cpu.max") or [
            f"{_number(folder / 'cpu.cfs_quota_us')} {_number(folder / 'cpu.cfs_period_us')}"
        ]
        time, _space, period = quota[0].partition(" ")
        if time.isdecimal() and period.isdecimal() and int(period):  # neither "max" nor -1
            found.append(int(time) / int(period))
    return max(1, math.ceil(min(found))) if found else None


@functools.cache
def _memory_limits() -> list[tuple[Path, Path]]:
    """The files with a limit, and with what is used, of each group that has one. Found once, for
    most have none."""
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    return [
        (folder / limit, folder / used)
        for folder in _folders("memory")
        for limit, used in names
        if (_number(folder / limit) or _UNLIMITED) < _UNLIMITED
    ]


def _folders(controller: str) -> Iterator[Path]:
    """The folders of this process's groups and of those above, as far as they are to be seen: in a
    container the path may be the host's, and then its root is the container's group."""
    for line in _lines(_OWN):
        _hierarchy, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [_ROOT, _ROOT / "unified"]  # version 2
        elif controller in controllers.split(","):
            roots = [_ROOT / controllers]
        else:
            continue
        for root in roots:
            folder = root / path.lstrip("/")
            while folder != root:
                yield folder
                folder = folder.parent
            yield root


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as of a limit that is "max"."""
    try:
        return int(_lines(path)[0])
    except (IndexError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
