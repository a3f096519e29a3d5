"""Whether partials arrive between ranks as they were made, where products are checked."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ...devices.base import Array
from ...errors import VerificationError
from ...execution.checked_device import CheckedDevice
from ...execution.checks import Checks, Fault
from ..rank_plan import Piece

POLL_S = 5e-5
RIGHT, AGAIN = 0, 1  # what an owner answers
SUMS, ANSWER, DATA = range(3)  # messages of a round


def by_rows(matrix: np.ndarray) -> tuple[list, Any]:
    """A matrix as MPI counts it: by rows of elements, so that no count passes 2^31; and the type of
    a row, which the caller frees."""
    from mpi4py import MPI

    element = MPI.BYTE.Create_contiguous(matrix.itemsize)
    row = element.Create_contiguous(matrix.shape[1]).Commit()
    element.Free()
    return [matrix, matrix.shape[0], row], row


class Arrivals:
    """Partials' checksums: the exact sums of each row's words, made where the partial was made
    and again where it arrived.

    The sums travel beside the partial, as MPI messages. A partial that differs is asked for again
    and then comes by MPI through host memory; one that differs again is a `VerificationError` that
    names both ranks. The rank that made it keeps it until the owner has answered. `ranks` are the
    cell's members as the job numbers them; other arguments name members as the cell does.
    """

    def __init__(self, comm: Any, ranks: list[int], device: CheckedDevice) -> None:
        self.comm, self.ranks, self.device = comm.Dup(), ranks, device
        self.stream = device.stream()

    def start(self) -> None:
        """Makes ready for one run of the plan."""
        self.kept: dict[tuple[int, int], tuple[Array, np.ndarray, Any]] = {}  # until it is answered
        self.expected: dict[tuple[int, int], tuple[np.ndarray, Any]] = {}  # sums on their way
        self.again: dict[tuple[int, int], tuple[np.ndarray, Any]] = {}  # data that was asked for
        self.right: dict[tuple[int, int], Array] = {}  # what arrived as it was made
        self.sending: list[tuple[Any, Any]] = []  # requests, with what they read

    def made(self, piece: Piece, owner: int, partial: Array) -> None:
        """This rank's partial is about to travel."""
        sums = self._sums(partial)
        self._send(sums, owner, piece.round, SUMS)
        self.kept[owner, piece.round] = (partial, *self._answer_from(owner, piece.round))

    def wanted(self, owner: int, round: int) -> bool:
        """Whether a partial may be asked for again."""
        return (owner, round) in self.kept

    def check(self, piece: Piece, others: dict[int, Array]) -> bool:
        """Whether all these partials are right; one that came again takes its place there."""
        for source, partial in others.items():
            others[source] = self._checked(piece, source, partial)
        return all(x is not None for x in others.values())

    def over(self, round: int) -> None:
        """The partials of a round are no longer read."""
        for known in [x for x in self.right if x[1] == round]:
            del self.right[known]

    def poll(self) -> None:
        """Answers those who ask for a partial again."""
        for key, (partial, answer, request) in list(self.kept.items()):
            if not request.Test():
                continue
            if answer[0] == RIGHT:
                del self.kept[key]
            else:
                self._send(self._on_host(partial), *key, DATA)
                self.kept[key] = (partial, *self._answer_from(*key))
        self.sending = [x for x in self.sending if not x[0].Test()]

    def finish(self) -> None:
        """Returns when all that this rank made has arrived, and all answers are sent."""
        while self.kept or self.sending:
            self.poll()
            time.sleep(POLL_S)

    def close(self) -> None:
        self.comm.Free()

    def _checked(self, piece: Piece, source: int, partial: Array) -> Array | None:
        """The partial, once it is known to be right. Raises where it is wrong again."""
        key = source, piece.round
        if key in self.right:
            return self.right[key]
        if key not in self.expected:
            sums = np.empty(piece.shape[0], np.uint64)
            self.expected[key] = sums, self.comm.Irecv(sums, source, 3 * piece.round + SUMS)
        sums, request = self.expected[key]
        came_again = key in self.again
        if came_again and not self.again[key][1].Test():
            return None
        if not request.Test():
            return None
        if came_again:
            partial = self._there(self.again.pop(key)[0], partial)
        wrong = np.flatnonzero(self._sums(partial) != sums)
        if not len(wrong):
            self._answer(key, RIGHT)
            del self.expected[key]
            self.device.count(Checks(copies=1, repeated=int(came_again)))
            self.right[key] = partial
            return partial
        fault = self._fault(source, piece, wrong)
        self.device.count(Checks(faults=(fault,)))
        if came_again:
            raise VerificationError(f"{fault}, again when it was sent again")
        room = np.empty(piece.shape, partial.dtype)
        self._answer(key, AGAIN)
        message, row = by_rows(room)
        self.again[key] = room, self.comm.Irecv(message, source, 3 * piece.round + DATA)
        row.Free()
        return None

    def _fault(self, source: int, piece: Piece, wrong: np.ndarray) -> Fault:
        way = f"its way from rank {self.ranks[source]} to rank {self.ranks[self.comm.rank]}"
        rows = int(wrong[0]), int(wrong[-1]) + 1
        return Fault(way, "partial", rows, (0, piece.shape[1]), 0.0, 0.0)

    def _send(self, array: np.ndarray, member: int, round: int, what: int) -> None:
        matrix = array.reshape(len(array), -1)
        message, row = by_rows(matrix)
        self.sending.append((self.comm.Isend(message, member, 3 * round + what), matrix))
        row.Free()

    def _answer(self, key: tuple[int, int], answer: int) -> None:
        self._send(np.array([answer], np.uint8), *key, ANSWER)

    def _answer_from(self, owner: int, round: int) -> tuple[np.ndarray, Any]:
        answer = np.empty(1, np.uint8)
        return answer, self.comm.Irecv(answer, owner, 3 * round + ANSWER)

    def _sums(self, partial: Array) -> np.ndarray:
        """Partials are whole row-major matrices of 4 or 8 bytes an element, on both sides."""
        with self.device.using(self.stream):
            return self.device.line_sums(partial.view("u4"), self.stream)

    def _on_host(self, partial: Array) -> np.ndarray:
        if isinstance(partial, np.ndarray):
            return partial
        host = np.empty(partial.shape, partial.dtype)
        with self.device.using(self.stream):
            self.device.copy(host, partial, self.stream)
        return host

    def _there(self, host: np.ndarray, partial: Array) -> Array:
        """In the memory that the partial is in."""
        if isinstance(partial, np.ndarray):
            return host
        with self.device.using(self.stream):
            made = self.device.empty_like(partial, host.dtype.name)
            self.device.copy(made, host, self.stream)
        return made
