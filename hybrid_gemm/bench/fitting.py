"""Fits the models of times that choose kernels (`kernel_choice/fitted.py`) to measured times."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from .. import catalog
from ..catalog import Variant
from ..kernel_choice import costs, fitted, likeness, model_files, reach
from ..kernel_choice.costs import Sides
from ..kernel_choice.library_kernels import Launched
from ..kernel_choice.side_by_side import SideBySide
from ..kernel_choice.tables import Machine
from .drawing import Drawn

_ROUNDS = 400  # of coordinate descent
DISTURBED = 10.0  # standard deviations by which a time that something disturbed is too long


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

    @functools.cached_property
    def places(self) -> np.ndarray:
        """The shapes as points."""
        return likeness.places(
            [d.shape for d in self.drawn], [d.layout for d in self.drawn],
            fitted.OPERANDS[self.mode],
        )  # fmt: skip

    def counts(self, multiprocessors: int) -> list[np.ndarray]:
        """Of each variant: its counts at every shape."""
        shapes = [(d.shape, d.layout) for d in self.drawn]
        return _counts(self.variants, shapes, fitted.OPERANDS[self.mode], multiprocessors)

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
    time: `left_out`, in logarithms of microseconds. Where a model of another GPU was continued,
    constants and means go on with that model's weights of its shapes."""

    constants: list[np.ndarray]
    means: np.ndarray
    weights: np.ndarray  # (shapes, variants)
    left_out: np.ndarray


def _counts(
    variants: Sequence[Variant], shapes: Sequence[tuple[Sides, str]], dtype: str,
    multiprocessors: int,
) -> list[np.ndarray]:  # fmt: skip
    """Of each variant: its counts at every shape, in a layout; zeros where it does not take it."""
    kinds: dict[Hashable, list[Variant]] = {}
    for v in variants:
        kinds.setdefault(costs.alike(v), []).append(v)
    found: dict[Variant, np.ndarray] = {}
    for those in map(SideBySide, kinds.values()):
        counted = np.array([
            costs.counts_of(those, sides, layout, dtype, multiprocessors) * those.take(sides, dtype)
            for sides, layout in shapes
        ])  # fmt: skip
        found |= zip(those.variants, counted.transpose(2, 0, 1), strict=True)
    return [found[v] for v in variants]


def undisturbed(
    measured: Measured, counts: Sequence[np.ndarray], base: fitted.Model | None = None
) -> Measured:
    """Without times that are so much longer than those of other shapes predict that something else
    ran meanwhile: by more than `DISTURBED` standard deviations, robustly estimated for each
    variant. `base` as in `fit`."""
    points, times = measured.places, measured.times.copy()
    alike = likeness.likeness(points, points) + likeness.NOISE * np.eye(len(points))
    for i, (variant, count) in enumerate(zip(measured.variants, counts, strict=True)):
        these = np.flatnonzero(np.isfinite(times[:, i]))
        if len(these):
            start = _start(variant, count, times[:, i], points, base)
            off = (np.log(times[:, i]) - start.predicted)[these]
            weights, wrong = _kriging(alike[np.ix_(these, these)], off - np.median(off))
            # Each by the deviation that is expected of it.
            by = np.sign(wrong) * np.sqrt(wrong * weights)
            usual = 1.4826 * float(np.median(np.abs(by)))
            times[these[by > DISTURBED * usual], i] = np.nan
    launches, library = measured.launches, measured.library
    if launches and library is not None:
        gone = np.isnan(times[:, library]) & np.isfinite(measured.times[:, library])
        rows = {launches.row(measured.drawn[i]) for i in np.flatnonzero(gone).tolist()}
        keep = [i for i in range(len(launches.drawn)) if i not in rows]
        launches = LibraryTimes(
            [launches.drawn[i] for i in keep], [launches.launched[i] for i in keep],
            launches.times[keep],
        )  # fmt: skip
    return dataclasses.replace(measured, times=times, launches=launches)


