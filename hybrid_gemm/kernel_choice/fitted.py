"""How long each kernel should take for a shape, from a model that was fitted to measured times.

A time is what its counts cost (`costs.py`), each times a constant, corrected by how far that was
off at the measured shapes, the more by the nearer ones (kriging). Where it was off by much nearby,
the prediction is known to be poor: a kernel of ours is taken before a library only where the lead
that is predicted is larger than that error. Where that is in doubt, the library's time is predicted
again from the shapes where it launched alike (`library_kernels.py`). Models lie in files
(`model_files.py`).
`bench/fitting.py` makes models; docs/performance.md says what the choice gave at shapes that no
model was fitted to. Pure.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from ..catalog import ITEM_SIZE, Variant
from . import costs, library_kernels, reach
from .costs import Sides, adding_us
from .library_kernels import Launched
from .likeness import SIDES, Compared, place, places
from .side_by_side import SideBySide
from .tables import Machine

# Of what operands hold in each mode (`mode`); float16 stands for bfloat16 too.
OPERANDS = {
    "float32": "float32", "float64": "float64", "int32": "int32", "float16": "float16",
    "tf32": "float32", "fp32x3": "float32",
}  # fmt: skip
# How many times the error nearby a kernel of ours leads a library by (docs/notes/choosing.md).
LEAD = 1.5
LINE_LEAD = 1.0  # Of one row or column, where ours are faster at most shapes.
LEAST_US = 1.0  # that a count costs, before it is corrected
_COLUMNS = 8192  # of a sum that BLAS leaves to one thread
BEYOND = 2.5  # times longer, or shorter, than all measured sides: there nothing is known


@dataclass(frozen=True)
class Fitted:
    """One variant: microseconds of each of its counts, weights of the measured shapes, and for
    which products the constants were fitted (`reach.of`; of a library zeros)."""

    variant: Variant
    constants: np.ndarray
    mean: float
    weights: np.ndarray
    reach: np.ndarray

    def cost_us(self, sides: Sides, layout: str, dtype: str, multiprocessors: int) -> float:
        """What the counts of a product cost, which the weights correct."""
        counted = costs.counts(self.variant, sides, layout, dtype, multiprocessors)
        return max(LEAST_US, sum(map(operator.mul, self._constants, counted)))

    @functools.cached_property
    def _constants(self) -> list[float]:
        return self.constants.tolist()


@dataclass(frozen=True)
class FittedLibrary:
    """A library by what it launches: the shapes at which that and its time were measured, as
    places with coordinates of launches; which of `kernels` it launched there; and as in `Fitted`
    and `Model` the rest."""

    kernels: tuple[str, ...]
    places: np.ndarray
    of: np.ndarray  # each shape's kernel, by its place in `kernels`
    fitted: Fitted
    errors: np.ndarray

    def expected(
        self, at: np.ndarray, sides: Sides, layout: str, dtype: str, launched: Launched,
        processors: int,
    ) -> tuple[float, float]:  # fmt: skip
        """The predicted time in microseconds of a product that is launched so, whose shape is the
        point `at`, and by how much, as a share, that is expected to be wrong."""
        beside = library_kernels.coordinates([launched], [sides], processors)[0]
        kernel = self.kernels.index(launched.kernel) if launched.kernel in self.kernels else -1
        alike, near = self._compared.of_library(np.concatenate([at, beside]), kernel, self.of)
        (off,), (error,) = dots(self.fitted.weights[None], alike.astype(float)), self._errors(near)
        us = self.fitted.cost_us(sides, layout, dtype, processors)
        return us * math.exp(self.fitted.mean + off), error

    @functools.cached_property
    def _compared(self) -> Compared:
        return Compared(self.places)

    @functools.cached_property
    def _errors(self) -> Errors:
        return Errors(self.errors[None])


def library_places(
    sides: Sequence[Sides] | np.ndarray, layouts: Sequence[str] | np.ndarray,
    launched: Sequence[Launched], dtype: str, processors: int,
) -> np.ndarray:  # fmt: skip
    """As `places`, with coordinates of what a library launches."""
    beside = library_kernels.coordinates(launched, list(map(tuple, sides)), processors)
    return np.concatenate([places(sides, layouts, dtype), beside], 1)


def dots(rows: np.ndarray, x: np.ndarray) -> np.ndarray:
    """rows @ x, a row and some columns at a time: for more, BLAS starts threads, for which such a
    sum is too short."""
    made = np.matmul(rows[:, None, :_COLUMNS], x[:_COLUMNS, None])
    for i in range(_COLUMNS, len(x), _COLUMNS):
        made += np.matmul(rows[:, None, i : i + _COLUMNS], x[i : i + _COLUMNS, None])
    return made[:, 0, 0]


@dataclass(frozen=True)
class Model:
    """What is known of a GPU in one mode. `errors` are those of predictions at each measured shape
    that were made without it, as shares: of the library's time and of our fastest kernel's; NaN
    where one was not measured.
    `lent` names another GPU on which the times were measured."""

    mode: str
    places: np.ndarray
    fitted: tuple[Fitted, ...]
    errors: np.ndarray
    read_library: Callable[[], FittedLibrary] | None = None
    processors: int = 0
    lent: str = ""

    def lead(self, sides: Sides) -> float:
        """How many errors a kernel of ours has to lead by: twice as many on another GPU."""
        return lead_of(sides) * (2 if self.lent else 1)

    @functools.cached_property
    def library(self) -> FittedLibrary | None:
        """The library by what it launches, which not every choice asks for."""
        return self.read_library() if self.read_library else None

    def times_us(
        self, sides: Sides, layout: str, machine: Machine, launched: Launched | None = None, *,
        among: Collection[Variant] | None = None, adds: bool = False, within: float = math.inf,
    ) -> dict[Variant, float]:  # fmt: skip
        """The predicted time of every variant that can multiply the shape, or of those `among`
        these, in microseconds; that of the library by what it launches, if that is known. `adds`:
        of products that read C, which beta scales. Of ours only those that take so many times as
        long as the fastest, or less, if `within` is given. Far from the products at which a variant
        was timed it is longer by the error, which grows with the distance."""
        processors = machine.multiprocessors
        times, able, near = self._times_us(sides, layout, processors)
        if launched and self.library:
            us, _error = self._launching(sides, layout, launched, processors)
            times = np.where(self._ours, times, us)
        if adds:
            times = times + self._adding_us * (sides[0] * sides[1])
        if self.lent and machine.memory_gbps:
            times = _through_memory(times, sides, OPERANDS[self.mode], machine.memory_gbps, adds)
        if among is not None:
            taken = able & [x in among for x in self._side_by_side.variants]
        else:
            taken = near if (near & self._ours).any() else able
        if within < math.inf:
            most = within * times[taken & self._ours].min()
            taken = taken & ((times <= most) | ~self._ours)
        listed = self._side_by_side.variants
        return {listed[i]: float(times[i]) for i in taken.nonzero()[0].tolist()}

    @functools.cached_property
    def _times_us(self) -> Callable[[Sides, str, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """The same of all variants without what a library launches, which is often asked for next;
        which of them can multiply the shape, and which of these were timed near so long sides, so
        that the time means something."""
        dtype = OPERANDS[self.mode]

        @functools.lru_cache(maxsize=16)
        def times(
            sides: Sides, layout: str, processors: int
        ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            at, alike, (_theirs, error) = self._compared_with(sides, layout)
            able = self._side_by_side.take(sides, dtype)
            us = np.full(len(able), math.inf)
            for kind in self._kinds:
                if able[kind.at].any():
                    us[kind.at] = kind.times_us(alike, error, sides, layout, dtype, processors)
            (least, most), logs = self._timed, at[:SIDES, None]
            return us, able, able & ((least <= logs) & (logs <= most)).all(0)

        return times

    @functools.cached_property
    def _compared_with(self) -> Callable[[Sides, str], tuple[np.ndarray, np.ndarray, list[float]]]:
        """A shape as a point, how alike the measured shapes are to it, and by how much, as shares,
        the library's time and ours are expected to be wrong there."""
        compared, errors = Compared(self.places), Errors(self.errors)

        @functools.lru_cache(maxsize=16)
        def with_shape(sides: Sides, layout: str) -> tuple[np.ndarray, np.ndarray, list[float]]:
            at = place(sides, layout, OPERANDS[self.mode])
            alike, near = compared.both(at)
            return at, alike, errors(near)

        return with_shape

    @functools.cached_property
    def _launching(self) -> Callable[[Sides, str, Launched, int], tuple[float, float]]:
        """As `FittedLibrary.expected`, which is asked for twice."""

        @functools.lru_cache(maxsize=16)
        def expected(
            sides: Sides, layout: str, launched: Launched, processors: int
        ) -> tuple[float, float]:
            assert self.library
            at, dtype = self._compared_with(sides, layout)[0], OPERANDS[self.mode]
            return self.library.expected(at, sides, layout, dtype, launched, processors)

        return expected

    def errors_at(
        self, sides: Sides, layout: str, launched: Launched | None = None
    ) -> tuple[float, float]:
        """By how much, as shares, the library's time and ours are expected to be wrong at a shape;
        infinite where it is far longer than all that were measured."""
        if not self.knows(sides):
            return math.inf, math.inf
        library, ours = self._compared_with(sides, layout)[-1]
        if launched and self.library:
            _us, library = self._launching(sides, layout, launched, self.processors)
        return library, ours

    def knows(self, sides: Sides) -> bool:
        """Whether a prediction means something: no side is far longer than all that were
        measured."""
        return all(map(operator.le, sides, self._longest))

    @functools.cached_property
    def _longest(self) -> list[float]:
        return (BEYOND * np.exp2(self.places[:, :SIDES].max(0))).tolist()

    @functools.cached_property
    def _ours(self) -> np.ndarray:
        """Which variants are not the library's."""
        return np.array([not v.kernel.library for v in self._side_by_side.variants])

    @functools.cached_property
    def _adding_us(self) -> np.ndarray:
        """What adding to an element of C takes each variant longer."""
        size = ITEM_SIZE[OPERANDS[self.mode]]
        return np.array([adding_us(v, (1, 1, 1), size) for v in self._side_by_side.variants])

    @functools.cached_property
    def _timed(self) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of the least and the most of each side where a variant was timed nearby: a row
        for each side, and a column for each variant."""
        sides = self.places[:, :SIDES]
        weights = [x.weights for kind in self._kinds for x in kind.fitted]
        timed = [sides[x != 0] if x.any() else sides for x in weights]
        least, most = (np.array([of(x, 0) for x in timed]).T for of in (np.min, np.max))
        return least - math.log2(BEYOND), most + math.log2(BEYOND)

    @functools.cached_property
    def _kinds(self) -> list[Kind]:
        """The variants that are counted alike."""
        kinds: dict[Hashable, list[Fitted]] = {}
        for x in self.fitted:
            kinds.setdefault(costs.alike(x.variant), []).append(x)
        found: list[Kind] = []
        for fitted in kinds.values():
            found.append(Kind.of(fitted, found[-1].at.stop if found else 0))
        return found

    @functools.cached_property
    def _side_by_side(self) -> SideBySide:
        """All variants, in the order of `_kinds`."""
        return SideBySide([x.variant for kind in self._kinds for x in kind.fitted])


@dataclass(frozen=True)
class Kind:
    """The variants of a model that are counted alike, and where they are among all, with their
    weights of the shapes at which one of them was timed: of kernels with limits those are few."""

    at: slice
    fitted: Sequence[Fitted]
    variants: SideBySide
    means: np.ndarray
    weights: np.ndarray  # (variants, shapes)
    shapes: np.ndarray | slice
    constants: np.ndarray  # (counts, variants)
    reaches: np.ndarray | None  # of a library none

    @classmethod
    def of(cls, fitted: Sequence[Fitted], start: int) -> Kind:
        weights = np.array([x.weights for x in fitted], np.float32)
        timed = weights.any(0)
        shapes = slice(None) if timed.mean() > 0.5 else np.flatnonzero(timed)
        reaches = np.array([x.reach for x in fitted], float)
        return cls(
            slice(start, start + len(fitted)), fitted, SideBySide([x.variant for x in fitted]),
            np.array([x.mean for x in fitted]), np.ascontiguousarray(weights[:, shapes]), shapes,
            np.array([x.constants for x in fitted]).T, reaches if reaches.any() else None,
        )  # fmt: skip

    def times_us(
        self, alike: np.ndarray, error: float, sides: Sides, layout: str, dtype: str,
        processors: int,
    ) -> np.ndarray:  # fmt: skip
        """The times for a shape that is so much like the measured ones: what the counts cost,
        corrected by the weights, and longer by the error where it is far from the shapes at which a
        variant was timed (`reach.distances`)."""
        counted = costs.counts_of(self.variants, sides, layout, dtype, processors)
        us = np.maximum(LEAST_US, (counted * self.constants).sum(0))
        off = self.means + dots(self.weights, alike[self.shapes])
        if self.reaches is not None:
            off += error * (reach.distances((counted / us).T, self.reaches) - 1)
        return us * np.exp(off)


class Errors:
    """The errors that are expected at a place so near to the measured ones, by rows of errors at
    those, each where they are known."""

    def __init__(self, errors: np.ndarray) -> None:
        known = np.isfinite(errors)
        both = np.concatenate([np.where(known, errors, 0) ** 2, known])
        self._of_near, self._of_all = both.astype(np.float32), 1e-9 * both.sum(1)

    def __call__(self, near: np.ndarray) -> list[float]:
        squares, known = (dots(self._of_near, near) + self._of_all).reshape(2, -1)
        return np.sqrt(squares / known).tolist()


def _through_memory(
    times: np.ndarray, sides: Sides, dtype: str, memory_gbps: float, adds: bool
) -> np.ndarray:
    """Times of another GPU in microseconds, none below what A, B and C take through the memory of
    this one; those that are keep their order."""
    m, n, k = sides
    moved = (m * k + k * n + (1 + adds) * m * n) * ITEM_SIZE[dtype]
    return np.maximum(times, moved / (memory_gbps * 1e3) + 1e-6 * times)


def lead_of(sides: Sides) -> float:
    """How many times the error nearby a kernel of ours has to lead a library by."""
    return LINE_LEAD if 1 in sides[:2] else LEAD
