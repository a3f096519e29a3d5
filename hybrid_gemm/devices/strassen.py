"""Strassen's algorithm, in Winograd's form: 7 products and 15 sums of quarters a level.

It works over any device and kernel: `Strassen(device, levels)` is that device with another
`gemm`. Rows and columns that do not divide are peeled off and multiplied the ordinary way.
Its errors are bounded by the norms of A and B, not element by element, and grow with each
level; whole numbers stay exact as long as the sums of quarters do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..arrays.strides import layout, stored
from ..catalog import Variant
from ..planning.hardware import DeviceSpec
from .base import Array, Device, Stream
from .roles import Products
from .wrapped import WrappedDevice

Workspaces = tuple[Array, Array]
UNIT = 4  # the smallest quarters have sides of whole vectors, so that rows stay aligned


class Strassen(WrappedDevice):
    """A device that multiplies by `levels` levels of Strassen's algorithm, and does all else as
    the device that it wraps.

    Each level needs one workspace of a quarter of A or C (whichever is larger) and one of a
    quarter of B, so all levels together take less than (m max(k, n) + k n) / 3 elements, and
    m n more where beta is not 0.
    """

    def __init__(self, device: Device, levels: int):
        super().__init__(device)
        self.levels = levels
        self.chunk_flops = None  # pieces of a product would be thin; Strassen wants it whole

    def describe(self) -> str:
        plural = "" if self.levels == 1 else "s"
        return f"{self.device.describe()}, Strassen with {self.levels} level{plural}"

    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        """The wrapped device's; no rate is known, since Strassen does fewer operations than the
        2mnk that count."""
        return dataclasses.replace(self.device.spec(dtype, mode), best_tflops=None, rated=False)

    def prepare(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        self.device.prepare(variant, a, b, dtype, summed=summed)
        self.device.prepare_combine(dtype)

    bound_gemm = Products.bound_gemm

    def gemm(
        self, variant: Variant, a: Array, b: Array, c: Array, *,
        alpha: float, beta: float, stream: Stream,
    ) -> None:  # fmt: skip
        (m, n), k = c.shape, a.shape[1]
        levels = self.levels
        while levels and min(m, n, k) < UNIT * 2**levels:
            levels -= 1
        plain = self.device.gemm
        if not levels or alpha == 0 or not (layout(a) and layout(b)):
            plain(variant, a, b, c, alpha=alpha, beta=beta, stream=stream)
            return
        unit = UNIT * 2**levels
        rows, cols, ks = (size // unit * unit for size in (m, n, k))
        inner = c[:rows, :cols]
        target = inner if beta == 0 else self.device.empty(rows, cols, c.dtype.name)
        _Product(self.device, variant, stream).levels(
            a[:rows, :ks], b[:ks, :cols], target, levels, None
        )
        if ks < k:  # before alpha is a factor: parts of a sum times Inf may be Inf of either sign
            plain(variant, a[:rows, ks:], b[ks:, :cols], target, alpha=1, beta=1, stream=stream)
        if beta != 0 or alpha != 1:
            self.device.combine(alpha, target, beta, inner, inner, stream)
        if cols < n:
            plain(variant, a, b[:, cols:], c[:, cols:], alpha=alpha, beta=beta, stream=stream)
        if rows < m:
            rest = c[rows:, :cols]
            plain(variant, a[rows:], b[:, :cols], rest, alpha=alpha, beta=beta, stream=stream)


class _Product:
    """One product by Strassen's algorithm, on one stream."""

    def __init__(self, device: Device, variant: Variant, stream: Stream):
        self.device, self.variant, self.stream = device, variant, stream

    def levels(
        self, a: Array, b: Array, c: Array, levels: int, spaces: Sequence[Workspaces] | None
    ) -> None:
        """c = a @ b; sides are multiples of 2^levels. `spaces` are the workspaces of this level
        and of deeper ones."""
        if levels == 0:
            self.device.gemm(self.variant, a, b, c, alpha=1, beta=0, stream=self.stream)
            return
        spaces = spaces or self._spaces(a, b, levels)
        x_space, y_space = spaces[0]
        a11, a12, a21, a22 = _quarters(a)
        b11, b12, b21, b22 = _quarters(b)
        c11, c12, c21, c22 = _quarters(c)
        x, y, product = (_like(v, s) for v, s in ((a11, x_space), (b11, y_space), (c11, x_space)))

        def times(p: Array, q: Array, out: Array) -> None:
            self.levels(p, q, out, levels - 1, spaces[1:])

        # Two workspaces suffice: the quarters of C hold products until they are due.
        self._sub(a11, a21, x)
        self._sub(b22, b12, y)
        times(x, y, c21)  # P7
        self._add(a21, a22, x)
        self._sub(b12, b11, y)
        times(x, y, c22)  # P5
        self._sub(x, a11, x)
        self._sub(b22, y, y)
        times(x, y, c12)  # P6
        self._sub(a12, x, x)
        times(x, b22, c11)  # P3
        times(a11, b11, product)  # P1, where x was
        self._add(product, c12, c12)
        self._add(c12, c21, c21)
        self._add(c12, c22, c12)
        self._add(c21, c22, c22)
        self._add(c12, c11, c12)
        self._sub(y, b21, y)
        times(a22, y, c11)  # P4
        self._sub(c21, c11, c21)
        times(a12, b21, c11)  # P2
        self._add(product, c11, c11)

    def _spaces(self, a: Array, b: Array, levels: int) -> list[Workspaces]:
        """For each level, flat memory for a quarter of A or C, and for one of B."""
        (m, k), n = a.shape, b.shape[1]
        out: list[Workspaces] = []
        for level in range(1, levels + 1):
            rows, cols, ks = (size >> level for size in (m, n, k))
            x, y = (
                self.device.empty(1, count, a.dtype.name)[0]
                for count in (rows * max(ks, cols), ks * cols)
            )
            out.append((x, y))
        return out

    def _add(self, x: Array, y: Array, out: Array) -> None:
        self.device.combine(1, x, 1, y, out, self.stream)

    def _sub(self, x: Array, y: Array, out: Array) -> None:
        self.device.combine(1, x, -1, y, out, self.stream)


def _quarters(matrix: Array) -> tuple[Array, Array, Array, Array]:
    rows, cols = (size // 2 for size in matrix.shape)
    top, bottom = matrix[:rows], matrix[rows:]
    return top[:, :cols], top[:, cols:], bottom[:, :cols], bottom[:, cols:]


def _like(view: Array, space: Array) -> Array:
    """The beginning of flat memory as a matrix of the view's shape and order."""
    rows, cols = view.shape
    flat = space[: rows * cols]
    return flat.reshape(rows, cols) if stored(view)[0] == "n" else flat.reshape(cols, rows).T
