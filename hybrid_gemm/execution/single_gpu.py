"""Products that one GPU does alone, launched as CuPy launches its own.

What has to be worked out is worked out once for arrays laid out alike. Of arrays that lie on the
GPU nothing is split, moved or waited for, so a call costs its launch, on the caller's current
stream. Small arrays of the host are copied there and back whole, by the calling thread.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ..arrays.caller_arrays import shares_memory
from ..arrays.operand import Operands
from ..arrays.other_libraries import TORCH
from ..arrays.stacks import Stacks, merged
from ..arrays.strides import layout, leading
from ..catalog import Variant
from ..devices.cuda import cublas
from ..devices.cuda.device import CudaDevice, CudaStream
from ..devices.cuda.launch_list import Prepared
from ..devices.kernel_launcher import BoundProduct
from ..errors import shortage_in_words
from ..planning.plan import Plan
from ..problem import FLOATS, Problem, are_numbers, make_problem, sides
from .checked_device import CheckedDevice
from .executor import Execution
from .plan_maker import PlanMaker
from .timeline import Clock

MAX_KNOWN = 4096  # signatures; a program of ever new shapes starts over
STACKED_FLOPS = 2 * 2048**3  # of one product in a stack: larger ones fill a GPU alone
HOSTED_BYTES = 32 << 20  # of A, B and C: more goes faster in pieces, by copying threads


class Found:
    """What was worked out for arrays laid out alike: the bound product, the shape and the dtype of
    C, and the bytes from the first to past the last of A, B and C.

    `ready` has the product prepared for streams, by their addresses: False where it was called once
    there. It is None for products that are not prepared.
    """

    __slots__ = "call", "dtype", "extents", "ready", "shape"

    def __init__(
        self, call: BoundProduct, shape: tuple[int, int], dtype: str, extents: tuple[int, int, int],
        preparable: bool,
    ) -> None:  # fmt: skip
        self.call, self.shape, self.dtype, self.extents = call, shape, dtype, extents
        self.ready: dict[int, Prepared | Literal[False]] | None = {} if preparable else None


class SingleGpuExecutor:
    """Products on one GPU: `execute` for a plan, `gemm` and `hosted` for repeated calls, which
    give None for what takes a plan. With `checked`, that GPU with its products checked, these are,
    and `gemm` waits for them."""

    def __init__(
        self, device: CudaDevice, plans: PlanMaker, checked: CheckedDevice | None = None
    ) -> None:
        self.device, self.plans, self.ordinal = device, plans, device.ordinal
        self.checked = checked  # the same GPU among the plans' devices, where products are checked
        self.array = device.cp.ndarray
        self.current = device.cp.cuda.get_current_stream
        self.device_now = device.cp.cuda.runtime.getDevice
        self.known: dict[tuple, Found | None] = {}
        self.known_tensors: dict[tuple, Found | None] = {}
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
            x.order and x.lies_on(self.checked or self.device) and x.dtype == problem.operands
            for x in (operands.a, operands.b)
        )
        made = (problem.dtype, problem.operands)
        added = c is None or not problem.beta or c.lies_on(self.checked or self.device)
        return (
            read
            and added
            and any(operands.out.written_in_place((self.checked or self.device), x) for x in made)
        )

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Execution:  # fmt: skip
        """See `Executor`: one product on the caller's current stream of this GPU."""
        problem, device, c = plan.problem, self.device, operands.c
        a, b, out = (x.array for x in (operands.a, operands.b, operands.out))
        clock = Clock({0: device})
        if self.checked:
            self.checked.prepare(variant, a, b, problem.operands)
        with device.cp.cuda.Device(device.ordinal):
            stream = self._stream()
            call = self._bound(variant, a, b, out, problem)
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
        current = self.current(self.ordinal)
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
            return self._tensors(a, b, c, alpha, beta, trans_a, trans_b, out)
        found = self.find(a, b, c, alpha, beta, trans_a, trans_b, out)
        if found is None:
            return None
        here, x, y = self.ordinal, a.data, b.data
        if self.device_now() != here or x.device_id != here or y.device_id != here:
            return None
        if out is None:
            out = array(found.shape, found.dtype)
            z = out.data
        else:
            z = out.data
            if (
                z.device_id != here
                or (beta and c is not out)
                or _overlap(x.ptr, y.ptr, z.ptr, found.extents)
            ):
                return None  # where it is decided exactly
        if beta and c is not out:
            out[...] = c
        if found.ready:
            at_a, at_b, at_c = x.ptr, y.ptr, z.ptr
            ready = found.ready.get(self.current(here).ptr)
            if ready and not (at_a | at_b | at_c) & 15:
                if status := ready.start(at_a, at_b, at_c):
                    ready.check(status)
                return out
        self._call(found, a.T if trans_a else a, b.T if trans_b else b, out)
        return out

    def _call(self, found: Found, a: Any, b: Any, out: Any) -> None:
        """Starts a product; the second time, it is prepared for this stream."""
        stream = self._stream()
        at, known = stream.cupy.ptr, found.ready
        found.call(a, b, out, stream)
        if known is None or (a.data.ptr | b.data.ptr | out.data.ptr) & 15:
            return
        if at not in known:
            known[at] = False
        elif made := self.device.prepared(found.call, a, b, out, stream):
            known[at] = made
        else:
            found.ready = None

    def _tensors(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any, out: Any
    ) -> Any:
        """As `gemm`, for PyTorch's tensors on its current stream; None, too, where it is not
        prepared: CuPy's views of them prepare it."""
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        kinds = torch.Tensor, torch.nn.Parameter
        given = (a, b) if out is None else (a, b, out)
        here = self.ordinal
        if c is not None and c is not out:
            return None
        for x in given:
            if type(x) not in kinds or x.get_device() != here or x.is_neg():
                return None
            if x.requires_grad and torch.is_grad_enabled():
                return None
        if self.device_now() != here:
            return None
        found = self._find_tensors(a, b, c, alpha, beta, trans_a, trans_b, out)
        if found is None or not found.ready:
            return None
        ready = found.ready.get(torch._C._cuda_getCurrentRawStream(here))
        if not ready:
            return None
        made = out
        if out is None:
            made = a.new_empty(found.shape, dtype=getattr(torch, found.dtype))
        at_a, at_b, at_c = a.data_ptr(), b.data_ptr(), made.data_ptr()
        if (at_a | at_b | at_c) & 15 or _overlap(at_a, at_b, at_c, found.extents):
            return None
        if status := ready.start(at_a, at_b, at_c):
            ready.check(status)
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return made

    def _find_tensors(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any, out: Any
    ) -> Found | None:
        """As `find`, for tensors that lie on this GPU; C is `out` if there is one."""
        try:
            key = (
                a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, c is None,
                out is None or (out.shape, out.stride(), out.dtype), alpha, beta, trans_a, trans_b,
            )  # fmt: skip
            return self.known_tensors[key]
        except KeyError:
            pass
        except (TypeError, RuntimeError):  # an array as alpha is no key; sparse ones have no stride
            return None
        if not are_numbers(alpha, beta):
            return None
        if len(self.known_tensors) >= MAX_KNOWN:
            self.known_tensors.clear()
        found = None
        if not a.dtype.is_complex:  # which may be conjugated on reading
            x, y, z = (x if x is None else TORCH.view(x, "A") for x in (a, b, out))
            z_in = None if c is None else z
            found = self.find(x, y, z_in, alpha, beta, trans_a, trans_b, z)
        self.known_tensors[key] = found
        return found

    def find(
        self, a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any, out: Any
    ) -> Found | None:
        """What was worked out for CuPy arrays laid out as these, once."""
        key = (
            a.shape, a.strides, a.dtype.char, b.shape, b.strides, b.dtype.char,
            c is None or (c is out, type(c), c.shape, c.strides, c.dtype.char),
            out is None or (type(out), out.shape, out.strides, out.dtype.char),
            alpha, beta, trans_a, trans_b,
        )  # fmt: skip
        try:
            return self.known[key]
        except KeyError:
            if not are_numbers(alpha, beta):
                return None
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            found = self.known[key] = self._work_out(
                a, b, c, out, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b
            )
            return found
        except TypeError:  # an array as alpha or beta is no key
            return None

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
        with self.device.using(self.own), shortage_in_words("a product of small arrays"):
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
            and not self.checked
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
    ) -> Found | None:
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
        variant = self.plans.alone(problem, layouts, (self.checked or self.device))
        if variant is None:
            return None
        call = self._bound(variant, op_a, op_b, like, problem)
        # What is started natively is not checked.
        ready = not self.checked and self.device.preparable(variant, op_a, op_b)
        extents = _extent(a), _extent(b), _extent(like)
        return Found(call, shape, problem.out_dtype, extents, ready)

    def _bound(self, variant: Variant, a: Any, b: Any, c: Any, problem: Problem) -> Any:
        """The product of matrices that lie as these, worked out, and what it needs compiled."""
        scale = {"alpha": problem.alpha, "beta": problem.beta}
        if self.checked:
            return self.checked.bind(variant, a, b, c, **scale)
        return self.device.loading_together(lambda d: d.bind(variant, a, b, c, **scale))


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


def _overlap(at_a: int, at_b: int, at_c: int, extents: tuple[int, int, int]) -> bool:
    """Whether C may have a byte in common with A or B."""
    stop = at_c + extents[2]
    return (at_a < stop and at_c < at_a + extents[0]) or (at_b < stop and at_c < at_b + extents[1])
