"""Products from host arrays to host arrays, ours and other libraries', side by side.

All multiply the same arrays in one run, in turn, so that what else the machine does meets all of
them. cuBLASXt is tried with every block size and with and without pinning, and its fastest
settings take part; libraries that use one GPU take part where one is used. A way that is given C
is compared with ours with `out=`, one that makes its own C with ours that does so too; every
way's C is checked before it is timed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .. import devices
from ..arrays.strides import Array
from ..devices.cuda import device as cuda
from ..errors import HybridGemmError, UnavailableError, UsageError
from ..host.resources import cores
from ..planning import cost_model, link_rates
from ..planning.partition import cut
from ..problem import Problem
from ..runner import Runner
from .study import Advance, Row, Shape, Table, check_memory, drawn_on_host, judged, sizes, table_of

BLOCKS = (2048, 4096, 8192)  # of cuBLASXt
MEMORIES = ("pageable", "pinned")
RATE_SIZE = 16384  # the largest product that the GPUs' rate is taken from
BUDGET_S = 10.0  # a shape takes no further samples after so long
Call = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # A, B, C -> C
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # A, B and room for C


@dataclass
class Way:
    """One way to multiply: `call(a, b, c)` returns C, which is `c` where that is `given`.

    `trials` are the settings that were tried to find `settings`, with their times.
    """

    name: str
    call: Call
    given: bool = True
    gpus: int = 1
    settings: str = ""
    trials: list[Row] = field(default_factory=list)


@dataclass
class LibraryStudy:
    """Times of whole products: a row a shape, kind of host memory and way.

    `memories` are of `MEMORIES` (default: both on GPUs, pageable alone on the cpu); `gpus` are
    ordinals (default: all). Raises `UsageError` and `UnavailableError` for what cannot be.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "way", "settings", "memory", "c", "gpus", "m", "n", "k", "dtype", "time_ms", "min_ms",
        "max_ms", "samples", "gflops", "ratio_to_ours", "bound_ms", "of_bound", "bound_by",
        "verdict", "worst_error_of_bound",
    )  # fmt: skip

    shapes: Sequence[Shape]
    device: str = "auto"
    gpus: Sequence[int] | None = None
    memories: Sequence[str] | None = None
    dtype: str = "float32"
    samples: int = 5
    seed: int = 0
    kind: str = field(init=False)
    device_note: str = field(init=False)
    runner: Runner = field(init=False)
    rates: dict[str, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.kind, why = devices.choose(self.device)
        self.device_note = f"device: {self.kind} ({why})" if why else ""
        self._check()
        on_gpus = devices.are_gpus(self.kind)
        self.memories = self.memories or (MEMORIES if on_gpus else MEMORIES[:1])
        if self.gpus is None:
            self.gpus = range(cuda.count()) if on_gpus else ()
        self.gpus = list(self.gpus)
        self.runner = Runner(
            device=self.kind, gpus=self.gpus or None, threads=len(self.gpus) or None
        )

    def _check(self) -> None:
        if self.kind == "emulator":
            raise UsageError("libraries multiply on GPUs or on the cpu; the emulator has none")
        if unknown := set(self.memories or ()) - set(MEMORIES):
            raise UsageError(
                f"no host memory is called {unknown.pop()!r}; there are {', '.join(MEMORIES)}"
            )
        if "pinned" in (self.memories or ()) and not devices.are_gpus(self.kind):
            raise UnavailableError(f"pinned memory is for GPUs, and the device is {self.kind}")
        if self.dtype not in ("float32", "float64"):
            raise UsageError(f"--dtype {self.dtype!r}: libraries multiply float32 and float64")
        if self.samples < 1:
            raise UsageError(f"samples={self.samples}: it takes at least 1")
        check_memory(self.shapes, np.dtype(self.dtype).itemsize)

    @property
    def steps(self) -> int:
        """One a shape and kind of memory."""
        return len(self.shapes) * len(self.memories or ())

    def about(self) -> dict[str, Any]:
        """Device and GPUs, the links as they were measured, and the GPUs' rates in this run."""
        name = self.runner.describe()
        return {
            "device": {"kind": self.kind, "name": name, "gpus": list(self.gpus or ()) or None},
            "links": link_rates.kept(cuda.uuids()) if self.gpus else None,
            "rates_tflops": self.rates,
        }

    def rows(self, advance: Advance) -> Iterator[Row]:
        """Multiplies each shape in each kind of memory in every way."""
        gpus = list(self.gpus or ())
        with contextlib.ExitStack() as stack:
            xt = stack.enter_context(CublasXt(gpus)) if gpus else None
            for shape in self.shapes:
                yield from self._shape(Problem(*shape, self.dtype), xt, advance)

    def _shape(self, problem: Problem, xt: CublasXt | None, advance: Advance) -> Iterator[Row]:
        m, n, k = problem.m, problem.n, problem.k
        a, b = drawn_on_host(m, n, k, problem.dtype, self.seed)
        c = np.empty((m, n), problem.dtype)
        check = Check(problem, a, b, self.gpus[0] if self.gpus else None)
        for memory in self.memories or ():
            if memory == "pinned":
                a, b, c = map(_pinned, (a, b, c))
            bounds = self._bounds(problem, pinned=memory == "pinned")
            for row in self._together(problem, memory, xt, (a, b, c), check):
                if bounds:
                    row["bound_ms"], row["bound_by"] = max((ms, by) for by, ms in bounds.items())
                    row["of_bound"] = row["time_ms"] / row["bound_ms"]
                yield row
            advance(1)

    def _together(
        self, problem: Problem, memory: str, xt: CublasXt | None, arrays: Arrays, check: Check
    ) -> list[Row]:
        """The rows of one shape in one kind of memory: all are checked, then timed in turn."""
        a, b, c = arrays
        ways = [*self.ours(problem, pinned=memory == "pinned"), *others(xt, memory, arrays)]
        rows = []
        for way in ways:
            _by_parts(c, lambda part: part.fill(np.nan))
            rows.append(dict.fromkeys(self.columns) | {
                "way": way.name, "settings": way.settings, "memory": memory,
                "c": "given" if way.given else "fresh", "gpus": way.gpus or None,
                "m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype,
                **check(way.call(a, b, c)), "trials": way.trials,
            })  # fmt: skip
        check.release()
        taken = self._times(ways, arrays)
        medians = [statistics.median(times) for times in taken]
        # Ours stand first: with a given C, and with a fresh one.
        ours = {way.given: ms for way, ms in zip(ways[:2], medians[:2], strict=True)}
        for row, way, times, median in zip(rows, ways, taken, medians, strict=True):
            row |= {
                "time_ms": median, "min_ms": min(times), "max_ms": max(times),
                "samples": len(times), "samples_ms": times,
                "gflops": problem.flops / median / 1e6,
                "ratio_to_ours": median / ours[way.given],
            }  # fmt: skip
        return rows

    def _times(self, ways: Sequence[Way], arrays: Arrays) -> list[list[float]]:
        """Samples in ms of each way, in turn, until there are enough or the time is up."""
        taken: list[list[float]] = [[] for _ in ways]
        started = time.perf_counter()
        for _ in range(self.samples):
            for way, times in zip(ways, taken, strict=True):
                times.append(timed(way, arrays))
            if time.perf_counter() - started > BUDGET_S:
                break
        return taken

    def ours(self, problem: Problem, *, pinned: bool) -> list[Way]:
        """Ours with a given C, then with a fresh one, which is pageable."""
        runner, many = self.runner, len(self.gpus or ())

        def said(page_locked: bool) -> str:
            plan = runner.plan(problem, page_locked=page_locked)
            several = len(plan.workers) > 1
            return "{}, {} x {} x {}".format(plan.split, *plan.grid) if several else ""

        return [
            Way("ours", lambda a, b, c: runner.gemm(a, b, out=c), True, many, said(pinned)),
            Way("ours", lambda a, b, c: runner.gemm(a, b), False, many, said(False)),
        ]

    def _bounds(self, problem: Problem, *, pinned: bool) -> dict[str, float]:
        """Lower bounds of the time in ms, by what sets them, at the rate that the GPUs have in
        this run; empty without GPUs."""
        if not self.gpus:
            return {}
        size = min(max(problem.m, problem.n, problem.k), RATE_SIZE)
        key = f"{size} {problem.dtype}"
        if key not in self.rates:
            self.rates[key] = self._rate(Problem(size, size, size, problem.dtype), self.gpus[0])
        plan = self.runner.plan(problem, page_locked=pinned)
        specs = tuple(dataclasses.replace(d, best_tflops=self.rates[key]) for d in plan.devices)
        return cost_model.bound(dataclasses.replace(plan, devices=specs))

    def _rate(self, problem: Problem, gpu: int) -> float:
        """TFLOP/s of our fastest kernel on one GPU, with A, B and C there."""
        import cupy

        alone = Runner(device="cuda", gpus=[gpu])
        with cupy.cuda.Device(gpu):
            draw = cupy.random.default_rng(self.seed).standard_normal
            a, b = (draw((problem.m, problem.n), problem.dtype) for _ in "AB")
            c = cupy.empty_like(a)
            times = [alone.run(a, b, out=c).total_ms for _ in range(4)]
            del a, b, c
            cupy.get_default_memory_pool().free_all_blocks()
        return problem.flops / statistics.median(times[1:]) / 1e9

    @staticmethod
    def table(data: Mapping[str, Any]) -> Table:
        """A line a row, the slowest last within each shape and memory."""
        order = ("m", "n", "k", "memory", "time_ms")
        ordered = sorted(data["rows"], key=lambda r: [r[x] for x in order])
        return table_of(
            ordered, f"host arrays to host arrays, {data['device']['name']}", sizes(ordered),
            ("<memory", "memory"), ("<way", "way"), ("<settings", "settings"), ("<C", "c"),
            ("GPUs", "gpus"), ("time ms", "time_ms", ".4g"), ("min ms", "min_ms", ".4g"),
            ("gflop/s", "gflops", ".0f"), ("time / ours", "ratio_to_ours", ".2f"),
            ("of bound", "of_bound", ".2f"), ("<bound by", "bound_by"), ("<verdict", "verdict"),
        )  # fmt: skip


class Check:
    """Verdicts on C = A @ B; on a GPU where that has room, which takes seconds less for large
    matrices."""

    def __init__(self, problem: Problem, a: np.ndarray, b: np.ndarray, gpu: int | None) -> None:
        self.problem, self._host = problem, (a, b)
        self._there: tuple[Array, Array] | None = None
        self._gpu = None if gpu is None or not self._fits(gpu) else gpu

    def _fits(self, gpu: int) -> bool:
        import cupy

        p = self.problem
        with cupy.cuda.Device(gpu):
            free, _total = cupy.cuda.runtime.memGetInfo()
        # What is copied there, and B in float64 twice over.
        elements = p.m * p.k + p.k * p.n + p.m * p.n
        return bool(elements * p.itemsize + 2 * 8 * p.k * p.n < 0.8 * free)

    def __call__(self, c: np.ndarray) -> Row:
        """The verdict on `c`, an array of the host, as columns of a row."""
        a, b = self._host
        if self._gpu is None:
            return judged(self.problem, a, b, c)
        import cupy

        with cupy.cuda.Device(self._gpu):
            if self._there is None:
                self._there = cupy.asarray(a), cupy.asarray(b)
            return judged(self.problem, *self._there, cupy.asarray(c))

    def release(self) -> None:
        """Frees what the checks keep on the GPU, before anything is timed."""
        if self._there is not None:
            import cupy

            self._there = None
            cupy.get_default_memory_pool().free_all_blocks()


def others(xt: CublasXt | None, memory: str, arrays: Arrays) -> list[Way]:
    """Each other library's way to multiply arrays in this kind of host memory: NumPy's, or on the
    GPUs of cuBLASXt that, CuPy's and PyTorch's."""
    if xt is None:
        return [Way("numpy a @ b", lambda a, b, c: np.matmul(a, b, out=c), True, 0),
                Way("numpy a @ b", lambda a, b, c: a @ b, False, 0)]  # fmt: skip
    found = [xt.fastest(memory, arrays)]
    if len(xt.gpus) == 1:
        makers = {"cupy": _by_cupy}
        if importlib.util.find_spec("torch"):
            makers["torch"] = _by_torch
        found += [
            Way(name, make(xt.gpus[0], given), given)
            for name, make in makers.items()
            for given in (True, False)
        ]
    return found


class CublasXt:
    """cuBLASXt over some GPUs: its own handle, closed at the end of a `with` block.

    Raises `HybridGemmError` with the status of a call that fails.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        from ..devices.cuda import cublas

        self.library, self.gpus = cublas.library(), gpus
        self.handle = ctypes.c_void_p()

    def __enter__(self) -> CublasXt:
        self._call("Create", ctypes.byref(self.handle))
        ordinals = (ctypes.c_int * len(self.gpus))(*self.gpus)
        self._call("DeviceSelect", self.handle, len(self.gpus), ordinals)
        return self

    def __exit__(self, *_error: object) -> None:
        self._call("Destroy", self.handle)

    def gemm(
        self, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, block: int, pin: bool
    ) -> np.ndarray:
        """c = a @ b for row-major host matrices: column-major C^T = B^T A^T, as cuBLAS reads.

        `block` is the side of the blocks that it cuts matrices into; `pin` has it page-lock them.
        """
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

    def fastest(self, memory: str, arrays: Arrays) -> Way:
        """It with the settings that are fastest in a single run each."""

        def call(block: int, pin: bool) -> Call:
            return lambda a, b, c: self.gemm(a, b, c, block=block, pin=pin)

        tried = [
            Way("cublasxt", call(block, pin), True, len(self.gpus),
                f"block {block}, pinning {'on' if pin else 'off'}")
            for block in BLOCKS
            for pin in ((False, True) if memory == "pageable" else (False,))
        ]  # fmt: skip
        a, b, c = (x[:64, :64].copy() for x in arrays)
        tried[0].call(a, b, c)  # the first call makes contexts
        times = [timed(way, arrays) for way in tried]
        best = tried[times.index(min(times))]
        best.trials = [
            {"settings": w.settings, "time_ms": ms} for w, ms in zip(tried, times, strict=True)
        ]
        return best

    def _call(self, name: str, *args: object) -> None:
        if status := getattr(self.library, f"cublasXt{name}")(*args):
            raise HybridGemmError(f"cublasXt{name} failed with cuBLAS status {status}")


def _by_cupy(gpu: int, given: bool) -> Call:
    import cupy

    def call(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        with cupy.cuda.Device(gpu):
            return (cupy.asarray(a) @ cupy.asarray(b)).get(out=c if given else None)

    return call


def _by_torch(gpu: int, given: bool) -> Call:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False

    def call(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        x, y = (torch.from_numpy(host).cuda(gpu) for host in (a, b))
        if not given:
            return (x @ y).cpu().numpy()
        torch.from_numpy(c).copy_(x @ y)
        return c

    return call


def timed(way: Way, arrays: Arrays) -> float:
    """Milliseconds of one product; every call returns when C is whole in host memory."""
    started = time.perf_counter()
    made = way.call(*arrays)
    ms = (time.perf_counter() - started) * 1e3
    del made
    return ms


def _pinned(array: np.ndarray) -> np.ndarray:
    """A copy in page-locked memory."""
    from ..devices.cuda.pinned_memory import empty_pinned

    made = empty_pinned(array.shape, array.dtype)
    _by_parts(made, lambda part, there: np.copyto(part, there), array)
    return made


def _by_parts(array: np.ndarray, work: Callable[..., None], *others: np.ndarray) -> None:
    """`work` on the rows of equal arrays, by all cores."""
    with ThreadPoolExecutor(cores()) as pool:
        parts = [s.slice for s in cut(len(array), cores())]
        list(pool.map(lambda s: work(array[s], *(x[s] for x in others)), parts))
