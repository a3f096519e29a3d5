"""`Runner`: products with the same choices again and again, on one machine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import catalog, devices
from .arrays.caller_arrays import (
    as_matrix,
    check_device,
    check_out,
    is_device_array,
    module_of,
    wait_for_streams,
)
from .arrays.strides import layout as layout_of
from .arrays.strides import leading
from .catalog import Variant
from .devices import tensor_core_products as products
from .devices.cuda import nccl_group
from .devices.strassen import Strassen
from .errors import UnavailableError, UsageError
from .execution.plan_run import Matrix, ThreadRun
from .execution.timeline import Timeline
from .kernel_choice import compute_modes, nearest_measured
from .planning import planner
from .problem import Problem, make_problem

ALGORITHMS = ("ordinary", "strassen")
MAX_PLANS = 256  # remembered
SMALLER = 0.7  # of the memory planned with, where that was not there
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
    compute: str = ""  # what was computed, in words

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations a second over the whole run."""
        return self.plan.problem.flops / self.total_ms / 1e6 if self.total_ms else 0.0


class Runner:
    """Repeated products with the same choices; keeps devices and compiled kernels.

    device: "auto" (cuda if a GPU is here, else cpu), "cuda", "cpu" or "emulator".
    threads: workers; default one a device, of several GPUs as many as are worth starting.
    split: "rows", "cols" (K) or "auto". reduce: "ordered", "nccl" (each panel by NCCL, a worker
    a GPU) or "critical" (the lab's way).
    gpus: CUDA ordinals. emulate_devices: one GPU plays so many.
    kernel, params: a name of the catalog and its parameters; "auto" takes the fastest known for
    the shape, cuBLAS included, "own" the fastest of our own, and both say which it was.
    compute: how float32 is multiplied: "fp32" (strict), "fp32x3" (as accurate, on tensor cores),
    "tf32", or "auto" (fp32x3 where there are tensor cores). docs/tensor-cores.md has the rest.
    algorithm: "ordinary", or "strassen" with so many `levels` over that kernel.
    grid: (pm, pn, pk), how the workers cut m, n and k; default by `split`.
    max_device_memory: bytes of each device's memory that a product may take at most; what does
    not fit is done in turns.
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
        grid: Sequence[int] | None = None,
        max_device_memory: int | None = None,
        compute: str = "fp32",
    ):
        if algorithm not in ALGORITHMS:
            raise UsageError(
                f"no algorithm is called {algorithm!r}; there are {', '.join(ALGORITHMS)}"
            )
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} threads asked for; it takes at least 1")
        if max_device_memory is not None and max_device_memory < 1:
            raise UsageError(f"max_device_memory is {max_device_memory}; it takes bytes")
        if kernel in ("auto", "own") and params:
            raise UsageError("parameters need a kernel: name it beside them")
        self.own = kernel == "own"
        self.chosen = None
        if kernel not in ("auto", "own"):
            self.chosen = catalog.get(kernel).variant(params)
        self.kind, self.note = devices.choose(device)
        wanted = threads or emulate_devices or 1
        self.devices = devices.open_devices(self.kind, wanted, gpus=gpus, emulate=emulate_devices)
        self.arithmetic = compute_modes.choose(
            compute, self.chosen, kind=self.kind, arch=self.devices[0].capability
        )
        if algorithm == "strassen":
            self.devices = [Strassen(device, levels) for device in self.devices]
        self.threads = threads or max(len(self.devices), emulate_devices or 1)
        self.grid = None if grid is None else tuple(grid)
        if self.grid and threads is None:
            self.threads = math.prod(self.grid)
        self.max_device_memory = max_device_memory
        self._plans: dict = {}
        self.split, self.reduce, self.algorithm = split, reduce, algorithm
        named = threads or gpus or emulate_devices or grid or (split, reduce) != ("auto", "ordered")
        self._counts = (self.threads,)  # workers that a plan may have
        if self.kind == "cuda" and not named:
            self._counts = (*(1 << i for i in range((self.threads - 1).bit_length())), self.threads)
        self._direct = {}  # by the GPU that has the arrays
        if self.kind == "cuda" and algorithm == "ordinary" and self._counts[0] == 1:
            from .execution.single_gpu import Direct

            for opened in self.devices if not named else self.devices[:1]:
                self._direct[opened.ordinal] = Direct(opened, self)

    def plan(
        self, problem: Problem, *, resident: bool = False, homes: planner.Homes = planner.NOWHERE
    ) -> planner.Plan:
        """The plan for a problem on these devices; `resident` if A, B and C are there when it
        begins, `homes` the devices whose memory they were given in."""
        return self._plan(problem, resident, self.max_device_memory, homes)

    def specs(self, dtype: str = "float32", most: int | None = None) -> tuple:
        """What the devices are, with the memory that products may take."""
        limits = [x for x in (most, self.max_device_memory) if x]
        return tuple(
            dataclasses.replace(spec, memory_bytes=min(spec.memory_bytes, *limits))
            if limits
            else spec
            for spec in (device.spec(dtype) for device in self.devices)
        )

    def _plan(
        self, problem: Problem, resident: bool, most: int | None, homes: planner.Homes
    ) -> planner.Plan:
        specs = self.specs(problem.dtype, most)
        plan, needs = self._plans.get((problem, resident, homes), (None, ()))
        if plan and all(x <= s.memory_bytes for x, s in zip(needs, specs, strict=True)):
            return plan  # as good as ever, since it still fits
        plan = planner.make_plan(
            problem,
            specs,
            self._counts,
            split=self.split,
            grid=self.grid,
            kernel=str(self.chosen or "auto"),
            reduce=self.reduce,
            resident=resident,
            homes=homes,
        )
        if plan.reduce == "nccl" and plan.summed and (reason := nccl_group.unavailable()):
            raise UnavailableError(
                f"the nccl reduction was asked for: {reason}; the ordered one works here"
            )
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        if not plan.turns_in_memory:  # turns are made for the memory that there is now
            self._plans[problem, resident, homes] = plan, planner.memory_needs(plan)
        return plan

    def variant(self, plan: planner.Plan, layout: str = "nn") -> Variant:
        """The kernel for a plan. Raises `UsageError` if the one asked for cannot run it."""
        return self.choice(plan, layout)[0]

    def choice(self, plan: planner.Plan, layout: str = "nn") -> tuple[Variant, str]:
        """The kernel for a plan of operands in this layout, and why it is this one."""
        problem = plan.problem
        boxes = plan.products
        if self.arithmetic.takes(problem):
            m, n, k = boxes[0] if boxes else (problem.m, problem.n, problem.k)
            box = dataclasses.replace(problem, m=m, n=n, k=k)
            why = "asked for" if self.chosen else "the one for tensor cores here"
            return self.arithmetic.variant_for(box, self.devices[0].processors), why
        if self.kind == "cuda" and not self.chosen and boxes:
            m, n, k = boxes[0]
            box = dataclasses.replace(problem, m=m, n=n, k=k)
            return nearest_measured.choose(
                self.devices[0].machine(problem.dtype), box, layout, own=self.own
            )
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
        problem = self.settle(problem)
        inputs = [x for x in (a, b, c) if x is not None]
        on_gpu = any(is_device_array(x) for x in inputs)
        check_device([*inputs, out], self.kind)
        fresh = out is None
        if fresh:
            xp = module_of(next(x for x in inputs if is_device_array(x))) if on_gpu else np
            out = xp.empty((problem.m, problem.n), problem.out_dtype)
        else:
            c = check_out(out, problem, a, b, c)
        wrapped = [None if x is None else self._matrix(x) for x in (op_a, op_b, c)]
        target = wrapped[2] if c is out else self._matrix(out)
        there = all(map(is_device_array, [*inputs, out]))
        homes = (
            *(self._home(x, problem.operands) for x in wrapped[:2]),
            self._home(target, problem.dtype) if leading(out, "n") else None,
        )
        plan = self.plan(problem, resident=resident or there, homes=homes)
        layouts = "".join((layout_of(x) or "n")[0] for x in (op_a, op_b))
        variant, why = self.choice(plan, layouts)
        wait_for_streams(*inputs, out)  # which may still be writing them
        if not (problem.m and problem.n):
            words = compute_modes.words(problem)
            return Result(out, plan, variant, Timeline(), 0.0, self._reduction(plan), why, words)
        for device in self.devices:
            device.prepare(variant, wrapped[0].array, wrapped[1].array, problem.operands)
        before = self.verdicts(problem)
        run = self._laid_out(
            plan, variant, *wrapped, target, progress, resident=resident, fresh=fresh
        )
        timeline = run.run()
        words = compute_modes.words(problem, self.verdicts(problem) - before)
        reduction = self._reduction(run.plan)
        return Result(out, run.plan, variant, timeline, run.total_ms, reduction, why, words)

    def settle(self, problem: Problem) -> Problem:
        """The problem as it will be multiplied; `UsageError` if `compute` is not for it."""
        if self.algorithm == "strassen":  # its sums of quarters are made in `dtype`
            problem = dataclasses.replace(problem, operands=problem.dtype)
        return self.arithmetic.settle(problem)

    def verdicts(self, problem: Problem) -> np.ndarray:
        """What splits came to so far, on all devices."""
        return sum(products.verdicts(device, problem) for device in self.devices)

    def _laid_out(self, plan: planner.Plan, variant: Variant, *arguments, **options) -> ThreadRun:
        """A run that has its memory. Where a device has less than it said, because another
        program takes it, the product is planned anew in smaller turns."""
        most = min(spec.memory_bytes for spec in plan.devices)
        while True:
            with contextlib.suppress(MemoryError):
                return ThreadRun(plan, self.devices, variant, *arguments, **options)
            for device in self.devices:
                device.free_unused()
            most = int(SMALLER * most)
            # Raises OutOfMemoryError when not even the smallest turns would fit.
            plan = self._plan(plan.problem, plan.resident, most, plan.homes)

    def gemm(self, a, b, c=None, /, **options):
        """alpha * op(A) @ op(B) + beta * C; see `hybrid_gemm.gemm`.

        What one GPU does alone is started without a plan: on the caller's current stream for
        arrays that lie there, and small ones of the host are copied there and back whole.
        """
        done = None
        if self._direct and is_device_array(a):
            direct = self._direct.get(a.data.device_id)
            done = direct and direct(a, b, c, **options)
        elif self._direct:
            done = next(iter(self._direct.values())).hosted(a, b, c, **options)
        return self.run(a, b, c, **options).c if done is None else done

    def alone(self, problem: Problem, layout: str, device) -> Variant | None:
        """The kernel for the GPU that has A, B and C, so that nothing has to fit besides; None
        where several GPUs together are worth what they cost."""
        home = self.devices.index(device)
        specs = (
            dataclasses.replace(spec, memory_bytes=sys.maxsize) if i == home else spec
            for i, spec in enumerate(self.specs(problem.dtype))
        )
        plan = planner.make_plan(
            problem, tuple(specs), self._counts, kernel=str(self.chosen or "auto"), resident=True,
            homes=(home, home, home),
        )  # fmt: skip
        return None if len(plan.workers) > 1 else self.variant(plan, layout)

    def describe(self, plan: planner.Plan | None = None) -> str:
        """The devices, or those of a plan, in a few words, and why they were chosen."""
        used = self.devices
        if plan and len(self._counts) > 1:
            used = [self.devices[i] for i in sorted({w.device for w in plan.workers})]
        idle = len(self.devices) - len(used)
        notes = [self.note, f"{idle} more not worth starting" if idle else ""]
        names = ", ".join(device.describe() for device in used)
        return names + (f" ({', '.join(filter(None, notes))})" if any(notes) else "")

    def _matrix(self, array) -> Matrix:
        if not is_device_array(array):
            return Matrix(array)
        ordinal = array.device.id
        home = next((d for d in self.devices if d.ordinal == ordinal), None)
        if home is None:
            home = devices.open_devices("cuda", 1, gpus=[ordinal])[0]
        return Matrix(array, home)

    def _home(self, matrix: Matrix, dtype: str) -> int | None:
        """Which of these devices multiplies a matrix where it lies."""
        there = (i for i, d in enumerate(self.devices) if matrix.home and matrix.serves(d, dtype))
        return next(there, None)

    def _reduction(self, plan: planner.Plan) -> str:
        """How partials were summed, in words."""
        if not plan.summed:
            return "none"
        if plan.reduce == "critical":
            return "critical (one worker at a time, through host memory)"
        if not plan.bytes_peer:
            return "ordered sum on the device"
        if plan.reduce == "nccl":
            return f"NCCL {nccl_group.version()} between GPUs, as panels are ready"
        linked = all(x.reaches(y) for x in self.devices for y in self.devices)
        way = "peer copies" if linked else "copies staged through host memory"
        return f"ordered sum on the device, {way}, as panels are ready"
