"""A device that runs the kernels of the catalog: what is common to GPUs and the emulator."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np

from .. import catalog
from ..arrays.strides import layout, leading
from ..catalog import Launch, Variant
from ..errors import UsageError
from . import tensor_core_products
from .base import Device, Stream


def readable(variant: Variant, a, b) -> str:
    """The layouts of a kernel that need the fewest operands transposed first, rather B."""
    return min(
        variant.kernel.layouts,
        key=lambda orders: 2 * (not leading(a, orders[0])) + (not leading(b, orders[1])),
    )


class KernelDevice(Device):
    """A device that runs the kernels of the catalog; subclasses load and launch them."""

    def __init__(self):
        self._loaded = {}

    @abc.abstractmethod
    def load(self, variant: Variant, dtype: str, layouts: str):
        """The compiled kernel, ready to launch."""

    @abc.abstractmethod
    def launch(self, function, launch: Launch, args: Sequence, stream: Stream) -> None:
        """Start a kernel. Arguments are NumPy scalars and matrices of this device."""

    @abc.abstractmethod
    def pointers(self, matrices: Sequence):
        """The matrices' addresses as an array on this device."""

    def function(self, variant: Variant, dtype: str, layouts: str = "nn"):
        key = (variant, dtype, layouts)
        if key not in self._loaded:
            self._loaded[key] = self.load(variant, dtype, layouts)
        return self._loaded[key]

    def prepare(self, variant, a, b, dtype):
        if variant.kernel.role == "tensor" and not variant.kernel.library:
            tensor_core_products.prepare(self, variant, a, b, dtype)
            dtype = "float32"  # of what is summed
        elif not variant.kernel.library:
            self.function(variant, dtype, readable(variant, a, b))
        for role in ("sum", "add", "transpose"):
            self.function(catalog.helper(role), dtype)

    def make_room(self, variant, m, n, k, dtype, stream):
        if not variant.kernel.library and variant.kernel.role == "gemm":
            for *_part, launch in variant.launches(m, n, k, dtype):
                if launch.workspace_bytes:
                    self._scratch(launch, dtype, stream)

    def gemm(self, variant, a, b, c, *, alpha, beta, stream):
        if not c.shape[0] or not c.shape[1]:
            return
        self.bind(variant, a, b, c, alpha=alpha, beta=beta)(a, b, c, stream)

    def bound_gemm(self, variant, a, b, c, *, alpha, beta):
        call = self.bind(variant, a, b, c, alpha=alpha, beta=beta)
        return lambda stream: call(a, b, c, stream)

    def bind(self, variant: Variant, a, b, c, *, alpha, beta) -> Callable:
        """A call that multiplies matrices laid out as these, worked out once for many."""
        if variant.kernel.library:
            return self.bind_library(variant, a, b, c, alpha=alpha, beta=beta)
        if variant.kernel.role == "tensor":
            return tensor_core_products.bind(self, variant, a, b, c, alpha=alpha, beta=beta)
        (m, n), k = c.shape, a.shape[1]
        dtype = c.dtype.name
        layouts = readable(variant, a, b)
        turned = [not leading(x, order) for x, order in zip((a, b), layouts, strict=True)]
        ld = [
            max(1, x.shape[order == "n"]) if turn else leading(x, order)
            for x, order, turn in zip((a, b), layouts, turned, strict=True)
        ]
        lda, ldb, ldc = map(np.int64, (*ld, layout(c)[1]))
        function = self.function(variant, dtype, layouts)
        scalar = np.dtype(dtype).type
        parts = variant.launches(m, n, k, dtype)
        whole = len(parts) == 1
        k, alpha, beta = np.int32(k), scalar(alpha), scalar(beta)

        def call(a, b, c, stream):
            if turned[0]:
                a = self.transposed(a, stream)
            if turned[1]:
                b = self.transposed(b, stream)
            for rows, cols, launch in parts:
                x, y, z = (a, b, c) if whole else (a[rows], b[:, cols], c[rows, cols])
                args = [
                    np.int32(z.shape[0]), np.int32(z.shape[1]), k, alpha,
                    x, lda, y, ldb, beta, z, ldc,
                ]  # fmt: skip
                if launch.workspace_bytes:
                    args += self._scratch(launch, dtype, stream)
                self.launch(function, launch, args, stream)

        return call

    def _scratch(self, launch: Launch, dtype: str, stream: Stream) -> list:
        """The stream's workspace and its flags, which kernels leave zero; larger ones where this
        launch needs them. Smaller ones are kept: a recorded graph may still launch with them."""
        size = np.dtype(dtype).itemsize
        wanted = -(-launch.workspace_bytes // size), -(-launch.flag_bytes // 4)
        for workspace, flags in stream.scratch:
            if workspace.dtype == dtype and workspace.size >= wanted[0] and flags.size >= wanted[1]:
                return [workspace, flags]
        workspace, flags = self.empty(1, wanted[0], dtype), self.empty(1, wanted[1], "uint32")
        flags[...] = 0
        stream.scratch.append((workspace, flags))
        return [workspace, flags]

    def bind_library(self, variant, a, b, c, *, alpha, beta) -> Callable:
        """As `bind`, for a kernel that is a library's."""
        raise UsageError(f"kernel {variant.name} does not run on the {self.kind} device")

    def transposed(self, view, stream):
        """The same matrix in the other storage order, made by the transpose kernel."""
        order, ld = layout(view)
        stored = view if order == "n" else view.T
        dst = self.empty(stored.shape[1], stored.shape[0], view.dtype.name)
        self._pass("transpose", stored, ld, dst, layout(dst)[1], stream)
        return dst.T if order == "n" else dst

    def add(self, dst, src, stream):
        self._pass("add", src, layout(src)[1], dst, layout(dst)[1], stream)

    def copy_here(self, dst, src, stream):
        """dst[...] = src, both here and row-major, by the slab-copy kernel."""
        self._pass("copy", src, layout(src)[1], dst, layout(dst)[1], stream)

    def _pass(self, role, src, lds, dst, ldd, stream):
        rows, cols = src.shape
        if not rows or not cols:
            return
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

    def sum(self, partials, out, *, alpha, beta, stream):
        self.bound_sum(partials, out, alpha=alpha, beta=beta)(stream)

    def bound_sum(self, partials, out, *, alpha, beta):
        rows, cols = out.shape
        if not rows or not cols:
            return lambda stream: None
        variant = catalog.helper("sum")
        dtype = out.dtype.name
        function = self.function(variant, dtype)
        scalar = np.dtype(dtype).type
        ldp = layout(partials[0])[1]
        ldo = layout(out)[1]
        started = []
        for r, c, launch in variant.launches(rows, cols, 0, dtype):
            part = out[r, c]
            args = [
                np.int32(part.shape[0]), np.int32(part.shape[1]), np.int32(len(partials)),
                scalar(alpha), self.pointers([p[r, c] for p in partials]), np.int64(ldp),
                scalar(beta), part, np.int64(ldo), part, np.int64(ldo),
            ]  # fmt: skip
            started.append((launch, args))

        def call(stream):
            for launch, args in started:
                self.launch(function, launch, args, stream)

        return call
