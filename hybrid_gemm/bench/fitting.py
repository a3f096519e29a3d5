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

FOLDS = 4
_ROUNDS = 400  # of coordinate descent


@dataclass(frozen=True)
class LibraryTimes:
    """What a library launched at drawn shapes, and its times in microseconds."""

    drawn: Sequence[Drawn]
    launched: Sequence[Launched]
    times: np.ndarray

    def without(self, shapes: Sequence[Drawn]) -> LibraryTimes:
        """Of all shapes but these."""
        out = {(d.shape, d.layout) for d in shapes}
        rows = [i for i, d in enumerate(self.drawn) if (d.shape, d.layout) not in out]
        return LibraryTimes(
            [self.drawn[i] for i in rows], [self.launched[i] for i in rows], self.times[rows]
        )

    def of(self, drawn: Drawn) -> Launched | None:
        """What it launched at a shape."""
        return self._by_shape.get((drawn.shape, drawn.layout))

    @functools.cached_property
    def _by_shape(self) -> dict[tuple, Launched]:
        pairs = zip(self.drawn, self.launched, strict=True)
        return {(d.shape, d.layout): x for d, x in pairs}


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


def fit(measured: Measured, counts: Sequence[np.ndarray], rows: np.ndarray | None = None) -> Fit:
    """Fits to the shapes `rows`, or to all."""
    rows = np.arange(len(measured.drawn)) if rows is None else rows
    times = measured.times[rows]
    constants = [
        _positive(count[rows], times[:, i]) for i, count in enumerate(counts)
    ]  # fmt: skip
    cost = _costs(constants, [count[rows] for count in counts])
    off = np.log(times / cost)
    means = np.nanmedian(off, 0)
    points = measured.places[rows]
    alike = fitted.likeness(points, points) + fitted.NOISE * np.eye(len(rows))
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


def fit_library(some: LibraryTimes, variant: Variant, mode: str, processors: int) -> dict[str, Any]:
    """The model of a library by what it launches, as plain data."""
    dtype = fitted.OPERANDS[mode]
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
    return {
        "kernel": variant.name, "kernels": kernels,
        "shapes": [
            [*s, x, int(i), *astuple(launched)[1:]]
            for s, x, i, launched in zip(sides, layouts, of, some.launched, strict=True)
        ],
        "constants": _rounded(constants), "mean": round(mean, 4),
        "weights": _whole(weights), "errors": _whole(np.abs(weights / np.diag(inverse))),
    }  # fmt: skip


def _rounded(constants: np.ndarray) -> list[float]:
    return [float(f"{x:.4g}") for x in constants]


def _whole(values: np.ndarray) -> list[int | None]:
    return [None if np.isnan(x) else round(x / fitted.WEIGHT) for x in values.tolist()]


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


def _errors(measured: Measured, found: Fit, times: np.ndarray) -> np.ndarray:
    """By how much the library's time, and that of our kernel that was predicted to be fastest, were
    predicted wrong without a shape's own time: (2, shapes), as shares; NaN where one of them was
    not timed."""
    own, library = measured.ours, measured.library
    best = np.array(own)[np.argmin(np.nan_to_num(found.left_out[:, own], nan=np.inf), 1)]
    off = np.abs(found.left_out - np.log(times))
    rows = np.arange(len(best))
    theirs = np.zeros(len(best)) if library is None else off[:, library]
    both = np.stack([theirs, off[rows, best]])
    return np.where(np.isnan(both.sum(0)), np.nan, both)


def data(measured: Measured, found: Fit, machine: Machine) -> dict[str, Any]:
    """The model as plain data, which `fitted.from_data` reads."""
    library = None
    if measured.launches and measured.library is not None:
        variant = measured.variants[measured.library]
        library = fit_library(
            measured.launches, variant, measured.mode, machine.multiprocessors
        )  # fmt: skip
    return {
        "model": machine.model, "arch": machine.arch, "multiprocessors": machine.multiprocessors,
        "mode": measured.mode,
        "shapes": [[*d.shape, d.layout] for d in measured.drawn],
        "errors": [_whole(x) for x in _errors(measured, found, measured.times)],
        "variants": [
            {"kernel": v.name, "params": dict(v.params),
             "constants": _rounded(found.constants[i]),
             "mean": round(float(found.means[i]), 4), "weights": _whole(found.weights[:, i])}
            for i, v in enumerate(measured.variants)
        ],
        "library": library,
    }  # fmt: skip


# --- what a model is worth ------------------------------------------------------------------


def judged(
    measured: Measured, counts: Sequence[np.ndarray], machine: Machine
) -> dict[str, dict[str, float]]:
    """What choosing by the model gives at shapes that it was not fitted to, by cross-validation
    over those where every variant was timed:
    `own` and `auto`, the geometric means of the library's time over that of the kernel taken;
    `worst` of `auto`; `regret`, the mean share by which `auto` takes longer than the fastest of all
    that was timed, and `own_regret`, of our kernels alone."""
    times = np.where(np.isnan(measured.times), np.inf, measured.times)
    whole = np.flatnonzero(np.isfinite(times).all(1))
    taken = np.zeros((2, len(times)))  # own kernels, all
    order = np.random.default_rng(0).permutation(whole)
    for part in range(FOLDS):
        out = order[part::FOLDS]
        known = model(measured, counts, np.setdiff1d(np.arange(len(times)), out), machine)
        for i in out:
            drawn, at = measured.drawn[i], dict(zip(measured.variants, times[i], strict=True))
            for row, own in enumerate((True, False)):
                choice = fitted.chosen(known, drawn.shape, drawn.layout, machine, own=own)
                if choice.doubtful and measured.launches:
                    choice = fitted.chosen(
                        known, drawn.shape, drawn.layout, machine, own=own,
                        launched=measured.launches.of(drawn),
                    )  # fmt: skip
                taken[row, i] = at[choice.variant]
    own_variants, library = np.array(measured.ours), measured.library
    return {
        kind: _worth(times[some], taken[0, some], taken[1, some], own_variants, library)
        for kind in ("all", *dict.fromkeys(d.kind for d in measured.drawn))
        for some in [np.array([
            i for i in whole.tolist() if kind in (measured.drawn[i].kind, "all")
        ])]
    }  # fmt: skip


def model(
    measured: Measured, counts: Sequence[np.ndarray], rows: np.ndarray, machine: Machine
) -> fitted.Model:
    """The model that is fitted to some of the measured shapes."""
    left_out = [measured.drawn[i] for i in np.setdiff1d(np.arange(len(measured.drawn)), rows)]
    some = Measured(
        measured.mode, [measured.drawn[i] for i in rows], measured.variants, measured.times[rows],
        measured.launches.without(left_out) if measured.launches else None,
    )  # fmt: skip
    found = fit(some, [count[rows] for count in counts])
    return fitted.from_data(data(some, found, machine), machine)


def _worth(
    times: np.ndarray, taken_own: np.ndarray, taken: np.ndarray, own: np.ndarray,
    library: int | None,
) -> dict[str, float]:  # fmt: skip
    """The figures of `judged` for some shapes."""
    said = {"shapes": float(len(times)), "own_regret": _mean(taken_own / times[:, own].min(1)) - 1}
    if library is not None:
        theirs = times[:, library]
        said |= {
            "own": _mean(theirs / taken_own), "auto": _mean(theirs / taken),
            "first": float(np.percentile(theirs / taken, 1)),
            "worst": float((theirs / taken).min()), "regret": _mean(taken / times.min(1)) - 1,
        }  # fmt: skip
    return said


def _mean(ratios: np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


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
