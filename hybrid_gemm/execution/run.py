"""What all workers of one execution share, in typed parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np

from ..arrays.operand import Operands
from ..catalog import Variant
from ..devices.base import Device
from ..planning.plan import Panel, Plan, Strip
from .commands import Command, Commands
from .device_memory import Blocks, SharedBlocks
from .executor import INCOMPLETE, Execution
from .kept_products import KeptProducts
from .timeline import Clock
from .transfers import Later, Stop, Stopped, Transfer


class Run:
    """One execution of a plan: its inputs, its state, its clock, its copies, and the memory of
    its blocks. Raises `MemoryError` if a device has not so much.

    `multiplied` has for each panel and worker a future of the event after which its product is
    there, and `added` for each strip and first worker of a group one of their subtotal, which is in
    `subtotals`; `c_ready` has for each strip one of beta's C, and `finished` one of the strip
    itself. All workers of a resident run pass the two `gates` together, where the clock starts and
    stops. A run among several is given the blocks that they have in common, `shared`; then somebody
    else has started its clock. `products` are those that earlier runs have worked out.
    """

    def __init__(
        self, plan: Plan, devices: Sequence[Device], variant: Variant, operands: Operands,
        *, progress: Callable[[int], None] | None, resident: bool, shared: SharedBlocks | None,
        products: KeptProducts,
    ) -> None:  # fmt: skip
        self.products = products
        self.plan, self.devices, self.variant, self.operands = plan, devices, variant, operands
        self.progress = progress or (lambda flops: None)
        self.resident, self.shared = resident, shared
        self.dtype = np.dtype(plan.problem.dtype)
        self.result_dtype = _result_dtype(plan, operands)
        self.stop, self.commands = Stop(), Commands()
        self.clock = clock = Clock(
            {w.index: devices[w.device] for w in plan.workers}, shared=shared is not None
        )
        count = max(1, sum(bool(worker.boxes) for worker in plan.workers))
        self.gates = Barrier(count, clock.start), Barrier(count, clock.stop)
        self.transfers: list[tuple[int, str, int, Transfer]] = []
        self.wrote = False  # whether `out` is no longer what it was
        self.partials: dict[tuple[Panel, int], Any] = {}
        self.subtotals: dict[tuple[Strip, int], Any] = {}
        self._await_strips()
        self.blocks = Blocks(plan, devices, variant, operands, self.stop, shared)

    def _await_strips(self) -> None:
        plan, future = self.plan, self.stop.future
        self.multiplied: dict[tuple[Panel, int], Later] = {
            (panel, worker): future() for panel in plan.panels for worker in panel.workers
        }
        self.added: dict[tuple[Strip, int], Later] = {
            (strip, group[0]): future() for panel in plan.panels for strip, group in panel.subtotals
        }
        self.c_ready: dict[Strip, Later] = {strip: future() for strip in plan.strips}
        self.finished: dict[Strip, Later] = {strip: future() for strip in plan.strips}

    @contextlib.contextmanager
    def noting(self) -> Iterator[list[Command]]:
        """Commands are noted in the list meanwhile, and not carried out. Afterwards nothing has
        been done."""
        progress, self.progress = self.progress, lambda flops: None
        self.commands.noted, self.clock.running = [], True
        try:
            yield self.commands.noted
        finally:
            self.progress, self.commands.noted, self.clock.running = progress, None, False
            self.clock.clear()
            self.transfers.clear()
            self.stop.futures.clear()
            self.wrote = False
            self._await_strips()
            self.blocks.await_parts()

    def device_of(self, worker: int) -> Device:
        return self.devices[self.plan.workers[worker].device]

    def partial(self, panel: Panel, strip: Strip, worker: int) -> Any:
        """A worker's partial of a strip, where it was made."""
        where = strip.rows.within(panel.rows), strip.cols.within(panel.cols)
        return self.partials[panel, worker][where]

    def summand(self, panel: Panel, strip: Strip, group: tuple[int, ...]) -> Any:
        """What these workers of one device give to a strip's sum, where it is made."""
        if len(group) == 1:
            return self.partial(panel, strip, group[0])
        return self.subtotals[strip, group[0]][:, : len(strip.cols)]

    def made(self, panel: Panel, strip: Strip, group: tuple[int, ...]) -> Later:
        """The event after which it is there."""
        if len(group) == 1:
            return self.multiplied[panel, group[0]]
        return self.added[strip, group[0]]

    def transfer(self, worker: int, phase: str, size: int, done: Later) -> Transfer:
        """A copy that the run waits for; its bytes count if the clock runs."""
        transfer = Transfer(done, self.stop.flag, worker, self.commands)
        with self.stop.lock:
            self.transfers.append((worker, phase if self.clock.running else "", size, transfer))
        return transfer

    def land(self) -> None:
        """Waits for all copies, unless they are noted alone. Raises the error of one that
        failed."""
        for worker, phase, size, transfer in self.transfers:
            transfer.done.result()
            if transfer.stop is None:  # there was nothing to copy
                continue
            if self.commands.noted is None:
                transfer.stop.synchronize()
            if phase:
                self.clock.add(worker, phase, transfer.start, transfer.stop, size)

    def fail(self, error: BaseException) -> None:
        """Lets every part leave at its next step. That another part made it leave is no error."""
        if not isinstance(error, Stopped | BrokenBarrierError):
            self.stop(error)
        for gate in self.gates:
            gate.abort()

    def failure(self, error: BaseException) -> BaseException:
        """The first error of all parts, which is the one to report where this part has raised."""
        return self.stop.error or error

    def note_incomplete(self, error: BaseException) -> None:
        """Has the error that is reported say so where `out` is incomplete."""
        if self.wrote and not self.operands.fresh:
            self.failure(error).add_note(INCOMPLETE)

    def wait_for_transfers(self) -> None:
        """Returns when nothing is being copied any more."""
        for *_, transfer in self.transfers:
            transfer.wait()

    def done(self, executor: str) -> Execution:
        """What was executed, and by which executor, once it is."""
        timeline = self.clock.timeline()
        return Execution(timeline, self.clock.total_ms, self.plan, executor=executor)

    def let_go(self) -> None:
        """Gives memory back now, and not when Python finds what refers to what; an error holds the
        frames that it came through, and they hold C."""
        self.transfers.clear()
        self.blocks.clear()
        self.partials.clear()
        self.subtotals.clear()
        self.stop.futures.clear()
        self.stop.error = None


def _result_dtype(plan: Plan, operands: Operands) -> np.dtype:
    """The dtype of finished strips: of 16 bits where tensor cores make C of such operands,
    and each element is written once."""
    narrow = np.dtype(plan.problem.operands)
    given = [x.dtype for x in (operands.c, operands.out) if x is not None]
    fits = plan.writes_once and all(dtype == narrow for dtype in given)
    return narrow if fits else np.dtype(plan.problem.dtype)
