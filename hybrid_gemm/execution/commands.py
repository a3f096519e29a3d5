"""What a run has its devices do, as plain commands in the order in which it starts them.

Python carries each out as it comes (`Commands`), or notes them alone: `native_executor` carries out
the list then, for this run and those that come after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..devices.base import Array, Event, Stream


@dataclass(frozen=True, slots=True)
class Record:
    """Marks by an event where a stream is now."""

    worker: int
    stream: Stream
    event: Event


@dataclass(frozen=True, slots=True)
class Wait:
    """Lets later work of a stream start only after an event."""

    worker: int
    stream: Stream
    event: Event


@dataclass(frozen=True, slots=True)
class Copy:
    """dst[...] = src by a stream; what of them is the host's is page-locked."""

    worker: int
    stream: Stream
    dst: Array
    src: Array


@dataclass(frozen=True, slots=True)
class Start:
    """A product, a sum, or the splitting of operands; `flops` are the product's."""

    worker: int
    stream: Stream
    call: Callable[[Stream], None]
    flops: int = 0


@dataclass(frozen=True, slots=True)
class HandOver:
    """dst[...] = src by the threads of `native_copier`, through the slots of one of its rings,
    whose stream it is. The copy begins after an event (None: at once), and records `start` and
    `stop`."""

    worker: int
    stream: Stream
    ring: Any
    dst: Array
    src: Array
    after: Event | None
    start: Event
    stop: Event


Command = Record | Wait | Copy | Start | HandOver


class Unfit(Exception):
    """What is noted cannot be a list of commands; says why."""


class Commands:
    """Python's executor: carries out each command as it is given. Where `noted` is a list, they are
    put there instead, and their events stand for those of runs."""

    def __init__(self) -> None:
        self.noted: list[Command] | None = None

    def record(self, worker: int, stream: Stream) -> Event:
        """A new event."""
        event = self.event(stream)
        self.note(Record(worker, stream, event))
        return event

    def event(self, stream: Stream) -> Event:
        """An event, recorded now; or what stands for it."""
        return stream.record() if self.noted is None else object()

    def wait(self, worker: int, stream: Stream, event: Event) -> None:
        """See `Wait`."""
        if self.noted is None:
            stream.wait(event)
        self.note(Wait(worker, stream, event))

    def copy(
        self, worker: int, dst: Array, src: Array, stream: Stream, call: Callable[[Stream], None]
    ) -> None:
        """See `Copy`; `call` is the copy, worked out."""
        if self.noted is None:
            call(stream)
        self.note(Copy(worker, stream, dst, src))

    def start(
        self, worker: int, stream: Stream, call: Callable[[Stream], None], flops: int = 0
    ) -> None:
        """See `Start`."""
        if self.noted is None:
            call(stream)
        self.note(Start(worker, stream, call, flops))

    def note(self, command: Command) -> None:
        """Has in the list what somebody else carries out."""
        if self.noted is not None:
            self.noted.append(command)

    def refuse(self, why: str) -> None:
        """Says that something is to be done which is no command. Raises `Unfit` where commands are
        noted."""
        if self.noted is not None:
            raise Unfit(why)
