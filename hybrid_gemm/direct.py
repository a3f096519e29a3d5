"""Products of arrays that lie on one GPU of a Runner's, launched as CuPy launches its own.

Nothing is split, moved or waited for, so a call costs its launch: what has to be worked out is
worked out once for arrays laid out alike. The product is on the caller's current stream.
"""

from __future__ import annotations

from collections.abc import Callable

from .catalog import Variant
from .devices.cuda import CudaDevice, CudaStream
from .devices.views import layout, leading
from .problem import Problem, make_problem

MAX_KNOWN = 4096  # signatures; a program of ever new shapes starts over


class Direct:
    """Calls of one `Runner` on one GPU. Gives None for what is not for it."""

    def __init__(
        self,
        device: CudaDevice,
        settle: Callable[[Problem], Problem],
        choose: Callable[[Problem, str], Variant | None],
    ):
        self.device, self.settle, self.choose = device, settle, choose
        self.array = device.cp.ndarray
        self.current = device.cp.cuda.get_current_stream
        self.known: dict = {}
        self.streams: dict[int, CudaStream] = {}

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

    def _work_out(self, a, b, c, out, *, alpha, beta, trans_a, trans_b):
        """The bound product for arrays laid out as these, or None if it takes a whole run."""
        problem = self.settle(
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
        variant = self.choose(problem, layout(op_a)[0] + layout(op_b)[0])
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
