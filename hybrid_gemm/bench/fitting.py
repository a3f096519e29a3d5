"""Fits the models of times that choose kernels (`kernel_choice/fitted.py`) to measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..catalog import Variant
from ..kernel_choice import costs, fitted
from ..kernel_choice.tables import Machine
from .heldout import Drawn

FOLDS = 4
_ROUNDS = 400  # of coordinate descent


@dataclass(frozen=True)
class Measured:
    """Times in microseconds of every variant at every drawn shape, in one mode; NaN where a
    variant was not timed."""

    mode: str
    drawn: Sequence[Drawn]
    variants: Sequence[Variant]
    times: np.ndarray  # (shapes, variants)

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

    def whole(values: np.ndarray) -> list[int | None]:
        return [None if np.isnan(x) else round(x / fitted.WEIGHT) for x in values.tolist()]

    return {
        "model": machine.model, "arch": machine.arch, "multiprocessors": machine.multiprocessors,
        "mode": measured.mode,
        "shapes": [[*d.shape, d.layout] for d in measured.drawn],
        "errors": [whole(x) for x in _errors(measured, found, measured.times)],
        "variants": [
            {"kernel": v.name, "params": dict(v.params),
             "constants": [float(f"{x:.4g}") for x in found.constants[i]],
             "mean": round(float(found.means[i]), 4), "weights": whole(found.weights[:, i])}
            for i, v in enumerate(measured.variants)
        ],
    }  # fmt: skip


# --- what a model is worth ------------------------------------------------------------------


def judged(measured: Measured, counts: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """What choosing by the model gives at shapes that it was not fitted to, by cross-validation
    over those where every variant was timed:
    `own` and `auto`, the geometric means of the library's time over that of the kernel taken;
    `worst` of `auto`; `regret`, the mean share by which `auto` takes longer than the fastest of all
    that was timed, and `own_regret`, of our kernels alone."""
    points, library, own = measured.places, measured.library, np.array(measured.ours)
    times, drawn = np.where(np.isnan(measured.times), np.inf, measured.times), measured.drawn
    whole = np.flatnonzero(np.isfinite(times).all(1))
    taken_own, taken = np.zeros((2, len(times)))
    order = np.random.default_rng(0).permutation(whole)
    for part in range(FOLDS):
        out = order[part::FOLDS]
        rows = np.setdiff1d(np.arange(len(times)), out)
        found = fit(measured, counts, rows)
        cost = _costs(found.constants, [count[out] for count in counts])
        alike = fitted.likeness(points[out], points[rows])
        predicted = np.log(cost) + found.means + alike @ found.weights
        best = own[np.argmin(predicted[:, own], 1)]
        taken_own[out] = taken[out] = times[out, best]
        if library is not None:
            near = fitted.nearness(points[out], points[rows])
            error = fitted.expected_error(near, _errors(measured, found, measured.times[rows]))
            lead = predicted[:, library] - predicted[np.arange(len(out)), best]
            taken[out] = np.where(lead < fitted.LEAD * error, times[out, library], taken_own[out])
    return {
        kind: _worth(times[some], taken_own[some], taken[some], own, library)
        for kind in ("all", *dict.fromkeys(d.kind for d in drawn))
        for some in [np.array([i for i in whole.tolist() if kind in (drawn[i].kind, "all")])]
    }


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
    return Measured(rows[0]["mode"], drawn, variants, times)
