"""Products, sums and copies by the catalog's kernels: what GPUs and the emulator share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from .. import catalog
from ..arrays.stacks import merged
from ..arrays.strides import fewest_transposed, layout, leading, stored, turned
from ..catalog import Launch, Variant
from ..errors import UsageError
from ..host.kept import Kept
from ..kernel_choice.compute_modes import with_out
from ..problem import NARROW, is_long
from . import residue_products, tensor_core_products
from .base import Array, Stream
from .kernel_launcher import KernelLauncher
from .long_sides import bound_in_pieces, pieces
from .packed_product import room_of
from .roles import BoundProduct
from .split_operands import Splitter, SplitView
from .streams import grown

# Elements as kernels/cast.cu numbers them, from 1 on.
ELEMENTS = (
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64", "complex128",
)  # fmt: skip
MAX_KEPT = 256  # shapes that kernels are loaded for, and of parts whose splitting is worked out


class KernelDevice(KernelLauncher):
    """A device that multiplies, sums and copies by the catalog's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.prepared_for: Kept[bool] = Kept(MAX_KEPT)  # False: kernels may be on their way
        self.splitting: Kept[tensor_core_products.PartSplit] = Kept(MAX_KEPT)

    def prepare(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        if self._noted is not None:
            _load(self, variant, a, b, dtype, summed)
            return
        key = _prepared_key(variant, a, b, dtype, summed)
        if not self.prepared_for.get(key):  # working a product out takes longer than a small one
            self.loading_together(lambda device: _load(device, variant, a, b, dtype, summed))
            self.prepared_for.put(key, True)

    def prepare_ahead(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        key = _prepared_key(variant, a, b, dtype, summed)
        if self.prepared_for.get(key) is None:
            self.compile_ahead(lambda device: _load(device, variant, a, b, dtype, summed))
            self.prepared_for.put(key, False)

    def prepare_combine(self, dtype: str) -> None:
        self.function(catalog.helper("combine"), dtype)

    def make_room(
        self, variant: Variant, m: int, n: int, k: int, dtype: str, stream: Stream
    ) -> None:
        if variant.kernel.library:
            return
        m, n, k = (next(pieces(side)).stop for side in (m, n, k))  # the largest
        if variant.kernel.role == "tensor":
            tensor_core_products.make_room(self, variant, m, n, k, dtype, stream)
        if variant.kernel.role == "gemm":
            for *_part, launch in variant.launches(m, n, k, dtype):
                if launch.workspace_bytes:
                    self.scratch(launch, "float32" if dtype in NARROW else dtype, stream)

    # --- products -------------------------------------------------------------------------

    def gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *,
        alpha: float, beta: float, stream: Stream,
    ) -> None:  # fmt: skip
        if not c.shape[0] or not c.shape[1]:
            return
        self.bind(variant, a, b, c, alpha=alpha, beta=beta)(a, b, c, stream)

    def bound_gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        call = self.bind(variant, a, b, c, alpha=alpha, beta=beta)
        return lambda stream: call(a, b, c, stream)

    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct:
        if variant.kernel.library:
            return self.bind_library(variant, a, b, c, alpha=alpha, beta=beta)
        if is_long(*c.shape, a.shape[1]):
            bind = functools.partial(self._bind, variant, alpha=alpha)
            return bound_in_pieces(bind, a, b, c, beta)
        return self._bind(variant, a, b, c, beta, alpha=alpha)

    def _bind(
        self, variant: Variant, a: Array, b: Array, c: Array, beta: float, *, alpha: float
    ) -> BoundProduct:
        """As `bind`, for a kernel of ours and sides that it can count."""
        if variant.kernel.role == "tensor":
            return tensor_core_products.bind(self, variant, a, b, c, alpha=alpha, beta=beta)
        if variant.kernel.role == "residues":
            return residue_products.bind(self, variant, a, b, c, alpha=alpha, beta=beta)
        (m, n), columns = c.shape, a.shape[1]
        variant, dtype, summed = _made_of(variant, a, c)
        layouts = fewest_transposed(variant.kernel.layouts, a, b)
        turns = [turned(x, order) for x, order in zip((a, b), layouts, strict=True)]
        lda, ldb = (  # `stored` raises where a matrix lies in neither order
            np.int64(max(1, x.shape[order == "n"]) if turn else leading(x, order) or stored(x)[1])
            for x, order, turn in zip((a, b), layouts, turns, strict=True)
        )
        ldc = np.int64(stored(c)[1])
        function = self.function(variant, dtype, layouts)
        scalar = np.dtype(summed).type
        parts = variant.launches(m, n, columns, dtype)
        whole = len(parts) == 1
        k, alpha_t, beta_t = np.int32(columns), scalar(alpha), scalar(beta)  # as the kernel's T

        def call(a: Array, b: Array, c: Array, stream: Stream) -> None:
            if turns[0]:
                a = self.transposed(a, layouts[0], stream, "A")
            if turns[1]:
                b = self.transposed(b, layouts[1], stream, "B")
            for rows, cols, launch in parts:
                x, y, z = (a, b, c) if whole else (a[rows], b[:, cols], c[rows, cols])
                args = [
                    np.int32(z.shape[0]), np.int32(z.shape[1]), k, alpha_t,
                    x, lda, y, ldb, beta_t, z, ldc,
                ]  # fmt: skip
                if launch.workspace_bytes:
                    args += self.scratch(launch, summed, stream)
                self.launch(function, launch, args, stream)

        return call

    def splitter(self, variant: Variant, dtype: str) -> Splitter | None:
        kernel = variant.kernel
        own = kernel.role == "tensor" and not kernel.library
        return self if own and dtype == "float32" and variant.params["TERMS"] == 3 else None

    def split_part(self, operand: str, layouts: str, part: SplitView, stream: Stream) -> None:
        """As `Splitter.split_part`."""
        array = part.array
        key = operand, layouts, array.shape, array.strides
        known = self.splitting.get(key)
        if known is None:
            known = tensor_core_products.PartSplit(self, operand, layouts, array)
            self.splitting.put(key, known)
        known.call(self, part, stream)

    def preparable(self, variant: Variant, a: Array, b: Array) -> bool:
        if variant.kernel.role == "residues":
            return False
        if variant.kernel.library or variant.kernel.role == "tensor":
            return True
        layouts = fewest_transposed(variant.kernel.layouts, a, b)
        return all(leading(x, order) for x, order in zip((a, b), layouts, strict=True))

    def bind_library(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct:
        """As `bind`, for a kernel that is a library's."""
        raise UsageError(f"kernel {variant.name} does not run on the {self.kind} device")

    def scratch(self, launch: Launch, dtype: str, stream: Stream) -> list[Array]:
        """As `KernelLauncher.scratch`. Smaller ones are kept: a recorded graph may still launch
        with them."""
        size = np.dtype(dtype).itemsize
        wanted = -(-launch.workspace_bytes // size), -(-launch.flag_bytes // 4)
        for workspace, flags in stream.scratch:
            if workspace.dtype == dtype and workspace.size >= wanted[0] and flags.size >= wanted[1]:
                return [workspace, flags]
        before = [pair for pair in stream.scratch if pair[0].dtype == dtype]
        sizes = (grown(wanted[i], [pair[i] for pair in before]) for i in (0, 1))
        workspace = self.empty(1, next(sizes), dtype)
        flags = self.zeros(next(sizes), "uint32", stream)
        stream.scratch.append((workspace, flags))
        return [workspace, flags]

    # --- one pass over matrices -----------------------------------------------------------

    def transposed(self, view: Array, order: str, stream: Stream, operand: str = "") -> Array:
        """The same matrix in storage order `order`, made by the transpose kernel from one in the
        other order. A graph that is recorded writes to memory that stays with the stream, of which
        each `operand` has its own."""
        source = view if order == "t" else view.T
        rows, cols = source.shape
        if stream.capturing():
            kept = room_of(self, stream).array(f"turned {operand}", rows * cols, view.dtype.name)
            dst = kept.reshape(cols, rows)
        else:
            dst = self.empty(cols, rows, view.dtype.name)
        self._pass("transpose", source, dst, stream)
        return dst.T if order == "t" else dst

    def add(self, dst: Array, src: Array, stream: Stream) -> None:
        self._pass("add", src, dst, stream)

    def copy_here(self, dst: Array, src: Array, stream: Stream) -> None:
        """dst[...] = src, both row-major and on this device, by the slab-copy kernel."""
        self._pass("copy", src, dst, stream)

    def bind_cast(self, src: Array, dst: Array) -> BoundProduct | None:
        """A call that copies A, which lies as `src`, to C, which lies as `dst` and has its shape,
        as C's dtype; B is not read. None where the kernel does not: for more than four sides that
        do not lie as fewer, steps that are no multiple of an element, and parts of complex
        numbers."""
        ways, size = [x.dtype.name for x in (src, dst)], [x.itemsize for x in (src, dst)]
        uneven = any(step % x.itemsize for x in (src, dst) for step in x.strides)
        parts = src.dtype.kind == "c" != dst.dtype.kind
        # Neighbouring threads write neighbours.
        axes = sorted(range(dst.ndim), key=lambda i: (-abs(dst.strides[i]), i))
        shape, *steps = (tuple(of[i] for i in axes) for of in (dst.shape, src.strides, dst.strides))
        if dst.ndim > 2:
            stack, (of_src, of_dst) = merged(shape[:-2], *(x[:-2] for x in steps))
            shape = (*stack, *shape[-2:])
            steps = [(*of_src, *steps[0][-2:]), (*of_dst, *steps[1][-2:])]
        if uneven or parts or len(shape) > 4 or is_long(*dst.shape) or {*ways} - {*ELEMENTS}:
            return None
        outer, inner, rows, cols = (1,) * (4 - len(shape)) + shape
        count = outer * inner
        params = dict(zip(("FROM", "TO"), (1 + ELEMENTS.index(x) for x in ways), strict=True))
        variant = catalog.helper("cast").kernel.variant(params)
        function = self.function(variant, "float32")
        launch = variant.launch(rows, cols, count, "float32")
        sizes = [np.int32(x) for x in (count, inner, rows, cols)]
        read, written = (
            [np.int64(0)] * (4 - len(x)) + [np.int64(step // itemsize) for step in x]
            for x, itemsize in zip(steps, size, strict=True)
        )

        def call(a: Array, _b: Array, c: Array, stream: Stream) -> None:
            if count and rows and cols:
                self.launch(function, launch, [*sizes, a, *read, c, *written], stream)

        return call

    def _pass(self, role: str, src: Array, dst: Array, stream: Stream) -> None:
        rows, cols = src.shape
        if not rows or not cols:
            return
        lds, ldd = leading(src, "n"), leading(dst, "n")
        if lds is None or ldd is None:
            raise ValueError(f"the {role} kernel takes row-major matrices")
        variant = catalog.helper(role)
        dtype = src.dtype.name
        function = self.function(variant, dtype)
        for r, c, launch in variant.launches(rows, cols, 0, dtype):
            part, into = src[r, c], dst[c, r] if role == "transpose" else dst[r, c]
            args = [
                np.int32(part.shape[0]), np.int32(part.shape[1]),
                part, np.int64(lds), into, np.int64(ldd),
            ]  # fmt: skip
            self.launch(function, launch, args, stream)

    def combine(
        self, alpha: float, x: Array, beta: float, y: Array, out: Array, stream: Stream
    ) -> None:
        order, ldo = stored(out)
        if order == "t":
            x, y, out = x.T, y.T, out.T
        if beta == 0:
            y = x
        variant, dtype = catalog.helper("combine"), out.dtype.name
        function = self.function(variant, dtype)
        scalar = np.dtype(dtype).type
        ldx, ldy = stored(x)[1], stored(y)[1]
        rows, cols = out.shape
        for r, s, launch in variant.launches(rows, cols, 0, dtype):
            px, py, part = x[r, s], y[r, s], out[r, s]
            args = [
                np.int32(part.shape[0]), np.int32(part.shape[1]),
                scalar(alpha), px, np.int64(ldx),
                scalar(beta), py, np.int64(ldy), part, np.int64(ldo),
            ]  # fmt: skip
            self.launch(function, launch, args, stream)

    # --- sums -----------------------------------------------------------------------------

    def sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float, stream: Stream
    ) -> None:
        self.bound_sum(partials, out, alpha=alpha, beta=beta)(stream)

    def bound_sum(
        self, partials: Sequence[Array], out: Array, *, alpha: float, beta: float
    ) -> Callable[[Stream], None]:
        rows, cols = out.shape
        if not rows or not cols:
            return lambda stream: None
        variant = catalog.helper("sum")
        dtype = out.dtype.name
        function = self.function(variant, dtype)
        scalar = np.dtype(dtype).type
        ldp, ldo = stored(partials[0])[1], stored(out)[1]
        started = []
        for r, c, launch in variant.launches(rows, cols, 0, dtype):
            part = out[r, c]
            args = [
                np.int32(part.shape[0]), np.int32(part.shape[1]), np.int32(len(partials)),
                scalar(alpha), self.pointers([p[r, c] for p in partials]), np.int64(ldp),
                scalar(beta), part, np.int64(ldo), part, np.int64(ldo),
            ]  # fmt: skip
            started.append((launch, args))

        def call(stream: Stream) -> None:
            for launch, args in started:
                self.launch(function, launch, args, stream)

        return call


def _made_of(variant: Variant, a: Array, c: Array) -> tuple[Variant, str, str]:
    """A kernel in the form for such an A and C, the dtype that operands hold and the one that sums,
    alpha and beta have. Raises `UsageError` where it has none."""
    operands = a.dtype.name
    if operands not in NARROW:
        return variant, c.dtype.name, c.dtype.name
    if operands not in variant.kernel.dtypes or c.dtype.name not in ("float32", operands):
        raise UsageError(f"kernel {variant.name} makes no {c.dtype} of {operands}")
    return with_out(variant, c.dtype.itemsize), operands, "float32"


def _prepared_key(variant: Variant, a: Array, b: Array, dtype: str, summed: bool) -> tuple:
    return variant, *((x.shape, layout(x)) for x in (a, b)), dtype, summed


def _load(
    device: KernelLauncher, variant: Variant, a: Array, b: Array, dtype: str, summed: bool
) -> None:
    """Loads what a product of these views needs, and what sums partial C of it."""
    if variant.kernel.role == "tensor" and not variant.kernel.library:
        tensor_core_products.prepare(device, variant, a, b, dtype)
    elif variant.kernel.role == "residues":
        residue_products.prepare(device, variant, a, b)
    elif not variant.kernel.library:
        layouts = fewest_transposed(variant.kernel.layouts, a, b)
        for size in (np.dtype(dtype).itemsize, 4) if dtype in NARROW else (4,):
            device.function(with_out(variant, size), dtype, layouts)
        if any(turned(x, order) for x, order in zip((a, b), layouts, strict=True)):
            device.function(catalog.helper("transpose"), dtype)
    for role in ("sum", "add") if summed else ():
        device.function(catalog.helper(role), "float32" if dtype in NARROW else dtype)
