"""Plans products of one process, and plays them as streamed programs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

from ..arrays.operand import Operands
from ..kernel_choice import compute_modes
from .checked_device import checks_since, tallies_of
from .executor import Execution
from .plan_maker import PlanMaker, Prepared
from .streamed import NotStarted, StreamedExecutor, reduction_words
from .timeline import Timeline


class LocalExecutor:
    """Plans products and has them carried out, and says what was done."""

    def __init__(self, plans: PlanMaker) -> None:
        self.plans = plans
        self.streamed = StreamedExecutor(plans.devices, plans.smaller)

    def execute(
        self, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None, described: bool = True,
    ) -> tuple[Prepared, Execution]:  # fmt: skip
        """Plans a product of described operands of a settled problem, and carries it out; see
        `Executor`. `compute` and `reduction` are in words. What fp32x3 came to is asked of the
        devices, which takes a while: not where it is not `described`."""
        if not described:
            return self._carry_out(operands, resident, progress, timed=False)
        devices, problem = self.plans.devices, operands.problem
        checked, before = tallies_of(devices), self.plans.verdicts(problem)
        ready, done = self._carry_out(operands, resident, progress, timed=True)
        taken = self.plans.verdicts(problem) - before
        return ready, dataclasses.replace(
            done, compute=compute_modes.ran(ready.variant, problem, taken),
            reduction=reduction_words(done.plan or ready.plan, devices),
            checks=checks_since(devices, checked),
        )  # fmt: skip

    def _carry_out(
        self, operands: Operands, resident: bool, progress: Callable[[int], None] | None,
        timed: bool,
    ) -> tuple[Prepared, Execution]:  # fmt: skip
        there = resident or operands.on_gpus
        known = None if there else self.plans.known(operands)
        if known is not None:
            with contextlib.suppress(NotStarted):
                return known, self.streamed.again(known.plan, known.variant, operands, progress)
        ready = self.plans.prepare(operands, resident=there)
        plan, problem = ready.plan, operands.problem
        if not (problem.m and problem.n):
            return ready, Execution(Timeline(), 0.0, plan)
        return ready, self.streamed.execute(
            plan, ready.variant, operands, resident=resident, progress=progress, timed=timed
        )
