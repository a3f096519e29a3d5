"""How fast the disks of this host gave and took the files of earlier runs, kept in the cache.

Figures are GB/s, 10^9 bytes a second. The best that a run has seen stays: it is for bounds.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

from ..host import cache
from .hardware import Disk

LEAST_BYTES = 64 << 20  # of fewer, the time says little about a disk


def device_of(path: str) -> int | None:
    """The number of the device that has a file or a folder; None if it is not there."""
    try:
        return os.stat(path).st_dev
    except OSError:
        return None


def gbps(count: int, ms: float) -> float | None:
    """The rate of so many bytes; None where they were too few to tell."""
    return count / ms / 1e6 if count >= LEAST_BYTES and ms > 0 else None


def known(device: int) -> Disk:
    """What earlier runs saw of a device."""
    damaged = "is no table of a disk's rates: it is left out, a run makes it anew"
    return cache.read_measured(_file(device), _from_data, damaged) or Disk()


def _from_data(data: dict[str, Any]) -> Disk:
    found = Disk(data["read_gbps"], data["write_gbps"])
    if not all(x is None or cache.is_figure(x) for x in (found.read_gbps, found.write_gbps)):
        raise ValueError(found)
    return found


def keep(device: int, seen: Disk) -> None:
    """Keeps what a run saw of a device, where it is better than what is known."""
    before = known(device)
    best = before.with_better(seen)
    if best != before:
        data = {
            "read_gbps": best.read_gbps, "write_gbps": best.write_gbps,
            "measured": datetime.date.today().isoformat(),
        }  # fmt: skip
        cache.keep_measured(_file(device), json.dumps(data).encode())


def _file(device: int) -> Path | None:
    name = f"{platform.node() or 'host'}-{os.major(device)}-{os.minor(device)}.json"
    return cache.measured_file("disks", name)
