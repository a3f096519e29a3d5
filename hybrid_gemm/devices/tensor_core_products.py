"""Products on tensor cores over any device that runs kernels: pack the operands, then multiply.

The kernel that multiplies (role `tensor`) says by its TERMS what it multiplies. float32 operands
are packed first: with TERMS = 3 each is split in two, and the device decides which split, or
strict fp32 where neither is accurate enough (`kernels/verdict.cuh`). The host launches the
products of all three, and two of them return at once (`SplitProduct`). Of operands that several
products read, each part is split once, when it comes (`split_part`), and the products begin with
the verdict (`ProductOfSplit`). float32 rounded to TF32, and operands of 16 bits, are multiplied as
they are where the kernel can read them, and packed where it cannot (`rounded_products.py`).
docs/tensor-cores.md has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import catalog
from ..arrays.strides import layout, stored
from ..catalog import Variant
from ..errors import UsageError
from ..planning.plan import LINE_BYTES, SPLIT_STEP
from ..problem import NARROW, Problem
from .base import Array, Device, Stream
from .kernel_launcher import KernelLauncher
from .packed_product import Operation, PackedProduct, Room, room_of, rooms, unwritten
from .roles import BoundProduct
from .rounded_products import bind_in_place, bind_rounded
from .split_operands import OF_ROWS, STATE_WORDS, SplitView

# What the TF32 split leaves out does not grow with k, and fp32's own error does: below this k it is
# the larger of the two.
LEAST_K_TF32 = 512
# m n k from which the TF32 split is faster than strict fp32; below it has no launches.
LEAST_WORK_TF32 = 2**31
_NEVER = 2**31 - 1  # as least k


def verdicts(device: Device, problem: Problem) -> np.ndarray:
    """How many split products on a device came to each of `compute_modes.VERDICTS` so far: 3
    counts. Waits for them. Zeros, at once, if products of this problem are not split."""
    total = np.zeros(3, int)
    if problem.compute != "fp32x3":
        return total
    for stream, room in list(rooms.items()):
        if (mine := room.device) is not None and mine is device.unwrapped:
            host = np.zeros((1, STATE_WORDS), np.int32)
            with mine.using(stream):
                mine.copy(host, room.state, stream)
                stream.synchronize()
            total += host[0, 1:4]
    return total


# --- the door -----------------------------------------------------------------------------


def _on_lines(x: np.ndarray) -> np.ndarray:
    """A matrix of this shape and order whose lines begin on `LINE_BYTES`, as blocks lie that were
    brought from the host (`Plan.padded`)."""
    turned = (layout(x) or "n")[0] != "n"
    rows, cols = x.shape[::-1] if turned else x.shape
    size = x.dtype.itemsize
    lines = np.empty((rows, -(-cols * size // LINE_BYTES) * LINE_BYTES // size), x.dtype)[:, :cols]
    return lines.T if turned else lines


def prepare(device: KernelLauncher, variant: Variant, a: Array, b: Array, dtype: str) -> None:
    """Compiles what a product of such operands needs, brought to the device in `dtype`, and what
    one of operands that were split before does."""
    a, b = unwritten(a, dtype), unwritten(b, dtype)
    if a.shape[1] and a.shape[0] and b.shape[1]:
        outs = {"float32", dtype if dtype in NARROW else "float32"}
        pairs = [(a, b)]
        if variant.kernel.tma and variant.params["TERMS"] == 1:
            pairs.append((_on_lines(a), _on_lines(b)))
        for out in outs:  # made, never written
            c = np.empty((a.shape[0], b.shape[1]), out)
            for x, y in pairs:
                device.bind(variant, x, y, c, alpha=1, beta=0)
        if dtype == "float32" and variant.params["TERMS"] == 3:
            device.function(catalog.helper("decide"), "float32")


def make_room(
    device: KernelLauncher, variant: Variant, m: int, n: int, k: int, dtype: str, stream: Stream
) -> None:
    """Allocates what splits of such operands keep with a stream."""
    if dtype == "float32" and variant.params["TERMS"] == 3:
        pitch = -(-k // SPLIT_STEP) * SPLIT_STEP
        room_of(device, stream).array("parts", (m + n) * pitch * 8, "uint8")


def bind(
    device: KernelLauncher, variant: Variant, a: Array, b: Array, c: Array, *,
    alpha: float, beta: float,
) -> BoundProduct:  # fmt: skip
    """A call that multiplies matrices laid out as these; see `KernelLauncher.bind`.

    `a` and `b` are float32, or both float16 or bfloat16, or both `SplitView`s for a variant that
    multiplies such; `c` is float32, or of their dtype. Raises `UsageError` for other dtypes.
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
    if isinstance(a, SplitView):
        operation = Operation.like(a.array, b.array, c, alpha, beta)
        return ProductOfSplit(device, variant, operation).call
    operation = Operation.like(a, b, c, alpha, beta)
    if dtype == "float32" and variant.params["TERMS"] == 3:
        return SplitProduct(device, variant, operation).call
    if variant.kernel.in_place:
        return bind_in_place(device, variant, operation)
    return bind_rounded(device, variant, operation)


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


