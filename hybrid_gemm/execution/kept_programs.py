"""Who carries out a run that one thread starts: native threads one whose commands could be noted
before, Python's executor any other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from ..arrays.mapped_files import file_of
from ..arrays.npy_files import NpyWriter
from ..arrays.operand import Operand, Operands
from ..arrays.strides import lies, span
from ..catalog import Variant
from ..devices.base import Device
from ..host.kept import Kept
from ..planning.plan import Plan
from . import native_executor, single_thread_schedule, staging
from .commands import Unfit
from .executor import Execution
from .kept_products import KeptProducts
from .native_executor import Program
from .room import Place, Room, place_of
from .run import Run
from .timeline import Clock
from .worker import Worker

NATIVE = "native"
_MOST = 64  # kinds of runs
Alike = tuple  # what runs have in common: see `alike_of`
COMPILING, LOADING = "its kernels are being compiled", "a library's first product of its kind"
GIVEN_BACK = "its buffers were given back meanwhile"


def python(why: str) -> str:
    """Words for a run that Python's executor carries out."""
    return f"python ({why})"


def is_settled(executor: str) -> bool:
    """Whether runs that come after one with these words are carried out as it was."""
    return executor not in map(python, (COMPILING, LOADING, GIVEN_BACK))


class KeptPrograms:
    """Those of a runner's runs, made before a run begins whose kernels are there. `products` are
    those that Python's executor starts. Both refer to devices, and none refers to them."""

    def __init__(self) -> None:
        self.products = KeptProducts()
        # A program, or why there is none; and the plan, so that no other has its `id` meanwhile.
        self._known: Kept[tuple[Plan, Program | str]] = Kept(_MOST)
        # Of runs alike by a library: those whose kernels are loaded, so that they can be recorded.
        self._loaded: Kept[Plan] = Kept(_MOST)
        self._rooms: Kept[Room] = Kept(_MOST)  # of runs of which there is a program

    def again(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands,
        progress: Callable[[int], None] | None,
    ) -> Execution | None:  # fmt: skip
        """Carries out a run that is a program's, where its room is to be had where it was: so
        nothing of it is made anew. Otherwise None, and nothing was done."""
        matrices = _matrices(operands)
        spans = spans_of(matrices)
        if _unfit(matrices, spans) is not None:
            return None
        alike = alike_of(plan, variant, matrices, spans, devices[0])
        clock = Clock({w.index: devices[w.device] for w in plan.workers})
        fresh = operands.out.array if operands.fresh else None
        if not self.carry_out(alike, _starts(spans), fresh, progress, clock):
            return None
        return Execution(clock.timeline(), clock.total_ms, plan, executor=NATIVE)

    def carry_out(
        self, alike: Alike, starts: Sequence[int], fresh: np.ndarray | None,
        progress: Callable[[int], None] | None = None, clock: Clock | None = None,
    ) -> bool:  # fmt: skip
        """As `again`, for runs that have this in common, with the host's matrices at `starts`;
        `fresh` is an `out` without pages. A `clock` is given the run's activities."""
        room = self._rooms.get(alike)
        if room is None:
            return False
        with contextlib.ExitStack() as stack:
            try:
                place = stack.enter_context(room.taken())
            except MemoryError:  # others have it: a plan that looks how much there is comes first
                self._rooms.drop(alike)
                return False
            _plan, program = self._known.get((alike, place)) or (None, "")
            if not isinstance(program, Program):
                return False
            rings = program.rings()  # which stay as long as this has them
            if rings is None:
                return False
            for device in dict.fromkeys(program.devices.values()):
                stack.enter_context(device.session())
            if clock:
                clock.start()
            if fresh is not None:
                staging.make_pages(program.devices.values(), fresh)
            marks = program.carry_out(starts, fresh is not None, progress)
            if clock:
                clock.marks = marks
                clock.stop()
        return True

    def prepare(self, run: Run, workers: list[Worker]) -> Program | str:
        """The program of a run, or why it has none, before its clock runs: one that is new is made
        of what the run would do, which is noted and not done."""
        why = _why_not(run)
        if why is not None:
            return why
        key = _key(run, workers)
        if any(device.awaits_kernels for device in run.devices):
            return COMPILING
        if run.variant.kernel.library and self._loaded.get(key[0]) is None:
            self._loaded.put(key[0], run.plan)
            return LOADING
        known = self._known.get(key)
        if known and not (isinstance(known[1], Program) and known[1].rings() is None):
            return known[1]
        made: Program | str
        try:
            with run.noting() as noted:
                single_thread_schedule.execute(run, workers)
                run.land()
                made = Program(
                    noted, run.clock.marks, {w.index: w.device for w in workers},
                    _hosts(spans_of(_matrices(run.operands))),
                    [*run.blocks.taken, *(w.taken for w in workers)],
                )  # fmt: skip
        except Unfit as unfit:
            made = str(unfit)
        for worker in workers:
            worker.waited.clear()
        self._known.put(key, (run.plan, made))
        return made

    def execute(self, run: Run, workers: list[Worker], program: Program | str) -> str:
        """Carries out a run whose plan holds everything at once, and that was prepared; gives who
        did, in words."""
        rings = program.rings() if isinstance(program, Program) else None
        if isinstance(program, Program) and rings is not None:
            matrices = _matrices(run.operands)
            spans = spans_of(matrices)
            run.clock.marks = program.carry_out(_starts(spans), run.operands.fresh, run.progress)
            alike = alike_of(run.plan, run.variant, matrices, spans, run.devices[0])
            self._rooms.put(alike, Room.of(run, workers))
            return NATIVE
        single_thread_schedule.execute(run, workers)
        return python(GIVEN_BACK if isinstance(program, Program) else program)


