"""The verdict on a C that lies in strips over ranks: `hybrid_gemm.verify`'s, without gathering.

Each rank multiplies what it has of A and B; what the ranks of one block of C find is added, and
each holds its own strip against it.
"""

from __future__ import annotations

import math

import numpy as np

from ..verify import Verdict, check_mode, fresh, judge, whole
from ..verify.sampling import Group, Part
from ..verify.team import Progress, no_progress
from .rank_plan import RankPlan

MESSAGE = 2**26  # elements that are added over ranks at a time: MPI counts to 2^31 bytes


class Cell(Group):
    """The ranks that have one block of C between them, each some of its k."""

    def __init__(self, comm, color: int):
        self.comm, self.color = comm, color

    def sum(self, array):
        return self._reduced(array, "SUM")

    def largest(self, array):
        return self._reduced(array, "MAX")

    def _reduced(self, array, operation: str):
        from mpi4py import MPI

        array = np.ascontiguousarray(array)
        total = np.empty_like(array)
        for start in range(0, array.size, MESSAGE):
            at = slice(start, start + MESSAGE)
            self.comm.Allreduce(array.ravel()[at], total.ravel()[at], getattr(MPI, operation))
        return total

    def gather(self, found: list) -> list:
        return [x for part in self.comm.allgather(found) for x in part]

    def joined(self, vector):
        return np.concatenate(self.comm.allgather(vector))


# Many parameters: a product has so many, and the rest says how it is judged.
def verify(
    comm, plan: RankPlan, a, b, c_in, strip, *, mode: str = "auto", seed: int | None = None,
    by_three: bool = False, growth: float = 1.0, progress: Progress = no_progress,
) -> Verdict | None:  # fmt: skip
    """The same verdict on every rank, from each rank's blocks of op(A) and op(B), its strip of
    C before (`c_in`, where beta != 0) and after; `by_three` and `growth` as in
    `hybrid_gemm.verify.verify`. Collective."""
    check_mode(mode)
    if mode == "off":
        return None
    from mpi4py import MPI

    rank, problem = comm.rank, plan.problem
    seed = comm.bcast(fresh(seed))
    box = plan.box(rank)
    color = rank // plan.grid[2]
    cell = comm.Split(color if box else MPI.UNDEFINED, rank)
    found = None
    if box:
        found = judge(
            _part(plan, rank, a, b, c_in, strip), Cell(cell, color), mode=mode, seed=seed,
            by_three=by_three, growth=growth, progress=progress,
        )  # fmt: skip
        cell.Free()
    return _together(comm, found, mode, whole(problem, mode), seed)


def _part(plan: RankPlan, rank: int, a, b, c_in, result) -> Part:
    box, strip = plan.box_of(rank), plan.strip(rank)
    strips = [s for r in plan.members(rank) if (s := plan.strip(r))]
    rows, cols = (
        tuple(sorted({span.start - first.start for span in spans}))
        for first, spans in (
            (box.rows, [s.rows for s in strips]), (box.cols, [s.cols for s in strips])
        )
    )  # fmt: skip
    if strip is None:  # adds its share to the others' references
        top, left, result = len(box.rows), len(box.cols), np.empty((0, 0), plan.problem.out_dtype)
    else:
        top, left = strip.rows.start - box.rows.start, strip.cols.start - box.cols.start
    origin = box.rows.start, box.cols.start
    return Part(plan.problem, a, b, c_in, result, top, left, rows, cols, origin)


def _together(comm, found: Verdict | None, mode: str, full: bool, seed: int) -> Verdict:
    """The worst rank's verdict, as all give it."""
    verdicts = [v for v in comm.allgather(found) if v is not None]
    if not verdicts:  # C has no elements
        return Verdict(True, "empty", 0.0)
    worst = max(verdicts, key=lambda v: (not v.passed, math.inf if v.worst != v.worst else v.worst))
    return Verdict(
        all(v.passed for v in verdicts), f"{worst.how}, each rank its strip", worst.worst,
        worst.power, worst.where, None if full else seed, max(v.time_ms for v in verdicts),
    )  # fmt: skip
