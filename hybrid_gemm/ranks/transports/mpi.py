"""Partials as MPI messages between host buffers."""

from __future__ import annotations

import numpy as np

from ...arrays.operand import Operand
from ..rank_plan import IN_FLIGHT, Piece
from .arrivals import by_rows
from .base import Transport


class MpiTransport(Transport):
    """Messages between host buffers. On a device with memory of its own a piece for another
    rank is made in host memory to begin with: its download is part of multiplying it."""

    @property
    def near(self):
        return self.device.host_memory

    def start(self):
        self.sends, self.receives = {}, {}
        super().start()
        for piece in self.own[:IN_FLIGHT]:
            self._expect(piece)

    def _expect(self, piece: Piece) -> None:
        self.receives[piece.round] = {}
        for source in range(self.comm.size):
            if source != self.me:
                buffer = np.empty(piece.shape, self.dtype)
                message, row = by_rows(buffer)
                request = self.comm.Irecv(message, source, piece.round)
                self.receives[piece.round][source] = request, buffer
                row.Free()

    def _room(self, piece, owner):
        if owner == self.me and not self.device.host_memory:
            return super()._room(piece, owner)
        return Operand.of(np.empty(piece.shape, self.dtype))

    def _free(self, owner, round):
        request, _buffer = self.sends[owner, round]
        if not request.Test():
            return False
        self.sends[owner, round] = request, None
        return True

    def _send(self, piece, owner, buffer):
        message, row = by_rows(buffer.array)
        self.sends[owner, piece.round] = (
            self.comm.Isend(message, owner, piece.round), buffer.array,
        )  # fmt: skip
        row.Free()

    def _others(self, round):
        waiting = self.receives[round]
        if not all(request.Test() for request, _buffer in waiting.values()):
            return None
        return {source: buffer for source, (_request, buffer) in waiting.items()}

    def _let_go(self, round):
        del self.receives[round]
        if round + IN_FLIGHT < len(self.own):
            self._expect(self.own[round + IN_FLIGHT])

    def _finish(self):
        for request, _buffer in self.sends.values():
            request.Wait()

    def messages(self):
        if self.arrivals or not self.device.host_memory:
            return None
        # Receives stay: a cancelled one's message may be taken by a later product's.
        receives = [pair for each in self.receives.values() for pair in each.values()]
        return [request for request, _buffer in (*receives, *self.sends.values())]
