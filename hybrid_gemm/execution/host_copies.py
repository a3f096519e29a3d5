"""Arrays of the host that are copied to one GPU whole, and a product that is copied back: what is
small all together, through page-locked memory; what is large through the link's slots; the rest by
the driver, one by one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from ..arrays.caller_arrays import module_of
from ..arrays.strides import layout, runs
from ..devices.base import Device
from ..devices.streams import Stream
from ..host.kept import Known, cached_property
from . import staging

# So much, of A, B and C, one thread copies to page-locked memory and a GPU from there sooner than
# the driver copies ordinary arrays, each by a call of its own (docs/notes/several-gpus.md).
PACKED_BYTES = 2 << 20
FILLED = 8  # elements from one to the next: links copy all about so many times as fast as a thread
_ALIGNED = 256  # bytes, as an array's own memory is

Order = Literal["C", "F"]


class HostCopies:
    """To and from the GPU `device`, on a stream of it, which is the current one."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device, self.stream = device, stream
        self._unused: list[Buffer] = []

    @contextlib.contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Memory for one call, which waits for all that it gives the stream."""
        try:
            mine = self._unused.pop()
        except IndexError:
            mine = Buffer(self.device)
        yield mine  # not used again after an error, which may leave copies under way
        self._unused.append(mine)

    def bring(self, *arrays: np.ndarray) -> list[Any]:
        """The arrays on the device, matrices in the order that they lie in. Of those with steps,
        negative ones or repeated lines these are views."""
        found = [*map(_lines, arrays)]
        pairs = [
            (self.empty(x.shape, x.dtype, _order(x)), x) for x in (_whole(x) for x, _ in found)
        ]
        self._upload([pair for pair in pairs if pair[1].size])
        return [
            view(there if x.ndim == 2 else there.reshape(x.shape))
            for (there, _), (x, view) in zip(pairs, found, strict=True)
        ]

    def fetch(self, made: Any, out: np.ndarray | None = None) -> np.ndarray:
        """A product of the device, without gaps, in `out` or in a new array that lies as it does;
        there when this returns."""
        if out is not None and _is_copied(out, made):
            here = out
        else:
            here = np.empty(made.shape, made.dtype, _order(made))
        if here.size:
            staging.copy(self.device, _as_matrix(here), _as_matrix(made), self.stream)
        self.stream.synchronize()
        return here if out is None else given(here, out)

    def empty(self, shape: Sequence[int], dtype: np.dtype, order: Order = "C") -> Any:
        """An uninitialised matrix on the device."""
        rows, cols = shape
        if order == "F":
            return self.device.empty(cols, rows, dtype).T
        return self.device.empty(rows, cols, dtype)  # the dtype's name takes NumPy 3 us

    def _upload(self, pairs: Sequence[tuple[Any, np.ndarray]]) -> None:
        if self.device.on_gpu and sum(x.nbytes for _, x in pairs) >= staging.STAGED_BYTES:
            staging.copy_all_now(self.device, pairs, self.stream)
            return
        for there, x in pairs:
            self.device.copy(there, x, self.stream)


class Buffer:
    """Page-locked memory of the host and as much of the device, for one call at a time; taken for
    the first arrays that are packed there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._packed: Known[Hashable, Packed | None] = Known()

    @cached_property
    def host(self) -> np.ndarray:
        """The page-locked bytes."""
        return self.device.pinned(PACKED_BYTES)

    @cached_property
    def block(self) -> Any:
        """The device's, as a matrix of one row."""
        return self.device.empty(1, PACKED_BYTES, "uint8")

    def packed(
        self, key: Hashable, arrays: Sequence[np.ndarray], shape: Sequence[int], dtype: np.dtype,
        order: Order = "C",
    ) -> Packed | None:  # fmt: skip
        """Copies of arrays that lie like these, and of their product; the same for the same `key`.
        None where they are too large."""
        try:
            return self._packed[key]
        except KeyError:
            like = [(x.shape, _native(x), _order(x)) for x in arrays]
            places = _places([*like, (tuple(shape), dtype, order)])
            fits = 0 < places[-1].stop <= PACKED_BYTES
            made = self._packed[key] = Packed(self, places) if fits else None
            return made


