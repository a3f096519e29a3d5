"""Complex products over ranks: as one real product of all ranks, or as three."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..arrays.caller_arrays import wait_for_streams
from ..arrays.complex_numbers import RealProduct
from ..arrays.on_gpus import copy_into, empty_beside
from ..arrays.three_products import ThreeProducts, computed, progress_of_one
from ..execution.result import Result
from ..execution.timeline import Timeline
from ..problem import REAL_OF
from . import launch
from .rank_plan import RankPlan


@dataclass(frozen=True)
class ComplexRun:
    """A run of a complex `plan` over the ranks of `comm`; `multiply` is `RankRunner.run`, which is
    given plans of real products. The clock counts what makes their operands and C, unless blocks
    are to be `resident`. Collective."""

    comm: Any
    multiply: Callable[..., Result]
    plan: RankPlan
    resident: bool
    progress: Callable[[int], None] | None

    def by_four(self, a: Any, b: Any, c: Any, out: Any) -> Result:
        """As one real product (`arrays/complex_numbers.py`): each rank expands its own block of
        B."""
        start = time.perf_counter()

        def real_product() -> RealProduct:
            found = RealProduct.of(self.plan.problem, a, b, c, out, by_rows=True)
            wait_for_streams(found.a, found.b)
            return found

        real = launch.together(self.comm, real_product)
        ms = 0 if self.resident else self._slowest_ms(start)
        done = self.multiply(
            self.plan.as_real, real.a, real.b, real.c, real.out, resident=self.resident,
            progress=self.progress,
        )  # fmt: skip
        if real.made is not out:
            copy_into(out, real.made)
        return dataclasses.replace(
            done, c=out, plan=self.plan, problem=self.plan.problem, total_ms=done.total_ms + ms,
            compute=f"{done.compute}, four real products",
        )  # fmt: skip

    def by_three(self, a: Any, b: Any, c: Any, out: Any) -> Result:
        """As three real products (`arrays/three_products.py`), one after the other: each rank makes
        the parts of its blocks, and C of its strips of the three."""
        start, problem = time.perf_counter(), self.plan.problem

        def three_products() -> tuple[ThreeProducts, list[Any]]:
            found = ThreeProducts.of(problem, a, b)
            wait_for_streams(*found.a, *found.b)
            made = [empty_beside([out], out.shape, REAL_OF[problem.dtype]) for _ in found.a]
            return found, made

        three, strips = launch.together(self.comm, three_products)
        progress = progress_of_one(self.progress)
        done: list[Result] = [
            self.multiply(
                self.plan.as_third, x, y, None, strip, resident=self.resident, progress=progress
            )
            for x, y, strip in zip(three.a, three.b, strips, strict=True)
        ]

        def combined() -> Any:
            found = three.combined([x.c for x in done], c if problem.beta else None, out)
            wait_for_streams(found)
            return found

        made = launch.together(self.comm, combined)
        if made is not out:
            copy_into(out, made)
        runs = [x.total_ms for x in done]
        return dataclasses.replace(
            done[0], c=out, plan=self.plan, problem=problem,
            total_ms=sum(runs) if self.resident else self._slowest_ms(start),
            timeline=Timeline.after_each_other([x.timeline for x in done], runs),
            compute=computed([x.compute for x in done]),
        )  # fmt: skip

    def _slowest_ms(self, start: float) -> float:
        """Since `start`, of the rank that took longest."""
        return max(self.comm.allgather(1e3 * (time.perf_counter() - start)))
