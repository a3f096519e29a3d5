"""What choosing by a model of times is worth, at each shape as if that had not been measured."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..kernel_choice import choices, fitted, likeness
from .fitting import Fit, LibraryFit, Measured, errors

Figures = dict[str, dict[str, float]]  # by class of shapes, and of all


@dataclass(frozen=True)
class LeftOut:
    """A mode's measured times and its fit, by which each shape's times are predicted from those of
    the other shapes (Rasmussen and Williams 2006, eq. 5.12). The constants of costs, a dozen for a
    variant, are of all shapes. `lead`: how many errors a kernel of ours has to lead by, where it is
    not what shapes ask for."""

    measured: Measured
    fit: Fit
    library: LibraryFit | None = None
    lead: float | None = None

    def choice(self, row: int, own: bool, *, ask: bool = False) -> choices.Choice:
        """What is chosen at a shape, of the variants that were timed there. What the library
        launches is asked for where that is in doubt, or always where it is taken, by `ask`."""
        of, us = self.measured, np.exp(self.fit.left_out[row])
        times = {v: float(x) for v, x in zip(of.variants, us, strict=True) if x == x}
        near = self._near[row]
        theirs, ours = fitted.Errors(self._errors)(near)
        at = of.launches.row(of.drawn[row]) if of.launches and self.library else None
        lead = self.lead or fitted.lead_of(of.drawn[row].shape)
        first = choices.pick(times, (theirs, ours), own=own, can_ask=at is not None, lead=lead)
        if at is None or not (first.doubtful or (ask and first.variant.kernel.library)):
            return first
        assert self.library  # where `at` is known
        times[self.library.variant] = float(np.exp(self.library.left_out[at]))
        (theirs,) = fitted.Errors(self.library.errors[None])(self._near_launched(row, at))
        return choices.pick(times, (theirs, ours), own=own, can_ask=False, lead=lead)

    def timed(self, row: int) -> np.ndarray:
        """The times at a shape; infinite where a variant was not timed."""
        times = self.measured.times[row]
        return np.where(np.isnan(times), np.inf, times)

    @functools.cached_property
    def _errors(self) -> np.ndarray:
        return errors(self.measured, self.fit)

    @functools.cached_property
    def _near(self) -> np.ndarray:
        near = likeness.nearness(self.measured.places, self.measured.places)
        np.fill_diagonal(near, 0)
        return near

    @functools.cached_property
    def _launched(self) -> likeness.Compared:
        """Where it is known what the library launched."""
        assert self.measured.launches
        drawn = self.measured.launches.drawn
        dtype = fitted.OPERANDS[self.measured.mode]
        return likeness.Compared(
            likeness.places([d.shape for d in drawn], [d.layout for d in drawn], dtype)
        )

    def _near_launched(self, row: int, at: int) -> np.ndarray:
        near = self._launched.both(self.measured.places[row])[1]
        near[at] = 0
        return near


def worth(of: LeftOut, rows: Sequence[int] | None = None) -> Figures:
    """What choosing gives at `rows`, or at all shapes where every variant was timed:
    `own` and `auto`, the geometric means of the library's time over that of the kernel taken;
    `first`, the first percentile, and `worst` of `auto`, and `slower`, the share of shapes at which
    it is slower than 0.97 of the library; `regret`, the mean share by which `auto`
    takes longer than the fastest of all that was timed, and `own_regret`, of our kernels alone."""
    measured = of.measured
    if rows is None:
        rows = np.flatnonzero(np.isfinite(measured.times).all(1)).tolist()
    ours, library = measured.ours, measured.library
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in rows:
        times = of.timed(row)
        takes = [
            times[measured.variants.index(of.choice(row, own).variant)] for own in (True, False)
        ]
        theirs = np.nan if library is None else times[library]
        line = (theirs, *takes, times[ours].min(), times.min())
        for kind in ("all", measured.drawn[row].kind):
            found.setdefault(kind, []).append(line)
    return {kind: figures(np.array(lines)) for kind, lines in found.items()}


def figures(lines: np.ndarray) -> dict[str, float]:
    """Those of `worth`, of lines of the library's time, that of our kernel and of the kernel that
    is taken, of our fastest and of the fastest; a library's is not finite where none was timed."""
    theirs, own, auto, best_own, best = lines.T
    said = {"shapes": float(len(lines)), "own_regret": _mean(own / best_own) - 1}
    if (known := np.isfinite(theirs)).any():
        theirs, own, auto, _, best = lines[known].T
        said |= {
            "own": _mean(theirs / own), "auto": _mean(theirs / auto),
            "first": float(np.percentile(theirs / auto, 1)), "worst": float((theirs / auto).min()),
            "slower": float(np.mean(theirs / auto < 0.97)), "regret": _mean(auto / best) - 1,
        }  # fmt: skip
    return said


def _mean(ratios: np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(ratios))))