class Packed:
    """Arrays in a buffer, one behind the other, and their product behind them, or where the last of
    them is if that lies as it does: C, to which it is added."""

    def __init__(self, buffer: Buffer, places: Sequence[_Place]) -> None:
        *given, result = places
        size, host, block = given[-1].stop, buffer.host, buffer.block
        self._hosts = [place.on_host(host) for place in given]
        self._there = [place.on_device(block) for place in given]
        self._upload = buffer.device.bound_copy(block[:, :size], host[None, :size])
        adds = len(given) > 2 and given[-1][:3] == result[:3]
        self.made = self._there[-1] if adds else result.on_device(block)
        self._here = result.on_host(host)
        self._download = buffer.device.bound_copy(_as_matrix(self._here), _as_matrix(self.made))

    def bring(self, arrays: Sequence[np.ndarray], stream: Stream) -> list[Any]:
        """The arrays on the device."""
        for here, x in zip(self._hosts, arrays, strict=True):
            np.copyto(here, x)
        self._upload(stream)
        return self._there

    def fetch(self, stream: Stream) -> np.ndarray:
        """The product, in the buffer."""
        self._download(stream)
        stream.synchronize()
        return self._here


class _Place(NamedTuple):
    """Where a copy of an array is in a buffer, without gaps; of order "F" if its columns are
    contiguous."""

    shape: tuple[int, ...]
    dtype: np.dtype
    order: Order
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def on_host(self, buffer: np.ndarray) -> np.ndarray:
        made = buffer[self.offset : self.stop].view(self.dtype)
        return made.reshape(self.shape) if self.order == "C" else made.reshape(self.shape[::-1]).T

    def on_device(self, block: Any) -> Any:
        if isinstance(block, np.ndarray):
            return self.on_host(block[0])
        at = block.data + self.offset
        return type(block)(self.shape, self.dtype, memptr=at, order=self.order)


def _places(arrays: Sequence[tuple[tuple[int, ...], np.dtype, Order]]) -> list[_Place]:
    """Places of arrays one behind the other."""
    found: list[_Place] = []
    for shape, dtype, order in arrays:
        begin = -(-found[-1].stop // _ALIGNED) * _ALIGNED if found else 0
        found.append(_Place(shape, dtype, order, begin))
    return found


def _lines(x: np.ndarray) -> tuple[np.ndarray, Callable[[Any], Any]]:
    """What is copied of an array: forwards, what is repeated once, and with a few steps between
    elements what lies there; and what makes of the copy the same view."""
    if x.flags.forc:  # most, which this says in a fiftieth of the time
        return x, _same
    ahead = tuple(slice(None, None, -1 if step < 0 else None) for step in x.strides)
    once = tuple(
        slice(1) if step == 0 and n > 1 else slice(None)
        for step, n in zip(x.strides, x.shape, strict=True)
    )
    plain, every = _filled(x[ahead][once])
    if all(part == slice(None) for part in (*ahead, *once, *every)):
        return x, _same
    shape = x.shape

    def view(copy: Any) -> Any:
        library = np if isinstance(copy, np.ndarray) else module_of(copy)
        return library.broadcast_to(copy[every], shape)[ahead]

    return plain, view


def _filled(x: np.ndarray) -> tuple[np.ndarray, tuple[slice, ...]]:
    """A matrix with what lies between the elements of each line, if that is not too much, and where
    in it the elements are."""
    if x.ndim != 2 or layout(x) is not None or not x.size:
        return x, (slice(None),)
    axis = int(0 < x.strides[1] < x.strides[0])  # along a line
    step, rest = divmod(x.strides[axis], x.itemsize)
    length = (x.shape[axis] - 1) * step + 1
    if rest or not 1 < step <= FILLED or x.strides[1 - axis] < length * x.itemsize:
        return x, (slice(None),)
    shape, strides, every = [*x.shape], [*x.strides], [slice(None), slice(None)]
    shape[axis], strides[axis], every[axis] = length, x.itemsize, slice(None, None, step)
    made = np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)
    return made, tuple(every)


def _whole(x: np.ndarray) -> np.ndarray:
    """A matrix as it is copied, or a stack as one."""
    if x.ndim == 2:
        return x if _lies(x) else x.astype(_native(x), _order(x))
    return np.ascontiguousarray(x, _native(x)).reshape(-1, x.shape[-1])


def _same(x: Any) -> Any:
    return x


def given(here: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`out`, with what is here."""
    if here is not out:
        out[...] = here
    return out


def _is_copied(out: np.ndarray, made: Any) -> bool:
    """Whether a product is copied to where it is to be."""
    return bool(runs(out, made)) if out.ndim == 2 else out.flags.c_contiguous


def _as_matrix(x: Any) -> Any:
    """A matrix, or a stack without gaps as one."""
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _order(x: Any) -> Order:
    """That of an array's copy: "F" of a matrix whose columns' elements are nearer to each other."""
    down, along = map(abs, x.strides) if x.ndim == 2 else (0, 0)
    return "F" if 0 < down < along and 1 not in x.shape else "C"


def _native(x: np.ndarray) -> np.dtype:
    return x.dtype if x.dtype.isnative else x.dtype.newbyteorder("=")


def _lies(x: np.ndarray) -> bool:
    """Whether a matrix is copied as it is."""
    return x.flags.aligned and x.dtype.isnative and layout(x) is not None
