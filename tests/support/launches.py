"""Devices that keep what each of their kernels was launched with."""

import functools
from dataclasses import dataclass

from .devices import open_device


@dataclass(frozen=True)
class Recorded:
    """A launch: the role and the dtype of the kernel, and its arguments."""

    role: str
    dtype: str
    args: list


class Recording:
    """Makes a kernel device, of which another class is a subclass too, keep its launches."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.launched: list[Recorded] = []
        self._loaded_as = {}

    def load(self, variant, dtype, layouts):
        function = super().load(variant, dtype, layouts)
        self._loaded_as[id(function)] = function, variant.kernel.role, dtype
        return function

    def launch(self, function, launch, args, stream):
        _function, role, dtype = self._loaded_as.get(id(function), (None, "", ""))
        self.launched.append(Recorded(role, dtype, list(args)))
        super().launch(function, launch, args, stream)

    def of(self, role: str) -> list[Recorded]:
        """The launches of kernels of that role."""
        return [x for x in self.launched if x.role == role]


@functools.cache
def recording_device(kind: str):
    """A device of that kind which records its launches, one for all tests."""
    plain = type(open_device(kind))
    return type(f"Recording{plain.__name__}", (Recording, plain), {})(
        *([0] if kind == "cuda" else [])
    )
