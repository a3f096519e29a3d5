"""Products on tensor cores of operands in one part each: float32 rounded to TF32, and 16 bits.

They are multiplied as they are where the kernel can read them, and packed where it cannot
(`RoundedProduct`); some kernels can always (`bind_in_place`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays.strides import stored
from ..catalog import MAX_GRID, Variant
from ..kernel_choice.compute_modes import with_out
from .base import Array, Stream
from .kernel_launcher import KernelLauncher
from .packed_product import Operation, PackedProduct, room_of
from .roles import BoundProduct
from .shares import Shares

_FEW = 2**23  # elements to pack, below which blocks take less of k each, so that there are more


class RoundedProduct(PackedProduct):
    """float32 rounded to TF32, or operands of 16 bits, in one part each. `packed` says whether A
    is packed and whether B is; one that is not is multiplied where it lies."""

    def __init__(
        self, device: KernelLauncher, variant: Variant, operation: Operation,
        packed: Sequence[bool],
    ):  # fmt: skip
        super().__init__(device, variant, operation)
        self.packed, self.any_packed = packed, any(packed)
        self.item_bytes = operation.a.dtype.itemsize
        dtype = _dtype(operation)
        # Of A and columns of B: as many as are packed, or none.
        self.rows = [
            count if x else 0 for count, x in zip((self.m, self.n), packed, strict=True)
        ]  # fmt: skip
        orders = "".join(
            along if x else order
            for along, order, x in zip("nt", self.layouts, packed, strict=True)
        )
        if self.any_packed:
            of = "float16" if self.item_bytes == 2 else dtype  # 16 bits are copied as they are
            few = sum(self.rows) * self.k < _FEW
            fitting = -(-self.k // (256 * MAX_GRID[1])) * 256  # of which a grid has enough
            self.pack, self.pack_launch = self.kernel(
                "pack", of, self.rows, SLICE=max(256 if few else 1024, fitting)
            )
        views = self._operands(operation.a, operation.b, self.packed_views(1, self.rows))
        self.product = self.multiply(dtype, 1, orders, views)

    def _operands(self, a: Array, b: Array, made: Sequence[Array | None]) -> list[Array]:
        """What the kernel reads: what was packed, and the other operands as they are stored."""
        return [
            parts if x else (v.T if order == "t" else v)[None]
            for v, parts, order, x in zip((a, b), made, self.layouts, self.packed, strict=True)
        ]

    def call(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """Multiplies matrices laid out as those that this was made for."""
        room = room_of(self.device, stream)
        made: Sequence[Array | None] = (None, None)
        if self.any_packed:
            made = self.parts(room, 1, self.item_bytes, self.rows)
            sizes = *map(np.int32, self.rows), self.sizes[2]
            args = [*self.matrices(a, b, sizes), *made]
            self.device.launch(self.pack, self.pack_launch, args, stream)
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
