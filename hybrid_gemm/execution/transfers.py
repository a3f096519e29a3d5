"""Copies that a run waits for: each in pieces, each piece ended once, whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

_WAITING, _RUNNING, _ENDED = range(3)


class Stopped(Exception):
    """Another part of a run failed; its error is the one to report. Values that come later hold the
    class: one that was raised holds the frames it came through, and they hold the run."""


class Later:
    """A value, or an error, that some thread settles and any thread may wait for. A run makes
    hundreds: a `concurrent.futures.Future` has locks of its own, which take ten times as long to
    make. It needs no lock, since what is asked of lists here Python does at once."""

    __slots__ = ("_done", "_error", "_unsettled", "_value", "_waiting")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | type[Stopped] | None = None
        self._unsettled = [None]  # nothing, once a thread has begun to settle it
        self._waiting: list[threading.Event] = []

    @property
    def settled(self) -> bool:
        """Whether there is a value, and no error."""
        return self._done and self._error is None

    def result(self) -> Any:
        """The value, once there is one. Raises the error instead."""
        if not self._done:
            mine = threading.Event()
            self._waiting.append(mine)
            if not self._done:  # else nobody may look at who waits any more
                mine.wait()
        if self._error is not None:
            raise self._error
        return self._value

    def settle(self, value: Any = None, error: BaseException | type[Stopped] | None = None) -> None:
        """The first call counts: another thread may have settled it where a run stops."""
        try:
            self._unsettled.pop()
        except IndexError:
            return
        self._value, self._error = value, error
        self._done = True
        for each in self._waiting:
            each.set()


class Piece:
    """One part of a copy, by one thread of Python's or by the native ones."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.state = _WAITING
        self.thread: int | None = None  # that copies it; None is a native one
        self.accepted = ctypes.c_int()  # set by the native threads that took it

    def begin(self, *, native: bool = False) -> None:
        """Raises `Stopped` where the run has stopped meanwhile."""
        with self.transfer.lock:
            if self.state != _WAITING or self.transfer.stopped.value:
                raise Stopped
            self.thread = None if native else threading.get_ident()
            self.state = _RUNNING

    def end(self, stream: Any = None, error: BaseException | type[Stopped] | None = None) -> None:
        """It is on its way in the stream, or failed. The first call counts."""
        transfer = self.transfer
        with transfer.lock:
            if self.state == _ENDED:
                return
            self.state = _ENDED
            last = all(piece.state == _ENDED for piece in transfer.pieces)
        if error is not None:
            transfer.done.settle(error=error)
        if last:
            transfer.finish(stream)

    @contextlib.contextmanager
    def copying(self, stream: Any) -> Iterator[None]:
        """Around the copy: the piece ends with it, with its error if it has one."""
        try:
            self.begin()
            yield
            self.end(stream)
        except BaseException as error:
            self.end(error=error)
            raise

    def cancel(self) -> None:
        """Ends a piece that nobody is copying, once the run has stopped."""
        with self.transfer.lock:
            mine = self.thread == threading.get_ident()
            handed_over = self.thread is None and self.accepted.value
            running = self.state == _RUNNING and not mine and (self.thread or handed_over)
        if not running:
            self.end(error=Stopped)


class Transfer:
    """A copy between host and device, or between devices.

    `done` gets the event after the last piece (a download is then in host memory, if it went
    through slots), or the error that ended it. `start` and `stop` are its events on the device, and
    `after` is the event that all pieces wait for; all go through one `stream`. `stopped` is not 0
    once the rest need not be copied.
    """

    def __init__(self, done: Later, stopped: ctypes.c_int) -> None:
        self.done, self.stopped = done, stopped
        self.lock = threading.Lock()
        self.start: Any = None
        self.stop: Any = None
        self.after: Any = None
        self.stream: Any = None
        self.over = Later()
        self.landed: Callable[[], None] | None = None
        self.pieces = [Piece(self)]

    def split(self, count: int) -> list[Piece]:
        """The copy in so many pieces, before any of them began."""
        self.pieces = [Piece(self) for _ in range(count)]
        if not count:
            self.finish(None)
        return self.pieces

    def begin(self, stream: Any) -> None:
        """Called before the first piece is given to the stream."""
        if self.start is None:
            with self.lock:
                if self.start is None:
                    if self.after is not None:
                        stream.wait(self.after)
                    self.start = stream.record()

    def finish(self, stream: Any) -> None:
        """All pieces have ended."""
        try:
            if stream is not None:
                self.stop = stream.record()
            self.done.settle(self.stop)
            if self.landed is not None and not self.stopped.value:
                self.landed()
        except BaseException as error:
            self.done.settle(error=error)
            raise
        finally:
            self.landed = None  # it holds C, and pieces hold this transfer
            self.over.settle()

    def wait(self) -> None:
        """Returns when nothing of it is being copied any more; of a run that has stopped, what
        has not begun never will."""
        if self.stopped.value:
            for piece in self.pieces:
                piece.cancel()
        self.over.result()
        if self.stopped.value and self.stream is not None:  # nobody waits for its event
            with contextlib.suppress(Exception):
                self.stream.synchronize()


class Stop:
    """How a play stops: the first error of any lane, and futures that nobody waits for in vain."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.flag = ctypes.c_int()  # the same, for threads that need no Python
        self.lock = threading.Lock()
        self.futures: list[Later] = []

    def __call__(self, error: BaseException) -> None:
        """Lets every part leave at its next step; the first error is the one to report."""
        with self.lock:
            self.error = self.error or error
            self.flag.value = 1
        for future in self.futures:
            future.settle(error=Stopped)
