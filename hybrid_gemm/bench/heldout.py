"""Kernels timed on a GPU at shapes that nobody chose (`drawing.py`)."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from .. import catalog
from ..arrays.strides import Array, stand_in
from ..catalog import LAYOUTS, Variant
from ..devices.base import Stream
from ..devices.cuda.device import CudaDevice
from ..devices.kernel_launcher import Compiled
from ..errors import HybridGemmError, UsageError
from ..kernel_choice import compute_modes, time_model
from ..kernel_choice.library_kernels import Launched
from ..problem import NARROW, Problem, compute_dtype
from .drawing import Drawn
from .study import Row, Shape, elapsed_ms

# The dtype and `compute` of each mode.
MODES = {
    "float32": ("float32", "fp32"), "float64": ("float64", "fp32"), "int32": ("int32", "fp32"),
    "float16": ("float16", "fp32"), "bfloat16": ("bfloat16", "fp32"),
    "tf32": ("float32", "tf32"), "fp32x3": ("float32", "fp32x3"),
}  # fmt: skip
SAMPLE_MS, MOST_LAUNCHES = 1.0, 150  # a sample lasts so long, of at most so many products
TURNS = 4  # samples of each candidate; the first is not counted
HOPELESS = 2.5  # times as slow as the fastest, once: that is not timed again


@dataclass
class Bench:
    """Times variants of one mode on a GPU, with A, B and C there, drawn at random; `beta` scales
    C."""

    device: CudaDevice
    mode: str
    beta: float = 0.0
    stream: Stream = field(init=False)
    dtype: str = field(init=False)
    arithmetic: compute_modes.Arithmetic = field(init=False)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"no mode is called {self.mode!r}; there are {', '.join(MODES)}")
        self.dtype, compute = MODES[self.mode]
        self.stream = self.device.stream()
        self.arithmetic = compute_modes.arithmetic_for(
            compute, None, kind=self.device.kind, arch=self.device.capability
        )

    def problem(self, shape: Shape) -> Problem:
        """The settled problem of such matrices."""
        compute = compute_dtype(np.dtype(self.dtype))
        operands = self.dtype if compute != self.dtype else ""
        posed = Problem(
            *shape, compute, beta=self.beta, out_dtype=self.dtype, operands=operands
        )  # fmt: skip
        return self.arithmetic.settle(posed)

    def candidates(self, problem: Problem) -> list[Variant]:
        """Every variant that a model of this mode knows: of kernels from the double-buffered rung
        on, and the library."""
        if not self.arithmetic.takes(problem):
            least = catalog.get("double_buffered").rung
            machine = self.device.machine(problem.dtype)
            possible = time_model.candidates(machine, problem)
            return [v for v in possible if v.kernel.rung >= least]
        assert self.arithmetic.variant is not None  # it takes the problem
        terms = 3 if self.mode == "fp32x3" else 1
        size = np.dtype(self.dtype).itemsize
        own = [
            v
            for kernel in catalog.kernels().values()
            if kernel == self.arithmetic.variant.kernel
            or (kernel.in_place and kernel.runs_at(self.device.capability))
            for v in kernel.variants()
            if v.params["TERMS"] == terms and v.params["OUT"] == size
        ]
        if problem.operands in NARROW:  # and those that do without tensor cores
            machine = self.device.machine("float32")
            own += [
                v
                for v in time_model.candidates(machine, problem, own=True)
                if v.params["OUT"] == size
            ]
        return [*own, *([self.library] if self.library else [])]

    @property
    def library(self) -> Variant | None:
        """The library that a model of this mode knows."""
        if self.mode in ("int32", "fp32x3"):
            return None
        return catalog.get("cublas_tf32" if self.mode == "tf32" else "cublas").variant()

    def launched(self, drawn: Drawn) -> Launched | None:
        """What the library would launch at a shape."""
        if self.library is None:
            return None
        return self.device.library_launch(self.problem(drawn.shape), drawn.layout)

    def compile(self) -> None:
        """Compiles the candidates for usual shapes, on all cores."""
        shapes: list[Shape] = [(512, 512, 512), (64, 64, 2**16)]
        shapes += [s for x in (1, 3, 8) for s in ((x, 4096, 4096), (4096, x, 4096))]
        shapes += [(2**17, 8, 8), (8, 2**17, 8), (8, 8, 2**20)]
        wanted = {
            kernel: None
            for shape in shapes
            for variant in self.candidates(self.problem(shape))
            if not variant.kernel.library
            for layout in LAYOUTS
            for kernel in self._kernels(variant, shape, layout)
        }
        self.device.compile_all(wanted)

    def _kernels(self, variant: Variant, shape: Shape, layout: str) -> list[Compiled]:
        """What a product needs compiled."""
        m, n, k = shape
        a, b = stand_in(m, k, self.dtype, layout[0]), stand_in(k, n, self.dtype, layout[1])
        return self.device.kernels_of(lambda d: d.prepare(variant, a, b, self.dtype, summed=False))

    @contextlib.contextmanager
    def operands(self, drawn: Drawn) -> Iterator[tuple[Array, Array, Array]]:
        """op(A), op(B) and C on the device, whose stream is current."""
        m, n, k = drawn.shape
        with self.device.session(), self.device.using(self.stream):
            a, b = self.random(m, k, drawn.layout[0]), self.random(k, n, drawn.layout[1])
            yield a, b, self.random(m, n, "n") if self.beta else self.device.empty(m, n, self.dtype)
            self.stream.synchronize()

    def random(self, rows: int, cols: int, order: str) -> Array:
        """A new matrix on the device, in storage order "n" or "t"."""
        cupy = self.device.cp
        shape = (rows, cols) if order == "n" else (cols, rows)
        made = self.device.empty(*shape, self.dtype)
        if self.dtype == "int32":
            made[...] = cupy.random.randint(-9, 9, shape, dtype="int32")
        elif self.dtype == "bfloat16":  # the upper halves of float32
            bits = cupy.random.standard_normal(shape, dtype="float32").view("uint32")
            made.view("uint16")[...] = (bits >> 16).astype("uint16")
        else:
            wide = "float64" if self.dtype == "float64" else "float32"
            made[...] = cupy.random.standard_normal(shape, dtype=wide)
        return made if order == "n" else made.T

    def multiply(self, variant: Variant, a: Array, b: Array, c: Array) -> Callable[[], None]:
        """A call that starts one product, after a first one."""
        call = self.device.bound_gemm(variant, a, b, c, alpha=1, beta=self.beta)
        call(self.stream)
        self.stream.synchronize()
        return lambda: call(self.stream)

    def times_us(
        self, variants: Sequence[Variant], a: Array, b: Array, c: Array, *,
        sample_ms: float = SAMPLE_MS, turns: int = TURNS,
    ) -> dict[Variant, float]:  # fmt: skip
        """The median time of each variant that runs and for whose workspace there is memory, in
        microseconds, of samples taken in turn, each `sample_ms` long; of those that are hopelessly
        slow, of one product."""
        once: dict[Variant, float] = {}
        calls = {}
        for variant in variants:
            with contextlib.suppress(HybridGemmError, MemoryError):
                calls[variant] = self.multiply(variant, a, b, c)
                replay = self.device.repeated(calls[variant], 1, self.stream)
                self._sample_us(replay, 1)
                # One alone may be disturbed, and then nothing more is taken of the variant.
                once[variant] = min(self._sample_us(replay, 1) for _ in range(2))
        limit = HOPELESS * min(once.values(), default=0.0) + 30
        replays = {}
        for variant, us in once.items():
            if us <= limit:
                count = max(1, min(MOST_LAUNCHES, int(sample_ms * 1e3 / max(us - 4, 2))))
                replays[variant] = self.device.repeated(calls[variant], count, self.stream), count
        taken: dict[Variant, list[float]] = {v: [] for v in replays}
        for turn in range(turns):
            for variant, (replay, count) in replays.items():
                us = self._sample_us(replay, count)
                if turn:
                    taken[variant].append(us)
        # Of two, the lower: something else may have run during the other.
        return once | {v: statistics.median_low(x) for v, x in taken.items()}

    def _sample_us(self, replay: Callable[[], None], count: int) -> float:
        return elapsed_ms(self.device, self.stream, replay) * 1e3 / count


def timed(bench: Bench, drawn: Drawn) -> Row:
    """The times of all candidates at a shape, as a row: "us" by the variant's name; and what the
    library launches."""
    launched = bench.launched(drawn)
    with bench.operands(drawn) as arrays:
        found = bench.times_us(bench.candidates(bench.problem(drawn.shape)), *arrays)
    return {
        "mode": bench.mode, "shape": list(drawn.shape), "layout": drawn.layout,
        "kind": drawn.kind, "us": {str(v): round(us, 4) for v, us in found.items()},
        "launched": dataclasses.astuple(launched) if launched else None,
    }  # fmt: skip
