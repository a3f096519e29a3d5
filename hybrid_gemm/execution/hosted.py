"""Products of small arrays of the host by one GPU: they are copied there and back whole, as they
are, by the calling thread; what no kernel reads is converted there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays.caller_arrays import shares_memory, silent
from ..arrays.strides import layout, overlaps_itself
from ..errors import shortage_in_words
from ..problem import FLOATS
from . import staging

if TYPE_CHECKING:  # what has GPUs imports it
    from .single_gpu import SingleGpuExecutor

_CAST_BYTES = 1 << 30  # of arrays that a run would cast on the host, by one thread for each worker
SHARE_BYTES = 4 << 20  # of a stack: less is not worth another GPU


class Hosted:
    """Multiplies arrays of the host as `single` does those of its GPU, on a stream of its own: what
    it gives back is not another stream's while copies go on."""

    def __init__(self, single: SingleGpuExecutor) -> None:
        self.single, self.device, self.own = single, single.device, single.device.stream()

    def gemm(
        self, a: Any, b: Any, c: Any = None, alpha: Any = 1.0, beta: Any = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """As `SingleGpuExecutor.gemm`, for arrays of the host; returns when the product is there.
        None for what takes a run: large arrays, a C without elements, for which A and B are not
        read, complex products with Inf or NaN, of which cuBLAS makes more than there are, and what
        is wrong."""
        dtype = _dtype(a, b, c, out)
        if dtype is None or (c is not None and not beta):
            return None
        shape = a.shape[bool(trans_a)], b.shape[not trans_b]
        size = sum(x.size * x.itemsize for x in (a, b)) + shape[0] * shape[1] * dtype.itemsize
        if (
            0 in shape
            or size > self._most(size, dtype, a, b, c, out)
            or (out is not None and not _fits(out, shape, dtype, a, b, c))
        ):
            return None
        with self.device.using(self.own), shortage_in_words("a product of small arrays"):
            x, y, z = (None if v is None else self._there(v) for v in (a, b, c))
            made = self.device.empty(*shape, dtype.name)
            if z is not None and (z.shape, z.dtype) == (shape, dtype) and z.flags.c_contiguous:
                made = z
            if self.single.gemm(x, y, z, alpha, beta, trans_a, trans_b, made) is None:
                return None
            real = dtype.kind != "c"
            straight = out is not None and out.flags.c_contiguous and real
            here = out if straight else np.empty(shape, dtype)
            self._copy(here, made)
            self.own.synchronize()
        if not (real or _is_finite(here)):
            return None
        if out is None:
            return here
        if here is not out:
            out[...] = here
        return out

    def stackable(self, a: Any, b: Any, c: Any) -> bool:
        """As `StacksOnGpu.stackable`."""
        return self.single.stacks.stackable(a, b, c)

    def multiply_stacks(self, a: Any, b: Any, c: Any) -> bool:
        """C = A @ B for stacks of the host; whether that was done. Not for complex ones with Inf or
        NaN, as `gemm`."""
        with self.device.using(self.own):
            x, y = (
                self._there(v.reshape(-1, v.shape[-1])).reshape(v.shape)
                for v in map(np.ascontiguousarray, (a, b))
            )
            made = self.device.cp.empty(c.shape, c.dtype)
            if not self.single.stacks.matmul(x, y, made):
                return False
            here = c if c.flags.c_contiguous else np.empty(c.shape, c.dtype)
            self._copy(*(v.reshape(-1, v.shape[-1]) for v in (here, made)))
            self.own.synchronize()
        if c.dtype.kind == "c" and not _is_finite(here):
            return False
        if here is not c:
            c[...] = here
        return True

    def _most(self, size: int, dtype: np.dtype, *arrays: Any) -> int:
        """The bytes of A, B and C that are copied whole: more of what a run would cast, if that
        fits."""
        most = self.single.plans.most_hosted
        if size <= most or all(x is None or x.dtype == dtype for x in arrays):
            return most
        free, _total = self.device.cp.cuda.runtime.memGetInfo()
        limit = self.single.plans.options.max_device_memory or free
        return min(_CAST_BYTES, limit // 8)  # int8 becomes int32, twice

    def _there(self, array: np.ndarray) -> Any:
        if array.ndim < 2:
            array = array.reshape(1, -1)
        if not _lies(array):
            array = np.array(array, array.dtype.newbyteorder("="), order="C")
        made = self.device.empty_like(array, array.dtype.name)
        if array.size:
            self._copy(made, array)
        return made

    def _copy(self, dst: Any, src: Any) -> None:
        """Reads or writes the host's memory before it returns, or when the stream is waited for."""
        staging.copy(self.device, dst, src, self.own)


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
    with silent():
        return bool(np.isfinite(x.sum()))


def _lies(x: np.ndarray) -> bool:
    """Whether a matrix is copied as it is."""
    return x.flags.aligned and x.dtype.isnative and layout(x) is not None


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
