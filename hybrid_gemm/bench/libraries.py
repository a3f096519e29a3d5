"""Products from host arrays to host arrays, ours and other libraries', side by side.

All multiply the same arrays in one run, in turn, so that what the machine does meanwhile falls
on all of them. cuBLASXt is tried with every block size and with and without pinning, and its
fastest settings take part; libraries that use one GPU take part where one is used. A way that is
given C is held against ours with `out=`, one that makes its own C against ours that does too;
every way's C is checked before it is timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ..arrays import generator
from ..devices import choose
from ..errors import HybridGemmError, UnavailableError, UsageError
from ..host.resources import cores
from ..planning import cost_model, link_rates
from ..planning.planner import cut
from ..problem import Problem
from ..reporting import console
from ..runner import Runner
from ..verify import verify

BLOCKS = (2048, 4096, 8192)  # of cuBLASXt
MEMORIES = ("pageable", "pinned")
RATE_SIZE = 16384  # the largest product that the GPUs' rate is taken from
BUDGET_S = 10.0  # a shape takes no further samples after so long
COLUMNS = (
    "way", "settings", "memory", "c", "gpus", "m", "n", "k", "dtype", "time_ms", "min_ms",
    "max_ms", "samples", "gflops", "ratio_to_ours", "bound_ms", "of_bound", "bound_by", "verdict",
    "worst_error_of_bound",
)  # fmt: skip


@dataclass
class Way:
    """One way to multiply: `call(a, b, c)` returns C, which is `c` where that is `given`."""

    name: str
    call: Callable
    given: bool = True
    gpus: int = 1
    settings: str = ""
    trials: list[dict] = field(default_factory=list)


def run(
    shapes: Sequence[tuple[int, int, int]], *, device: str = "auto",
    gpus: Sequence[int] | None = None, memories: Sequence[str] | None = None,
    dtype: str = "float32", samples: int = 5, seed: int = 0, progress=None,
    note: Callable[[str], None] = lambda text: None,
) -> dict:  # fmt: skip
    """Rows as plain data (`COLUMNS`): one a shape, kind of host memory and way.

    `memories` are of `MEMORIES` (default: both on GPUs, pageable alone elsewhere).
    """
    kind, why = choose(device)
    if why:
        note(f"device: {kind} ({why})")
    if kind == "emulator":
        raise UsageError("peers multiply on GPUs or on the cpu; the emulator has none")
    memories = memories or (MEMORIES if kind == "cuda" else MEMORIES[:1])
    if unknown := set(memories) - set(MEMORIES):
        raise UsageError(f"no host memory is called {unknown.pop()!r}; there are pageable, pinned")
    if "pinned" in memories and kind != "cuda":
        raise UnavailableError(f"pinned memory is for GPUs, and the device is {kind}")
    if dtype not in ("float32", "float64"):
        raise UsageError(f"--dtype {dtype!r}: peers multiply float32 and float64")
    if samples < 1:
        raise UsageError("samples are 1 or more")
    from ..devices.cuda import device as cuda

    gpus = list(range(cuda.count())) if gpus is None and kind == "cuda" else gpus
    runner = Runner(device=kind, gpus=gpus, threads=len(gpus) if gpus else None)
    advance = progress(len(shapes) * len(memories), "timing") if progress else lambda _: None
    rows = []
    with contextlib.ExitStack() as stack:
        bench = _Bench(runner, gpus or [], samples, seed, stack)
        for shape in shapes:
            rows += bench.shape(Problem(*shape, dtype), memories, advance)
    return {
        "device": {"kind": kind, "name": runner.describe(), "gpus": gpus},
        "links": link_rates.kept(cuda.uuids()) if kind == "cuda" else None,
        "rates_tflops": bench.rates,
        "rows": rows,
    }


class _Bench:
    def __init__(self, runner: Runner, gpus: list[int], samples: int, seed: int, stack):
        self.runner, self.gpus, self.samples, self.seed = runner, gpus, samples, seed
        self.rates: dict[str, float] = {}
        self.xt = stack.enter_context(CublasXt(gpus)) if gpus else None

    def shape(self, problem: Problem, memories, advance) -> list[dict]:
        m, n, k = problem.m, problem.n, problem.k
        dtype, rows = problem.dtype, []
        arrays = [
            generator.generate(*shape, dtype, seed=self.seed, operand=x, threads=cores())
            for x, shape in (("A", (m, k)), ("B", (k, n)))
        ]
        arrays.append(np.empty((m, n), dtype))
        check = Check(problem, *arrays[:2], self.gpus[0] if self.gpus else None)
        for memory in memories:
            if memory == "pinned":
                arrays = [_pinned(x) for x in arrays]
            bounds = self._bound(problem, pinned=memory == "pinned")
            for row in self._together(problem, memory, arrays, check):
                if bounds:
                    row["bound_by"] = max(bounds, key=bounds.get)
                    row["bound_ms"] = bounds[row["bound_by"]]
                    row["of_bound"] = row["time_ms"] / row["bound_ms"]
                rows.append(row)
            advance(1)
        return rows

    def _together(self, problem, memory, arrays, check) -> list[dict]:
        """The rows of one shape in one kind of memory."""
        a, b, c = arrays
        ways = self._ways(problem, memory, arrays)
        rows = []
        for way in ways:
            _by_parts(c, lambda part: part.fill(np.nan))
            verdict = check(way.call(a, b, c))
            rows.append(dict.fromkeys(COLUMNS) | {
                "way": way.name, "settings": way.settings, "memory": memory,
                "c": "given" if way.given else "fresh", "gpus": way.gpus or None,
                "m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype,
                "verdict": "passed" if verdict.passed else "FAILED",
                "worst_error_of_bound": verdict.worst, "trials": way.trials,
            })  # fmt: skip
        check.release()
        taken: list[list[float]] = [[] for _ in ways]
        started = time.perf_counter()
        for _ in range(self.samples):
            for way, times in zip(ways, taken, strict=True):
                times.append(_timed(way, *arrays))
            if time.perf_counter() - started > BUDGET_S:
                break
        ours = {w.given: statistics.median(t) for w, t in zip(ways[:2], taken[:2], strict=True)}
        for row, way, times in zip(rows, ways, taken, strict=True):
            median = statistics.median(times)
            row |= {
                "time_ms": median, "min_ms": min(times), "max_ms": max(times),
                "samples": len(times), "samples_ms": times,
                "gflops": problem.flops / median / 1e6,
                "ratio_to_ours": median / ours[way.given],
            }  # fmt: skip
        return rows

    def _ways(self, problem: Problem, memory: str, arrays) -> list[Way]:
        """Ours with a given and with a fresh C first, then the others that are here."""
        runner, many = self.runner, len(self.gpus)
        plan = runner.plan(problem)
        said = "{}, {} x {} x {}".format(plan.split, *plan.grid) if len(plan.workers) > 1 else ""
        found = [
            Way("ours", lambda a, b, c: runner.gemm(a, b, out=c), True, many, said),
            Way("ours", lambda a, b, c: runner.gemm(a, b), False, many, said),
        ]
        if not self.gpus:
            return [*found, Way("numpy a @ b", lambda a, b, c: np.matmul(a, b, out=c), True, 0),
                    Way("numpy a @ b", lambda a, b, c: a @ b, False, 0)]  # fmt: skip
        found.append(self._best_xt(memory, arrays))
        if many == 1:
            found.append(Way("cupy", _by_cupy(self.gpus[0]), given=False))
            if importlib.util.find_spec("torch"):
                found.append(Way("torch", _by_torch(self.gpus[0]), given=False))
        return found

    def _best_xt(self, memory: str, arrays) -> Way:
        """cuBLASXt with the settings that are fastest in a single run each."""
        pinning = (False, True) if memory == "pageable" else (False,)
        tried = []
        for block in BLOCKS:
            for pin in pinning:

                def call(a, b, c, block=block, pin=pin):
                    return self.xt.gemm(a, b, c, block=block, pin=pin)

                words = f"block {block}, pinning {'on' if pin else 'off'}"
                tried.append(Way("cublasxt", call, True, len(self.gpus), words))
        small = [x[:64, :64].copy() for x in arrays]
        tried[0].call(*small)  # the first call makes contexts
        times = [_timed(way, *arrays) for way in tried]
        best = tried[times.index(min(times))]
        best.trials = [
            {"settings": w.settings, "time_ms": ms} for w, ms in zip(tried, times, strict=True)
        ]
        return best

    def _bound(self, problem: Problem, *, pinned: bool) -> dict[str, float]:
        """The bound at the rate that the GPUs have in this run; empty without GPUs."""
        if not self.gpus:
            return {}
        size = min(max(problem.m, problem.n, problem.k), RATE_SIZE)
        key = f"{size} {problem.dtype}"
        if key not in self.rates:
            self.rates[key] = self._rate(Problem(size, size, size, problem.dtype))
        plan = self.runner.plan(problem)
        specs = tuple(dataclasses.replace(d, best_tflops=self.rates[key]) for d in plan.devices)
        return cost_model.bound(dataclasses.replace(plan, devices=specs), pinned=pinned)

    def _rate(self, problem: Problem) -> float:
        """TFLOP/s of our fastest kernel on the first GPU, with A, B and C there."""
        import cupy

        alone = Runner(device="cuda", gpus=self.gpus[:1])
        with cupy.cuda.Device(self.gpus[0]):
            draw = cupy.random.default_rng(self.seed).standard_normal
            a, b = (draw((problem.m, problem.n), problem.dtype) for _ in "AB")
            c = cupy.empty_like(a)
            times = [alone.run(a, b, out=c).total_ms for _ in range(4)]
            del a, b, c
            cupy.get_default_memory_pool().free_all_blocks()
        return problem.flops / statistics.median(times[1:]) / 1e9


class Check:
    """Verdicts on C; on a GPU where that has room, which takes seconds less for large ones."""

    def __init__(self, problem: Problem, a, b, gpu: int | None):
        self.problem, self.host, self.there = problem, (a, b), None
        self.gpu = None if gpu is None or not self._fits(gpu) else gpu

    def _fits(self, gpu: int) -> bool:
        import cupy

        p = self.problem
        with cupy.cuda.Device(gpu):
            free, _total = cupy.cuda.runtime.memGetInfo()
        # What is copied there, and B in float64 twice over.
        elements = p.m * p.k + p.k * p.n + p.m * p.n
        return elements * p.itemsize + 2 * 8 * p.k * p.n < 0.8 * free

    def __call__(self, c):
        if self.gpu is None:
            return verify(self.problem, *self.host, None, c)
        import cupy

        with cupy.cuda.Device(self.gpu):
            self.there = self.there or tuple(map(cupy.asarray, self.host))
            return verify(self.problem, *self.there, None, cupy.asarray(c))

    def release(self) -> None:
        """Gives the GPU's memory back before anything is timed."""
        if self.there:
            import cupy

            self.there = None
            cupy.get_default_memory_pool().free_all_blocks()


