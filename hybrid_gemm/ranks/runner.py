"""Products over MPI ranks: `RankRunner` for repeated ones, `gemm` for `gemm(..., comm=)`.

Every rank makes the same plan, has only its own blocks of A and B, and finishes its own strip
of C. All calls are collective.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import devices
from ..arrays.caller_arrays import check_device, is_device_array, wait_for_streams
from ..catalog import Variant
from ..devices.base import Device
from ..errors import UsageError
from ..execution.plan_run import Matrix
from ..execution.timeline import Timeline
from ..kernel_choice import compute_modes
from ..planning.plan import NOWHERE
from ..planning.planner import make_plan
from ..problem import Problem
from ..runner import MAX_PLANS, Runner
from . import launch, transports
from .distributed_operands import Given
from .rank_plan import RankPlan, make_rank_plan
from .rank_run import RankRun
from .redistribution import NOTHING, Part
from .transports import WORDS


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What a run gave one rank: its strip of C, and what was done. `timeline` has all ranks'
    activities on rank 0 and this rank's elsewhere; worker numbers count rank by rank.
    `since` is when multiplying began, in seconds of the Unix clock."""

    c: Any
    plan: RankPlan
    variant: Variant
    timeline: Timeline
    total_ms: float
    reduction: str
    since: float
    compute: str  # what was computed, in words

    @property
    def gflops(self) -> float:
        """10^9 floating-point operations a second of all ranks together."""
        return self.plan.problem.flops / self.total_ms / 1e6 if self.total_ms else 0.0


