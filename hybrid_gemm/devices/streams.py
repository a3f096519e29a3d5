"""Streams and events: in which order a device works, and what waits for what."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
Event = Any  # a `HostEvent`, or CuPy's: it has `synchronize()`


class Stream(abc.ABC):
    """An ordered queue of work on one device. An event marks a point in it."""

    pointer = 0  # as a driver knows it; 0 where there is none

    def __init__(self) -> None:
        # (workspace, flags) of kernels whose blocks work together, kept from launch to launch.
        self.scratch: list[tuple[Any, Any]] = []
        # Of memory that stays with it, where threads share it: held while a product is started.
        self.lock = threading.RLock()

    def start(self, launches: Callable[[], T]) -> T:
        """Has this thread start a product's launches one by one: no other thread starts any here.
        No context manager, since Ctrl-C can come between its `__enter__` and what it is around."""
        with self.lock:
            return launches()

    @abc.abstractmethod
    def record(self, event: Event = None) -> Event:
        """Marks where the queue is now: by a new event, or again by one of this stream's."""

    def mark(self, *, timed: bool = True) -> Event:
        """As `record`, by a new event that no thread will wait for. One that is not `timed` has no
        time."""
        return self.record()

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Lets later work of this stream start only after `event`."""

    def passed(self, event: Event) -> bool:
        """Whether the work before an event is done."""
        return True

    def capturing(self) -> bool:
        """Whether a graph records what is queued, so that nothing can be waited for."""
        return False

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Blocks the calling thread until all work of this stream is done."""


MOST_SPARE_BYTES = 64 << 20


def grown(wanted: int, kept: Iterable[Any]) -> int:
    """How many elements a new buffer beside these smaller ones should have, if `wanted` are needed.

    Half as many again as the largest, so that ever larger products leave a few buffers, of three
    times the largest in all, and not one each.
    """
    largest = max(kept, key=lambda buffer: buffer.size, default=None)
    if largest is None:
        return wanted
    spare = min(largest.size // 2, MOST_SPARE_BYTES // largest.dtype.itemsize)
    return int(max(wanted, largest.size + spare))


class HostEvent:
    """A moment on the host's clock: what came before it is done. `seconds` are of
    `time.perf_counter`."""

    done = True  # as CuPy's event says whether it is

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Returns at once."""


class HostStream(Stream):
    """The stream of a device whose calls return when their work is done."""

    def record(self, event: Event = None) -> HostEvent:
        return HostEvent()

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass
