"""Writes products of small arrays of the host by one GPU: the calling thread copies them there and
back whole, and the GPU casts what no kernel reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from ..arrays.caller_arrays import is_free, silent
from ..arrays.strides import layout, lies
from ..execution.host_copies import PACKED_BYTES, HostCopies, Order, given
from ..planning.cost_model import HOSTED_BYTES
from ..problem import FLOATS, compute_dtype, make_problem
from .on_gpu import OneGpu
from .program import OUT, REFUSING, Call, Play, Program, Unfit, Write
from .stacks import StacksOnGpu

_CAST_BYTES = 1 << 30  # of arrays that a run would cast on the host, by one thread for each worker
Multiply = Callable[[Any, Any, Any], bool]  # C = A @ B for stacks of a GPU, if it takes these
SHARE_BYTES = 4 << 20  # of a stack: less is not worth another GPU


class Packed:
    """OUT = alpha * op(A) @ op(B) + beta * C for arrays of the host, by a program of arrays of the
    GPU; returns when the product is there."""

    def __init__(self, gpu: PackedOnGpu, call: Call, case: _Case) -> None:
        self._gpu, self._case = gpu, case
        self._like = call._replace(a=None, b=None, c=None, out=None)
        self._key = case, *(x if x is None else lies(x) for x in call.arrays)
        self._product = Play(lambda inner: gpu.single.write(inner, lambda _call: REFUSING), call)
        self._shared: dict[bool, bool] = {}  # whether several GPUs are, by whether pages are locked

    def __call__(self, slots: list[Any]) -> None:
        """Raises `Unfit` for what takes a run: large arrays, and what `served` does not."""
        a, b, c, out = slots
        arrays, case, gpu = [a, b] if c is None else [a, b, c], self._case, self._gpu
        if (
            case.size > gpu.most(case, a, b, c, out)
            or (out is not None and not _fits(out, case.shape, case.dtype, a, b, c))
            or (case.size > PACKED_BYTES and self._is_planned(a, b, c, out))
        ):
            raise Unfit
        if c is not None and c.ndim < 2:
            arrays[2] = c.reshape(1, -1)
        slots[OUT] = gpu.served(self._key, arrays, case[:3], out, self._product)

    def _is_planned(self, a: Any, b: Any, c: Any, out: Any) -> bool:
        """Whether a run is faster, of arrays that it copies as they are: by several GPUs, or
        because it multiplies while it copies."""
        case, plans = self._case, self._gpu.single.plans
        if case.dtype.kind == "c" or not _is_ready(case, a, b, c, out):
            return False
        read = [x for x in (a, b, c) if x is not None]
        locked = out is not None and all(self._gpu.device.reads(x) for x in (*read, out))
        if case.size > HOSTED_BYTES["pinned" if locked else "pageable"]:
            return True
        if plans.counts == (1,):
            return False
        if locked not in self._shared:
            trans = {"trans_a": self._like.trans_a, "trans_b": self._like.trans_b}
            problem = make_problem(a, b, c, beta=float(c is not None), out=out, **trans)
            plan = plans.plan(plans.settle(problem), page_locked=locked)
            self._shared[locked] = len(plan.workers) > 1
        return self._shared[locked]


class PackedOnGpu:
    """Writes products of arrays of the host as `single` does those of its GPU, on a stream of its
    own: what it gives back is not another stream's while copies go on."""

    def __init__(self, single: OneGpu, stacks: StacksOnGpu) -> None:
        self.single, self.device, self.own = single, single.device, single.device.stream()
        self.stacks, self.copies = stacks, HostCopies(self.device, self.own)
        # A buffer's memory is not counted where that is limited.
        self.packs = single.plans.options.max_device_memory is None

    def write(self, call: Call, planned: Write) -> Program:
        """The program of a call of NumPy's arrays; what `planned` writes for a C without elements,
        for which A and B are not read, and what is wrong."""
        a, b, c, out = call.arrays
        case = _case(a, b, c, call.trans_a, call.trans_b, out)
        if case is None or (c is not None and not call.beta):
            return planned(call)
        if case.dtype.kind == "c":
            problem = make_problem(a, b, trans_a=call.trans_a, trans_b=call.trans_b)
            if not self.single.takes_complex(self.single.plans.settle(problem)):
                return planned(call)
        return Program(
            [Packed(self, call, case)], otherwise=planned(call),
            task="a product of small arrays",
        )  # fmt: skip

    def most(self, case: _Case, a: Any, b: Any, c: Any, out: Any) -> int:
        """The bytes of A, B and C that are copied whole: more of what a run would cast, or, where
        it has no other GPU, copy, repeat or take apart (complex numbers) on the host, if that
        fits."""
        plans = self.single.plans
        most, alone = plans.most_hosted, plans.counts == (1,)
        if case.size <= most:
            return most
        apart = alone and case.dtype.kind == "c" and plans.options.algorithm == "ordinary"
        if not apart and _is_ready(case, a, b, c, out):
            return most
        if not (alone or any(x is not None and x.dtype != case.dtype for x in (a, b, c, out))):
            return most
        free, _total = self.device.cp.cuda.runtime.memGetInfo()
        limit = plans.options.max_device_memory or free
        return min(_CAST_BYTES, limit // 8)  # int8 becomes int32, twice

    def multiply_stacks(self, multiply: Multiply, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for stacks of the host, by what does so for those of this GPU; whether that was
        done."""

        def multiplied(a: Any, b: Any, _c: None, made: Any) -> None:
            if not multiply(a, b, made):
                raise Unfit

        try:
            self.served((lies(a), lies(b)), [a, b], (c.shape, c.dtype, "C"), c, multiplied)
        except Unfit:
            return False
        return True

    def served(
        self, key: Any, arrays: Sequence[np.ndarray], like: tuple[Any, np.dtype, Order], out: Any,
        multiply: Callable[..., Any],
    ) -> Any:  # fmt: skip
        """What `multiply` makes of copies of arrays of the host, in a last one that has this shape,
        dtype and order, copied to `out` or a new array. Raises `Unfit` as it does, and for complex
        numbers with Inf or NaN, of which cuBLAS makes more than there are."""
        (shape, dtype, order), real = like, like[1].kind != "c"
        with self.device.using(self.own), self.copies.buffer() as buffer:
            packed = self.packs and buffer.packed(key, arrays, *like)
            if packed:
                there, made = packed.bring(arrays, self.own), packed.made
            else:
                there = self.copies.bring(*arrays)
                made = there[2] if len(there) > 2 else None
                if made is None or not _is_made(made, like):
                    sides = math.prod(shape[:-1]), shape[-1]
                    made = self.copies.empty(sides, dtype, order)
                    made = made if len(shape) == 2 else made.reshape(shape)
            try:
                multiply(there[0], there[1], there[2] if len(there) > 2 else None, made)
            except Unfit:
                self.own.synchronize()
                raise
            if not packed:
                if not (real or self.device.is_finite(made)):
                    raise Unfit
                return self.copies.fetch(made, out)
            here = packed.fetch(self.own)
            if not (real or _is_finite(here)):
                raise Unfit
            return here.copy("K") if out is None else given(here, out)


class _Case(NamedTuple):
    """The product of arrays that lie alike: its sides, dtype and order, and the bytes of A, B and
    C."""

    shape: tuple[int, int]
    dtype: np.dtype
    order: Order
    size: int


def _case(a: Any, b: Any, c: Any, trans_a: Any, trans_b: Any, out: Any) -> _Case | None:
    """None of what takes a run whatever is in the arrays."""
    dtype = _dtype(a, b, c, out)
    if dtype is None:
        return None
    shape = a.shape[bool(trans_a)], b.shape[not trans_b]
    if 0 in shape:
        return None
    size = a.nbytes + b.nbytes + shape[0] * shape[1] * dtype.itemsize
    turned = dtype.kind != "c" and out is not None and (layout(out) or "n")[0] == "t"
    return _Case(shape, dtype, "F" if turned else "C", size)


def _is_ready(case: _Case, a: Any, b: Any, c: Any, out: Any) -> bool:
    """Whether a run copies the arrays as they are."""
    read = [x for x in (a, b, c) if x is not None]
    narrow = case.dtype.kind in "iu" and compute_dtype(case.dtype) != case.dtype.name
    return (
        not narrow  # which it casts on the host
        and all(x.dtype == case.dtype and x.ndim == 2 and bool(layout(x)) for x in read)
        and (c is None or c.shape == case.shape)
        and (out is None or out.dtype == case.dtype)
    )


def _is_made(c: Any, like: tuple[Any, np.dtype, Order]) -> bool:
    """Whether a copy of C is where the product is added to it."""
    shape, dtype, order = like
    return (c.shape, c.dtype) == (shape, dtype) and bool(c.flags[f"{order}_CONTIGUOUS"])


def _dtype(a: Any, b: Any, c: Any, out: Any) -> np.dtype | None:
    """The dtype of a product of arrays of the host, as NumPy promotes them; None of others, of one
    that C alone makes wider, and of arrays that are no matrices."""
    given = [x for x in (a, b, c, out) if x is not None]
    if any(type(x) is not np.ndarray or not _is_number(x.dtype) for x in given):
        return None
    if not (a.ndim == b.ndim == 2 and (c is None or c.ndim <= 2)):
        return None
    try:
        dtype = np.result_type(a.dtype, b.dtype)
        if c is not None and c.dtype != dtype and np.result_type(dtype, c.dtype) != dtype:
            return None
    except TypeError:  # no dtype holds both, which a run says
        return None
    return dtype if _is_number(dtype) else None


def _is_number(dtype: np.dtype) -> bool:
    most = 16 if dtype.kind == "c" else 8
    return (dtype.kind in "iufc" and dtype.itemsize <= most) or dtype.name in FLOATS


def _is_finite(x: np.ndarray) -> bool:
    """Whether complex numbers without gaps have neither Inf nor NaN, nor parts whose sum is too
    large. BLAS says so of most in a third of the time."""
    parts = x.ravel(order="K").view(x.real.dtype)
    with silent():
        return bool(np.isfinite(np.dot(parts, parts)) or np.isfinite(x.sum()))


def _fits(out: np.ndarray, shape: Any, dtype: np.dtype, a: Any, b: Any, c: Any) -> bool:
    """Whether a product is copied to `out`; otherwise a run does what is to do."""
    return (out.shape, out.dtype) == (shape, dtype) and is_free(out, a, b, c)


def multiply_of_host(
    gpus: Sequence[PackedOnGpu], multiply: Multiply, a: Any, b: Any, c: Any, most: int
) -> bool:
    """C = A @ B for stacks of the host, in pieces of `most` bytes at most, which the GPUs take in
    turn; whether that was done."""
    if not (gpus and len(c) and all(type(x) is np.ndarray and x.dtype.isnative for x in (a, b, c))):
        return False
    if math.prod(c.shape[:-2]) < 2 or not gpus[0].stacks.stackable(a, b, c):
        return False
    whole = sum(x.size * x.itemsize for x in (a, b, c))
    longest = most * len(c) // whole  # of a piece, along the first side
    if not longest:
        return False
    count = max(-(-len(c) // longest), min(len(gpus), len(c), whole // SHARE_BYTES))
    pieces = [slice(len(c) * i // count, len(c) * (i + 1) // count) for i in range(count)]

    def work(gpu: PackedOnGpu) -> bool:
        mine = pieces[gpus.index(gpu) :: len(gpus)]
        return all(gpu.multiply_stacks(multiply, a[piece], b[piece], c[piece]) for piece in mine)

    if count == 1 or len(gpus) == 1:
        return work(gpus[0])
    with ThreadPoolExecutor(len(gpus), "stacks") as pool:
        return all(list(pool.map(work, gpus)))
