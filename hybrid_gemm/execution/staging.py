"""Host memory and a device: copies both ways at once, at the speed of the link.

Page-locked arrays are copied straight. Others go through a ring of page-locked slots that
several threads fill and empty: one thread copies memory far slower than the link does. For GPUs
these threads are `native_copier`'s, which need no Python; they are Python's for other devices, for
what is cast on its way, and where there is no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from ..arrays.caller_arrays import cast_into
from ..arrays.operand import Operands
from ..arrays.strides import address, leading, runs
from ..devices.base import Device
from ..devices.cuda import driver
from ..host import forks
from ..host.resources import cores
from . import native_copier
from .transfers import Later, Piece, Stopped, Transfer

# Small, so that the first bytes are soon on their way; large, so that Python, which does one
# piece's errands at a time, is not what all wait for.
SLOT_BYTES = 16 << 20
THREADS = 8  # a direction; enough to copy as fast as one link
ENOUGH = 16  # copying for all devices at a time: more would wait for memory, and for Python
SLOTS = 12  # a direction: some are on their way while threads fill others
ALL_BYTES = 1 << 30  # of all devices' slots, but two a direction; native ones: 128 MiB a device
NATIVE_BYTES = 2 << 20  # a slot that needs no Python: it stays in the host's cache
NATIVE_SLOTS = 32  # a direction: all threads at one, and some on their way
# Larger copies are faster through a link's slots, whose threads take 0.3 ms to begin (H100).
STAGED_BYTES = 8 << 20
SMALL_BYTES = 1 << 20  # copied by the thread that asks: handing it over would take longer
_ALONE = contextlib.nullcontext()
# Straight from or to page-locked memory; through slots as it is; through slots, and cast or
# transposed on its way.
Way = Literal["straight", "alike", "cast"]


@functools.cache
def _at_once(up: bool) -> threading.Semaphore:
    """What Python's threads hold while they copy a piece in this direction, of whatever device."""
    return threading.Semaphore(max(2, min(cores(), ENOUGH)))


