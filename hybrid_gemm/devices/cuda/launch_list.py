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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...host import compiler
from ...host.libraries import LibraryUnderLock
from . import driver
from .tensor_maps import TensorMap

_SOURCE = Path(__file__).with_name("launch_list.cpp")
BUSY = -1  # another thread starts a product on the stream, launch by launch: nothing was started


class _Place(ctypes.Structure):
    _fields_ = [("at", c_void_p), ("offset", c_int64), ("matrix", c_int32), ("is_map", c_int32)]


class _Launch(ctypes.Structure):
    _fields_ = [("config", c_void_p), ("function", c_void_p), ("arguments", c_void_p)]


class _Clear(ctypes.Structure):
    _fields_ = [("at", c_uint64), ("size", ctypes.c_size_t), ("stream", c_void_p)]


class _List(ctypes.Structure):
    _fields_ = [
        ("places", c_void_p), ("place_count", c_int64),
        ("launches", c_void_p), ("launch_count", c_int64),
        ("launch", c_void_p), ("replace", c_void_p), ("matrices", c_void_p),
        ("matrix_count", c_int64), ("busy", c_void_p),
    ]  # fmt: skip


@functools.cache
def unavailable() -> str | None:
    """Why products are launched from Python alone here, in one line."""
    return compiler.reason(lambda: (native(), driver.address_of("cuTensorMapReplaceAddress")))


@functools.cache
def native(name: str = "start_list") -> Callable[..., int]:
    """One of the native functions: of a list's or a product's address, and those of A, B and C, or
    that of an array of all. Raises `UnavailableError` or `KernelError` where it cannot be
    compiled."""
    call = getattr(LibraryUnderLock(str(compiler.build_library(_SOURCE))), name)
    matrices = (c_void_p,) if name == "start_list_at" else (c_uint64,) * 3
    call.argtypes, call.restype = (c_void_p, *matrices), c_int
    return call


@functools.cache
def address_of(name: str) -> int:
    """Where one of the native functions is, for native code."""
    native(name)
    library = LibraryUnderLock(str(compiler.build_library(_SOURCE)))
    return ctypes.cast(getattr(library, name), c_void_p).value or 0


@dataclass(frozen=True)
class Recorded:
    """An argument of a library's kernel: its bytes, and where in them are addresses in which
    matrix (A, B, C are 0, 1, 2), so many bytes from its first element."""

    value: bytes
    places: Sequence[tuple[int, int, int]]

    @property
    def array(self) -> np.ndarray:
        """The bytes."""
        return np.frombuffer(self.value, np.uint8)


class LaunchList:
    """The launches of one product on one stream; see `roles.Prepared`. `noted` are those that a
    bound product would have made, and `spans` the first address and the one past the last of its
    A, B and C, and of what else is somewhere else each time. They have no byte in common. `at` are
    the addresses that they are given by, where these are not the first ones. While
    `busy`, the stream's, is another thread, `start` gives BUSY."""

    def __init__(
        self, noted: Sequence[driver.Noted | driver.Cleared], stream: int, spans: Sequence[range],
        kept: Any = None, busy: c_uint64 | None = None, at: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._at = [x.start for x in spans] if at is None else at
        self._places: list[_Place] = []
        self._kept: list[Any] = [kept, busy]  # what launches point to, but A, B and C
        made = [
            self._clear(each, stream)
            if isinstance(each, driver.Cleared)
            else self._launch(each, stream, spans)
            for each in noted
        ]
        places, launches = (_Place * len(self._places))(*self._places), (_Launch * len(made))(*made)
        count = max(3, len(spans))  # recorded launches know their places
        now = (c_uint64 * count)()  # no matrix's
        whole = _List(
            ctypes.addressof(places), len(places), ctypes.addressof(launches), len(launches),
            driver.address_of("cuLaunchKernelEx"), driver.address_of("cuTensorMapReplaceAddress"),
            ctypes.addressof(now), count, None if busy is None else ctypes.addressof(busy),
        )  # fmt: skip
        self._kept += [places, launches, whole, now]
        # Not a method of its own, which would refer in a circle to what launches point to.
        whole_at, start = ctypes.addressof(whole), functools.partial(_start_at, c_uint64 * count)
        three = count == 3
        self.start: Callable[..., int] = functools.partial(native() if three else start, whole_at)
        self.native: tuple[int, int] | None = (
            (address_of("start_list"), whole_at) if three else None
        )

    def check(self, status: int) -> None:
        driver.check(status)

    def _launch(self, noted: driver.Noted, stream: int, spans: Sequence[range]) -> _Launch:
        function, grid, block, args, shared, attributes = noted
        values, offsets = driver.packed([x.array if isinstance(x, Recorded) else x for x in args])
        size = ctypes.sizeof(values)
        room = ctypes.create_string_buffer(size + driver.STRUCTURES_ON)
        start = -(-ctypes.addressof(room) // driver.STRUCTURES_ON) * driver.STRUCTURES_ON
        ctypes.memmove(start, values, size)
        for arg, offset in zip(args, offsets, strict=True):
            if not isinstance(arg, np.generic):
                self._note_addresses(arg, start + offset, spans)
        arguments = (c_void_p * len(offsets))(*[start + offset for offset in offsets])
        config = driver.config(grid, block, shared, stream, attributes)
        self._kept += [room, arguments, config]
        return _Launch(ctypes.addressof(config), function, ctypes.addressof(arguments))

    def _clear(self, cleared: driver.Cleared, stream: int) -> _Launch:
        clear = _Clear(cleared.at, cleared.size, stream)
        self._kept.append(clear)
        return _Launch(None, driver.address_of("cuMemsetD8Async"), ctypes.addressof(clear))

    def _note_addresses(self, arg: Any, at: int, spans: Sequence[range]) -> None:
        """What of an argument at `at` is an address in A, B or C."""
        if isinstance(arg, Recorded):
            self._places += [_Place(at + x, offset, i, False) for x, i, offset in arg.places]
            return
        is_map = isinstance(arg, TensorMap)
        if isinstance(arg, np.ndarray) and not is_map:
            return
        address = arg.address if is_map else int(arg.data.ptr)
        # By its ends: `in` goes through all of a range for what is no int.
        holding = (i for i, x in enumerate(spans) if x.start <= address < x.stop)
        matrix = next(holding, None)
        if matrix is None:
            self._kept.append(arg)
        else:
            self._places.append(_Place(at, address - self._at[matrix], matrix, is_map))


def _start_at(array: Any, whole: int, *addresses: int) -> int:
    """Starts the list at `whole` with more matrices than A, B and C; `array` is of so many."""
    return native("start_list_at")(whole, array(*addresses))
