"""How fast bytes travel on this host, measured once by `hybrid-gemm tune --links` and kept.

Figures are GB/s, 10^9 bytes copied a second, in all where several GPUs or threads are at it
together. The file lies in the user's cache under the host's name and its GPUs' UUIDs.
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..host import cache
from ..problem import INT_LIMIT
from .hardware import Links

# --- what is known ------------------------------------------------------------------------


def path(uuids: Sequence[str]) -> Path:
    """The file for these GPUs of this host."""
    return cache.directory("links") / _name(uuids)


def _name(uuids: Sequence[str]) -> str:
    digest = hashlib.sha256(" ".join(sorted(uuids)).encode()).hexdigest()[:12]
    return f"{platform.node() or 'host'}-{digest}.json"


@functools.cache
def kept(uuids: tuple[str, ...]) -> dict[str, Any] | None:
    """What was measured between these GPUs and this host, as data; None if nothing was, or if
    the file is damaged, which a note says."""
    file = cache.measured_file("links", _name(uuids))
    damaged = "is no table of `hybrid-gemm tune --links`: it is left out, tune makes it anew"
    return cache.read_measured(file, _checked, damaged)


def _checked(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a table of links; `ValueError`, `KeyError` or `TypeError` for other data."""
    for row in data["rows"]:
        right = (
            isinstance(row["link"], str) and isinstance(row["memory"], str)
            and type(row["at_once"]) is int and 0 < row["at_once"] <= INT_LIMIT
            and cache.is_figure(row["gbps"])
        )  # fmt: skip
        if not right:
            raise ValueError(row)
    links = from_data(data)
    if not (links.h2d and links.d2h and links.both):
        raise ValueError("a direction was not measured")
    if not isinstance(links.measured, str):
        raise ValueError("it does not say when it was measured")
    return data


@functools.cache
def known(uuids: tuple[str, ...]) -> Links | None:
    """As `kept`, in the form that the cost model takes."""
    data = kept(uuids)
    return from_data(data) if data else None


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

    one = [dict(rates(link, "pageable")).get(1) for link in ("h2d", "d2h")]
    return Links(
        rates("h2d"), rates("d2h"), rates("both"), rates("ring", "device") or ((1, math.inf),),
        rates("memcpy"), data["measured"], (one[0], one[1]) if one[0] and one[1] else None,
        *(rates(link, "staged") for link in ("h2d", "d2h", "both")),
    )  # fmt: skip


# --- measuring ----------------------------------------------------------------------------


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({2**i for i in range(most.bit_length())} | {most})
