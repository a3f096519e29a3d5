"""One reading of a matrix in the host's memory, and all the sums that a verdict takes from it:
`native_passes.cpp`, compiled once by g++ if that is here, for this host's CPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import sys
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HybridGemmError, in_one_line
from ..host import compiler
from ..host.libraries import Library

WAIT = 1 << 28  # elements of whose sums NumPy takes longer than g++ takes to make the library

VECTOR = 8  # columns of a thin matrix are a multiple of it
SIDE = 64  # of the tiles that are read, and so of what is read of k at a time
ROOM = 64  # elements that are read beyond the weights of the last columns
TYPES = {
    name: number
    for number, name in enumerate(
        ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
         "uint8", "uint16", "uint32", "uint64")
    )
}  # fmt: skip
_SUMMED = {"float32": 0, "float64": 1, "uint32": 2, "uint64": 3}


_SOURCE = Path(__file__).with_suffix(".cpp")
_BUILD = _SOURCE, _SOURCE.with_name("native_read.h")
_FOR_THIS_CPU = "-march=native", "-mtune=generic"  # tuned for some, sums are not fused


@functools.cache
def unavailable() -> str | None:
    """Why NumPy makes the sums here, in one line."""
    return compiler.reason(_library)


@functools.cache
def _library() -> Library:
    library = Library(str(compiler.build_library(*_BUILD, flags=_FOR_THIS_CPU)))
    library.make_pass.argtypes, library.make_pass.restype = [c_void_p], None
    return library


def not_ready(elements: int) -> str:
    """Why NumPy makes the sums of so many elements here; empty where native threads do. Where the
    cache has no library yet, g++ makes it now if NumPy would take longer, and otherwise for the
    processes to come, in one of its own that goes on when this one ends."""
    if elements >= WAIT or unavailable.cache_info().currsize:
        return unavailable() or ""
    try:
        compiler.build_library(*_BUILD, flags=_FOR_THIS_CPU, only_cached=True)
    except HybridGemmError as error:
        if shutil.which("g++"):
            _compile_later()
        return in_one_line(error)
    return unavailable() or ""


@functools.cache
def _compile_later() -> subprocess.Popen | None:
    module = f"from {__name__} import unavailable; unavailable()"
    with contextlib.suppress(OSError):  # the next process tries again
        return subprocess.Popen(
            ["nice", "-n", "19", sys.executable, "-c", module], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=_SOURCE.parents[2],
        )  # fmt: skip
    return None


class _Source(ctypes.Structure):
    _fields_ = [
        ("at", c_void_p), ("type", c_int64), ("size", c_int64), ("rows", c_int64),
        ("cols", c_int64), ("down_pitch", c_int64), ("right_pitch", c_int64), ("down", c_int64),
        ("across", c_int64), ("absolute", c_int64), ("factors", c_void_p),
        ("imaginary", c_int64),
    ]  # fmt: skip


class _Thin(ctypes.Structure):
    _fields_ = [
        ("at", c_void_p), ("width", c_int64), ("classes", c_int64), ("squares", c_int64),
        ("made", c_void_p), ("walk", c_void_p), ("walk_width", c_int64),
    ]  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = [
        ("type", c_int64), ("threads", c_int64), ("x", _Source), ("before", _Source),
        ("before_size", _Source), ("row_edges", c_void_p), ("col_edges", c_void_p),
        ("blocks", c_int64), ("segments", c_int64), ("chunk", c_int64), ("every", c_int64),
        ("thins", c_int64), ("thin", _Thin * 2), ("left", c_void_p), ("of_left", c_void_p),
        ("of_left_squares", c_void_p), ("weights", c_void_p), ("folded", c_void_p),
        ("folded_squares", c_void_p), ("weights_width", c_int64), ("folded_width", c_int64),
        ("all_classes", c_int64), ("row_origin", c_int64), ("ends", c_void_p),
        ("is_c", c_int64), ("beta", c_double), ("of_sums", c_double), ("of_c", c_double),
        ("of_before", c_double),
    ]  # fmt: skip


def why_not(matrices: list) -> str:
    """Why NumPy sums these, in one line; empty where native threads do. What a check does not have
    is None."""
    there = [getattr(x, "matrix", x) for x in matrices if x is not None]
    if not all(isinstance(x, np.ndarray) for x in there):
        return "they are on a GPU"
    for dtype in {x.dtype for x in there}:
        if not dtype.isnative or _real(dtype).name not in TYPES:
            return f"there are no native sums of {dtype.str}"
    return not_ready(sum(x.size for x in there))


def filled(count: int, of: int = VECTOR) -> int:
    """So many that they fill vectors, or other units."""
    return -(-count // of) * of


def said(by_numpy: str) -> str:
    """What a verdict says of that."""
    return f", summed by NumPy ({by_numpy})" if by_numpy else ""


def _real(dtype: np.dtype) -> np.dtype:
    return np.dtype({"complex64": "f4", "complex128": "f8"}.get(dtype.name, dtype))


class Pass:
    """What one reading makes, of numbers of the dtype `kind`. Arrays that it is given are kept
    until it has run; those that it makes are C-contiguous."""

    def __init__(self, x: Any, kind: Any, threads: int) -> None:
        self.kind = np.dtype(kind)
        self.kept: list[np.ndarray] = []
        self.about = _Pass(type=_SUMMED[self.kind.name], threads=threads, chunk=SIDE, every=1)
        self.about.x = self._source(x)

    def cut(self, row_blocks: Sequence, col_blocks: Sequence) -> None:
        """Blocks of rows, which threads take, and those of columns, one after the other."""
        for name, blocks in ("row", row_blocks), ("col", col_blocks):
            edges = np.array([blocks[0].start, *(b.stop for b in blocks)])
            setattr(self.about, f"{name}_edges", self._at(edges, "i8"))
        self.about.blocks, self.about.segments = len(row_blocks), len(col_blocks)

    def square_one_in(self, every: int, chunk: int) -> None:
        """Squares are those of the first `chunk` columns of so many times as many."""
        self.about.every, self.about.chunk = every, chunk

    # Many parameters: a matrix, and what becomes of its product.
    def multiply(self, thin: Any, made: Any, walk: Any = None, *, squares: bool = False) -> None:
        """Adds the product of the matrix, or of its squares, with `thin` (k x width, or one for
        each class of rows) to `made`, and to `walk` the squares of its last columns, of as many as
        `walk` has, after each block of columns."""
        classes = len(thin) if thin.ndim == 3 else 1
        if thin.shape[-1] % VECTOR or made.shape[-1] != thin.shape[-1]:
            raise ValueError(f"{thin.shape[-1]} columns fill no vectors of {VECTOR}")
        self.about.thin[self.about.thins] = _Thin(
            self._at(thin, self.kind), thin.shape[-1], classes, squares, self._place(made),
            *((None, 0) if walk is None else (self._place(walk), walk.shape[-1])),
        )  # fmt: skip
        self.about.thins += 1

    def add_rows(self, weights: Any, made: Any, squares: Any) -> None:
        """Adds the weighted sums of each block of rows, and those of squares."""
        self.about.left = self._at(weights, self.kind)
        self.about.of_left, self.about.of_left_squares = self._place(made), self._place(squares)

    def fold(self, weights: Any, made: Any, squares: Any, *, origin: int = 0) -> None:
        """Makes the sums of each row in each block of columns, and those of squares, by the weights
        of the row's class, counted from `origin`; with those of all classes, where `made` has room
        for them."""
        padded = np.pad(weights, ((0, 0), (0, ROOM)))
        self.about.weights, self.about.weights_width = self._at(padded, self.kind), padded.shape[1]
        self.about.folded, self.about.folded_squares = self._place(made), self._place(squares)
        self.about.folded_width, self.about.all_classes = made.shape[-1], made.ndim == 3
        self.about.row_origin = origin

    def find_ends(self, ends: Any) -> None:
        """Of each row the largest numbers of both signs, and whether it has Inf or NaN."""
        self.about.ends = self._place(ends)

    def less(self, beta: float, before: Any, size: Any, variances: tuple) -> None:
        """Takes beta `before` from the matrix, C, and in place of squares what these `variances` of
        the difference, C, and beta times `size`, by default `before`, come to."""
        self.about.is_c, self.about.beta = True, beta
        self.about.of_sums, self.about.of_c, self.about.of_before = variances
        if beta:
            self.about.before = self._source(before)
        if beta and size is not None:
            self.about.before_size = self._source(size)

    def run(self) -> None:
        _library().make_pass(ctypes.byref(self.about))

    def _source(self, x: Any) -> _Source:
        stored, factors = getattr(x, "matrix", x), getattr(x, "factors", None)
        real = _real(stored.dtype)
        down, across = (len(factors), len(factors[0])) if factors else (1, 1)
        self.kept.append(stored)
        return _Source(
            stored.ctypes.data, TYPES[real.name], stored.itemsize, *x.shape,
            *stored.strides, down, across, getattr(x, "absolute", False),
            self._at(np.array(factors), "f8") if factors else None,
            stored.itemsize // 2 if stored.dtype.kind == "c" else 0,
        )  # fmt: skip

    def _at(self, array: Any, kind: Any) -> int:
        self.kept.append(np.ascontiguousarray(array, kind))
        return self.kept[-1].ctypes.data

    def _place(self, array: np.ndarray) -> int:
        """Of what is made, which must be as it is read there."""
        if not array.flags.c_contiguous:
            raise ValueError("sums are made in contiguous arrays")
        self.kept.append(array)
        return array.ctypes.data
