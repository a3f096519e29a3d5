"""Matrices made from a seed, the same on any number of threads or ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..errors import UsageError

TILE = 256
FILLS = ("normal", "uniform", "integers")
LARGEST_INTEGER = 4  # products of at most 16: float32 sums stay exact up to k = 2^24 / 16 = 2^20
GENERATED_DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


def generate(
    rows: int,
    cols: int,
    dtype="float32",
    *,
    seed: int,
    operand: str,
    fill: str = "normal",
    row_range: tuple[int, int] | None = None,
    col_range: tuple[int, int] | None = None,
    out: np.ndarray | None = None,
    threads: int = 1,
) -> np.ndarray:
    """Rows `row_range` and columns `col_range` of a `rows` x `cols` random matrix.

    The matrix is a fixed function of `seed`, `operand` ("A", "B" or "C"), `fill`, `dtype` and
    `cols`: the same whatever part is asked for, in however many threads. It is cut into tiles
    of 256 x 256 (less at the right edge); tile (i, j) is filled along its rows by NumPy's
    `Generator(Philox(key=[seed, ord(operand)], counter=[0, 0, j, i]))`.

    Fills: "normal" is the standard normal; "uniform" is [0, 1); "integers" is whole numbers
    in -4..4, equal in every dtype, whose float32 products are exact for k up to 2^20.
    Integer dtypes get "integers" whatever `fill` says; float16 and bfloat16 are float32 rounded.

    Ranges are (start, stop). Writes into `out` if given (any strides), and returns it.
    Raises `UsageError` for a bad argument.
    """
    dtype = np.dtype(dtype)
    row_range, col_range = row_range or (0, rows), col_range or (0, cols)
    shape = _check(rows, cols, dtype, seed, operand, fill, row_range, col_range, threads)
    if out is None:
        out = np.empty(shape, dtype)
    elif out.shape != shape or out.dtype != dtype:
        raise UsageError(f"out is {out.shape} {out.dtype}; this part is {shape} {dtype}")
    if out.size == 0:
        return out
    if dtype.kind == "i":
        fill = "integers"
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
            shape = min(TILE, bottom - y), min(TILE, cols - x)
            bits = np.random.Philox(
                key=np.array([seed, ord(operand)], np.uint64), counter=[0, 0, j, i]
            )
            tile = _fill(np.random.Generator(bits), fill, dtype, shape)
            y0, x0, x1 = max(y, top), max(x, left), min(x + TILE, right)
            out[y0 - top : y + shape[0] - top, x0 - left : x1 - left] = tile[
                y0 - y :, x0 - x : x1 - x
            ]

    if threads == 1:
        work(tiles)
        return out
    with ThreadPoolExecutor(threads) as pool:  # NumPy fills outside the interpreter lock
        try:
            list(pool.map(work, (tiles[first::threads] for first in range(threads))))
        finally:
            stop.set()  # an interrupt leaves after the tiles in hand
    return out


def _fill(random: np.random.Generator, fill: str, dtype: np.dtype, shape: tuple[int, int]):
    if fill == "integers":
        return random.integers(-LARGEST_INTEGER, LARGEST_INTEGER + 1, shape, np.int8)
    made = np.float64 if dtype == np.float64 else np.float32
    method = random.standard_normal if fill == "normal" else random.random
    return method(shape, made)


def _check(rows, cols, dtype, seed, operand, fill, row_range, col_range, threads):
    if rows < 0 or cols < 0:
        raise UsageError(f"a matrix of {rows} x {cols} is not possible; sizes are 0 or more")
    if dtype.name not in GENERATED_DTYPES:
        raise UsageError(f"cannot generate {dtype}; there are {', '.join(GENERATED_DTYPES)}")
    if not 0 <= seed < 2**64:
        raise UsageError(f"seed={seed}; it must be in 0..2^64-1")
    if operand not in ("A", "B", "C"):
        raise UsageError(f"operand={operand!r}; there are A, B and C")
    if fill not in FILLS:
        raise UsageError(f"fill={fill!r}; there are {', '.join(FILLS)}")
    if threads < 1:
        raise UsageError(f"threads={threads}; it must be at least 1")
    for name, (start, stop), size in (("rows", row_range, rows), ("columns", col_range, cols)):
        if not 0 <= start <= stop <= size:
            raise UsageError(f"{name} {start} to {stop} are not within 0 to {size}")
    return row_range[1] - row_range[0], col_range[1] - col_range[0]
