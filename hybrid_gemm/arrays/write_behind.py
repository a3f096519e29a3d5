"""Gives finished parts of a mapped file to the disk while others are still made."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..host.libraries import Library

WAIT_BEFORE, WRITE = 1, 2  # SYNC_FILE_RANGE_...
CALL_BYTES = 4 << 20  # of one call, which nothing interrupts
FLYING = 8  # calls whose bytes are on their way: enough for most disks to be busy


@functools.cache
def _library() -> Any:
    call = Library(None, use_errno=True).sync_file_range
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return call


def begin_to_write(descriptor: int, start: int, size: int) -> None:
    """Has the bytes of a file that were changed in this range written. Raises `OSError`."""
    _call(descriptor, start, size, WRITE)


def wait_until_written(descriptor: int, start: int, size: int) -> None:
    """Returns when these bytes are on the disk, or in its own cache. Raises `OSError`."""
    _call(descriptor, start, size, WAIT_BEFORE)


def _call(descriptor: int, start: int, size: int, what: int) -> None:
    if _library()(descriptor, start, size, what):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class WriteBehind:
    """A thread that writes parts of a file, in the order in which they were given. It promises
    nothing: `fsync` writes what it has not, and reports what went wrong.

    `bytes` and `ms` are what it has written, and the time that took. It opens the file again,
    because a file opened once tells of an error once, and that shall be `fsync`.
    """

    def __init__(self, descriptor: int) -> None:
        self.bytes, self.ms = 0, 0.0
        self._given: deque[tuple[int, int]] = deque()
        self._wake = threading.Condition()
        self._stopped = False
        self._begun = False
        self._file = descriptor

    def give(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Has ranges of bytes written soon; returns at once."""
        with self._wake:
            if self._stopped:
                return
            self._given.extend(ranges)
            if not self._begun:
                self._begun = True
                self._begin()
            self._wake.notify()

    def stop(self) -> None:
        """Leaves what is not written yet to `fsync`, and returns at once."""
        with self._wake:
            self._stopped = True
            self._given.clear()
            self._wake.notify()

    def _begin(self) -> None:
        # Where the system cannot, all is left to fsync, and `bytes` says so.
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY)
            work = functools.partial(self._work, descriptor)
            try:
                threading.Thread(target=work, name="write-behind", daemon=True).start()
            except RuntimeError:  # no more threads
                os.close(descriptor)

    def _work(self, descriptor: int) -> None:
        with contextlib.suppress(OSError, AttributeError, MemoryError):  # as above
            try:
                self._write(descriptor)
            finally:
                os.close(descriptor)

    def _write(self, descriptor: int) -> None:
        flying: deque[tuple[int, int]] = deque()
        while not self._stopped:
            found = self._next(wait=not flying)
            began = time.perf_counter()
            if found is not None:
                begin_to_write(descriptor, *found)
                flying.append(found)
            if flying and (found is None or len(flying) > FLYING):
                wait_until_written(descriptor, *flying[0])
                self.bytes += flying.popleft()[1]
            self.ms += (time.perf_counter() - began) * 1e3

    def _next(self, *, wait: bool) -> tuple[int, int] | None:
        """The first byte and the number of bytes of the next call. None when there are none: with
        `wait`, only when it is to stop."""
        with self._wake:
            if wait:
                self._wake.wait_for(lambda: self._given or self._stopped)
            if not self._given:
                return None
            start, stop = self._given.popleft()
            size = min(CALL_BYTES, stop - start)
            if start + size < stop:
                self._given.appendleft((start + size, stop))
            return start, size
