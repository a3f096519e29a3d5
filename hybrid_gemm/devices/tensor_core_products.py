"""Products on tensor cores over any device that runs kernels: pack the operands, then multiply.

The kernel that multiplies (role `tensor`) says by its TERMS what it multiplies. float32 operands
are packed first: with TERMS = 3 each is split in two, and the device decides which split, or
strict fp32 where neither is accurate enough (`kernels/split_pack.cu`). The host launches the
products of all three, and two of them return at once (`SplitProduct`). float32 rounded to TF32,
and operands of 16 bits, are multiplied as they are where the kernel can read them, and packed
where it cannot (`RoundedProduct`). docs/tensor-cores.md has the arithmetic.
"""

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
from ..problem import NARROW, Problem
from .base import Array, Device, Stream
from .kernel_launcher import BoundProduct, KernelLauncher
from .shares import Shares
from .streams import grown

STRICT = 2  # of compute_modes.VERDICTS, which the kernels count from 0
_STEP = 64  # packed rows are whole multiples of it, in elements
_rooms: weakref.WeakKeyDictionary[Stream, Room] = weakref.WeakKeyDictionary()

# The kernel that multiplies, worked out: called with A and B as they are stored or packed, C, a
# stream, and for split operands (exponents of A's rows and of B's columns), the verdict on the
# device, and the verdict for which it multiplies.
Multiply = Callable[..., None]


# --- what stays on the device between products ----------------------------------------------


class Room:
    """Memory on the device that products of one stream keep from call to call.

    A larger buffer never replaces a smaller one, with which a recorded graph may still launch.
    """

    def __init__(self, device: KernelLauncher):
        self._device = weakref.ref(device)  # which has the stream that this is kept for
        self.state = device.empty(1, 6, "int32")  # the kernels' State
        self.state[...] = 0
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
    if stream not in _rooms:
        _rooms[stream] = Room(device)
    return _rooms[stream]


def verdicts(device: Device, problem: Problem) -> np.ndarray:
    """How many split products on a device came to each of `compute_modes.VERDICTS` so far: 3
    counts. Waits for them. Zeros, at once, if products of this problem are not split."""
    total = np.zeros(3, int)
    if problem.compute != "fp32x3":
        return total
    for stream, room in list(_rooms.items()):
        if (mine := room.device) is not None and mine is device.unwrapped:
            host = np.zeros((1, 6), np.int32)
            with mine.using(stream):
                mine.copy(host, room.state, stream)
                stream.synchronize()
            total += host[0, 1:4]
    return total


# --- the door -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """C = alpha A B + beta C for matrices laid out as these."""

    a: Array
    b: Array
    c: Array
    alpha: float
    beta: float


def unwritten(x: Array, dtype: str) -> np.ndarray:
    """A matrix that lies as x will on a device, which nothing is written to."""
    order = (layout(x) or "n")[0]
    return np.empty(x.shape, dtype) if order == "n" else np.empty(x.shape[::-1], dtype).T


def prepare(device: KernelLauncher, variant: Variant, a: Array, b: Array, dtype: str) -> None:
    """Compiles what a product of such operands needs, brought to the device in `dtype`."""
    a, b = unwritten(a, dtype), unwritten(b, dtype)
    if a.shape[1] and a.shape[0] and b.shape[1]:
        outs = {"float32", dtype if dtype in NARROW else "float32"}
        for out in outs:  # made, never written
            bind(device, variant, a, b, np.empty((a.shape[0], b.shape[1]), out), alpha=1, beta=0)


def bind(
    device: KernelLauncher, variant: Variant, a: Array, b: Array, c: Array, *,
    alpha: float, beta: float,
) -> BoundProduct:  # fmt: skip
    """A call that multiplies matrices laid out as these; see `KernelLauncher.bind`.

    `a` and `b` are float32, or both float16 or bfloat16; `c` is float32, or of their dtype.
    Raises `UsageError` for other dtypes.
    """
    dtype = a.dtype.name
    if b.dtype != a.dtype or dtype not in ("float32", *NARROW):
        raise UsageError(
            f"kernel {variant.name} multiplies float32, or float16 or bfloat16 alike; "
            f"these are {dtype} and {b.dtype}"
        )
    if c.dtype.name not in ("float32", dtype):
        raise UsageError(f"kernel {variant.name} makes {dtype} or float32, not {c.dtype}")
    if not a.shape[1] or alpha == 0:
        return _scaled(device, c, beta)
    operation = Operation(a, b, c, alpha, beta)
    if dtype == "float32" and variant.params["TERMS"] == 3:
        return SplitProduct(device, variant, operation).call
    return _rounded(device, variant, operation)


