"""Sums by NCCL: the partials of a panel are added in place, into those of its strips' owners, as
soon as all are multiplied. Owners then apply alpha and beta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..devices.base import Device, Stream
from ..devices.cuda import nccl_group
from ..planning.plan import Panel, Plan, Strip
from .reduction import Reduction, StripSum
from .run import Run


class NcclReduction(Reduction):
    """Panels of a run summed between GPUs, each by all of its workers at once."""

    name = "nccl"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.sums: dict[Panel, PanelSum] = {}

    @classmethod
    def words(cls, plan: Plan, devices: Sequence[Device]) -> str:
        if not plan.bytes_peer:
            return super().words(plan, devices)
        return f"NCCL {nccl_group.version()} between GPUs, as panels are ready"

    def summands(self, strip: Strip) -> Sequence[tuple[int, ...]]:
        """NCCL leaves the sum of all in the owner's own."""
        return [(strip.owner,)]

    def strip_sum(
        self, panel: Panel, strip: Strip, device: Device, rooms: Mapping[int, Any], target: Any
    ) -> StripSum:
        own = super().strip_sum(panel, strip, device, rooms, target)
        others = len(strip.partials) - 1
        if not others:
            return own
        if panel not in self.sums:
            self.sums[panel] = PanelSum(self.run, panel)
        size = strip.elements * self.run.dtype.itemsize
        wait = self.sums[panel].bound_wait(device)
        return replace(own, bytes_fetched=others * size, wait=wait)

    def synchronize(self) -> None:
        for each in self.sums.values():
            each.synchronize()


def _ordinal(device: Device) -> int:
    assert device.ordinal is not None  # the planner lets only GPUs sum by NCCL
    return device.ordinal


class PanelSum:
    """A panel's sum, which its owners have in common."""

    def __init__(self, run: Run, panel: Panel) -> None:
        on = {_ordinal(run.device_of(w)): w for w in panel.workers}
        self.places = tuple(sorted(on))
        workers = [on[ordinal] for ordinal in self.places]
        self.group = nccl_group.group(self.places)
        self.multiplied = [run.multiplied[panel, w] for w in workers]
        self.start = self.group.bound_sum([
            (workers.index(strip.owner), [run.partial(panel, strip, w) for w in workers])
            for strip in panel.strips
        ])  # fmt: skip
        self.after: list | None = None  # place by place

    def bound_wait(self, device: Device) -> Callable[[Stream], None]:
        """A call that lets a stream of a device go on when the panel is summed there. The first
        of a panel starts the sum of all of it: NCCL wants all GPUs at once."""
        place = self.places.index(_ordinal(device))

        def wait(stream: Stream) -> None:
            if self.after is None:
                self.after = self.start([future.result() for future in self.multiplied])
            stream.wait(self.after[place])

        return wait

    def synchronize(self) -> None:
        if self.after is not None:
            self.group.synchronize()