class CublasXt:
    """cuBLASXt over some GPUs: its own handle, closed at the end of a `with` block."""

    def __init__(self, gpus: Sequence[int]):
        from ..devices.cuda import cublas

        self.library, self.gpus = cublas.library(), gpus
        self.handle = ctypes.c_void_p()

    def __enter__(self):
        self._call("Create", ctypes.byref(self.handle))
        ordinals = (ctypes.c_int * len(self.gpus))(*self.gpus)
        self._call("DeviceSelect", self.handle, len(self.gpus), ordinals)
        return self

    def __exit__(self, *_error):
        self._call("Destroy", self.handle)

    def gemm(self, a, b, c, *, block: int, pin: bool):
        """c = a @ b for row-major host matrices: column-major C^T = B^T A^T, as cuBLAS reads."""
        self._call("SetBlockDim", self.handle, block)
        self._call("SetPinningMemMode", self.handle, int(pin))
        (m, k), n = a.shape, b.shape[1]
        one, zero = np.ones(1, c.dtype), np.zeros(1, c.dtype)
        size, at = ctypes.c_size_t, lambda x: ctypes.c_void_p(x.ctypes.data)
        self._call(
            "Sgemm" if c.dtype == np.float32 else "Dgemm", self.handle, 0, 0,
            size(n), size(m), size(k), at(one), at(b), size(n), at(a), size(k),
            at(zero), at(c), size(n),
        )  # fmt: skip
        return c

    def _call(self, name: str, *args) -> None:
        if status := getattr(self.library, f"cublasXt{name}")(*args):
            raise HybridGemmError(f"cublasXt{name} failed with cuBLAS status {status}")


