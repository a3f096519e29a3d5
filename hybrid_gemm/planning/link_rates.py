"""How fast bytes travel on this host, measured once by `hybrid-gemm tune --links` and kept.

Figures are GB/s, 10^9 bytes copied a second, in all where several GPUs or threads are at it
together. The file lies in the user's cache under the host's name and its GPUs' UUIDs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..host import cache
from .hardware import Links

# --- what is known ------------------------------------------------------------------------


def path(uuids: Sequence[str]) -> Path:
    """The file for these GPUs of this host."""
    digest = hashlib.sha256(" ".join(sorted(uuids)).encode()).hexdigest()[:12]
    return cache.directory("links") / f"{platform.node() or 'host'}-{digest}.json"


@functools.cache
def kept(uuids: tuple[str, ...]) -> dict[str, Any] | None:
    """What was measured between these GPUs and this host, as data; None if nothing was."""
    file = path(uuids)
    if not file.is_file():
        return None
    data: dict[str, Any] = json.loads(file.read_text())
    return data


@functools.cache
def known(uuids: tuple[str, ...]) -> Links | None:
    """As `kept`, in the form that the cost model takes."""
    data = kept(uuids)
    return None if data is None else from_data(data)


def forget() -> None:
    """Has files read again from now on, because one was written."""
    kept.cache_clear()
    known.cache_clear()


def from_data(data: dict[str, Any]) -> Links:
    """The links of a file's data."""

    def rates(link: str, memory: str = "pinned") -> tuple[tuple[int, float], ...]:
        return tuple(
            (row["at_once"], row["gbps"])
            for row in data["rows"]
            if row["link"] == link and row["memory"] == memory
        )

    return Links(
        rates("h2d"), rates("d2h"), rates("both"), rates("ring", "device") or ((1, math.inf),),
        rates("memcpy"), data["measured"],
    )  # fmt: skip


# --- measuring ----------------------------------------------------------------------------


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most})
