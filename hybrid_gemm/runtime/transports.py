"""How partials of C get from the rank that made them to the rank that sums them.

Three ways with one interface: by MPI through host memory, by the owner copying its peers'
memory (CUDA IPC, ranks of one node), and by NCCL. In each the owner sums whole pieces in rank
order with the device's own `sum`, so that all three give the same bits. One thread of a rank
calls them all.
"""

from __future__ import annotations

import abc
from collections import defaultdict

import numpy as np

from ..devices.base import Device
from ..errors import UnavailableError, UsageError
from ..rankplan import IN_FLIGHT, Piece, RankPlan
from . import launchers
from .threads import Matrix

NAMES = ("ipc", "nccl", "mpi")
WORDS = {
    "ipc": "peer copies (CUDA IPC)",
    "nccl": "NCCL messages",
    "mpi": "MPI messages through host memory",
}


class Transport(abc.ABC):
    """The pieces of one rank's cell: `comm` has the cell's members, in the order of the sum.

    After `start` a piece is multiplied into `room`, then `done`; the parts of this rank's own
    piece of a round are there when `parts` gives them, and are let go by `summed`. Owner by
    owner a piece has the room of the one IN_FLIGHT rounds before it.
    """

    near = True  # parts of others arrive in the device's own memory

    def __init__(self, comm, plan: RankPlan, rank: int, device: Device):
        self.comm, self.device = comm, device
        self.dtype = np.dtype(plan.problem.dtype)
        self.owners = plan.members(rank)
        self.me = self.owners.index(rank)
        self.pieces = [plan.owned(owner) for owner in self.owners]
        self.own = self.pieces[self.me]

    def start(self) -> None:
        """Makes ready for one run of the plan."""
        self.mine: dict[int, Matrix] = {}  # this rank's partials of its own piece, a round
        self.over = 0  # rounds of its own that are summed
        self.sent: set[tuple[int, int]] = set()  # (owner, round) of pieces on their way
        self.relayed: list[tuple] = []  # (event before, event after, bytes) of copies that it made

    def place(self, piece: Piece) -> int:
        """The owner of a piece as a rank of the cell."""
        return self.owners.index(piece.owner)

    def room(self, piece: Piece) -> Matrix | None:
        """Where to multiply a piece, or None while earlier rounds still need the room."""
        before, owner = piece.round - IN_FLIGHT, self.place(piece)
        if owner == self.me:
            free = before < self.over
        else:  # another lane may still multiply the one before
            free = before < 0 or ((owner, before) in self.sent and self._free(owner, before))
        return self._room(piece, owner) if free else None

    @abc.abstractmethod
    def _free(self, owner: int, round: int) -> bool:
        """Whether another's piece of a round, which was sent, has left its buffer."""

    def _room(self, piece: Piece, owner: int) -> Matrix:
        return Matrix(self.device.empty(*piece.shape, self.dtype.name), self.device)

    def done(self, piece: Piece, buffer: Matrix) -> None:
        """The piece is in its buffer, and its stream idle: let it travel."""
        if piece.owner == self.owners[self.me]:
            self.mine[piece.round] = buffer
        else:
            self._send(piece, self.place(piece), buffer)
            self.sent.add((self.place(piece), piece.round))

    @abc.abstractmethod
    def _send(self, piece: Piece, owner: int, buffer: Matrix) -> None: ...

    def parts(self, round: int) -> list | None:
        """The partials of this rank's own piece of a round in rank order; None until all are
        there. Called for one round after another."""
        if round not in self.mine or (others := self._others(round)) is None:
            return None
        others[self.me] = self.mine[round].array
        return [others[i] for i in range(self.comm.size)]

    def poll(self) -> None:  # noqa: B027
        """Called again and again: does what can be done by now."""

    @abc.abstractmethod
    def _others(self, round: int) -> dict[int, object] | None:
        """The partials that the other members made, once all are here."""

    def summed(self, round: int) -> None:
        """The own piece of a round is finished, and its parts are no longer read."""
        del self.mine[round]
        self.over = round + 1
        self._let_go(round)

    @abc.abstractmethod
    def _let_go(self, round: int) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """Returns when no other rank needs anything of this one any more."""

    def close(self) -> None:  # noqa: B027
        """Gives back what the device lent."""


