"""Writes stacks of small products on one GPU, most of them as one launch."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arrays.other_libraries import TORCH
from ..arrays.stacks import merged
from ..arrays.strides import leading, stored
from ..devices import stack_products
from ..devices.cuda import cublas
from ..devices.roles import BoundProduct
from ..kernel_choice import stacks
from ..planning.plan import LINE_BYTES
from ..problem import FLOATS, is_long
from . import small_checks
from .launch import CurrentStreams, Launch
from .on_gpu import OneGpu
from .program import OUT, REFUSING, A, B, Call, Program

# Microseconds of a launch of some small products and of a copy besides its bytes, and bytes copied
# in a microsecond: fitted to calls on an H100 (docs/notes/choosing.md).
_LAUNCH_US, _COPY_US, _COPIED = 3.0, 20.0, 1.5e6
STACKED_FLOPS = 2 * 2048**3  # of one product in a stack: larger ones fill a GPU alone
_FLOATS = frozenset(map(np.dtype, FLOATS))  # a dtype's name takes NumPy 3 us


def pair_by_pair(
    product: small_checks.SmallProduct, streams: CurrentStreams, slots: list[Any]
) -> None:
    """The products of pairs, each checked by itself; all are started before they are waited
    for."""
    product.make_stack(slots[A], slots[B], slots[OUT], streams())


class StacksOnGpu:
    """Writes C = A @ B for stacks that lie on a GPU, on the caller's current stream; `REFUSING`
    where pair by pair is right: for large matrices, which fill the GPU alone, for other dtypes,
    arithmetics and kernels, and other places. Where products are checked, a stack's are, together,
    and waited for."""

    def __init__(self, gpu: OneGpu) -> None:
        self.gpu, self.device, self.plans, self.checked = gpu, gpu.device, gpu.plans, gpu.checked

    def write(self, call: Call) -> Program:
        """The program of stacks of the same length, which takes C as OUT. Those that are not read
        or written as they lie are copied on the GPU."""
        a, b, c = call.a, call.b, call.out
        if not self._here(a, b, c) or not c.size:
            return REFUSING
        with self.device.current(), self.gpu.streams().unrestricted():
            steps = self._checked(a, b, c) if self.checked else self._launches(a, b, c)
        return self.gpu.program(steps, call, REFUSING) if steps else REFUSING

    def _launches(self, a: Any, b: Any, c: Any) -> list[Any]:
        """Casts to what kernels read, the product, and a cast of it."""
        given, dtype = (a, b), c.dtype
        copied, aside = [not _is_read(x, dtype) for x in given], not _lies(c, "n")
        # A graph keeps none of CuPy's copies; pair by pair they are refused.
        may_copy = TORCH.lends or not self.gpu.streams().capturing()
        if not self._is_small(a, c) or (not may_copy and (any(copied) or aside)):
            return []
        z = self.gpu.array(c.shape, dtype) if aside else c
        read: list[Any] = [a, b]
        casts: dict[int, Any] = {}
        for i in (A, B):
            if copied[i]:
                read[i], casts[i] = self._copy(i, given[i], dtype, whole=False)
        uneven_ones = _to_copy(read[A], read[B], z) if c.ndim > 3 and may_copy else ()
        for i, uneven in enumerate(uneven_ones):
            if uneven:
                read[i], casts[i] = self._copy(i, given[i], dtype, whole=True)
        if aside:
            casts[OUT] = self.gpu.cast(6, z, OUT, c)
        call = None if None in casts.values() else self._work_out(read[A], read[B], z)
        if call is None:
            return []
        launch = Launch(
            self.gpu.streams, call, (self.gpu.array, c.shape, dtype),
            slots=(4 if A in casts else A, 5 if B in casts else B, 6 if aside else OUT),
        )  # fmt: skip
        behind = [casts.pop(OUT)] if aside else []
        return [*casts.values(), launch, *behind]

    def _copy(self, of: int, x: Any, dtype: np.dtype, *, whole: bool) -> tuple[Any, Any]:
        """A stack like one in a slot, of another dtype and without gaps, and the launch that copies
        it; `whole` is each matrix of it, otherwise what is repeated is there once."""
        once = x if whole else x[tuple(slice(None if step else 1) for step in x.strides[:-2])]
        turned = abs(x.strides[-2]) < abs(x.strides[-1])
        source = once.swapaxes(-1, -2) if turned else once
        made = self.gpu.array(source.shape, dtype)
        view = made.swapaxes(-1, -2) if turned else made
        cast = self.gpu.cast(of, source, 4 + of, made)
        return self.device.cp.broadcast_to(view, x.shape), cast

    def _checked(self, a: Any, b: Any, c: Any) -> list[Any]:
        """Where products are checked: together, or pair by pair, if these are small."""
        stacks = _even(a, b, c)
        if stacks is not None and self._is_small(*stacks[::2]):
            read = all(_is_read(x, c.dtype) for x in stacks[:2])
            if call := self._work_out(*stacks) if read else None:
                make = self.gpu.array, c.shape, c.dtype
                launch = Launch(
                    self.gpu.streams, call, make, _in_three_dimensions, preparable=False
                )
                return [launch]
        x, y, z = (v[(0,) * (v.ndim - 2)] for v in (a, b, c))
        pair = self.gpu.write(Call(x, y, out=z), lambda _call: REFUSING).commands[-1]
        if isinstance(pair, Launch) and isinstance(pair.call, small_checks.SmallProduct):
            return [partial(pair_by_pair, pair.call, self.gpu.streams)]
        return []

    def _here(self, *arrays: Any) -> bool:
        """Whether all lie on this GPU."""
        array, here = self.gpu.array, self.device.ordinal
        return all(type(x) is array and x.data.device_id == here for x in arrays)

    def stackable(self, a: Any, b: Any, c: Any) -> bool:
        """Whether these stacks' products are small, and of a kind that is multiplied so."""
        return not self.checked and a.dtype == b.dtype == c.dtype and self._is_small(a, c)

    def _is_small(self, a: Any, c: Any) -> bool:
        """The same of a product that has C's dtype."""
        options = self.plans.options
        (m, n), k = c.shape[-2:], a.shape[-1]
        own = options.kernel == "own"
        return (
            (c.dtype in _FLOATS or (c.dtype.kind == "c" and not own and not self.checked))
            and options.kernel in ("auto", "own", "cublas")
            and c.size > 0
            and 0 < 2 * m * n * k <= STACKED_FLOPS
            and not is_long(m, n, k)
            and self._takes(c.dtype, c.size // (m * n), (m, n, k))
        )

    def _takes(self, dtype: np.dtype, count: int, sides: tuple[int, int, int]) -> bool:
        """Whether a stack is multiplied at once in the arithmetic that was asked for, or in a
        strict one that should be as fast."""
        compute = self.plans.arithmetic.compute
        if compute == "fp32" or (compute == "auto" and dtype.char not in "fF"):
            return True
        if dtype.char != "f" or self.plans.options.kernel != "auto":
            return False
        machine = self.device.machine(dtype.name)
        return compute == "tf32" or (
            compute in ("auto", "fp32x3") and stacks.strict_is_faster(machine, count, sides)
        )

    def _work_out(self, a: Any, b: Any, c: Any) -> BoundProduct | None:
        """The bound product of stacks that lie as these; None where our own kernel was asked for
        and has none for them, and where checks take less time pair by pair."""
        x, y, z = (v[(0,) * (v.ndim - 2)] for v in (a, b, c))
        shape, steps = merged(c.shape[:-2], *(v.strides[:-2] for v in (a, b, c)))
        # The longest side is one launch's, and there is a launch for each place in the others.
        longest = max(range(len(shape)), key=lambda i: shape[i])
        count, inner = shape[longest], [step[longest] for step in steps]
        places = np.ndindex(*(1 if i == longest else side for i, side in enumerate(shape)))
        starts = [
            [sum(map(operator.mul, place, step)) for step in steps] for place in places
        ]  # fmt: skip
        call = self._own(x, y, z, count, inner) if len(starts) == 1 else None
        if call is None and self.plans.options.kernel == "own":
            return None
        tf32 = call is None and self.plans.options.compute == "tf32" and z.dtype == np.float32
        if call is None:
            call = cublas.bind_stack(x, y, z, count, inner, tf32=tf32, starts=starts)
        if self.checked:
            compute = "tf32" if tf32 else "fp32"
            call = small_checks.bind_stack(self.checked, call, a, b, c, compute)
        return call

    def _own(self, x: Any, y: Any, z: Any, count: int, steps: Sequence[int]) -> BoundProduct | None:
        """The product by our own kernel, where that was asked for or should be faster."""
        kernel, dtype = self.plans.options.kernel, z.dtype.name
        sides, orders = (*z.shape, x.shape[1]), stored(x)[0] + stored(y)[0]
        if kernel == "cublas" or count > stack_products.MOST or z.dtype.kind == "c":
            return None
        variant = stacks.own(sides, dtype)
        if kernel == "auto":
            pitches = *(stored(v)[1] * v.itemsize for v in (x, y)), *steps[:2]
            vectors = not any(step % LINE_BYTES for step in pitches)
            measured = vectors and self.device.capability == 90
            variant = stacks.faster(count, sides, orders, dtype) if measured else None
        if variant is None or not variant.kernel.runs_at(self.device.capability):
            return None
        return stack_products.bind_stack(self.device, variant, x, y, z, count, steps)


def _to_copy(a: Any, b: Any, c: Any) -> tuple[bool, bool]:
    """Whether A and B should be copied, so that one step leads through each where one leads through
    C."""
    shape, _ = merged(c.shape[:-2], *(x.strides[:-2] for x in (a, b, c)))
    launches = math.prod(shape) // max(1, *shape)
    uneven = not _is_even(a, c), not _is_even(b, c)
    copies_us = sum(
        _COPY_US + x.nbytes / _COPIED for x, copied in zip((a, b), uneven, strict=True) if copied
    )
    worth_it = _is_even(c, c) and copies_us < (launches - 1) * _LAUNCH_US
    return uneven if worth_it else (False, False)


def _is_even(x: Any, c: Any) -> bool:
    """Whether one step leads through a stack where one leads through C."""
    return len(merged(c.shape[:-2], x.strides[:-2], c.strides[:-2])[0]) == 1


def _in_three_dimensions(a: Any, b: Any, c: Any) -> tuple[Any, Any, Any]:
    return tuple(x.reshape(-1, *x.shape[-2:]) if x.ndim > 3 else x for x in (a, b, c))


def _even(a: Any, b: Any, c: Any) -> tuple[Any, Any, Any] | None:
    """Stacks as those of three dimensions, where kernels of checks take them: of one dtype, each
    with one step from a matrix to the next, and C without gaps."""
    stacks = a, b, c
    if (
        not a.dtype == b.dtype == c.dtype
        or not c.flags.c_contiguous
        or math.prod(c.shape[:-2]) > stack_products.MOST
        or math.prod(c.shape[:-1]) >= 2**31  # rows of sums
        or not all(_lies(x, "n") or _lies(x, "t") for x in stacks)
        or any(len(merged(x.shape[:-2], x.strides[:-2])[0]) > 1 for x in stacks)
    ):
        return None
    return _in_three_dimensions(a, b, c)


def _is_read(x: Any, dtype: np.dtype) -> bool:
    """Whether kernels for this dtype read a stack as it is."""
    return x.dtype == dtype and (_lies(x, "n") or _lies(x, "t"))


def _lies(x: Any, order: str) -> bool:
    """Whether the matrices of a stack lie in this order, each behind those before."""
    forward = all(step >= 0 and step % x.itemsize == 0 for step in x.strides[:-2])
    return forward and bool(leading(x[(0,) * (x.ndim - 2)], order))
