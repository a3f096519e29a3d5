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
from ..arrays.caller_arrays import check_device, is_device_array, wait_for_streams
from ..arrays.guests import Guests
from ..arrays.on_gpus import empty_beside
from ..arrays.operand import CallerArrays, Operand, Operands
from ..catalog import Variant
from ..devices.base import Device
from ..devices.cpu import CpuDevice
from ..errors import UsageError
from ..execution.checked_device import checks_since, tallies_of
from ..execution.checks import total
from ..execution.complex_products import Alone, ComplexProduct
from ..execution.result import Result
from ..execution.timeline import Timeline
from ..host.kept import Kept
from ..kernel_choice import compute_modes
from ..options import CHOICES, Options, named_keywords, with_options
from ..planning.hardware import DeviceSpec
from ..problem import Problem, Scalar, are_numbers
from ..programs.program import Call
from ..programs.signature import MATMUL, signature
from ..runner import Runner
from . import heartbeat, launch, transports
from .distributed_operands import NO_ARRAYS, DistributedOperands
from .on_device import fetch, put
from .own_communicator import of_one_thread, own
from .peer_memory import PeerMemory
from .rank_plan import RankPlan
from .rank_planner import RankPlanner, Settled, Told, least
from .rank_run import RankRun
from .redistribution import made, moves, parts_of
from .transports import KeptTransport

# Of a rank's part of host arrays on GPUs, which says from here on how far it has come.
LONG_FLOPS = 1e13
# Remembered: calls whose arrays were looked at, and this rank's parts of plans.
MAX_CALLS, MAX_RUNS = 64, 16
OWN_CHOICES = {"gpus"}  # that ranks may make each for itself


P = ParamSpec("P")
R = TypeVar("R")


def _in_call(method: Callable[P, R]) -> Callable[P, R]:
    """A decorator of `RankRunner`'s methods that all ranks call: where one raises on this rank
    alone, the others need not wait for ever."""

    @functools.wraps(method)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        runner: Any = args[0]
        launch.check_runs()
        if not runner.comm:
            raise UsageError("the communicator of this RankRunner has been freed; make another")
        with of_one_thread(runner.comm):
            if runner.beat.ended:  # by `free_memory`, on all ranks
                runner.beat = heartbeat.of(runner.comm, runner.options.rank_timeout)
            with runner.beat.call():
                return method(*args, **keywords)

    return call


def _refused_by_all(args: tuple, _keywords: Mapping[str, Any], error: TypeError) -> None:
    """Raises on all ranks what may be wrong on this one alone."""
    launch.refuse(args[0].comm, error)


class _Blocks(CallerArrays):
    """A rank's blocks of complex op(A) and op(B), and its strips of C."""

    def check(self, *_: Any) -> None:
        """They are parts of what was checked."""


class _Ranks(Alone):
    """Ranks that make a product together, as `ComplexProduct` asks."""

    by_rows = True

    def __init__(self, comm: Any, settled: Settled | None) -> None:
        self.comm, self.settled = comm, settled

    def together(self, call: Callable[[], R]) -> R:
        return launch.together(self.comm, call)

    def slowest_ms(self, start: float) -> float:
        ms = super().slowest_ms(start)
        return ms if self.settled else max(self.comm.allgather(ms))  # nobody asks


