"""What a library launches for a product, recorded so that we launch it without the library.

cuBLAS takes longer to decide what to launch than the driver takes to launch it, and decides the
same each time. The launches of a call are recorded into a graph, which nothing runs, and read from
there: the same kernels with the same arguments give the same bits.

A call is recorded twice, with other addresses of A, B and C. What differs between the two, by as
much as a matrix was moved, is an address in it; where anything else differs, or something else than
kernels is launched, there is no recording. Addresses of the second call are multiples of 16 and of
no more, so that a kernel that wants more is not taken for matrices that have less.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_size_t, c_uint, c_void_p
from typing import Any, TypeVar

from . import driver
from .driver import Attribute, Noted
from .launch_list import Recorded

T = TypeVar("T")
MOVED = (16 * 257, 16 * 511, 16 * 1025)  # bytes by which A, B and C lie elsewhere
_BUFFER, _BUFFER_SIZE, _MOST_EXTRA = 1, 2, 4  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE
_KERNEL, _MOST_NODES, _MOST_ARGUMENTS = 0, 32, 64
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION, _CLUSTER_SCHEDULING_POLICY_PREFERENCE
_ATTRIBUTES = (2, 4, 5)


class Unrecorded(Exception):
    """Why the launches of a call are left to the library."""


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = [
        ("function", c_void_p), *((f"{what}_{axis}", c_uint) for what in ("grid", "block")
                                  for axis in "xyz"),
        ("shared", c_uint), ("arguments", ctypes.POINTER(c_void_p)),
        ("extra", ctypes.POINTER(c_void_p)),
        ("kernel", c_void_p), ("context", c_void_p),
    ]  # fmt: skip


def recorded(
    start: Callable[[int, int, int], None], addresses: Sequence[int], stream: int
) -> list[Noted]:
    """What `start(a, b, c)` launches on a stream that is used for nothing else, with arguments of
    `Recorded`. Raises `Unrecorded` where that cannot be told."""
    try:
        first = _launches(start, addresses, stream, _noted)
        moved = [x + by for x, by in zip(addresses, MOVED, strict=True)]
        second = _launches(start, moved, stream, _noted)
    except AttributeError as error:  # a driver that has no such function
        raise Unrecorded(str(error)) from error
    if [_kind(x) for x in first] != [_kind(x) for x in second]:
        raise Unrecorded("other kernels for other addresses")
    return [
        (*x[:3], [_argument(*pair, addresses) for pair in zip(x[3], y[3], strict=True)], *x[4:])
        for x, y in zip(first, second, strict=True)
    ]


def named(
    start: Callable[[int, int, int], None], addresses: Sequence[int], stream: int
) -> list[tuple[str, int]]:
    """The kernels that `start(a, b, c)` launches, each by its name and how many blocks; what is no
    kernel has no name. Raises `Unrecorded` where that cannot be told."""
    try:
        return _launches(start, addresses, stream, _named)
    except AttributeError as error:  # a driver that has no such function
        raise Unrecorded(str(error)) from error


def _kind(noted: Noted) -> tuple:
    """What launches have in common that differ in their arguments alone."""
    function, grid, block, args, shared, attributes = noted
    sizes = [len(x) for x in args]
    return function, grid, block, sizes, shared, [bytes(x) for x in attributes]


def _argument(one: bytes, other: bytes, addresses: Sequence[int]) -> Recorded:
    places, size = [], len(one) // 8 * 8
    for at in range(0, size, 8):
        x, y = (int.from_bytes(v[at : at + 8], "little") for v in (one, other))
        if x != y:
            if y - x not in MOVED:
                raise Unrecorded("an argument differs by other than an address")
            matrix = MOVED.index(y - x)
            places.append((at, matrix, x - addresses[matrix]))
    if one[size:] != other[size:]:
        raise Unrecorded("an argument differs by other than an address")
    return Recorded(one, places)


def _call(name: str, *args: Any) -> None:
    if status := driver.function(name)(*args):
        raise Unrecorded(f"{name} gave {status}")


def _launches(
    start: Callable[[int, int, int], None], addresses: Sequence[int], stream: int,
    read: Callable[[int], T],
) -> list[T]:  # fmt: skip
    """What is read of each of the nodes, in their order, that `start` adds to a graph."""
    graph = c_void_p()
    _call("cuStreamBeginCapture_v2", stream, driver.RELAXED)
    try:
        try:
            start(*addresses)
        finally:
            _call("cuStreamEndCapture", stream, ctypes.byref(graph))
        return [read(node) for node in _nodes(graph)]
    finally:
        if graph:
            driver.function("cuGraphDestroy")(graph)


def _nodes(graph: c_void_p) -> list[int]:
    """A graph's nodes, each of which comes after the one before."""
    count = c_size_t(_MOST_NODES)
    _call("cuGraphGetNodes", graph, None, ctypes.byref(count))
    if not 0 < count.value <= _MOST_NODES:
        raise Unrecorded(f"{count.value} nodes")
    nodes = (c_void_p * count.value)()
    _call("cuGraphGetNodes", graph, nodes, ctypes.byref(count))
    after: dict[int | None, int] = {}
    for node in map(int, nodes):
        before, number = (c_void_p * _MOST_NODES)(), c_size_t(_MOST_NODES)
        _call("cuGraphNodeGetDependencies", node, before, ctypes.byref(number))
        if number.value > 1:
            raise Unrecorded("nodes that are no line")
        after[before[0] if number.value else None] = node
    line: list[int] = []
    while (line[-1] if line else None) in after and len(line) < len(nodes):
        line.append(after[line[-1] if line else None])
    if len(line) != len(nodes):
        raise Unrecorded("nodes that are no line")
    return line


