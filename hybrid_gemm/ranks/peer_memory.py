"""Parts of matrices from GPU to GPU, among ranks of one node: each rank copies what it wants from
memory that the others opened to it (CUDA IPC)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import wait_for_streams
from ..arrays.operand import Operand, home_of
from ..devices import are_gpus
from ..devices.base import Device
from ..errors import UnavailableError
from ..planning.partition import Span
from . import heartbeat, launch
from .on_device import put
from .open_memory import OpenMemory
from .redistribution import Part
from .transports import no_peer_copies

# Of a rank's memory that others read at a time: a link between GPUs takes some milliseconds for
# it, and ranks meet twice.
STAGED_BYTES = 256 << 20


class PeerMemory:
    """Memory of this rank's `device` for parts on their way, and that of the other ranks. `node` is
    as in `Place`. Opened where it is first used. Collective, each call."""

    def __init__(self, comm: Any, node: int, device: Device, transport: str) -> None:
        self.comm, self.node, self.device = comm, node, device
        self.asked, self.allowed = transport, transport in ("auto", "ipc") and are_gpus(device.kind)
        self.sizes = [0] * comm.size  # bytes that each rank opened
        self.memory: OpenMemory | None = None
        self._usable: bool | None = None

    def usable(self) -> bool:
        """Whether all ranks can read each other's memory."""
        if self._usable is None:
            possible = self.allowed and self.comm.size > 1
            self._usable = possible and not no_peer_copies(self.comm, self.node, self.device)
        return self._usable

    def move(
        self, array: Any, have: Sequence[Part], want: Sequence[Part], dtype: np.dtype
    ) -> Any | None:
        """As `redistribution.move`, of arrays of the host or of each rank's device, to that device;
        None where there is no memory for it, unless the transport asked for is this one: then
        `UnavailableError`, on all ranks."""
        rank, dtype = self.comm.rank, np.dtype(dtype)
        own = have[rank] & want[rank]
        turns = staged(have, want, dtype.itemsize)
        if not turns and own == want[rank]:
            return have[rank].of(array, own)
        if not self._open([_bytes_of(turns, r, dtype.itemsize) for r in range(self.comm.size)]):
            return None
        device = self.device
        if array is not None and (own or any(parts[rank] for parts in turns)):
            found = Operand.of(array, home_of(array, [device]))
            array = put(device, found, dtype.name).array
        out = have[rank].of(array, own) if own == want[rank] else self.empty(want[rank], dtype)
        wait_for_streams(array, out)  # on which the memory of `out` may have been in use
        with device.streams(1) as (stream,), device.using(stream):
            if own and own != want[rank]:
                device.copy(want[rank].of(out, own), have[rank].of(array, own), stream)
            for parts in turns:
                if (mine := parts[rank]) is not None:
                    staged_here = self._at(rank, mine, dtype)
                    device.copy(staged_here, have[rank].of(array, mine), stream)
                stream.synchronize()
                self._meet()
                for other, part in enumerate(parts):
                    if other == rank or part is None or not (wanted := part & want[rank]):
                        continue
                    theirs = part.of(self._at(other, part, dtype), wanted)
                    device.copy(want[rank].of(out, wanted), theirs, stream)
                stream.synchronize()
                self._meet()  # nobody writes what another still reads
        return out

    def empty(self, part: Part, dtype: Any) -> Any:
        """A part of a matrix on this rank's device, uninitialised."""
        gpu: Any = self.device.unwrapped
        with gpu.cp.cuda.Device(gpu.ordinal):
            return gpu.cp.empty(part.shape, dtype)

    def _meet(self) -> None:
        with heartbeat.known(self.comm).during(heartbeat.WAITING):
            self.comm.Barrier()

    def _at(self, rank: int, part: Part, dtype: np.dtype) -> Any:
        """A part where a rank puts it for the others, as a matrix of this rank's device."""
        assert self.memory is not None
        return self.memory.matrix(rank, part.shape, dtype)

    def _open(self, sizes: Sequence[int]) -> bool:
        """Makes each rank's memory as large as this, at least; whether all have it. Sizes are
        powers of two, so that ever larger products open it a few times."""
        if all(size <= known for size, known in zip(sizes, self.sizes, strict=True)):
            return True
        wanted = [
            max(known, 1 << (size - 1).bit_length() if size else 0)
            for size, known in zip(sizes, self.sizes, strict=True)
        ]
        self.close()
        try:
            self.memory = OpenMemory(self.comm, self.device, wanted[self.comm.rank])
        except RuntimeError as error:  # on all ranks
            if self.asked == "ipc":
                reason = f"transport ipc was asked for: {error}"
                raise launch.agreed(UnavailableError(reason)) from None
            return False
        self.sizes = wanted
        return True

    def close(self) -> None:
        """Gives the memory back. Collective."""
        if self.memory is not None:
            self.memory.close()
        self.memory, self.sizes = None, [0] * len(self.sizes)


def staged(
    have: Sequence[Part], want: Sequence[Part], itemsize: int
) -> list[list[Part | None]]:  # fmt: skip
    """What each rank lets the others read, turn by turn: rows of a part that others want something
    of, `STAGED_BYTES` at most unless one row has more; None of a rank that has no more."""
    if have == want:
        return []
    rows = [
        _rows(part, itemsize) if any(part & x for i, x in enumerate(want) if i != rank) else []
        for rank, part in enumerate(have)
    ]
    turns = max(map(len, rows), default=0)
    return [[x[i] if i < len(x) else None for x in rows] for i in range(turns)]


def _rows(part: Part, itemsize: int) -> list[Part]:
    most = max(1, STAGED_BYTES // (len(part.cols) * itemsize))
    starts = range(part.rows.start, part.rows.stop, most)
    return [Part(Span(x, min(x + most, part.rows.stop)), part.cols) for x in starts]


def _bytes_of(turns: Sequence[Sequence[Part | None]], rank: int, itemsize: int) -> int:
    """The most that a rank lets others read at a time."""
    parts = [part for turn in turns if (part := turn[rank])]
    return max((math.prod(part.shape) * itemsize for part in parts), default=0)
