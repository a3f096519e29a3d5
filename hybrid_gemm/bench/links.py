"""Measures the rates of copies between this host and its GPUs."""

from __future__ import annotations

import ctypes
import datetime
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from ..arrays.strides import Array
from ..devices.base import Device
from ..execution import staging
from ..execution.transfers import Later, Transfer
from ..planning.link_rates import counts
from .study import Progress

ROWS, ROW_BYTES = 2048, 64 << 10  # of a buffer; each GPU has one for each direction
PIECE_ROWS = 64  # rows that a host thread copies at once
PARTS = 8  # of a buffer that goes through slots: of rows, and of columns, as plans have them
REPEATS, SAMPLES = 4, 3
# Times that everything is measured, one after the other: others on the host slow its copies for a
# while (47 to 79 GB/s within three minutes, docs/results/host4_fourth_h200.json).
ROUNDS = 3


def measure(
    devices: Sequence[Device],
    pinned: Callable[[tuple[int, int]], np.ndarray],
    threads: Sequence[int],
    progress: Progress = lambda total, what: lambda amount: None,
) -> dict[str, Any]:
    """Rates of copies between the host and these devices, alone and together, as plain data.

    `pinned(shape)` makes a float32 matrix in page-locked host memory; `threads` are the
    numbers of host threads whose copies into it are timed. A row's "gbps" is 10^9 bytes a second,
    of all that copy at once, the most of `ROUNDS`, after each row of which `progress` advances.
    """
    bench = Links(devices, pinned)
    rows: list[dict[str, Any]] = []
    timed: list[Callable[[], float]] = []

    def row(link: str, memory: str, at_once: int, gbps: Callable[[], float], **more: Any) -> None:
        rows.append({"link": link, "memory": memory, "at_once": at_once, "gbps": 0.0, **more})
        timed.append(gbps)

    for count in counts(len(devices)):
        for link in ("h2d", "d2h", "both"):
            row(link, "pinned", count, partial(bench.host, link, "pinned", count))
        for link in ("h2d", "d2h"):
            row(link, "pageable", count, partial(bench.host, link, "pageable", count))
        for link in ("h2d", "d2h", "both"):
            row(link, "staged", count, partial(bench.staged, link, count))
    ordinals = [device.ordinal for device in devices]
    for i, j in [(i, j) for i in range(len(devices)) for j in range(len(devices)) if i != j]:
        names = {"from": ordinals[i], "to": ordinals[j]}
        row("peer", "device", 1, partial(bench.peers, [(i, j)]), **names)
    for count in counts(len(devices))[1:]:
        ring = [(i, (i + 1) % count) for i in range(count)]
        row("ring", "device", count, partial(bench.peers, ring))
    for count in threads:
        row("memcpy", "pinned", count, partial(bench.memcpy, count))
    advance = progress(ROUNDS * len(rows), "timing")
    for _ in range(ROUNDS):
        for found, gbps in zip(rows, timed, strict=True):
            found["gbps"] = max(found["gbps"], gbps())
            advance(1)
    return {"measured": datetime.date.today().isoformat(), "rows": rows}


