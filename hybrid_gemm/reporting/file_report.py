"""What a product reads and writes of files: how fast that went, and the bound that disks set."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..arrays.npy_files import Written
from ..errors import in_words, time_in_words
from ..execution.read_ahead import Reading
from ..planning import cost_model, disk_rates
from ..planning.hardware import Disk


@dataclass(frozen=True)
class Files:
    """The files that a product reads, and the one that it writes, whose matrix has `bytes_out`.

    Of one that was `made`, `reading` and `written` say how it went with them, where that was seen,
    and `on_disk_ms` when all of C was on the disk, from the run's start on.
    """

    inputs: tuple[str, ...] = ()
    output: str | None = None
    bytes_out: int = 0
    made: bool = False
    reading: Reading | None = None
    written: Written | None = None
    on_disk_ms: float | None = None

    @property
    def bytes_in(self) -> int:
        """The bytes that come from a disk; before a run, of the files if none is in the cache."""
        if not self.made:
            return sum(os.path.getsize(name) for name in self.inputs)
        return self.reading.disk_bytes if self.reading else 0

    @cached_property
    def seen(self) -> tuple[Disk, Disk]:
        """What this run saw of the disk that it read, and of the one that it wrote."""
        source, target = Disk(), Disk()
        if self.reading and self._source is not None:
            rate = disk_rates.gbps(self.reading.disk_bytes, self.reading.ms)
            source = Disk(read_gbps=rate)
        if self.written:
            rate = disk_rates.gbps(self.written.behind_bytes, self.written.behind_ms)
            target = Disk(write_gbps=rate)
        return source, target

    @cached_property
    def _source(self) -> int | None:
        """The device of all files that are read; None where they lie on several."""
        found = set(map(disk_rates.device_of, self.inputs))
        return found.pop() if len(found) == 1 else None

    @cached_property
    def _target(self) -> int | None:
        folder = os.path.dirname(os.path.realpath(self.output)) if self.output else None
        return None if folder is None else disk_rates.device_of(folder)

    @cached_property
    def disks(self) -> tuple[Disk, Disk]:
        """The best that is known of both disks."""
        source, target = self.seen
        if self._source is not None:
            source = disk_rates.known(self._source).with_better(source)
        if self._target is not None:
            target = disk_rates.known(self._target).with_better(target)
        return source, target

    def keep(self) -> None:
        """Keeps what this run saw for the predictions of later ones."""
        source, target = self.seen
        if source.read_gbps and self._source is not None:
            disk_rates.keep(self._source, source)
        if target.write_gbps and self._target is not None:
            disk_rates.keep(self._target, target)

    @property
    def bounds_ms(self) -> dict[str, float]:
        """The terms of the bound that disks set; without those whose rate is not known."""
        source, target = self.disks
        return cost_model.disk_bound(self.bytes_in, source, self.bytes_out, target)

    @property
    def unknown(self) -> str:
        """Which rate is not known that may matter, in words; "" for none."""
        (source, target), enough = self.disks, disk_rates.LEAST_BYTES
        for verb, count, rate in (
            ("reading", self.bytes_in, source.read_gbps),
            ("writing", self.bytes_out, target.write_gbps),
        ):
            if count >= enough and not rate:
                return (
                    f"the disk's rate of {verb} is not known (a run that has {in_words(enough)} or "
                    "more of it sees it)"
                )
        return ""


def data(files: Files) -> dict[str, Any] | None:
    """Files for JSON; None where there are none. Times are in ms."""
    if not files.inputs and not files.output:
        return None
    reading, written, (source, target) = files.reading, files.written, files.disks
    return {
        "read": reading and {
            "bytes": reading.bytes, "disk_bytes": reading.disk_bytes, "ms": reading.ms,
        },
        "written": written and {
            "bytes": written.bytes, "behind_bytes": written.behind_bytes,
            "behind_ms": written.behind_ms, "sync_ms": written.sync_ms,
            "read_back_ms": written.read_back_ms,
        },
        "on_disk_ms": files.on_disk_ms,
        "read_gbps": source.read_gbps, "write_gbps": target.write_gbps,
    }  # fmt: skip


def lines(files: Files) -> Sequence[str]:
    """What was read and written, and how long it took, for people."""
    found = []
    if (reading := files.reading) is not None:
        cached = reading.bytes - reading.disk_bytes
        words = f"{in_words(reading.disk_bytes)} from the disk, {in_words(cached)} from the cache"
        found.append(f"read: {words}, ahead of the products in {time_in_words(reading.ms)}")
    if (written := files.written) is not None:
        # Of several repetitions, each writes the file.
        behind = f"{in_words(written.behind_bytes)} while it ran"
        found.append(
            f"written: {behind}, of a file of {in_words(written.bytes)}; the rest in "
            f"{time_in_words(written.sync_ms)}; "
            f"read back in {time_in_words(written.read_back_ms)}"
        )
    if files.on_disk_ms is not None:
        found.append(f"C was on the disk {time_in_words(files.on_disk_ms)} after the start")
    return found
