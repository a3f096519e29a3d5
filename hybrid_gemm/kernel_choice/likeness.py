"""Shapes as points, and how alike times at two of them are expected to be. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ..catalog import ITEM_SIZE
from .costs import Sides

# By cross-validation over the fitted shapes (docs/notes/choosing.md), the same for all modes:
# the distance, in factors of two, at which a measured shape counts 1/e of one that is the same,
_LENGTH = 12.0
_DIFFERS, _OFF = 0.3, 0.08  # what a layout, or half an alignment, that differs adds to it,
_WIDE = 0.2  # how much of that half an alignment of more than 16 bytes counts,
NOISE = 0.1  # the variance that no neighbour explains, as a share of all,
_NEAR_DIFFERS = 0.3  # and what differs adds where errors are judged, within factors of 2.
# The first of these for a library whose launches are known, and what another kernel adds.
_LIBRARY = (17.8, 0.071, 0.05)
_KERNEL_DIFFERS, LIBRARY_NOISE = 0.06, 0.005
_COUNTS = 2.0  # which form of the counts (costs.py) it is; the next one has the next number
# What the weights of a model are of: by another likeness or other counts they would predict other
# times.
CONSTANTS = [_LENGTH, _DIFFERS, _OFF, _WIDE, *_LIBRARY, _KERNEL_DIFFERS, _COUNTS]


def places(
    sides: Sequence[Sides] | np.ndarray, layouts: Sequence[str] | np.ndarray, dtype: str
) -> np.ndarray:
    """Shapes as points: the logarithms of m, n and k; what is so or not so of each: A and B
    transposed, C a row or a column; and how often 16 bytes are halved until the rows of A, B and C
    begin on so many, and, which counts less, how often 128 are."""
    m, n, k = shape = np.array(sides, np.int64).reshape(-1, 3).T
    a, b = np.array([(x[0] == "t", x[1] == "t") for x in layouts], bool).reshape(-1, 2).T
    lines = np.array([np.where(a, m, k), np.where(b, k, n), n]) * ITEM_SIZE[dtype]
    made = np.empty((len(m), _PLACE))
    made[:, :SIDES] = np.log2(np.maximum(1, shape)).T
    made[:, SIDES:_FLAGS] = np.array([a, b, m == 1, n == 1]).T
    on = np.log2(np.gcd(128, lines))  # bytes that divide a line, as a power of two
    made[:, _FLAGS:] = (np.maximum(0, 4 - on) + _WIDE * (7 - on)).T
    return made


@functools.lru_cache(maxsize=16)  # models of two modes may be asked about a shape
def place(sides: Sides, layout: str, dtype: str) -> np.ndarray:
    """One shape as a point."""
    return places([sides], [layout], dtype)[0]


def likeness(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How alike the times at two shapes are expected to be: 1 for equal places, less for others."""
    known = Compared(others)
    return np.array([known.both(at)[0] for at in some], float)


def nearness(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """As `likeness`, for errors: of shapes close by."""
    known = Compared(others)
    return np.array([known.both(at)[1] for at in some], float)


def library_likeness(
    some: tuple[np.ndarray, np.ndarray], others: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """As `likeness`, for a library: of places that go on with coordinates of launches, and of the
    kernels' numbers."""
    known = Compared(others[0])
    alike = zip(*some, strict=True)
    return np.array([known.of_library(at, kernel, others[1])[0] for at, kernel in alike], float)


class Compared:
    """Places with which one place is compared at a time, coordinate by coordinate and in float32.
    Those of `places` that tell kinds of shapes apart have few values together, which are compared
    once."""

    def __init__(self, all_places: np.ndarray) -> None:
        self._sides, self._beyond = (
            np.ascontiguousarray(all_places[:, of].T, np.float32)
            for of in (slice(SIDES), slice(_PLACE, None))
        )
        kinds, of = np.unique(all_places[:, SIDES:_PLACE], axis=0, return_inverse=True)
        self._kinds, self._of = np.ascontiguousarray(kinds.T), of.reshape(-1)

    def both(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`likeness` and `nearness`, as the functions, of one place and each of these."""
        squares, kinds = self._sides_apart(at), self._kinds_apart(at)
        alike = self._decreasing(squares * np.float32(1 / _LENGTH**2), kinds, _DIFFERS, _OFF)
        return alike, self._nearness(squares, kinds)

    def of_library(
        self, at: np.ndarray, kernel: int, kernels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """`library_likeness`, as the function, and `nearness`, of one place and each of these."""
        squares, kinds = self._sides_apart(at), self._kinds_apart(at)
        length, differs, off = _LIBRARY
        far = squares * np.float32(1 / length**2)
        far += _squares(self._beyond, at[_PLACE:])
        differing = np.float32(_KERNEL_DIFFERS) * (kernels != kernel)
        alike = self._decreasing(far, kinds, differs, off, differing)
        return alike, self._nearness(squares, kinds)

    def _nearness(self, squares: np.ndarray, kinds: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return self._decreasing(squares, kinds, _NEAR_DIFFERS, _NEAR_DIFFERS)

    def _sides_apart(self, at: np.ndarray) -> np.ndarray:
        return _squares(self._sides, at[:SIDES])

    def _kinds_apart(self, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By how much each kind of shapes differs in what is so or not so, and in alignment."""
        apart = np.abs(self._kinds - at[SIDES:_PLACE, None])
        flags = _FLAGS - SIDES
        return apart[:flags].sum(0), apart[flags:].sum(0)

    def _decreasing(
        self, squares: np.ndarray, kinds: tuple[np.ndarray, np.ndarray], differs: float, off: float,
        more: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        """e^-distance; `squares` are overwritten."""
        near = np.negative(differs * kinds[0] + off * kinds[1]).astype(np.float32).take(self._of)
        near -= np.sqrt(squares, out=squares)
        if more is not None:
            near -= more
        return np.exp(near, out=near)


def _squares(of: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The squares of the distances of points, each a column, from one point."""
    made = np.zeros(of.shape[1], np.float32)
    apart = np.empty_like(made)  # in the first cache, where all coordinates at once would not be
    for line, x in zip(of, at.astype(np.float32), strict=True):
        np.subtract(line, x, out=apart)
        made += np.multiply(apart, apart, out=apart)
    return made


# Where in `places` the sides end, what is so or not so, and all.
SIDES, _FLAGS, _PLACE = 3, 7, 10
