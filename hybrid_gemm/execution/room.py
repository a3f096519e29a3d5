"""What a run has of its devices, memory and streams, taken again for one that comes again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..arrays.strides import address
from ..devices.base import Device
from . import staging
from .run import Run
from .worker import Worker

# What tells rooms of one kind apart: addresses of memory, of streams, and of the links' rings.
Place = tuple[int, ...]


@dataclass(frozen=True)
class Room:
    """`memory` has pieces and their bytes in the order in which a run takes them, `streams` each
    worker's device and how many of its streams are not urgent."""

    memory: Sequence[tuple[Device, int]]
    streams: Sequence[tuple[Device, int]]

    @classmethod
    def of(cls, run: Run, workers: Sequence[Worker]) -> Room:
        """That of a run which has it."""
        shared = [(x, len(y)) for x, y in zip(run.devices, run.blocks.taken, strict=True)]
        return cls(
            [*shared, *((w.device, len(w.taken)) for w in workers)],
            [(w.device, 1 + len(w.multiplying)) for w in workers],
        )

    @contextlib.contextmanager
    def taken(self) -> Iterator[Place]:
        """Memory and streams as a run takes them, for the block. Raises `MemoryError`."""
        held, pointers = [], []
        try:
            for device, size in self.memory:
                with device.using(device.allocation_stream):
                    held.append(device.empty(1, size, "uint8"))
            with contextlib.ExitStack() as stack:
                for device, count in self.streams:
                    for some, urgent in (count, False), (1, True):
                        streams = stack.enter_context(device.streams(some, urgent))
                        pointers += [stream.pointer for stream in streams]
                yield _place(pointers, [device for device, _ in self.streams], map(address, held))
        finally:  # an error's traceback would keep it
            held.clear()


def place_of(run: Run, workers: Sequence[Worker]) -> Place:
    """Where a run's room is."""
    pointers = [
        stream.pointer for w in workers for stream in (w.copying, *w.multiplying, w.summing)
    ]
    starts = [x.start for x in (*run.blocks.taken, *(w.taken for w in workers))]
    return _place(pointers, [w.device for w in workers], starts)


def _place(streams: Sequence[int], devices: Sequence[Device], starts: Iterable[int]) -> Place:
    links = [staging.link(device) for device in devices]
    rings = [part for link in links for ring in (link.up, link.down) for part in ring.key]
    return (*streams, *rings, *starts)
