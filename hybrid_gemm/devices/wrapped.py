"""A device that does everything as another one does, for classes that change a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from .base import Device
from .roles import Facts, Products

Method = TypeVar("Method", bound=Callable[..., Any])


class _HandedOn:
    """A member of a wrapper that is its device's, unless the wrapper sets its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: WrappedDevice | None, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.device, self.name)


def _of_device(method: Method) -> Method:
    """A method of `Device` as the wrapped device has it."""
    return cast(Method, _HandedOn(method.__name__))


class WrappedDevice(Device):
    """Hands every call on to `device`: every member of `Device` that is not made of others, so that
    a role's default never stands in for what `device` does."""

    def __init__(self, device: Device):
        self.device = device

    # Those that each device has to have; the others follow below.
    spec = _of_device(Device.spec)
    empty = _of_device(Device.empty)
    copy = _of_device(Device.copy)
    gemm = _of_device(Device.gemm)
    sum = _of_device(Device.sum)
    add = _of_device(Device.add)
    combine = _of_device(Device.combine)

    # What changes products reads their operands as they are, and each by itself.
    bind = Products.bind
    preparable = Products.preparable
    prepared = Products.prepared
    listed = Products.listed
    splitter = Products.splitter
    prepare_ahead = Products.prepare_ahead  # of what the wrapper needs, too


_MADE_OF_OTHERS = {"empty_like", "time_ms"}  # so that the wrapper's own are called
for _name in {*dir(Device), *Facts.__annotations__} - {*vars(WrappedDevice)} - _MADE_OF_OTHERS:
    if not _name.startswith("_"):
        setattr(WrappedDevice, _name, _HandedOn(_name))
