"""Products for which a plan is made: of several workers, and of what is too large for one device.
What is wrong with a call comes here too, and is refused. Plans are carried out as streamed programs
(`execution/streamed.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.on_gpus import refuse_captured
from ..arrays.operand import CallerArrays, Operand, Operands
from ..arrays.operand import home_of as home_among
from ..arrays.other_libraries import TORCH
from ..arrays.strides import span
from ..catalog import Variant
from ..devices.base import Device
from ..errors import shortage_in_words
from ..execution.checked_device import checks_since, tallies_of
from ..execution.complex_products import ComplexProduct
from ..execution.plan_maker import PlanMaker, Prepared
from ..execution.result import Result
from ..execution.streamed import (
    Execution,
    NotStarted,
    StreamedExecutor,
    is_settled,
    reduction_words,
)
from ..execution.timeline import Timeline
from ..kernel_choice import compute_modes
from ..planning.plan import Plan
from ..problem import Problem
from .program import OUT, Call, Write

Progress = Callable[[int], None] | None


class Plans:
    """Plans products over these devices, has them carried out, and says what was done."""

    def __init__(self, devices: Sequence[Device], plans: PlanMaker) -> None:
        self.devices, self.plans = devices, plans
        self.streamed = StreamedExecutor(devices, plans.smaller)

    def run(
        self, arrays: CallerArrays, problem: Problem, resident: bool = False,
        progress: Progress = None, *, described: bool = True,
    ) -> Result:  # fmt: skip
        """A product of a settled problem. What fp32x3 came to, and what was checked, is asked of
        the devices, which takes a while: not where it is not `described`."""
        refuse_captured(arrays.op_a, arrays.op_b, arrays.c, arrays.out)
        with shortage_in_words(problem):
            if problem.is_complex:
                whole = ComplexProduct(arrays, problem, self.devices[0])
                by_three = self.by_three(problem)
                run = whole.run_by_three if by_three else whole.run_by_four
                return run(self.run_real, resident, progress)
            operands = arrays.described(problem, self.devices[0], self.home_of)
            devices, compute = self.devices if described else (), ""
            checked = tallies_of(devices)
            before = self.plans.verdicts(problem) if described else None
            ready, done = self._carry_out(operands, resident, progress, timed=described)
            plan = done.plan or ready.plan
            if before is not None:
                taken = self.plans.verdicts(problem) - before
                compute = compute_modes.ran(ready.variant, problem, taken)
            return Result(
                arrays.result(operands.out.array), plan, ready.variant, done.timeline,
                done.total_ms, reduction_words(plan, self.devices), problem, ready.why, compute,
                checks_since(devices, checked), done.executor, done.reading,
            )  # fmt: skip

    def _carry_out(
        self, operands: Operands, resident: bool, progress: Progress, timed: bool
    ) -> tuple[Prepared, Execution]:
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

    def run_real(
        self, a: Any, b: Any, c: Any = None, *, alpha: Any = 1.0, beta: Any = 0.0, out: Any = None,
        resident: bool = False, progress: Progress = None,
    ) -> Result:  # fmt: skip
        """As `Runner.run`, for the real products of a complex one."""
        arrays = CallerArrays.of(a, b, c, out)
        problem = self.plans.settle(arrays.problem(alpha=alpha, beta=beta))
        with arrays.on_their_gpu(self.devices[0]):
            return self.run(arrays, problem, resident, progress)

    def by_three(self, problem: Problem) -> bool:
        """Whether a product is made of three real ones."""
        return problem.is_complex and self.plans.options.algorithm == "3m"

    def multiply(self, call: Call, write: Write) -> tuple[Any, Again | None]:
        """C of a call, and what makes it again; real products of a complex one are written by
        `write`."""
        a, b, c, alpha, beta, trans_a, trans_b, out = call
        arrays = CallerArrays.of(a, b, c, out, trans_a=trans_a, trans_b=trans_b)
        problem = self.plans.settle(arrays.problem(alpha=alpha, beta=beta))
        if problem.is_complex:
            return self._multiply_complex(arrays, problem, write), None
        hosted = all(x is None or type(x) is np.ndarray for x in call.arrays)
        turned = arrays.turned() if hosted and self.devices[0].on_gpu else None
        if turned:
            arrays.check(problem, self.devices[0])
            of_turned = dataclasses.replace(problem, m=problem.n, n=problem.m)
            self.run(turned, of_turned, described=False)
            return out, None
        with arrays.on_their_gpu(self.devices[0]):
            done = self.run(arrays, problem, described=False)
        settled = is_settled(done.executor) and done.plan and not done.plan.turns_in_memory
        if settled and hosted and c is None and done.c.dtype == problem.out_dtype and done.c.size:
            return done.c, Again(self, arrays, done.plan, done.variant, problem, done.c)
        return done.c, None

    def _multiply_complex(self, arrays: CallerArrays, problem: Problem, write: Write) -> Any:
        """By one real product, or by three."""
        if not TORCH.lends:  # whose graphs keep what is made of A and B
            refuse_captured(arrays.op_a, arrays.op_b, arrays.c, arrays.out)
        whole = ComplexProduct(arrays, problem, self.devices[0])

        def multiply(a: Any, b: Any, c: Any = None, *factors: Any) -> Any:
            alpha, beta, _trans_a, _trans_b, out = factors or (1.0, 0.0, False, False, None)
            call = Call(a, b, c, alpha, beta, out=out)
            return write(call).play(*call.arrays)

        with shortage_in_words(problem), arrays.on_their_gpu(self.devices[0]):
            if self.by_three(problem):
                return whole.by_three(multiply)
            return whole.by_four(multiply)

    def home_of(self, array: Any) -> Any:
        """The device in whose memory an array lies; None is the host's."""
        return home_among(array, self.devices)


