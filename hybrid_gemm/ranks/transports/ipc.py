"""Partials that their owner copies from where they were made: CUDA IPC, ranks of one node."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ...arrays.operand import Operand
from ..open_memory import OpenMemory
from ..rank_plan import IN_FLIGHT, Piece
from .base import Transport


class IpcTransport(Transport):
    """Pieces stay where they were made, in memory that the ranks of a node opened to each
    other, and the owner copies each from there as soon as it is ready: the copy engines do that
    while the multiprocessors multiply. Empty messages say what is ready, and free."""

    def __init__(self, comm, plan, rank, device):
        super().__init__(comm, plan, rank, device)
        self.stream = device.stream()
        # One slot for each owner, as large as its first piece, IN_FLIGHT times.
        sizes = [
            max((p.shape[0] * p.shape[1] for p in owned), default=0) * self.dtype.itemsize
            for owned in self.pieces
        ]
        sizes = [-(-size // 512) * 512 for size in sizes]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.stride = sum(sizes)
        self.memory = OpenMemory(comm, device, self.stride * IN_FLIGHT)
        self.slots: dict[tuple[int, Piece], Any] = {}

    def start(self):
        super().start()
        self.ready = {
            piece.round: {
                source: self._empty(self.comm.Irecv, source, 2 * piece.round)
                for source in range(self.comm.size)
                if source != self.me
            }
            for piece in self.own
        }
        self.copies: dict[int, dict[int, tuple]] = defaultdict(dict)
        self.freed, self.told = {}, []

    @staticmethod
    def _empty(call, other: int, tag: int):
        from mpi4py import MPI

        return call([bytearray(), 0, MPI.BYTE], other, tag)

    def _slot(self, member: int, piece: Piece, owner: int):
        """A piece where `member` makes it, the same in every run."""
        key = member, piece
        if key not in self.slots:
            offset = self.offsets[owner] + piece.round % IN_FLIGHT * self.stride
            self.slots[key] = self.memory.matrix(member, piece.shape, self.dtype, offset)
        return self.slots[key]

    def _room(self, piece, owner):
        return Operand.of(self._slot(self.me, piece, owner), self.device)

    def _free(self, owner, round):
        return self.freed[owner, round].Test()

    def _send(self, piece, owner, buffer):
        self.freed[owner, piece.round] = self._empty(self.comm.Irecv, owner, 2 * piece.round + 1)
        self.told.append(self._empty(self.comm.Isend, owner, 2 * piece.round))

    def poll(self):
        super().poll()
        for piece in self.own[self.over : self.over + IN_FLIGHT]:
            copies = self.copies[piece.round]
            for source, request in self.ready[piece.round].items():
                if source not in copies and request.Test():
                    copies[source] = self._fetch(piece, source)

    def _fetch(self, piece: Piece, source: int) -> tuple:
        """(what will be a copy of the partial, the event after which it is)"""
        device, stream = self.device, self.stream
        with device.using(stream):
            here = device.empty(*piece.shape, self.dtype.name)
            start = stream.record()
            device.copy(here, self._slot(source, piece, self.me), stream)
            self.relayed.append((start, stream.record(), here.nbytes))
        return here, self.relayed[-1][1]

    def _others(self, round):
        copies = self.copies[round]
        if len(copies) < len(self.ready[round]) or not all(e.done for _c, e in copies.values()):
            return None
        return {source: copy for source, (copy, _event) in copies.items()}

    def _let_go(self, round):
        del self.copies[round]
        for other in self.ready.pop(round):
            self.told.append(self._empty(self.comm.Isend, other, 2 * round + 1))

    def _finish(self):
        for request in [*self.freed.values(), *self.told]:
            request.Wait()

    def close(self):
        super().close()
        self.slots.clear()
        self.memory.close()