def _scaled(device: KernelLauncher, c: Array, beta: float) -> BoundProduct:
    """C = beta C, by a kernel that multiplies no k; in narrow dtypes by the arrays' own
    arithmetic."""

    def narrow(a: Array, b: Array, c: Array, stream: Stream) -> None:
        c[...] = 0 if beta == 0 else (c.astype(np.float32) * np.float32(beta)).astype(c.dtype)

    if c.dtype != np.float32:
        return narrow
    nothing = device.empty(c.shape[0], 0, "float32"), device.empty(0, c.shape[1], "float32")
    plain = device.bind(
        catalog.get("double_buffered").variant(), *nothing, c, alpha=0, beta=beta
    )  # fmt: skip
    return lambda a, b, c, stream: plain(*nothing, c, stream)


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
        self.pitch = -(-self.k // _STEP) * _STEP  # elements from one packed row to the next

    def kernel(
        self, role: str, dtype: str, rows: Sequence[int] | None = None, **params: int
    ) -> tuple[Any, Launch]:
        """A packing kernel and its launch, for `rows` of A and columns of B, or for all."""
        variant = catalog.helper(role)
        variant = variant.kernel.variant({**variant.params, **params})
        function = self.device.function(variant, dtype, self.layouts)
        return function, variant.launch(*(rows or (self.m, self.n)), self.k, dtype)

    def parts(
        self, room: Room, count: int, size: int, rows: Sequence[int] | None = None
    ) -> list[Array]:
        """Memory for both operands, each (count, rows, pitch) elements of `size` bytes."""
        out = []
        for name, each in zip("AB", rows or (self.m, self.n), strict=True):
            flat = room.array(name, count * each * self.pitch * size, "uint8")
            out.append(flat.view(f"u{size}").reshape(count, each, self.pitch))
        return out

    def matrices(self, a: Array, b: Array, sizes: Iterable[np.int32] | None = None) -> list[Any]:
        """The arguments with which the packing kernels begin."""
        return [*(sizes or self.sizes), a, self.ld[0], b, self.ld[1]]

    def packed_views(self, parts: int, rows: Sequence[int] | None = None) -> list[Array]:
        """Arrays without memory, laid out as packed operands."""
        return [
            np.broadcast_to(np.uint8(), (parts, count, self.pitch))
            for count in rows or (self.m, self.n)
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
        sides, scale = (self.m, self.n, self.pitch), (operation.alpha, operation.beta)
        shares = Shares(
            device, variant, dtype, operation.c, sides, alpha=scale[0], beta=scale[1]
        )  # fmt: skip
        function, launch = device.function(shares.variant, dtype, "nt"), shares.launch
        pitch, ldc = np.int64(self.pitch), np.int64(stored(operation.c)[1])
        sizes = [*self.sizes[:2], np.int32(self.pitch)]
        alpha, beta = (np.float32(x) for x in (scale if shares.uncut else (1, 0)))

        def call(
            a: Array, b: Array, c: Array, stream: Stream, exponents: Sequence[Array] = (),
            verdict: Array = None, wanted: int = -1,
        ) -> None:  # fmt: skip
            state = room_of(device, stream).state if verdict is None else verdict
            both = exponents or (state, state)  # without a verdict the kernel reads neither
            operands, behind = [a, pitch, b, pitch, *sizes, alpha, *both, beta], np.int32(wanted)
            if shares.uncut:
                device.launch(function, launch, [*operands, c, ldc, state, behind], stream)
                return
            sums = shares.sums(stream)
            args = [*operands, sums[0], shares.pitch, state, behind, shares.steps]
            device.launch(function, launch, args, stream)
            shares.add(sums, c, stream, exponents, verdict, wanted)

        return call


class SplitProduct(PackedProduct):
    """float32 operands in two parts each, a high and a low one: by fp16, by TF32, or strict, as
    the device decides.

    `extremes` finds each row's and column's largest exponent, `pack` packs for both splits and
    decides, and each of the three products looks at the verdict first.
    """

    def __init__(self, device: KernelLauncher, variant: Variant, operation: Operation):
        super().__init__(device, variant, operation)
        self.rows = self.m + self.n  # of A, and columns of B
        self.extremes, self.extremes_launch = self.kernel("extremes", "float32")
        self.partials = self.extremes_launch.grid[1]
        self.partials_arg = np.int32(self.partials)
        self.packs = [self.kernel("pack", dtype, PARTS=2) for dtype in ("float16", "tfloat32")]
        self.products = [self.multiply(dtype, 2) for dtype in ("float16", "tfloat32")]
        strict = catalog.helper("strict")
        self.strict = device.function(strict, "float32", self.layouts)
        self.strict_pieces = [
            (rows, cols, launch, np.int32(rows.stop - rows.start), np.int32(cols.stop - cols.start))
            for rows, cols, launch in strict.launches(self.m, self.n, self.k, "float32")
        ]
        self.strict_wanted = np.int32(STRICT)
        self.alpha, self.beta = np.float32(operation.alpha), np.float32(operation.beta)
        self.ldc = np.int64(stored(operation.c)[1])

    def call(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """Multiplies matrices laid out as those that this was made for."""
        room = room_of(self.device, stream)
        parts, exponent = self._pack(a, b, room, stream)
        exponents = exponent[: self.m], exponent[self.m :]
        for wanted, (product, made) in enumerate(zip(self.products, parts, strict=True)):
            product(*made, c, stream, exponents, room.state, wanted)
        self._multiply_strictly(a, b, c, room.state, stream)

    def _pack(
        self, a: Array, b: Array, room: Room, stream: Stream
    ) -> tuple[list[list[Array]], Array]:
        """Both operands packed in fp16 and in TF32, and the exponents of their rows and
        columns."""
        rows, launch = self.rows, self.device.launch
        partial = room.array("partial", rows * self.partials, "uint64")
        whole, tally = (room.array(x, rows, "uint64") for x in ("extremes", "tally"))
        exponent = room.array("exponent", rows, "int32")
        matrices = self.matrices(a, b)
        launch(self.extremes, self.extremes_launch, [*matrices, partial, tally], stream)
        # The larger first: both share it, for one verdict wants one of them.
        parts = [self.parts(room, 2, size) for size in (4, 2)][::-1]
        for (pack, pack_launch), made in zip(self.packs, parts, strict=True):
            args = [*matrices, *made, exponent, partial, self.partials_arg, whole, tally,
                    room.state]  # fmt: skip
            launch(pack, pack_launch, args, stream)
        return parts, exponent

    def _multiply_strictly(
        self, a: Array, b: Array, c: Array, verdict: Array, stream: Stream
    ) -> None:
        """The product in strict fp32, which multiplies if the verdict is `STRICT`."""
        for r, s, launch, m, n in self.strict_pieces:
            args = [m, n, self.sizes[2], self.alpha, a[r], self.ld[0], b[:, s], self.ld[1],
                    self.beta, c[r, s], self.ldc, verdict, self.strict_wanted]  # fmt: skip
            self.device.launch(self.strict, launch, args, stream)


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
        name = operation.a.dtype.name
        dtype = "tfloat32" if name == "float32" else name
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
            self.pack, self.pack_launch = self.kernel("pack", of, self.rows, PARTS=1)
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
            none, state = room.array("extremes", 1, "uint64"), room.state  # not looked at
            sizes = *map(np.int32, self.rows), self.sizes[2]
            args = [*self.matrices(a, b, sizes), *made, state, none, np.int32(0), none, none,
                    state]  # fmt: skip
            self.device.launch(self.pack, self.pack_launch, args, stream)
        self.product(*self._operands(a, b, made), c, stream)


def _rounded(device: KernelLauncher, variant: Variant, operation: Operation) -> BoundProduct:
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
