"""`Device`: one place that multiplies. `roles` says what it offers."""

from __future__ import annotations

from .roles import Array, Copies, Facts, Memory, Products
from .streams import Event, HostEvent, HostStream, Stream

__all__ = ["Array", "Device", "Event", "HostEvent", "HostStream", "Stream"]


class Device(Facts, Memory, Copies, Products):
    """One place that multiplies. Several threads use it at once, each with its own stream."""

    def detached(self) -> Device:
        """For what outlives this device: one like it that shares neither memory nor streams with
        it; itself where it keeps none."""
        return self

    @property
    def unwrapped(self) -> Device:
        """The device itself, where this one only changes how another multiplies."""
        return self
