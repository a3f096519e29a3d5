"""Errors against float64 of each way to multiply float32, on data of several kinds.

Two figures for each product: the Frobenius norm of the error over that of the result, and the
largest |error| / (|A||B|), which is the quantity that error bounds limit. The float64 reference
is computed on the device that multiplied.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import catalog
from ..arrays.caller_arrays import module_of
from ..arrays.strides import Array
from ..catalog import Variant
from ..devices.base import Device
from ..devices.cuda.device import CudaDevice
from ..devices.kernel_device import KernelDevice
from ..errors import UnavailableError, UsageError
from ..kernel_choice import compute_modes, on_gpu
from ..problem import Problem
from . import study

# What each kind of data is, in words.
KINDS = {
    "normal": "standard normal",
    "uniform": "in [0, 1): all of one sign",
    "cancelling": "halves of K cancel to a thousandth of their size",
    "ill-scaled": "rows of A and columns of B scaled by 2^-30 to 2^30",
    "wide": "each element scaled by 2^-30 to 2^30",
    "huge": "each row of A has an element of 10^8 whose partner is 0, each column of B too",
}
FLOAT_AND_DOUBLES = 4 + 8 + 8  # bytes an element: itself and for the reference, or its bound
GPU_SHAPES: list[study.Shape] = [(1024, 1024, 2**i) for i in range(8, 17)]
HOST_SHAPES: list[study.Shape] = [(128, 128, k) for k in (256, 1024, 4096)]


def make(kind: str, m: int, n: int, k: int, draw: study.Draw) -> tuple[Array, Array]:
    """op(A) (m x k) and op(B) (k x n) of a kind of `KINDS`, float32.

    `draw` gives new float32 matrices; operand is "A", "B" or "C", and fill is one of
    `generator.FILLS`. Raises `UsageError` for an unknown kind.
    """
    _check_kind(kind)
    fill = "uniform" if kind == "uniform" else "normal"
    a, b = draw("A", m, k, fill), draw("B", k, n, fill)
    xp = module_of(a)

    def scale(x: Array, rows: int, cols: int) -> None:
        x *= xp.exp2(xp.floor(60 * draw("C", rows, cols, "uniform") - 30))

    if kind == "ill-scaled":
        scale(a, m, 1)
        scale(b, 1, n)
    elif kind == "wide":
        scale(a, m, k)
        scale(b, k, n)
    elif kind == "cancelling":
        half = k // 2
        a[:, half : 2 * half] = a[:, :half]
        b[half : 2 * half] = b[half : 2 * half] * np.float32(1e-3) - b[:half]
    elif kind == "huge":
        a[:, 0], b[0] = 1e8, 0
        b[-1], a[:, -1] = 1e8, 0
    return a, b


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"no data is called {kind!r}; there are {', '.join(KINDS)}")


def check_sides(shapes: Iterable[study.Shape], what: str) -> None:
    """Raises `UsageError` for a product without elements, which has no such data or errors."""
    for m, n, k in shapes:
        if min(m, n, k) < 1:
            raise UsageError(f"{m} x {n} x {k} is empty; {what} takes sides of at least 1")


def ways(device: Device, problem: Problem) -> dict[str, tuple[Variant, Problem]]:
    """Each way to multiply float32 that the device has, by name: the kernel, and the problem as
    that kernel multiplies it."""
    if not isinstance(device, KernelDevice):
        return {"BLAS fp32": (catalog.get("blas").variant(), problem)}
    found = {}
    if isinstance(device, CudaDevice):
        strict = on_gpu.strict(device.machine("float32"), problem, own=True)[0]
        found["cuBLAS fp32"] = catalog.get("cublas").variant(), problem
    else:
        strict = catalog.get("double_buffered").variant()
    found["fp32"] = strict, problem
    for compute in ("tf32", "fp32x3"):
        try:
            arithmetic = compute_modes.arithmetic_for(
                compute, None, kind=device.kind, arch=device.capability
            )
        except UnavailableError:
            continue
        settled = arithmetic.settle(problem)
        found[compute] = study.tensor_core_kernel(arithmetic, device, settled, "nn"), settled
        if device.on_gpu and compute == "tf32":
            found["cuBLAS tf32"] = catalog.get("cublas_tf32").variant(), settled
    return found


@dataclass
class AccuracyStudy(study.OnDevice):
    """One row for each shape, kind of data and way; `shapes` empty means the device's usual.

    `device` is "auto", "cuda", "cpu" or "emulator". Raises `UsageError` for unknown data.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "data", "way", "kernel", "params", "m", "n", "k", "frobenius", "largest",
        "frobenius_of_cublas", "largest_of_cublas", "compute", "verdict", "note",
    )  # fmt: skip

    shapes: Sequence[study.Shape] = ()
    device: str = "auto"
    data: Sequence[str] = tuple(KINDS)
    seed: int = 0

    def __post_init__(self) -> None:
        for kind in self.data:
            _check_kind(kind)
        check_sides(self.shapes, "accuracy")
        self.open(self.device)
        self.shapes = self.shapes or (GPU_SHAPES if self.opened.on_gpu else HOST_SHAPES)
        study.check_memory(self.shapes, 4 if self.opened.on_gpu else FLOAT_AND_DOUBLES,
                     on_gpu=self.opened.on_gpu)  # fmt: skip

    @property
    def steps(self) -> int:
        """One a shape and kind of data."""
        return len(self.shapes) * len(self.data)

    def rows(self, advance: study.Advance) -> Iterator[study.Row]:
        """Multiplies each kind of data in each way, once."""
        with self.opened.session(), self.opened.using(self.stream):
            draw = study.drawing_on(self.opened, self.stream, self.seed)
            for m, n, k in self.shapes:
                drawn = functools.lru_cache(draw)  # several kinds begin with the same
                for kind in self.data:
                    a, b = make(kind, m, n, k, lambda *what: drawn(*what).copy())  # noqa: B023
                    yield from self._rows(kind, Problem(m, n, k), a, b)
                    advance(1)

    def _rows(self, kind: str, problem: Problem, a: Array, b: Array) -> list[study.Row]:
        """A row for each way to multiply these matrices."""
        m, n, k = problem.m, problem.n, problem.k
        x, y = a.astype("f8"), b.astype("f8")
        exact, size = x @ y, abs(x) @ abs(y)
        del x, y
        found: list[study.Row] = []
        for way, (variant, settled) in ways(self.opened, problem).items():
            c = self.opened.empty(m, n, "float32")
            compute = study.multiply_once(self.opened, variant, settled, (a, b, c), self.stream)
            frobenius, largest = errors(c, exact, size)
            bound = (k + 3) * 2.0**-23 + compute_modes.rounding(settled)
            found.append(dict.fromkeys(self.columns) | {
                "data": kind, "way": way, "kernel": variant.name, "params": dict(variant.params),
                "m": m, "n": n, "k": k, "frobenius": frobenius, "largest": largest,
                "compute": compute, "note": "",
                "verdict": study.PASSED if largest <= bound else study.FAILED,
            })  # fmt: skip
        for cublas in [row for row in found if row["way"] == "cuBLAS fp32"]:
            for row in found:
                for figure in ("frobenius", "largest"):
                    row[f"{figure}_of_cublas"] = row[figure] / cublas[figure]
        return found

    @staticmethod
    def table(data: Mapping[str, Any]) -> study.Table:
        """A line a row, with the errors of cuBLAS fp32 as 1."""
        return study.table_of(
            data["rows"], data["device"]["name"], ("<data", "data"), study.sizes(data["rows"]),
            ("<way", "way"), ("Frobenius error", "frobenius", ".2e"),
            ("largest / (|A||B|)", "largest", ".2e"),
            ("Frobenius of cuBLAS", "frobenius_of_cublas", ".2f"),
            ("largest of cuBLAS", "largest_of_cublas", ".2f"), ("<compute", "compute"),
            ("<verdict", "verdict"), ("<note", "note"),
        )  # fmt: skip


def errors(c: Array, exact: Array, size: Array) -> tuple[float, float]:
    """The Frobenius error of `c`, and the largest |error| / (|A||B|).

    `exact` is the product in float64, `size` is |A||B|; NaN in `c` gives NaN.
    """
    xp = module_of(c)
    error = abs(c.astype("f8") - exact)
    frobenius = float(xp.linalg.norm(error) / xp.linalg.norm(exact))
    return frobenius, float((error / xp.where(size > 0, size, 1)).max())
