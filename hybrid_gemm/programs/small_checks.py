"""Small products on one GPU and their checks, both as native calls that were prepared: Python takes
longer to start the kernels of checks than these take to run."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
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
    if not isinstance(checked.sums, KernelChecksums) or large:
        return checked.bind(variant, a, b, c, alpha=alpha, beta=beta)
    if not _has_room(checked.sums, a, c):
        return checked.bind(variant, a, b, c, alpha=alpha, beta=beta)
    make = device.bind(variant, a, b, c, alpha=alpha, beta=beta)
    small = SmallChecks(
        device, checked.sums, make, (a, b, c), bounds.limits,
        preparable=device.preparable(variant, a, b),
    )  # fmt: skip
    return SmallProduct(checked, device, small, make, bounds, beta)


def bind_stack(
    checked: CheckedDevice, device: CudaDevice, make: BoundProduct, a: Array, b: Array, c: Array,
    compute: str,
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
    small = SmallChecks(device, sums, make, (a, b, c), bounds.limits, preparable=True)
    return SmallProduct(checked, device, small, make, bounds, 0.0)


class SmallProduct:
    """A call that makes a checked product, or those of stacks, and waits for it."""

    def __init__(
        self, checked: CheckedDevice, device: CudaDevice, small: SmallChecks, make: BoundProduct,
        bounds: FloatBounds | IntegerBounds, beta: float,
    ) -> None:  # fmt: skip
        self.checked, self.device, self.small, self.make = checked, device, small, make
        self.bounds, self.beta = bounds, beta

    def __call__(self, a: Array, b: Array, c: Array, stream: Any) -> None:
        before = None
        if self.beta != 0:
            before = self.device.empty_like(c, c.dtype.name)
            self.device.copy(before, c, stream)
        if self.small.make_right(a, b, c, stream):
            self.checked.count_right(_count(c))
        else:
            self._work(a, b, c).run(stream, made=True, before=before)

    def make_stack(self, a: Array, b: Array, c: Array, stream: Any) -> None:
        """C = A @ B for stacks whose matrices lie as those of this product, one after the other;
        all are waited for once. Where one is suspicious, each is looked at."""
        places = list(np.ndindex(c.shape[:-2]))
        if self.small.make_stack_right(a, b, c, places, stream):
            self.checked.count(Checks(products=len(places)))
            return
        for place in places:
            self._work(a[place], b[place], c[place]).run(stream, made=True)

    def _work(self, a: Array, b: Array, c: Array) -> CheckedWork:
        return _work(self.checked, self.make, self.bounds, self.beta, a, b, c)


class SmallChecks:
    """Products of matrices of one layout: `make` makes them, which is prepared if it is
    `preparable`."""

    def __init__(
        self, device: CudaDevice, sums: KernelChecksums, make: BoundProduct,
        matrices: Sequence[Array], limits: Limits | ExactLimits, *, preparable: bool,
    ) -> None:  # fmt: skip
        a, _b, c = matrices
        self.device = device
        self.beyond, self.lock, place = sums.alarm()  # how many sums are beyond their limits
        look_before, look = _looks(device, sums, a, c, limits, place)

        def launch(call: BoundProduct, *, preparable: bool = True) -> Launch:
            make = type(c), c.shape, c.dtype
            return Launch(CurrentStreams(device), call, make, preparable=preparable)

        self.steps = [launch(make, preparable=preparable), launch(look)]
        if limits.beta:
            self.steps.insert(0, launch(look_before))

    def make_right(self, a: Array, b: Array, c: Array, stream: Any) -> bool:
        """Makes C, and says whether no sum is beyond its limits. Waits for that."""
        with self._waited_for(stream) as right:
            self._start(stream, (a.data.ptr, b.data.ptr, c.data.ptr), lambda: (a, b, c))
        return right()

    def make_stack_right(
        self, a: Array, b: Array, c: Array, places: Sequence[tuple[int, ...]], stream: Any
    ) -> bool:
        """As `make_right`, of the matrices at these places of stacks, one after the other."""
        stacks = a, b, c
        steps = [x.strides[:-2] for x in stacks]

        def matrices(place: tuple[int, ...]) -> list[Array]:
            return [x[place] for x in stacks]

        with self._waited_for(stream) as right:
            for place in places:
                at_a, at_b, at_c = (
                    x.data.ptr + sum(map(operator.mul, place, step))
                    for x, step in zip(stacks, steps, strict=True)
                )
                self._start(stream, (at_a, at_b, at_c), functools.partial(matrices, place))
        return right()

    def _start(
        self, stream: Any, at: tuple[int, int, int], matrices: Callable[[], Sequence[Array]]
    ) -> None:
        """Starts a product at these addresses, and its checks; `matrices` are asked for where it is
        not prepared for them."""
        for step in self.steps:
            if not step.started(at, stream):
                a, b, c = matrices()
                step.begin(a, b, c, stream)

    @contextlib.contextmanager
    def _waited_for(self, stream: Any) -> Iterator[Callable[[], bool]]:
        """Alone on the stream, waits at the end for what was started; what is given says whether no
        sum was beyond its limits."""
        found: list[bool] = []
        with stream.lock, self.lock:
            try:
                yield lambda: found[0]
            finally:
                stream.synchronize()
                found.append(not self.beyond[0])
                self.beyond[0] = 0


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
