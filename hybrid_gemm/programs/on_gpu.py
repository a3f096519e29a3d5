"""Writes products that one GPU makes alone, of arrays that lie there: a launch on the caller's
current stream, with casts, copies and an expansion of complex numbers before and behind it where no
kernel takes the arrays as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arrays.caller_arrays import broadcast_c, is_cast_to, is_same
from ..arrays.on_gpus import moved, on_gpu_of
from ..arrays.stacks import Stacks
from ..arrays.strides import layout, leading, overlaps_itself
from ..catalog import Variant
from ..devices.cuda import cublas
from ..devices.cuda.device import CudaDevice
from ..devices.roles import BoundProduct
from ..errors import UsageError, shortage_in_words
from ..execution.checked_device import CheckedDevice
from ..execution.first_calls import FirstCalls
from ..execution.plan_maker import PlanMaker
from ..problem import Problem, is_long, make_problem, sides
from . import small_checks
from .commands import (
    apart,
    as_stacks,
    looks_at,
    not_captured,
    put,
    whole,
)
from .launch import CurrentStreams, Launch, Launches
from .program import OUT, A, B, C, Call, Command, Play, Program, Unfit, Write

# Of arrays of other GPUs that are copied whole: a plan copies larger ones while it multiplies, and
# takes about 1 ms longer (docs/results/other_calls_before_h100.json), in which a link between GPUs
# carries about as much (docs/results/links8_h200.json).
MOVED_BYTES = 256 << 20


class OneGpu:
    """Writes products on one GPU. With `checked`, that GPU with its products checked, these are,
    and calls wait for them."""

    def __init__(
        self, device: CudaDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans, self.ordinal = device, plans, device.ordinal
        self.checked = checked  # the same GPU among the plans' devices, where products are checked
        self.array, self.streams = device.cp.ndarray, CurrentStreams(device)

    def write(self, call: Call, planned: Write) -> Program:
        """The program of a call; `planned` writes those for which a plan has to be made."""
        given = [x for x in call.arrays if x is not None]
        hosts = [x for x in given if type(x) is not self.array]
        elsewhere = [x for x in given if type(x) is self.array and not self._has(x)]
        if hosts or elsewhere:
            fits = self._may_bring(call, hosts) if hosts else self._may_move(call, elsewhere)
            copied = fits and not self.checked and not (hosts and elsewhere)
            return self._after_moves(call, planned, elsewhere) if copied else planned(call)
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
        in_place = call.c is not None and call.c is call.out
        inner = Play(partial(self.write, planned=planned), call)
        gpus = dict.fromkeys((self.ordinal, *(x.data.device_id for x in elsewhere)))
        current = self.device.cp.cuda.get_current_stream

        def multiply(slots: list[Any]) -> None:
            (x, y, z), out = (self._brought(v) for v in slots[:OUT]), slots[OUT]
            place = z if in_place else out if out is not None and self._has(out) else None
            made, like = inner(x, y, z, place), slots[A] if out is None else out
            home = (made if isinstance(like, np.ndarray) else like).data.device_id
            made = made if made.data.device_id == home else moved(made, home)
            if out is None:
                slots[OUT] = made
            elif made is not out:
                with on_gpu_of(out):
                    out[...] = made

        return Program(
            [
                *(partial(not_captured, partial(current, gpu), False) for gpu in gpus),
                *([partial(apart, looks_at(call))] if call.out is not None else []), multiply,
            ],
            otherwise=planned(call), place=self.device,
            gives_up=(Unfit, MemoryError),  # a plan takes turns
        )  # fmt: skip

    def _has(self, x: Any) -> bool:
        """Whether a GPU's array lies on this one."""
        return bool(x.data.device_id == self.ordinal)

    def _brought(self, x: Any) -> Any:
        """An array on this GPU: itself, or a copy; None where there is none."""
        if isinstance(x, np.ndarray):
            return self.device.cp.asarray(x)
        return x if x is None or self._has(x) else moved(x, self.ordinal)

    def not_captured(self, *, lent: bool) -> Command:
        """`not_captured` for the current stream of this GPU."""
        current = partial(self.device.cp.cuda.get_current_stream, self.ordinal)
        return partial(not_captured, current, lent)

    def _here(self, call: Call, planned: Write) -> Program:
        a, b, c, alpha, beta, trans_a, trans_b, out = call
        if c is not None and out is not None and is_same(c, out):
            c = out  # two views of it
        call, added = call._replace(c=c), None
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
        shape = problem.m, problem.n
        if out is not None and out.shape != shape:  # which a run raises
            return planned(call)
        with shortage_in_words(problem):
            like = self.array(shape, problem.out_dtype) if out is None else out
            steps = self._steps(problem, call, added, like)
        if steps is None:
            return planned(call)
        return self.program(steps, call, planned(call), problem)

    def program(
        self, steps: Sequence[Any], call: Call, otherwise: Program, task: object = "stacks"
    ) -> Program:
        """The program of these steps on this GPU, after checks of what differs from call to
        call."""
        launches = [x for x in steps if isinstance(x, Launch)]
        aside = any(max(x.slots) > OUT for x in launches)
        commands: list[Command] = []
        if self.checked or aside:
            commands.append(self.not_captured(lent=aside))
        looked_at = {} if call.out is None else looks_at(call)
        if looked_at:
            commands.append(partial(apart, looked_at))
        native = None
        if len(launches) == len(steps) and not self.checked and all(looked_at.values()):
            native = Launches(launches, looked_at)
        return Program(
            [*commands, *([native] if native else steps)], room=4, otherwise=otherwise,
            gives_up=(Unfit, MemoryError) if aside else (Unfit,), place=self.device,
            launch=native, task=task,
        )  # fmt: skip

    def _steps(self, problem: Problem, call: Call, added: Any, like: Any) -> list[Any] | None:
        """What makes `like` of arrays of this GPU: casts to what kernels read, C where it is added
        to, the product, and casts of it. None for what takes a plan."""
        if not (problem.k and problem.alpha):
            return self._unread(problem, call, added, like)
        if problem.is_complex and not self.takes_complex(problem):
            return None
        at = {A: call.a, B: call.b, C: added, OUT: like}  # by slot
        slots, trans = [A, B, OUT], [bool(call.trans_a), bool(call.trans_b)]
        steps: list[Any] = []
        dtypes, out_dtype = made_dtypes(problem), problem.out_dtype
        conjugated = problem.conj_a, problem.conj_b  # which cuBLAS does to transposed ones
        copied = [
            i for i in (A, B)
            if at[i].dtype != problem.operands or not (leading(at[i], "n")
               or (leading(at[i], "t") and not conjugated[i]))
        ]  # fmt: skip
        may_turn = not (self.checked or problem.is_complex)
        made = leading(like, "n") or (may_turn and leading(like, "t"))
        aside = not (made and like.dtype.name in dtypes and out_dtype in dtypes)
        if (copied or aside) and not self._may_copy(problem, call):
            return None
        for i in copied:
            turned = abs(at[i].strides[0]) < abs(at[i].strides[1]) and not conjugated[i]
            source = at[i].T if turned else at[i]
            slots[i], trans[i] = 4 + i, trans[i] != turned
            at[4 + i] = self.array(source.shape, problem.operands)
            steps.append(self.cast(i, source, 4 + i, at[4 + i]))
        if aside:
            problem = problem.having(out_dtype=out_dtype if out_dtype in dtypes else problem.dtype)
            slots[2], at[6] = 6, self.array(like.shape, problem.out_dtype)
        z = at[slots[2]]
        if problem.beta and not (call.c is call.out and z is like):
            of = OUT if call.c is call.out else C
            steps.append(self._put(of, added, slots[2], z))
        steps.append(self._product(problem, conjugated, trans, slots, [at[i] for i in slots]))
        if z is not like:
            if out_dtype not in (z.dtype, like.dtype):  # it is rounded, or wraps, before it is cast
                at[7] = self.array(like.shape, out_dtype)
                steps.append(self.cast(6, z, 7, at[7]))
            steps.append(self.cast(max(at), at[max(at)], OUT, like))
        return None if None in steps else steps

    def _product(
        self, problem: Problem, conjugated: tuple[bool, bool], trans: Sequence[bool],
        slots: Sequence[int], arrays: Sequence[Any],
    ) -> Launch | None:  # fmt: skip
        """A launch of the product of arrays in three slots, the first of which are to be
        transposed or not; None for what takes a plan."""
        (x, y, to), (a, b, z), flips = slots, arrays, (trans[A], trans[B], False)
        turned = not leading(z, "n")
        if turned:  # C^T = op(B)^T op(A)^T
            x, y, a, b, flips = y, x, b, a, (not trans[B], not trans[A], True)
        views = partial(_views, flips)
        bound: tuple[Any, bool] | None
        if problem.is_complex:
            scale = {"alpha": problem.alpha, "beta": problem.beta}
            bound = cublas.bind(*views(a, b, z), **scale, conjugated=conjugated), True
        else:
            sides = {"m": problem.n, "n": problem.m} if turned else {}
            bound = self._real(problem.having(**sides), *views(a, b, z))
        if bound is None:
            return None
        return Launch(
            self.streams, bound[0], (self.array, z.shape, z.dtype), views, preparable=bound[1],
            slots=(x, y, to),
        )  # fmt: skip

    def cast(self, of: int, source: Any, to: int, made: Any) -> Launch | None:
        """A launch that copies a slot's array, which lies as `source` once it is turned or
        repeated, to another's, which lies as `made`; None where no kernel does."""
        call = self.device.bind_cast(source, made)
        if call is None:
            return None
        return Launch(
            self.streams, call, (self.array, made.shape, made.dtype),
            lambda a, _b, c: (a, None, c), slots=(of, of, to),
        )  # fmt: skip

    def _put(self, of: int, added: Any, to: int, made: Any) -> Command:
        """Copies C to where the product is added to it."""
        cast = None if self.checked else self.cast(of, added, to, made)
        return cast or partial(put, self.checked, of, to, (self.array, made.shape, made.dtype))

    def _may_copy(self, problem: Problem, call: Call) -> bool:
        """Whether arrays are copied here for a product that is that of these arrays alone, and
        nothing is wrong with them, which a run would say."""
        a, b, c, out = call.arrays
        options, (m, n, k) = self.plans.options, (problem.m, problem.n, problem.k)
        copies = (m * k + 2 * k * n + m * n) * np.dtype(problem.dtype).itemsize  # at most
        dtype = np.result_type(a.dtype, b.dtype).name
        return not (
            self.checked
            or (options.max_device_memory and copies > options.max_device_memory)  # in turns
            or (c is not None and (not problem.beta or problem.out_dtype != dtype))
            or (out is not None and c is not None and out.dtype.name != problem.out_dtype)
            or (out is not None and not is_cast_to(out.dtype, problem.out_dtype))
            or (out is not None and overlaps_itself(out))
            or not self.plans.alone(problem.as_real(), "nn", self.checked or self.device)
        )

    def _unread(self, problem: Problem, call: Call, added: Any, like: Any) -> list[Any] | None:
        """beta C, where k or alpha is 0, so that A and B are not read."""
        beta, (a, b) = problem.beta, (call.a, call.b)
        wider = problem.out_dtype != np.result_type(a.dtype, b.dtype)  # of which a run warns
        if wider or like.dtype.name != problem.out_dtype:
            return None
        if beta not in (0, 1) and (problem.out_dtype != problem.dtype or problem.is_complex):
            return None  # it is rounded, or wraps, once; and an Inf stays in its part
        if overlaps_itself(like) or self.checked:
            return None

        def scale(_a: Any, _b: Any, c: Any, _stream: Any) -> None:
            if not beta:
                c.fill(0)
            elif beta != 1:
                c *= c.dtype.type(beta)

        make = self.array, like.shape, like.dtype
        puts = [self._put(C, added, OUT, like)] if beta and call.c is not call.out else []
        return [*puts, Launch(self.streams, scale, make, preparable=False)]

    def _real(self, problem: Problem, a: Any, b: Any, c: Any) -> tuple[BoundProduct, bool] | None:
        """The bound product, and whether it is one to be prepared; None where several GPUs together
        are worth what they cost, and where alpha would scale pieces of a long k."""
        if is_long(problem.k) and problem.scaled_at_last:
            return None
        layouts = "".join((layout(x) or "n")[0] for x in (a, b))
        variant = self.plans.alone(problem, layouts, self.checked or self.device)
        if variant is None:
            return None
        call = self.bound(variant, a, b, c, problem)
        # What is started natively is not checked.
        ready = not self.checked and self.device.preparable(variant, a, b)
        if ready and (others := self.plans.rivals(problem, layouts, self.device, variant)):
            rivals = [self.bound(x, a, b, c, problem) for x in others]
            return FirstCalls([call, *rivals], self.device), False  # until one is kept
        return call, ready

    def takes_complex(self, problem: Problem) -> bool:
        """Whether cuBLAS makes a complex product, mostly faster than any kernel the real ones
        (docs/notes/choosing.md): not where other kernels or arithmetics were asked for."""
        options = self.plans.options
        return not (
            self.checked
            or options.kernel not in ("auto", "cublas")
            or (options.algorithm != "ordinary" or problem.compute != "fp32")
            or is_long(problem.m, problem.n)  # kernels/cublas.toml
            or not (
                self.plans.counts == (1,) or self.plans.alone(problem.as_real(), "nn", self.device)
            )
        )

    def bound(self, variant: Variant, a: Any, b: Any, c: Any, problem: Problem) -> Any:
        """The product of matrices that lie as these, worked out, and what it needs compiled."""
        scale = {"alpha": problem.alpha, "beta": problem.beta}
        if self.checked:
            return small_checks.bind(self.checked, self.device, variant, a, b, c, **scale)
        return self.device.loading_together(lambda d: d.bind(variant, a, b, c, **scale))


