"""What products of packed operands on tensor cores have in common: the memory that stays with a
stream, how their matrices lie, their packing kernels, and the kernel that multiplies."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .. import catalog
from ..arrays.strides import layout, stored
from ..catalog import Launch, Variant
from ..errors import UsageError
from ..planning.plan import SPLIT_STEP
from .base import Array, Stream
from .kernel_launcher import KernelLauncher
from .shares import Shares
from .split_operands import STATE_WORDS
from .streams import grown

rooms: weakref.WeakKeyDictionary[Stream, Room] = weakref.WeakKeyDictionary()

# The kernel that multiplies, worked out: called with A and B as they are stored or packed, C, a
# stream, and for split operands `exponents`, a `verdict` and `wanted`. Exponents are int32 arrays
# of m and n, powers of two by which rows of A and columns of B were divided, each in [-126, 127]
# with results in range; with a verdict, one int32 on the device, nothing happens unless it is
# `wanted`.
Multiply = Callable[..., None]


# --- what stays on the device between products ----------------------------------------------


class Room:
    """Memory on the device that products of one stream keep from call to call.

    A larger buffer never replaces a smaller one, with which a recorded graph may still launch.
    """

    def __init__(self, device: KernelLauncher, stream: Stream):
        self._device = weakref.ref(device)  # which has the stream that this is kept for
        self.state = device.zeros(STATE_WORDS, "int32", stream)
        self._kept: dict[tuple[str, str], list[Array]] = {}

    @property
    def device(self) -> KernelLauncher | None:
        """The device, as long as it is there."""
        return self._device()

    def array(self, name: str, count: int, dtype: str) -> Array:
        """`count` elements, as a vector."""
        kept = self._kept.setdefault((name, dtype), [])
        for flat in kept:
            if flat.size >= count:
                return flat[:count]
        device = self._device()
        assert device is not None  # it has the stream that is multiplied on
        kept.append(device.empty(1, grown(max(1, count), kept), dtype)[0])
        return kept[-1][:count]


def room_of(device: KernelLauncher, stream: Stream) -> Room:
    """What products of a stream of this device keep."""
    if stream not in rooms:
        rooms[stream] = Room(device, stream)
    return rooms[stream]


# --- the operation ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """C = alpha A B + beta C for matrices laid out as these, which have no memory."""

    a: Array
    b: Array
    c: Array
    alpha: float
    beta: float

    @classmethod
    def like(cls, a: Array, b: Array, c: Array, alpha: float, beta: float) -> Operation:
        """Of matrices that lie as these; a product that is kept would keep their memory."""
        return cls(_like(a), _like(b), _like(c), alpha, beta)


def _like(x: Array) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.empty(1, x.dtype), x.shape, x.strides)


def unwritten(x: Array, dtype: str) -> np.ndarray:
    """A matrix that lies as x will on a device, which nothing is written to."""
    order = (layout(x) or "n")[0]
    return np.empty(x.shape, dtype) if order == "n" else np.empty(x.shape[::-1], dtype).T


# --- packing ------------------------------------------------------------------------------


class PackedProduct:
    """What products of packed operands have in common: sizes, packing kernels and their memory,
    and the kernel that multiplies."""

    def __init__(self, device: KernelLauncher, variant: Variant, operation: Operation):
        self.device, self.variant, self.operation = device, variant, operation
        (self.m, self.k), self.n = operation.a.shape, operation.b.shape[1]
        (order_a, lda), (order_b, ldb) = stored(operation.a), stored(operation.b)
        self.layouts = order_a + order_b
        self.sizes = [np.int32(x) for x in (self.m, self.n, self.k)]
        self.ld = np.int64(lda), np.int64(ldb)
        self.pitch = -(-self.k // SPLIT_STEP) * SPLIT_STEP  # elements of one part of a packed row

    def kernel(self, role: str, dtype: str, **params: int) -> tuple[Any, Launch]:
        """A packing kernel and its launch."""
        variant = catalog.helper(role)
        variant = variant.kernel.variant({**variant.params, **params})
        function = self.device.function(variant, dtype, self.layouts)
        return function, variant.launch(self.m, self.n, self.k, dtype)

    def parts(self, room: Room, count: int, size: int) -> list[Array]:
        """Memory for both operands, each (count, rows, pitch) elements of `size` bytes: the parts
        of a row lie one behind the other."""
        rows = self.m + self.n
        flat = room.array("parts", count * rows * self.pitch * size, "uint8")
        both = flat.view(f"u{size}").reshape(rows, count, self.pitch).transpose(1, 0, 2)
        return [both[:, : self.m], both[:, self.m :]]

    def matrices(self, a: Array, b: Array, sizes: Iterable[np.int32] | None = None) -> list[Any]:
        """The arguments with which the packing kernels begin."""
        return [*(sizes or self.sizes), a, self.ld[0], b, self.ld[1]]

    def packed_views(self, parts: int) -> list[Array]:
        """Arrays without memory, laid out as packed operands."""
        return [
            np.broadcast_to(np.uint8(), (parts, count, self.pitch)) for count in (self.m, self.n)
        ]

    def multiply(
        self, dtype: str, parts: int, orders: str = "nt", views: Sequence[Array] | None = None
    ) -> Multiply:
        """The kernel that multiplies operands of `dtype` in so many parts, which are stored in
        these orders as `views` are, or packed."""
        operation = self.operation
        terms, out_bytes = 2 * parts - 1, operation.c.dtype.itemsize
        variant = self.variant.kernel.variant(
            {**self.variant.params, "TERMS": terms, "OUT": out_bytes}
        )
        if not variant.kernel.tma:
            return self._multiply_pointers(variant, dtype)
        from .cuda import tensor_maps

        a, b = self.packed_views(parts) if views is None else views
        options = {
            "k": self.k, "layouts": orders, "alpha": operation.alpha, "beta": operation.beta,
        }  # fmt: skip
        if dtype == "tfloat32" and parts == 1 and orders in catalog.helper("across").kernel.layouts:
            return tensor_maps.bind_across(self.device, variant, a, b, operation.c, **options)
        return tensor_maps.bind_tensor(self.device, variant, dtype, a, b, operation.c, **options)

    def _multiply_pointers(self, variant: Variant, dtype: str) -> Multiply:
        """As `tensor_maps.bind_tensor`, for kernels that take plain pointers to packed
        operands."""
        device, operation = self.device, self.operation
        if reason := variant.refusal(device=device.kind, dtype=dtype, m=self.m, n=self.n, k=self.k):
            raise UsageError(reason)
        shares = Shares(
            device, variant, dtype, operation.c, (self.m, self.n, self.pitch),
            alpha=operation.alpha, beta=operation.beta,
        )  # fmt: skip
        function = device.function(shares.variant, dtype, "nt")
        pitch, ldc = np.int64(self.pitch), np.int64(stored(operation.c)[1])
        sizes = [*self.sizes[:2], np.int32(self.pitch)]

        def call(
            a: Array, b: Array, c: Array, stream: Stream, exponents: Sequence[Array] = (),
            verdict: Array = None, wanted: int = -1,
        ) -> None:  # fmt: skip
            state = room_of(device, stream).state if verdict is None else verdict
            both = exponents or (state, state)  # without a verdict the kernel reads neither
            shares.start(
                function, [a, pitch, b, pitch, *sizes], c, ldc, stream, scales=both,
                decided=[state, np.int32(wanted)], exponents=exponents, verdict=verdict,
                wanted=wanted,
            )  # fmt: skip

        return call
