"""Which bytes of which file a matrix is, where it lies in one that this process has mapped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from .strides import span

GAP_BYTES = 128 << 10  # runs of bytes with less between them are one: a disk likes long ones


class MappedFile(Protocol):
    """A file whose bytes from `offset` on are mapped as the matrix `array`."""

    array: np.ndarray
    offset: int

    def truncated(self) -> str | None: ...


F = TypeVar("F", bound=MappedFile)

# What this process has mapped. Reading a map beyond the end of its file is a SIGBUS.
mapped: weakref.WeakSet[Any] = weakref.WeakSet()


def file_of(view: Any, kind: type[F]) -> F | None:
    """The mapped file of a kind in which all of a matrix lies; None if there is none."""
    if not mapped or not isinstance(view, np.ndarray) or not view.size:
        return None
    part = span(view)
    for file in tuple(mapped):
        if isinstance(file, kind) and file.array.size:
            whole = span(file.array)
            if whole.start <= part.start and part.stop <= whole.stop:
                return file
    return None


def ranges(view: np.ndarray, file: MappedFile) -> Iterator[tuple[int, int]]:
    """The bytes of its file that a matrix is, from a first byte to one past the last, as ranges
    that are at least `GAP_BYTES` apart."""
    if not view.size:
        return
    part, before = span(view), span(file.array).start - file.offset
    start, stop = part.start - before, part.stop - before
    lines = sorted(((abs(s), n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1))
    if len(lines) < 2:
        yield start, stop
        return
    (inner, length), (pitch, count) = lines
    run = inner * (length - 1) + view.itemsize
    if pitch - run < GAP_BYTES:
        yield start, stop
        return
    for i in range(count):
        yield start + i * pitch, start + i * pitch + run