class MpiTransport(Transport):
    """Messages between host buffers. On a device with memory of its own a piece for another
    rank is made in host memory to begin with: its download is part of multiplying it."""

    @property
    def near(self):
        return self.device.host_memory

    def start(self):
        super().start()
        self.sends = {}
        self.receives = {}
        for piece in self.own[:IN_FLIGHT]:
            self._expect(piece)

    def _message(self, buffer: np.ndarray):
        """A matrix as MPI counts it: by rows, so that no count passes 2^31."""
        from mpi4py import MPI

        row = MPI.BYTE.Create_contiguous(buffer.shape[1] * self.dtype.itemsize).Commit()
        return [buffer, buffer.shape[0], row], row

    def _expect(self, piece: Piece) -> None:
        self.receives[piece.round] = {}
        for source in range(self.comm.size):
            if source != self.me:
                buffer = np.empty(piece.shape, self.dtype)
                message, row = self._message(buffer)
                request = self.comm.Irecv(message, source, piece.round)
                self.receives[piece.round][source] = request, buffer
                row.Free()

    def _room(self, piece, owner):
        if owner == self.me and not self.device.host_memory:
            return super()._room(piece, owner)
        return Matrix(np.empty(piece.shape, self.dtype))

    def _free(self, owner, round):
        request, _buffer = self.sends[owner, round]
        if not request.Test():
            return False
        self.sends[owner, round] = request, None
        return True

    def _send(self, piece, owner, buffer):
        message, row = self._message(buffer.array)
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

    def finish(self):
        for request, _buffer in self.sends.values():
            request.Wait()