def _by_cupy(gpu: int) -> Callable:
    import cupy

    def call(a, b, c):
        with cupy.cuda.Device(gpu):
            return (cupy.asarray(a) @ cupy.asarray(b)).get()

    return call


def _by_torch(gpu: int) -> Callable:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False

    def call(a, b, c):
        a, b = (torch.from_numpy(x).cuda(gpu) for x in (a, b))
        return (a @ b).cpu().numpy()

    return call


def _timed(way: Way, a, b, c) -> float:
    """Milliseconds; every call returns when C is whole in host memory."""
    started = time.perf_counter()
    made = way.call(a, b, c)
    ms = (time.perf_counter() - started) * 1e3
    del made
    return ms


def _pinned(array: np.ndarray) -> np.ndarray:
    from ..devices.cuda.pinned_memory import empty_pinned

    made = empty_pinned(array.shape, array.dtype)
    _by_parts(made, lambda part, there: np.copyto(part, there), array)
    return made


def _by_parts(array, work: Callable, *others) -> None:
    """`work` on the rows of equal arrays, by all cores."""
    with ThreadPoolExecutor(cores()) as pool:
        parts = [s.slice for s in cut(len(array), cores())]
        list(pool.map(lambda s: work(array[s], *(x[s] for x in others)), parts))


def show(data: dict) -> None:
    """The rows as a table, slowest last within each shape and memory."""
    rows = []
    for row in sorted(
        data["rows"], key=lambda r: (r["m"], r["n"], r["k"], r["memory"], r["time_ms"])
    ):
        rows.append([
            f"{row['m']} x {row['n']} x {row['k']}", row["memory"], row["way"], row["settings"],
            row["c"], row["gpus"] or "", f"{row['time_ms']:.4g}", f"{row['min_ms']:.4g}",
            f"{row['gflops']:.0f}", f"{row['ratio_to_ours']:.2f}",
            f"{row['of_bound']:.2f}" if row["of_bound"] else "", row["bound_by"] or "",
            row["verdict"],
        ])  # fmt: skip
    console.table(
        ["m x n x k", "<memory", "<way", "<settings", "<C", "GPUs", "time ms", "min ms", "gflop/s",
         "of ours", "of bound", "<bound by", "<verdict"],
        rows, title=f"host arrays to host arrays, {data['device']['name']}",
    )  # fmt: skip
