"""Products on tensor cores of operands in one part each: float32 rounded to TF32, and 16 bits.

They are multiplied as they are where the kernel can read them, and packed where it cannot
(`RoundedProduct`); some kernels can always (`bind_in_place`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import catalog
from ..arrays.strides import stored
from ..catalog import MAX_GRID, Launch, Variant
from ..kernel_choice.compute_modes import with_out
from ..planning.plan import SPLIT_STEP
from .base import Array, Stream
from .kernel_launcher import KernelLauncher
from .packed_product import Operation, PackedProduct, Room, room_of
from .roles import BoundProduct
from .shares import Shares

_FEW = 2**23  # elements to pack, below which blocks take less of k each, so that there are more
_STEP = 256  # elements of a line that a warp of the packing kernel copies in two turns
# The rate of packing while lines are turned over that of copying them, on an H100.
_TURNING = 0.58


class RoundedProduct(PackedProduct):
    """float32 rounded to TF32, or operands of 16 bits, in one part each. `packed` says whether A
    is packed and whether B is; one that is not is multiplied where it lies.

    Packed rows of A and columns of B lie along k, or of large operands as they lay before, if the
    kernel that multiplies takes that as fast."""

    def __init__(
        self, device: KernelLauncher, variant: Variant, operation: Operation,
        packed: Sequence[bool],
    ):  # fmt: skip
        super().__init__(device, variant, operation)
        self.packed, self.any_packed = packed, any(packed)
        self.item_bytes = operation.a.dtype.itemsize
        sides = (self.m, self.k), (self.n, self.k)
        self.few = sum(x * k for (x, k), y in zip(sides, packed, strict=True) if y) < _FEW
        orders = self._orders()
        # Of each operand, as it is packed: lines, and elements of one. None where it is not.
        shapes = [
            (0, 0) if not x else shape if order == along else shape[::-1]
            for x, order, along, shape in zip(packed, orders, "nt", sides, strict=True)
        ]
        self.lines, self.lengths = zip(*shapes, strict=True)
        self.pitches = [-(-length // SPLIT_STEP) * SPLIT_STEP for length in self.lengths]
        self.packs = self._packs(orders) if self.any_packed else []
        views = [np.broadcast_to(np.uint8(), (1, *shape)) for shape in shapes]
        stand_ins = self._operands(operation.a, operation.b, views)
        self.product = self.multiply(_dtype(operation), 1, orders, stand_ins)

    def _orders(self) -> str:
        """The storage orders of what is multiplied: of A and B, or as they are packed."""
        turned = [
            along if x else order
            for along, order, x in zip("nt", self.layouts, self.packed, strict=True)
        ]
        if self.few or self.item_bytes != 2 or not self.variant.kernel.tma:
            return "".join(turned)
        orders = [
            order if side / (-(-side // _STEP) * _STEP) > _TURNING else other
            for order, other, side in zip(self.layouts, turned, (self.m, self.n), strict=True)
        ]
        if orders == ["t", "t"]:  # A across k beside B along k takes longer to multiply
            orders[0] = turned[0]
        return "".join(orders)

    def _packs(self, orders: str) -> list[tuple[Any, Launch, list[np.int32]]]:
        """The launches that pack: the kernel, its launch and its sizes. Operands that keep their
        order are given to it as rows along k, each with a k of its own."""
        of = "float16" if self.item_bytes == 2 else _dtype(self.operation)  # 16 bits: as they are
        as_read = "".join(
            along if order == kept else order
            for along, order, kept in zip("nt", self.layouts, orders, strict=True)
        )
        both = len(set(filter(None, self.lengths))) == 1
        found = []
        for lines in [self.lines] if both else [(self.lines[0], 0), (0, self.lines[1])]:
            lengths = [x if y else 0 for x, y in zip(self.lengths, lines, strict=True)]
            longest = max(lengths)
            fitting = -(-longest // (256 * MAX_GRID[1])) * 256  # of which a grid has enough
            slices = {"SLICE": max(256 if self.few else 1024, fitting)}
            pack = catalog.helper("pack").kernel.variant(slices)
            function = self.device.function(pack, of, as_read)
            sizes = [np.int32(x) for x in (*lines, *lengths)]
            found.append((function, pack.launch(*lines, longest, of), sizes))
        return found

    def _operands(self, a: Array, b: Array, made: Sequence[Array | None]) -> list[Array]:
        """What the kernel reads: what was packed, and the other operands as they are stored."""
        return [
            parts if x else (v.T if order == "t" else v)[None]
            for v, parts, order, x in zip((a, b), made, self.layouts, self.packed, strict=True)
        ]

    def _room(self, room: Room) -> list[Array]:
        """Memory for what is packed, as the kernel that multiplies reads it."""
        counts = [x * pitch for x, pitch in zip(self.lines, self.pitches, strict=True)]
        flat = room.array("parts", sum(counts) * self.item_bytes, "uint8")
        elements = flat.view(f"u{self.item_bytes}")
        both = elements[: counts[0]], elements[counts[0] :]
        return [
            x.reshape(1, count, pitch)[:, :, :length]
            for x, count, pitch, length in zip(
                both, self.lines, self.pitches, self.lengths, strict=True
            )
        ]

    def call(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """Multiplies matrices laid out as those that this was made for."""
        made: Sequence[Array | None] = (None, None)
        if self.any_packed:
            made = self._room(room_of(self.device, stream))
            for function, launch, sizes in self.packs:
                args = [*self.matrices(a, b, sizes), *made]
                self.device.launch(function, launch, args, stream)
        self.product(*self._operands(a, b, made), c, stream)


def _dtype(operation: Operation) -> str:
    """What is multiplied, as kernels' headers name it."""
    name = operation.a.dtype.name
    return "tfloat32" if name == "float32" else name


