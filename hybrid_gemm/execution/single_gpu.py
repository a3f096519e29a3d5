"""Products that one GPU does alone, launched as CuPy launches its own.

What has to be worked out is worked out once for arrays laid out alike. Of arrays that lie on the
GPU nothing is split, moved or waited for, so a call costs its launch, on the caller's current
stream. Small arrays of the host are copied there and back whole, by the calling thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import shares_memory
from ..arrays.operand import Operands
from ..arrays.stacks import Stacks, merged
from ..arrays.strides import layout, leading
from ..catalog import Variant
from ..devices.cuda import cublas
from ..devices.cuda.device import CudaDevice, CudaStream
from ..planning.plan import Plan
from ..problem import FLOATS, make_problem, sides
from .executor import Execution
from .plan_maker import PlanMaker
from .timeline import Clock

MAX_KNOWN = 4096  # signatures; a program of ever new shapes starts over
STACKED_FLOPS = 2 * 2048**3  # of one product in a stack: larger ones fill a GPU alone
HOSTED_BYTES = 32 << 20  # of A, B and C: more goes faster in pieces, by copying threads


class SingleGpuExecutor:
    """Products on one GPU: `execute` for a plan, `gemm` and `hosted` for repeated calls, which
    give None for what takes a plan."""

    def __init__(self, device: CudaDevice, plans: PlanMaker) -> None:
        self.device, self.plans = device, plans
        self.array = device.cp.ndarray
        self.current = device.cp.cuda.get_current_stream
        self.known: dict[tuple, tuple | None] = {}
        self.known_stacks: dict[tuple, tuple] = {}
        self.streams: dict[int, CudaStream] = {}
        # For arrays of the host; what it gives back is not another stream's while copies go on.
        self.own = device.stream()

    def takes(self, plan: Plan, operands: Operands) -> bool:
        """Whether this GPU has all of a plan's operands, as it multiplies them."""
        problem, c = plan.problem, operands.c
        if len(plan.workers) > 1 or len(plan.products) != 1 or not (problem.k and problem.alpha):
            return False
        read = all(
            x.order and x.lies_on(self.device) and x.dtype == problem.operands
            for x in (operands.a, operands.b)
        )
        made = (problem.dtype, problem.operands)
        added = c is None or not problem.beta or c.lies_on(self.device)
        return read and added and any(operands.out.written_in_place(self.device, x) for x in made)

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Execution:  # fmt: skip
        """See `Executor`: one product on the caller's current stream of this GPU."""
        problem, device, c = plan.problem, self.device, operands.c
        a, b, out = (x.array for x in (operands.a, operands.b, operands.out))
        clock = Clock({0: device})
        device.prepare(variant, a, b, problem.operands)
        with device.cp.cuda.Device(device.ordinal):
            stream = self._stream()
            call = device.bind(variant, a, b, out, alpha=problem.alpha, beta=problem.beta)
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
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
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
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
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

    def matmul(self, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for stacks of the same length, each few products by one launch of cuBLAS on the
        caller's current stream; False, and nothing is done, where pair by pair is right: for large
        matrices, which fill the GPU alone, for other dtypes, arithmetics and kernels, and other
        places."""
        array, here = self.array, self.device.ordinal
        if not all(type(x) is array and x.data.device_id == here for x in (a, b, c)):
            return False
        if math.prod(c.shape[:-2]) < 2:
            return False
        if self.device.cp.cuda.runtime.getDevice() != here or not self._stackable(a, b, c):
            return False
        key = tuple((x.shape, x.strides, x.dtype.char) for x in (a, b, c))
        found = self.known_stacks.get(key)
        if found is None and (found := _bound_stack(a, b, c)) is not None:
            self._keep(key, found)
        if found is None:
            return False
        self._start(found, a, b, c)
        return True

    def stacked(self, a: Any, b: Any, out: Any) -> Any:
        """A @ B for arrays laid out as some that `remember` was told of, as `matmul`; otherwise
        None, and nothing is done."""
        found = self.known_stacks.get(_stack_key(a, b, out))
        if found is None or type(a) is not self.array or type(b) is not self.array:
            return None
        here = self.device.ordinal
        places = a.data.device_id, b.data.device_id, self.device.cp.cuda.runtime.getDevice()
        if places != (here, here, here):
            return None
        _call, _offsets, shape, dtype, (extent_a, extent_b, extent) = found
        if out is None:
            out = self.array(shape, dtype)
        elif type(out) is not self.array or out.data.device_id != here:
            return None
        else:
            at, x, y = out.data.ptr, a.data.ptr, b.data.ptr
            if (at < x + extent_a and x < at + extent) or (at < y + extent_b and y < at + extent):
                return None  # where it is decided exactly
        self._start(found, a, b, out)
        return out

    def remember(self, a: Any, b: Any, out: Any, stacks: Stacks) -> None:
        """Lets `stacked` take arrays that lie as A, B and `out`, which `matmul` multiplied as these
        stacks."""
        key = tuple((x.shape, x.strides, x.dtype.char) for x in (stacks.a, stacks.b, stacks.c))
        found, made = self.known_stacks.get(key), stacks.out
        if found and all(step >= 0 for x in (a, b, made) for step in x.strides):
            extents = _extent(a), _extent(b), _extent(made)
            self._keep(_stack_key(a, b, out), (*found[:2], made.shape, made.dtype, extents))

    def _keep(self, key: tuple, found: tuple) -> None:
        if len(self.known_stacks) >= MAX_KNOWN:
            self.known_stacks.clear()
        self.known_stacks[key] = found

    def _start(self, found: tuple, a: Any, b: Any, c: Any) -> None:
        """Launches the products of stacks, or of the arrays that they were made of."""
        stream, x, y, z = self._stream(), a.data.ptr, b.data.ptr, c.data.ptr
        for of_a, of_b, of_c in found[1]:
            found[0](x + of_a, y + of_b, z + of_c, stream)

    def gemm_many(self, pairs: Sequence[tuple[Any, Any]]) -> list[Any] | None:
        """A @ B of each pair by one launch of cuBLAS on the caller's current stream; None, and
        nothing is done, where pair by pair is right, as for `matmul`."""
        array, here = self.array, self.device.ordinal
        if self.device.cp.cuda.runtime.getDevice() != here:
            return None
        dtype = pairs[0][0].dtype
        for a, b in pairs:
            if not (type(a) is type(b) is array and a.ndim == b.ndim == 2 and a.dtype == dtype):
                return None
            fits = a.shape[1] == b.shape[0] and layout(a) and layout(b)
            if not fits or {a.data.device_id, b.data.device_id} != {here}:
                return None
        made = [array((a.shape[0], b.shape[1]), dtype) for a, b in pairs]
        threes = [(a, b, c) for (a, b), c in zip(pairs, made, strict=True)]
        if not all(self._stackable(*three) for three in threes):
            return None
        cublas.multiply_group(threes, self._stream())
        return made

    def hosted_matmul(self, a: Any, b: Any, c: Any) -> bool:
        """As `matmul`, for small stacks of the host, which are copied there and back whole."""
        most = min(HOSTED_BYTES, self.plans.options.max_device_memory or HOSTED_BYTES)
        small = sum(x.size * x.itemsize for x in (a, b, c)) <= most
        if math.prod(c.shape[:-2]) < 2 or not (
            small and all(type(x) is np.ndarray for x in (a, b, c))
        ):
            return False
        if not (self._stackable(a, b, c) and all(x.dtype.isnative for x in (a, b, c))):
            return False
        with self.device.using(self.own):
            x, y = (self.device.cp.asarray(np.ascontiguousarray(v)) for v in (a, b))
            made = self.device.cp.empty(c.shape, c.dtype)
            if not self.matmul(x, y, made):
                return False
            c[...] = made.get(stream=self.own.cupy)
        return True

    def _stackable(self, a: Any, b: Any, c: Any) -> bool:
        """Whether these stacks' products are small, and what cuBLAS multiplies here."""
        options = self.plans.options
        sides = *c.shape[-2:], a.shape[-1]
        return (
            a.dtype == b.dtype == c.dtype
            and c.dtype.name in FLOATS
            and options.kernel in ("auto", "cublas")
            and (options.compute == "fp32" or c.dtype.name != "float32")
            and options.compute in ("fp32", "auto")
            and c.size > 0
            and 0 < 2 * math.prod(sides) <= STACKED_FLOPS
        )

    def _work_out(
        self,
        a: Any,
        b: Any,
        c: Any,
        out: Any,
        *,
        alpha: Any,
        beta: Any,
        trans_a: bool | str,
        trans_b: bool | str,
    ) -> tuple | None:
        """The bound product for arrays laid out as these, or None if it takes a whole run."""
        if c is not None and c.shape != sides(a, b, trans_a=trans_a, trans_b=trans_b)[:2]:
            return None
        problem = self.plans.settle(
            make_problem(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b)
        )
        if problem.is_complex:  # its real product comes here
            return None
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
        variant = self.plans.alone(problem, layouts, self.device)
        if variant is None:
            return None
        call = self.device.bind(variant, op_a, op_b, like, alpha=problem.alpha, beta=problem.beta)
        return call, shape, problem.out_dtype, [_extent(x) for x in (a, b, like)]


def _stack_key(a: Any, b: Any, out: Any) -> tuple:
    """What arrays of `matmul` have to have in common for one call to multiply them."""
    return (
        a.shape, a.strides, a.dtype.char, b.shape, b.strides, b.dtype.char,
        None if out is None else (out.shape, out.strides, out.dtype.char),
    )  # fmt: skip


def _bound_stack(a: Any, b: Any, c: Any) -> tuple | None:
    """The call for stacks that lie as these, and the bytes from their beginnings to those of each
    part that one call multiplies; None where matrices lie in no order that cuBLAS reads."""
    x, y, z = (v[(0,) * (v.ndim - 2)] for v in (a, b, c))
    if not (leading(z, "n") and layout(x) and layout(y)):
        return None
    shape, steps = merged(c.shape[:-2], *(v.strides[:-2] for v in (a, b, c)))
    inner = [step[-1] for step in steps]
    if any(step < 0 or step % c.itemsize for step in inner):
        return None
    offsets = [
        tuple(sum(i * s for i, s in zip(place, step, strict=False)) for step in steps)
        for place in np.ndindex(shape[:-1])
    ]
    return cublas.bind_stack(x, y, z, shape[-1], inner), offsets


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
