"""`Result`: what a product gave, and what was done to get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..catalog import Variant
from ..errors import counted, time_in_words
from ..planning.plan import Plan
from ..problem import Problem
from .checks import Checks
from .read_ahead import Reading
from .timeline import Timeline


@dataclass(frozen=True, eq=False)  # two are equal where they are one: arrays have no one answer
class Result:
    """What a run gave: C, and what was done to get it.

    `total_ms` is the host's time, `why` says why this kernel was taken, `compute` what was
    computed, `reduction` how partial C were summed, `executor` who started what devices did:
    "native" threads, or "python" and why. `problem` is the one that was settled; of
    complex matrices, `plan` is that of the real product of m x 2k and 2k x 2n as which it was
    multiplied. With `checked`, `checks` says what was checked, and what was made again; otherwise
    it is None. `reading` says what was read ahead of .npy files, if some were multiplied.

    Over ranks `c` is this rank's strip, `plan` a `RankPlan` in rows and columns of the matrices,
    complex ones too, and `total_ms` and `checks` those of all ranks; `timeline` has all ranks'
    activities on rank 0, whose workers it counts rank by rank, and this rank's elsewhere. `since`
    is when multiplying began, in seconds of the Unix clock, and `own` are the plans and kernels of
    what this rank multiplied.
    """

    c: Any
    plan: Plan
    variant: Variant
    timeline: Timeline
    total_ms: float
    reduction: str
    problem: Problem
    why: str = ""
    compute: str = ""
    checks: Checks | None = None
    executor: str = "python"
    reading: Reading | None = None
    since: float | None = None
    own: tuple[tuple[Plan, Variant], ...] = ()

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations a second over the whole run."""
        return self.problem.flops / self.total_ms / 1e6 if self.total_ms else 0.0

    def __repr__(self) -> str:
        p = self.problem
        return (
            f"<Result: C {p.m} x {p.n} {p.out_dtype}, "
            f"{time_in_words(self.total_ms)}, {self.gflops:.1f} GFLOP/s, "
            f"{counted(len(self.plan.workers), 'worker')}, kernel {self.variant}>"
        )
