"""What every way of moving partials has: rooms to multiply into, parts to sum."""

from __future__ import annotations

import abc

import numpy as np

from ...arrays.operand import Operand
from ...devices.base import Device
from ...execution.checked_device import CheckedDevice
from ..rank_plan import IN_FLIGHT, Piece, RankPlan
from .arrivals import Arrivals


class Transport(abc.ABC):
    """The pieces of one rank's cell: `comm` has the cell's members, in the order of the sum.

    After `start` a piece is multiplied into `room`, then `done`; the parts of this rank's own
    piece of a round are there when `parts` gives them, and are let go by `summed`. Owner by
    owner a piece has the room of the one IN_FLIGHT rounds before it. On a checked device, `parts`
    gives what was checked on its way (`arrivals`).
    """

    @property
    def near(self) -> bool:
        """Whether parts of others arrive in the device's own memory."""
        return True

    def __init__(self, comm, plan: RankPlan, rank: int, device: Device):
        self.comm, self.device = comm, device
        self.dtype = np.dtype(plan.problem.dtype)
        self.owners = plan.members(rank)
        self.me = self.owners.index(rank)
        self.pieces = [plan.owned(owner) for owner in self.owners]
        self.own = self.pieces[self.me]
        self.arrivals: Arrivals | None = None
        if isinstance(device, CheckedDevice):
            self.arrivals = Arrivals(comm, self.owners, device)

    def start(self) -> None:
        """Makes ready for one run of the plan."""
        if self.arrivals:
            self.arrivals.start()
        self.mine: dict[int, Operand] = {}  # this rank's partials of its own piece, a round
        self.over = 0  # rounds of its own that are summed
        self.sent: set[tuple[int, int]] = set()  # (owner, round) of pieces on their way
        self.relayed: list[tuple] = []  # (event before, event after, bytes) of copies that it made

    def place(self, piece: Piece) -> int:
        """The owner of a piece as a rank of the cell."""
        return self.owners.index(piece.owner)

    def room(self, piece: Piece) -> Operand | None:
        """Where to multiply a piece, or None while earlier rounds still need the room."""
        before, owner = piece.round - IN_FLIGHT, self.place(piece)
        if owner == self.me:
            free = before < self.over
        else:  # another lane may still multiply the one before
            free = before < 0 or ((owner, before) in self.sent and self._left(owner, before))
        return self._room(piece, owner) if free else None

    def _left(self, owner: int, round: int) -> bool:
        asked = self.arrivals is not None and self.arrivals.wanted(owner, round)
        return self._free(owner, round) and not asked

    @abc.abstractmethod
    def _free(self, owner: int, round: int) -> bool:
        """Whether another's piece of a round, which was sent, has left its buffer."""

    def _room(self, piece: Piece, owner: int) -> Operand:
        return Operand.of(self.device.empty(*piece.shape, self.dtype.name), self.device)

    def done(self, piece: Piece, buffer: Operand) -> None:
        """The piece is in its buffer, and its stream idle: let it travel."""
        if piece.owner == self.owners[self.me]:
            self.mine[piece.round] = buffer
        else:
            if self.arrivals:
                self.arrivals.made(piece, self.place(piece), buffer.array)
            self._send(piece, self.place(piece), buffer)
            self.sent.add((self.place(piece), piece.round))

    @abc.abstractmethod
    def _send(self, piece: Piece, owner: int, buffer: Operand) -> None: ...

    def parts(self, round: int) -> list | None:
        """The partials of this rank's own piece of a round in rank order; None until all are
        there. Called for one round after another."""
        if round not in self.mine or (others := self._others(round)) is None:
            return None
        if self.arrivals and not self.arrivals.check(self.own[round], others):
            return None
        others[self.me] = self.mine[round].array
        return [others[i] for i in range(self.comm.size)]

    def poll(self) -> None:
        """Called again and again: does what can be done by now."""
        if self.arrivals:
            self.arrivals.poll()

    @abc.abstractmethod
    def _others(self, round: int) -> dict[int, object] | None:
        """The partials that the other members made, once all are here."""

    def summed(self, round: int) -> None:
        """The own piece of a round is finished, and its parts are no longer read."""
        del self.mine[round]
        self.over = round + 1
        if self.arrivals:
            self.arrivals.over(round)
        self._let_go(round)

    @abc.abstractmethod
    def _let_go(self, round: int) -> None: ...

    def finish(self) -> None:
        """Returns when no other rank needs anything of this one any more."""
        if self.arrivals:
            self.arrivals.finish()
        self._finish()

    @abc.abstractmethod
    def _finish(self) -> None: ...

    def messages(self) -> list | None:
        """MPI's messages that may still read or write buffers; None where something else may, such
        as a GPU."""
        return None

    def close(self) -> None:
        """Gives back what the device and MPI lent."""
        if self.arrivals:
            self.arrivals.close()
