"""Random matrices that depend on a seed alone, not on how many threads or ranks make them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from ..errors import UsageError

TILE = 256  # rows and columns of what one stream of random numbers fills
FILLS = ("normal", "uniform", "integers")
LARGEST_INTEGER = 4  # products of at most 16: float32 sums stay exact up to k = 2^24 / 16 = 2^20
GENERATED_DTYPES = (
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32", "int64",
)  # fmt: skip


# Many parameters: all describe one matrix and the part of it that is wanted.
def generate(
    rows: int,
    cols: int,
    dtype: DTypeLike = "float32",
    *,
    seed: int,
    operand: str,
    fill: str = "normal",
    row_range: tuple[int, int] | None = None,
    col_range: tuple[int, int] | None = None,
    out: np.ndarray | None = None,
    threads: int = 1,
) -> np.ndarray:
    """Rows `row_range` and columns `col_range` of a random matrix of `rows` x `cols`.

    The matrix is a fixed function of `seed`, `operand` ("A", "B" or "C"), `fill`, `dtype` and
    `cols`, whichever part is asked for and however many threads make it. It is cut into tiles
    of 256 x 256 (less at the right edge); tile (i, j) is filled along its rows by NumPy's
    `Generator(Philox(key=[seed, ord(operand)], counter=[0, 0, j, i]))`.

    Fills: "normal" is the standard normal distribution; "uniform" is uniform in [0, 1);
    "integers" is whole numbers from -4 to 4, equal in every dtype, whose float32 products are
    exact for k up to 2^20. Integer dtypes get "integers" whatever `fill` says; float16 and
    bfloat16 get float32 values, rounded. Of complex numbers each part is such a number, and a tile
    is filled as one of twice the columns: real part, imaginary part, and so on.

    Ranges are (start, stop). With `out`, of the part's shape and dtype and with any strides,
    the part is written there, and `out` is returned. Raises `UsageError` where there is no such
    matrix, or no such part of it.

        a = generate(512, 1024, seed=0, operand="A")
    """
    dtype = np.dtype(dtype)
    if threads < 1:
        raise UsageError(f"threads={threads}; it must be at least 1")
    row_range, col_range = row_range or (0, rows), col_range or (0, cols)
    matrix = _Matrix(rows, cols, dtype, seed, operand, fill)
    matrix.check(row_range, col_range)
    shape = row_range[1] - row_range[0], col_range[1] - col_range[0]
    if out is None:
        out = np.empty(shape, dtype)
    elif out.shape != shape or out.dtype != dtype:
        raise UsageError(f"out is {out.shape} {out.dtype}; this part is {shape} {dtype}")
    if out.size:
        _fill(matrix, out, row_range, col_range, threads)
    return out


def _fill(
    matrix: _Matrix,
    out: np.ndarray,
    row_range: tuple[int, int],
    col_range: tuple[int, int],
    threads: int,
) -> None:
    """Fills `out` with a part of the matrix; the threads take its tiles in turn."""
    (top, bottom), (left, right) = row_range, col_range
    tiles = [
        (i, j)
        for i in range(top // TILE, -(-bottom // TILE))
        for j in range(left // TILE, -(-right // TILE))
    ]
    stop = threading.Event()

    def work(mine: Iterable[tuple[int, int]]) -> None:
        for i, j in mine:
            if stop.is_set():
                return
            y, x = i * TILE, j * TILE
            # Rows below the part are the end of the tile's stream, and need not be made.
            tile = matrix.tile(i, j, min(TILE, bottom - y))
            y0, x0, x1 = max(y, top), max(x, left), min(x + TILE, right)
            out[y0 - top : y + len(tile) - top, x0 - left : x1 - left] = tile[
                y0 - y :, x0 - x : x1 - x
            ]

    if threads == 1:
        work(tiles)
        return
    with ThreadPoolExecutor(threads) as pool:  # NumPy fills outside the interpreter lock
        try:
            list(pool.map(work, (tiles[first::threads] for first in range(threads))))
        finally:
            stop.set()  # after an interrupt the threads finish the tiles they have begun


@dataclass(frozen=True)
class _Matrix:
    """A whole random matrix, of which `generate` makes a part."""

    rows: int
    cols: int
    dtype: np.dtype
    seed: int
    operand: str
    fill: str

    def check(self, row_range: tuple[int, int], col_range: tuple[int, int]) -> None:
        """Raises `UsageError` if there is no such matrix, or no such part of it."""
        rows, cols = self.rows, self.cols
        if rows < 0 or cols < 0:
            raise UsageError(f"a matrix of {rows} x {cols} is not possible; sizes are 0 or more")
        if self.dtype.name not in GENERATED_DTYPES:
            known = ", ".join(GENERATED_DTYPES)
            raise UsageError(f"cannot generate {self.dtype}; there are {known}")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed={self.seed}; it must be in 0..2^64-1")
        if self.operand not in ("A", "B", "C"):
            raise UsageError(f"operand={self.operand!r}; there are A, B and C")
        if self.fill not in FILLS:
            raise UsageError(f"fill={self.fill!r}; there are {', '.join(FILLS)}")
        for name, (start, stop), size in (("rows", row_range, rows), ("columns", col_range, cols)):
            if not 0 <= start <= stop <= size:
                raise UsageError(f"{name} {start} to {stop} are no range within 0 to {size}")

    def tile(self, i: int, j: int, rows: int) -> np.ndarray:
        """The first `rows` rows of tile (i, j), in the dtype that the numbers are drawn in."""
        cols = min(TILE, self.cols - j * TILE)
        if self.dtype.kind == "c":
            part = self.dtype.type().real.dtype
            made = self._numbers(i, j, (rows, 2 * cols), part)
            return made.astype(part, copy=False).view(self.dtype)
        return self._numbers(i, j, (rows, cols), self.dtype)

    def _numbers(self, i: int, j: int, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
        key = np.array([self.seed, ord(self.operand)], np.uint64)
        random = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, j, i]))
        if self.fill == "integers" or dtype.kind == "i":
            return random.integers(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape, np.int8)
        made = np.float64 if dtype == np.float64 else np.float32
        if self.fill == "normal":
            return random.standard_normal(shape, made)
        return random.random(shape, made)
