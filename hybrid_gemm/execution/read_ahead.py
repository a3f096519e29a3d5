"""Asks the system for what a run will read of mapped files, before it comes to it.

Without that, a run reads a map by page faults: it waits for each, and asks for little at once.
Asking costs next to nothing where the bytes are in the system's cache already.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..arrays import mapped_files
from ..arrays.npy_files import NpyFile
from ..arrays.operand import Operands
from ..host.libraries import Library
from ..host.resources import memory_available
from ..planning.reading_order import Need

# A call asks for no more than the system reads ahead of a file by itself, of which this is the
# least common figure: of more, Linux reads that much and leaves the rest.
ASK_BYTES = 128 << 10
LOOK_STEPS = 128  # what is looked for in the cache at once, in calls that it may save
FLYING_BYTES = 32 << 20  # asked for and not there yet; enough for any disk to be busy
SHARE_OF_MEMORY = 0.25  # of what is available: what may be there before it is read
END_S = 0.5  # for the last figures, when a run that went well is over


@dataclass(frozen=True)
class Reading:
    """What was read ahead: the bytes of A, B and C in files, those of them that came from a disk
    and not from the system's cache, and the ms in which they came."""

    bytes: int
    disk_bytes: int
    ms: float


_CACHESTAT = 451  # a system call of Linux 6.5


@functools.cache
def _syscall() -> Any:
    return Library(None, use_errno=True).syscall


