"""Products over MPI ranks: `RankRunner` for repeated ones.

Every rank makes the same plan, has only its own blocks of A and B, and finishes its own strip
of C. All calls are collective.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from .. import devices
from ..arrays.caller_arrays import check_device, wait_for_streams
from ..arrays.operand import Operand, Operands
from ..arrays.other_libraries import Guests
from ..catalog import Variant
from ..devices.base import Device
from ..devices.cpu import CpuDevice
from ..errors import UsageError
from ..execution.checked_device import checks_of
from ..execution.checks import total
from ..host.kept import Kept
from ..kernel_choice import compute_modes
from ..options import CHOICES, Options, named_keywords, with_options
from ..planning.hardware import DeviceSpec
from ..planning.plan import NOWHERE, Plan
from ..planning.planner import make_plan
from ..problem import Problem, Scalar
from ..runner import Runner
from . import heartbeat, launch, telling, transports
from .complex_runs import ComplexRun
from .distributed_operands import DistributedOperands
from .distributed_stacks import DistributedStacks
from .on_device import fetch, put
from .own_communicator import own
from .rank_plan import RankPlan, make_rank_plan
from .rank_result import RankResult, gathered
from .rank_run import RankExecutor, RankRun
from .redistribution import part_of, parts_of
from .transports import KeptTransport

MAX_PLANS = 256  # of what a rank multiplies, remembered
OWN_CHOICES = {"gpus"}  # that ranks may make each for itself


P = ParamSpec("P")
R = TypeVar("R")


def _in_call(method: Callable[P, R]) -> Callable[P, R]:
    """A decorator of `RankRunner`'s methods that all ranks call: where one raises on this rank
    alone, the others need not wait for ever."""

    @functools.wraps(method)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        runner: Any = args[0]
        if not runner.comm:
            raise UsageError("the communicator of this RankRunner has been freed; make another")
        if runner.beat.ended:  # by `free_memory`, on all ranks
            runner.beat = heartbeat.of(runner.comm, runner.options.rank_timeout)
        with runner.beat.call():
            return method(*args, **keywords)

    return call


def _refused_by_all(args: tuple, _keywords: Mapping[str, Any], error: TypeError) -> None:
    """Raises on all ranks what may be wrong on this one alone."""
    telling.refuse(args[0].comm, error)


class RankRunner:
    """Repeated products over the ranks of `comm` (mpi4py); keeps devices and transports.

    Each rank takes the GPUs that are its by its number on its node, and splits its own box
    over `threads` in the way of `split`. `grid` (pm, pn, pk) cuts the product over ranks
    where `split` does not say enough. The keywords are options, which `help(RankRunner.__init__)`
    explains; all ranks give the same but for `gpus`. All ranks make the runner, and call each of
    its methods, together.

        with RankRunner(MPI.COMM_WORLD, split="cols") as runner:
            c = runner.gemm(a, b, distribution="rows")
    """

    @with_options()
    def __init__(self, comm: Any, **options: Any) -> None:
        """Opens this rank's devices; all ranks call it together. Raises on all of them
        `UsageError`, `OptionTypeError` or `UnavailableError` for choices that cannot be had."""
        launch.check_communicator(comm)
        chosen = launch.together(comm, lambda: Options.of(options, "RankRunner").across_ranks())
        self._open(comm, chosen)

    @classmethod
    def of(cls, comm: Any, options: Options) -> RankRunner:
        """A runner for options that are made already. Collective."""
        runner = cls.__new__(cls)
        runner._open(comm, options)
        return runner

    def __repr__(self) -> str:
        return f"<RankRunner: rank {self.comm.rank} of {self.comm.size}, {self.local!r}>"

    def __enter__(self) -> RankRunner:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # the other ranks close too only where all came to the end
            self.close()

    def _open(self, comm: Any, options: Options) -> None:
        self.comm, self.options = own(comm).comm, options
        self.beat = heartbeat.of(self.comm, options.rank_timeout)
        with self.beat.call():
            self._open_devices()

    def _open_devices(self) -> None:
        comm, options = self.comm, self.options
        launch.agree(comm, {x: getattr(options, x) for x in CHOICES if x not in OWN_CHOICES})
        self.where = launch.place(comm)
        self.local: Runner = launch.together(comm, self._local_runner)
        sharing = len(launch.on_same_cores(comm, self.where))
        if isinstance(cpu := self.local.devices[0].unwrapped, CpuDevice):
            cpu.share_cores(sharing)
        kinds = comm.allgather((self.local.kind, self.where.host, self.local.note))
        if len({kind for kind, _host, _note in kinds}) > 1:
            found = "; ".join(
                f"rank {rank} on {host}: {kind} ({note})"
                for rank, (kind, host, note) in enumerate(kinds)
            )
            raise launch.agreed(
                UsageError(f"ranks found different devices, so name one by --device: {found}")
            )
        self._transport = KeptTransport(options.transport, comm, self.where.node, self.devices[0])
        self._inner_plans: Kept[Plan] = Kept(MAX_PLANS)

    def _local_runner(self) -> Runner:
        """What multiplies on this rank: its own devices and threads."""
        options, kind = self.options, devices.choose(self.options.device)[0]
        transports.names(options.transport, kind)
        mine = options.gpus
        if devices.are_gpus(kind):
            from ..devices.cuda import device as cuda

            visible = list(mine) if mine is not None else list(range(cuda.count()))
            if visible:
                mine = tuple(launch.gpus_of(self.where, visible, options.threads))
        split = "auto" if options.grid else options.split
        return Runner.of(dataclasses.replace(options, gpus=mine, grid=None, split=split))

    @property
    def devices(self) -> list[Device]:
        return self.local.devices

    def spec(self) -> DeviceSpec:
        """What every rank has: as many devices as each opened, and of a device's memory as much
        as the rank that has the least."""
        return _least(self.comm.allgather(self._own_spec()))

    def _own_spec(self) -> DeviceSpec:
        found = self.local.plans.specs()
        sharing = self.where.local_size
        slower = 1 if isinstance(self.devices[0].unwrapped, CpuDevice) else sharing  # by its cores
        if self.devices[0].queues:
            from ..devices.cuda import device as cuda

            sharing, slower = -(-sharing // cuda.count()), 1
        return dataclasses.replace(
            found[0],
            name=f"{found[0].name} of each rank",
            tflops=found[0].tflops * len(found) / slower,
            memory_bytes=min(s.memory_bytes for s in found) // sharing,
        )

    @_in_call
    def plan(
        self, problem: Problem, *, resident: bool = False, spans: Any = None, there: bool = False
    ) -> RankPlan:
        """The plan that all ranks follow, in rows and columns of the matrices, complex ones too;
        `there` if each has its blocks of A and B where its device reads them. Raises the same
        error on all ranks."""
        spec = self.spec()
        return launch.together(self.comm, lambda: self._plan(problem, spec, resident, spans, there))

    def _plan(
        self, problem: Problem, spec: DeviceSpec, resident: bool, spans: Any, there: bool
    ) -> RankPlan:
        options = self.options
        return make_rank_plan(
            self.local.plans.settle(problem), spec, self.comm.size, threads=self.threads,
            split=options.split, grid=tuple(map(len, spans)) if spans else options.grid,
            rounds=options.rounds, spans=spans, kernel=self.local.plans.kernel_name,
            resident=resident, there=there,
        )  # fmt: skip

    @property
    def by_three(self) -> bool:
        """Whether complex products are made of three real ones."""
        return self.options.algorithm == "3m"

    @property
    def threads(self) -> int:
        """Worker threads of each rank."""
        return self.local.threads

    def variant(self, plan: RankPlan) -> Variant:
        """The kernel that a rank's pieces take."""
        by_three = plan.problem.is_complex and self.by_three
        real = plan.as_third if by_three else plan.as_real
        return launch.together(self.comm, lambda: self._variant(real))

    def _variant(self, plan: RankPlan, there: bool = False) -> Variant:
        boxes = [plan.box(self.comm.rank), *(plan.box(rank) for rank in range(plan.ranks))]
        box = next(filter(None, boxes), None)
        problem = plan.problem
        if box:
            sides = len(box.rows), len(box.cols), len(box.ks)
            problem = dataclasses.replace(problem, m=sides[0], n=sides[1], k=sides[2])
        return self.local.variant(self._inner(problem, there))

    def _inner(self, problem: Problem, there: bool = False) -> Plan:
        """The plan of a rank's own work; `there` if A and B lie on its first device. Made for
        the memory that was free at first, since a run that has begun has taken some."""
        known = self._inner_plans.get((problem, there))
        if known is None:
            known = make_plan(
                problem, self._specs, self.threads, split=self.local.options.split,
                kernel=self.local.plans.kernel_name, resident=there,
                homes=(0, 0, None) if there else NOWHERE,
            )  # fmt: skip
            self._inner_plans.put((problem, there), known)
        return known

    @functools.cached_property
    def _specs(self) -> tuple[DeviceSpec, ...]:
        return self.local.plans.specs()

    @_in_call
    def run(
        self, plan: RankPlan, a: Any, b: Any, c: Any, out: Any, *, resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> RankResult:  # fmt: skip
        """Runs a plan on this rank's blocks of op(A) and op(B) and its strips of C.

        `c` is read where beta != 0, `out` written; None on ranks that have none. With
        `resident` blocks are put on the device before the clock starts. Complex blocks of op(A) and
        op(B) are those that the problem conjugates.
        """
        if plan.problem.is_complex:
            real = ComplexRun(self.comm, self.run, plan, resident, progress)
            return (real.by_three if self.by_three else real.by_four)(a, b, c, out)
        rank, problem, local = self.comm.rank, plan.problem, self.local
        busy = plan.box(rank) is not None
        transport, words = self._transport.of(plan)
        device = self.devices[0]
        home = device if resident and not device.host_memory else None

        def prepare() -> tuple[RankRun, Variant | None]:
            operands, there = None, True
            if busy:
                operands = self._operands(problem, a, b, c, out, home)
                there = all(
                    x.usable_in_place(device, problem.operands) for x in (operands.a, operands.b)
                )
            # What lies on a device is multiplied at once, and not panel by panel as it arrives.
            variant = self._variant(plan, there) if problem.m and problem.n else None
            if operands and variant:
                for each in self.devices:
                    each.prepare(variant, operands.a.array, operands.b.array, problem.operands)
            executor = RankExecutor(
                rank, self.devices, functools.partial(self._inner, there=there), local.variant,
                transport, self.beat, self.where.local_size,
            )  # fmt: skip
            return executor.prepare(plan, operands, progress), variant

        run, variant = launch.together(self.comm, prepare)  # all ranks begin when all are ready
        before, checked = local.plans.verdicts(problem), checks_of(self.devices)
        since = time.time()
        done = run.execute()
        if (made := run.operands) is not None and made.out.array is not out:
            fetch(made.out, out)
        taken, now = local.plans.verdicts(problem) - before, checks_of(self.devices)
        found = None if checked is None or now is None else now.since(checked)
        with self.beat.during(heartbeat.WAITING):
            everyone = self.comm.allgather((done.total_ms, taken, found))
            timeline = gathered(self.comm, plan, done.timeline)
        times, verdicts, checks = zip(*everyone, strict=True)
        return RankResult(
            out, plan, variant, timeline, max(times), words, since,
            compute_modes.ran(variant, problem, sum(verdicts)),
            None if found is None else total(checks), tuple(run.products.values()),
        )  # fmt: skip

    def _operands(
        self, problem: Problem, a: Any, b: Any, c: Any, out: Any, home: Device | None
    ) -> Operands:
        """This rank's blocks described; on its device where they are to be resident."""

        def described(x: Any, dtype: str) -> Operand:
            found = Operand.of(x, self.local._home_of(x))
            return found if home is None else put(home, found, dtype)

        same = c is out
        place = described(out, problem.dtype)
        addend = None
        if problem.beta:
            addend = place if same else described(c, problem.dtype)
        return Operands(
            problem, described(a, problem.operands), described(b, problem.operands), addend, place
        )

    def close(self) -> None:
        """Gives back what was kept between runs. Collective."""
        self._transport.close()

    # Many parameters: a product has so many, as in BLAS, and the rest says where arrays lie.
    @_in_call
    @functools.partial(named_keywords, refused=_refused_by_all)
    def gemm(
        self, a: Any, b: Any, c: Any = None, /, *, alpha: Scalar = 1.0, beta: Scalar = 0.0,
        trans_a: bool | str = False, trans_b: bool | str = False, out: Any = None,
        distribution: str = "replicated", result: str | None = None, root: int = 0,
    ) -> Any:  # fmt: skip
        """alpha * op(A) @ op(B) + beta * C; see `hybrid_gemm.gemm` with `comm`. What one rank
        gives wrongly raises on all of them."""

        def look() -> tuple[tuple, dict]:
            guests = Guests.of(a, b, c, out)
            views = (guests.a, guests.b, guests.c, guests.out) if guests else (a, b, c, out)
            lie = (trans_a, trans_b), distribution, result, root
            given = DistributedOperands(self.comm, views, *lie)
            return (guests, given), self._told(given, alpha, beta)

        (guests, given), everyone = telling.tell(self.comm, look)
        if guests is None:
            return self._multiply(given, everyone)
        return guests.served(lambda *_views: self._multiply(given, everyone))

    @_in_call
    @functools.partial(named_keywords, refused=_refused_by_all)
    def matmul(
        self, a: Any, b: Any, /, *, out: Any = None, distribution: str = "replicated",
        result: str | None = None, root: int = 0,
    ) -> Any:  # fmt: skip
        """A @ B as NumPy's `matmul`; see `hybrid_gemm.matmul` with `comm`."""

        lie = distribution, result, root

        def matrices(x: Any, y: Any, out: Any = None) -> tuple[DistributedOperands, dict]:
            given = DistributedOperands(self.comm, (x, y, None, out), (False, False), *lie)
            return given, self._told(given, 1.0, 0.0)

        def gemm(x: Any, y: Any) -> Any:
            return self._multiply(*telling.tell(self.comm, lambda: matrices(x, y)))

        def look() -> tuple[tuple, tuple]:
            guests = Guests.of(a, b, None, out)
            views = (guests.a, guests.b, guests.out) if guests else (a, b, out)
            stacks = DistributedStacks(self.comm, *views, *lie)
            given, told = matrices(*views) if stacks.are_matrices else (None, None)
            return (guests, stacks, given), (stacks.told(), told)

        (guests, stacks, given), everyone = telling.tell(self.comm, look)

        def multiply(*_views: Any) -> Any:
            of_stacks, of_matrices = zip(*everyone, strict=True)
            if all(of_matrices):
                return self._multiply(given, of_matrices)
            return stacks.multiply(of_stacks, gemm, self.local.matmul, self._faster_together)

        return guests.served(multiply) if guests else multiply()

    def _faster_together(self, problem: Problem, products: int) -> bool:
        """Whether all ranks together make fewer products than there are ranks in less time than
        one rank takes for one of them. Collective."""
        spec, options = self.spec(), self.options
        settled = nothing_multiplied(self.local.plans.settle(problem))
        if not (settled.m and settled.n and settled.k):
            return False

        def predicted_ms(ranks: int, **cut: Any) -> float:
            return make_rank_plan(settled, spec, ranks, threads=self.threads, **cut).predicted_ms

        def compare() -> bool:
            cut = {"split": options.split, "grid": options.grid}
            return products * predicted_ms(self.comm.size, **cut) < predicted_ms(1)

        return launch.together(self.comm, compare)

    def _told(self, given: DistributedOperands, alpha: Scalar, beta: Scalar) -> dict:
        """What the other ranks have to know of this one's arrays and device."""
        device = self.devices[0]
        check_device(given.arrays.values(), device)
        home = None if device.host_memory else device
        there = all(
            x is not None and self.local._home_of(x) is home
            for x in (given.arrays["A"], given.arrays["B"])
        )
        return {**given.told(alpha, beta), "there": there, "spec": self._own_spec()}

    def _multiply(self, given: DistributedOperands, everyone: Sequence[dict]) -> Any:
        def settle() -> tuple[Problem, RankPlan]:
            problem = nothing_multiplied(given.problem(everyone))
            spans = None
            if problem.k:
                spans = given.spans(self.options.split, self.options.grid, problem)
            there = given.stay(spans) and self._there(problem, everyone)
            spec = _least([told["spec"] for told in everyone])
            plan = self._plan(problem, spec, False, spans, there)
            given.check_out(problem)
            return problem, plan

        problem, plan = launch.together(self.comm, settle)
        wait_for_streams(*given.arrays.values())  # which may still be writing them
        boxes = [plan.box(rank) for rank in range(plan.ranks)]
        local_a, local_b = (
            given.local(x, [part_of(box, *sides) for box in boxes])
            for x, sides in (("A", ("rows", "ks")), ("B", ("ks", "cols")))
        )
        strips = parts_of(plan)
        local_c = given.local("C", strips) if problem.beta else None
        made = given.empty(strips[self.comm.rank].shape, problem.out_dtype)
        done = self.run(plan, local_a, local_b, local_c, made)
        return given.returned(done.c, strips, problem)

    def _there(self, problem: Problem, everyone: Sequence[dict]) -> bool:
        """Whether each rank's A and B lie where its device reads them, in the dtype that is
        multiplied."""
        dtype = self.local.plans.settle(problem).operands
        return all(told["there"] and all(told[x][1] == dtype for x in "AB") for told in everyone)


def _least(specs: Sequence[DeviceSpec]) -> DeviceSpec:
    """The first rank's, with the memory of the rank that has the least."""
    least = min(spec.memory_bytes for spec in specs)
    return dataclasses.replace(specs[0], memory_bytes=least)


def nothing_multiplied(problem: Problem) -> Problem:
    """As in BLAS, A and B are not read where alpha or K is 0."""
    empty = problem.k == 0 or problem.alpha == 0
    return dataclasses.replace(problem, k=0, alpha=0) if empty else problem
