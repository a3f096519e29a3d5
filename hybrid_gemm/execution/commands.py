"""What a streamed program consists of: plain commands, in one order, each on a lane of a worker.

A command names arrays by slot and part (`Ref`), events by number, and streams by worker and use. So
a program is written without touching a device, and played with any arrays that lie alike.
`writer.py` writes programs; `player.py` plays them by Python's threads, `native_executor.py` by
native ones. A command waits only for events that commands before it record: so whoever plays its
lane, the first command that is not done can always go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..devices.base import Array
from ..planning.partition import Span

INCOMPLETE = "out is incomplete: it was being written when this error came"  # a note of errors

A, B, C, OUT = range(4)  # slots of the caller's matrices; a program's own memory has those behind
FEED, MULTIPLY, FINISH = "feed", "multiply", "finish"  # a worker's lanes


class Ref(NamedTuple):
    """Some rows and columns of the matrix in a slot."""

    slot: int
    rows: Span
    cols: Span

    def of(self, slots: Sequence[Any]) -> Array:
        """The view."""
        return slots[self.slot][self.rows.slice, self.cols.slice]

    def part(self, rows: Span) -> Ref:
        """Some of these rows, counted from the first of them."""
        return Ref(self.slot, rows + self.rows.start, self.cols)

    @property
    def elements(self) -> int:
        return self.rows.by(self.cols)


class SplitRef(NamedTuple):
    """A `SplitView`: the numbers, the slot of the `SplitBlock`, and which of its rows and parts."""

    numbers: Ref
    slot: int
    rows: Span
    parts: slice

    def of(self, slots: Sequence[Any]) -> Any:
        return slots[self.slot].view(self.numbers.of(slots), self.rows.slice, self.parts)

    def part(self, rows: Span) -> SplitRef:
        """As `Ref.part`, with all parts."""
        return SplitRef(
            self.numbers.part(rows), self.slot, rows + self.rows.start, self.parts
        )  # fmt: skip


class Stream(NamedTuple):
    """One of a worker's streams."""

    worker: int
    use: str  # copy, sum, or multiply and a number


@dataclass(frozen=True, slots=True)
class Command:
    """What each has: whose it is, and on which of its lanes."""

    worker: int
    lane: str


@dataclass(frozen=True, slots=True)
class Record(Command):
    """Marks by an event where a stream is now."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Wait(Command):
    """Lets later work of a stream start only after an event."""

    stream: Stream
    event: int


@dataclass(frozen=True, slots=True)
class Copy(Command):
    """dst[...] = src by a stream, of one dtype and order, between devices."""

    stream: Stream
    dst: Ref
    src: Ref


@dataclass(frozen=True, slots=True)
class Move(Command):
    """dst[...] = src between the host and a device, cast where it has to be: through the device's
    link, after some events, between events `start` and `stop`. What comes back is final."""

    dst: Ref
    src: Ref
    up: bool
    after: tuple[int, ...]
    start: int
    stop: int
    shared: tuple[Any, int] | None = None  # a block of `SharedBlocks`, and which part


@dataclass(frozen=True, slots=True)
class Multiply(Command):
    """c = alpha a b + beta c; whether c is final, and a part of OUT."""

    stream: Stream
    a: Ref | SplitRef
    b: Ref | SplitRef
    c: Ref
    alpha: Any
    beta: Any
    flops: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Sum(Command):
    """out = alpha (the partials, in this order) + beta out."""

    stream: Stream
    partials: tuple[Ref, ...]
    out: Ref
    alpha: Any
    beta: Any


@dataclass(frozen=True, slots=True)
class Split(Command):
    """Splits a part of A or B (`operand`), which is there, on a stream."""

    stream: Stream
    operand: str
    layouts: str
    part: SplitRef
    event: int  # after it
    shared: tuple[Any, int] | None = None


@dataclass(frozen=True, slots=True)
class Call(Command):
    """What only Python does, between events `start` and `stop`: `call(device, stream, *arrays)`;
    `why` says what it is."""

    stream: Stream
    call: Callable[..., None]
    args: tuple[Ref, ...]
    why: str
    start: int
    stop: int
    writes_out: bool = False  # into its first argument
    shared: tuple[Any, int] | None = None


@dataclass(frozen=True, slots=True)
class Collective(Command):
    """NCCL adds the partials of a panel, each strip's into its owner's, after some events, one a
    worker; `done` are events on the same workers' GPUs."""

    workers: tuple[int, ...]
    strips: tuple[tuple[int, tuple[Ref, ...]], ...]  # the owner's place, and all partials
    after: tuple[int, ...]
    done: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gate(Command):
    """All lanes meet here when these events are over, and all that they have started: then the
    clock starts, or stops."""

    starts: bool
    after: tuple[int, ...] = ()


class Mark(NamedTuple):
    """What a timeline shows of a worker: a phase between two events."""

    worker: int
    phase: str
    start: int
    stop: int
    bytes: int = 0
    flops: int = 0
