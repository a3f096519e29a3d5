"""Fits the models of times that choose kernels (`kernel_choice/fitted.py`) to measured times."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from ..catalog import Variant
from ..kernel_choice import costs, fitted
from ..kernel_choice.library_kernels import Launched
from ..kernel_choice.tables import Machine
from .heldout import Drawn

_ROUNDS = 400  # of coordinate descent


@dataclass(frozen=True)
class LibraryTimes:
    """What a library launched at drawn shapes, and its times in microseconds."""

    drawn: Sequence[Drawn]
    launched: Sequence[Launched]
    times: np.ndarray

    def row(self, drawn: Drawn) -> int | None:
        """Where a shape stands here, if it does."""
        return self._rows.get((drawn.shape, drawn.layout))

    @functools.cached_property
    def _rows(self) -> dict[tuple, int]:
        return {(d.shape, d.layout): i for i, d in enumerate(self.drawn)}


@dataclass(frozen=True)
class Measured:
    """Times in microseconds of every variant at every drawn shape, in one mode; NaN where a
    variant was not timed. And those of the library with what it launched, of these shapes and
    others."""

    mode: str
    drawn: Sequence[Drawn]
    variants: Sequence[Variant]
    times: np.ndarray  # (shapes, variants)
    launches: LibraryTimes | None = None

    @property
    def places(self) -> np.ndarray:
        """The shapes as points."""
        return fitted.places(
            [d.shape for d in self.drawn], [d.layout for d in self.drawn],
            fitted.OPERANDS[self.mode],
        )  # fmt: skip

    def counts(self, multiprocessors: int) -> list[np.ndarray]:
        """Of each variant: its counts at every shape."""
        dtype = fitted.OPERANDS[self.mode]
        return [
            np.array([costs.counts(v, d.shape, d.layout, dtype, multiprocessors)
                      for d in self.drawn])
            for v in self.variants
        ]  # fmt: skip

    @property
    def ours(self) -> list[int]:
        """The columns of our own kernels."""
        return [i for i, v in enumerate(self.variants) if not v.kernel.library]

    @property
    def library(self) -> int | None:
        """The column of the library, if one was timed."""
        return next((i for i, v in enumerate(self.variants) if v.kernel.library), None)


@dataclass
class Fit:
    """Constants, means and weights of all variants, and predictions made without a shape's own
    time: `left_out`, in logarithms of microseconds."""

    constants: list[np.ndarray]
    means: np.ndarray
    weights: np.ndarray  # (shapes, variants)
    left_out: np.ndarray


def fit(measured: Measured, counts: Sequence[np.ndarray]) -> Fit:
    """Fits to all shapes."""
    times = measured.times
    constants = [_positive(count, times[:, i]) for i, count in enumerate(counts)]
    cost = _costs(constants, counts)
    off = np.log(times / cost)
    means = np.nanmedian(off, 0)
    points = measured.places
    alike = fitted.likeness(points, points) + fitted.NOISE * np.eye(len(points))
    weights, left_out = np.zeros_like(times), np.full_like(times, np.nan)
    timed = np.isfinite(times)
    for these in np.unique(timed, axis=1).T:  # variants that were timed at the same shapes
        columns = np.flatnonzero((timed == these[:, None]).all(0))
        at = np.ix_(these, columns)
        inverse = np.linalg.inv(alike[np.ix_(these, these)])
        weights[at] = inverse @ (off[at] - means[columns])
        # Leaving one out has a closed form (Rasmussen and Williams 2006, eq. 5.12).
        left_out[at] = np.log(times[at]) - weights[at] / np.diag(inverse)[:, None]
    return Fit(constants, means, weights, left_out)


@dataclass(frozen=True)
class LibraryFit:
    """A library by what it launches: as `fitted.FittedLibrary`, and the logarithms of times
    predicted without a shape's own one."""

    variant: Variant
    kernels: list[str]
    of: np.ndarray
    constants: np.ndarray
    mean: float
    weights: np.ndarray
    left_out: np.ndarray
    errors: np.ndarray  # by how much those are off, as shares


def fit_library(measured: Measured, machine: Machine) -> LibraryFit | None:
    """Fits a mode's library to all shapes at which it is known what it launched; None where there
    are none."""
    some = measured.launches
    if not some or measured.library is None:
        return None
    variant, processors = measured.variants[measured.library], machine.multiprocessors
    dtype = fitted.OPERANDS[measured.mode]
    sides, layouts = [d.shape for d in some.drawn], [d.layout for d in some.drawn]
    counted = np.array([
        costs.counts(variant, s, x, dtype, processors) for s, x in zip(sides, layouts, strict=True)
    ])  # fmt: skip
    constants = _positive(counted, some.times)
    off = np.log(some.times / np.maximum(fitted.LEAST_US, counted @ constants))
    mean = float(np.median(off))
    kernels = sorted({x.kernel for x in some.launched})
    of = np.array([kernels.index(x.kernel) for x in some.launched])
    at = fitted.library_places(sides, layouts, some.launched, dtype, processors), of
    alike = fitted.library_likeness(at, at) + fitted.LIBRARY_NOISE * np.eye(len(of))
    inverse = np.linalg.inv(alike)
    weights = inverse @ (off - mean)
    wrong = weights / np.diag(inverse)
    left_out = np.log(some.times) - wrong
    return LibraryFit(variant, kernels, of, constants, mean, weights, left_out, np.abs(wrong))