class Again:
    """A call without C, of arrays of the host, that was carried out by a plan, made again with
    others that lie alike. What may have changed since is looked at: whether the arrays share
    memory or are page-locked, and whether `out` may be written."""

    def __init__(
        self, plans: Plans, arrays: CallerArrays, plan: Plan, variant: Variant, problem: Problem,
        made: np.ndarray,
    ) -> None:  # fmt: skip
        self._plans, self._problem = plans, problem
        self._trans = arrays.trans_a, arrays.trans_b
        self._shape, self._dtype, self._square = made.shape, made.dtype, arrays.a is arrays.b
        a, b = map(Operand.of, (arrays.op_a, arrays.op_b))
        operands = Operands(problem, a, b, None, Operand.of(made))
        self._lie = [(x.dtype, x.order, x.ld) for x in (operands.a, operands.b, operands.out)]
        self._streamed = plans.streamed.written(plan, variant, operands)
        self._locked = self._read_directly((arrays.a, arrays.b, made))

    def made(self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None) -> np.ndarray | None:
        """The product; None where something has changed, and nothing was done."""
        made = np.empty(self._shape, self._dtype) if out is None else out
        place = span(made)
        if (a is b) != self._square or not made.flags.writeable:
            return None
        for x in (a, b):
            read = span(x)
            if read.start < place.stop and place.start < read.stop:
                return None
        if self._locked != self._read_directly((a, b, made)):
            return None
        trans_a, trans_b = self._trans
        of_a, of_b, of_out = self._lie
        operands = Operands(
            self._problem, Operand(a.T if trans_a else a, *of_a),
            Operand(b.T if trans_b else b, *of_b), None, Operand(made, *of_out), out is None,
        )  # fmt: skip
        try:
            self._plans.streamed.play_once(self._streamed, operands)
        except NotStarted:
            return None
        except MemoryError:
            with shortage_in_words(self._problem):
                raise
        return made

    def _read_directly(self, matrices: Sequence[np.ndarray]) -> list[bool] | None:
        """Which matrices are page-locked, where that matters."""
        device = self._plans.devices[0]
        return None if device.host_memory else [*map(device.reads, matrices)]


class Planned:
    """OUT by a plan, which is made or found at each play, unless one is carried out as before."""

    def __init__(self, plans: Plans, call: Call, write: Write) -> None:
        self._plans, self._write = plans, write
        self._like = call._replace(a=None, b=None, c=None, out=None)
        self._again: Again | None = None

    def __call__(self, slots: list[Any]) -> None:
        a, b, c, out = slots[:4]
        made = self._again.made(a, b, out) if self._again is not None else None
        if made is None:
            call = self._like._replace(a=a, b=b, c=c, out=out)
            made, self._again = self._plans.multiply(call, self._write)
        slots[OUT] = made
