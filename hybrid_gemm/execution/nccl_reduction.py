"""Sums by NCCL: the partials of a panel are added in place, into those of its strips' owners, as
soon as all are multiplied. Owners then apply alpha and beta."""

from __future__ import annotations

from collections.abc import Callable

from ..devices.base import Device, Stream
from ..devices.cuda import nccl_group
from ..planning.plan import Panel


class PanelSum:
    """A panel's sum, which its owners have in common. `run` is the `ThreadRun`."""

    def __init__(self, run, panel: Panel):
        on = {run.device_of(w).ordinal: w for w in panel.workers}
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
        place = self.places.index(device.ordinal)

        def wait(stream):
            if self.after is None:
                self.after = self.start([future.result() for future in self.multiplied])
            stream.wait(self.after[place])

        return wait

    def synchronize(self) -> None:
        if self.after is not None:
            self.group.synchronize()
