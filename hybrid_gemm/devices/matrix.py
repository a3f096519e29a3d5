"""A matrix and the device whose memory it lies in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..arrays.strides import layout
from ..planning.partition import Span
from .base import Device


@dataclass(frozen=True)
class Matrix:
    """A 2-D view and the device it lives on; None is host memory."""

    array: Any
    home: Device | None = None

    def part(self, rows: Span, cols: Span):
        return self.array[rows.slice, cols.slice]

    def lies(self, device: Device) -> bool:
        """Whether it is in the memory that the device multiplies in."""
        return self.home is device or (self.home is None and device.host_memory)

    def serves(self, device: Device, dtype: str) -> bool:
        """Whether the device multiplies it where it is, as it is."""
        readable = device.host_memory or layout(self.array)
        return bool(self.lies(device) and self.array.dtype == dtype and readable)
