"""A product's launches as a list that one native call starts: `launch_list.cpp`, compiled once by
g++ if that is here.

The list is made from what a bound product would launch (`driver.noted`), so it starts the same
kernels with the same arguments: only the addresses of A, B and C are put in anew.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import HybridGemmError
from ...host import compiler
from . import driver
from .tensor_maps import TensorMap

_SOURCE = Path(__file__).with_name("launch_list.cpp")
_ALIGNMENT = 64  # of a tensor map, as the driver wants it


class _Place(ctypes.Structure):
    _fields_ = [("at", c_void_p), ("offset", c_int64), ("matrix", c_int32), ("is_map", c_int32)]


class _Launch(ctypes.Structure):
    _fields_ = [("config", c_void_p), ("function", c_void_p), ("arguments", c_void_p)]


class _List(ctypes.Structure):
    _fields_ = [
        ("places", c_void_p), ("place_count", c_int64),
        ("launches", c_void_p), ("launch_count", c_int64),
        ("launch", c_void_p), ("replace", c_void_p), ("matrices", c_uint64 * 3),
    ]  # fmt: skip


@functools.cache
def unavailable() -> str | None:
    """Why products are launched from Python alone here, in one line."""
    try:
        native()
        driver.address_of("cuTensorMapReplaceAddress")
    except (HybridGemmError, OSError, AttributeError) as error:
        return " ".join(str(error).split())
    return None


@functools.cache
def native(name: str = "start_list") -> Callable[[int, int, int, int], int]:
    """One of the native functions: of a list's or a product's address, and those of A, B and C.
    Raises `UnavailableError` or `KernelError` where it cannot be compiled."""
    call = getattr(ctypes.PyDLL(str(compiler.build_library(_SOURCE))), name)
    call.argtypes, call.restype = (c_void_p, c_uint64, c_uint64, c_uint64), c_int
    return call


class Prepared(Protocol):
    """A product on one stream: `start` takes the addresses of A, B and C, and returns 0 or a
    status of which `check` makes an error."""

    start: Callable[[int, int, int], int]

    def check(self, status: int) -> None: ...


class LaunchList:
    """The launches of one product on one stream; see `Prepared`. `noted` are those that a bound
    product would have made, and `spans` the first address and the one past the last of its A, B
    and C, which have no byte in common."""

    def __init__(self, noted: Sequence[driver.Noted], stream: int, spans: Sequence[range]) -> None:
        self._places: list[_Place] = []
        self._kept: list[Any] = []  # what launches point to, but A, B and C
        made = [self._launch(each, stream, spans) for each in noted]
        places, launches = (_Place * len(self._places))(*self._places), (_Launch * len(made))(*made)
        whole = _List(
            ctypes.addressof(places), len(places), ctypes.addressof(launches), len(launches),
            driver.address_of("cuLaunchKernelEx"), driver.address_of("cuTensorMapReplaceAddress"),
        )  # fmt: skip
        self._kept += [places, launches, whole]
        self.start: Callable[[int, int, int], int] = functools.partial(
            native(), ctypes.addressof(whole)
        )

    def check(self, status: int) -> None:
        driver.check(status)

    def _launch(self, noted: driver.Noted, stream: int, spans: Sequence[range]) -> _Launch:
        function, grid, block, args, shared, early = noted
        offsets, size = [], 0
        for arg in args:
            step = _ALIGNMENT if isinstance(arg, np.ndarray) else 8
            size = -(-size // step) * step
            offsets.append(size)
            size += arg.nbytes if isinstance(arg, np.ndarray | np.generic) else 8
        room = ctypes.create_string_buffer(size + _ALIGNMENT)
        start = -(-ctypes.addressof(room) // _ALIGNMENT) * _ALIGNMENT
        for arg, offset in zip(args, offsets, strict=True):
            self._put(arg, start + offset, spans)
        arguments = (c_void_p * len(offsets))(*[start + offset for offset in offsets])
        config = driver.config(grid, block, shared, stream, early=early)
        self._kept += [room, arguments, config]
        return _Launch(ctypes.addressof(config), function, ctypes.addressof(arguments))

    def _put(self, arg: Any, at: int, spans: Sequence[range]) -> None:
        """Writes an argument, and notes whether it is an address in A, B or C."""
        value, address = _value(arg)
        ctypes.memmove(at, value, len(value))
        matrix = None if address is None else _matrix_at(address, spans)
        if address is None or matrix is None:
            self._kept.append(arg)
        else:
            is_map = isinstance(arg, TensorMap)
            self._places.append(_Place(at, address - spans[matrix].start, matrix, is_map))


def _matrix_at(address: int, spans: Sequence[range]) -> int | None:
    """The matrix that has an address. By its ends: `in` goes through all of a range for what is no
    int."""
    return next((i for i, x in enumerate(spans) if x.start <= address < x.stop), None)


def _value(arg: Any) -> tuple[bytes, int | None]:
    """An argument's bytes, and the address that they hold, if any."""
    if isinstance(arg, TensorMap):
        return arg.tobytes(), arg.address
    if isinstance(arg, np.ndarray | np.generic):
        return arg.tobytes(), None
    address = int(arg.data.ptr)
    return address.to_bytes(8, "little"), address