def _why_not(run: Run) -> str | None:
    """Why a run is not for a program, before anything is known of its commands."""
    if run.resident:
        return "operands are brought before the clock runs"
    if run.shared is not None:
        return "one of several runs"
    if any(device.calls() is None for device in run.devices):
        return "its devices are not GPUs"
    if run.plan.reduce == "nccl" and run.plan.summed:
        return "NCCL sums"
    matrices = _matrices(run.operands)
    return _unfit(matrices, spans_of(matrices))


def _unfit(matrices: list[Operand], spans: list[range]) -> str | None:
    """Why a run of these matrices, of which the last is written, is not for a program."""
    if any(x.home is not None or not isinstance(x.array, np.ndarray) for x in matrices):
        return "a matrix is not the host's"
    if any(not x.array.size or min(x.array.strides) < 0 for x in matrices):
        return "a matrix is empty, or backwards"
    if file_of(matrices[-1].array, NpyWriter) is not None:
        return "C is written to the disk meanwhile"
    apart = sorted(_hosts(spans), key=lambda x: x.start)
    if any(y.start < x.stop for x, y in pairwise(apart)):
        return "matrices share memory"
    return native_executor.unavailable()


def _matrices(operands: Operands) -> list[Operand]:
    """Those that are read or written."""
    added = [operands.c] if operands.c is not None and operands.problem.beta else []
    return [operands.a, operands.b, *added, operands.out]


def spans_of(matrices: Sequence[Operand]) -> list[range]:
    """The addresses of each matrix."""
    return [span(x.array) for x in matrices]


def _hosts(spans: list[range]) -> list[range]:
    """Those of the host's matrices, each of which may be several operands."""
    return list(dict.fromkeys(spans))


def _starts(spans: list[range]) -> list[int]:
    """Where the host's matrices begin."""
    return [x.start for x in _hosts(spans)]


def alike_of(
    plan: Plan, variant: Variant, matrices: Sequence[Operand], spans: list[range], device: Device
) -> Alike:
    """What runs alike have in common: all that their commands have in them, but for the addresses
    of the host's matrices, and of what is in their room."""
    hosts = _hosts(spans)
    lie = [
        (lies(x.array), plan.page_locked or device.reads(x.array), hosts.index(at))
        for x, at in zip(matrices, spans, strict=True)
    ]
    return (id(plan), variant, *lie)


def _key(run: Run, workers: list[Worker]) -> tuple[Alike, Place]:
    """What runs of one program have in common."""
    matrices = _matrices(run.operands)
    alike = alike_of(run.plan, run.variant, matrices, spans_of(matrices), run.devices[0])
    return alike, place_of(run, workers)