class Disk:
    """The calls to the system, which tests replace."""

    def cached(self, file: NpyFile, at: int, size: int) -> bool:
        """Whether bytes of a file are in the system's cache; also False where it does not say."""
        which, found = (ctypes.c_uint64 * 2)(at, size), (ctypes.c_uint64 * 5)()
        arguments = ctypes.c_long(_CACHESTAT), file.descriptor, which, found, 0
        page = mmap.PAGESIZE
        return not _syscall()(*arguments) and found[0] >= -(-(at + size) // page) - at // page

    def ask(self, file: NpyFile, at: int, size: int) -> None:
        """Has bytes of a file read soon, and returns before they are there."""
        os.posix_fadvise(file.descriptor, at, size, os.POSIX_FADV_WILLNEED)

    def wait(self, file: NpyFile, at: int) -> None:
        """Returns when a byte of a file is there."""
        os.pread(file.descriptor, 1, at)

    def read_bytes(self) -> int:
        """The bytes that this process has had from disks so far; 0 where Linux does not say, or has
        no memory now."""
        with contextlib.suppress(OSError, MemoryError), open("/proc/self/io") as lines:
            for line in lines:
                if line.startswith("read_bytes:"):
                    return int(line.split()[1])
        return 0


class ReadAhead:
    """Around a run: a thread asks for what `needs` say of these operands, in their order, where
    they lie in mapped files; without such it does nothing.

    `flops` are those of the whole run, and `counting` learns how many are done. What is asked for
    and not begun yet takes a share of the available memory at most, so that it does not drive out
    what is in use; `sharers` are the processes that do so on this host. The thread ends with the
    run, at once if that failed; it never keeps a process. `reading` says in the end what came.
    """

    def __init__(
        self, needs: Callable[[], Iterable[Need]], operands: Operands, flops: int, *,
        sharers: int = 1, disk: Disk | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        self._needs, self._flops, self._disk = needs, max(1, flops), disk or Disk()
        c = operands.c
        given = {"A": operands.a.array, "B": operands.b.array, "C": None if c is None else c.array}
        found = {name: (view, mapped_files.file_of(view, NpyFile)) for name, view in given.items()}
        self._files = {name: (view, file) for name, (view, file) in found.items() if file}
        self._window, self._sharers = window, sharers
        self._moved, self._over, self._done = threading.Condition(), False, 0
        self._bytes, self._waited_s = 0, 0.0  # waited for the run, and not for a disk
        self._thread: threading.Thread | None = None
        self.reading: Reading | None = None

    def __enter__(self) -> ReadAhead:
        if self._files and hasattr(os, "posix_fadvise"):  # not on macOS
            self._thread = threading.Thread(target=self._work, name="read-ahead", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # no more threads: the run reads as without this
                self._thread = None
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        with self._moved:
            self._over = True
            self._moved.notify()
        if self._thread is not None and kind is None:
            self._thread.join(END_S)

    def counting(self, progress: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """`progress`, counted here as well."""
        if self._thread is None:
            return progress

        def count(flops: int) -> None:
            with self._moved:
                self._done += flops
                self._moved.notify()
            if progress:
                progress(flops)

        return count

    # --- the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        before, began = self._disk.read_bytes(), time.perf_counter()
        flying: deque[tuple[NpyFile, int]] = deque()
        # A system that takes no advice, or has no memory now: the run reads as without this.
        with contextlib.suppress(OSError, AttributeError, MemoryError):
            for file, at, size in self._wanted():
                self._disk.ask(file, at, size)
                self._bytes += size
                flying.append((file, at + size - 1))
                if len(flying) * ASK_BYTES > FLYING_BYTES:
                    self._disk.wait(*flying.popleft())
            while flying and not self._over:
                self._disk.wait(*flying.popleft())
        seconds = time.perf_counter() - began - self._waited_s
        came = min(self._bytes, self._disk.read_bytes() - before)
        self.reading = Reading(self._bytes, came, seconds * 1e3)

    def _wanted(self) -> Iterator[tuple[NpyFile, int, int]]:
        """What is to be asked for in one call each, when it is time: a file, and the first byte and
        the number of bytes. Each once, where all of it may stay in memory."""
        window = self._window
        if window is None:
            window = int(SHARE_OF_MEMORY * memory_available()) // self._sharers
        files = {file for _, file in self._files.values()}
        stays = sum(file.needs for file in files) <= window
        asked = {file: bytearray(-(-file.needs // ASK_BYTES)) for file in files}
        ahead: deque[tuple[float, int]] = deque()  # when it will be read, and its bytes
        for need in self._needs():
            if need.operand not in self._files:
                continue
            view, file = self._files[need.operand]
            part = view[need.rows.slice, need.cols.slice]
            if not self._until_due(need, part.nbytes, ahead, window):
                continue
            ahead.append((need.start, part.nbytes))
            for start, stop in mapped_files.ranges(part, file):
                steps = range(start // ASK_BYTES, -(-stop // ASK_BYTES))
                for i in range(0, len(steps), LOOK_STEPS):
                    some = steps[i : i + LOOK_STEPS]
                    yield from self._missing(file, some, asked[file] if stays else bytearray())

    def _missing(
        self, file: NpyFile, steps: range, asked: bytearray
    ) -> Iterator[tuple[NpyFile, int, int]]:
        """Those of some steps of a file that were not asked for, and may not be in the cache."""
        new = [x for x in steps if not (asked and asked[x])]
        if not new or self._over:
            return
        stop = min(steps.stop * ASK_BYTES, file.needs)
        cached = self._disk.cached(file, steps.start * ASK_BYTES, stop - steps.start * ASK_BYTES)
        for number in new:
            if self._over:
                return
            at = number * ASK_BYTES
            size = min(ASK_BYTES, file.needs - at)
            if asked:
                asked[number] = 1
            if cached:
                self._bytes += size
            else:
                yield file, at, size

    def _until_due(
        self, need: Need, size: int, ahead: deque[tuple[float, int]], window: int
    ) -> bool:
        """Waits until what is `ahead` of the run leaves room for a need. False where the run is
        through with it, or over."""

        def due() -> bool:
            while ahead and ahead[0][0] * self._flops <= self._done:
                ahead.popleft()
            begun = need.start * self._flops <= self._done
            return self._over or begun or not ahead or sum(x for _, x in ahead) + size <= window

        began = time.perf_counter()
        with self._moved:
            self._moved.wait_for(due)
            self._waited_s += time.perf_counter() - began
            return not self._over and need.stop * self._flops > self._done