class RankRunner:
    """Repeated products over the ranks of `comm` (mpi4py); keeps devices and transports.

    Each rank takes the GPUs that are its by its number on its node, and splits its own box
    over `threads` in the way of `split`. `grid` (pm, pn, pk) cuts the product over ranks
    where `split` does not say enough. `transport` is "auto", "ipc", "nccl" or "mpi";
    `rounds` in how many pieces a strip of C is summed. The other options are `Runner`'s.
    """

    def __init__(
        self,
        comm,
        *,
        device: str = "auto",
        threads: int | None = None,
        split: str = "auto",
        grid: Sequence[int] | None = None,
        transport: str = "auto",
        rounds: int | None = None,
        gpus: Sequence[int] | None = None,
        reduce: str = "ordered",
        **options,
    ):
        self.comm, self.where = comm, launch.place(comm)
        self.split, self.grid, self.rounds, self.asked = split, grid, rounds, transport

        def local() -> Runner:
            if reduce != "ordered":
                raise UsageError(
                    f"the {reduce} reduction is one process's; ranks sum in order, and "
                    "--transport says how their partials travel"
                )
            mine, kind = gpus, devices.choose(device)[0]
            transports.names(transport, kind)
            if kind == "cuda":
                from ..devices.cuda import device as cuda

                visible = list(gpus) if gpus is not None else list(range(cuda.count()))
                mine = launch.gpus_of(self.where, visible, threads) if visible else visible
            inner = "auto" if grid else split
            return Runner(device=device, threads=threads, split=inner, gpus=mine, **options)

        self.runner = launch.together(comm, local)
        kinds = comm.allgather((self.runner.kind, self.where.host, self.runner.note))
        if len({kind for kind, _host, _note in kinds}) > 1:
            found = "; ".join(
                f"rank {rank} on {host}: {kind} ({note})"
                for rank, (kind, host, note) in enumerate(kinds)
            )
            raise launch.agreed(
                UsageError(f"ranks found different devices, so name one by --device: {found}")
            )
        self._kept: tuple | None = None
        self._inners: dict = {}  # plans of what this rank multiplies

    @property
    def devices(self):
        return self.runner.devices

    def spec(self):
        """What the least rank has: as many devices as a rank opened, its share of memory."""
        found = self.runner.specs()
        sharing = self.where.local_size
        if self.runner.kind == "cuda":
            from ..devices.cuda import device as cuda

            sharing = -(-sharing // cuda.count())
        mine = dataclasses.replace(
            found[0],
            name=f"{found[0].name} of each rank",
            tflops=found[0].tflops * len(found) / (1 if self.runner.kind == "cuda" else sharing),
            memory_bytes=min(s.memory_bytes for s in found) // sharing,
        )
        least = min(self.comm.allgather(mine.memory_bytes))
        return dataclasses.replace(self.comm.bcast(mine), memory_bytes=least)

    def plan(
        self, problem: Problem, *, resident: bool = False, spans=None, there: bool = False
    ) -> RankPlan:
        """The plan that all ranks follow; `there` if each has its blocks of A and B on its
        device. Raises the same error on all ranks."""
        spec, grid = self.spec(), self.grid
        if spans:
            grid = tuple(map(len, spans))

        def make() -> RankPlan:
            return make_rank_plan(
                self.runner.settle(problem), spec, self.comm.size, threads=self.runner.threads,
                split=self.split, grid=grid, rounds=self.rounds, spans=spans,
                kernel=str(self.runner.chosen or "auto"), resident=resident, there=there,
            )  # fmt: skip

        return launch.together(self.comm, make)

    def variant(self, plan: RankPlan) -> Variant:
        """The kernel that a rank's pieces take."""
        return launch.together(self.comm, lambda: self._variant(plan))

    def _variant(self, plan: RankPlan, there: bool = False) -> Variant:
        boxes = [plan.box(self.comm.rank), *(plan.box(rank) for rank in range(plan.ranks))]
        box = next(filter(None, boxes), None)
        sides = {"m": len(box.rows), "n": len(box.cols), "k": len(box.ks)} if box else {}
        return self.runner.variant(self._inner(dataclasses.replace(plan.problem, **sides), there))

    def _inner(self, problem: Problem, there: bool = False):
        """The plan of a rank's own work; `there` if A and B lie on its first device."""
        if (problem, there) not in self._inners:
            if len(self._inners) >= MAX_PLANS:
                self._inners.clear()
            self._inners[problem, there] = make_plan(
                problem, self._specs, self.runner.threads, split=self.runner.split,
                kernel=str(self.runner.chosen or "auto"), resident=there,
                homes=(0, 0, None) if there else NOWHERE,
            )  # fmt: skip
        return self._inners[problem, there]

    @functools.cached_property
    def _specs(self):
        return self.runner.specs()

    def run(
        self,
        plan: RankPlan,
        a,
        b,
        c,
        out,
        *,
        resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> RankResult:
        """Runs a plan on this rank's blocks of op(A) and op(B) and its strips of C.

        `c` is read where beta != 0, `out` written; None on ranks that have none. With
        `resident` blocks are put on the device before the clock starts.
        """
        rank, problem, runner = self.comm.rank, plan.problem, self.runner
        busy = plan.box(rank) is not None
        transport, words = self._transport(plan)
        home = self.devices[0] if resident and not self.devices[0].host_memory else None

        def prepare():
            given = (a, b, c if problem.beta else None, out) if busy else (None,) * 4
            matrices = [None if x is None else runner._matrix(x) for x in given]
            if home:
                dtypes = (problem.operands,) * 2 + (problem.dtype,) * 2
                matrices = [
                    None if x is None else _put(home, x, dtype)
                    for x, dtype in zip(matrices, dtypes, strict=True)
                ]
            # What lies on a device is multiplied at once, and not panel by panel as it arrives.
            there = all(
                x is None or x.serves(self.devices[0], problem.operands) for x in matrices[:2]
            )
            variant = self._variant(plan, there) if problem.m and problem.n else None
            for device in self.devices if busy else ():
                device.prepare(variant, matrices[0].array, matrices[1].array, problem.operands)
            return matrices, variant, functools.partial(self._inner, there=there)

        matrices, variant, inner = launch.together(self.comm, prepare)
        if transport:
            transport.start()
        before = runner.verdicts(problem)
        run = RankRun(
            plan, rank, self.devices, inner, runner.variant, *matrices, transport, progress
        )  # fmt: skip
        self.comm.Barrier()
        since, started = time.time(), time.perf_counter()
        timeline = run.run()
        total_ms = (time.perf_counter() - started) * 1e3
        if busy and matrices[3].array is not out:
            _fetch(matrices[3], out)
        everyone = self.comm.gather((total_ms, tuple(timeline)))
        if everyone:
            found = [
                dataclasses.replace(activity, worker=activity.worker + other * plan.threads)
                for other, (_ms, activities) in enumerate(everyone)
                for activity in activities
            ]
            timeline = Timeline(lambda: found)
            total_ms = max(ms for ms, _activities in everyone)
        total_ms = self.comm.bcast(total_ms)
        taken = sum(self.comm.allgather(runner.verdicts(problem) - before))
        compute = compute_modes.words(problem, taken)
        return RankResult(out, plan, variant, timeline, total_ms, words, since, compute)

    def _transport(self, plan: RankPlan):
        """The transport of this rank's cell, kept while the plan stays the same; and the way
        partials are summed, in words."""
        if self._kept and self._kept[0] == plan:
            return self._kept[1:3]
        self.close()
        rank, depth = self.comm.rank, plan.plan.grid[2]
        cells = [plan.members(first) for first in range(0, plan.ranks, depth)]
        cells = [cell for cell in cells if len(cell) > 1]
        if not cells:
            return None, "none"
        from mpi4py import MPI

        color = rank // depth if plan.summed(rank) else MPI.UNDEFINED
        cell = self.comm.Split(color, rank)
        transport, name, why = transports.open_transport(
            self.asked, self.comm, cells, self.where.node, cell, plan, self.devices[0]
        )
        words = f"ordered sum over ranks by {WORDS[name]}" + (f" ({why})" if why else "")
        self._kept = plan, transport, words
        return transport, words

    def close(self) -> None:
        """Gives back what was kept between runs. Collective."""
        if self._kept and self._kept[1]:
            self._kept[1].close()
            self._kept[1].comm.Free()
        self._kept = None

    def gemm(
        self, a, b, c=None, /, *, alpha=1.0, beta=0.0, trans_a=False, trans_b=False, out=None,
        distribution="replicated", result=None, root=0,
    ):  # fmt: skip
        """alpha * op(A) @ op(B) + beta * C; see `hybrid_gemm.gemm` with `comm`."""
        given = Given(self.comm, a, b, c, (trans_a, trans_b), distribution, result, root)
        arrays = given.arrays.values()
        launch.together(self.comm, lambda: check_device(arrays, self.runner.kind))
        problem, xp = given.problem(alpha, beta), given.xp
        wait_for_streams(*arrays)  # which may still be writing them
        problem = nothing_multiplied(problem)
        spans = given.spans(self.split, self.grid, problem) if problem.k else None
        lie = given.stay(spans) and self._have(given, self.runner.settle(problem).operands)
        there = all(self.comm.allgather(lie))
        plan = self.plan(problem, spans=spans, there=there)
        boxes = [plan.box(rank) for rank in range(plan.ranks)]
        a, b = (
            given.local(x, [_part(box, *sides) for box in boxes])
            for x, sides in (("A", ("rows", "ks")), ("B", ("ks", "cols")))
        )
        strips = parts_of(plan)
        c = given.local("C", strips) if problem.beta else None
        made = xp.empty(strips[self.comm.rank].shape, problem.out_dtype)
        done = self.run(plan, a, b, c, made)
        return given.returned(done.c, strips, problem, out)

    def _have(self, given: Given, dtype: str) -> bool:
        """Whether this rank's device has its A and B, in the dtype that is multiplied."""
        return all(
            is_device_array(x) and x.device.id == self.devices[0].ordinal and x.dtype == dtype
            for x in (given.arrays["A"], given.arrays["B"])
        )


def parts_of(plan: RankPlan) -> list[Part]:
    """The strip of C that each rank finishes."""
    return [_part(plan.strip(rank), "rows", "cols") for rank in range(plan.ranks)]


def nothing_multiplied(problem: Problem) -> Problem:
    """As in BLAS, A and B are not read where alpha or K is 0."""
    empty = problem.k == 0 or problem.alpha == 0
    return dataclasses.replace(problem, k=0, alpha=0) if empty else problem


def _put(home: Device, matrix: Matrix, dtype: str) -> Matrix:
    """A matrix on a device, brought there if it is not, in the dtype that is computed in."""
    if matrix.home is home and matrix.array.dtype == dtype:
        return matrix
    stream = home.stream()
    with home.using(stream):
        there = home.empty_like(matrix.array, dtype)
        home.copy(there, matrix.array.astype(dtype, copy=False), stream)
        stream.synchronize()
    return Matrix(there, home)


def _fetch(matrix: Matrix, out: np.ndarray) -> None:
    stream = matrix.home.stream()
    with matrix.home.using(stream):
        host = np.empty(matrix.array.shape, matrix.array.dtype)
        matrix.home.copy(host, matrix.array, stream)
        stream.synchronize()
    out[...] = host


def _part(block, rows: str, cols: str) -> Part:
    return Part(getattr(block, rows), getattr(block, cols)) if block else NOTHING


def gemm(a, b, c, *, comm, across: dict, product: dict, runner: dict):
    """`hybrid_gemm.gemm` with `comm`, its options sorted by who takes them."""
    own = {x: across.pop(x) for x in ("transport", "grid", "rounds") if x in across}
    ours = RankRunner(comm, **runner, **own)
    try:
        return ours.gemm(a, b, c, **product, **across)
    finally:
        ours.close()