def fit(measured: Measured, counts: Sequence[np.ndarray], base: fitted.Model | None = None) -> Fit:
    """Fits to all shapes. With a `base`, the model of another GPU with the same architecture, what
    is fitted is by how much this GPU's times differ from those that it predicts."""
    times, points = measured.times, measured.places
    starts = [
        _start(variant, count, times[:, i], points, base)
        for i, (variant, count) in enumerate(zip(measured.variants, counts, strict=True))
    ]
    predicted = np.stack([x.predicted for x in starts], 1)
    off = np.log(times) - predicted
    means = np.nanmedian(off, 0)
    alike = likeness.likeness(points, points) + likeness.NOISE * np.eye(len(points))
    weights, left_out = np.zeros_like(times), np.full_like(times, np.nan)
    timed = np.isfinite(times)
    for these in np.unique(timed, axis=1).T:  # variants that were timed at the same shapes
        columns = np.flatnonzero((timed == these[:, None]).all(0))
        at = np.ix_(these, columns)
        weights[at], wrong = _kriging(alike[np.ix_(these, these)], off[at] - means[columns])
        left_out[at] = np.log(times[at]) - wrong
    return Fit(
        [x.constants for x in starts], means + [x.mean for x in starts], weights, left_out
    )  # fmt: skip


