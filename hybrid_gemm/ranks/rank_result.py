"""What a product over ranks gave one of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..catalog import Variant
from ..errors import time_in_words
from ..execution.checks import Checks
from ..execution.timeline import Timeline
from ..planning.plan import Plan
from ..problem import Problem
from .rank_plan import RankPlan


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What a run gave one rank: its strip of C, and what was done. `timeline` has all ranks'
    activities on rank 0 and this rank's elsewhere; worker numbers count rank by rank.
    `since` is when multiplying began, in seconds of the Unix clock; `compute` says what was
    computed and `reduction` how partial C were summed, and with `checked`, `checks` what all ranks
    checked. `own` are the plans and kernels of what this rank multiplied, and `executor` says who
    started what devices did, as in `Result`."""

    c: Any
    plan: RankPlan
    variant: Variant
    timeline: Timeline
    total_ms: float
    reduction: str
    since: float
    compute: str
    checks: Checks | None = None
    own: tuple[tuple[Plan, Variant], ...] = ()
    executor: str = "python (over ranks)"

    @property
    def problem(self) -> Problem:
        """The whole product, as it was multiplied."""
        return self.plan.problem

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations a second of all ranks together."""
        return self.problem.flops / self.total_ms / 1e6 if self.total_ms else 0.0

    def __repr__(self) -> str:
        return (
            f"<RankResult: {self.plan.problem} over {self.plan.ranks} ranks, "
            f"{time_in_words(self.total_ms)}, {self.gflops:.1f} GFLOP/s, sum {self.reduction}>"
        )


def gathered(comm: Any, plan: RankPlan, mine: Timeline) -> Timeline:
    """All ranks' activities, on rank 0. Collective."""
    everyone = comm.gather(tuple(mine))
    if not everyone:
        return mine
    found = [
        dataclasses.replace(activity, worker=activity.worker + other * plan.threads)
        for other, activities in enumerate(everyone)
        for activity in activities
    ]
    return Timeline(lambda: found)