# --- operands in two parts ----------------------------------------------------------------


class ProductInTwoParts(PackedProduct):
    """float32 operands in two parts each, a high and a low one: by fp16, by TF32, or strict, as
    the device decides. Three products, or two, look at the verdict first: fp16, what is wanted
    `instead` (strict fp32, or parts in TF32), and TF32. Small products have no TF32 split."""

    def __init__(self, device: KernelLauncher, variant: Variant, operation: Operation):
        super().__init__(device, variant, operation)
        self.tf32 = self.k >= LEAST_K_TF32 and self.m * self.n * self.k >= LEAST_WORK_TF32
        self.least_k = np.int32(LEAST_K_TF32 if self.tf32 else _NEVER)
        self.fp16 = self.multiply("float16", 2)
        self.by_tf32 = self.multiply("tfloat32", 2) if self.tf32 else None
        instead = strict_variant(device, self.m, self.n, tf32=self.tf32)
        self.instead = device.function(instead, "float32", self.layouts)
        self.instead_launch = instead.launch(self.m, self.n, self.k, "float32")
        self.alpha, self.beta = np.float32(operation.alpha), np.float32(operation.beta)
        self.ldc = np.int64(stored(operation.c)[1])

    def wide(self, room: Room) -> Sequence[Array]:
        """Memory for parts in TF32; where there is no such split, what is not looked at."""
        return self.parts(room, 2, 4) if self.tf32 else [room.state, room.state]

    # Many parameters: A and B are here as they are and in two splits, each with its exponents.
    def _multiply(
        self, a: Array, b: Array, c: Array, halves: Sequence[Array], exponents: Sequence[Array],
        exponents_tf32: Sequence[Array], wide: Sequence[Array], room: Room, stream: Stream,
    ) -> None:  # fmt: skip
        """The products behind the verdict, by `halves` and the exponents of A's rows and B's
        columns in both splits."""
        self.fp16(*halves, c, stream, exponents, room.state, 0)
        args = [*self.sizes, self.alpha, a, self.ld[0], b, self.ld[1], self.beta, c, self.ldc,
                *self.device.scratch(self.instead_launch, "float32", stream), *wide,
                *exponents_tf32, room.state]  # fmt: skip
        self.device.launch(self.instead, self.instead_launch, args, stream)
        if self.by_tf32:
            self.by_tf32(*wide, c, stream, exponents_tf32, room.state, 1)


class SplitProduct(ProductInTwoParts):
    """As it is, of operands that no other product reads: `halves` packs for fp16, and the first
    product decides by what their rows allow."""

    def __init__(self, device: KernelLauncher, variant: Variant, operation: Operation):
        super().__init__(device, variant, operation)
        self.rows = self.m + self.n  # of A, and columns of B
        self.to_tf32 = np.int32(self.rows)
        self.halves, self.halves_launch = self.kernel(
            "halves", "float16", CLUSTER=_cluster(device, self.m, self.n, self.k)
        )

    def call(self, a: Array, b: Array, c: Array, stream: Stream) -> None:
        """Multiplies matrices laid out as those that this was made for."""
        room, m = room_of(self.device, stream), self.m
        exponent = room.array("exponent", 2 * self.rows, "int32")
        # The larger first: both share it, for one verdict wants one of them.
        wide, halves = self.wide(room), self.parts(room, 2, 2)
        args = [*self.matrices(a, b), *halves, exponent, self.to_tf32, self.least_k, room.state]
        of_fp16, of_tf32 = exponent[: self.rows], exponent[self.rows :]
        try:
            self.device.launch(self.halves, self.halves_launch, args, stream)
            self._multiply(
                a, b, c, halves, (of_fp16[:m], of_fp16[m:]), (of_tf32[:m], of_tf32[m:]), wide, room,
                stream,
            )  # fmt: skip
        except BaseException:  # such as no memory: what these rows allow is not for others
            self.device.clear(room.state[:, OF_ROWS:], stream)
            raise


