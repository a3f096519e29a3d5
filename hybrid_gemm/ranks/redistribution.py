"""Where the parts of a matrix lie over ranks, and how they get elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..planning.partition import Box, Span, cut, cut_span
from ..planning.plan import Strip
from . import heartbeat
from .launch import together
from .own_communicator import staying_if_it_fails
from .rank_plan import RankPlan

MESSAGE_BYTES = 1 << 28  # that go to all ranks at once
# Of what goes from one rank to another, and the most of it under way from or to a rank. So little,
# that one of 100 ranks that share a slow network still comes in less than `rank_timeout`.
PIECE_BYTES, MOST_BYTES = 1 << 23, 1 << 25
LARGE_BYTES = 1 << 26  # from which on to agree takes no time beside moving it


@dataclass(frozen=True)
class Part:
    """A block of a matrix: what one rank has, or wants."""

    rows: Span
    cols: Span

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.cols)

    def __and__(self, other: Part) -> Part | None:
        rows, cols = _common(self.rows, other.rows), _common(self.cols, other.cols)
        return Part(rows, cols) if rows and cols else None

    def within(self, whole: Part) -> tuple[slice, slice]:
        """Where this part is in an array that holds `whole`."""
        return self.rows.within(whole.rows), self.cols.within(whole.cols)

    def of(self, array, inner: Part):
        """`inner` as a view of the array that holds this part."""
        return array[inner.within(self)]


NOTHING = Part(Span(0, 0), Span(0, 0))


def _common(a: Span, b: Span) -> Span | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Span(start, stop) if start < stop else None


def rows_of(rows: int, cols: int, ranks: int) -> list[Part]:
    """The usual parts: rank r has rows r * rows // ranks to (r + 1) * rows // ranks."""
    return [Part(span, Span(0, cols)) for span in cut(rows, ranks)]


def parts_of(plan: RankPlan) -> list[Part]:
    """The strip of C that each rank finishes."""
    return [part_of(plan.strip(rank), "rows", "cols") for rank in range(plan.ranks)]


def part_of(block: Box | Strip | None, rows: str, cols: str) -> Part:
    """What a box or a strip has of the matrix whose sides are called so in it."""
    return Part(getattr(block, rows), getattr(block, cols)) if block else NOTHING


def moves(have: Sequence[Part], want: Sequence[Part]) -> bool:
    """Whether a rank wants what it has not."""
    return have != want and any(y & y and x & y != y for x, y in zip(have, want, strict=True))


def move(comm, array, have: Sequence[Part], want: Sequence[Part], dtype):
    """The part `want[rank]` of a matrix whose parts `have` lie with the ranks.

    What this rank has of it already is a view and not a copy, where that is all it wants.
    Arrays on a GPU are sent through host memory. Collective; `array` may be None on a rank
    that has nothing.
    """
    rank, dtype = comm.rank, np.dtype(dtype)
    own = have[rank] & want[rank]

    def room() -> Any:
        stays = own and own == want[rank]
        return have[rank].of(array, own) if stays else np.empty(want[rank].shape, dtype)

    if have == want:
        return room()
    out = made(comm, want, dtype, room)
    holders = [r for r, part in enumerate(have) if part & part]
    if len(holders) == 1 and all(part == have[holders[0]] for part in want):
        _broadcast(comm, out, have[holders[0]], holders[0], dtype)
        return out
    if own and own != want[rank]:
        want[rank].of(out, own)[...] = _host(have[rank].of(array, own), dtype)
    _exchange(comm, array, out, have, want, dtype)
    return out


def made(comm, parts: Sequence[Part], dtype, make: Callable[[], Any]) -> Any:
    """`make()`, which makes this rank's one of the `parts` of a matrix. Where one is large, what
    this raises on one rank raises on all, so that none waits for what another has no room for."""
    largest = max(math.prod(part.shape) for part in parts) * np.dtype(dtype).itemsize
    return together(comm, make) if largest >= LARGE_BYTES else make()


def _broadcast(comm, out, whole: Part, source: int, dtype) -> None:
    """A matrix of which `source` has all, to every rank."""
    for piece in _pieces(whole, dtype, MESSAGE_BYTES) if comm.size > 1 else ():
        part = whole.of(out, piece)
        data = _host(part, dtype) if comm.rank == source else part
        with heartbeat.known(comm).during(heartbeat.WAITING):
            comm.Bcast(_bytes(data), source)


def _exchange(
    comm, array, out, have: Sequence[Part], want: Sequence[Part], dtype: np.dtype
) -> None:
    """What ranks want of each other's parts, a few pieces at a time in both directions: copies of
    those that lie with gaps take little memory, and each that has come is progress.

    All ranks take the pairs in the same order, by their distance. Of all pieces that have not come,
    the first is begun by both of its ranks, so that one always comes.
    """
    rank, size, mine = comm.rank, comm.size, want[comm.rank]
    incoming, outgoing = deque[tuple[int, Part]](), deque[tuple[int, Part]]()
    for distance in range(1, size):
        source, target = (rank - distance) % size, (rank + distance) % size
        for todo, other, part in (
            (incoming, source, have[source] & mine), (outgoing, target, have[rank] & want[target])
        ):  # fmt: skip
            if part:
                todo.extend((other, piece) for piece in _pieces(part, dtype, PIECE_BYTES))
    under_way: list[tuple] = []
    receiving = sending = 0
    with staying_if_it_fails(under_way, lambda: [request for request, *_rest in under_way]):
        while True:
            while incoming and receiving < MOST_BYTES:
                other, piece = incoming.popleft()
                place = mine.of(out, piece)
                data = place if place.flags.c_contiguous else np.empty(piece.shape, dtype)
                under_way.append((comm.Irecv(_bytes(data), other), data, place))
                receiving += data.nbytes
            while outgoing and sending < MOST_BYTES:
                other, piece = outgoing.popleft()
                data = _host(have[rank].of(array, piece), dtype)
                under_way.append((comm.Isend(_bytes(data), other), data, None))
                sending += data.nbytes
            if not under_way:
                return
            for data, place in _come(comm, under_way):
                if place is None:
                    sending -= data.nbytes
                    continue
                receiving -= data.nbytes
                if place is not data:
                    place[...] = data


def _come(comm, under_way: list[tuple]) -> list[tuple]:
    """Takes out those messages that are done, at least one: what belongs to each."""
    from mpi4py import MPI

    requests = [request for request, *_rest in under_way]
    with heartbeat.known(comm).during(heartbeat.WAITING):
        done = set(MPI.Request.Waitsome(requests) or ())
    come = [under_way[i][1:] for i in done]
    under_way[:] = [x for i, x in enumerate(under_way) if i not in done]
    return come


def _pieces(part: Part, dtype, most: int) -> list[Part]:
    """A part in rows, or in pieces of each row, of `most` bytes where elements allow."""
    height, line = part.shape[0], part.shape[1] * dtype.itemsize
    down = max(1, -(-height // max(1, most // max(1, line))))
    across = max(1, -(-line // most))
    return [
        Part(rows, cols)
        for rows in cut_span(part.rows, down)
        for cols in cut_span(part.cols, across)
    ]


def _host(view, dtype) -> np.ndarray:
    view = view.get() if hasattr(view, "get") else view
    return np.ascontiguousarray(view, dtype)


def _bytes(array: np.ndarray):
    from mpi4py import MPI

    return [array.reshape(-1).view(np.uint8), MPI.BYTE]
