"""How the workers' partial C of a K-split become C: a strategy, one of three.

This one, "ordered", sums each strip on its owner's device, in the order of the workers; workers
that share another device add theirs there before. The others are `nccl_reduction` and
`critical_reduction`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..devices.base import Device, Stream
from ..planning.plan import Panel, Plan, Strip
from .run import Run
from .transfers import Later


@dataclass(frozen=True)
class StripSum:
    """A strip's sum, worked out before it is due: the products and subtotals it waits for, the
    copies that bring those of other devices here (to where, from where, and the copy itself),
    bytes that come from other devices, what else is waited for on its stream, and the sum."""

    made: list[Later]
    fetches: list[tuple[Any, Any, Callable[[Stream], None]]]
    bytes_fetched: int
    total: Callable[[Stream], None]
    wait: Callable[[Stream], None] | None = None


class Reduction:
    """The ordered reduction; also the interface of the others.

    `on_device` says that strips of C are finished on devices; otherwise C is made in host memory
    (`HostReduction`).
    """

    name = "ordered"
    on_device = True

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def words(cls, plan: Plan, devices: Sequence[Device]) -> str:
        """How a plan's partials are summed, for people."""
        if not plan.bytes_peer:
            return "ordered sum on the device"
        linked = all(x.reaches(y) for x in devices for y in devices)
        way = "peer copies" if linked else "copies staged through host memory"
        return f"ordered sum on the device, {way}, as panels are ready"

    def begin(self) -> None:
        """Called before any worker starts."""

    def end(self) -> None:
        """Called when every worker has finished."""

    def synchronize(self) -> None:
        """Waits for what it has started."""

    def summands(self, strip: Strip) -> Sequence[tuple[int, ...]]:
        """What a strip's owner adds, as `Strip` has it."""
        return strip.summands

    def fetched(self, strip: Strip, device: Device) -> list[int]:
        """The first workers of what has to be copied to the device of a strip's owner."""
        firsts = [first for first, *_ in self.summands(strip)]
        return [w for w in firsts if self.run.device_of(w) is not device]

    def strip_sum(
        self, panel: Panel, strip: Strip, device: Device, rooms: Mapping[int, Any], target: Any
    ) -> StripSum:
        """The sum of a strip; `rooms` has where partials and subtotals are fetched to, by their
        first worker."""
        run, problem = self.run, self.run.plan.problem
        copies: dict[int, tuple[Any, Any, Callable[[Stream], None]]] = {}
        views, made, firsts = [], [], []
        for group in self.summands(strip):
            view, room = run.summand(panel, strip, group), rooms.get(group[0])
            if room is not None:
                room = room[:, : view.shape[1]]
                copies[group[0]] = room, view, device.bound_copy(room, view)
            views.append(view if room is None else room)
            firsts.append(group[0])
            made.append(run.made(panel, strip, group))
        # Each owner begins with the worker after it, or all would read from the first at once.
        turn = firsts.index(strip.owner) if strip.owner in firsts else 0
        fetches = [copies[w] for w in (*firsts[turn:], *firsts[:turn]) if w in copies]
        total = device.bound_sum(views, target, alpha=problem.alpha, beta=problem.beta)
        moved = sum(view.nbytes for _room, view, _copy in fetches)
        return StripSum(made, fetches, moved, total)

    def subtotal(
        self, panel: Panel, strip: Strip, group: tuple[int, ...], device: Device
    ) -> StripSum:
        """The sum of the partials of workers of one device, alpha and beta aside."""
        run = self.run
        partials = [run.partial(panel, strip, w) for w in group]
        total = device.bound_sum(partials, run.summand(panel, strip, group), alpha=1, beta=0)
        return StripSum([run.multiplied[panel, w] for w in group], [], 0, total)


class HostReduction(Reduction, abc.ABC):
    """One that makes C in host memory."""

    on_device = False

    @abc.abstractmethod
    def add(self, worker: int, panel: Panel, device: Device, stream: Stream) -> None:
        """Adds a worker's partial to C, one worker at a time."""