class Ring:
    """One direction: a stream, page-locked slots, and threads that copy between these and
    ordinary memory."""

    def __init__(self, device: Device, *, up: bool):
        self.device, self.up = device, up
        self.stream = device.stream()
        self.lock = threading.Lock()
        self.made = False
        self._native: native_copier.Ring | None = None
        self.slots: queue.SimpleQueue = queue.SimpleQueue()
        self.at_once = _at_once(up)
        threads = max(2, min(THREADS, cores()))
        self.pool = ThreadPoolExecutor(threads, "copy", device.enter, (self.stream,))

    def native(self) -> native_copier.Ring | None:
        """Slots and threads that need no Python, where they can be."""
        with self.lock:
            if self._native is None:
                calls = self.device.calls()
                if calls is None or native_copier.unavailable():
                    return None
                with self.device.using(self.stream):
                    memory = self.device.pinned(NATIVE_SLOTS * NATIVE_BYTES)
                    events = [self.stream.mark(timed=False) for _ in range(NATIVE_SLOTS)]
                self._native = native_copier.Ring(
                    calls, self.stream.pointer, memory, NATIVE_BYTES,
                    [event.ptr for event in events], up=self.up, kept=(self.stream, events),
                )  # fmt: skip
            return self._native

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from other rings of this process, as native threads know it."""
        return self.stream.pointer, self._native.handle if self._native else 0

    def slot(self) -> _Slot:
        """A slot that nothing uses; waits for one."""
        with self.lock:
            if not self.made:
                count = max(2, min(SLOTS, ALL_BYTES // (2 * self.device.together * SLOT_BYTES)))
                memory = self.device.pinned(count * SLOT_BYTES)
                for i in range(count):
                    part = memory[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]
                    with self.device.using(self.stream):
                        self.slots.put(_Slot(part, self.stream.record()))
                self.made = True
        return self.slots.get()


class _Slot:
    """`event` is after the last copy from or to the slot, and is recorded again and again."""

    def __init__(self, memory: np.ndarray, event):
        self.memory, self.event = memory, event

    def like(self, view, dtype: np.dtype) -> np.ndarray:
        """The slot's beginning as a matrix of a view's shape and order."""
        rows, cols = view.shape
        flat = self.memory[: rows * cols * dtype.itemsize].view(dtype)
        return flat.reshape(rows, cols) if leading(view, "n") else flat.reshape(cols, rows).T


class Link:
    """The way between host memory and one device; kept from run to run."""

    def __init__(self, device: Device):
        self.device = device
        self.up, self.down = Ring(device, up=True), Ring(device, up=False)

    def way(self, dst, src, *, up: bool) -> tuple[Ring, Way]:
        """The ring for dst[...] = src, and how the copy goes."""
        ring, host = (self.up, src) if up else (self.down, dst)
        if not _alike(dst, src):
            return ring, "cast"
        return ring, "straight" if self.device.reads(host) else "alike"

    def upload(self, dst, src: np.ndarray, transfer: Transfer) -> None:
        """dst[...] = src, cast to its dtype, for a matrix of the device and one of the host."""
        self._start(dst, src, transfer, up=True)

    def download(self, dst: np.ndarray, src, transfer: Transfer, event) -> None:
        """As `upload`, from the device to the host, once `event` is over."""
        transfer.after = event
        self._start(dst, src, transfer, up=False)

    def touch(self, array: np.ndarray) -> None:
        """Has the pages of fresh host memory made before something is written there, where there
        are native threads; the others are better at their copies."""
        if native := self.down.native():
            native.touch(array)

    def _start(self, dst, src, transfer: Transfer, *, up: bool) -> None:
        ring, way = self.way(dst, src, up=up)
        transfer.stream = ring.stream
        native = ring.native() if way == "alike" and src.nbytes else None
        if native:
            self._hand_over(ring, native, dst, src, transfer)
            return
        copy = self._straight if way == "straight" else self._up if up else self._down
        if way == "straight" or max(src.nbytes, dst.nbytes) <= SMALL_BYTES:
            with self.device.using(ring.stream), transfer.pieces[0].copying(ring.stream):
                copy(ring, dst, src, transfer)
            return
        pieces = _pieces(dst, max(src.dtype.itemsize, dst.dtype.itemsize))
        for where, piece in zip(pieces, transfer.split(len(pieces)), strict=True):
            ring.pool.submit(self._copy_piece, copy, ring, dst[where], src[where], piece)

    def _copy_piece(self, copy, ring: Ring, dst, src, piece: Piece) -> None:
        with contextlib.suppress(BaseException), piece.copying(ring.stream):  # the piece has it
            copy(ring, dst, src, piece.transfer, ring.at_once)

    def _hand_over(
        self, ring: Ring, native: native_copier.Ring, dst, src, transfer: Transfer
    ) -> None:
        host, there = (src, dst) if ring.up else (dst, src)
        pitches_and_size = runs(host, there)
        assert pitches_and_size is not None  # as `_alike` said
        to_pitch, from_pitch, width, height = pitches_and_size
        (piece,) = transfer.pieces
        try:
            with self.device.using(ring.stream):
                transfer.start, transfer.stop = (ring.stream.record() for _ in "12")

            def end(status: int, _kept=(dst, src)) -> None:
                if status:  # the memory is somebody else's after that
                    with contextlib.suppress(Exception):
                        ring.stream.synchronize()
                piece.end(error=_error_of(status))

            piece.begin(native=True)
            after = transfer.after.ptr if transfer.after else 0
            native.submit(
                address(host), address(there), (to_pitch, from_pitch), (width, height),
                (after, transfer.start.ptr, transfer.stop.ptr), transfer.stopped, piece.accepted,
                end,
            )  # fmt: skip
        except BaseException as error:
            if not piece.accepted.value:
                piece.end(error=error)
            raise

    def _straight(self, ring, dst, src, transfer):
        transfer.begin(ring.stream)
        self.device.copy_pinned(dst, src, ring.stream)

    # `at_once` is held for no wait: others of those that are awaited may want it.
    def _up(self, ring, dst, src, transfer, at_once=_ALONE):
        slot = ring.slot()
        try:
            if not ring.stream.passed(slot.event):
                slot.event.synchronize()  # what was in it is on its device
            here = slot.like(dst, dst.dtype)
            with at_once:
                cast_into(here, src)
            transfer.begin(ring.stream)
            self.device.copy_pinned(dst, here, ring.stream)
            ring.stream.record(slot.event)
        finally:
            ring.slots.put(slot)

    def _down(self, ring, dst, src, transfer, at_once=_ALONE):
        slot = ring.slot()
        try:
            here = slot.like(src, src.dtype)
            transfer.begin(ring.stream)
            self.device.copy_pinned(here, src, ring.stream)
            ring.stream.record(slot.event).synchronize()
            with at_once:
                cast_into(dst, here)
        finally:
            ring.slots.put(slot)


def _error_of(status: int) -> BaseException | None:
    """What ended a copy by native threads; None if nothing did."""
    try:
        if status == native_copier.STOPPED:
            raise Stopped
        if status:
            driver.check(status)
    except BaseException as error:
        return error
    return None


def _alike(dst, src) -> bool:
    """Whether a copy changes neither type nor storage order."""
    return dst.dtype == src.dtype and any(leading(dst, o) and leading(src, o) for o in "nt")


def _pieces(view, itemsize: int) -> list[tuple[slice, slice]]:
    """A matrix of a device in pieces that fit a slot: whole rows, or columns, where they do."""
    turned = leading(view, "n") is None
    rows, cols = view.shape[::-1] if turned else view.shape
    most = SLOT_BYTES // itemsize
    width = min(cols, most)
    height = min(rows, most // width)
    found = [
        (slice(i, min(i + height, rows)), slice(j, min(j + width, cols)))
        for i in range(0, rows, height)
        for j in range(0, cols, width)
    ]
    return [(c, r) for r, c in found] if turned else found


_links: dict[object, Link] = {}
_lock = threading.Lock()


def link(device: Device) -> Link:
    """The link of a device; devices behind one port share it, and it stays when they go, until
    `drop_links`."""
    with _lock:
        if device.port not in _links:
            _links[device.port] = Link(device.detached())
        return _links[device.port]


def make_rings(device: Device, operands: Operands) -> None:
    """Has native slots and threads where a product needs them."""
    both, read = link(device), (operands.a, operands.b, operands.c)
    for ring, matrices in ((both.up, read), (both.down, (operands.out,))):
        hosts = [x.array for x in matrices if x is not None and x.home is None]
        # Also those that make the pages of a fresh C: a room is known by its rings.
        fresh = bool(hosts) and ring is both.down and operands.fresh
        if fresh or not all(map(device.reads, hosts)):
            ring.native()


def copy(device: Device, dst, src, stream) -> None:
    """A copy after what a stream of a GPU was given, the fastest way; it may be over when this
    returns. A device that checks its copies makes it itself."""
    hosted = isinstance(dst, np.ndarray) or isinstance(src, np.ndarray)
    if hosted and device.on_gpu and not device.checks and src.nbytes >= STAGED_BYTES:
        copy_now(device.unwrapped, dst, src, stream)
    else:
        device.copy(dst, src, stream)


def copy_now(device: Device, dst, src, stream) -> None:
    """Copies between a GPU, after what a stream of it was given, and the host's memory; returns
    when that is done. Through the link's slots, which is faster for all but a little."""
    copy_all_now(device, [(dst, src)], stream)


