"""The Python surface: `gemm`, `matmul`, `plan`, and `Runner` for repeated calls."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import catalog, devices, planner, tuning
from .catalog import Variant
from .devices.base import layout as layout_of
from .errors import DTypeError, UsageError
from .problem import Problem, make_problem
from .runtime.threads import Matrix, ThreadRun
from .runtime.timeline import Timeline
from .strassen import Strassen

ALGORITHMS = ("ordinary", "strassen")
# What `kernel="auto"` takes where nothing is tuned: the first that can run the problem.
AUTO = {"cpu": ("blas",), "emulator": ("double_buffered", "shared_tile", "naive")}


@dataclass(frozen=True)
class Result:
    """What a run gave: C, and what was done to get it."""

    c: Any
    plan: planner.Plan
    variant: Variant
    timeline: Timeline
    total_ms: float
    reduction: str
    why: str = ""

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations a second over the whole run."""
        return self.plan.problem.flops / self.total_ms / 1e6 if self.total_ms else 0.0


class Runner:
    """Repeated products with the same choices; keeps devices and compiled kernels.

    device: "auto" (cuda if a GPU is here, else cpu), "cuda", "cpu" or "emulator".
    threads: workers; default one a device.
    split: "rows", "cols" (K) or "auto". reduce: "ordered" or "critical" (the lab's way).
    gpus: CUDA ordinals. emulate_devices: one GPU plays so many.
    kernel, params: a name of the catalog and its parameters; "auto" takes the fastest known for
    the shape, cuBLAS included, "own" the fastest of our own, and both say which it was.
    algorithm: "ordinary", or "strassen" with so many `levels` over that kernel.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        threads: int | None = None,
        split: str = "auto",
        reduce: str = "ordered",
        gpus: Sequence[int] | None = None,
        emulate_devices: int | None = None,
        kernel: str = "auto",
        params: Mapping[str, int] | None = None,
        algorithm: str = "ordinary",
        levels: int = 1,
    ):
        if algorithm not in ALGORITHMS:
            raise UsageError(
                f"no algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}"
            )
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} threads asked for; it takes at least 1")
        if kernel in ("auto", "own") and params:
            raise UsageError("parameters need a kernel: name it beside them")
        self.own = kernel == "own"
        self.chosen = None
        if kernel not in ("auto", "own"):
            self.chosen = catalog.get(kernel).variant(params)
        self.kind, self.note = devices.choose(device)
        wanted = threads or emulate_devices or 1
        self.devices = devices.open_devices(self.kind, wanted, gpus=gpus, emulate=emulate_devices)
        if algorithm == "strassen":
            self.devices = [Strassen(device, levels) for device in self.devices]
        self.threads = threads or max(len(self.devices), emulate_devices or 1)
        self.split, self.reduce = split, reduce
        self._direct = None
        if self.kind == "cuda" and self.threads == 1 and algorithm == "ordinary":
            from .direct import Direct

            self._direct = Direct(self.devices[0], self._choose)

    def plan(self, problem: Problem, *, resident: bool = False) -> planner.Plan:
        """The plan for a problem on these devices; `resident` if A, B and C lie there."""
        return planner.make_plan(
            problem,
            [device.spec() for device in self.devices],
            self.threads,
            split=self.split,
            kernel=str(self.chosen or "auto"),
            reduce=self.reduce,
            resident=resident,
        )

    def variant(self, plan: planner.Plan, layout: str = "nn") -> Variant:
        """The kernel for a plan. Raises `UsageError` if the one asked for cannot run it."""
        return self.choice(plan, layout)[0]

    def choice(self, plan: planner.Plan, layout: str = "nn") -> tuple[Variant, str]:
        """The kernel for a plan of operands in this layout, and why it is this one."""
        problem = plan.problem
        boxes = {tuple(map(len, (b.rows, b.cols, b.ks))) for w in plan.workers for b in w.boxes}
        if self.kind == "cuda" and not self.chosen and boxes:
            m, n, k = max(boxes, key=math.prod)
            box = dataclasses.replace(problem, m=m, n=n, k=k)
            return tuning.choose(self.devices[0].machine(problem.dtype), box, layout, own=self.own)
        names = AUTO.get(self.kind, ("naive",))
        candidates = [self.chosen] if self.chosen else [catalog.get(n).variant() for n in names]
        reasons = []
        for variant in candidates:
            refusals = (
                variant.refusal(device=self.kind, dtype=problem.dtype, m=m, n=n, k=k)
                for m, n, k in boxes
            )
            reason = next(filter(None, refusals), None)
            if reason is None:
                return variant, "asked for" if self.chosen else "the first that can"
            reasons.append(reason)
        raise UsageError("; ".join(reasons))

    def run(
        self,
        a,
        b,
        c=None,
        /,
        *,
        alpha=1.0,
        beta=0.0,
        trans_a: bool = False,
        trans_b: bool = False,
        out=None,
        resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Result:
        """As `gemm`, returning a `Result` with the plan and the timeline beside C.

        With `resident`, the clock runs only from when every block is on its device until every
        strip of C is finished there.
        """
        a, b = as_matrix(a), as_matrix(b)
        c = None if c is None else as_matrix(c)
        problem = make_problem(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b)
        op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
        if problem.k == 0 or problem.alpha == 0:  # as in BLAS, A and B are not read
            problem = dataclasses.replace(problem, k=0, alpha=0)
            op_a, op_b = op_a[:, :0], op_b[:0]
        inputs = [x for x in (a, b, c) if x is not None]
        on_gpu = any(is_device_array(x) for x in inputs)
        if on_gpu and self.kind != "cuda":
            raise DTypeError(f"arrays on a GPU were given, and the device is {self.kind}")
        if out is None:
            xp = _module_of(next(x for x in inputs if is_device_array(x))) if on_gpu else np
            out = xp.empty((problem.m, problem.n), problem.out_dtype)
        else:
            c = _check_out(out, problem, a, b, c)
        there = all(map(is_device_array, [*inputs, out]))
        plan = self.plan(problem, resident=resident or there)
        layouts = "".join((layout_of(x) or "n")[0] for x in (op_a, op_b))
        variant, why = self.choice(plan, layouts)
        if on_gpu:  # the caller's stream may still be writing the inputs
            _module_of(
                next(filter(is_device_array, inputs))
            ).cuda.get_current_stream().synchronize()
        if not (problem.m and problem.n):
            return Result(out, plan, variant, Timeline(), 0.0, self._reduction(plan), why)
        wrapped = [None if x is None else self._matrix(x) for x in (op_a, op_b, c)]
        target = wrapped[2] if c is out else self._matrix(out)
        for device in self.devices:
            device.prepare(variant, wrapped[0].array, wrapped[1].array, problem.dtype)
        run = ThreadRun(plan, self.devices, variant, *wrapped, target, progress, resident=resident)
        timeline = run.run()
        return Result(out, plan, variant, timeline, run.total_ms, self._reduction(plan), why)

    def gemm(self, a, b, c=None, /, **options):
        """alpha * op(A) @ op(B) + beta * C; see `hybrid_gemm.gemm`.

        With one worker, arrays on its GPU are multiplied on the caller's current stream.
        """
        if self._direct is not None:
            done = self._direct(a, b, c, **options)
            if done is not None:
                return done
        return self.run(a, b, c, **options).c

    def _choose(self, problem: Problem, layout: str) -> Variant:
        return self.variant(self.plan(problem, resident=True), layout)

    def describe(self) -> str:
        """The devices in a few words, and why they were chosen."""
        names = ", ".join(device.describe() for device in self.devices)
        return f"{names} ({self.note})" if self.note else names

    def _matrix(self, array) -> Matrix:
        if not is_device_array(array):
            return Matrix(array)
        ordinal = array.device.id
        home = next((d for d in self.devices if d.ordinal == ordinal), None)
        if home is None:
            home = devices.open_devices("cuda", 1, gpus=[ordinal])[0]
        return Matrix(array, home)

    def _reduction(self, plan: planner.Plan) -> str:
        """How partials were summed, in words."""
        if not plan.summed:
            return "none"
        if plan.reduce == "critical":
            return "critical (one worker at a time, through host memory)"
        across = " after peer copies" if plan.bytes_peer else ""
        return f"ordered sum on the device{across}"


def gemm(
    a,
    b,
    c=None,
    /,
    *,
    alpha=1.0,
    beta=0.0,
    trans_a: bool = False,
    trans_b: bool = False,
    out=None,
    split: str = "auto",
    threads: int | None = None,
    device: str = "auto",
    gpus: Sequence[int] | None = None,
    emulate_devices: int | None = None,
    kernel: str = "auto",
    params: Mapping[str, int] | None = None,
    reduce: str = "ordered",
    algorithm: str = "ordinary",
    levels: int = 1,
    comm=None,
    **across,
):
    """alpha * op(A) @ op(B) + beta * C, split over workers.

    `a` (m x k, or k x m with trans_a), `b` (k x n, or n x k with trans_b) and `c` (m x n) are
    2-D arrays of float16, float32, float64 or integers, in any strides or byte order: NumPy
    arrays, or arrays on a GPU (`__cuda_array_interface__` or DLPack). The result is a new
    array of NumPy's promoted dtype, or `out`, which may be `c` itself. As in BLAS, C is not
    read where beta is 0, nor A and B where alpha is 0. The other options are `Runner`'s.

    With `comm`, an mpi4py communicator, the product is split over its ranks, which all call
    this; `threads` then counts each rank's. `distribution` says where the arrays are:
    "replicated" (each rank passes all of A, B, C), "root" (rank `root` does, the others None),
    "rows" (each rank passes its rows of op(A) and C, and all of B) or "cols" (its columns of
    op(A) and rows of op(B), and its rows of C). `result` says where C is wanted: "replicated",
    "root" or "rows"; default as A came, and rows for "cols". `transport`, `grid` and `rounds`
    are `RankRunner`'s, which is for repeated products.

    Raises ValueError on shapes and choices that do not fit, TypeError on dtypes.
    """
    a, b = (None if comm is not None and x is None else as_matrix(x) for x in (a, b))
    if device == "auto" and (there := [x for x in (a, b) if is_device_array(x)]):
        device, gpus = "cuda", gpus or (there[0].device.id,)
    if across and comm is None:
        raise TypeError(f"{next(iter(across))} is for products over ranks: pass comm too")
    if comm is not None:
        from . import distributed

        return distributed.gemm(
            a, b, c, comm=comm, across=across,
            product={"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b,
                     "out": out},
            runner={"split": split, "threads": threads, "device": device, "gpus": gpus,
                    "emulate_devices": emulate_devices, "kernel": kernel, "params": params,
                    "reduce": reduce, "algorithm": algorithm, "levels": levels},
        )  # fmt: skip
    runner = _runner(
        device, threads, split, reduce, None if gpus is None else tuple(gpus), emulate_devices,
        kernel, tuple(sorted((params or {}).items())), algorithm, levels,
    )  # fmt: skip
    return runner.gemm(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, out=out)


@functools.lru_cache(maxsize=8)
def _runner(
    device, threads, split, reduce, gpus, emulate_devices, kernel, params, algorithm, levels
) -> Runner:
    return Runner(
        device=device, threads=threads, split=split, reduce=reduce, gpus=gpus,
        emulate_devices=emulate_devices, kernel=kernel, params=dict(params),
        algorithm=algorithm, levels=levels,
    )  # fmt: skip


def matmul(a, b, /, out=None, **options):
    """a @ b for 2-D arrays; `options` are those of `gemm`."""
    return gemm(a, b, out=out, **options)


def plan(m: int, n: int, k: int, *, dtype="float32", alpha=1.0, beta=0.0, **options):
    """The plan that `gemm` would follow for these sizes; `options` are `Runner`'s."""
    from .problem import check_dtype, compute_dtype

    dtype = check_dtype(dtype, "dtype")
    problem = Problem(m, n, k, compute_dtype(dtype), alpha, beta, dtype.name)
    return Runner(**options).plan(problem)


