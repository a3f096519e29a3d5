"""What is checked: a part of C, its blocks, the random vectors and the sampled rows and columns.

A part is a strip of a block of C. Several ranks may each have some of the block's k; a `Group`
adds what they find. Alone, the strip is all of C, and the group is one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from ..arrays.caller_arrays import module_of
from ..problem import NARROW, Problem

BLOCKS = 32  # random vectors, of columns, and of rows, each over one block
ONE_IN = 32  # rows or columns of few that are checked in full, where A and B together are LARGE
LARGE = 2**22  # elements: what each row and column takes is some ms from there on
CLASSES = 16  # rows next to each other are summed with different weights of the columns
CHUNK = {True: 2**18, False: 2**25}  # elements in float64 at a time: of a host's thread, on a GPU


@dataclasses.dataclass
class Part:
    """`a` (rows of the block x own k), `b` (own k x columns of the block), and of the strip that
    begins at `top`, `left` of the block C before (`c_in`) and after (`result`). Strips of the
    block begin at `row_edges` and `col_edges`; the block begins at `origin` of C.

    Of a complex product (`complex_parts`), `interleaved`: rows are real and imaginary parts.
    `alpha_rounds` is the relative error that a complex alpha leaves in each product of elements,
    and `c_size` the magnitudes by which a complex beta rounds C. Where an Inf `mixes`, other terms
    than the reference's have met it first: which of Inf and NaN there is, is not known."""

    problem: Problem
    a: Any
    b: Any
    c_in: Any
    result: Any
    top: int = 0
    left: int = 0
    row_edges: tuple[int, ...] = (0,)
    col_edges: tuple[int, ...] = (0,)
    origin: tuple[int, int] = (0, 0)
    interleaved: bool = False
    alpha_rounds: float = 0.0
    c_size: Any = None
    mixes: bool = False
    is_turned: bool = False

    def __post_init__(self):
        self.xp = self.a.xp if self.interleaved else module_of(self.a)
        self.m, self.n = self.a.shape[0], self.b.shape[1]
        self.k = self.a.shape[1]
        self.height, self.width = self.result.shape
        self.rows = slice(self.top, self.top + self.height)
        self.cols = slice(self.left, self.left + self.width)
        self.chunk = CHUNK[self.xp is np]
        self.side = math.isqrt(self.chunk)
        self.reads_product = self.problem.alpha != 0  # which is 0 where k is

    def turned(self) -> Part:
        """The same as C^T = B^T A^T."""
        return dataclasses.replace(
            self, a=self.b.T, b=self.a.T, c_in=None if self.c_in is None else self.c_in.T,
            result=self.result.T, top=self.left, left=self.top, row_edges=self.col_edges,
            col_edges=self.row_edges, origin=self.origin[::-1], is_turned=not self.is_turned,
            c_size=None if self.c_size is None else self.c_size.T,
        )  # fmt: skip

    def place(self, row: int, col: int) -> str:
        """An element of the block, by its place in C."""
        row, col = row + self.origin[0], col + self.origin[1]
        if self.is_turned:
            row, col = col, row
        if self.interleaved:
            return f"{('Re', 'Im')[row % 2]} C[{row // 2}, {col}]"
        return f"C[{row}, {col}]"

    def own(self, index: np.ndarray, span: slice) -> np.ndarray:
        """Which of these rows or columns of the block are the strip's."""
        return (span.start <= index) & (index < span.stop)


class Group:
    """Those who have the block's k between them; alone, nobody else."""

    color = 0

    def sum(self, array):
        return array

    def largest(self, array):
        return array

    def gather(self, found: list) -> list:
        """The lists of all, one after the other."""
        return found

    def joined(self, vector: np.ndarray) -> np.ndarray:
        """The parts of a vector along k, put together."""
        return vector


ALONE = Group()


@dataclasses.dataclass
class Samples:
    """Rows and columns checked in full, blocks, and where random weights come from."""

    rows: np.ndarray
    cols: np.ndarray
    row_blocks: list[slice]
    col_blocks: list[slice]
    random: np.random.Generator


def draw(part: Part, random: np.random.Generator, count: int) -> Samples:
    whole = part.problem.m, part.problem.n
    sides = list(zip((part.m, part.n), reversed(whole) if part.is_turned else whole, strict=True))
    (m, all_rows), (n, all_cols) = sides
    row_blocks = _blocks(m, part.row_edges, block_width(all_rows))
    col_blocks = _blocks(n, part.col_edges, block_width(all_cols))
    rows, cols = (
        np.sort(random.choice(size, _sampled(part.problem, count, size, of), replace=False))
        for size, of in sides
    )
    return Samples(rows, cols, row_blocks, col_blocks, random)


def weights(random: np.random.Generator, size: int) -> np.ndarray:
    """Random numbers with random signs, so that equal errors do not cancel in a sum."""
    signs = 1 - 2 * random.integers(0, 2, size, dtype=np.int8)
    return signs * random.uniform(1, 2, size)


def of_classes(weights: np.ndarray) -> np.ndarray:
    """Row i is summed with the weights i % CLASSES. These differ in signs alone, by a Hadamard
    matrix: where a tile of CLASSES rows and columns has the same errors in all rows, the squares of
    its sums are together CLASSES times those of the weighted errors of a row, whatever the random
    signs are."""
    signs = np.ones((1, 1))
    while len(signs) < CLASSES:
        signs = np.block([[signs, signs], [signs, -signs]])
    return signs[:, np.arange(len(weights)) % CLASSES] * weights


def block_width(size: int) -> int:
    """Of a block of rows or columns, where C has so many: as many as there are classes, or some
    times as many."""
    return max(1, -(-size // (BLOCKS * CLASSES))) * CLASSES


def _sampled(problem: Problem, count: int, size: int, whole: int) -> int:
    """How many rows or columns of a block are checked in full, where they are some of `whole`: of
    `count` as many as fall to it, and of large A and B no more than one in ONE_IN."""
    most = -(-size // ONE_IN) if (problem.m + problem.n) * problem.k > LARGE else size
    return min(most, -(-count * size // whole)) if count else 0


def _blocks(size: int, edges, width: int) -> list[slice]:
    """Blocks of at most this width, none across an edge."""
    stops = [*edges[1:], size]
    return [
        slice(i, min(i + width, stop))
        for start, stop in zip(edges, stops, strict=True)
        for i in range(start, stop, width)
    ]


def some(mask, axis: int | None = None):
    """Whether any is true: a bool, or along an axis, where 1 stands for true. As a largest number:
    CuPy's `any` and `all` take 3 s to be compiled, each of them twice."""
    if axis is None:
        return bool(mask.size) and bool(mask.view("u1").max())
    return mask.view("u1").max(axis=axis)


def doubles(x):
    """As float64, in row order."""
    return (x.astype("f4") if x.dtype.name in NARROW else x).astype("f8", order="C")


def spans(size: int, step: int):
    """Slices of at most `step`."""
    step = max(1, int(step))
    return [slice(i, min(i + step, size)) for i in range(0, size, step)]


def square_tiles(rows: int, cols: int, side: int):
    """Tiles of at most `side` rows and columns."""
    return itertools.product(spans(rows, side), spans(cols, side))


@dataclasses.dataclass(frozen=True)
class Found:
    worst: float
    how: str
    power: str
    where: str = ""
