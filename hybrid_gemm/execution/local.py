"""Executes plans in this process: by the one GPU that has all of it, or by threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..arrays.operand import Operands
from ..catalog import Variant
from ..kernel_choice import compute_modes
from ..planning.plan import Plan
from ..problem import Problem
from .checked_device import checks_of
from .executor import Execution, Executor
from .plan_maker import PlanMaker
from .single_gpu import SingleGpuExecutor
from .threads import ThreadExecutor, reduction_words
from .timeline import Timeline


class LocalExecutor:
    """Chooses between the executors of one process, and says what they did. `single_gpus` are
    those of GPUs that may work alone, by ordinal."""

    def __init__(self, plans: PlanMaker, single_gpus: dict[int, SingleGpuExecutor]) -> None:
        self.plans, self.single_gpus = plans, single_gpus
        self.threads = ThreadExecutor(plans.devices, plans.smaller)

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None, described: bool = True,
    ) -> Execution:  # fmt: skip
        """See `Executor`; `compute` and `reduction` are in words. What fp32x3 came to is asked of
        the devices, which takes a while: not where it is not `described`."""
        checked = checks_of(self.plans.devices)
        verdicts = self.plans.verdicts if described else _none_taken
        before = verdicts(plan.problem)
        done = Execution(Timeline(), 0.0, plan)
        if plan.problem.m and plan.problem.n:
            executor = self._executor_for(plan, operands)
            done = executor.execute(
                plan, variant, operands, resident=resident, progress=progress, timed=described
            )  # fmt: skip
        taken = verdicts(plan.problem) - before
        checks = checks_of(self.plans.devices)
        return dataclasses.replace(
            done, compute=compute_modes.ran(variant, plan.problem, taken),
            reduction=reduction_words(done.plan or plan, self.plans.devices),
            checks=checks and checked and checks.since(checked),
        )  # fmt: skip

    def _executor_for(self, plan: Plan, operands: Operands) -> Executor:
        ordinal = getattr(operands.out.home, "ordinal", None)
        single = self.single_gpus.get(ordinal) if ordinal is not None else None
        return single if single and single.takes(plan, operands) else self.threads


def _none_taken(problem: Problem) -> np.ndarray:
    """As `PlanMaker.verdicts`, of nothing."""
    return np.zeros(len(compute_modes.ways(problem)), int)