class RankRunner:
    """Repeated products over the ranks of `comm` (mpi4py); keeps devices and transports.

    Each rank takes the GPUs that belong to its number on its node, and splits its own box
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
        with of_one_thread(comm):
            chosen = launch.together(comm, lambda: Options.of(options, "RankRunner").across_ranks())
            self._open(comm, chosen)

    @classmethod
    def of(cls, comm: Any, options: Options) -> RankRunner:
        """A runner for options that are made already. Collective."""
        runner = cls.__new__(cls)
        runner._open(comm, options)
        return runner

    def __repr__(self) -> str:
        return f"<RankRunner: rank {self.where.rank} of {self._planner.ranks}, {self.local!r}>"

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
        mine = self.where.node, self._gpu()
        kinds = comm.allgather((self.local.kind, self.where.host, self.local.note, mine))
        if len({kind for kind, *_rest in kinds}) > 1:
            found = "; ".join(
                f"rank {rank} on {host}: {kind} ({note})"
                for rank, (kind, host, note, _gpu) in enumerate(kinds)
            )
            raise launch.agreed(
                UsageError(f"ranks found different devices, so name one by --device: {found}")
            )
        self._transport = KeptTransport(options.transport, comm, self.where.node, self.devices[0])
        sharing = [gpu for *_rest, gpu in kinds].count(mine)
        self._planner = RankPlanner(comm.size, self.where, self.local, options, sharing)
        self._peers = PeerMemory(comm, self.where.node, self.devices[0], options.transport)
        self._runs: Kept[RankRun] = Kept(MAX_RUNS)  # by plan, and whether A and B are there
        self._calls: Kept[DistributedOperands] = Kept(MAX_CALLS)  # without arrays, by signature

    def _gpu(self) -> str:
        """What names this rank's first GPU on its node; the same for all where there is none."""
        ordinal = self.devices[0].ordinal
        if not self.devices[0].queues or ordinal is None:
            return ""
        from ..devices.cuda import device as cuda

        return cuda.uuids()[ordinal]

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
        """This rank's devices, which its workers share."""
        return self.local.devices

    @_in_call
    def spec(self) -> DeviceSpec:
        """What every rank has: as many devices as each opened, and of a device's memory as much
        as the rank that has the least."""
        return least(self.comm.allgather(self._planner.own_spec()))

    @_in_call
    def plan(self, problem: Problem, *, resident: bool = False, mapped: bool = False) -> RankPlan:
        """The plan that all ranks follow, in rows and columns of the matrices, complex ones too;
        `mapped` if A and B are mapped files, whose pages the host's memory need not hold. Raises
        the same error on all ranks."""
        spec = self.spec()
        return launch.together(
            self.comm, lambda: self._planner.plan(problem, spec, resident=resident, mapped=mapped)
        )

    @property
    def by_three(self) -> bool:
        """Whether complex products are made of three real ones."""
        return self._planner.by_three

    @property
    def threads(self) -> int:
        """Worker threads of each rank."""
        return self.local.threads

    @_in_call
    def variant(self, plan: RankPlan) -> Variant:
        """The kernel that a rank's pieces take."""
        planner = self._planner
        return launch.together(self.comm, lambda: planner.variant(planner.real(plan)))

    @_in_call
    def run(
        self, plan: RankPlan, a: Any, b: Any, c: Any, out: Any, *, resident: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Result:  # fmt: skip
        """Runs a plan on this rank's blocks of op(A) and op(B) and its strips of C.

        `c` is read where beta != 0, `out` written; None on ranks that have none. With
        `resident` blocks are put on the device before the clock starts. Complex blocks of op(A) and
        op(B) are those that the problem conjugates.
        """
        return self._run(plan, a, b, c, out, resident=resident, progress=progress)

    # Many parameters: those of `run`, and what ranks settled of the product.
    def _run(
        self, plan: RankPlan, a: Any, b: Any, c: Any, out: Any, *, resident: bool = False,
        progress: Callable[[int], None] | None = None, settled: Settled | None = None,
    ) -> Result:  # fmt: skip
        """`run`, or what of it makes a `settled` product: then its result is of this rank alone,
        without what was computed and checked, and ranks that were all ready for it before do not
        wait until all are. (The tables of what was settled have the same things on all ranks, which
        make the same calls.)"""
        if plan.problem.is_complex:
            return self._run_complex(plan, _Blocks(a, b, c, out), resident, progress, settled)
        problem, local = plan.problem, self.local
        transport, words = self._transport.of(plan)

        def ready() -> tuple[RankRun, Operands | None, Any]:
            place = out
            if place is None:
                place = empty_beside([a], parts_of(plan)[self.comm.rank].shape, problem.dtype)
            return *self._ready(plan, (a, b, c, place), resident), place

        # Of what is taken now there may be too little memory.
        if settled and settled.ready and not resident and out is not None:
            run, operands, out = ready()
        else:
            run, operands, out = launch.together(self.comm, ready)
        variant: Any = run.variant
        if settled:
            settled.ready = True
        else:
            before, checked = local.plans.verdicts(problem), tallies_of(self.devices)
        since = time.time()
        done = run.execute(operands, transport, self.beat, progress)
        if operands is not None and operands.out.array is not out:
            fetch(operands.out, out)
        if settled:
            return Result(out, plan, variant, done.timeline, done.total_ms, words, problem)
        taken = local.plans.verdicts(problem) - before
        found = checks_since(self.devices, checked)
        with self.beat.during(heartbeat.WAITING):
            everyone = self.comm.allgather((done.total_ms, taken, found))
            timeline = self._gathered(plan, done.timeline)
        times, verdicts, checks = zip(*everyone, strict=True)
        return Result(
            out, plan, variant, timeline, max(times), words, problem,
            compute=compute_modes.ran(variant, problem, sum(verdicts)),
            checks=None if found is None else total(checks), executor="python (over ranks)",
            since=since, own=tuple(run.products.values()),
        )  # fmt: skip

    def _run_complex(
        self, plan: RankPlan, blocks: _Blocks, resident: bool,
        progress: Callable[[int], None] | None, settled: Settled | None,
    ) -> Result:  # fmt: skip
        """By one real product of all ranks, each of which expands its own block of B; or by three,
        each of which makes the parts of its blocks, and C of its strips of the three."""
        real = self._planner.real(plan)

        def run(a: Any, b: Any, c: Any = None, *, out: Any = None, **how: Any) -> Result:
            how = {x: how[x] for x in ("resident", "progress")}  # factors are the plan's
            return self._run(real, a, b, c, out, settled=settled, **how)

        whole = ComplexProduct(blocks, plan.problem, self.devices[0], _Ranks(self.comm, settled))
        product = whole.run_by_three if self.by_three else whole.run_by_four
        return dataclasses.replace(product(run, resident, progress), plan=plan)

    def _gathered(self, plan: RankPlan, mine: Timeline) -> Timeline:
        """All ranks' activities, on rank 0. Collective."""
        everyone = self.comm.gather(tuple(mine))
        if not everyone:
            return mine
        found = [
            dataclasses.replace(each, worker=each.worker + rank * plan.threads)
            for rank, activities in enumerate(everyone)
            for each in activities
        ]
        return Timeline(lambda: found)

    def _ready(
        self, plan: RankPlan, arrays: tuple[Any, Any, Any, Any], resident: bool
    ) -> tuple[RankRun, Operands | None]:
        """This rank's part of a run, ready to start, and its blocks described."""
        problem, device, rank = plan.problem, self.devices[0], self.comm.rank
        home = device if resident and not device.host_memory else None
        operands, there = None, True
        if plan.box(rank) is not None:
            operands = self._operands(problem, *arrays, home)
            there = all(
                x.usable_in_place(device, problem.operands) for x in (operands.a, operands.b)
            )
        run = self._runs.get((id(plan), there))
        if run is None:
            # What lies on a device is multiplied at once, and not panel by panel as it arrives.
            inner = functools.partial(self._planner.inner, there=there)
            here = self.where.local_size
            run = RankRun(plan, rank, self.devices, inner, there=there, ranks_here=here)
            self._runs.put((id(plan), there), run)  # which keeps the plan, and so its number
        if operands:
            run.prepare(operands)
        return run, operands

    def _operands(
        self, problem: Problem, a: Any, b: Any, c: Any, out: Any, home: Device | None
    ) -> Operands:
        """This rank's blocks described; on its device where they are to be resident."""

        def described(x: Any, dtype: str, *, read: bool = True) -> Operand:
            found = self._described(x)
            return found if home is None else put(home, found, dtype, read=read)

        same = c is out
        place = described(out, problem.dtype, read=bool(problem.beta) and same)
        addend = None
        if problem.beta:
            addend = place if same else described(c, problem.dtype)
        return Operands(
            problem, described(a, problem.operands), described(b, problem.operands), addend, place
        )

    def _described(self, x: Any) -> Operand:
        return Operand.of(x, self.local._home_of(x))

    def close(self) -> None:
        """Gives back what ranks keep with each other, such as transports; a product after this
        makes it anew. Devices and their memory go when nothing refers to the runner. Collective."""
        launch.check_runs()
        self._transport.close()
        self._peers.close()
        self._runs = Kept(MAX_RUNS)

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

        call = Call(a, b, c, alpha, beta, trans_a, trans_b, out)
        return self._call("gemm", call, (distribution, result, root))

    @_in_call
    @functools.partial(named_keywords, refused=_refused_by_all)
    def matmul(
        self, a: Any, b: Any, /, *, out: Any = None, distribution: str = "replicated",
        result: str | None = None, root: int = 0,
    ) -> Any:  # fmt: skip
        """A @ B as NumPy's `matmul`; see `hybrid_gemm.matmul` with `comm`."""

        return self._call(MATMUL, Call(a, b, out=out), (distribution, result, root))

    def _call(
        self, what: str, call: Call, lie: tuple[Any, Any, Any], into: str | None = None
    ) -> Any:
        """C of a call whose arrays `lie` over ranks as distribution, result and root say; `into`
        is the dtype of what it comes into, where that is no `out`."""

        def look() -> tuple[tuple, Told]:
            a, b, c, alpha, beta, *trans, out = call
            how = {"alpha": alpha, "beta": beta, "out": out, "how": (*trans, *lie, into)}
            key = None
            if are_numbers(alpha, beta):  # others may change
                key = signature(what, (a, b) if c is None else (a, b, c), how)
            like, guests = self._calls.get(key), None
            if like is not None:
                given = like.again(call)
            else:
                guests, seen = Guests.of(*call.arrays), call
                if guests:
                    seen = call._replace(a=guests.a, b=guests.b, c=guests.c, out=guests.out)
                given = DistributedOperands(self.comm, seen, *lie, into, stacks=what == MATMUL)
                check_device(given.arrays.values(), self.devices[0])
            told = self._planner.told(given)
            if not (like or guests or key is None):
                self._calls.put(key, given.again(NO_ARRAYS))
            return (guests, given), told

        (guests, given), everyone = launch.tell(self.comm, what, look)
        stacked = any(told.stacked for told in everyone)
        multiply = self._multiply_stacks if stacked else self._multiply
        if guests is None:
            return multiply(given, everyone)
        return guests.served(lambda *_views: multiply(given, everyone))

    def _multiply_stacks(self, given: DistributedOperands, everyone: Sequence[Told]) -> Any:
        stacks, faster_together = self._planner.stacks(given, everyone)
        if any(told.gives_out for told in everyone):
            out_dtype = stacks.problem.out_dtype
            launch.together(self.comm, lambda: given.check_out(stacks.shape, out_dtype))
        lie = given.distribution, given.result, given.root

        def gemm(a: Any, b: Any, into: str) -> Any:
            return self._call(MATMUL, Call(a, b), lie, into)

        return stacks.multiply(gemm, self.local.matmul, faster_together)

    def _multiply(self, given: DistributedOperands, everyone: Sequence[Told]) -> Any:
        settled = self._planner.settle(given, everyone)
        problem, strips = settled.problem, settled.want["C"]
        if any(told.gives_out for told in everyone):
            part = settled.wanted[self.comm.rank]
            wanted = part.shape, problem.out_dtype, part.rows
            launch.together(self.comm, lambda: given.check_out(*wanted))
        wait_for_streams(*given.arrays.values())  # which may still be writing them
        peers = self._peers if settled.by_peers and self._peers.usable() else None
        a, b, c = (
            None if x not in settled.here
            else given.brought(x, settled.want[x], peers) if (at := settled.here[x]) is None
            else given.arrays[x][at]
            for x in "ABC"
        )  # fmt: skip
        strip = strips[self.comm.rank]
        if peers and moves(strips, settled.wanted):
            room = functools.partial(peers.empty, strip, problem.out_dtype)
        else:
            room = functools.partial(given.empty, strip.shape, problem.out_dtype)
        c_here = made(self.comm, strips, problem.out_dtype, room)
        if not settled.alone:
            plan, resident = settled.plan, settled.resident
            self._run(plan, a, b, c, c_here, resident=resident, settled=settled)
        elif c_here.size:  # of nothing no kernel is asked, which may be none of this device
            self._multiply_alone(settled, a, b, c, c_here)
        return given.returned(c_here, strips, settled.wanted, problem, self.devices[0], peers)

    def _multiply_alone(self, settled: Settled, a: Any, b: Any, c: Any, out: Any) -> None:
        """This rank's block of C, without the other ranks."""
        problem, conj = settled.problem, (settled.problem.conj_a, settled.problem.conj_b)
        a, b, c = (
            x if x is None else x.astype(settled.dtypes[name], copy=False)
            for name, x in (("A", a), ("B", b), ("C", c))
        )
        if settled.resident and is_device_array(out):  # small ones of the host take no plan
            a, b, c = (
                x if x is None else put(self.devices[0], self._described(x), x.dtype.name).array
                for x in (a, b, c)
            )
        multiply: Callable[..., Any] = self.local.gemm
        long = 2 * a.size * b.shape[1] > LONG_FLOPS
        if long and self.devices[0].queues and not is_device_array(a):
            multiply = functools.partial(self.local.run, progress=self.beat.counting(None))
        with self.beat.during(heartbeat.MULTIPLYING), self.devices[0].session():
            self.beat.computes = not self.devices[0].queues
            multiply(
                a.T if conj[0] else a, b.T if conj[1] else b, c, alpha=problem.alpha,
                beta=problem.beta, trans_a="c" if conj[0] else False,
                trans_b="c" if conj[1] else False, out=out,
            )  # fmt: skip
            wait_for_streams(out)