class Links:
    """Buffers on the host and on each device, and the copies between them that are timed."""

    def __init__(
        self, devices: Sequence[Device], pinned: Callable[[tuple[int, int]], np.ndarray]
    ) -> None:
        self.devices = devices
        shape = ROWS, ROW_BYTES // 4
        self.pinned = [(pinned(shape), pinned(shape)) for _ in devices]
        self.pageable = [(np.ones(shape, "f4"), np.ones(shape, "f4")) for _ in devices]
        for one in self.pinned:
            for array in one:
                array[...] = 1
        self.there = [(d.empty(*shape, "float32"), d.empty(*shape, "float32")) for d in devices]
        self.streams = [(d.stream(), d.stream()) for d in devices]
        self.staging = [staging.Link(d) for d in devices]

    def host(self, link: str, memory: str, count: int) -> float:
        """GB/s of copies from the host ("h2d"), to it ("d2h") or both ways at once ("both"), of
        `count` devices together; `memory` is "pinned" or "pageable"."""
        host = self.pinned if memory == "pinned" else self.pageable

        def one(i: int) -> None:
            for _ in range(REPEATS):
                if link != "d2h":
                    self._copy(i, self.there[i][0], host[i][0], 0)
                if link != "h2d":
                    self._copy(i, host[i][1], self.there[i][1], 1)

        copied = REPEATS * count * (2 if link == "both" else 1)
        if memory == "pinned":  # the calls return at once
            return self._gbps(lambda: [*map(one, range(count))], copied)
        with ThreadPoolExecutor(count) as pool:
            return self._gbps(lambda: list(pool.map(one, range(count))), copied)

    def staged(self, link: str, count: int) -> float:
        """As `host`, of copies between ordinary memory and devices as plans make them: through
        page-locked slots, one part after the other, every other time parts of columns."""
        every = slice(None)
        rows = [(part, every) for part in _cut(ROWS)]
        cols = [(every, part) for part in _cut(ROW_BYTES // 4)]
        parts = [where for i in range(REPEATS) for where in (cols if i % 2 else rows)]

        def work() -> None:
            transfers = []
            for where in parts:
                for i in range(count):
                    transfers += self._through_slots(i, where, link)
            for transfer in transfers:
                transfer.done.result()
            for used in self.staging[:count]:
                used.up.stream.synchronize()

        return self._gbps(work, REPEATS * count * (2 if link == "both" else 1))

    def _through_slots(self, i: int, where: tuple[slice, slice], link: str) -> list[Transfer]:
        """A part's copies on their way to device `i` and from it."""
        host, there, begun = self.pageable[i], self.there[i], []
        if link != "d2h":
            begun.append(Transfer(Later(), ctypes.c_int()))
            self.staging[i].upload(there[0][where], host[0][where], begun[-1])
        if link != "h2d":
            begun.append(Transfer(Later(), ctypes.c_int()))
            self.staging[i].download(host[1][where], there[1][where], begun[-1], None)
        return begun

    def peers(self, pairs: Sequence[tuple[int, int]]) -> float:
        """GB/s of copies from device to device, each on the stream of its first."""

        def work() -> None:
            for i, j in [*pairs] * REPEATS:
                self._copy(i, self.there[j][1], self.there[i][0], 0)

        return self._gbps(work, REPEATS * len(pairs))

    def memcpy(self, threads: int) -> float:
        """GB/s of copies on the host by so many threads, each into a page-locked slot of its own
        that stays in the cache. Uploads from pageable memory begin with such copies."""
        slots, pieces = _pieces(self.pinned), REPEATS * _pieces(self.pageable)
        copied = 2 * REPEATS * len(self.devices)
        with ThreadPoolExecutor(threads) as pool:
            mine = [(slots[i % len(slots)], pieces[i::threads]) for i in range(threads)]
            return self._gbps(lambda: list(pool.map(_copy_all, mine)), copied)

    def _copy(self, i: int, dst: Array, src: Array, direction: int) -> None:
        stream = self.streams[i][direction]
        with self.devices[i].using(stream):
            self.devices[i].copy(dst, src, stream)

    def _gbps(self, work: Callable[[], object], buffers: int) -> float:
        """GB/s of `work`, which copies so many buffers: the median of a few samples, after one
        that warms up."""
        taken = []
        for _ in range(SAMPLES + 1):
            started = time.perf_counter()
            work()
            for two in self.streams:
                for stream in two:
                    stream.synchronize()
            taken.append(time.perf_counter() - started)
        return buffers * ROWS * ROW_BYTES / statistics.median(taken[1:]) / 1e9


def _cut(side: int) -> list[slice]:
    """A side in `PARTS`."""
    return [slice(i * side // PARTS, (i + 1) * side // PARTS) for i in range(PARTS)]


def _pieces(buffers: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """What a host thread copies at once, of all buffers."""
    arrays = (array for two in buffers for array in two)
    return [x[i : i + PIECE_ROWS] for x in arrays for i in range(0, ROWS, PIECE_ROWS)]


def _copy_all(slot_and_pieces: tuple[np.ndarray, Sequence[np.ndarray]]) -> None:
    slot, pieces = slot_and_pieces
    for piece in pieces:
        np.copyto(slot, piece)