def _views(flips: Sequence[bool], a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
    """Matrices as a product takes them: transposed, or not."""
    x, y, z = (v.T if flip else v for v, flip in zip((a, b, c), flips, strict=True))
    return x, y, z


def made_dtypes(problem: Problem) -> set[str]:
    """The dtypes that kernels make C in at once. Of a long k they add pieces to C, which is not to
    be rounded to 16 bits in between."""
    return {problem.dtype} if is_long(problem.k) else {problem.dtype, problem.operands}


def _lies(x: Any) -> bool:
    """Whether a matrix lies in rows or in columns."""
    return bool(leading(x, "n") or leading(x, "t"))


def stacked(
    gpu: OneGpu, inner: Program, a: Any, b: Any, stacks: Stacks, *, given: bool, otherwise: Program
) -> Program:  # fmt: skip
    """The program of CuPy's stacks and vectors whose views `inner` multiplies by launches, `given`
    an OUT or not; `otherwise` where it is none."""
    looked_at, out = looks_at(Call(a, b, out=stacks.out)), stacks.out
    if not isinstance(inner.launch, Launches) or None in looked_at.values():
        return otherwise
    make = gpu.array, out.shape, out.dtype
    native = Launches(inner.launch.launches, looked_at, make)
    aside = any(max(x.slots) > OUT for x in native.launches)
    looks: list[Command] = [gpu.not_captured(lent=True)] if aside else []
    looks += [partial(apart, looked_at)] if given else []
    return Program(
        [*looks, partial(as_stacks, make), native, whole], room=5, otherwise=otherwise,
        place=gpu.device, launch=native, gives_up=(Unfit, MemoryError),
    )  # fmt: skip