def _kernel(node: int) -> _Node | None:
    """The launch of a node; None of one that is no kernel."""
    kind, made = c_int(-1), _Node()
    _call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != _KERNEL:
        return None
    _call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(made))
    return made


def _named(node: int) -> tuple[str, int]:
    if not (made := _kernel(node)):
        return "", 0
    name = ctypes.c_char_p()
    ask = "cuFuncGetName" if made.function else "cuKernelGetName"
    _call(ask, ctypes.byref(name), made.function or made.kernel)
    return (name.value or b"").decode(), made.grid_x * made.grid_y * made.grid_z


def _noted(node: int) -> Noted:
    """A launch, with arguments as bytes."""
    if not (made := _kernel(node)):
        raise Unrecorded("something else than a kernel")
    grid, block = (
        tuple(getattr(made, f"{what}_{axis}") for axis in "xyz") for what in ("grid", "block")
    )
    function = made.function or made.kernel
    return function, grid, block, _arguments(made), made.shared, _attributes(node)


def _arguments(made: _Node) -> list[bytes]:
    """A kernel's arguments, which the library gave one by one or as one buffer."""
    places = _places(made)
    if made.arguments:
        return [ctypes.string_at(made.arguments[i], n) for i, (_at, n) in enumerate(places)]
    if not made.extra:
        raise Unrecorded("arguments that are not listed")
    given: dict[int, int] = {}
    for i in range(0, 2 * _MOST_EXTRA, 2):
        if not (key := made.extra[i]):
            break
        given[key] = made.extra[i + 1] or 0
    start, size = given.get(_BUFFER), given.get(_BUFFER_SIZE)
    if not (start and size):
        raise Unrecorded("arguments that are not listed")
    buffer = ctypes.string_at(start, c_size_t.from_address(size).value)
    if any(at + n > len(buffer) for at, n in places):
        raise Unrecorded("arguments that are not listed")
    return [buffer[at : at + n] for at, n in places]


def _places(made: _Node) -> list[tuple[int, int]]:
    """Where each argument of a kernel begins in a buffer of all, and its bytes."""
    name = "cuFuncGetParamInfo" if made.function else "cuKernelGetParamInfo"
    ask = driver.function(name)
    places: list[tuple[int, int]] = []
    offset, size = c_size_t(), c_size_t()
    for i in range(_MOST_ARGUMENTS):
        if ask(made.function or made.kernel, i, ctypes.byref(offset), ctypes.byref(size)):
            return places  # past the last
        places.append((offset.value, size.value))
    raise Unrecorded(f"more than {_MOST_ARGUMENTS} arguments")


def _attributes(node: int) -> list[Attribute]:
    found = []
    for number in _ATTRIBUTES:
        made = Attribute(number, 0)
        at = ctypes.addressof(made) + Attribute.value.offset
        _call("cuGraphKernelNodeGetAttribute", node, number, at)
        if any(made.value):
            found.append(made)
    return found
