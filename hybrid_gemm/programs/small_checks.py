"""Small products on one GPU and their checks, both as native calls that were prepared: Python takes
longer to start the kernels of checks than these take to run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np

from ..catalog import Launch as Shape
from ..catalog import Variant
from ..devices.base import Array
from ..devices.checksums import (
    GROUPS,
    ExactLimits,
    KernelChecksums,
    Limits,
    Sums,
    below,
    is_exact,
)
from ..devices.cuda.device import CudaDevice
from ..devices.roles import BoundProduct
from ..execution.checked_device import CheckedDevice, bounds_of
from ..execution.checked_work import CheckedWork
from ..execution.checks import Checks, FloatBounds, IntegerBounds, problem_of
from ..problem import is_long
from .launch import CurrentStreams, Launch

MOST_FLOPS = 2 * 3500**3  # of larger ones the kernels take longer
MOST_ROOM = 32 << 20  # bytes of sums, which stay with a stream
_ALIGNED = 32  # sums: rooms for sums begin on multiples of 256 bytes


def bind(
    checked: CheckedDevice, device: CudaDevice, variant: Variant, a: Array, b: Array, c: Array, *,
    alpha: float, beta: float,
) -> BoundProduct | None:  # fmt: skip
    """As `CheckedDevice.bind`, for products that a GPU makes alone."""
    bounds = bounds_of(variant, a, b, c, alpha, beta)
    large = 2 * c.size * a.shape[1] > MOST_FLOPS or is_long(*c.shape, a.shape[1])
    sums = checked.sums
    if large or not isinstance(sums, KernelChecksums) or not _has_room(sums, a, c):
        return checked.bind(variant, a, b, c, alpha=alpha, beta=beta)
    make = device.bind(variant, a, b, c, alpha=alpha, beta=beta)
    return SmallProduct(
        checked, sums, make, (a, b, c), bounds, beta,
        preparable=device.preparable(variant, a, b),
    )  # fmt: skip


def bind_stack(
    checked: CheckedDevice, make: BoundProduct, a: Array, b: Array, c: Array, compute: str
) -> BoundProduct | None:  # fmt: skip
    """A call that has `make` make C = A @ B in an arithmetic, for stacks that lie as these, and
    checks all their products together. The stacks have three dimensions, A and B even steps and C
    no gaps. None where checks pair by pair take less time."""
    (count, m, n), sums = c.shape, checked.sums
    if not isinstance(sums, KernelChecksums) or not sums.worth_stacking(a, n):
        return None
    sizes = count * m, n, a.shape[2]
    problem = problem_of(compute, *sizes, a.dtype.name, c.dtype.name, 1.0, 0.0)
    bounds = FloatBounds(problem, c.dtype)
    if not _has_room(sums, a, c):
        return lambda a, b, c, stream: _work(checked, make, bounds, 0.0, a, b, c).run(stream)
    return SmallProduct(checked, sums, make, (a, b, c), bounds, 0.0)


class SmallProduct:
    """A call that makes a checked product, or those of stacks, of matrices of one layout, and waits
    for it: `make` makes it, which is prepared if it is `preparable`, and launches behind look."""

    def __init__(
        self, checked: CheckedDevice, sums: KernelChecksums, make: BoundProduct,
        matrices: Sequence[Array], bounds: FloatBounds | IntegerBounds, beta: float, *,
        preparable: bool = True,
    ) -> None:  # fmt: skip
        a, _b, c = matrices
        self.checked, self.beta = checked, beta
        self._work = functools.partial(_work, checked, make, bounds, beta)
        self.beyond, self.lock, place = sums.alarm()  # how many sums are beyond their limits
        device: Any = checked.device
        self.device, streams, of_c = device, CurrentStreams(device), (type(c), c.shape, c.dtype)
        look_before, look = _looks(device, sums, a, c, bounds.limits, place)
        calls = [look_before, make, look] if bounds.limits.beta else [make, look]
        self.steps = [
            Launch(streams, call, of_c, preparable=preparable or call is not make)
            for call in calls
        ]  # fmt: skip

    def __call__(self, a: Array, b: Array, c: Array, stream: Any) -> None:
        before = None
        if self.beta != 0:
            before = self.device.empty_like(c, c.dtype.name)
            self.device.copy(before, c, stream)
        at = a.data.ptr, b.data.ptr, c.data.ptr
        if self._are_right([(at, lambda: (a, b, c))], stream):
            self.checked.count_right(_count(c))
        else:
            self._work(a, b, c).run(stream, made=True, before=before)

    def make_stack(self, a: Array, b: Array, c: Array, stream: Any) -> None:
        """C = A @ B for stacks whose matrices lie as those of this product, one after the other;
        all are waited for once. Where one is suspicious, each is looked at."""
        places, stacks = list(np.ndindex(c.shape[:-2])), (a, b, c)
        starts = [(x.data.ptr, x.strides[:-2]) for x in stacks]

        def at(place: tuple[int, ...]) -> tuple[int, int, int]:
            at_a, at_b, at_c = (first + sum(map(mul, place, steps)) for first, steps in starts)
            return at_a, at_b, at_c

        def matrices(place: tuple[int, ...]) -> Sequence[Array]:
            return [x[place] for x in stacks]

        if self._are_right([(at(x), functools.partial(matrices, x)) for x in places], stream):
            self.checked.count(Checks(products=len(places)))
            return
        for place in places:
            self._work(*matrices(place)).run(stream, made=True)

    def _are_right(
        self, products: Sequence[tuple[tuple[int, int, int], Callable[[], Sequence[Array]]]],
        stream: Any,
    ) -> bool:  # fmt: skip
        """Makes products of matrices at these addresses, alone on the stream, and waits for them;
        whether no sum is beyond its limits. What gives the matrices is asked where a launch is not
        prepared for them."""
        with stream.lock, self.lock:
            try:
                for at, matrices in products:
                    for step in self.steps:
                        if not step.started(at, stream):
                            a, b, c = matrices()
                            step.begin(a, b, c, stream)
            finally:
                stream.synchronize()
                right, self.beyond[0] = not self.beyond[0], 0
        return right


def _looks(
    device: CudaDevice, sums: KernelChecksums, a: Array, c: Array, limits: Limits | ExactLimits,
    beyond: Any,
) -> tuple[BoundProduct, BoundProduct]:  # fmt: skip
    """What sums up C before, and what sums up all once C is made and counts what is beyond. The
    sums lie in memory that stays with the stream."""
    rows = _rooms(sums, a, c)
    sizes = list(map(_size, rows))
    launch = Shape((1, 1, 1), (1, 1, 1), workspace_bytes=8 * sum(sizes), flag_bytes=4)
    kind = "u8" if is_exact(a.dtype) else "f8"

    def rooms(stream: Any) -> list[Array]:
        # Of a dtype in which no product takes room: that of C before is kept during one.
        flat, made, at = device.scratch(launch, "uint64", stream)[0].reshape(-1).view(kind), [], 0
        for count, size in zip(rows, sizes, strict=True):
            made.append(flat[at : at + count * GROUPS].reshape(count, GROUPS))
            at += size
        return made

    def look_before(_a: Array, _b: Array, c: Array, stream: Any) -> None:
        sums.sums(c, stream, Sums(*rooms(stream)[6:]))

    def look(a: Array, b: Array, c: Array, stream: Any) -> None:
        *of_product, got, of_got, before, of_before = rooms(stream)
        product = sums.product(a, b, stream, (Sums(*of_product[:2]), Sums(*of_product[2:])))
        made = sums.sums(c, stream, Sums(got, of_got))
        old = Sums(before, of_before) if limits.beta else None
        sums.count_beyond(limits, product, old, made, beyond, stream)

    return look_before, look


def _work(
    checked: CheckedDevice, make: BoundProduct, bounds: FloatBounds | IntegerBounds, beta: float,
    a: Array, b: Array, c: Array,
) -> CheckedWork:  # fmt: skip
    product = functools.partial(checked.sums.product, a, b)
    made = functools.partial(make, a, b, c)
    return CheckedWork(checked, below(c), beta, made, product, bounds, (a, b), _count(c))


def _count(c: Array) -> int:
    """Products that are checked together."""
    return len(c) if c.ndim == 3 else 1


def _rooms(sums: KernelChecksums, a: Array, c: Array) -> tuple[int, ...]:
    """Rows of sums of B, of products, of C and of C before: sums, and those of squares."""
    m = math.prod(c.shape[:-1])
    of_b, of_product = sums.rooms(a, c.shape[-1])
    return of_b, of_b, of_product, of_product, m, m, m, m


def _has_room(sums: KernelChecksums, a: Array, c: Array) -> bool:
    """Whether sums stay with a stream."""
    return 8 * sum(map(_size, _rooms(sums, a, c))) <= MOST_ROOM


def _size(rows: int) -> int:
    """Sums that a room for so many rows has."""
    return -(-rows * GROUPS // _ALIGNED) * _ALIGNED
