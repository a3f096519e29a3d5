"""Products that one GPU of a Runner's does alone, launched as CuPy launches its own.

What has to be worked out is worked out once for arrays laid out alike. Of arrays that lie on the
GPU nothing is split, moved or waited for, so a call costs its launch, on the caller's current
stream. Small arrays of the host are copied there and back whole, by the calling thread.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.caller_arrays import shares_memory
from ..arrays.strides import layout, leading
from ..devices.cuda.device import CudaDevice, CudaStream
from ..problem import make_problem

if TYPE_CHECKING:
    from ..runner import Runner

MAX_KNOWN = 4096  # signatures; a program of ever new shapes starts over
HOSTED_BYTES = 32 << 20  # of A, B and C: more goes faster in pieces, by copying threads


class Direct:
    """Calls of one `Runner` on one GPU. Gives None for what is not for it."""

    def __init__(self, device: CudaDevice, runner: Runner):
        self.device, self.runner = device, weakref.proxy(runner)  # which has this
        self.array = device.cp.ndarray
        self.current = device.cp.cuda.get_current_stream
        self.known: dict = {}
        self.streams: dict[int, CudaStream] = {}
        # For arrays of the host; what it gives back is not another stream's while copies go on.
        self.own = device.stream()

    def __call__(
        self, a, b, c=None, *, alpha=1.0, beta=0.0, trans_a=False, trans_b=False, out=None
    ):
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
        stream = self.current()
        known = self.streams.get(stream.ptr)
        if known is None:
            known = self.streams[stream.ptr] = CudaStream(stream)
        call(a.T if trans_a else a, b.T if trans_b else b, out, known)
        return out

    def hosted(
        self, a, b, c=None, *, alpha=1.0, beta=0.0, trans_a=False, trans_b=False, out=None, **others
    ):
        """As a call, for small arrays of the host; returns when the product is there."""
        given = [x for x in (a, b, c, out) if x is not None]
        if (
            others
            or any(type(x) is not np.ndarray or x.ndim != 2 for x in given)
            or any(x.dtype != a.dtype or not (x.flags.forc and x.flags.aligned) for x in given)
            or a.dtype not in (np.float32, np.float64)  # of this machine's byte order
            or (c is not None and not beta)
        ):
            return None
        shape = a.shape[bool(trans_a)], b.shape[not trans_b]
        size = a.nbytes + b.nbytes + shape[0] * shape[1] * a.itemsize
        most = min(HOSTED_BYTES, self.runner.max_device_memory or HOSTED_BYTES)
        if size > most or (out is not None and not self._fit(out, shape, a, b, c)):
            return None
        with self.device.using(self.own):
            x, y, z = (None if v is None else self._there(v) for v in (a, b, c))
            made = self.device.empty(*shape, a.dtype.name) if z is None else z
            done = self(x, y, z, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=made)
            if done is None:
                return None
            out = np.empty(shape, a.dtype) if out is None else out
            self.device.copy(out, made, self.own)
            self.own.synchronize()
        return out

    @staticmethod
    def _fit(out, shape, a, b, c) -> bool:
        """Whether a product is copied to `out` as it is; otherwise a run does what is to do."""
        fits = out.shape == shape and out.flags.c_contiguous and out.flags.writeable
        others = (a, b) if c is None or c is out else (a, b, c)
        return fits and not any(shares_memory(x, out) for x in others)

    def _there(self, array: np.ndarray):
        made = self.device.empty_like(array, array.dtype.name)
        self.device.copy(made, array, self.own)
        return made

    def _work_out(self, a, b, c, out, *, alpha, beta, trans_a, trans_b):
        """The bound product for arrays laid out as these, or None if it takes a whole run."""
        problem = self.runner.settle(
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
        layouts = layout(op_a)[0] + layout(op_b)[0]
        variant = self.runner.alone(problem, layouts, self.device)
        if variant is None:
            return None
        call = self.device.bind(variant, op_a, op_b, like, alpha=problem.alpha, beta=problem.beta)
        return call, shape, problem.out_dtype, [_extent(x) for x in (a, b, like)]


def _extent(x) -> int:
    """Bytes from the first element's address to past the last one's; strides are positive."""
    return sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)) + x.itemsize


def _overlap(a, b, out, extents) -> bool:
    start = out.data.ptr
    stop = start + extents[2]
    return any(
        x.data.ptr < stop and start < x.data.ptr + extent
        for x, extent in ((a, extents[0]), (b, extents[1]))
    )
