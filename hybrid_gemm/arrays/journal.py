"""A journal: facts about a job, then a line for each thing of it that is done, safe on the disk.

Each line is JSON and its CRC-32, so that a line that was torn by a crash, or damaged, is known. One
process at a time has a journal: it holds a lock (flock) on it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import zlib
from typing import Any

from ..errors import HybridGemmError, UsageError
from . import output_files

KIND = "hybrid-gemm journal 1"


class Journal:
    """The journal at `path`, opened or made, and locked.

    `facts` are those it was begun with, None where it has none yet; `done` are its whole lines,
    in order. `locked` is False where the filesystem has no locks. Raises `HybridGemmError` if
    another process has it, `UsageError` for a file that is no journal, and `OSError`.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor, self.locked = _open_locked(path)
        try:
            self.facts, self.done = self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        with open(self.descriptor, "rb", closefd=False) as file:
            text = file.read()
        end = text.rfind(b"\n") + 1
        lines = text[:end].splitlines()
        if not lines:  # new, or the process died as it began
            return None, []
        first, *rest = map(_parsed, lines)
        if first is None or first.pop("kind", None) != KIND:
            raise UsageError(
                f"{self.path} is damaged, or no journal of hybrid-gemm; to begin again, remove it "
                "and the file of the same name without .journal"
            )
        os.ftruncate(self.descriptor, end)  # without the line that was not finished
        return first, [line for line in rest if line is not None]

    def clear(self) -> None:
        """Makes it one that has no facts yet."""
        os.ftruncate(self.descriptor, 0)
        self.facts, self.done = None, []

    def begin(self, facts: dict[str, Any]) -> None:
        """Writes the facts, as its first line."""
        self.facts = facts
        self.add({"kind": KIND, **facts})
        output_files.sync_folder(os.path.dirname(self.path))

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line, and returns when it is on the disk."""
        text = json.dumps(line)
        left = memoryview(f"{text} {zlib.crc32(text.encode()):08x}\n".encode())
        os.lseek(self.descriptor, 0, os.SEEK_END)
        while left:
            left = left[os.write(self.descriptor, left) :]
        output_files.sync_data(self.descriptor)

    def add_process(self) -> None:
        """Writes which process has the journal now, for the message of one that wants it too."""
        job = os.environ.get("SLURM_JOB_ID")
        place = f"process {os.getpid()} on {socket.gethostname()}"
        self.add({"process": place + (f", Slurm job {job}" if job else "")})

    def remove(self) -> None:
        """Removes the file, if it is still there, and closes it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Lets another process have it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _parsed(line: bytes) -> dict[str, Any] | None:
    """What a line says; None if it is damaged."""
    text, _space, check = line.rpartition(b" ")
    if not text or check != b"%08x" % zlib.crc32(text):  # that of nothing is 0
        return None
    found = json.loads(text)
    return found if isinstance(found, dict) else None


def _open_locked(path: str) -> tuple[int, bool]:
    """A descriptor of the file, and whether it could be locked."""
    while True:
        descriptor = output_files.open_kept(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(descriptor)
            os.close(descriptor)
            raise HybridGemmError(
                f"{path} is in use by another --resume ({owner}); wait for it, or end it"
            ) from None
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return descriptor, False
            os.close(descriptor)
            raise
        if output_files.is_same(path, os.fstat(descriptor)):
            return descriptor, True
        os.close(descriptor)  # whoever had it has just finished, and removed it


def _owner(descriptor: int) -> str:
    """Who wrote last that it has the journal."""
    with open(descriptor, "rb", closefd=False) as file:
        lines = [_parsed(line) for line in file.read().splitlines()]
    found = [line["process"] for line in lines if line and "process" in line]
    return found[-1] if found else "which is beginning"
