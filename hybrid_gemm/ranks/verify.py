"""The verdict on a C that lies in strips over ranks: `verify.py`'s, without gathering anything.

Each rank multiplies what it has of A and B in float64 (integers: in int64); the sums of these
over the ranks of a block of C are the reference, and each rank holds its own strip against it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..errors import UsageError
from ..verify import FULL_FLOPS, MODES, SAMPLED_ROWS, Verdict, _Floats, _Integers, _times
from .rank_plan import RankPlan

BLOCK = 2**22  # elements of a reference that are summed over ranks at a time


def verify(
    comm, plan: RankPlan, a, b, c_in, strip, *, mode: str = "auto", seed: int = 0
) -> Verdict | None:
    """The same verdict on every rank, from each rank's blocks of op(A) and op(B), its strip of
    C before (`c_in`, where beta != 0) and after. Collective."""
    if mode not in MODES:
        raise UsageError(f"no verification is called {mode!r}; there are {', '.join(MODES)}")
    if mode == "off":
        return None
    from mpi4py import MPI

    rank, problem = comm.rank, plan.problem
    box = plan.box(rank)
    color = rank // plan.plan.grid[2] if box else MPI.UNDEFINED
    cell = comm.Split(color, rank)
    full = mode == "full" or problem.flops <= FULL_FLOPS
    count = min(SAMPLED_ROWS, problem.m)
    worst = 0.0
    if box:
        check = _Strip(cell, plan, rank, a, b, c_in, strip)
        if full or not plan.by_rows(rank):
            step = max(1, BLOCK // len(box.cols))
            height = len(box.rows)
            parts = [np.arange(i, min(i + step, height)) for i in range(0, height, step)]
            worst = max(check.rows(part) for part in parts)
        else:
            rng = np.random.default_rng(seed)
            chosen = np.sort(rng.choice(problem.m, count, replace=False))
            signs = rng.choice([-1.0, 1.0], problem.n)[box.cols.slice]
            here = (box.rows.start <= chosen) & (chosen < box.rows.stop)
            worst = max(check.rows(chosen[here] - box.rows.start), check.against(signs))
        cell.Free()
    worst = comm.allreduce(worst, MPI.MAX)
    how = "every element against float64"
    if not full:
        how = f"{count} rows, and all rows times a random vector"
    return Verdict(bool(worst <= 1), f"{how}, each rank its strip", worst)


class _Strip:
    """One rank's strip, with references summed over its cell."""

    def __init__(self, cell, plan: RankPlan, rank: int, a, b, c_in, result):
        self.cell, self.a, self.b = cell, a, b
        self.problem, self.box, self.strip = plan.problem, plan.box(rank), plan.strip(rank)
        self.check = None
        if self.strip:
            part = dataclasses.replace(
                plan.problem, m=len(self.strip.rows), n=len(self.strip.cols)
            )  # fmt: skip
            kind = _Integers if part.is_integer else _Floats
            self.check = kind(part, a, b, c_in, result)
        self.reads_product = self.problem.alpha != 0 and self.problem.k > 0

    def _summed(self, array: np.ndarray) -> np.ndarray:
        from mpi4py import MPI

        total = np.empty_like(array)
        self.cell.Allreduce(np.ascontiguousarray(array), total, MPI.SUM)
        return total

    def rows(self, rows: np.ndarray) -> float:
        """Worst error over bound in rows of the block, where they are this rank's."""
        if not len(rows):
            return 0.0
        integer = self.problem.is_integer
        a, b = self.a[rows], self.b
        if integer:
            from ..devices.cpu import integer_product

            reference, size = self._summed(integer_product(a, b).astype("i8")), None
        elif self.reads_product:
            a, b = a.astype("f8"), b.astype("f8")
            reference = self.problem.alpha * self._summed(a @ b)
            size = abs(self.problem.alpha) * self._summed(abs(a) @ abs(b))
        else:
            reference = size = np.zeros((len(rows), b.shape[1]))
        if not self.strip:
            return 0.0
        top = self.strip.rows.start - self.box.rows.start
        mine = (rows >= top) & (rows < top + len(self.strip.rows))
        left = self.strip.cols.start - self.box.cols.start
        cols = slice(left, left + len(self.strip.cols))
        here = rows[mine] - top
        if not len(here):
            return 0.0
        if integer:
            return self.check._same(here, reference[mine][:, cols], None)
        got = self.check.result[here].astype("f8")
        return self.check._compare(here, got, reference[mine][:, cols], size[mine][:, cols], None)

    def against(self, signs: np.ndarray) -> float:
        """Worst error over bound of strip @ signs; strips are whole rows of the block."""
        integer = self.problem.is_integer
        height = len(self.box.rows)
        if integer:
            v = signs.astype("i8")
            times = _Integers(self.problem, self.a, self.b, None, self.a)._times
            reference, size = self._summed(times(self.a, times(self.b, v))), None
        elif self.reads_product:
            v, a, b = signs, self.a, self.b
            reference = self.problem.alpha * self._summed(_times(np, a, _times(np, b, v)))
            bound = _times(np, a, _times(np, b, abs(v), True), True)
            size = abs(self.problem.alpha) * self._summed(bound)
        else:
            v, reference, size = signs, np.zeros(height), np.zeros(height)
        if not self.strip:
            return 0.0
        top = self.strip.rows.start - self.box.rows.start
        mine = slice(top, top + len(self.strip.rows))
        if integer:
            return self.check._same(slice(None), reference[mine], v)
        got = _times(np, self.check.result, v)
        return self.check._compare(slice(None), got, reference[mine], size[mine], v)
