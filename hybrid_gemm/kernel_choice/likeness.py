"""Shapes as points, and how alike times at two of them are expected to be. Pure."""

from __future__ import annotations

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
_NEAR, _NEAR_DIFFERS = 1.0, 0.3  # and the same of the neighbours by which the error is judged.
# The first of these for a library whose launches are known, and what another kernel adds.
_LIBRARY = (17.8, 0.071, 0.05)
_KERNEL_DIFFERS, LIBRARY_NOISE = 0.06, 0.005
# What the weights of a model are of: by another likeness they would predict other times.
CONSTANTS = [_LENGTH, _DIFFERS, _OFF, _WIDE, *_LIBRARY, _KERNEL_DIFFERS]


def places(
    sides: Sequence[Sides] | np.ndarray, layouts: Sequence[str] | np.ndarray, dtype: str
) -> np.ndarray:
    """Shapes as points: the logarithms of m, n and k; what is so or not so of each: A and B
    transposed, C a row or a column; and how often 16 bytes are halved until the rows of A, B and C
    begin on so many, and, which counts less, how often 128 are."""
    m, n, k = shape = np.array(sides, np.int64).reshape(-1, 3).T
    a, b = (np.array([x[i] == "t" for x in layouts], bool) for i in (0, 1))
    lines = np.where(a, m, k), np.where(b, k, n), n
    off = [_halved(16, x) + _WIDE * _halved(128, x) for x in (x * ITEM_SIZE[dtype] for x in lines)]
    return np.stack([*np.log2(np.maximum(1, shape)), a, b, m == 1, n == 1, *off], 1)


def _halved(whole: int, lengths: np.ndarray) -> np.ndarray:
    """How often so many bytes, a power of two, are halved until they divide each length."""
    return np.log2(whole // np.gcd(whole, lengths))


def likeness(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How alike the times at two shapes are expected to be: 1 for equal places, less for others."""
    known = Compared(others)
    return np.array([known.likeness(at) for at in some], float)


def nearness(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """As `likeness`, for errors: of shapes close by."""
    known = Compared(others)
    return np.array([known.nearness(at) for at in some], float)


def library_likeness(
    some: tuple[np.ndarray, np.ndarray], others: tuple[np.ndarray, np.ndarray]
) -> np.ndarray:
    """As `likeness`, for a library: of places that go on with coordinates of launches, and of the
    kernels' numbers."""
    known = Compared(others[0])
    alike = zip(*some, strict=True)
    return np.array([known.library_likeness(at, kernel, others[1]) for at, kernel in alike], float)


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
        self._kinds, self._of = kinds, of.reshape(-1)

    def likeness(self, at: np.ndarray) -> np.ndarray:
        """As the function, of one place and each of these."""
        return _decreasing(self._apart(at, _LENGTH, _DIFFERS, _OFF))

    def nearness(self, at: np.ndarray) -> np.ndarray:
        """As the function, of one place and each of these."""
        return _decreasing(self._apart(at, _NEAR, _NEAR_DIFFERS, _NEAR_DIFFERS))

    def library_likeness(self, at: np.ndarray, kernel: int, kernels: np.ndarray) -> np.ndarray:
        """As the function, of one place and each of these."""
        apart = self._apart(at, *_LIBRARY)
        apart += np.float32(_KERNEL_DIFFERS) * (kernels != kernel)
        return _decreasing(apart)

    def _apart(self, at: np.ndarray, length: float, differs: float, off: float) -> np.ndarray:
        """Distances; coordinates beyond those of `places` count as they are."""
        at32 = at.astype(np.float32)
        far = _squares(self._sides, at32[:SIDES])
        far *= np.float32(1 / length**2)
        if len(at) > _PLACE:
            far += _squares(self._beyond, at32[_PLACE:])
        kinds = np.abs(self._kinds - at[SIDES:_PLACE])
        flags = _FLAGS - SIDES
        more = differs * kinds[:, :flags].sum(1) + off * kinds[:, flags:].sum(1)
        np.sqrt(far, out=far)
        far += more.astype(np.float32)[self._of]
        return far


def _squares(of: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The squares of the distances of points, each a column, from one point."""
    apart = of - at[:, None]
    apart *= apart
    return apart.sum(0)


def _decreasing(apart: np.ndarray) -> np.ndarray:
    """e^-apart, made there."""
    np.negative(apart, out=apart)
    return np.exp(apart, out=apart)


# Where in `places` the sides end, what is so or not so, and all.
SIDES, _FLAGS, _PLACE = 3, 7, 10
