"""Products that one GPU does alone, launched as CuPy launches its own.

What has to be worked out is worked out once for arrays laid out alike. Of arrays that lie on the
GPU nothing is split, moved or waited for, so a call costs its launch, on the caller's current
stream. Small arrays of the host are copied there and back whole, by the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays.caller_arrays import shares_memory
from ..arrays.operand import Operands
from ..arrays.strides import layout, leading
from ..catalog import Variant
from ..devices.cuda.device import CudaDevice, CudaStream
from ..planning.plan import Plan
from ..problem import make_problem, sides
from .checked_device import CheckedDevice
from .executor import Execution
from .plan_maker import PlanMaker
from .timeline import Clock

MAX_KNOWN = 4096  # signatures; a program of ever new shapes starts over
HOSTED_BYTES = 32 << 20  # of A, B and C: more goes faster in pieces, by copying threads


class SingleGpuExecutor:
    """Products on one GPU: `execute` for a plan, `gemm` and `hosted` for repeated calls, which
    give None for what takes a plan. With `checked`, that GPU with its products checked, these are,
    and `gemm` waits for them."""

    def __init__(
        self, device: CudaDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans = device, plans
        self.listed: CudaDevice | CheckedDevice = checked or device  # among the plans' devices
        self.array = device.cp.ndarray
        self.current = device.cp.cuda.get_current_stream
        self.known: dict[tuple, tuple | None] = {}
        self.streams: dict[int, CudaStream] = {}
        # For arrays of the host; what it gives back is not another stream's while copies go on.
        self.own = device.stream()

    def takes(self, plan: Plan, operands: Operands) -> bool:
        """Whether this GPU has all of a plan's operands, as it multiplies them."""
        problem, c = plan.problem, operands.c
        if len(plan.workers) > 1 or len(plan.products) != 1 or not (problem.k and problem.alpha):
            return False
        read = all(
            x.order and x.lies_on(self.listed) and x.dtype == problem.operands
            for x in (operands.a, operands.b)
        )
        made = (problem.dtype, problem.operands)
        added = c is None or not problem.beta or c.lies_on(self.listed)
        return read and added and any(operands.out.written_in_place(self.listed, x) for x in made)

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Execution:  # fmt: skip
        """See `Executor`: one product on the caller's current stream of this GPU."""
        problem, device, c = plan.problem, self.device, operands.c
        a, b, out = (x.array for x in (operands.a, operands.b, operands.out))
        clock = Clock({0: device})
        self.listed.prepare(variant, a, b, problem.operands)
        with device.cp.cuda.Device(device.ordinal):
            stream = self._stream()
            call = self.listed.bind(variant, a, b, out, alpha=problem.alpha, beta=problem.beta)
            clock.start()
            if c is not None and c is not operands.out and problem.beta:
                out[...] = c.array
            start = stream.record()
            call(a, b, out, stream)
            clock.mark(0, "multiply", start, stream, flops=problem.flops)
            stream.synchronize()
            clock.stop()
        if progress:
            progress(problem.flops)
        return Execution(clock.timeline(), clock.total_ms, plan)

    def _stream(self) -> CudaStream:
        """The caller's current stream."""
        current = self.current()
        known = self.streams.get(current.ptr)
        if known is None:
            known = self.streams[current.ptr] = CudaStream(current)
        return known

    def gemm(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1.0, beta: Any = 0.0,
        trans_a: bool = False, trans_b: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """alpha * op(A) @ op(B) + beta * C on the caller's current stream, without waiting for
        it; None where the arrays do not all lie on this GPU, or a plan has to be made."""
        array = self.array
        if type(a) is not array or type(b) is not array:
            return None
        key = (
            a.shape, a.strides, a.dtype.char, b.shape, b.strides, b.dtype.char,
            c is None or (c is out, type(c), c.shape, c.strides, c.dtype.char),
            out is None or (type(out), out.shape, out.strides, out.dtype.char),
            alpha, beta, trans_a, trans_b,
        )  # fmt: skip
        try:
            found = self.known[key]
        except KeyError:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            found = self.known[key] = self._work_out(
                a, b, c, out, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b
            )
        except TypeError:  # an array as alpha or beta is no key
            return None
        if found is None:
            return None
        call, shape, dtype, extents = found
        here = self.device.ordinal
        if self.device.cp.cuda.runtime.getDevice() != here or a.data.device_id != here:
            return None
        if out is None:
            out = array(shape, dtype)
        elif (beta and c is not out) or _overlap(a, b, out, extents):
            return None  # where it is decided exactly
        if beta and c is not out:
            out[...] = c
        call(a.T if trans_a else a, b.T if trans_b else b, out, self._stream())
        return out

    def hosted(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1.0, beta: Any = 0.0,
        trans_a: bool = False, trans_b: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """As `gemm`, for small arrays of the host; returns when the product is there."""
        given = [x for x in (a, b, c, out) if x is not None]
        if (
            any(type(x) is not np.ndarray or x.ndim != 2 for x in given)
            or any(x.dtype != a.dtype or not (x.flags.forc and x.flags.aligned) for x in given)
            or a.dtype not in (np.float32, np.float64)  # of this machine's byte order
            or (c is not None and not beta)
        ):
            return None
        shape = a.shape[bool(trans_a)], b.shape[not trans_b]
        size = a.nbytes + b.nbytes + shape[0] * shape[1] * a.itemsize
        most = min(HOSTED_BYTES, self.plans.options.max_device_memory or HOSTED_BYTES)
        if size > most or (out is not None and not self._fit(out, shape, a, b, c)):
            return None
        with self.device.using(self.own):
            x, y, z = (None if v is None else self._there(v) for v in (a, b, c))
            made = self.device.empty(*shape, a.dtype.name) if z is None else z
            done = self.gemm(
                x, y, z, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=made
            )
            if done is None:
                return None
            out = np.empty(shape, a.dtype) if out is None else out
            self.device.copy(out, made, self.own)
            self.own.synchronize()
        return out

    @staticmethod
    def _fit(out: Any, shape: tuple[int, int], a: Any, b: Any, c: Any) -> bool:
        """Whether a product is copied to `out` as it is; otherwise a run does what is to do."""
        fits = out.shape == shape and out.flags.c_contiguous and out.flags.writeable
        others = (a, b) if c is None or c is out else (a, b, c)
        return fits and not any(shares_memory(x, out) for x in others)

    def _there(self, array: np.ndarray) -> Any:
        made = self.device.empty_like(array, array.dtype.name)
        self.device.copy(made, array, self.own)
        return made

    def _work_out(
        self,
        a: Any,
        b: Any,
        c: Any,
        out: Any,
        *,
        alpha: Any,
        beta: Any,
        trans_a: bool,
        trans_b: bool,
    ) -> tuple | None:
        """The bound product for arrays laid out as these, or None if it takes a whole run."""
        if c is not None and c.shape != sides(a, b, trans_a=trans_a, trans_b=trans_b)[:2]:
            return None
        problem = self.plans.settle(
            make_problem(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b)
        )
        shape, made = (problem.m, problem.n), (problem.dtype, problem.operands)
        like = self.array(shape, problem.out_dtype) if out is None else out
        fits = (
            all(x.dtype.name == problem.operands for x in (a, b))
            and like.dtype.name in made
            and problem.out_dtype in made
            and type(like) is self.array
            and like.shape == shape
            and leading(like, "n")
            and all(leading(x, "n") or leading(x, "t") for x in (a, b))
            and problem.m * problem.n * problem.k
            and problem.alpha
            and (not problem.beta or type(c) is self.array)
        )
        if not fits:
            return None
        op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
        layouts = "".join((layout(x) or "n")[0] for x in (op_a, op_b))
        variant = self.plans.alone(problem, layouts, self.listed)
        if variant is None:
            return None
        call = self.listed.bind(variant, op_a, op_b, like, alpha=problem.alpha, beta=problem.beta)
        return call, shape, problem.out_dtype, [_extent(x) for x in (a, b, like)]


def _extent(x: Any) -> int:
    """Bytes from the first element's address to past the last one's; strides are positive."""
    return sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) + x.itemsize


def _overlap(a: Any, b: Any, out: Any, extents: list[int]) -> bool:
    start = out.data.ptr
    stop = start + extents[2]
    return any(
        x.data.ptr < stop and start < x.data.ptr + extent
        for x, extent in ((a, extents[0]), (b, extents[1]))
    )
