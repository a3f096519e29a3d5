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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..catalog import ITEM_SIZE, Variant
from . import costs, library_kernels, reach
from .costs import Sides, adding_us
from .library_kernels import Launched
from .likeness import SIDES, Compared, places
from .tables import Machine

# Of what operands hold in each mode (`mode`); float16 stands for bfloat16 too.
OPERANDS = {
    "float32": "float32", "float64": "float64", "int32": "int32", "float16": "float16",
    "tf32": "float32", "fp32x3": "float32",
}  # fmt: skip
# How many times the error nearby a kernel of ours leads a library by (docs/notes/choosing.md).
LEAD = 1.5
LINE_LEAD = 1.0  # Of one row or column too, where ours are faster at nine shapes of ten.
LEAST_US = 1.0  # that a count costs, before it is corrected
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

    def us(
        self, sides: Sides, layout: str, dtype: str, launched: Launched, processors: int
    ) -> float:
        """The predicted time of a product that is launched so, in microseconds."""
        at = library_places([sides], [layout], [launched], dtype, processors)[0]
        kernel = self.kernels.index(launched.kernel) if launched.kernel in self.kernels else -1
        alike = self.compared.library_likeness(at, kernel, self.of)
        off = math.exp(self.fitted.mean + float(alike @ self.fitted.weights))
        return self.fitted.cost_us(sides, layout, dtype, processors) * off

    @functools.cached_property
    def compared(self) -> Compared:
        """The places, to be compared with others."""
        return Compared(self.places)

    @functools.cached_property
    def known_errors(self) -> Errors:
        """What is expected by its errors."""
        return Errors(self.errors)


def library_places(
    sides: Sequence[Sides] | np.ndarray, layouts: Sequence[str] | np.ndarray,
    launched: Sequence[Launched], dtype: str, processors: int,
) -> np.ndarray:  # fmt: skip
    """As `places`, with coordinates of what a library launches."""
    beside = library_kernels.coordinates(launched, list(map(tuple, sides)), processors)
    return np.hstack([places(sides, layouts, dtype), beside])


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
        among: Collection[Variant] | None = None, adds: bool = False,
    ) -> dict[Variant, float]:  # fmt: skip
        """The predicted time of every variant that can multiply the shape, or of those `among`
        these, in microseconds; that of the library by what it launches, if that is known. `adds`:
        of products that read C, which beta scales. Far from the products at which a variant was
        timed it is longer by the error, which grows with the distance."""
        processors = machine.multiprocessors
        found = dict(self._times_us(sides, layout, processors, among and frozenset(among)))
        if launched and self.library:
            us = self.library.us(sides, layout, OPERANDS[self.mode], launched, processors)
            found[self.library.fitted.variant] = us
        if adds:
            size = ITEM_SIZE[OPERANDS[self.mode]]
            found = {v: us + adding_us(v, sides, size) for v, us in found.items()}
        return found

    @functools.cached_property
    def _times_us(self) -> Callable[..., dict[Variant, float]]:
        """The same without what a library launches, which is often asked for next."""

        @functools.lru_cache(maxsize=16)
        def times(
            sides: Sides, layout: str, processors: int, among: frozenset[Variant] | None
        ) -> dict[Variant, float]:
            dtype = OPERANDS[self.mode]
            alike = self._compared.likeness(self._place(sides, layout))
            logs = np.log2(np.maximum(1, sides))
            error = self._our_errors(self._near(sides, layout))
            found: dict[Variant, float] = {}
            far: dict[Variant, float] = {}  # from all shapes at which they were timed
            for group in self._by_kernel:
                able = [
                    i for i, x in enumerate(group.fitted)
                    if (among is None or x.variant in among) and x.variant.takes(*sides, dtype)
                ]  # fmt: skip
                if not able:
                    continue
                offs, near = group.offs(alike), group.near(logs)
                costs_us, distances = group.costs_us(able, sides, layout, dtype, processors)
                for i, us, distance in zip(able, costs_us, distances, strict=True):
                    to = found if near[i] or among is not None else far
                    longer = math.exp(error * (distance - 1))
                    to[group.fitted[i].variant] = us * offs[i] * longer
            return found | far if all(v.kernel.library for v in found) else found

        return times

    def errors_at(
        self, sides: Sides, layout: str, launched: Launched | None = None
    ) -> tuple[float, float]:
        """By how much, as shares, the library's time and ours are expected to be wrong at a shape;
        infinite where it is far longer than all that were measured."""
        if not self.knows(sides):
            return math.inf, math.inf
        near = self._near(sides, layout)
        if not (launched and self.library):
            return self._their_errors(near), self._our_errors(near)
        launched_near = self.library.compared.nearness(self._place(sides, layout))
        return self.library.known_errors(launched_near), self._our_errors(near)

    def knows(self, sides: Sides) -> bool:
        """Whether a prediction means something: no side is far longer than all that were
        measured."""
        return all(map(operator.le, sides, self._longest))

    @functools.cached_property
    def _longest(self) -> list[float]:
        return (BEYOND * np.exp2(self.places[:, :SIDES].max(0))).tolist()

    @functools.cached_property
    def _their_errors(self) -> Errors:
        return Errors(self.errors[0])

    @functools.cached_property
    def _our_errors(self) -> Errors:
        return Errors(self.errors[1])

    @functools.cached_property
    def _place(self) -> Callable[[Sides, str], np.ndarray]:
        """A shape as a point."""
        return functools.lru_cache(maxsize=16)(
            lambda sides, layout: places([sides], [layout], OPERANDS[self.mode])[0]
        )

    @functools.cached_property
    def _near(self) -> Callable[[Sides, str], np.ndarray]:
        """How near the measured shapes are to one."""
        return functools.lru_cache(maxsize=16)(
            lambda sides, layout: self._compared.nearness(self._place(sides, layout))
        )

    @functools.cached_property
    def _compared(self) -> Compared:
        return Compared(self.places)

    @functools.cached_property
    def _by_kernel(self) -> list[OfKernel]:
        """The variants of each kernel."""
        names = dict.fromkeys(x.variant.name for x in self.fitted)
        sides = self.places[:, :SIDES]
        return [
            OfKernel.of([x for x in self.fitted if x.variant.name == name], sides) for name in names
        ]