def copy_all_now(device: Device, pairs: Iterable[tuple], stream) -> None:
    """As `copy_now`, of several `(dst, src)` at once."""
    transfers: list[Transfer] = []
    # Uploads wait, too: the memory may have been what another thread's product still reads.
    stopped, after = ctypes.c_int(), stream.record()
    try:
        for dst, src in pairs:
            transfers.append(Transfer(Later(), stopped))
            if isinstance(dst, np.ndarray):
                link(device).download(dst, src, transfers[-1], after)
            else:
                transfers[-1].after = after
                link(device).upload(dst, src, transfers[-1])
        for transfer in transfers:
            transfer.done.result()
    except BaseException:  # Ctrl-C: the memory is somebody else's after that
        stopped.value = 1
        raise
    finally:
        for transfer in transfers:
            transfer.wait()
    for transfer in transfers:
        transfer.stop.synchronize()


def cast(device: Device, source, home: Device | None, dtype: np.dtype, stream):
    """A matrix in another dtype; that of another GPU, its `home`, on this device, since CuPy casts
    where an array lies. On a stream of the device, which is the current one."""
    if source.dtype == dtype:
        return source
    if home is not None and home is not device:
        there, source = source, device.empty_like(source, source.dtype.name)
        device.copy(source, there, stream)
    return source.astype(dtype)


def store(device: Device, view, made, stream, *, on_host: bool) -> None:
    """view[...] = made, a matrix of the device, cast as NumPy casts; `on_host` says where the view
    lies. Host memory may be written before the stream is waited for."""
    if view.dtype == made.dtype:
        device.copy(view, made, stream)
    elif device.host_memory:
        cast_into(view, made)
    elif on_host:
        host = np.empty(made.shape, made.dtype)
        device.copy(host, made, stream)
        stream.synchronize()
        cast_into(view, host)
    else:  # cast here: the view may be another GPU's
        device.copy(view, made.astype(view.dtype), stream)


def make_pages(devices: Iterable[Device], out: np.ndarray) -> None:
    """Has the pages of a fresh `out` in host memory made by the threads that will write it."""
    ports = list({device.port: device for device in devices if not device.host_memory}.values())
    for i, device in enumerate(ports):
        share = slice(i * len(out) // len(ports), (i + 1) * len(out) // len(ports))
        link(device).touch(out[share])


def drop_links() -> None:
    """Gives links and their slots back; those at work are gone when their copies are done."""
    with _lock:
        _links.clear()


_parents: list[Link] = []


def _forget() -> None:
    """Leaves a forked child without links: their threads did not come along. Nothing of them is
    freed, which would call a driver and native threads that are not there."""
    global _lock
    _parents.extend(_links.values())
    _links.clear()
    _at_once.cache_clear()
    _lock = threading.Lock()


forks.forget_in_child(_forget)
