"""The signal that reading a truncated input file is; `ranks.ending` takes the others."""

from __future__ import annotations

import contextlib
import ctypes
import signal

from ..arrays import npy_files
from ..host.libraries import Library
from ..ranks import ending

_kept: list[object] = []  # C calls the handler as long as the process lives


def name_truncated_files(rank: int | None = None) -> None:
    """Has reading a map beyond the end of its file end the process, and all ranks with it, with
    exit code 1, a line that names the file, and no temporary file left.

    Python's own handlers run between its instructions, and the one that reads never ends. This
    one runs in the thread that reads, where no lock is held but perhaps Python's: BLAS, NumPy and
    the copying threads wait for none while they read. It takes Python's lock, which the threads
    that hold it give up. MPI may be what reads, and then holds its own: so `ending.end_job`, which
    waits for nothing for ever, calls MPI from another thread. A SIGBUS of another cause does what
    it did before.
    """
    prefix = "" if rank is None else f"rank {rank}: "

    def faulted(number: int) -> None:
        with contextlib.suppress(BaseException):
            if text := npy_files.truncated():
                ending.end_job(prefix + text, 1)
        libc.signal(number, before)

    libc = Library(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(faulted)
    _kept.append(handler)
    before = libc.signal(signal.SIGBUS, ctypes.cast(handler, ctypes.c_void_p))
