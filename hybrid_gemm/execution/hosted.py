"""Products of small arrays of the host by one GPU: they are copied there and back whole, as they
are, by the calling thread; what no kernel reads is converted there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.caller_arrays import shares_memory, silent
from ..arrays.on_gpus import copied
from ..arrays.strides import layout, overlaps_itself
from ..errors import shortage_in_words
from ..host.kept import Known
from ..planning.cost_model import HOSTED_BYTES
from ..problem import FLOATS, compute_dtype, make_problem
from .host_copies import PACKED_BYTES, HostCopies, Order, given
from .native_calls import NativeCalls, served_by

if TYPE_CHECKING:  # what has GPUs imports it
    from .single_gpu import SingleGpuExecutor

_CAST_BYTES = 1 << 30  # of arrays that a run would cast on the host, by one thread for each worker
SHARE_BYTES = 4 << 20  # of a stack: less is not worth another GPU


class Hosted:
    """Multiplies arrays of the host as `single` does those of its GPU, on a stream of its own: what
    it gives back is not another stream's while copies go on."""

    def __init__(self, single: SingleGpuExecutor) -> None:
        self.single, self.device, self.own = single, single.device, single.device.stream()
        self.copies = HostCopies(self.device, self.own)
        # A buffer's memory is not counted where that is limited.
        self._packs = single.plans.options.max_device_memory is None
        self._cases: Known[tuple, _Case | None] = Known()
        self._shared: Known[tuple, bool] = Known()
        self._products, self._stacks = NativeCalls(), NativeCalls(out_is_third=True)

    def gemm(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1.0, beta: Any = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """As `SingleGpuExecutor.gemm`, for arrays of the host; returns when the product is there.
        None for what takes a run: large arrays, a C without elements, for which A and B are not
        read, complex products with Inf or NaN, of which cuBLAS makes more than there are, and what
        is wrong."""
        arrays = [a, b] if c is None else [a, b, c]
        if any(type(x) is not np.ndarray for x in arrays) or (c is not None and not beta):
            return None
        key = (
            *[(x.shape, x.strides, x.dtype) for x in arrays], trans_a, trans_b,
            out is None or (type(out), out.shape, out.strides, out.dtype),
        )  # fmt: skip
        try:
            case = self._cases[key]
        except KeyError:
            case = self._cases[key] = _case(a, b, c, trans_a, trans_b, out)
        if (
            case is None
            or case.size > self._most(case, a, b, c, out)
            or (out is not None and not _fits(out, case.shape, case.dtype, a, b, c))
            or (case.size > PACKED_BYTES and self._is_planned(key, case, a, b, c, out))
        ):
            return None
        if c is not None and c.ndim < 2:
            arrays[2] = c.reshape(1, -1)
        real = case.dtype.kind != "c"
        with (
            self.device.using(self.own), shortage_in_words("a product of small arrays"),
            self.copies.buffer() as buffer,
        ):  # fmt: skip
            packed = self._packs and buffer.packed(key, arrays, *case[:3])
            if packed:
                there, made = packed.bring(arrays, self.own), packed.made
            else:
                there = self.copies.bring(*arrays)
                z = there[2] if c is not None else None
                made = z if _is_made(z, case) else self.copies.empty(*case[:3])
            how = {"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b}
            if self._multiplied(*there, **how, out=made) is None:
                self.own.synchronize()
                return None
            if not packed:
                return self.copies.fetch(made, out) if real or self.device.is_finite(made) else None
            here = packed.fetch(self.own)
            if not (real or _is_finite(here)):
                return None
            return here.copy("K") if out is None else given(here, out)

    @served_by("_products")
    def _multiplied(
        self, a: Any, b: Any, c: Any = None, *, alpha: Any, beta: Any, trans_a: bool | str,
        trans_b: bool | str, out: Any,
    ) -> Any:  # fmt: skip
        """The product of arrays of the GPU, in `out`; None where `single` leaves it to a run."""
        return self.single.gemm(a, b, c, alpha, beta, trans_a, trans_b, out)

    @served_by("_stacks")
    def _multiplied_stacks(self, a: Any, b: Any, out: Any) -> Any:
        """As `_multiplied`, of stacks."""
        return out if self.single.stacks.matmul(a, b, out) else None

    def stackable(self, a: Any, b: Any, c: Any) -> bool:
        """As `StacksOnGpu.stackable`."""
        return self.single.stacks.stackable(a, b, c)

    def multiply_stacks(self, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for stacks of the host; whether that was done. Not for complex ones with Inf or
        NaN, as `gemm`."""
        real = c.dtype.kind != "c"
        with self.device.using(self.own), self.copies.buffer() as buffer:
            key = a.shape, a.dtype, b.shape, b.dtype
            packed = self._packs and buffer.packed(key, (a, b), c.shape, c.dtype)
            if packed:
                (x, y), made = packed.bring((a, b), self.own), packed.made
            else:
                brought = self.copies.bring(a, b)
                x, y = (v if v.flags.c_contiguous else copied(v, v.dtype.name) for v in brought)
                made = self.device.cp.empty(c.shape, c.dtype)
            if self._multiplied_stacks(x, y, made) is None:
                self.own.synchronize()
                return False
            if packed:
                here = packed.fetch(self.own)
            else:
                here = self.copies.fetch(made, c if real else None)
            if not (real or _is_finite(here)):
                return False
            given(here, c)
            return True

    def _most(self, case: _Case, a: Any, b: Any, c: Any, out: Any) -> int:
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

    def _is_planned(self, key: tuple, case: _Case, a: Any, b: Any, c: Any, out: Any) -> bool:
        """Whether a run is faster, of arrays that it copies as they are: by several GPUs, or
        because it multiplies while it copies."""
        plans = self.single.plans
        if case.dtype.kind == "c" or not _is_ready(case, a, b, c, out):
            return False
        read = [x for x in (a, b, c) if x is not None]
        locked = out is not None and all(self.device.reads(x) for x in (*read, out))
        if case.size > HOSTED_BYTES["pinned" if locked else "pageable"]:
            return True
        if plans.counts == (1,):
            return False
        asked = (locked, *key)
        shared = self._shared.get(asked)
        if shared is None:
            trans_a, trans_b = key[-3:-1]
            beta = float(c is not None)
            problem = make_problem(a, b, c, beta=beta, trans_a=trans_a, trans_b=trans_b, out=out)
            plan = plans.plan(plans.settle(problem), page_locked=locked)
            shared = self._shared[asked] = len(plan.workers) > 1
        return shared


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


def _is_made(c: Any, case: _Case) -> bool:
    """Whether a copy of C is where the product is added to it."""
    return (
        c is not None
        and (c.shape, c.dtype) == (case.shape, case.dtype)
        and bool(c.flags[f"{case.order}_CONTIGUOUS"])
    )


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
    others = (a, b) if c is None or c is out else (a, b, c)
    return (
        (out.shape, out.dtype) == (shape, dtype)
        and out.flags.writeable
        and (out.flags.c_contiguous or not overlaps_itself(out))
        and not any(shares_memory(x, out) for x in others)
    )


def multiply_of_host(gpus: Sequence[Hosted], a: Any, b: Any, c: Any, most: int) -> bool:
    """C = A @ B for stacks of the host, in pieces of `most` bytes at most, which the GPUs take in
    turn; whether that was done."""
    if not (gpus and len(c) and all(type(x) is np.ndarray and x.dtype.isnative for x in (a, b, c))):
        return False
    if math.prod(c.shape[:-2]) < 2 or not gpus[0].stackable(a, b, c):
        return False
    whole = sum(x.size * x.itemsize for x in (a, b, c))
    longest = most * len(c) // whole  # of a piece, along the first side
    if not longest:
        return False
    count = max(-(-len(c) // longest), min(len(gpus), len(c), whole // SHARE_BYTES))
    pieces = [slice(len(c) * i // count, len(c) * (i + 1) // count) for i in range(count)]

    def work(gpu: Hosted) -> bool:
        mine = pieces[gpus.index(gpu) :: len(gpus)]
        return all(gpu.multiply_stacks(a[piece], b[piece], c[piece]) for piece in mine)

    if count == 1 or len(gpus) == 1:
        return work(gpus[0])
    with ThreadPoolExecutor(len(gpus), "stacks") as pool:
        return all(list(pool.map(work, gpus)))
