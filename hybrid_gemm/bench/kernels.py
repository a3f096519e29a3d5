"""Times kernels x parameters x shapes on one device, beside cuBLAS, each row with a verdict.

Samples of the variants of one shape alternate, so that changes of the clock and of the machine's
load meet all of them. On a GPU a sample is a graph of launches between two events, long enough
(2 ms) that the time to launch does not count; elsewhere it is one call on the host's clock. What a
call of `hybrid_gemm.gemm` takes the host beside that is a column of its own.
Sampling stops when the median is known well enough, or has taken long enough.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .. import catalog
from ..api import gemm
from ..arrays.strides import Array
from ..catalog import LAYOUTS, Variant
from ..devices.base import Device
from ..devices.cuda.device import CudaDevice
from ..devices.roles import Streams
from ..errors import HybridGemmError, UsageError
from ..host.resources import cores
from ..kernel_choice import compute_modes
from ..problem import NARROW, Problem, compute_dtype
from ..reporting import report
from . import accuracy, study
from .selection import select

ROW_MS = 3000.0  # a row takes no further samples after so long
LEAST_SAMPLES = 5
CALLS = 100  # whose median is a call's time
CUBLAS = ("cublas", "cublas_tf32")
Operands = tuple[Array, Array, Array]  # op(A), op(B) and room for C
ForEach = Callable[[Problem, str], Sequence[Variant]]  # problem, layout -> variants to time


def pose(shape: study.Shape, dtype: str) -> Problem:
    """The problem of matrices of one dtype."""
    return Problem(*shape, compute_dtype(np.dtype(dtype)), out_dtype=dtype,
                   operands=dtype if dtype in NARROW else "")  # fmt: skip


def beside_cublas(
    arithmetic: compute_modes.Arithmetic, device: Device, problem: Problem, layout: str
) -> list[Variant]:
    """Our kernel that multiplies a problem on tensor cores, and on GPUs cuBLAS beside it: with
    the same arithmetic, or in fp32 where cuBLAS has none as accurate."""
    if not arithmetic.takes(problem):
        raise UsageError(f"{problem} in {problem.compute} is for no tensor core: leave out "
                         "--compute, or name kernels by --kernels")  # fmt: skip
    cublas = "cublas_tf32" if problem.compute == "tf32" else "cublas"
    beside = [catalog.get(cublas).variant()] if device.on_gpu else []
    return [study.tensor_core_kernel(arithmetic, device, problem, layout), *beside]


@dataclass
class _Case:
    """One shape, layout and dtype, and the variants to time on it."""

    variants: Sequence[Variant]
    problem: Problem
    layout: str


@dataclass
class _Timed:
    """A row whose product is right, and how its time is sampled."""

    row: study.Row
    sample: Callable[[], float]
    taken: list[float] = field(default_factory=list)


@dataclass
class KernelStudy(study.OnDevice):
    """Times of kernels with the data on the device: a row a variant, shape, layout and dtype.

    `variants` are timed at each of `shapes`; they may be a function of the problem and its layout.
    Without any, the kernel for tensor cores is timed beside cuBLAS, where `compute` or a narrow
    dtype asks for it, and without tensor cores each of the device's kernels. A row takes up to
    `samples` samples, fewer once the standard errors of the medians of a case's rows are all below
    the fraction `noise` of them.
    With `cold` the L2 cache of the GPU holds none of A, B and C when a product starts. `data` is a
    kind of `accuracy.KINDS`. With `calls`, what a call of `gemm` takes the host is measured too, on
    GPUs: it does not wait for the product. A variant that cannot run a shape is a row whose note
    says why.

        run(KernelStudy(select(["naive"], False, {}), [(1024,) * 3], device="cuda"))
    """

    columns: ClassVar[tuple[str, ...]] = (
        "kernel", "params", "m", "n", "k", "dtype", "layout", "data", "compute", "time_ms",
        "min_ms", "max_ms", "samples", "call_us", "gflops", "percent_of_peak",
        "ratio_to_cublas", "verdict", "worst_error_of_bound", "l2", "sm_mhz", "power_w",
        "throttled", "note",
    )  # fmt: skip

    variants: Sequence[Variant] | ForEach
    shapes: Sequence[study.Shape]
    device: str = "auto"
    dtypes: Sequence[str] = ("float32",)
    layouts: Sequence[str] = ("nn",)
    samples: int = 30
    noise: float = 0.003
    cold: bool = False
    seed: int = 0
    compute: str = "fp32"
    data: str = "normal"
    calls: bool = False
    cases: list[_Case] = field(init=False)

    def __post_init__(self) -> None:
        self._check()
        self.open(self.device)
        if self.cold and not self.opened.on_gpu:
            raise UsageError(f"a cold L2 is for the cuda device; this is {self.opened.kind}")
        for dtype in self.dtypes:
            study.check_memory(self.shapes, catalog.ITEM_SIZE[dtype], on_gpu=self.opened.on_gpu)
        arithmetic = compute_modes.arithmetic_for(
            self.compute, None, kind=self.opened.kind, arch=self.opened.capability
        )
        posed = [
            (arithmetic.settle(pose(shape, dtype)), layout)
            for dtype in self.dtypes
            for layout in self.layouts
            for shape in self.shapes
        ]
        choose = self._chooser(arithmetic)
        self.cases = [_Case(choose(problem, layout), problem, layout) for problem, layout in posed]

    def _check(self) -> None:
        """Raises `UsageError` for choices that are not possible on any device."""
        for layout in self.layouts:
            if layout not in LAYOUTS:
                raise UsageError(f"no layout is called {layout!r}; there are {', '.join(LAYOUTS)}")
        for dtype in self.dtypes:
            if dtype not in catalog.DTYPES:
                raise UsageError(f"--dtype {dtype!r}: kernels have {', '.join(catalog.DTYPES)}")
            if self.data != "normal" and dtype != "float32":
                raise UsageError(f"--data {self.data} is float32, and --dtype {dtype} was given")
        if self.data != "normal":
            accuracy.check_sides(self.shapes, f"data that is {self.data}")
        if self.samples < 1 or not self.noise >= 0:  # NaN too
            raise UsageError(
                f"samples={self.samples} and noise={self.noise:g}: it takes samples of at least 1 "
                "and noise of at least 0"
            )

    def _chooser(self, arithmetic: compute_modes.Arithmetic) -> ForEach:
        """What is timed at each problem and layout, as a function of these."""
        variants = self.variants
        if callable(variants):
            return variants
        if not variants and arithmetic.variant is None:  # no tensor cores
            variants = select(None, False, {}, self.opened.kind)
        if not variants:
            return lambda problem, layout: beside_cublas(arithmetic, self.opened, problem, layout)
        return lambda problem, _layout: [compute_modes.as_asked(v, problem) for v in variants]

    @property
    def steps(self) -> int:
        """One a row."""
        return sum(len(case.variants) for case in self.cases)

    def rows(self, advance: study.Advance) -> Iterator[study.Row]:
        """Compiles everything, then times one shape after another."""
        self._compile()
        for case in self.cases:
            yield from self._case(case, advance)

    def _compile(self) -> None:
        """Compiles the kernels that will run, on all cores, as far as they run at all."""
        wanted = {
            (v, p.dtype, case.layout if case.layout in v.kernel.layouts else v.kernel.layouts[0])
            for case in self.cases
            for p in [case.problem]
            for v in case.variants
            if not v.refusal(device=self.opened.kind, dtype=p.dtype, m=p.m, n=p.n, k=p.k)
            and not v.kernel.library
            and v.kernel.role == "gemm"
        }

        def compile(key: tuple[Variant, str, str]) -> None:
            with contextlib.suppress(HybridGemmError):  # its row will say so
                self.opened.compile(*key)

        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(compile, wanted))

    def _case(self, case: _Case, advance: study.Advance) -> list[study.Row]:
        """The rows of one shape, layout and dtype: all are checked, then timed in turn."""
        device, problem = self.opened, case.problem
        rows, timed = [], []
        with device.session(), device.using(self.stream):
            a, b = self._operands(problem, case.layout)
            c = device.empty(problem.m, problem.n, problem.out_dtype)
            for variant in case.variants:
                row = self._row(variant, case)
                row["note"] = self._try(row, variant, problem, (a, b, c))
                if not row["note"]:
                    timed.append(_Timed(row, self._sampler(variant, a, b, c)))
                    row["call_us"] = self._call_us(variant, problem, (a, b, c))
                rows.append(row)
                advance(1)
            self._sample_in_turn(timed)
        for each in timed:
            self._add_times(each, problem)
        cublas = next((r["time_ms"] for r in rows if r["kernel"] in CUBLAS), None)
        for row in rows:
            if cublas and row["time_ms"]:
                row["ratio_to_cublas"] = cublas / row["time_ms"]
        return rows

    def _row(self, variant: Variant, case: _Case) -> study.Row:
        """A row before anything is measured."""
        problem = case.problem
        return dict.fromkeys(self.columns) | {
            "kernel": variant.name, "params": dict(variant.params), "m": problem.m,
            "n": problem.n, "k": problem.k, "dtype": problem.operands, "layout": case.layout,
            "data": self.data,
        }  # fmt: skip

    def _operands(self, problem: Problem, layout: str) -> tuple[Array, Array]:
        """op(A) and op(B) on the device, stored as `layout` says."""
        draw = study.drawing_on(self.opened, self.stream, self.seed)
        if self.data == "normal":
            dtype = problem.operands
            shapes = {"A": (problem.m, problem.k), "B": (problem.k, problem.n)}
            a, b = (
                draw(x, *shape, dtype=dtype) if order == "n"
                else draw(x, *shape[::-1], dtype=dtype).T
                for (x, shape), order in zip(shapes.items(), layout, strict=True)
            )  # fmt: skip
            return a, b
        made = accuracy.make(self.data, problem.m, problem.n, problem.k, draw)
        a, b = (x if o == "n" else x.T.copy().T for x, o in zip(made, layout, strict=True))
        return a, b

    def _try(self, row: study.Row, variant: Variant, problem: Problem, operands: Operands) -> str:
        """Runs a variant once and adds the verdict to its row; why it is not timed, or ""."""
        reason = compute_modes.refusal(variant, problem) or variant.refusal(
            device=self.opened.kind, dtype=compute_modes.dtype_for(variant, problem),
            m=problem.m, n=problem.n, k=problem.k,
        )  # fmt: skip
        if reason:
            return reason
        try:
            row["compute"] = study.multiply_once(
                self.opened, variant, problem, operands, self.stream
            )
        except HybridGemmError as error:
            return " ".join(str(error).splitlines()[:2])
        row.update(study.judged(problem, *operands))
        return "" if row["verdict"] == study.PASSED else "wrong, so not timed"

    def _sampler(self, variant: Variant, a: Array, b: Array, c: Array) -> Callable[[], float]:
        """Takes one sample: enough products to fill it, launched as one where the device can."""

        def multiply() -> None:
            self.opened.gemm(variant, a, b, c, alpha=1, beta=0, stream=self.stream)

        # A product by residues waits for what it finds of the data, which no graph does.
        device, waits = self.opened, variant.kernel.role == "residues"
        repeat = functools.partial(Streams.repeated, device) if waits else device.repeated

        def repeated(count: int) -> Callable[[], float]:
            replay = repeat(multiply, count, self.stream)
            return lambda: self._sample(replay, count)

        return repeated(1) if self.cold else study.filling(repeated, device)

    def _call_us(self, variant: Variant, problem: Problem, operands: Operands) -> float | None:
        """Microseconds of the host for a call of `gemm(a, b, out=c)`; None where none are timed,
        where `gemm` refuses this kernel's parameters with this `compute`, and where it would
        multiply otherwise: 16 bits by cuBLAS when that is asked for."""
        wide = problem.operands not in NARROW or not variant.kernel.library
        if not (self.calls and self.opened.on_gpu and wide):
            return None
        a, b, c = operands
        params = tuple(variant.params.items()) or None
        taken = []
        try:
            for _ in range(CALLS):
                start = time.perf_counter()
                gemm(a, b, out=c, kernel=variant.name, params=params, compute=problem.compute)
                taken.append(time.perf_counter() - start)
        except UsageError:
            return None
        self.stream.synchronize()
        return 1e6 * statistics.median(taken)

    def _sample(self, replay: Callable[[], None], count: int) -> float:
        """Milliseconds a product, of `count` that `replay` makes."""
        if self.cold:
            assert isinstance(self.opened, CudaDevice)  # as was checked
            self.opened.flush_cache(self.stream)
        return study.elapsed_ms(self.opened, self.stream, replay) / count

    def _sample_in_turn(self, timed: Sequence[_Timed]) -> None:
        """One sample of each in turn, until all have enough: a GPU's clock changes, and ratios
        compare what ran under the same."""
        going = list(timed)
        while going and not all(self._enough(x.taken) for x in timed):
            for each in list(going):
                each.taken.append(each.sample())
                if self._has_most(each.taken):
                    going.remove(each)
        for each in timed:
            each.row.update(self.opened.readings())

    def _has_most(self, taken: list[float]) -> bool:
        return len(taken) >= self.samples or sum(taken) > ROW_MS

    def _enough(self, taken: list[float]) -> bool:
        if self._has_most(taken):
            return True
        if len(taken) < LEAST_SAMPLES:
            return False
        low, median, high = statistics.quantiles(taken, n=4)
        # The standard error of the median, were samples of this quartile range normal.
        return 0.93 * (high - low) / len(taken) ** 0.5 <= self.noise * median

    def _add_times(self, timed: _Timed, problem: Problem) -> None:
        """Adds median, extremes and rate to a row."""
        median = statistics.median(timed.taken)
        gflops = problem.flops / median / 1e6
        strict = problem.compute == "fp32" and problem.operands == problem.dtype
        peak = self.opened.peak_tflops(problem.dtype) if strict else None
        timed.row.update({
            "time_ms": median, "min_ms": min(timed.taken), "max_ms": max(timed.taken),
            "samples": len(timed.taken), "samples_ms": timed.taken, "gflops": gflops,
            "percent_of_peak": gflops / peak / 10 if peak else None,
            "l2": "cold" if self.cold else "warm",
        })  # fmt: skip

    @staticmethod
    def table(data: Mapping[str, Any]) -> study.Table:
        """A line a row; dtype, layout and compute only where they differ."""
        rows = data["rows"]
        several = [x for x in ("dtype", "layout", "compute") if len({row[x] for row in rows}) > 1]
        emulated = data["device"].get("kind") == "emulator"  # whose rates say nothing of a kernel's
        of_emulator = ": times of the kernels' text on the CPU, and not of a GPU" * emulated
        return study.table_of(
            rows, f"{data['device']['name']}{of_emulator}", ("<kernel", "kernel"),
            ("<parameters", study.parameters), study.sizes(rows), *((f"<{x}", x) for x in several),
            ("time ms", "time_ms", ".4g"), ("min ms", "min_ms", ".4g"),
            ("call us", "call_us", ".1f"), *([] if emulated else [("gflop/s", "gflops", ".1f")]),
            ("% of peak", "percent_of_peak", ".1f"), ("of cuBLAS", "ratio_to_cublas", ".3f"),
            ("<verdict", "verdict"), ("<note", report.note),
        )  # fmt: skip
