"""`hybrid-gemm run --resume` over MPI ranks: each panel of C is a product over all of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays.unfinished import Panel, Unfinished
from ..errors import counted
from ..execution.result import Result
from ..options import PANEL_SIDE, Options
from ..ranks.launch import agree, together
from ..ranks.rank_plan import RankPlan
from ..ranks.redistribution import Part, parts_of
from ..ranks.unfinished_over_ranks import UnfinishedOverRanks
from ..reporting import resume_report
from ..verify import Verdict
from .inputs import Inputs
from .job import Output, Wanted
from .over_ranks import OverRanks
from .resume import Resuming, facts_of, here, how


class ResumableOverRanks(Resuming, OverRanks):
    """Ranks that resume. `side` is a panel's."""

    def __init__(
        self, comm: Any, options: Options, side: int | None, note: Callable[[str], None]
    ) -> None:
        super().__init__(comm, options)
        self.side, self.note = side or PANEL_SIDE, note
        self.plans: dict[tuple[int, int], RankPlan] = {}  # by a panel's shape, which are few

    def load(self, inputs: Inputs, verify: str) -> None:
        agree(self.comm, together(self.comm, inputs.facts))  # the blocks are loaded panel by panel
        together(self.comm, lambda: self._check_verification(verify))

    @contextlib.contextmanager
    def output(self, inputs: Inputs, path: str | None) -> Iterator[Output]:
        p, comm = self.problem, self.comm
        assert path is not None  # `Wanted` has checked that
        ranks = comm.gather(here(self.runner.local))

        def facts() -> dict[str, Any]:
            found = facts_of(inputs, p, self.options, self.side, self.note)
            return found | {"the number of ranks": comm.size} | _of_all(ranks)

        def make() -> Unfinished:
            return Unfinished(
                path, (p.m, p.n), p.out_dtype, self.side, facts, inputs=inputs.request.names,
                shared=True,
            )  # fmt: skip

        self.unfinished = made = UnfinishedOverRanks(comm, (p.m, p.n), self.side, make)
        with self.told(made.first) if made.first else contextlib.nullcontext():
            made.check_shared()
            yield made

    def run(self, inputs: Inputs, out: Any, wanted: Wanted, progress: Callable) -> Any:
        result = super().run(inputs, out, wanted, progress)
        strip = np.empty(self.strip.shape, self.problem.out_dtype)
        row, col = self.strip.rows.start, self.strip.cols.start
        return dataclasses.replace(result, c=self.unfinished.read(strip, row, col))

    def own_flops(self, panel: Panel) -> int:
        return self._plan_of(panel).flops(self.comm.rank)

    def _plan_of(self, panel: Panel) -> RankPlan:
        """How all ranks multiply a panel. Collective."""
        shape = m, n = len(panel[0]), len(panel[1])
        if shape not in self.plans:
            panel_of = dataclasses.replace(self.problem, m=m, n=n)
            self.plans[shape] = self.runner.plan(panel_of, mapped=self.plan.mapped)
        return self.plans[shape]

    def finish(self, inputs: Inputs, panel: int, advance: Callable[[int], None]) -> Result:
        comm, (rows, cols) = self.comm, self.unfinished.panels[panel]
        plan = self._plan_of((rows, cols))
        a, b, c = together(comm, lambda: self._blocks(inputs, plan, "off", rows.start, cols.start))
        part: Part = parts_of(plan)[comm.rank]
        strip = np.empty(part.shape, self.problem.out_dtype)
        result = self.runner.run(plan, a, b, c, strip, progress=advance)
        together(comm, inputs.check_unchanged)
        row, col = part.rows.start + rows.start, part.cols.start + cols.start
        self.unfinished.finish(panel, self._how(plan, result), strip, row, col)
        return result

    def _how(self, plan: RankPlan, result: Result) -> str:
        """What decides the bits of a panel, on rank 0. Collective."""
        own = "; ".join(how(plan, variant) for plan, variant in result.own) or "nothing"
        ranks = self.comm.gather(own)
        if ranks is None:
            return ""
        grid = " x ".join(map(str, plan.grid))
        return f"grid {grid} over ranks, C in {counted(plan.rounds, 'round')}, {_by_rank(ranks)}"

    def verify(self, inputs: Inputs, result: Any, mode: str, progress: Callable) -> Verdict | None:
        if mode != "off":
            self.blocks = together(self.comm, lambda: self._blocks(inputs, self.plan, mode))
        else:
            self.blocks = None, None, None
        verdict = super().verify(inputs, result, mode, progress)
        if verdict is not None and not verdict.passed:
            self.unfinished.discard()
        return verdict

    def print_result(self, result: Any, verdict: Verdict | None) -> None:
        places = sorted({" ".join(f"{device} on {host}".split()) for host, device in self.places})
        words = f"{counted(self.comm.size, 'rank')}, {', '.join(places)}"
        resume_report.print_result(result, verdict, words)


def _of_all(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Facts of ranks: one for all where they are alike."""
    return {name: _by_rank([rank[name] for rank in ranks]) for name in ranks[0]}


def _by_rank(values: list[str]) -> str:
    """Words of each rank, told once where all say the same."""
    if len(set(values)) == 1:
        return values[0]
    ranks = {value: [r for r, other in enumerate(values) if other == value] for value in values}
    return "; ".join(
        f"of rank {', '.join(map(str, some))} {value}" for value, some in ranks.items()
    )