# --- arrays -------------------------------------------------------------------------------


def is_device_array(x) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy"


def _module_of(x):
    import cupy

    return cupy if is_device_array(x) else np


def as_matrix(x):
    """NumPy arrays and CuPy arrays as they are; others by their protocol, or by np.asarray."""
    if isinstance(x, np.ndarray) or is_device_array(x):
        return x
    if hasattr(x, "__cuda_array_interface__"):
        import cupy

        return cupy.asarray(x)
    if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in (2, 13):  # CUDA
        import cupy

        return cupy.from_dlpack(x)
    return np.asarray(x)


def _check_out(out, problem: Problem, a, b, c):
    """`c`, or `out` in its place where they are the same matrix; raises if `out` is unfit."""
    if not (isinstance(out, np.ndarray) or is_device_array(out)):
        raise DTypeError(f"out must be a NumPy or CuPy array, not {type(out).__name__}")
    if tuple(out.shape) != (problem.m, problem.n):
        raise UsageError(
            f"out has shape {tuple(out.shape)}; this product is ({problem.m}, {problem.n})"
        )
    if not np.can_cast(problem.out_dtype, out.dtype, "same_kind"):
        raise DTypeError(
            f"out has dtype {out.dtype}; the product has dtype {problem.out_dtype}, which "
            "does not cast to it"
        )
    if not isinstance(out, np.ndarray):
        shares = _module_of(out).shares_memory
    else:
        if not out.flags.writeable:
            raise UsageError("out is read-only")
        shares = _shares_memory
    for name, x in (("A", a), ("B", b)):
        if type(x) is type(out) and shares(x, out):
            raise UsageError(f"out overlaps {name}; give it memory of its own")
    if c is not None and type(c) is type(out) and shares(c, out):
        same = c.dtype == out.dtype and c.strides == out.strides
        start = (lambda x: x.ctypes.data) if isinstance(out, np.ndarray) else (lambda x: x.data.ptr)
        if not (same and start(c) == start(out)):
            raise UsageError("out overlaps C without being C; give it memory of its own, or C")
        return out
    return c


def _shares_memory(x, y) -> bool:
    try:
        return np.shares_memory(x, y, max_work=10**5)
    except np.exceptions.TooHardError:
        return True