def _kriging(alike: np.ndarray, off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights of shapes, and by how much each shape's value is off from what the others predict,
    which has a closed form (Rasmussen and Williams 2006, eq. 5.12)."""
    inverse = np.linalg.inv(alike)
    weights = inverse @ off
    return weights, (weights.T / np.diag(inverse)).T


@dataclass(frozen=True)
class _Start:
    """What a variant's fit begins with: its constants, its mean, and the logarithms of the times
    that they, and another GPU's model, predict of the measured shapes."""

    constants: np.ndarray
    mean: float
    predicted: np.ndarray


def _start(
    variant: Variant, counts: np.ndarray, times: np.ndarray, points: np.ndarray,
    base: fitted.Model | None,
) -> _Start:  # fmt: skip
    known = next((x for x in base.fitted if x.variant == variant), None) if base else None
    if base is None or known is None:
        # What adding parts of the last tiles costs is known; few products tell it, and large ones
        # would make it anything.
        held = np.array(costs.with_parts(variant, [0.0] * counts.shape[1]))
        constants = _positive(counts, times, held)
        return _Start(constants, 0.0, np.log(_cost(constants, counts)))
    alike = likeness.likeness(points, base.places)
    predicted = np.log(_cost(known.constants, counts)) + known.mean + alike @ known.weights
    return _Start(known.constants, known.mean, predicted)


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


def fit_library(
    measured: Measured, machine: Machine, base: fitted.Model | None = None
) -> LibraryFit | None:
    """Fits a mode's library to all shapes at which it is known what it launched; None where there
    are none. `base` as in `fit`."""
    some = measured.launches
    if not some or measured.library is None:
        return None
    variant, processors = measured.variants[measured.library], machine.multiprocessors
    dtype = fitted.OPERANDS[measured.mode]
    sides, layouts = [d.shape for d in some.drawn], [d.layout for d in some.drawn]
    counted = np.array([
        costs.counts(variant, s, x, dtype, processors) for s, x in zip(sides, layouts, strict=True)
    ])  # fmt: skip
    theirs = base.library if base else None
    kernels = list(theirs.kernels) if theirs else []
    kernels += sorted({x.kernel for x in some.launched} - {*kernels})
    of = np.array([kernels.index(x.kernel) for x in some.launched])
    at = fitted.library_places(sides, layouts, some.launched, dtype, processors), of
    if theirs:
        constants, known_mean = theirs.fitted.constants, theirs.fitted.mean
        known = likeness.library_likeness(at, (theirs.places, theirs.of)) @ theirs.fitted.weights
    else:
        constants, known_mean, known = _positive(counted, some.times), 0.0, 0.0
    off = np.log(some.times / _cost(constants, counted)) - known_mean - known
    mean = float(np.median(off))
    alike = likeness.library_likeness(at, at) + likeness.LIBRARY_NOISE * np.eye(len(of))
    weights, wrong = _kriging(alike, off - mean)
    left_out = np.log(some.times) - wrong
    return LibraryFit(
        variant, kernels, of, constants, known_mean + mean, weights, left_out, np.abs(wrong)
    )


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
    """In whole multiples of `model_files.WEIGHT`; -1 for what is not known."""
    return np.where(np.isnan(values), -1, np.rint(values / model_files.WEIGHT)).astype(np.int32)


def _cost(constants: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.maximum(fitted.LEAST_US, counts @ constants)


def _positive(
    counts: np.ndarray, times: np.ndarray, held: np.ndarray | None = None
) -> np.ndarray:  # fmt: skip
    """Constants, none below zero, whose costs are off by the least relative squares; those that
    `held` has stay as they are there."""
    known = np.isfinite(times)
    a = counts[known] / times[known, None]
    gram, right = a.T @ a, a.sum(0)
    x = np.zeros(counts.shape[1]) if held is None else held.copy()
    free = np.flatnonzero((np.diag(gram) > 0) & (x == 0))
    for _ in range(_ROUNDS):
        for j in free:
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
    measured: Measured, found: Fit, machine: Machine, library: LibraryFit | None = None,
    base: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The model as `model_files.from_data` reads it: arrays by name, and plain data as "about".
    `library` is the library's fit, if what it launches is known; `base` the data of the model that
    was continued, whose shapes come first. Variants that were not timed are left out."""
    about = {
        "model": machine.model, "arch": machine.arch, "multiprocessors": machine.multiprocessors,
        "mode": measured.mode, "library": None, "likeness": likeness.CONSTANTS,
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
    made = {
        "about": about, "sides": np.array([d.shape for d in measured.drawn], np.int32),
        "layouts": np.array([d.layout for d in measured.drawn]),
        "errors": _whole(errors(measured, found)),
        "weights": _whole(found.weights.T), **{f"library_{x}": y for x, y in beside.items()},
    }  # fmt: skip
    whole = made if base is None else _after(base, made)
    return whole | {"reaches": reaches(whole)}


def reaches(data: Mapping[str, Any]) -> np.ndarray:
    """Of each variant of a model's data, how far its constants reach (`reach.of`), by the shapes at
    which it was timed: (variants, counts, counts); zeros of a library, which is not counted."""
    about, dtype = data["about"], fitted.OPERANDS[data["about"]["mode"]]
    variants = [Variant(catalog.get(x["kernel"]), x["params"]) for x in about["variants"]]
    sides = map(tuple, data["sides"].tolist())
    shapes = list(zip(sides, data["layouts"].tolist(), strict=True))
    counts = _counts(variants, shapes, dtype, about["multiprocessors"])
    found = []
    for variant, each, weights, count in zip(
        variants, about["variants"], data["weights"], counts, strict=True
    ):
        constants = np.array(costs.with_parts(variant, each["constants"]))
        timed = np.flatnonzero(weights)
        if variant.kernel.library or not len(timed):
            found.append(np.zeros((len(constants), len(constants)), np.float32))
            continue
        counted = count[timed]
        shares = counted / _cost(constants, counted)[:, None]
        rare = costs.ADDED if variant.cuts_last else slice(0)  # of few products, if any, timed
        shares[:, rare] = 0
        one = reach.of(shares)
        one[:, rare] = 0
        found.append(one)
    most = max(map(len, found))
    return np.stack([np.pad(x, (0, most - len(x))) for x in found])


def _after(base: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
    """A model's data with the shapes of the `base` that it continues before its own. Errors there
    are known if that is of the same GPU."""
    known = {_name(x): w for x, w in zip(base["about"]["variants"], base["weights"], strict=True)}
    nothing = np.zeros(len(base["sides"]), np.int32)
    before = {
        "weights": np.stack([known.get(_name(x), nothing) for x in made["about"]["variants"]])
    }
    both = made.keys() & {*base} - {"about"}
    for name in both & {"errors", "library_errors"}:
        same = base["about"]["model"] == made["about"]["model"]
        before[name] = base[name] if same else np.full_like(base[name], -1)
    return dict(made) | {
        x: np.concatenate([before.get(x, base[x]), made[x]], axis=-1 if x in before else 0)
        for x in both
    }


def _name(variant: Mapping[str, Any]) -> tuple:
    return variant["kernel"], *sorted(variant["params"].items())


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
