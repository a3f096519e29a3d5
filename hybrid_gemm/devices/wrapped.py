"""A device that does everything as another one does, for classes that change a part of it."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from ..catalog import Variant
from .base import Array, Device
from .roles import Products

Member = TypeVar("Member")


class _HandedOn:
    """A member of a wrapper that is its device's."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: WrappedDevice | None, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.device, self.name)


def _of_device(member: Member) -> Member:
    """A member of `Device` as the wrapped device has it."""
    return cast(Member, _HandedOn())


class WrappedDevice(Device):
    """Hands every call on to `device`. Every member of `Device` that is not made of others is
    here, so that a role's default never stands in for what `device` does."""

    def __init__(self, device: Device):
        self.device = device
        self.kind, self.name = device.kind, device.name
        self.on_gpu, self.ordinal = device.on_gpu, device.ordinal
        self.capability, self.processors = device.capability, device.processors
        self.host_memory, self.queues = device.host_memory, device.queues
        self.chunk_flops, self.together = device.chunk_flops, device.together
        self.checks = device.checks

    unwrapped: Any = _HandedOn()
    detached = _of_device(Device.detached)

    # --- facts ----------------------------------------------------------------------------

    port: Any = _HandedOn()
    spec = _of_device(Device.spec)
    machine = _of_device(Device.machine)
    library_launch = _of_device(Device.library_launch)
    describe = _of_device(Device.describe)
    peak_tflops = _of_device(Device.peak_tflops)
    readings = _of_device(Device.readings)

    # --- streams and clock ----------------------------------------------------------------

    stream = _of_device(Device.stream)
    streams = _of_device(Device.streams)
    enter = _of_device(Device.enter)
    using = _of_device(Device.using)
    session = _of_device(Device.session)
    repeated = _of_device(Device.repeated)
    start_clock = _of_device(Device.start_clock)
    clock = _of_device(Device.clock)

    # --- memory ---------------------------------------------------------------------------

    row_gap: Any = _HandedOn()
    empty = _of_device(Device.empty)
    allocation_stream: Any = _HandedOn()
    free_unused = _of_device(Device.free_unused)
    pinned = _of_device(Device.pinned)

    # --- copies ---------------------------------------------------------------------------

    copy = _of_device(Device.copy)
    bound_copy = _of_device(Device.bound_copy)
    copy_pinned = _of_device(Device.copy_pinned)
    reads = _of_device(Device.reads)
    reaches = _of_device(Device.reaches)
    reads_memory_of = _of_device(Device.reads_memory_of)
    calls = _of_device(Device.calls)

    # --- products -------------------------------------------------------------------------

    prepare = _of_device(Device.prepare)

    def prepare_ahead(
        self, variant: Variant, a: Array, b: Array, dtype: str, *, summed: bool = True
    ) -> None:
        self.prepare(variant, a, b, dtype, summed=summed)  # what the wrapper needs, too

    awaits_kernels: Any = _HandedOn()
    prepare_combine = _of_device(Device.prepare_combine)
    make_room = _of_device(Device.make_room)
    compile = _of_device(Device.compile)
    gemm = _of_device(Device.gemm)
    bound_gemm = _of_device(Device.bound_gemm)
    # What changes products reads their operands as they are, and each by itself.
    bind = Products.bind
    preparable = Products.preparable
    prepared = Products.prepared
    listed = Products.listed
    splitter = Products.splitter
    sum = _of_device(Device.sum)
    bound_sum = _of_device(Device.bound_sum)
    add = _of_device(Device.add)
    combine = _of_device(Device.combine)
