"""Copying threads that need no Python: `native_copier.cpp`, compiled once by g++ if that is here.

Python's threads, which copy otherwise, all wait for its lock at each piece.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from ..devices.cuda.driver import Calls
from ..host import compiler, forks
from ..host.libraries import Library, LibraryUnderLock
from ..host.resources import cores

# Threads whatever there is to do, and more for each device that has something to copy; at most so
# many. With more, large products by one device and by four take as long, and small ones longer
# (docs/results/copy_threads4_h200.json); of 16 cores 12 were faster.
BASE, EACH, MOST = 4, 8, 32
STOPPED = -1
_SOURCE = Path(__file__).with_name("native_copier.cpp")
DRIVER, _RING = (Path(__file__).with_name(f"native_{x}.h") for x in ("driver", "ring"))


class _Request(ctypes.Structure):
    _fields_ = [
        ("id", c_uint64), ("host", c_void_p), ("host_pitch", c_uint64),
        ("device", c_uint64), ("device_pitch", c_uint64),
        ("width", c_uint64), ("height", c_uint64),
        ("after", c_void_p), ("start", c_void_p), ("stop", c_void_p), ("stopped", c_void_p),
        ("accepted", c_void_p), ("ended", c_void_p), ("run", c_void_p), ("event", c_uint64),
    ]  # fmt: skip


@functools.cache
def unavailable() -> str | None:
    """Why there are no such threads here, in one line."""
    return compiler.reason(_library)


@functools.cache
def _library() -> LibraryUnderLock:
    # Its calls return at once, so they keep Python's lock; but for those of `Pool` that wait.
    library = LibraryUnderLock(str(compiler.build_library(_SOURCE, DRIVER, _RING)))
    library.pool_start.restype = library.ring_open.restype = c_void_p
    library.ring_touch.argtypes = [c_void_p, c_void_p, c_uint64, c_void_p, ctypes.c_size_t]
    library.ring_open.argtypes = [
        c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, ctypes.c_size_t, c_int, c_void_p
    ]  # fmt: skip
    library.ring_submit.argtypes = [c_void_p, c_void_p, c_void_p]
    return library


def threads(devices: int) -> int:
    """How many copy for so many devices that have something to copy."""
    return max(1, min(BASE + EACH * devices, MOST, cores()))


class Pool:
    """The process's threads, and what is to be done at the end of each copy. Of the copies that
    could begin, that with the smallest number does. There are as many threads as devices with rings
    want; those that do not copy at the time sleep."""

    def __init__(self):
        self.library = _library()
        wanted = [threads(devices + 1) for devices in range(-(-(MOST - BASE) // EACH))]
        self.handle = self.library.pool_start((c_int * len(wanted))(*wanted), len(wanted))
        self.submit = ctypes.cast(self.library.ring_submit, c_void_p).value
        waiting = Library(self.library._name)  # its calls let Python's lock go
        self.close, self._finished = waiting.ring_close, waiting.pool_finished
        self.close.argtypes, self.close.restype = [c_void_p, c_void_p], None
        self._finished.argtypes, self._finished.restype = [c_void_p, c_void_p], c_uint64
        self._next, self._lock = 0, threading.Lock()
        self.ends: dict[int, tuple] = {}  # with what has to live so long
        threading.Thread(target=self._report, name="copied", daemon=True).start()

    def numbers(self, count: int = 1) -> int:
        """The first of so many numbers for copies, one after the other."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return first

    def _report(self) -> None:
        status = c_int()
        while True:
            number = self._finished(self.handle, ctypes.byref(status))
            end, *kept = self.ends.pop(number)
            end(status.value)
            del end, kept  # or the caller's memory would stay until the next copy


@functools.cache
def pool() -> Pool:
    """That of this process."""
    return Pool()


forks.forget_in_child(pool.cache_clear)


class Ring:
    """Slots for one direction of one device. `calls` are the driver's, `stream` is what they take,
    and `events` are as many as there are slots of `slot_bytes` in page-locked `memory`. `kept` is
    what has to live as long: whose stream and events these are."""

    def __init__(
        self, calls: Calls, stream: int, memory: np.ndarray, slot_bytes: int,
        events: Sequence[int], *, up: bool, kept: Any = None,
    ):  # fmt: skip
        self.pool, self.up = pool(), up
        self.kept = memory, calls, kept
        table = (c_uint64 * len(calls.functions))(*calls.functions)
        self.handle = self.pool.library.ring_open(
            self.pool.handle, table, calls.context, stream, up, memory.ctypes.data, slot_bytes,
            len(events), (c_void_p * len(events))(*events),
        )  # fmt: skip
        weakref.finalize(self, self.pool.close, self.pool.handle, self.handle).atexit = False

    def touch(self, array: np.ndarray) -> None:
        """Has the pages of fresh memory made by threads that have nothing to copy, without a change
        to what is in it."""
        if array.size:
            number = self.pool.numbers()
            self.pool.ends[number] = lambda status: None, array
            self.pool.library.ring_touch(
                self.pool.handle, self.handle, number, array.ctypes.data, array.nbytes
            )

    def submit(
        self, host: int, device: int, pitches: Sequence[int], size: tuple[int, int],
        events: tuple[int, int, int], stopped: ctypes.c_int, accepted: ctypes.c_int,
        end: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Copies between two addresses; `pitches` are theirs, `size` is (bytes of a run, runs).

        `events` are what to wait for, or 0, and those to record before and after. Where `stopped`
        is set meanwhile, the rest is left out. `accepted` is set once the native threads have the
        copy; from then on `end(status)` will be called, once, from a thread of
        Python's: with 0, `STOPPED`, or what the driver said. A download is in host memory then; of
        an upload, and of what failed, some may still be on its way in the stream.
        """
        number = self.pool.numbers()
        self.pool.ends[number] = end, stopped, accepted
        request = _Request(
            number, host, pitches[0], device, pitches[1], *size, *events,
            ctypes.addressof(stopped), ctypes.addressof(accepted), None, None, 0,
        )  # fmt: skip
        self.pool.library.ring_submit(self.pool.handle, self.handle, ctypes.byref(request))
