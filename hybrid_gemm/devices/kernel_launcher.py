"""A device that loads and launches the catalog's kernels: what is different on GPUs and on the
emulator."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

from ..catalog import Launch, Variant
from .base import Array, Device, Stream

# A product that is worked out: called with A, B, C and a stream.
BoundProduct = Callable[[Array, Array, Array, Stream], None]


class KernelLauncher(Device):
    """Loads, keeps and launches kernels."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Variant, str, str], Any] = {}

    @abc.abstractmethod
    def load(self, variant: Variant, dtype: str, layouts: str) -> Any:
        """The compiled kernel, ready to launch. `layouts` are the storage orders of A and B, such
        as "nt"."""

    @abc.abstractmethod
    def launch(self, function: Any, launch: Launch, args: Sequence[Any], stream: Stream) -> None:
        """Starts a kernel. Arguments are NumPy scalars and matrices of this device."""

    @abc.abstractmethod
    def pointers(self, matrices: Sequence[Array]) -> Array:
        """The matrices' addresses as a uint64 array on this device."""

    @abc.abstractmethod
    def scratch(self, launch: Launch, dtype: str, stream: Stream) -> list[Array]:
        """The stream's workspace for a launch, a vector of that dtype, and its flags, uint32, which
        kernels leave zero; larger ones where this launch needs them."""

    @abc.abstractmethod
    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct:
        """A call that multiplies matrices laid out as these, worked out once for many."""

    def function(self, variant: Variant, dtype: str, layouts: str = "nn") -> Any:
        """As `load`; a kernel that was loaded is kept."""
        key = (variant, dtype, layouts)
        if key not in self._loaded:
            self._loaded[key] = self.load(variant, dtype, layouts)
        return self._loaded[key]
