"""Writes products that one GPU makes alone, of arrays that lie there: a launch on the caller's
current stream, with casts, copies and an expansion of complex numbers before and behind it where no
kernel takes the arrays as they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..arrays.caller_arrays import broadcast_c, is_cast_to, is_same
from ..arrays.operand import Operands
from ..arrays.stacks import Stacks
from ..arrays.strides import layout, leading, overlaps_itself
from ..catalog import Variant
from ..devices.cuda import cublas
from ..devices.cuda.device import CudaDevice
from ..devices.roles import BoundProduct
from ..devices.streams import Event
from ..errors import UsageError, shortage_in_words
from ..execution.checked_device import CheckedDevice
from ..execution.executor import Execution
from ..execution.first_calls import FirstCalls
from ..execution.plan_maker import PlanMaker
from ..execution.timeline import Clock
from ..planning.plan import Plan
from ..problem import Problem, is_long, make_problem, sides
from . import small_checks
from .commands import (
    alone,
    apart,
    as_real,
    convert,
    give,
    move,
    move_back,
    new,
    not_captured,
    put,
)
from .launch import CurrentStreams, Launch, backwards, reach_of
from .program import OUT, A, B, C, Call, Command, Play, Program, Unfit, Write

# Of arrays of other GPUs that are copied whole: a plan copies larger ones while it multiplies, and
# takes about 1 ms longer (docs/results/other_calls_before_h100.json), in which a link between GPUs
# carries about as much (docs/results/links8_h200.json).
MOVED_BYTES = 256 << 20


CONVERTED: Any = object()  # a product of converted arrays


class OneGpu:
    """Writes products on one GPU. With `checked`, that GPU with its products checked, these are,
    and calls wait for them."""

    def __init__(
        self, device: CudaDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans, self.ordinal = device, plans, device.ordinal
        self.checked = checked  # the same GPU among the plans' devices, where products are checked
        self.array, self.streams = device.cp.ndarray, CurrentStreams(device)

    @property
    def planned(self) -> CudaDevice | CheckedDevice:
        """This GPU as the plans have it."""
        return self.checked or self.device

    def takes(self, plan: Plan, operands: Operands) -> bool:
        """Whether this GPU has all of a plan's operands, as it multiplies them."""
        problem, c = plan.problem, operands.c
        if len(plan.workers) > 1 or len(plan.products) != 1 or not (problem.k and problem.alpha):
            return False
        read = all(
            x.order and x.lies_on(self.planned) and x.dtype == problem.operands
            for x in (operands.a, operands.b)
        )
        made = [operands.out.written_in_place(self.planned, x) for x in made_dtypes(problem)]
        added = c is None or not problem.beta or c.lies_on(self.planned)
        return read and added and any(made)

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None, timed: bool = True,
    ) -> Execution:  # fmt: skip
        """See `Executor`: one product on the caller's current stream of this GPU. Nothing travels
        meanwhile, whether or not it is `timed`."""
        problem, device, c = plan.problem, self.device, operands.c
        a, b, out = (x.array for x in (operands.a, operands.b, operands.out))
        clock = Clock({0: device})
        if self.checked:
            self.checked.prepare(variant, a, b, problem.operands)
        with device.current():
            stream = self.streams()
            call = self.bound(variant, a, b, out, problem)
            clock.start()
            if c is not None and c is not operands.out and problem.beta:
                put(self.checked, [None, None, c.array, out])

            def launches() -> Event:
                start = stream.record()
                call(a, b, out, stream)
                return start

            start = stream.start(launches)
            clock.mark(0, "multiply", start, stream.record(), flops=problem.flops)
            stream.synchronize()
            clock.stop()
        if progress:
            progress(problem.flops)
        return Execution(clock.timeline(), clock.total_ms, plan)

    def write(self, call: Call, planned: Write) -> Program:
        """The program of a call; `planned` writes those for which a plan has to be made."""
        given = [x for x in call.arrays if x is not None]
        hosts = [x for x in given if type(x) is not self.array]
        elsewhere = [x for x in given if type(x) is self.array and x.data.device_id != self.ordinal]
        if hosts or elsewhere:
            fits = self._may_bring(call, hosts) if hosts else self._may_move(call, elsewhere)
            moved = fits and not self.checked and not (hosts and elsewhere)
            return self._after_moves(call, planned, elsewhere) if moved else planned(call)
        with self.device.current(), self.streams().unrestricted():
            return self._here(call, planned)

    def _may_bring(self, call: Call, hosts: list[Any]) -> bool:
        """Whether one of A and B is a small array of the host, which is copied here first."""
        (host, *more), most = hosts, self.plans.most_hosted
        return (
            not more
            and (host is call.a or host is call.b)
            and type(host) is np.ndarray
            and (host.ndim == 2 and host.dtype.kind in "fiu" and host.dtype.isnative)
            and host.itemsize <= 8  # longdouble is refused elsewhere
            and host.nbytes <= most
        )

    def _may_move(self, call: Call, elsewhere: list[Any]) -> bool:
        """Whether arrays of other GPUs are copied here first, and C to where OUT or A lies."""
        most = min(MOVED_BYTES, self.plans.options.max_device_memory or MOVED_BYTES)
        out, read = call.out, call.c is None or call.beta
        overlaps = out is not None and overlaps_itself(out)
        return bool(read and sum(x.nbytes for x in elsewhere) <= most and not overlaps)

    def _after_moves(self, call: Call, planned: Write, elsewhere: list[Any]) -> Program:
        """The product of arrays that are here once those `elsewhere` and of the host are copied."""
        a, b, c, out = range(4, 8)
        in_place = call.c is not None and call.c is call.out
        here = call.out is not None and call.out.data.device_id == self.ordinal
        gpus = dict.fromkeys((self.ordinal, *(x.data.device_id for x in elsewhere)))
        current = self.device.cp.cuda.get_current_stream
        into = [(OUT, out)] if here else [(C, out)] if in_place else []
        moves = [(A, a), (B, b), (C, c), *into]
        inner = Play(self._inner(planned), call, (a, b, out if in_place else c, out))
        return Program(
            [
                *(partial(not_captured, partial(current, gpu), False) for gpu in gpus), alone(call),
                partial(move, self.device.cp, self.ordinal, moves), inner, partial(move_back, out),
            ],
            room=4, otherwise=planned(call), place=self.device,
            gives_up=(Unfit, MemoryError),  # a plan takes turns
        )  # fmt: skip

    def not_captured(self, *, lent: bool) -> Command:
        """`not_captured` for the current stream of this GPU."""
        current = partial(self.device.cp.cuda.get_current_stream, self.ordinal)
        return partial(not_captured, current, lent)

    def _inner(self, planned: Write) -> Write:
        return partial(self.write, planned=planned)

    def _here(self, call: Call, planned: Write) -> Program:
        a, b, c, alpha, beta, trans_a, trans_b, out = call
        if c is not None and out is not None and is_same(c, out):
            c = out  # two views of it
        added = None
        if c is not None:  # which is copied to where the product is added to it
            if out is None and not beta:  # which a run warns of
                return planned(call)
            try:
                added = broadcast_c(c, *sides(a, b, trans_a=trans_a, trans_b=trans_b)[:2])
            except UsageError:  # which a run raises
                return planned(call)
        problem = self.plans.settle(
            make_problem(
                a, b, added, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=out
            )
        )
        with shortage_in_words(problem):
            like = self.array((problem.m, problem.n), problem.out_dtype) if out is None else out
            turned = self._is_turned(problem, like)
            how = self._worked_out(problem, call._replace(c=c), like, turned)
        if how is None:
            return planned(call)
        if how is CONVERTED:
            return self._converted(problem, call, planned)
        reaches = reach_of(a), reach_of(b), reach_of(like)
        bound, preparable = how
        make = self.array, like.shape, like.dtype
        views = partial(_views, (bool(trans_a), bool(trans_b)), turned)
        launch = Launch(
            self.streams, bound, reaches, make, views, turned=turned,
            preparable=preparable,
        )  # fmt: skip
        commands = [self.not_captured(lent=False)] if self.checked else []
        added = bool(problem.beta) and c is not out
        if out is None:
            commands.append(partial(new, make))
        else:
            commands.append(partial(apart, reaches, added))
        commands += [partial(put, self.checked)] if added else []
        native = not (self.checked or backwards(a, b, like) or (added and out is not None))
        return Program(
            [*commands, launch], otherwise=planned(call), place=self.device,
            launch=launch if native else None, task=problem,
        )  # fmt: skip

    def _worked_out(
        self, problem: Problem, call: Call, like: Any, turned: bool
    ) -> tuple[BoundProduct, bool] | None:
        """The bound product that makes `like`, and whether it is one to be prepared; `CONVERTED`
        where no kernel takes the arrays as they lie, and None for what takes a plan."""
        a, b, c = call.a, call.b, call.c
        if not (problem.k and problem.alpha):
            wider = problem.out_dtype != np.result_type(a.dtype, b.dtype)  # of which a run warns
            return None if wider or backwards(a, b, like) else self._unread(problem, c, like)
        op_a, op_b = a.T if call.trans_a else a, b.T if call.trans_b else b
        made = problem, op_a, op_b, like
        if turned:
            made = replace(problem, m=problem.n, n=problem.m), op_b.T, op_a.T, like.T
        if not self._fits(*made, c):
            return CONVERTED
        if problem.is_complex:
            return self._complex(*made) or CONVERTED
        return self._real(*made)

    def _unread(self, problem: Problem, c: Any, like: Any) -> tuple[BoundProduct, bool] | None:
        """beta C, where k or alpha is 0, so that A and B are not read."""
        beta, placed = problem.beta, (type(like), like.shape, like.dtype.name)
        if placed != (self.array, (problem.m, problem.n), problem.out_dtype):
            return None
        if beta not in (0, 1) and (problem.out_dtype != problem.dtype or problem.is_complex):
            return None  # it is rounded, or wraps, once; and an Inf stays in its part
        if (beta and type(c) is not self.array) or overlaps_itself(like) or self.checked:
            return None

        def scale(_a: Any, _b: Any, c: Any, _stream: Any) -> None:
            if not beta:
                c.fill(0)
            elif beta != 1:
                c *= c.dtype.type(beta)

        return scale, False

    def _is_turned(self, problem: Problem, like: Any) -> bool:
        """Whether C^T = op(B)^T op(A)^T is made: C's columns are contiguous, and its rows are
        not."""
        if problem.is_complex or self.checked or type(like) is not self.array:
            return False
        matches = like.shape == (problem.m, problem.n)
        return matches and not leading(like, "n") and bool(leading(like, "t"))

    def _fits(self, problem: Problem, a: Any, b: Any, like: Any, c: Any) -> bool:
        """Whether kernels read A and B as they lie, and write C as `like` does."""
        made = made_dtypes(problem)
        return bool(
            all(x.dtype == problem.operands for x in (a, b))
            and any(like.dtype == x for x in made)
            and problem.out_dtype in made
            and type(like) is self.array
            and like.shape == (problem.m, problem.n)
            and leading(like, "n")
            and all(leading(x, "n") or leading(x, "t") for x in (a, b))
            and problem.m * problem.n * problem.k
            and problem.alpha
            and (not problem.beta or type(c) is self.array)
        )

    def _real(self, problem: Problem, a: Any, b: Any, c: Any) -> tuple[BoundProduct, bool] | None:
        """The bound product, and whether it is one to be prepared; None where several GPUs together
        are worth what they cost, and where alpha would scale pieces of a long k."""
        if is_long(problem.k) and problem.scaled_at_last:
            return None
        layouts = "".join((layout(x) or "n")[0] for x in (a, b))
        variant = self.plans.alone(problem, layouts, self.planned)
        if variant is None:
            return None
        call = self.bound(variant, a, b, c, problem)
        # What is started natively is not checked.
        ready = not self.checked and self.device.preparable(variant, a, b)
        if ready and (others := self.plans.rivals(problem, layouts, self.device, variant)):
            rivals = [self.bound(x, a, b, c, problem) for x in others]
            return FirstCalls([call, *rivals], self.device), False  # until one is kept
        return call, ready

    def _complex(
        self, problem: Problem, a: Any, b: Any, c: Any
    ) -> tuple[BoundProduct, bool] | None:
        """As `_real`, by cuBLAS, which is mostly faster at complex products than any kernel at the
        real ones (docs/notes/choosing.md); None where other kernels or arithmetics were asked
        for."""
        options, conjugated = self.plans.options, (problem.conj_a, problem.conj_b)
        taken = all(leading(x, "t") or not conj for x, conj in zip((a, b), conjugated, strict=True))
        if (
            self.checked
            or options.kernel not in ("auto", "cublas")
            or (options.algorithm != "ordinary" or problem.compute != "fp32" or not taken)
            or is_long(problem.m, problem.n)  # kernels/cublas.toml
            or not (
                self.plans.counts == (1,) or self.plans.alone(problem.as_real(), "nn", self.device)
            )
        ):
            return None
        scale = {"alpha": problem.alpha, "beta": problem.beta}
        return cublas.bind(a, b, c, **scale, conjugated=conjugated), True

    def bound(self, variant: Variant, a: Any, b: Any, c: Any, problem: Problem) -> Any:
        """The product of matrices that lie as these, worked out, and what it needs compiled."""
        scale = {"alpha": problem.alpha, "beta": problem.beta}
        if self.checked:
            return small_checks.bind(self.checked, self.device, variant, a, b, c, **scale)
        return self.device.loading_together(lambda d: d.bind(variant, a, b, c, **scale))

    def _converted(self, problem: Problem, call: Call, planned: Write) -> Program:
        """The program of arrays that no kernel takes as they lie."""
        a, b, c, out = call.arrays
        options, (m, n, k) = self.plans.options, (problem.m, problem.n, problem.k)
        copies = (m * k + 2 * k * n + m * n) * np.dtype(problem.dtype).itemsize  # at most
        if (
            self.checked
            or (problem.is_complex and options.algorithm == "3m")
            or (options.max_device_memory and copies > options.max_device_memory)  # in turns
            or not _is_convertible(problem, a, b, c, out)
            or not self.plans.alone(problem.as_real(), "nn", self.device)
        ):
            return planned(call)
        commands = [self.not_captured(lent=True), alone(call)]
        if problem.is_complex:
            real, at = problem.as_real(), 4
            like = Call(None, None, None, real.alpha, real.beta)
            commands += [
                partial(as_real, problem, (bool(call.trans_a), bool(call.trans_b)), at),
                Play(self._inner(planned), like, (at, at + 1, at + 2, at + 3)),
                partial(give, at + 4, problem.out_dtype),
            ]
        else:
            found = _conversion(problem, a, b, out)
            if found is None:
                return planned(call)
            of_a, of_b, aside = found
            x, y, z = 4 if of_a else A, 5 if of_b else B, 6 if aside else OUT
            for array, of, to, dtype in ((a, A, x, of_a), (b, B, y, of_b)):
                if dtype:
                    down, along = map(abs, array.strides)
                    commands.append(partial(convert, of, to, dtype, down < along))
            commands.append(Play(self._inner(planned), call, (x, y, C, z)))
            commands += [partial(give, z, problem.out_dtype)] if aside else []
        return Program(
            commands, room=5, otherwise=planned(call), place=self.device,
            gives_up=(Unfit, MemoryError), task=problem,
        )  # fmt: skip


