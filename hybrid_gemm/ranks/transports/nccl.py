"""Partials as NCCL messages between GPUs."""

from __future__ import annotations

from collections import defaultdict

from .base import Transport


class NcclTransport(Transport):
    """A round's pieces are exchanged in one group of NCCL sends and receives, which is
    started when this rank has multiplied all of its own, one round after another on all ranks
    (NCCL matches groups by their order)."""

    def __init__(self, comm, plan, rank, device):
        super().__init__(comm, plan, rank, device)
        from cupy.cuda import nccl

        self.library = nccl
        with device.unwrapped.cp.cuda.Device(device.ordinal):
            unique = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
            self.nccl = nccl.NcclCommunicator(comm.size, unique, comm.rank)
        self.stream = device.stream()

    def start(self):
        super().start()
        self.outgoing: dict[int, dict] = defaultdict(dict)
        self.incoming, self.events = {}, {}
        self.next = 0  # the round to be exchanged

    def _due(self, round: int) -> list[int]:
        return [i for i, owned in enumerate(self.pieces) if i != self.me and round < len(owned)]

    def _free(self, owner, round):
        return self._arrived(round)

    def _arrived(self, round: int) -> bool:
        if round not in self.events or not self.events[round].done:
            return False
        self.outgoing.pop(round, None)
        return True

    def _send(self, piece, owner, buffer):
        self.outgoing[piece.round][owner] = buffer

    def done(self, piece, buffer):
        super().done(piece, buffer)
        while self._complete(self.next):
            self._exchange(self.next)
            self.next += 1

    def _complete(self, round: int) -> bool:
        due, mine = self._due(round), round < len(self.own)
        there = len(self.outgoing[round]) == len(due) and (not mine or round in self.mine)
        return there and (mine or bool(due))

    def _exchange(self, round: int) -> None:
        char, pointer = self.library.NCCL_CHAR, self.stream.cupy.ptr
        with self.device.using(self.stream):
            buffers = {}
            if round < len(self.own):
                shape = self.own[round].shape
                buffers = {
                    source: self.device.empty(*shape, self.dtype.name)
                    for source in range(self.comm.size)
                    if source != self.me
                }
            self.library.groupStart()
            for owner, buffer in self.outgoing[round].items():
                array = buffer.array
                self.nccl.send(array.data.ptr, array.nbytes, char, owner, pointer)
            for source, array in buffers.items():
                self.nccl.recv(array.data.ptr, array.nbytes, char, source, pointer)
            self.library.groupEnd()
            self.incoming[round] = buffers
            self.events[round] = self.stream.record()

    def _others(self, round):
        return dict(self.incoming[round]) if self._arrived(round) else None

    def _let_go(self, round):
        del self.incoming[round]

    def _finish(self):
        self.stream.synchronize()
        self.outgoing.clear()
        self.incoming.clear()

    def close(self):
        super().close()
        self.nccl.destroy()
