"""Products that are streamed: by several workers, in panels, in turns, from host memory and files.

A plan is written as a program (`writer.py`) and played: by native threads where all of its commands
are such that they can (`native_executor.py`), by Python otherwise (`player.py`). A program that may
come again is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..arrays.mapped_files import file_of
from ..arrays.npy_files import NpyWriter
from ..arrays.operand import Operand, Operands
from ..arrays.strides import lies, span
from ..catalog import Variant
from ..devices.base import Device
from ..devices.cuda import nccl_group
from ..host.kept import Kept
from ..planning.plan import Plan
from ..planning.reading_order import reading_order
from . import native_executor, staging
from .device_memory import SharedBlocks
from .kept_products import KeptProducts
from .native_executor import NativeProgram, Unfit
from .player import Lease, Play
from .read_ahead import ReadAhead, Reading
from .timeline import Clock, Timeline
from .writer import Writer

NATIVE = "native"
MOST = 64  # programs, and ways in which one is carried out natively
COMPILING, LOADING = "its kernels are being compiled", "a library's first product of its kind"
GIVEN_BACK = "its buffers were given back meanwhile"

Progress = Callable[[int], None] | None


def python(why: str) -> str:
    """Words for a play by Python."""
    return f"python ({why})"


def is_settled(executor: str) -> bool:
    """Whether plays that come after one with these words are carried out as it was."""
    return executor not in map(python, (COMPILING, LOADING, GIVEN_BACK))


def reduction_words(plan: Plan, devices: Sequence[Device]) -> str:
    """How a plan's partials are summed, for people."""
    if not plan.summed:
        return "none"
    if plan.reduce == "critical":
        return "critical (one worker at a time, through host memory)"
    if not plan.bytes_peer:
        return "ordered sum on the device"
    if plan.reduce == "nccl":
        return f"NCCL {nccl_group.version()} between GPUs, as panels are ready"
    linked = all(x.reaches(y) for x in devices for y in devices)
    way = "peer copies" if linked else "copies staged through host memory"
    return f"ordered sum on the device, {way}, as panels are ready"


@dataclass(frozen=True)
class Execution:
    """What was done to make C, which is in the operands' `out`. `total_ms` is the host's time for
    what the clock covered, and `plan` what was followed in the end, where memory was shorter than
    it was said to be. `executor` says who played it: "native", or "python" and why; `reading` what
    was read ahead of mapped files, if there were any."""

    timeline: Timeline
    total_ms: float
    plan: Plan | None = None
    executor: str = "python"
    reading: Reading | None = None


class NotStarted(MemoryError):
    """There is not the memory that a program takes: nothing was done."""


class Streamed:
    """A program, with what was worked out to play it: `products` by worker, and what native threads
    carry out. `plan` stays with it, so that no other has its `id` meanwhile. `by_python` says why
    native threads never carry it out."""

    def __init__(
        self, program: Writer, plan: Plan, products: KeptProducts, operands: Operands
    ) -> None:
        self.program, self.plan = program, plan
        self.products = {
            w: products.of(worker.device, program.variant) for w, worker in program.workers.items()
        }
        self.by_python = _why_python(program, _matrices(operands))
        # A library's kernels can be recorded once they are loaded.
        self.loaded = not program.variant.kernel.library
        self._natives: Kept[NativeProgram | str] = Kept(MOST)

    def native(
        self, arrays: Sequence[np.ndarray], hosts: Sequence[range], lease: Lease
    ) -> tuple[NativeProgram | str | None, Hashable]:
        """What native threads carry out, or why there is no such thing; None where nobody has
        looked yet. And its key."""
        if file_of(arrays[-1], NpyWriter) is not None:
            return "C is written to the disk meanwhile", None
        apart = sorted(hosts, key=_start)
        if any(y.start < x.stop for x, y in pairwise(apart)):
            return "matrices share memory", None
        if reason := native_executor.unavailable():
            return reason, None
        key = self.key(arrays, lease)
        return self._natives.get(key), key

    def key(self, arrays: Sequence[np.ndarray], lease: Lease) -> Hashable:
        """What native programs of these arrays and this lease have in common."""
        return lease.place, *map(self.program.devices[0].reads, arrays)

    def make_native(
        self, key: Hashable, hosts: Sequence[range], lease: Lease, slots: Sequence[Any]
    ) -> NativeProgram | str:
        """As `native`, looked at now."""
        if any(device.awaits_kernels for device in self.program.devices):
            return COMPILING
        if not self.loaded:
            self.loaded = True
            return LOADING
        made: NativeProgram | str
        try:
            passing = self.program.layout.spans(lease.pieces)
            made = NativeProgram(
                self.program, slots, lease.streams, self.products, hosts, passing
            )  # fmt: skip
        except Unfit as unfit:
            made = str(unfit)
        self._natives.put(key, made)
        return made