def _library_data(some: LibraryTimes, found: LibraryFit) -> dict[str, Any]:
    return {
        "sides": np.array([d.shape for d in some.drawn], np.int32),
        "layouts": np.array([d.layout for d in some.drawn]),
        "launched": np.array([
            [i, *astuple(x)[1:]] for i, x in zip(found.of, some.launched, strict=True)
        ], np.int32),
        "weights": _whole(found.weights), "errors": _whole(found.errors),
    }  # fmt: skip


def _rounded(constants: np.ndarray) -> list[float]:
    return [float(f"{x:.4g}") for x in constants]


def _whole(values: np.ndarray) -> np.ndarray:
    """In whole multiples of `fitted.WEIGHT`; -1 for what is not known."""
    return np.where(np.isnan(values), -1, np.rint(values / fitted.WEIGHT)).astype(np.int32)


def _costs(constants: Sequence[np.ndarray], counts: Sequence[np.ndarray]) -> np.ndarray:
    found = [
        np.maximum(fitted.LEAST_US, count @ x) for x, count in zip(constants, counts, strict=True)
    ]
    return np.stack(found, 1)


def _positive(counts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Constants, none below zero, whose costs are off by the least relative squares."""
    known = np.isfinite(times)
    a = counts[known] / times[known, None]
    gram, right = a.T @ a, a.sum(0)
    x = np.zeros(counts.shape[1])
    for _ in range(_ROUNDS):
        for j in np.flatnonzero(np.diag(gram)):
            x[j] = max(0.0, x[j] + (right[j] - gram[j] @ x) / gram[j, j])
    return x


def errors(measured: Measured, found: Fit) -> np.ndarray:
    """By how much the library's time, and that of our kernel that was predicted to be fastest, were
    predicted wrong without a shape's own time: (2, shapes), as shares; NaN where one of them was
    not timed."""
    own, library = measured.ours, measured.library
    best = np.array(own)[np.argmin(np.nan_to_num(found.left_out[:, own], nan=np.inf), 1)]
    off = np.abs(found.left_out - np.log(measured.times))
    rows = np.arange(len(best))
    theirs = np.zeros(len(best)) if library is None else off[:, library]
    both = np.stack([theirs, off[rows, best]])
    return np.where(np.isnan(both.sum(0)), np.nan, both)


def data(
    measured: Measured, found: Fit, machine: Machine, library: LibraryFit | None = None
) -> dict[str, Any]:
    """The model as `fitted.from_data` reads it: arrays by name, and plain data as "about".
    `library` is the library's fit, if what it launches is known."""
    about = {
        "model": machine.model, "arch": machine.arch, "multiprocessors": machine.multiprocessors,
        "mode": measured.mode, "library": None,
        "variants": [
            {"kernel": v.name, "params": dict(v.params),
             "constants": _rounded(found.constants[i]), "mean": round(float(found.means[i]), 4)}
            for i, v in enumerate(measured.variants)
        ],
    }  # fmt: skip
    beside = {}
    if library and measured.launches:
        about["library"] = {
            "kernel": library.variant.name, "kernels": library.kernels,
            "constants": _rounded(library.constants), "mean": round(library.mean, 4),
        }  # fmt: skip
        beside = _library_data(measured.launches, library)
    return {
        "about": about, "sides": np.array([d.shape for d in measured.drawn], np.int32),
        "layouts": np.array([d.layout for d in measured.drawn]),
        "errors": _whole(errors(measured, found)),
        "weights": _whole(found.weights.T), **{f"library_{x}": y for x, y in beside.items()},
    }  # fmt: skip


def measured_from(rows: Sequence[Mapping[str, Any]], variants: Sequence[Variant]) -> Measured:
    """What rows of `heldout.timed` say of one mode."""
    at = {str(v): i for i, v in enumerate(variants)}
    times = np.full((len(rows), len(variants)), np.nan)
    for i, row in enumerate(rows):
        for name, us in row["us"].items():
            if name in at:
                times[i, at[name]] = us
    drawn = [Drawn(tuple(r["shape"]), r["layout"], r["kind"]) for r in rows]
    library = next((i for i, v in enumerate(variants) if v.kernel.library), None)
    launches = None
    if library is not None:
        known = [i for i, r in enumerate(rows)
                 if r.get("launched") and np.isfinite(times[i, library])]  # fmt: skip
        if known:
            launches = LibraryTimes(
                [drawn[i] for i in known], [Launched(*rows[i]["launched"]) for i in known],
                times[known, library],
            )  # fmt: skip
    return Measured(rows[0]["mode"], drawn, variants, times, launches)
