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
from .checksums import GROUPS

# Bytes of line sums, of other sums, and elements of a product with sums, for which one more thread
# is started. Line sums are made beside a GPU. The others follow a product by BLAS, whose threads go
# on asking for work for some milliseconds, on cores that more threads would share with them.
LINE_BYTES, EACH_BYTES, EACH_ELEMENTS = 1 << 20, 16 << 20, 1 << 22
# A product of fewer rows shares out k, too: so many columns at least to each share.
FEW_ROWS, SHARE, MOST_SHARES = 128, 1 << 15, 64
_SOURCE = Path(__file__).with_name("native_sums.cpp")
_HEADERS = _SOURCE.with_suffix(".h"), _SOURCE.with_name("native_read.h")
_LINES, _SUMS, _PRODUCT = range(3)
TYPES = {
    name: number
    for number, name in enumerate(
        ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
         "uint8", "uint16", "uint32", "uint64")
    )
}  # fmt: skip


class _Job(ctypes.Structure):
    _fields_ = [
        ("what", c_int64), ("type", c_int64), ("size", c_int64), ("across", c_int64),
        ("at", c_void_p), ("rows", c_int64), ("cols", c_int64), ("pitch", c_int64),
        ("width", c_int64), ("weights", c_void_p), ("more", c_void_p), ("of", c_void_p),
        ("second", c_void_p), ("shares", c_int64), ("threads", c_int64),
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
    _make(_LINES, x, (made,) * 4, threads=min(threads, 1 + x.nbytes // LINE_BYTES))
    return made


def weighted(
    x: np.ndarray, weights: np.ndarray, width: int, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """The weighted sum of the elements of each row and group, and the second sum of `Sums`."""
    of, second = (np.empty((len(x), GROUPS), weights.dtype) for _ in "12")
    threads = min(threads, 1 + x.nbytes // EACH_BYTES)
    _make(_SUMS, x, (weights, weights, of, second), width=width, threads=threads)
    return of, second


def product(
    a: np.ndarray, of: np.ndarray, second: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """`a` times both sums of another matrix's rows: of the squares of floating point, those of the
    largest group."""
    rows, cols = a.shape
    if of.dtype.kind == "f":
        second = second.max(axis=1, keepdims=True)
    shares = 1 if rows >= FEW_ROWS else max(1, min(MOST_SHARES, cols // SHARE))
    made = [np.empty((shares, rows, x.shape[1]), x.dtype) for x in (of, second)]
    sums = [np.ascontiguousarray(x) for x in (of, second)]
    threads = min(threads, 1 + a.size // EACH_ELEMENTS)
    _make(_PRODUCT, a, (*sums, *made), shares=shares, threads=threads)
    with np.errstate(all="ignore"):
        one, other = (x[0] if shares == 1 else x.sum(axis=0) for x in made)
    return one, other


def _make(
    what: int, x: np.ndarray, matrices: tuple[np.ndarray, ...], *, threads: int, width: int = 0,
    shares: int = 1,
) -> None:  # fmt: skip
    lies = _lies(x)
    if lies is None:
        raise ValueError(f"a view with strides {x.strides} has no neighbours")
    (across, pitch), (rows, cols) = lies, x.shape
    job = _Job(
        what, TYPES[x.dtype.name], x.itemsize, across, x.ctypes.data, rows, cols, pitch, width,
        *(y.ctypes.data for y in matrices), shares, max(1, threads),
    )  # fmt: skip
    _library().make_sums(ctypes.byref(job))
