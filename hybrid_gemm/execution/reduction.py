"""How the workers' partial C of a K-split become C: a strategy, one of three.

This one, "ordered", sums each strip on its owner's device, in the order of the workers. The
others are `nccl_reduction` and `critical_reduction`.
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
    """A strip's sum, worked out before it is due: the products it waits for, the copies that bring
    other devices' partials here (to where, from where, and the copy itself), bytes that come from
    other devices, what else is waited for on its stream, and the sum itself."""

    products: list[Later]
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

    def fetched(self, strip: Strip, device: Device) -> list[int]:
        """The workers whose partials of a strip have to be copied to its owner's device."""
        return [w for w in self.run.plan.added(strip) if self.run.device_of(w) is not device]

    def strip_sum(
        self, panel: Panel, strip: Strip, device: Device, rooms: Mapping[int, Any], target: Any
    ) -> StripSum:
        """The sum of a strip; `rooms` has by worker where its partial is fetched to."""
        run, problem = self.run, self.run.plan.problem
        added = run.plan.added(strip)
        copies: dict[int, tuple[Any, Any, Callable[[Stream], None]]] = {}
        views = []
        for w in added:
            view, room = run.partial(panel, strip, w), rooms.get(w)
            if room is not None:
                room = room[:, : view.shape[1]]
                copies[w] = room, view, device.bound_copy(room, view)
            views.append(view if room is None else room)
        # Each owner begins with the worker after it, or all would read from the first at once.
        turn = added.index(strip.owner) if strip.owner in added else 0
        fetches = [copies[w] for w in (*added[turn:], *added[:turn]) if w in copies]
        total = device.bound_sum(views, target, alpha=problem.alpha, beta=problem.beta)
        products = [run.multiplied[panel, w] for w in strip.partials]
        moved = sum(view.nbytes for _room, view, _copy in fetches)
        return StripSum(products, fetches, moved, total)


class HostReduction(Reduction, abc.ABC):
    """One that makes C in host memory."""

    on_device = False

    @abc.abstractmethod
    def add(self, worker: int, panel: Panel, device: Device, stream: Stream) -> None:
        """Adds a worker's partial to C, one worker at a time."""
