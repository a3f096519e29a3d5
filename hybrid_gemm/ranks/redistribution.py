"""Where the parts of a matrix lie over ranks, and how they get elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..planning.partition import Box, Span, cut, cut_span
from ..planning.plan import Strip
from .rank_plan import RankPlan

MESSAGE_BYTES = 1 << 28


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

    def of(self, array, inner: Part):
        """`inner` as a view of the array that holds this part."""
        return array[inner.rows.within(self.rows), inner.cols.within(self.cols)]


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
    if have == want and own:
        return have[rank].of(array, own)
    holders = [r for r, part in enumerate(have) if part & part]
    if len(holders) == 1 and all(part == have[holders[0]] for part in want):
        return _broadcast(comm, array, have[holders[0]], holders[0], dtype)
    incoming = [(r, have[r] & want[rank]) for r in range(comm.size) if r != rank]
    outgoing = [(r, have[rank] & want[r]) for r in range(comm.size) if r != rank]
    incoming, outgoing = ([(r, p) for r, p in x if p] for x in (incoming, outgoing))
    out = have[rank].of(array, own) if own == want[rank] else np.empty(want[rank].shape, dtype)
    wanted = [(r, p) for r, part in incoming for p in _pieces(part, dtype)]
    in_place = {r for r, part in incoming if part.cols == want[rank].cols}  # whole rows of `out`
    requests = [comm.Irecv(_bytes(want[rank].of(out, p)), r) for r, p in wanted if r in in_place]
    kept = []
    for other, part in outgoing:
        for piece in _pieces(part, dtype):
            data = _host(have[rank].of(array, piece), dtype)
            kept.append(data)
            requests.append(comm.Isend(_bytes(data), other))
    if own and own != want[rank]:
        want[rank].of(out, own)[...] = _host(have[rank].of(array, own), dtype)
    for other, piece in wanted:
        if other not in in_place:
            data = np.empty(piece.shape, dtype)
            comm.Recv(_bytes(data), other)
            want[rank].of(out, piece)[...] = data
    for request in requests:
        request.Wait()
    return out


def _broadcast(comm, array, whole: Part, source: int, dtype):
    """A matrix of which `source` has all, on every rank: there it is a view."""
    here = comm.rank == source
    out = whole.of(array, whole) if here else np.empty(whole.shape, dtype)
    for piece in _pieces(whole, dtype) if comm.size > 1 else ():
        part = whole.of(out, piece)
        comm.Bcast(_bytes(_host(part, dtype) if here else part), source)
    return out


def _pieces(part: Part, dtype) -> list[Part]:
    """A part in rows, or in pieces of each row, whose messages are not too long."""
    height, line = part.shape[0], part.shape[1] * dtype.itemsize
    down = min(height, max(1, -(-height * line // MESSAGE_BYTES)))
    across = max(1, -(-line // MESSAGE_BYTES))
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
