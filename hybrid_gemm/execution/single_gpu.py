"""Products that one GPU does alone, launched as CuPy launches its own.

What has to be worked out is worked out once for arrays laid out alike. Of arrays that lie on the
GPU nothing is split, moved or waited for, so a call costs its launch, on the caller's current
stream. Small arrays of the host are copied there and back whole, by the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.caller_arrays import broadcast_c, is_same, shares_memory
from ..arrays.on_gpus import moved
from ..arrays.operand import Operands
from ..arrays.other_libraries import TORCH
from ..arrays.strides import layout, leading, overlaps_itself
from ..catalog import Variant
from ..devices.cuda import cublas
from ..devices.cuda.device import CudaDevice
from ..devices.roles import BoundProduct
from ..devices.streams import Event
from ..errors import UsageError, shortage_in_words
from ..host.kept import Known
from ..planning.plan import Plan
from ..problem import Problem, are_numbers, is_long, make_problem, sides
from . import small_checks
from .checked_device import CheckedDevice
from .conversions import ComplexConversion, Conversion, conversion, multiplied
from .executor import Execution
from .first_calls import FirstCalls
from .found import CurrentStreams, Found, overlap, reach_of
from .native_calls import Reaches, does_more
from .plan_maker import PlanMaker
from .stacks_on_gpu import StacksOnGpu
from .tensors_on_gpu import TensorsOnGpu
from .timeline import Clock

Converted = Conversion | ComplexConversion
# Of arrays of other GPUs that are copied whole: a plan copies larger ones while it multiplies, and
# takes about 1 ms longer (docs/results/other_calls_before_h100.json), in which a link between GPUs
# carries about as much (docs/results/links8_h200.json).
MOVED_BYTES = 256 << 20


class SingleGpuExecutor:
    """Products on one GPU: `execute` for a plan, `gemm` for repeated calls, which gives None for
    what takes a plan. With `checked`, that GPU with its products checked, these are, and `gemm`
    waits for them."""

    def __init__(
        self, device: CudaDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans, self.ordinal = device, plans, device.ordinal
        self.checked = checked  # the same GPU among the plans' devices, where products are checked
        self.array = device.cp.ndarray
        self.current = device.cp.cuda.get_current_stream
        self.known: Known[tuple, Found | Converted | None] = Known()
        self.stream = CurrentStreams(device)
        self.stacks = StacksOnGpu(device, plans, self.stream, checked)
        self.tensors = TensorsOnGpu(device, plans)

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
        made = [operands.out.written_in_place(self.planned, x) for x in _made(problem)]
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
        with device.cp.cuda.Device(device.ordinal):
            stream = self.stream()
            call = self._bound(variant, a, b, out, problem)
            clock.start()
            if c is not None and c is not operands.out and problem.beta:
                self._put(out, c.array)

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

    def gemm(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1.0, beta: Any = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """alpha * op(A) @ op(B) + beta * C on the caller's current stream, without waiting for it;
        None where not all lies on this GPU, or a plan has to be made. Raises `OutOfMemoryError`."""
        try:
            array = self.array
            if type(a) is not array or type(b) is not array:
                if type(a) is np.ndarray or type(b) is np.ndarray:
                    return self._brought(a, b, c, alpha, beta, trans_a, trans_b, out)
                return self.tensors.gemm(self.find, a, b, c, alpha, beta, trans_a, trans_b, out)
            if c is not None and c is not out and type(out) is type(c) is array and is_same(c, out):
                c = out  # two views of it
            here, x, y = self.ordinal, a.data, b.data
            if not self.device.is_current():
                with self.device.cp.cuda.Device(here):
                    return self.gemm(a, b, c, alpha, beta, trans_a, trans_b, out)
            if self.checked and self.stream().capturing():
                return None  # which is refused, since checks are waited for
            found = self.find(a, b, c, alpha, beta, trans_a, trans_b, out)
            if found is None or x.device_id != here or y.device_id != here:
                return None
            if not isinstance(found, Found):
                elsewhere = any(v is not None and v.data.device_id != here for v in (c, out))
                if elsewhere or (self.stream().capturing() and not TORCH.lends):
                    return None  # a graph's copies would be another array's memory: refused
                return multiplied(found, self.gemm, a, b, c, alpha, beta, trans_a, trans_b, out)
            if out is None:
                out = array(found.shape, found.dtype)
                z = out.data
            else:
                z = out.data
                if z.device_id != here or overlap((x.ptr, y.ptr, z.ptr), found.reaches):
                    return None  # where it is decided exactly
                if beta and c is not out:
                    if shares_memory(c, out):
                        return None
                    does_more()
            if beta and c is not out:
                if c.data.device_id != here:
                    return None
                self._put(out, c)
            if not found.start_prepared(self.device, self.current(here).ptr, (x.ptr, y.ptr, z.ptr)):
                op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
                found.start(self.device, self.stream(), op_a, op_b, out)
            return out
        except Exception:
            with shortage_in_words("a product on one GPU"):
                raise

    def checked_stack(self, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for stacks of the same length, products of which are checked and small; whether
        that was done. All are started before they are waited for: together, or pair by pair."""
        arrays = a, b, c
        if not c.size or any(
            type(x) is not self.array or x.data.device_id != self.ordinal for x in arrays
        ):
            return False
        if not self.device.is_current():
            with self.device.cp.cuda.Device(self.ordinal):
                return self.checked_stack(a, b, c)
        if self.stream().capturing():
            return False
        if self.stacks.matmul(a, b, c):
            return True
        x, y, z = (v[(0,) * (v.ndim - 2)] for v in arrays)
        found, stream = self.find(x, y, None, 1.0, 0.0, False, False, z), self.stream()
        if not isinstance(found, Found):
            return False
        if not isinstance(found.call, small_checks.SmallProduct):
            return False
        found.call.make_stack(a, b, c, stream)
        return True

    def _put(self, out: Any, c: Any) -> None:
        """out[...] = c, which is checked where products are."""
        if self.checked:
            self.checked.put(out, c)
        else:
            out[...] = c

    def _brought(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any, out: Any
    ) -> Any:
        """As `gemm`, where one of A and B is a small array of the host: it is copied here first."""
        host, other = (a, b) if type(a) is np.ndarray else (b, a)
        there = [x for x in (other, c, out) if x is not None]
        if (
            any(type(x) is not self.array or x.data.device_id != self.ordinal for x in there)
            or (host.ndim != 2 or host.dtype.kind not in "fiu" or not host.dtype.isnative)
            or host.itemsize > 8  # longdouble, which is refused elsewhere
            or host.nbytes > self.plans.most_hosted
            or (self.checked or self.stream().capturing())  # whose copies' source would be gone
        ):
            return None
        with self.device.cp.cuda.Device(self.ordinal):
            try:
                x, y = (self.device.cp.asarray(v) if v is host else v for v in (a, b))
            except MemoryError:  # a plan takes turns
                return None
            return self.gemm(x, y, c, alpha, beta, trans_a, trans_b, out)

    def gemm_of_others(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any, out: Any
    ) -> Any:
        """As `gemm`, where other GPUs have some of the CuPy arrays: these are copied here first,
        and C to where `out` or A lies."""
        here, device = self.ordinal, self.device.cp.cuda.Device
        given = [v for v in (a, b, c, out) if v is not None]
        if any(type(v) is not self.array for v in given) or (c is not None and not beta):
            return None
        elsewhere = [v for v in given if v.data.device_id != here]
        most = min(MOVED_BYTES, self.plans.options.max_device_memory or MOVED_BYTES)
        if (
            not (0 < sum(v.nbytes for v in elsewhere) <= most)
            or (self.checked or self.stream().capturing())
            or any(self.current(v.data.device_id).is_capturing() for v in elsewhere)
            or (out is not None and any(shares_memory(v, out) for v in (a, b)))
            or (out is not None and overlaps_itself(out))
            or not (c is None or out is None or c is out or not shares_memory(c, out))
        ):
            return None
        try:
            with device(here):
                x, y, z = (
                    v if v is None or v.data.device_id == here else moved(v, here)
                    for v in (a, b, c)
                )
                into = z if c is out else out
                if into is not None and into.data.device_id != here:
                    into = self.array(out.shape, out.dtype)
                made = self.gemm(x, y, z, alpha, beta, trans_a, trans_b, into)
            home = (a if out is None else out).data.device_id
            if made is None or home == here:
                return made
            made = moved(made, home)
            if out is not None:
                with device(home):
                    out[...] = made
        except MemoryError:  # a plan takes turns
            return None
        return made if out is None else out

    def find(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any, out: Any
    ) -> Found | Converted | None:
        """What was worked out for CuPy arrays laid out as these, once."""
        key = (
            a.shape, a.strides, a.dtype.char, b.shape, b.strides, b.dtype.char,
            c is None or (c is out, type(c), c.shape, c.strides, c.dtype.char),
            out is None or (type(out), out.shape, out.strides, out.dtype.char),
            alpha, type(alpha), beta, type(beta), trans_a, trans_b,
        )  # fmt: skip
        try:
            return self.known[key]
        except KeyError:
            pass
        except TypeError:  # an array as alpha or beta is no key
            return None
        if not are_numbers(alpha, beta):
            return None
        with self.stream().unrestricted():
            found = self.known[key] = self._work_out(
                a, b, c, out, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b
            )
        return found

    def _work_out(
        self, a: Any, b: Any, c: Any, out: Any, *, alpha: Any, beta: Any, trans_a: bool | str,
        trans_b: bool | str,
    ) -> Found | Converted | None:  # fmt: skip
        """The bound product for arrays laid out as these, how they are converted first, or None if
        it takes a whole run."""
        added = None
        if c is not None:  # which is copied to where the product is added to it
            if out is None and not beta:  # which a run warns of
                return None
            try:
                added = broadcast_c(c, *sides(a, b, trans_a=trans_a, trans_b=trans_b)[:2])
            except UsageError:  # which a run raises
                return None
        problem = self.plans.settle(
            make_problem(
                a, b, added, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=out
            )
        )
        op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
        like = self.array((problem.m, problem.n), problem.out_dtype) if out is None else out
        reaches = reach_of(a), reach_of(b), reach_of(like)
        if not (problem.k and problem.alpha):
            backwards = any(step < 0 for x in (a, b, like) for step in x.strides)
            wider = problem.out_dtype != np.result_type(a.dtype, b.dtype)  # of which a run warns
            return None if backwards or wider else self._unread(problem, c, like, reaches)
        how, turned = None, self._is_turned(problem, like)
        made = problem, op_a, op_b, like
        if turned:
            made = replace(problem, m=problem.n, n=problem.m), op_b.T, op_a.T, like.T
        if self._fits(*made, c):
            how = (self._complex if problem.is_complex else self._real)(*made)
            if how is None and not problem.is_complex:  # otherwise its real product comes here
                return None
        if how is None:
            return self._conversion(problem, a, b, c, out)
        call, preparable = how
        return Found(call, like.shape, problem.out_dtype, reaches, preparable, turned=turned)

    def _unread(self, problem: Problem, c: Any, like: Any, reaches: Reaches) -> Found | None:
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

        return Found(scale, like.shape, problem.out_dtype, reaches, False)

    def _is_turned(self, problem: Problem, like: Any) -> bool:
        """Whether C^T = op(B)^T op(A)^T is made: C's columns are contiguous, and its rows are
        not."""
        if problem.is_complex or self.checked or type(like) is not self.array:
            return False
        matches = like.shape == (problem.m, problem.n)
        return matches and not leading(like, "n") and bool(leading(like, "t"))

    def _fits(self, problem: Problem, a: Any, b: Any, like: Any, c: Any) -> bool:
        """Whether kernels read A and B as they lie, and write C as `like` does."""
        made = _made(problem)
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
        call = self._bound(variant, a, b, c, problem)
        # What is started natively is not checked.
        ready = not self.checked and self.device.preparable(variant, a, b)
        if ready and (others := self.plans.rivals(problem, layouts, self.device, variant)):
            rivals = [self._bound(x, a, b, c, problem) for x in others]
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

    def _conversion(self, problem: Problem, a: Any, b: Any, c: Any, out: Any) -> Converted | None:
        if self.checked or any(type(x) is not self.array for x in (a, b, c, out) if x is not None):
            return None
        options, (m, n, k) = self.plans.options, (problem.m, problem.n, problem.k)
        copies = (m * k + 2 * k * n + m * n) * np.dtype(problem.dtype).itemsize  # at most
        if problem.is_complex and options.algorithm == "3m":
            return None
        if options.max_device_memory and copies > options.max_device_memory:
            return None  # a plan takes turns
        how, real = conversion(problem, a, b, c, out), problem.as_real()
        return how if how and self.plans.alone(real, "nn", self.device) else None

    def _bound(self, variant: Variant, a: Any, b: Any, c: Any, problem: Problem) -> Any:
        """The product of matrices that lie as these, worked out, and what it needs compiled."""
        scale = {"alpha": problem.alpha, "beta": problem.beta}
        if self.checked:
            return small_checks.bind(self.checked, self.device, variant, a, b, c, **scale)
        return self.device.loading_together(lambda d: d.bind(variant, a, b, c, **scale))


def _made(problem: Problem) -> set[str]:
    """The dtypes that kernels make C in at once. Of a long k they add pieces to C, which is not to
    be rounded to 16 bits in between."""
    return {problem.dtype} if is_long(problem.k) else {problem.dtype, problem.operands}