class StreamedExecutor:
    """Carries out plans over these devices. `smaller(plan)` makes a plan that takes less memory,
    for when another program has taken what a device said it had; without it that is an error.
    `products` are kept from play to play."""

    def __init__(
        self, devices: Sequence[Device], smaller: Callable[[Plan], Plan] | None = None,
        products: KeptProducts | None = None,
    ) -> None:  # fmt: skip
        self.devices, self.smaller = devices, smaller
        self.products = products or KeptProducts()
        self._programs: Kept[Streamed] = Kept(MOST)

    def execute(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Progress = None, timed: bool = True,
    ) -> Execution:  # fmt: skip
        """Carries out a plan by a kernel. Returns when C is finished, or raises the first error of
        any part, with nothing still at work in the operands. Kernels are compiled before the clock
        runs; where nobody asks for the time, not `timed`, while operands are brought. With
        `resident` the clock runs only from when every block is on its device until every strip is
        finished there."""
        self._prepare(plan, variant, operands, timed=timed)
        play = functools.partial(self.play, plan, variant, operands, resident=resident)
        return self._reading_ahead(plan, operands, progress, play)

    def again(
        self, plan: Plan, variant: Variant, operands: Operands, progress: Progress = None
    ) -> Execution:
        """Plays a program that is kept. Raises `NotStarted` where there is none, or its memory is
        not there."""
        found = self._programs.get((id(plan), variant, False, *_lie(operands)))
        if found is None:
            raise NotStarted
        play = functools.partial(self._timed, found, operands)
        return self._reading_ahead(plan, operands, progress, play)

    def _reading_ahead(
        self, plan: Plan, operands: Operands, progress: Progress, play: Callable[..., Execution]
    ) -> Execution:
        """A play, while what it will read of files is asked for."""
        needs = functools.partial(reading_order, plan)
        with ReadAhead(needs, operands, plan.problem.flops) as ahead:
            done = play(progress=ahead.counting(progress))
        return dataclasses.replace(done, reading=ahead.reading) if ahead.reading else done

    def _prepare(self, plan: Plan, variant: Variant, operands: Operands, *, timed: bool) -> None:
        """Has kernels compiled."""
        for device in self.devices:
            prepare = device.prepare if timed else device.prepare_ahead
            prepare(
                variant, operands.a.array, operands.b.array, plan.problem.operands,
                summed=plan.summed,
            )  # fmt: skip

    def written(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        shared: SharedBlocks | None = None,
    ) -> Streamed:  # fmt: skip
        """The program of a plan; one that is kept, if there is."""
        key = id(plan), variant, resident, *_lie(operands)
        found = self._programs.get(key) if shared is None else None
        if found is None:
            program = Writer(
                plan, self.devices, variant, operands, resident=resident, shared=shared
            )  # fmt: skip
            found = Streamed(program, plan, self.products, operands)
            if shared is None and not plan.turns_in_memory:
                self._programs.put(key, found)
        return found

    def play(
        self, plan: Plan, variant: Variant, operands: Operands, *, resident: bool = False,
        progress: Progress = None, shared: SharedBlocks | None = None,
    ) -> Execution:  # fmt: skip
        """Carries out a plan, or a smaller one where there is not enough memory. `operands.c` is
        read where beta != 0, and `operands.out` receives the result. One of several plays is given
        the blocks that they have in common, `shared`; they share a clock, and sessions, that
        somebody else has started. Raises the first error, with a note if `out` is incomplete
        then."""
        while True:
            written = self.written(plan, variant, operands, resident=resident, shared=shared)
            try:
                return self._timed(written, operands, progress, shared)
            except NotStarted:
                if self.smaller is None:
                    raise
            for device in self.devices:
                device.free_unused()
            # Raises OutOfMemoryError when not even the smallest turns would fit.
            plan = self.smaller(plan)

    def _timed(
        self, streamed: Streamed, operands: Operands, progress: Progress = None,
        shared: SharedBlocks | None = None,
    ) -> Execution:  # fmt: skip
        """As `play_once`, with its times."""
        plan = streamed.plan
        devices = {w.index: self.devices[w.device] for w in plan.workers}
        clock = Clock(devices, shared=shared is not None)
        executor = self.play_once(streamed, operands, clock, progress, shared)
        return Execution(clock.timeline(), clock.total_ms, plan, executor=executor)

    def play_once(
        self, streamed: Streamed, operands: Operands, clock: Clock | None = None,
        progress: Progress = None, shared: SharedBlocks | None = None,
    ) -> str:  # fmt: skip
        """Plays a program; who did, in words. `clock` may be left out where nobody asks for times.
        Raises `NotStarted` where there is not enough memory."""
        program, alone = streamed.program, shared is None
        timed = clock if clock is not None and alone and not program.resident else None
        native: NativeProgram | str | None = streamed.by_python
        key: Hashable = None
        hosts, play = list[range](), None
        with contextlib.ExitStack() as stack:
            try:
                lease = stack.enter_context(Lease(program))
                if not native:
                    arrays = [x.array for x in _matrices(operands)]
                    hosts = list(dict.fromkeys(map(span, arrays)))
                    native, key = streamed.native(arrays, hosts, lease)
                if not _holds_rings(native, stack):
                    products = streamed.products
                    play = Play(program, operands, lease, clock, products, progress, shared)
                    if clock is not None:
                        lease.make_room(operands)
                if play is not None and not isinstance(native, str):
                    key = streamed.key(arrays, lease)  # with the rings that are there now
                    native = streamed.make_native(key, hosts, lease, play.slots)
                    if _holds_rings(native, stack):
                        play = None
            except MemoryError:
                raise NotStarted from None
            for device in self.devices if alone else ():
                stack.enter_context(device.session())
            if timed is not None:
                timed.start()
            if operands.fresh and operands.out.home is None and program.remote:
                staging.make_pages(program.remote, operands.out.array)
            marks: Iterable[tuple] = ()
            if play is not None:
                play.play(operands)
                marks = play.marks() if clock is not None else ()
            elif isinstance(native, NativeProgram):
                marks = native.carry_out([x.start for x in hosts], operands.fresh, progress)
            if timed is not None:
                timed.stop()
            if clock is not None:
                clock.marks = marks
        if play is None:
            return NATIVE
        return python(native if isinstance(native, str) else GIVEN_BACK)