class IpcTransport(Transport):
    """Pieces stay where they were made, in memory that the ranks of a node opened to each
    other, and the owner copies each from there as soon as it is ready: the copy engines do that
    while the multiprocessors multiply. Empty messages say what is ready, and free."""

    def __init__(self, comm, plan, rank, device):
        super().__init__(comm, plan, rank, device)
        cp, self.stream = device.cp, device.stream()
        # One slot for each owner, as large as its first piece, IN_FLIGHT times.
        sizes = [
            max((p.shape[0] * p.shape[1] for p in owned), default=0) * self.dtype.itemsize
            for owned in self.pieces
        ]
        sizes = [-(-size // 512) * 512 for size in sizes]
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.stride = sum(sizes)
        with cp.cuda.Device(device.ordinal):
            handle = refused = None
            try:
                # Not from a pool: a handle opens a whole allocation.
                self.memory = cp.cuda.Memory(max(1, self.stride * IN_FLIGHT))
                handle = cp.cuda.runtime.ipcGetMemHandle(self.memory.ptr)
            except RuntimeError as error:
                refused = error
            self.opened, self.bases = [], []
            handles = comm.allgather(handle)
            if None in handles:
                raise refused or RuntimeError("another rank's memory has no handle")
            for member, theirs in enumerate(handles):
                pointer = self.memory.ptr
                if member != self.me:
                    pointer = cp.cuda.runtime.ipcOpenMemHandle(theirs)
                    self.opened.append(pointer)
                self.bases.append(pointer)

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
        """A piece where `member` makes it."""
        cp = self.device.cp
        offset = self.offsets[owner] + piece.round % IN_FLIGHT * self.stride
        size = piece.shape[0] * piece.shape[1] * self.dtype.itemsize
        memory = cp.cuda.UnownedMemory(
            self.bases[member] + offset, size, self, self.device.ordinal
        )  # fmt: skip
        return cp.ndarray(piece.shape, self.dtype, cp.cuda.MemoryPointer(memory, 0))

    def _room(self, piece, owner):
        return Matrix(self._slot(self.me, piece, owner), self.device)

    def _free(self, owner, round):
        return self.freed[owner, round].Test()

    def _send(self, piece, owner, buffer):
        self.freed[owner, piece.round] = self._empty(self.comm.Irecv, owner, 2 * piece.round + 1)
        self.told.append(self._empty(self.comm.Isend, owner, 2 * piece.round))

    def poll(self):
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

    def finish(self):
        for request in [*self.freed.values(), *self.told]:
            request.Wait()

    def close(self):
        cp = self.device.cp
        with cp.cuda.Device(self.device.ordinal):
            for pointer in self.opened:
                cp.cuda.runtime.ipcCloseMemHandle(pointer)
            self.comm.Barrier()  # nobody frees what another still has open
            self.memory = None


class NcclTransport(Transport):
    """A round's pieces are exchanged in one group of NCCL sends and receives, which is
    started when this rank has multiplied all of its own, one round after another on all ranks
    (NCCL matches groups by their order)."""

    def __init__(self, comm, plan, rank, device):
        super().__init__(comm, plan, rank, device)
        from cupy.cuda import nccl

        self.library = nccl
        with device.cp.cuda.Device(device.ordinal):
            unique = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
            self.nccl = nccl.NcclCommunicator(comm.size, unique, comm.rank)
        self.stream = device.stream()

    def start(self):
        super().start()
        self.outgoing = defaultdict(dict)
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

    def finish(self):
        self.stream.synchronize()
        self.outgoing.clear()
        self.incoming.clear()

    def close(self):
        self.nccl.destroy()


KINDS = {"ipc": IpcTransport, "nccl": NcclTransport, "mpi": MpiTransport}


# --- which one ----------------------------------------------------------------------------


def open_transport(asked: str, comm, cells, node: int, cell, plan: RankPlan, device: Device):
    """(the transport, its name, why those before it were not taken) for these cells of ranks.

    `node` names this rank's node, `cell` is the communicator of its cell; a rank that sums
    nothing gets None for a transport. Collective: all ranks get the same name, and raise
    alike: `UnavailableError` for one that cannot work here.
    """
    candidates = names(asked, device.kind)
    facts = [()] * comm.size
    if candidates != ["mpi"]:
        facts = comm.allgather((node, *_gpu_facts(device)))
    checks = {"ipc": _no_ipc, "nccl": _no_nccl, "mpi": lambda facts, cells: None}
    reasons = {}
    for name in candidates:
        transport, reason = None, checks[name](facts, cells)
        if not reason:
            try:
                if plan.summed(comm.rank):
                    transport = KINDS[name](cell, plan, comm.rank, device)
            except (RuntimeError, MemoryError) as error:  # the driver, NCCL
                reason = " ".join(str(error).split())
            reason = next(filter(None, comm.allgather(reason)), None)
        if not reason:
            return transport, name, "; ".join(f"no {x.upper()}: {y}" for x, y in reasons.items())
        reasons[name] = reason
    raise launchers.agreed(
        UnavailableError(f"transport {asked} was asked for: {reasons[asked]}")
    )  # fmt: skip


def names(asked: str, kind: str) -> list[str]:
    """What to try between devices of a kind, in this order."""
    if asked not in (*NAMES, "auto"):
        raise UsageError(f"no transport is called {asked!r}; there are auto, {', '.join(NAMES)}")
    if kind != "cuda" and asked in ("ipc", "nccl"):
        raise UnavailableError(
            f"transport {asked} is between GPUs, and the device is {kind}; "
            "--transport mpi works here"
        )
    if kind != "cuda":
        return ["mpi"]
    return list(NAMES) if asked == "auto" else [asked]


def _gpu_facts(device):
    """This rank's GPU, the GPUs whose memory it can read, and why there is no NCCL, if so."""
    runtime = device.cp.cuda.runtime

    def bus(ordinal: int) -> str:
        return runtime.deviceGetPCIBusId(ordinal)

    reachable = {
        bus(other)
        for other in range(runtime.getDeviceCount())
        if other == device.ordinal or runtime.deviceCanAccessPeer(device.ordinal, other)
    }
    nccl = None
    try:
        from cupy.cuda import nccl as library

        library.get_version()
    except Exception as error:  # no module, or no library that it can load
        nccl = f"CuPy finds no NCCL (pip install nvidia-nccl-cu13, or -cu12): {error}"
    return bus(device.ordinal), reachable, nccl


def _no_ipc(facts, cells) -> str | None:
    for cell in cells:
        for mine in cell:
            node, _gpu, reachable, _nccl = facts[mine]
            for other in cell:
                if facts[other][0] != node:
                    return f"rank {mine} and rank {other} are on different nodes"
                if facts[other][1] not in reachable:
                    return (
                        f"rank {mine} cannot see the GPU of rank {other} "
                        "(bound away, as by --gpus-per-task, or not linked)"
                    )
    return None


def _no_nccl(facts, cells) -> str | None:
    if reason := next((nccl for *_rest, nccl in facts if nccl), None):
        return reason
    for cell in cells:
        gpus = [facts[rank][:2] for rank in cell]
        if len(set(gpus)) < len(gpus):
            return "ranks share a GPU"
    return None
