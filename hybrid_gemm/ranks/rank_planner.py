"""Plans of products over ranks, and of what each rank multiplies, on devices that are open."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..catalog import Variant
from ..devices.cpu import CpuDevice
from ..errors import HybridGemmError
from ..host.kept import Kept
from ..options import Options
from ..planning.hardware import DeviceSpec
from ..planning.plan import NOWHERE, Plan
from ..planning.planner import make_plan
from ..problem import Problem, promoted
from ..runner import Runner
from . import replicas
from .distributed_operands import NO_ARRAYS, DistributedOperands
from .distributed_stacks import DistributedStacks
from .ending import agreed
from .launch import Place
from .rank_plan import RankPlan, make_rank_plan
from .redistribution import Part, moves, part_of, parts_of
from .replicas import Look

MAX_PLANS = 256  # of what a rank multiplies, remembered
# Bytes that a rank's GPU would hold, from which on matrices of the host move from GPU to GPU.
MOVED_BY_PEERS = 1 << 20
MAX_SETTLED = 32  # products over ranks, remembered with the parts of all ranks
LITTLE = 1e-3  # of a device's memory: who takes less needs not know how much is free now


class Told(NamedTuple):
    """What one rank tells the others of a product: of its arrays, and of its devices, as texts; how
    much memory is free; whether it gives an `out`, and stacks or vectors; and what it sees of
    matrices that all ranks pass."""

    text: bytes
    spec: bytes
    memory_bytes: int
    gives_out: bool
    stacked: bool
    replicas: Mapping[str, Look]


@dataclass(eq=False)
class Settled:
    """A product over ranks, the same on all of them. `have` and `want` say of op(A), op(B) and C
    which part each rank has, and which it needs, `here` where this rank's is in its own array if
    nothing moves, and `wanted` what of C its caller gets; `dtypes` hold what all ranks gave of
    each. With `alone` a rank's parts make its block of C as one process
    makes a product; with `resident` they are put on its GPU first, if `alone` where C is made
    there. With `by_peers` what moves does so from GPU to GPU, where ranks can read each other's.
    `needs` are bytes of a device's memory; `ready` says that all ranks were ready for it before.
    """

    problem: Problem
    plan: RankPlan
    have: dict[str, list[Part]]
    dtypes: dict[str, np.dtype]
    want: Mapping[str, list[Part]]
    here: Mapping[str, tuple[slice, slice] | None]
    wanted: list[Part]
    needs: int
    alone: bool = False
    resident: bool = False
    by_peers: bool = False
    ready: bool = False


class RankPlanner:
    """Plans for the rank at `where` of `ranks`, which multiplies by `local`. `options` are those of
    all ranks, of which `sharing` have this one's GPU, or host where there is none."""

    def __init__(
        self, ranks: int, where: Place, local: Runner, options: Options, sharing: int
    ) -> None:
        self.ranks, self.where, self.local, self.options = ranks, where, local, options
        self.sharing = sharing
        self._inner_plans: Kept[tuple[Plan, Variant]] = Kept(MAX_PLANS)
        self._settled: Kept[Settled] = Kept(MAX_SETTLED)
        self._stacks: Kept[DistributedStacks] = Kept(MAX_SETTLED)  # without arrays
        self._takes: Kept[int] = Kept(MAX_SETTLED)  # bytes, by what this rank told
        self._found: tuple[bytes, int] = b"", 0

    def own_spec(self) -> DeviceSpec:
        """What this rank has: all its devices together, and of a device's memory its share."""
        found, device = self.local.plans.specs(), self.local.devices[0]
        # A CPU's rate is that of its share of the cores, and a GPU works for one after the other.
        slower = 1 if device.queues or isinstance(device.unwrapped, CpuDevice) else self.sharing
        return dataclasses.replace(
            found[0],
            name=f"{found[0].name} of each rank",
            tflops=found[0].tflops * len(found) / slower,
            memory_bytes=min(s.memory_bytes for s in found) // self.sharing,
        )

    def plan(
        self, problem: Problem, spec: DeviceSpec, *, resident: bool = False, spans: Any = None,
        there: bool = False, mapped: bool = False,
    ) -> RankPlan:  # fmt: skip
        """The plan for ranks that each have what `spec` says."""
        options = self.options
        return make_rank_plan(
            self.local.plans.settle(problem), spec, self.ranks, threads=self.local.threads,
            split=options.split, grid=tuple(map(len, spans)) if spans else options.grid,
            rounds=options.rounds, spans=spans, kernel=self.local.plans.kernel_name,
            resident=resident, there=there, mapped=mapped,
        )  # fmt: skip

    def faster_together(self, spec: DeviceSpec, problem: Problem, products: int) -> bool:
        """Whether all ranks together make fewer products than there are ranks in less time than
        one rank takes for one of them."""
        settled = self.local.plans.settle(problem)
        if not (settled.m and settled.n and settled.k):
            return False

        def predicted_ms(ranks: int, **cut: Any) -> float:
            threads = self.local.threads
            return make_rank_plan(settled, spec, ranks, threads=threads, **cut).predicted_ms

        cut = {"split": self.options.split, "grid": self.options.grid}
        return products * predicted_ms(self.ranks, **cut) < predicted_ms(1)

    # --- what one rank multiplies -----------------------------------------------------------

    @property
    def by_three(self) -> bool:
        """Whether complex products are made of three real ones."""
        return self.options.algorithm == "3m"

    def real(self, plan: RankPlan) -> RankPlan:
        """The plan of the real product, or of one of three, that a complex one is made of."""
        return plan.as_third if plan.problem.is_complex and self.by_three else plan.as_real

    def variant(self, plan: RankPlan, there: bool = False) -> Variant:
        """The kernel that this rank's pieces take. Raises `UsageError` if the one asked for cannot
        run them."""
        return self.inner(plan.product_of(self.where.rank), there)[1]

    def inner(self, problem: Problem, there: bool = False) -> tuple[Plan, Variant]:
        """The plan of a rank's own work, and its kernel; `there` if A and B lie on its first
        device. Made for the memory that was free at first, since a run that has begun has taken
        some."""
        known = self._inner_plans.get((problem, there))
        if known is None:
            plan = self._inner(problem, there, self._specs)
            known = plan, self.local.variant(plan)
            self._inner_plans.put((problem, there), known)
        return known

    def _inner(self, problem: Problem, there: bool, specs: tuple[DeviceSpec, ...]) -> Plan:
        return make_plan(
            problem, specs, self.local.threads, split=self.local.options.split,
            kernel=self.local.plans.kernel_name, resident=there,
            homes=(0, 0, None) if there else NOWHERE,
        )  # fmt: skip

    @functools.cached_property
    def _specs(self) -> tuple[DeviceSpec, ...]:
        return self.local.plans.specs()

    # --- products of a caller's arrays ------------------------------------------------------

    def told(self, given: DistributedOperands) -> Told:
        """What the other ranks have to know of this one's arrays and device."""
        if given.text is None:
            device = self.local.devices[0]
            home = None if device.host_memory else device
            there = all(
                x is not None and self.local._home_of(x) is home
                for x in (given.arrays["A"], given.arrays["B"])
            )
            told = {**given.told(), "there": there, "shares": self.sharing > 1}
            given.text = pickle.dumps(told)
        found = self._found_for(given.text)
        return Told(
            given.text, *found, given.out is not None, given.stacked, given.replicas()
        )  # fmt: skip

    def _found_for(self, text: bytes) -> tuple[bytes, int]:
        """What this rank has for a product of which it tells this: as a text, and its memory. The
        text leaves the host's links out, which no plan over ranks asks for: they make it long. To
        look takes as long as a small product, so for one that was made before and takes `LITTLE` it
        is what was found last."""
        takes, (_spec, memory) = self._takes.get(text), self._found
        if takes is None or takes > LITTLE * memory:
            spec = self.own_spec()
            alike = dataclasses.replace(spec, memory_bytes=0, links=None)
            self._found = pickle.dumps(alike), spec.memory_bytes
        return self._found

    def settle(self, given: DistributedOperands, everyone: Sequence[Told]) -> Settled:
        """The product that all ranks make, of what every rank `told`; worked out once for what is
        told alike, while its plan fits the memory that is free. All ranks find the same, and raise
        the same."""
        texts = tuple((x.text, x.spec) for x in everyone)
        memory = min(x.memory_bytes for x in everyone)
        known = self._settled.get(texts)
        if known is None or known.needs > memory:
            with _of_all_ranks():
                told = [pickle.loads(text) for text, _spec in texts]
                known = self._worked_out(given, told, self._spec_of(everyone))
            self._settled.put(texts, known)
        read = "AB" * bool(known.problem.k) + "C" * bool(known.problem.beta)
        replicas.check([told.replicas for told in everyone], read)
        self._takes.put(texts[self.where.rank][0], known.needs)
        given.have, given.dtypes = known.have, known.dtypes
        return known

    def stacks(
        self, given: DistributedOperands, everyone: Sequence[Told]
    ) -> tuple[DistributedStacks, Callable[[Problem, int], bool]]:  # fmt: skip
        """The stacks of which every rank `told`, worked out once for what is told alike, and
        `faster_together` for ranks like these."""
        texts = tuple(told.text for told in everyone)
        known = self._stacks.get(texts)
        if known is None:
            with _of_all_ranks():
                known = DistributedStacks(given, list(map(pickle.loads, texts)))
            self._stacks.put(texts, known.of(given.again(NO_ARRAYS)))
        replicas.check([told.replicas for told in everyone])
        self._takes.put(texts[self.where.rank], 0)  # nothing of it depends on memory
        return known.of(given), lambda *problem: self.faster_together(
            self._spec_of(everyone), *problem
        )

    @staticmethod
    def _spec_of(everyone: Sequence[Told]) -> DeviceSpec:
        """What every rank has: the first rank's, with the memory of the one that has the least."""
        memory = min(told.memory_bytes for told in everyone)
        return dataclasses.replace(pickle.loads(everyone[0].spec), memory_bytes=memory)

    def _worked_out(
        self, given: DistributedOperands, everyone: Sequence[dict], spec: DeviceSpec
    ) -> Settled:
        problem = given.problem(everyone).as_blas()
        spans = None
        if problem.k:
            spans = given.spans(self.options.split, self.options.grid, problem)
        there = given.stay(spans) and self._there(problem, everyone)
        plan = self.plan(problem, spec, spans=spans, there=there)
        boxes = [plan.box(rank) for rank in range(plan.ranks)]
        want = {
            "A": [part_of(box, "rows", "ks") for box in boxes],
            "B": [part_of(box, "ks", "cols") for box in boxes],
            "C": parts_of(plan),
        }
        at = {x: given.here(x, want[x]) for x in ("ABC" if problem.beta else "AB")}
        wanted = given.wanted(problem)
        settled = Settled(problem, plan, given.have, given.dtypes, want, at, wanted, plan.needs)
        here, shared = self.local.devices[0].host_memory, any(told["shares"] for told in everyone)
        settled.alone = (here or there or not shared) and self._alone(settled, spec.memory_bytes)
        if here:
            return settled
        if all(told["there"] for told in everyone):
            settled.by_peers = True
            return settled
        held = given.held_bytes(want, wanted, problem)
        sums = problem.is_complex and not settled.alone  # whose parts are made where arrays lie
        too_large = plan.needs + held > spec.memory_bytes
        # Runs check their own copies of the host's arrays.
        if not (shared or sums or too_large or self.options.checked):
            settled.needs, settled.by_peers = plan.needs + held, held >= MOVED_BY_PEERS
            goes = settled.by_peers and moves(want["C"], wanted)
            small = held <= self.local.plans.most_hosted
            settled.resident = not settled.alone or (goes and small)
        return settled

    def _alone(self, settled: Settled, memory_bytes: int) -> bool:
        """Whether blocks of C are no sums over ranks, and each is multiplied in the dtype of the
        whole, which a C that is not read may widen. Raises on all ranks what one would raise that
        has as much memory."""
        problem, plan, dtypes = settled.problem, settled.plan, settled.dtypes
        if plan.sums:
            return False
        if problem.m and problem.n:
            real = self.real(plan)
            boxes = [box for rank in range(plan.ranks) if (box := real.box(rank))]
            specs = tuple(dataclasses.replace(x, memory_bytes=memory_bytes) for x in self._specs)
            for m, n, k in {(len(box.rows), len(box.cols), len(box.ks)) for box in boxes}:
                of_box = dataclasses.replace(real.problem, m=m, n=n, k=k)
                self.local.variant(self._inner(of_box, False, specs))
        return (
            promoted(*(dtypes[x] for x in ("ABC" if problem.beta else "AB"))) == problem.out_dtype
        )

    def _there(self, problem: Problem, everyone: Sequence[dict]) -> bool:
        """Whether each rank's A and B lie where its device reads them, in the dtype that is
        multiplied."""
        dtype = self.local.plans.settle(problem).operands
        return all(told["there"] and all(told[x][1] == dtype for x in "AB") for told in everyone)


@contextlib.contextmanager
def _of_all_ranks() -> Iterator[None]:
    """Around what all ranks find alike: what is wrong raises on all of them."""
    try:
        yield
    except (HybridGemmError, TypeError, ValueError) as error:
        agreed(error)
        raise


def least(specs: Sequence[DeviceSpec]) -> DeviceSpec:
    """The first rank's, with the memory of the rank that has the least."""
    memory = min(spec.memory_bytes for spec in specs)
    return dataclasses.replace(specs[0], memory_bytes=memory)
