"""The terminal in which stdout or stderr ends."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

# A rank's number on its host, as launchers name it.
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def width(stream: Any) -> int | None:
    """The columns of the terminal where `stream`, this process's stdout or stderr, ends; None where
    that is a pipe or a file.

    mpirun gives a rank pipes, or a terminal of 80 columns whatever its own output is. There the
    stream of the process that started this one counts.
    """
    number = 1 if stream is sys.stdout else 2
    with contextlib.suppress(OSError, ValueError):
        if not any(map(os.environ.get, LOCAL_RANK)):
            if not stream.isatty():
                return None
            given = os.environ.get("COLUMNS", "")
            columns = int(given) if given.isdecimal() else 0
            return columns or os.get_terminal_size(number).columns or 80
        name = os.readlink(f"/proc/{os.getppid()}/fd/{number}")
        if name.startswith(("/dev/pts/", "/dev/tty")):
            opened = os.open(name, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                return os.get_terminal_size(opened).columns or 80
            finally:
                os.close(opened)
    return None