class ProductOfSplit(ProductInTwoParts):
    """Of operands that `split_part` packed in fp16: `decide` says by what their parts allow how it
    is made."""

    def __init__(self, device: KernelLauncher, variant: Variant, operation: Operation):
        super().__init__(device, variant, operation)
        self.decide = device.function(catalog.helper("decide"), "float32")
        self.decide_launch = catalog.helper("decide").launch(1, 1, 1, "float32")

    def call(self, a: SplitView, b: SplitView, c: Array, stream: Stream) -> None:
        """Multiplies matrices laid out as those that this was made for."""
        room = room_of(self.device, stream)
        counts = [np.int32(len(x.states)) for x in (a, b)]
        args = [a.states, counts[0], b.states, counts[1], self.sizes[2], self.least_k, room.state]
        self.device.launch(self.decide, self.decide_launch, args, stream)
        self._multiply(
            a.array, b.array, c, (a.parts, b.parts), (a.exponent[0], b.exponent[0]),
            (a.exponent[1], b.exponent[1]), self.wide(room), room, stream,
        )  # fmt: skip


class PartSplit:
    """Splits rows of op(A), or columns of op(B), laid out as `part`, in halves. `layouts` are the
    storage orders of A and B. It keeps no device, and so may be kept by one."""

    def __init__(self, device: KernelLauncher, operand: str, layouts: str, part: Array) -> None:
        of_a = operand == "A"
        rows, k = part.shape if of_a else part.shape[::-1]
        m, n = (rows, 0) if of_a else (0, rows)
        halves = catalog.helper("halves").kernel.variant({"CLUSTER": _cluster(device, m, n, k)})
        order, ld = stored(part)
        layouts = order + layouts[1] if of_a else layouts[0] + order
        self.sizes, self.ld = [np.int32(x) for x in (m, n, k)], np.int64(ld)
        self.halves = device.function(halves, "float16", layouts)
        self.launch = halves.launch(m, n, k, "float16")

    def call(self, device: KernelLauncher, split: SplitView, stream: Stream) -> None:
        """Fills in all of a view, of a block's one part, but the numbers themselves."""
        device.clear(split.states, stream)
        to_tf32 = np.int32(split.exponent.strides[0] // split.exponent.itemsize)
        args = [*self.sizes, split.array, self.ld, split.array, self.ld, split.parts, split.parts,
                split.exponent, to_tf32, np.int32(0), split.states]  # fmt: skip
        device.launch(self.halves, self.launch, args, stream)


def _cluster(device: KernelLauncher, m: int, n: int, k: int) -> int:
    """How many blocks share the k of the same rows while they are split: enough to occupy the
    device, and so many that a block's part stays in its first cache."""
    if device.capability < 90:
        return 1
    groups = -(-m // 16) + -(-n // 16)
    for blocks in (1, 2, 4):
        if k <= 256 * blocks or (groups * blocks >= 2 * device.processors and k <= 512 * blocks):
            return blocks
    return 8


def strict_variant(device: KernelLauncher, m: int, n: int, *, tf32: bool) -> Variant:
    """The variant that multiplies in strict fp32 behind the verdict: the one of small tiles where
    C has few of the others. `tf32`: that splits in TF32 too."""
    kernel = catalog.helper("strict").kernel
    large, small = (v for v in kernel.variants() if v.params["WIDE"] == tf32)
    (rows, cols), processors = large.tile, device.processors
    variant = small if -(-m // rows) * -(-n // cols) * 8 < processors else large
    return variant.for_multiprocessors(processors)
