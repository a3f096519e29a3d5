"""Bytes of matrices in files: parts written in their places, and what the disk gives back."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import HybridGemmError, UsageError
from ..host.resources import cores

WRITE_BYTES = 64 << 20  # what one call to the system writes
CHECK_BYTES = 4 << 20  # what has a checksum of its own
# Files here are made by this job; a link that others put in their place leads elsewhere.
NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK


def checksums(data: memoryview) -> list[int]:
    """The CRC-32 of every `CHECK_BYTES` of memory."""
    return _checksums(lambda at: zlib.crc32(data[at : at + CHECK_BYTES]), len(data))


def checksums_on_disk(descriptor: int, size: int) -> list[int]:
    """The same of the first `size` bytes of a file, read from it."""
    return _checksums(
        lambda at: zlib.crc32(_read(descriptor, min(CHECK_BYTES, size - at), at)), size
    )


def _checksums(one: Callable[[int], int], size: int) -> list[int]:
    starts = range(0, size, CHECK_BYTES)
    if len(starts) == 1:
        return [one(0)]
    with ThreadPoolExecutor(min(8, cores(), len(starts)), "checksum") as pool:
        return list(pool.map(one, starts))


def _read(descriptor: int, size: int, at: int) -> bytes:
    """`size` bytes of a file, from byte `at` on; fewer at its end."""
    parts = []
    while size and (part := os.pread(descriptor, size, at)):
        parts.append(part)
        size, at = size - len(part), at + len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def write_part(path: str, offset: int, cols: int, part: np.ndarray, row: int, col: int) -> None:
    """Writes a part of a matrix into a file, and returns when its bytes are on the disk and were
    read back from it.

    The matrix is row-major with `cols` columns and begins at byte `offset` of the file; the
    part's first element is that of (`row`, `col`). These are positioned writes and not a map,
    because on a network filesystem two hosts may write parts of one page. Raises
    `HybridGemmError` if the disk refuses, or gives other bytes back.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | NO_LINK)
        try:
            for data, at in _runs_of(part, offset, cols, row, col):
                left = data.data
                while len(left):
                    written = os.pwrite(descriptor, left, at)
                    left, at = left[written:], at + written
            os.fsync(descriptor)
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for data, at in _runs_of(part, offset, cols, row, col):
                found = np.frombuffer(_read(descriptor, len(data), at), np.uint8)
                if not np.array_equal(found, data):
                    raise HybridGemmError(
                        f"could not write {path}: read back from the disk, bytes {at} to "
                        f"{at + len(data) - 1} differ from those that were written"
                    )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HybridGemmError(f"could not write {path}: {error.strerror}") from None


def check_shared(path: str) -> None:
    """Raises `UsageError` where this process does not see a file that another one, perhaps on
    another host, has just made."""
    try:
        os.close(os.open(path, os.O_RDWR | NO_LINK))
    except OSError as error:
        raise UsageError(
            f"{os.path.dirname(path)} on {socket.gethostname()} is not the folder in which rank 0 "
            f"began C: {error.strerror}; ranks of several nodes write C to a "
            "filesystem that all of them share"
        ) from None


def read_part(path: str, offset: int, cols: int, part: np.ndarray, row: int, col: int) -> None:
    """Fills a part of a matrix, which lies together in memory, from a file that has it where
    `write_part` writes it. Raises `HybridGemmError` if the disk does not give it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_LINK)
        try:
            for data, at in _runs_of(part, offset, cols, row, col):
                found = _read(descriptor, len(data), at)
                if len(found) < len(data):
                    raise HybridGemmError(f"could not read {path}: it was truncated meanwhile")
                data[...] = np.frombuffer(found, np.uint8)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HybridGemmError(f"could not read {path}: {error.strerror}") from None


def _runs_of(
    part: np.ndarray, offset: int, cols: int, row: int, col: int
) -> Iterator[tuple[np.ndarray, int]]:
    """A part's bytes as runs that lie together in the file, each with the byte it begins at."""
    size = part.dtype.itemsize
    whole_rows = part.shape[1] == cols
    step = max(1, WRITE_BYTES // max(1, cols * size)) if whole_rows else 1
    for i in range(0, part.shape[0], step):
        data = np.ascontiguousarray(part[i : i + step]).reshape(-1).view(np.uint8)
        yield data, offset + ((row + i) * cols + col) * size
