"""Sums of matrices in the host's memory by threads that need no Python: `native_sums.cpp`, compiled
once by g++ if that is here. `host_checksums.py` has the same by NumPy, in several passes."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np

from ..host import compiler
from ..host.libraries import Library
from ..planning.partition import cut
from .checksums import GROUPS
from .native_passes import SIDE, TYPES, Pass

# Bytes of line sums, of other sums, and elements of a product with sums, for which one more thread
# is started. Line sums are made beside a GPU. The others follow a product by BLAS, whose threads go
# on asking for work for some milliseconds, on cores that more threads would share with them.
LINE_BYTES, EACH_BYTES, EACH_ELEMENTS = 1 << 20, 16 << 20, 1 << 22
_SOURCE = Path(__file__).with_name("native_sums.cpp")
_HEADERS = _SOURCE.with_suffix(".h"), _SOURCE.with_name("native_read.h")
_LINES, _SUMS = range(2)


class _Job(ctypes.Structure):
    _fields_ = [
        ("what", c_int64), ("type", c_int64), ("size", c_int64), ("across", c_int64),
        ("at", c_void_p), ("rows", c_int64), ("cols", c_int64), ("pitch", c_int64),
        ("width", c_int64), ("weights", c_void_p), ("of", c_void_p), ("second", c_void_p),
        ("threads", c_int64),
    ]  # fmt: skip


@functools.cache
def unavailable() -> str | None:
    """Why NumPy makes the sums here, in one line."""
    return compiler.reason(_library)


@functools.cache
def _library() -> Library:
    library = Library(str(compiler.build_library(_SOURCE, *_HEADERS)))
    library.make_sums.argtypes, library.make_sums.restype = [c_void_p], None
    return library


def takes(x: np.ndarray) -> bool:
    """Whether there are native weighted sums of such a matrix: of numbers, and with neighbours
    along its rows or its columns."""
    return x.dtype.name in TYPES and x.dtype.isnative and _lies(x) is not None


def takes_lines(x: np.ndarray) -> bool:
    """As `takes`, for sums of squares: of unsigned words, with neighbours along rows."""
    return x.dtype.kind == "u" and x.dtype.isnative and _lies(x) == (False, x.strides[0])


def _lies(x: np.ndarray) -> tuple[bool, int] | None:
    """Whether neighbours lie along columns, and the bytes from one such line to the next."""
    (rows, cols), (down, right) = x.shape, x.strides
    if cols <= 1 or right == x.itemsize:
        return False, down
    if rows <= 1 or down == x.itemsize:
        return True, right
    return None


def lines(x: np.ndarray, threads: int) -> np.ndarray:
    """The sum of the squares of each row of unsigned words, modulo 2^64. Words of 8 bytes are two
    of 4, of which the upper's square counts as often as `_squares` in host_checksums.py says."""
    made = np.zeros(len(x), np.uint64)  # which pieces of rows are added to
    _make(_LINES, x, (made,) * 3, threads=min(threads, 1 + x.nbytes // LINE_BYTES))
    return made


def weighted(
    x: np.ndarray, weights: np.ndarray, width: int, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted sum of the elements of each row and group, and the second sum of `Sums`."""
    of, second = (np.empty((len(x), GROUPS), weights.dtype) for _ in "12")
    threads = min(threads, 1 + x.nbytes // EACH_BYTES)
    _make(_SUMS, x, (weights, of, second), width=width, threads=threads)
    return of, second


def product(
    a: np.ndarray, of: np.ndarray, second: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """`a` times both sums of another matrix's rows: of the squares of floating point, those of the
    largest group."""
    threads = min(threads, 1 + a.size // EACH_ELEMENTS)
    made, others = (np.zeros((len(a), GROUPS), of.dtype) for _ in "12")
    floats = of.dtype.kind == "f"
    if a.size:
        reading = Pass(a, of.dtype, threads)
        reading.cut(cut(len(a), -(-len(a) // SIDE)), cut(a.shape[1], 1))
        reading.multiply(of, made)
        if floats:  # the largest alone, in columns that fill vectors
            second = np.pad(second.max(axis=1, keepdims=True), ((0, 0), (0, GROUPS - 1)))
        reading.multiply(second, others, squares=floats)
        reading.run()
    return made, others[:, :1] if floats else others


def _make(
    what: int, x: np.ndarray, matrices: tuple[np.ndarray, ...], *, threads: int, width: int = 0
) -> None:  # fmt: skip
    lies = _lies(x)
    if lies is None:
        raise ValueError(f"a view with strides {x.strides} has no neighbours")
    (across, pitch), (rows, cols) = lies, x.shape
    job = _Job(
        what, TYPES[x.dtype.name], x.itemsize, across, x.ctypes.data, rows, cols, pitch, width,
        *(y.ctypes.data for y in matrices), max(1, threads),
    )  # fmt: skip
    _library().make_sums(ctypes.byref(job))