@dataclass(frozen=True)
class OfKernel:
    """The variants of a kernel, with their weights of the shapes at which one of them was timed: of
    a kernel with limits those are few. And logarithms of the least and the most of each side of a
    shape where what is predicted of a variant means something."""

    fitted: Sequence[Fitted]
    means: np.ndarray
    weights: np.ndarray
    shapes: np.ndarray
    least: np.ndarray
    most: np.ndarray
    constants: np.ndarray
    reaches: np.ndarray

    @classmethod
    def of(cls, fitted: Sequence[Fitted], sides: np.ndarray) -> OfKernel:
        weights = np.array([x.weights for x in fitted], np.float32)
        shapes = np.flatnonzero(weights.any(0))
        timed = [sides[x != 0] if x.any() else sides for x in weights]
        return cls(
            fitted, np.array([x.mean for x in fitted]), weights[:, shapes], shapes,
            np.array([x.min(0) for x in timed]) - math.log2(BEYOND),
            np.array([x.max(0) for x in timed]) + math.log2(BEYOND),
            np.array([x.constants for x in fitted]), np.array([x.reach for x in fitted], float),
        )  # fmt: skip

    def near(self, logs: np.ndarray) -> list[bool]:
        """Of which variants that is so at a shape."""
        off = (self.least > logs) | (self.most < logs)
        return [not any(x) for x in off.tolist()]

    def costs_us(
        self, of: Sequence[int], sides: Sides, layout: str, dtype: str, multiprocessors: int
    ) -> tuple[list[float], list[float]]:
        """What the counts of a product cost some of the variants, which the weights correct; and
        how far it is from those at which each was timed (`reach.distances`)."""
        counted = np.array([
            costs.counts(self.fitted[i].variant, sides, layout, dtype, multiprocessors) for i in of
        ], float)  # fmt: skip
        us = np.maximum(LEAST_US, (counted * self.constants[of]).sum(1))
        return us.tolist(), reach.distances(counted / us[:, None], self.reaches[of]).tolist()

    def offs(self, alike: np.ndarray) -> list[float]:
        """By what factor each variant is off at a shape so like the measured ones."""
        return np.exp(self.means + self.weights @ alike[self.shapes]).tolist()


class Errors:
    """The error that is expected at a place so near to the measured ones, by the errors at those
    where they are known."""

    def __init__(self, errors: np.ndarray) -> None:
        squares = errors**2
        self._known = np.flatnonzero(np.isfinite(squares))
        self._squares = squares[self._known]

    def __call__(self, near: np.ndarray) -> float:
        weights = near[self._known].astype(float) + 1e-9
        return math.sqrt(weights @ self._squares / weights.sum())


def lead_of(sides: Sides) -> float:
    """How many times the error nearby a kernel of ours has to lead a library by."""
    return LINE_LEAD if 1 in sides[:2] else LEAD