def _holds_rings(native: object, stack: contextlib.ExitStack) -> bool:
    """Whether something is a native program whose slots are there, and until the stack ends."""
    rings = native.rings() if isinstance(native, NativeProgram) else None
    if rings is not None:
        stack.callback(rings.clear)
    return rings is not None


def _why_python(program: Writer, matrices: Sequence[Operand]) -> str | None:
    """Why native threads never carry a program out, of whatever matrices lie like these."""
    if not program.queued:
        return "workers have threads of their own"
    if program.resident:
        return "operands are brought before the clock runs"
    if program.shared is not None:
        return "one of several runs"
    if any(device.calls() is None for device in program.devices):
        return "its devices are not GPUs"
    if program.reduce == "nccl":
        return "NCCL sums"
    if any(x.home is not None or not isinstance(x.array, np.ndarray) for x in matrices):
        return "a matrix is not the host's"
    if any(not x.array.size or min(x.array.strides) < 0 for x in matrices):
        return "a matrix is empty, or backwards"
    return None


def _matrices(operands: Operands) -> list[Operand]:
    """Those that are read or written."""
    added = [operands.c] if operands.c is not None and operands.problem.beta else []
    return [operands.a, operands.b, *added, operands.out]


def _lie(operands: Operands) -> list[tuple]:
    """How matrices lie, and which are the same, as far as programs depend on it."""
    matrices = _matrices(operands)
    spans = [span(x.array) for x in matrices]
    hosts = list(dict.fromkeys(spans))
    return [
        (lies(x.array), getattr(x.home, "ordinal", x.home), x is operands.out, hosts.index(at))
        for x, at in zip(matrices, spans, strict=True)
    ]


_start = operator.attrgetter("start")
