"""Cases over MPI ranks: every rank makes the same matrices and passes its part of them."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import hybrid_gemm
from hybrid_gemm.planning.partition import cut, grids

from .cases import GROUP, Case, Draw, draw
from .judge import EXCEPTION, REFUSED, RIGHT, WRONG, Call, Outcome, judge

NOT_OVER_RANKS = ("grid", "reduce", "algorithm", "levels")
TIMEOUT_S = 60


class OverRanks:
    """What a campaign takes where all ranks of `comm` (mpi4py) run it together."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def numbers(self, chosen: Iterable[int], until: float | None) -> Iterator[int]:
        """These numbers, until rank 0's clock is past `until`."""
        for number in chosen:
            late = until is not None and time.monotonic() > until
            if self.comm.bcast(late):
                return
            yield number

    def draw(self, device: str, seed: int, number: int) -> Case:
        """The case with options that ranks have, and where its matrices lie."""
        case = draw(device, seed, number)
        group, one = Draw(seed, number // GROUP, 2), Draw(seed, number, 3)
        given = {name: value for name, value in case.options if name not in NOT_OVER_RANKS}
        if "split" not in given and group.chance(0.7):
            given["grid"] = group.of(grids(self.comm.size))
        given["rounds"] = group.of((None, None, 1, 2, 3))
        whole = case.mistake or case.alias != "none" or case.out == "c"
        given["distribution"] = one.of(
            ("replicated", "root") if whole else ("replicated", "root", "rows", "cols")
        )
        given["root"] = one.whole(0, self.comm.size - 1)
        options = tuple((name, value) for name, value in given.items() if value is not None)
        return dataclasses.replace(case, options=options, resident=False)

    def product(self, case: Case, call: Call) -> Any:
        """C on every rank, from what each rank has of A, B and C."""
        a, b, c, given = call.a, call.b, call.c, dict(case.options)
        distribution, rank, size = given.get("distribution"), self.comm.rank, self.comm.size
        if distribution == "root" and rank != given["root"]:
            a = b = c = None
        if distribution in ("rows", "cols"):
            rows, ks = (cut(side, size)[rank].slice for side in (case.m, case.k))
            op_a, op_b = (slice(None), ks) if distribution == "cols" else (rows, slice(None)), ks
            a = a[op_a[::-1]] if case.trans_a else a[op_a]
            if distribution == "cols":
                b = b[:, op_b] if case.trans_b else b[op_b]
            c = None if c is None else c[rows]
        return hybrid_gemm.gemm(
            a, b, c, device=case.device, comm=self.comm, result="replicated",
            rank_timeout=TIMEOUT_S, **given, **call.keywords,
        )  # fmt: skip

    def judge(self, case: Case) -> Outcome:
        """What came of the case on all ranks together: the worst, and ranks have to agree."""
        mine = judge(case, self.product)
        found = self.comm.allgather((mine.kind, mine.words))
        for kind, rank in itertools.product((EXCEPTION, WRONG), range(self.comm.size)):
            if found[rank][0] == kind:
                return Outcome(kind, f"rank {rank}: {found[rank][1]}")
        kinds = [kind for kind, _words in found]
        if {REFUSED, RIGHT} <= set(kinds):
            return Outcome(WRONG, f"not all ranks refuse: {', '.join(kinds)}")
        return Outcome(*found[0])