def _views(trans: tuple[bool, bool], turned: bool, a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
    """op(A), op(B) and C as a product takes them."""
    x, y = (v.T if yes else v for v, yes in zip((a, b), trans, strict=True))
    return (y.T, x.T, c.T) if turned else (x, y, c)


def made_dtypes(problem: Problem) -> set[str]:
    """The dtypes that kernels make C in at once. Of a long k they add pieces to C, which is not to
    be rounded to 16 bits in between."""
    return {problem.dtype} if is_long(problem.k) else {problem.dtype, problem.operands}


def _is_convertible(problem: Problem, a: Any, b: Any, c: Any, out: Any) -> bool:
    """Whether the product is that of these arrays alone, and nothing is wrong with them, which a
    run would say."""
    dtype = np.result_type(a.dtype, b.dtype).name
    if c is not None and (not problem.beta or problem.out_dtype != dtype):
        return False  # of which a run warns
    if out is not None and (
        out.shape != (problem.m, problem.n)
        or not (out.dtype.name == problem.out_dtype or (c is None and _casts(problem, out)))
        or overlaps_itself(out)
    ):
        return False
    return bool(problem.m * problem.n)


def _casts(problem: Problem, out: Any) -> bool:
    """Whether the product is cast to `out`, by CuPy on any GPU."""
    plain = "bfloat16" not in (problem.out_dtype, out.dtype.name)
    return plain and is_cast_to(out.dtype, problem.out_dtype)


def _conversion(
    problem: Problem, a: Any, b: Any, out: Any
) -> tuple[str | None, str | None, bool] | None:
    """The dtype that each of A and B of a real product is copied as, None where it stays, and
    whether C is made aside; None where none of it is needed, or CuPy casts on some GPUs alone."""
    made = problem.dtype, problem.operands
    of_a, of_b = (
        None if _lies(x) and x.dtype.name == problem.operands else problem.operands for x in (a, b)
    )
    if any(x.dtype.name == "bfloat16" != problem.operands for x in (a, b)):
        return None
    if out is None:
        aside = problem.out_dtype not in made
    else:
        aside = not (_lies(out) and out.dtype.name in made)
    return (of_a, of_b, aside) if of_a or of_b or aside else None


def _lies(x: Any) -> bool:
    """Whether a matrix lies in rows or in columns."""
    return bool(leading(x, "n") or leading(x, "t"))


def stacked(
    gpu: OneGpu, inner: Program, a: Any, b: Any, stacks: Stacks, *, given: bool, otherwise: Program
) -> Program:  # fmt: skip
    """The program of CuPy's stacks and vectors whose views `inner` multiplies by one launch,
    `given` an OUT or not; `otherwise` where it is none."""
    launch, out = inner.launch, stacks.out
    if not isinstance(launch, Launch) or backwards(a, b, out):
        return otherwise

    def views(a: Any, b: Any, out: Any) -> tuple[Any, Any, Any]:
        made = Stacks.of(a, b, out)
        return made.joined() or (made.a, made.b, made.c)

    reaches, make = (reach_of(a), reach_of(b), reach_of(out)), (gpu.array, out.shape, out.dtype)
    mine = launch.of(reaches, make, views)
    first = partial(apart, reaches, False) if given else partial(new, make)
    return Program([first, mine], otherwise=otherwise, place=gpu.device, launch=mine)
