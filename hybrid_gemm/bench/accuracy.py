"""Errors against float64 of each way to multiply float32, on data of several kinds.

Two numbers a product: the Frobenius norm of the error over that of the result, and the largest
|error| / (|A||B|), which is what error bounds speak of. The reference is computed where the
product was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from .. import catalog
from ..arrays import generator
from ..arrays.caller_arrays import module_of
from ..catalog import Variant
from ..devices import choose, open_devices
from ..devices import tensor_core_products as products
from ..devices.base import Device
from ..errors import UnavailableError, UsageError
from ..host.resources import cores
from ..kernel_choice import compute_modes, nearest_measured
from ..problem import Problem
from ..reporting import console

# What each kind is, in words.
KINDS = {
    "normal": "standard normal",
    "uniform": "in [0, 1): all of one sign",
    "cancelling": "halves of K cancel to a thousandth of their size",
    "ill-scaled": "rows of A and columns of B scaled by 2^-30 to 2^30",
    "wide": "each element scaled by 2^-30 to 2^30",
    "huge": "each row of A has an element of 10^8 whose partner is 0, each column of B too",
}
COLUMNS = (
    "data", "way", "kernel", "params", "m", "n", "k", "frobenius", "largest",
    "frobenius_of_cublas", "largest_of_cublas", "compute", "verdict", "note",
)  # fmt: skip
SHAPES = {
    "cuda": [(1024, 1024, 2**i) for i in range(8, 17)],
    "": [(128, 128, k) for k in (256, 1024, 4096)],
}


def make(kind: str, m: int, n: int, k: int, draw: Callable) -> tuple:
    """op(A) (m x k) and op(B) (k x n) of a kind, float32.

    `draw(operand, rows, cols, fill)` gives new arrays of `generator.generate`'s fills; operand
    is "A", "B" or "C". Raises `UsageError` for an unknown kind.
    """
    if kind not in KINDS:
        raise UsageError(f"no data is called {kind!r}; there are {', '.join(KINDS)}")
    fill = "uniform" if kind == "uniform" else "normal"
    a, b = draw("A", m, k, fill), draw("B", k, n, fill)
    xp = module_of(a)

    def scale(x, rows, cols):
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


def ways(device: Device, problem: Problem) -> dict[str, tuple[Variant, Problem]]:
    """Each way that is here, by name: the kernel, and the problem as that multiplies it."""
    kind, found = device.kind, {}
    if kind == "cpu":
        return {"BLAS fp32": (catalog.get("blas").variant(), problem)}
    if kind == "cuda":
        strict = nearest_measured.choose(device.machine("float32"), problem, "nn", own=True)[0]
        found["cuBLAS fp32"] = catalog.get("cublas").variant(), problem
    else:
        strict = catalog.get("double_buffered").variant()
    found["fp32"] = strict, problem
    for compute in ("tf32", "fp32x3"):
        try:
            arithmetic = compute_modes.choose(compute, None, kind=kind, arch=device.capability)
        except UnavailableError:
            continue
        settled = arithmetic.settle(problem)
        found[compute] = arithmetic.variant_for(settled, device.processors), settled
        if kind == "cuda" and compute == "tf32":
            found["cuBLAS tf32"] = catalog.get("cublas_tf32").variant(), settled
    return found


def run(
    shapes: Sequence[tuple[int, int, int]] = (), *, device: str = "auto",
    data: Sequence[str] = tuple(KINDS), seed: int = 0, progress=None,
    note: Callable[[str], None] = lambda text: None,
) -> dict:  # fmt: skip
    """Rows as plain dictionaries (`COLUMNS`): a way, a kind of data, a shape."""
    kind, why = choose(device)
    if why:
        note(f"device: {kind} ({why})")
    opened = open_devices(kind, 1, gpus=[0] if kind == "cuda" else None)[0]
    shapes = list(shapes) or SHAPES.get(kind, SHAPES[""])
    advance = progress(len(shapes) * len(data), "multiplying") if progress else lambda _: None
    rows, stream = [], opened.stream()
    with opened.session(), opened.using(stream):
        for m, n, k in shapes:
            bench = _Bench(opened, stream, seed)
            for each in data:
                rows += bench.rows(each, Problem(m, n, k))
                advance(1)
    return {"device": {"kind": kind, "name": opened.describe()}, "rows": rows}


class _Bench:
    def __init__(self, device: Device, stream, seed: int):
        self.device, self.stream, self.seed = device, stream, seed
        self._drawn = functools.lru_cache(self._draw)

    def draw(self, operand: str, rows: int, cols: int, fill: str):
        return self._drawn(operand, rows, cols, fill).copy()

    def _draw(self, operand, rows, cols, fill):
        host = generator.generate(
            rows, cols, "float32", seed=self.seed, operand=operand, fill=fill, threads=cores()
        )
        there = self.device.empty(rows, cols, "float32")
        self.device.copy(there, host, self.stream)
        self.stream.synchronize()
        return there

    def rows(self, data: str, problem: Problem) -> list[dict]:
        m, n, k = problem.m, problem.n, problem.k
        a, b = make(data, m, n, k, self.draw)
        x, y = a.astype("f8"), b.astype("f8")
        exact, size = x @ y, abs(x) @ abs(y)
        del x, y
        out = []
        for way, (variant, settled) in ways(self.device, problem).items():
            row = dict.fromkeys(COLUMNS) | {
                "data": data, "way": way, "kernel": variant.name, "params": dict(variant.params),
                "m": m, "n": n, "k": k, "note": "",
            }  # fmt: skip
            c = self.device.empty(m, n, "float32")
            c[...] = np.nan
            before = products.verdicts(self.device, settled)
            self.device.gemm(variant, a, b, c, alpha=1, beta=0, stream=self.stream)
            self.stream.synchronize()
            taken = products.verdicts(self.device, settled) - before
            row["compute"] = compute_modes.ran(variant, settled, taken)
            xp = module_of(c)
            error = abs(c.astype("f8") - exact)
            row["frobenius"] = float(xp.linalg.norm(error) / xp.linalg.norm(exact))
            row["largest"] = float((error / xp.where(size > 0, size, 1)).max())
            bound = (k + 3) * 2.0**-23 + compute_modes.rounding(settled)
            row["verdict"] = "passed" if row["largest"] <= bound else "FAILED"
            out.append(row)
        peer = next((r for r in out if r["way"] == "cuBLAS fp32"), None)
        for row in out:
            for measure in ("frobenius", "largest") if peer else ():
                row[f"{measure}_of_cublas"] = row[measure] / peer[measure]
        return out


def show(data: dict) -> None:
    def ratio(row, name):
        return f"{row[name]:.2f}" if row[name] is not None else ""

    rows = [
        [
            row["data"], f"{row['m']} x {row['n']} x {row['k']}", row["way"],
            f"{row['frobenius']:.2e}", f"{row['largest']:.2e}",
            ratio(row, "frobenius_of_cublas"), ratio(row, "largest_of_cublas"),
            row["compute"], row["verdict"], row["note"],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    console.table(
        ["<data", "m x n x k", "<way", "Frobenius error", "largest / (|A||B|)",
         "Frobenius of cuBLAS", "largest of cuBLAS", "<compute", "<verdict", "<note"],
        rows, title=data["device"]["name"],
    )  # fmt: skip