def bind_in_place(device: KernelLauncher, variant: Variant, operation: Operation) -> BoundProduct:
    """A product by a kernel that reads operands where they lie."""
    (order_a, lda), (order_b, ldb) = stored(operation.a), stored(operation.b)
    (m, k), n = operation.a.shape, operation.b.shape[1]
    dtype = _dtype(operation)
    variant = with_out(variant, operation.c.dtype.itemsize)
    shares = Shares(
        device, variant, dtype, operation.c, (m, n, k), alpha=operation.alpha, beta=operation.beta
    )
    function = device.function(shares.variant, dtype, order_a + order_b)
    pitches, ldc = (np.int64(lda), np.int64(ldb)), np.int64(stored(operation.c)[1])
    sizes = [np.int32(x) for x in (m, n, k)]

    def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
        if c.size:
            operands = [a, pitches[0], b, pitches[1], *sizes]
            shares.start(function, operands, c, ldc, stream)

    return call


def bind_rounded(device: KernelLauncher, variant: Variant, operation: Operation) -> BoundProduct:
    """A product that packs A and B only where it must: by addresses too, which differ from call to
    call."""
    all_packed = RoundedProduct(device, variant, operation, (True, True))
    if not variant.kernel.tma:
        return all_packed.call
    # TMA takes operands where they lie, if every line begins on 16 bytes; of two that lie across k
    # in 32 bits, the kernel takes one.
    size = all_packed.item_bytes
    packed = [bool(ld * size % 16 != 0) for ld in all_packed.ld]
    if size == 4 and all_packed.layouts == "tn" and not any(packed):
        packed[all_packed.m > all_packed.n] = True
    if all(packed):
        return all_packed.call
    pack_all = all_packed.call
    straight = RoundedProduct(device, variant, operation, packed).call

    def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
        begin = [done or x.data.ptr % 16 == 0 for x, done in zip((a, b), packed, strict=True)]
        (straight if all(begin) else pack_all)(a, b, c, stream)

    return call
