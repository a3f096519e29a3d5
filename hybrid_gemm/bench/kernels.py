"""Times kernels x parameters x shapes on one device, beside cuBLAS, each row with a verdict.

Samples of the variants of one shape alternate, so that clocks and neighbours change for all
alike. On a GPU a sample is a graph of launches between two events, long enough (2 ms) that
launching is not what is timed; elsewhere it is one call on the host's clock. Sampling stops when
the median is known well enough, or has taken long enough.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .. import catalog
from ..arrays import generator
from ..catalog import ITEM_SIZE, LAYOUTS, Variant
from ..devices import choose, open_devices
from ..devices import tensor_core_products as products
from ..errors import HybridGemmError, UsageError
from ..host.resources import cores
from ..kernel_choice import compute_modes
from ..problem import NARROW, Problem, compute_dtype, is_float
from ..reporting import console
from ..verify import verify
from . import accuracy

SAMPLE_MS = 2.0
ROW_MS = 3000.0  # a row takes no further samples after so long
LEAST_SAMPLES = 5
SERIES = {
    # S1's series: K = 1024, m = n
    "published": [
        (m, m, 1024)
        for m in (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
                  12288, 16384)
    ],
}  # fmt: skip
COLUMNS = (
    "kernel", "params", "m", "n", "k", "dtype", "layout", "data", "compute", "time_ms",
    "min_ms", "max_ms", "samples", "gflops", "percent_of_peak", "ratio_to_cublas", "verdict",
    "worst_error_of_bound", "l2", "sm_mhz", "power_w", "throttled", "note",
)  # fmt: skip


def series(name: str) -> list[tuple[int, int, int]]:
    """The shapes of a named series; `UsageError` if there is none of that name."""
    if name not in SERIES:
        raise UsageError(f"no series is called {name!r}; there is {', '.join(SERIES)}")
    return SERIES[name]


def select(
    names, all_params: bool, params: Mapping[str, int], device: str = "auto"
) -> list[Variant]:
    """Variants by kernel name (default: every kernel that multiplies on that device)."""
    if names:
        kernels = [catalog.get(name) for name in names]
    else:
        kind, _why = choose(device)
        kernels = [k for k in catalog.gemm_kernels() if kind in k.runs_on]
    known = {p for kernel in kernels for p in kernel.params[0]}
    if unknown := params.keys() - known:
        raise UsageError(f"no kernel here has the parameters {', '.join(sorted(unknown))}")
    out = []
    for kernel in kernels:
        listed = kernel.variants() if all_params else kernel.variants()[:1]
        for variant in listed:
            mine = {name: value for name, value in params.items() if name in variant.params}
            variant = kernel.variant({**variant.params, **mine})
            if variant not in out:
                out.append(variant)
    return out


def run(
    variants: Sequence[Variant] | Callable[[Problem, str], Sequence[Variant]], shapes, *,
    device: str = "auto",
    dtypes: Sequence[str] = ("float32",), layouts: Sequence[str] = ("nn",), samples: int = 30,
    noise: float = 0.003, cold: bool = False, seed: int = 0, compute: str = "fp32",
    data: str = "normal", progress=None,
    note: Callable[[str], None] = lambda text: None,
) -> dict:  # fmt: skip
    """Rows as plain dictionaries (`COLUMNS`), one a variant, shape, layout and dtype.

    Takes up to `samples` of each, fewer once the median's spread is below `noise` of it. With
    `cold` the L2 cache holds none of A, B and C when a product starts. A variant that cannot
    run a shape is a row whose note says why. `variants` may depend on the problem and its layout;
    without any, the kernel for tensor cores is timed beside cuBLAS (`beside_cublas`), where
    `compute` or a narrow dtype asks for them. `data` is one of `accuracy.KINDS`.
    """
    for layout in layouts:
        if layout not in LAYOUTS:
            raise UsageError(f"no layout is called {layout!r}; there are {', '.join(LAYOUTS)}")
    for dtype in dtypes:
        if dtype not in (known := (*catalog.C_TYPES, *NARROW)):
            raise UsageError(f"--dtype {dtype!r}: kernels have {', '.join(known)}")
        if data != "normal" and dtype != "float32":
            raise UsageError(f"--data {data} is float32, and --dtype {dtype} was given")
    if samples < 1 or noise < 0:
        raise UsageError("samples are 1 or more, and noise 0 or more")
    kind, why = choose(device)
    if why:
        note(f"device: {kind} ({why})")
    if cold and kind != "cuda":
        raise UsageError(f"a cold L2 is for the cuda device; this is {kind}")
    opened = open_devices(kind, 1, gpus=[0] if kind == "cuda" else None)[0]
    bench = _Bench(opened, samples, noise, cold, data)
    cases = [(d, lay, s) for d in dtypes for lay in layouts for s in shapes]
    arithmetic = compute_modes.choose(compute, None, kind=kind, arch=opened.capability)
    for_each = variants
    if not callable(variants):

        def for_each(problem, _layout):
            return [compute_modes.as_asked(v, problem) for v in variants]

    if not variants:

        def for_each(problem, _layout):
            return beside_cublas(arithmetic, opened, problem)

    posed = [(arithmetic.settle(pose(s, d)), lay) for d, lay, s in cases]
    jobs = [(for_each(problem, layout), problem, layout) for problem, layout in posed]
    advance = progress(sum(len(v) for v, _, _ in jobs), "timing") if progress else lambda _: None
    bench.compile(jobs)
    rows = []
    for chosen, problem, layout in jobs:
        rows += bench.shape(chosen, problem, layout, seed, advance)
    return {"device": {"kind": kind, "name": opened.describe()}, "rows": rows}


def pose(sides: tuple[int, int, int], dtype: str) -> Problem:
    """The problem of matrices of one dtype."""
    return Problem(*sides, compute_dtype(np.dtype(dtype)), out_dtype=dtype,
                   operands=dtype if dtype in NARROW else "")  # fmt: skip


def beside_cublas(arithmetic: compute_modes.Arithmetic, device, problem: Problem) -> list[Variant]:
    """The kernel that multiplies a problem on tensor cores, and cuBLAS for comparison: with the
    same arithmetic, or fp32 where cuBLAS has none as accurate."""
    if not arithmetic.takes(problem):
        raise UsageError(f"{problem} in {problem.compute} is for no tensor core: name kernels")
    peer = "cublas_tf32" if problem.compute == "tf32" else "cublas"
    beside = [catalog.get(peer).variant()] if device.kind == "cuda" else []
    size = ITEM_SIZE[problem.out_dtype]
    return [arithmetic.variant_for(problem, device.processors, size), *beside]


class _Bench:
    def __init__(self, device, samples: int, noise: float, cold: bool, data: str):
        self.device, self.samples, self.noise, self.cold = device, samples, noise, cold
        self.data = data
        self.stream = device.stream()

    def compile(self, jobs) -> None:
        """Compiles all that will run, on all cores; where it is known to run at all."""
        wanted = {
            (v, p.dtype, layout if layout in v.kernel.layouts else v.kernel.layouts[0])
            for variants, p, layout in jobs
            for v in variants
            if not v.refusal(device=self.device.kind, dtype=p.dtype, m=p.m, n=p.n, k=p.k)
            and not v.kernel.library
            and v.kernel.role == "gemm"
        }
        with ThreadPoolExecutor(cores()) as pool:
            list(pool.map(lambda key: self.device.compile(*key), wanted))

    def shape(self, variants, problem: Problem, layout: str, seed: int, advance) -> list[dict]:
        """The rows of one shape."""
        device, stream = self.device, self.stream
        rows, times = [], {}
        with device.session(), device.using(stream):
            a, b = self._operands(problem, layout, seed)
            c = device.empty(problem.m, problem.n, problem.out_dtype)
            for i, variant in enumerate(variants):
                rows.append(self._row(variant, problem, layout))
                reason = compute_modes.refusal(variant, problem) or variant.refusal(
                    device=device.kind, dtype=compute_modes.dtype_for(variant, problem),
                    m=problem.m, n=problem.n, k=problem.k,
                )  # fmt: skip
                if reason is None:
                    reason = self._check(rows[i], variant, problem, a, b, c)
                if reason is None:
                    times[i] = [], self._sampler(variant, a, b, c)
                rows[i]["note"] = reason or ""
                advance(1)
            going = dict(times)
            while going:
                for i, (taken, sample) in list(going.items()):
                    taken.append(sample())
                    if self._enough(taken):
                        rows[i] |= device.readings()
                        del going[i]
        strict = problem.compute == "fp32" and problem.operands == problem.dtype
        peak = device.peak_tflops(problem.dtype) if strict else None
        for i, (taken, _sample) in times.items():
            median = statistics.median(taken)
            gflops = problem.flops / median / 1e6
            rows[i] |= {
                "time_ms": median, "min_ms": min(taken), "max_ms": max(taken),
                "samples": len(taken), "samples_ms": taken, "gflops": gflops,
                "percent_of_peak": gflops / peak / 10 if peak else None,
                "l2": "cold" if self.cold else "warm",
            }  # fmt: skip
        peers = ("cublas", "cublas_tf32")
        peer = next((r["time_ms"] for r in rows if r["kernel"] in peers), None)
        for row in rows:
            if peer and row["time_ms"]:
                row["ratio_to_cublas"] = peer / row["time_ms"]
        return rows

    def _enough(self, taken: list[float]) -> bool:
        if len(taken) >= self.samples or sum(taken) > ROW_MS:
            return True
        if len(taken) < LEAST_SAMPLES:
            return False
        low, median, high = statistics.quantiles(taken, n=4)
        # The median's standard error of a sample with this quartile range, if it is normal.
        return 0.93 * (high - low) / len(taken) ** 0.5 <= self.noise * median

    def _row(self, variant: Variant, problem: Problem, layout: str) -> dict:
        return dict.fromkeys(COLUMNS) | {
            "kernel": variant.name, "params": dict(variant.params), "m": problem.m,
            "n": problem.n, "k": problem.k, "dtype": problem.operands, "layout": layout,
            "data": self.data,
        }  # fmt: skip

    def _operands(self, problem: Problem, layout: str, seed: int) -> list:
        def draw(operand, rows, cols, fill="normal", dtype="float32"):
            host = generator.generate(
                rows, cols, dtype, seed=seed, operand=operand, fill=fill, threads=cores()
            )
            stored = self.device.empty(rows, cols, dtype)
            self.device.copy(stored, host, self.stream)
            self.stream.synchronize()
            return stored

        sides = {"A": (problem.m, problem.k), "B": (problem.k, problem.n)}
        if self.data == "normal":
            return [
                draw(x, *side, dtype=problem.operands) if order == "n"
                else draw(x, *side[::-1], dtype=problem.operands).T
                for (x, side), order in zip(sides.items(), layout, strict=True)
            ]  # fmt: skip
        made = accuracy.make(self.data, problem.m, problem.n, problem.k, draw)
        return [x if o == "n" else x.T.copy().T for x, o in zip(made, layout, strict=True)]

    def _check(self, row: dict, variant, problem, a, b, c) -> str | None:
        """Runs a variant once on a poisoned C; fills in the verdict."""
        c[...] = np.nan if is_float(c.dtype) else -(2**30)
        before = products.verdicts(self.device, problem)
        try:
            self._gemm(variant, a, b, c)
            self.stream.synchronize()
        except HybridGemmError as error:
            return str(error)
        row["compute"] = compute_modes.ran(
            variant, problem, products.verdicts(self.device, problem) - before
        )
        verdict = verify(problem, a, b, None, c)
        row["verdict"] = "passed" if verdict.passed else "FAILED"
        row["worst_error_of_bound"] = verdict.worst
        return None if verdict.passed else "wrong, so not timed"

    def _gemm(self, variant, a, b, c) -> None:
        self.device.gemm(variant, a, b, c, alpha=1, beta=0, stream=self.stream)

    def _sampler(self, variant, a, b, c) -> Callable[[], float]:
        """Takes one sample: enough products to fill it, launched as one where the device can."""

        def repeated(count):
            replay = self.device.repeated(lambda: self._gemm(variant, a, b, c), count, self.stream)
            return lambda: self._sample(replay, count)

        if self.device.kind != "cuda" or self.cold:
            return repeated(1)
        once = repeated(1)
        once()
        return repeated(max(1, min(1000, int(SAMPLE_MS / max(once(), 1e-3)))))

    def _sample(self, replay: Callable[[], None], count: int) -> float:
        """Milliseconds a product."""
        if self.cold:
            self.device.flush_cache(self.stream)
        self.device.start_clock()
        start = self.stream.record()
        replay()
        stop = self.stream.record()
        self.stream.synchronize()
        return (self.device.time_ms(stop) - self.device.time_ms(start)) / count


def as_csv(data: dict, columns: Sequence[str] = COLUMNS) -> str:
    """The rows with `columns` as the header."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in data["rows"]:
        writer.writerow(row | ({"params": _params(row)} if "params" in row else {}))
    return out.getvalue()


def _params(row: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in row["params"].items())


def show(data: dict) -> None:
    several = {x: len({row[x] for row in data["rows"]}) > 1 for x in ("dtype", "layout", "compute")}
    rows = [
        [
            row["kernel"], _params(row), f"{row['m']} x {row['n']} x {row['k']}",
            *(row[x] if several[x] else "" for x in ("dtype", "layout", "compute")),
            *(f"{row[c]:.4g}" if row[c] is not None else "" for c in ("time_ms", "min_ms")),
            f"{row['gflops']:.1f}" if row["gflops"] else "",
            f"{row['percent_of_peak']:.1f}" if row["percent_of_peak"] else "",
            f"{row['ratio_to_cublas']:.3f}" if row["ratio_to_cublas"] else "",
            row["verdict"] or "", row["note"],
        ]
        for row in data["rows"]
    ]  # fmt: skip
    console.table(
        ["<kernel", "<parameters", "m x n x k", "<dtype", "<layout", "<compute", "time ms",
         "min ms", "gflop/s", "% of peak", "of cuBLAS",
         "<verdict", "<note"],
        rows, title=data["device"]["name"],
    )  # fmt: skip
