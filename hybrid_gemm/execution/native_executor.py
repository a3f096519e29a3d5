"""A run's commands, carried out by native threads: `native_executor.cpp`, compiled once by g++ if
that is here.

A `Program` is made once, of what Python's executor noted of a run: the same commands, with the
addresses that they have on the devices, and places in the host's matrices.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ..arrays.strides import address, runs
from ..devices.base import Device, Event, Stream
from ..devices.cuda.driver import check
from ..devices.roles import Prepared
from ..host import compiler, forks
from ..host.libraries import Library
from . import native_copier
from .commands import Command, Copy, HandOver, Record, Start, Unfit, Wait
from .executor import INCOMPLETE
from .kept_products import Product

WAIT_MS = 50  # until the thread that waits looks for Ctrl-C, and says how far the run is
_RECORD, _WAIT, _COPY, _START, _HAND_OVER = range(5)
_NO = -1
_SOURCE = Path(__file__).with_name("native_executor.cpp")
Mark = tuple[int, str, int, int, int, int]  # as `Clock.add` takes it, events by number


class _Command(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ("kind", "host", "writes_host", "event", "start", "stop")),
        ("number", c_int64), ("where", c_void_p),
        *((name, c_uint64) for name in ("to", "to_pitch", "from_", "from_pitch",
                                        "width", "height")),
        ("function", c_void_p), ("list", c_void_p), ("addresses", c_uint64 * 3), ("flops", c_int64),
    ]  # fmt: skip


class _Lane(ctypes.Structure):
    _fields_ = [("context", c_void_p), ("commands", c_void_p), ("count", c_int64)]


class _Program(ctypes.Structure):
    _fields_ = [
        ("driver", c_uint64 * 6), ("submit", c_void_p), ("pool", c_void_p), ("lanes", c_void_p),
        ("lane_count", c_int64), ("event_count", c_int64), ("host_count", c_int64),
    ]  # fmt: skip


class _State(ctypes.Structure):
    _fields_ = [("status", c_int32), ("wrote", c_int32), ("failed", c_int64), ("flops", c_int64)]


@functools.cache
def unavailable() -> str | None:
    """Why Python carries out all commands here, in one line."""
    return compiler.reason(_library) or native_copier.unavailable()


@functools.cache
def _library() -> Library:
    library = Library(str(compiler.build_library(_SOURCE, native_copier.DRIVER)))
    library.threads_open.restype = c_void_p
    library.run_begin.argtypes = [c_void_p] * 4 + [c_uint64, c_void_p, c_void_p]
    library.run_wait.argtypes = [c_void_p, c_int, POINTER(_State)]
    library.run_stop.argtypes, library.run_end.argtypes = [c_void_p], [c_void_p, POINTER(_State)]
    library.run_begin.restype = library.run_stop.restype = library.run_end.restype = None
    return library


@functools.cache
def _threads() -> int:
    """The threads of this process that carry out lanes; they stay for the runs to come."""
    made: int = _library().threads_open()
    return made


forks.forget_in_child(_threads.cache_clear)


def _lanes(
    noted: Sequence[Command], devices: Mapping[int, Device]
) -> Callable[[Command], tuple[str, object]]:  # fmt: skip
    """Which thread carries a command out. Where copies are handed over, each worker has its own,
    for it may have to wait for them; and uploads to the devices behind one link have one together,
    which hands them over in the run's order: workers' threads would hand over all of one worker's
    before the next one's. Copies of page-locked memory are not waited for: there workers behind one
    link share a thread, which keeps the order of their copies on it."""
    alone = any(isinstance(command, HandOver) for command in noted)

    def lane(command: Command) -> tuple[str, object]:
        port = devices[command.worker].port
        if isinstance(command, HandOver) and command.ring.up:
            return "uploads", port
        return ("worker", command.worker) if alone else ("link", port)

    return lane


class Program:
    """What runs alike do. `noted` are the commands of one of them, `marks` the activities between
    its events (as `Clock.marks`), `devices` those of its workers, `hosts` the addresses that its
    host matrices span. Devices' memory with addresses in `passing` is another's between runs: a
    run finds its matrices at the same addresses. Raises `Unfit`."""

    def __init__(
        self, noted: Sequence[Command], marks: Iterable[tuple], devices: Mapping[int, Device],
        hosts: Sequence[range], passing: Sequence[range],
    ) -> None:  # fmt: skip
        self._hosts, self._passing = hosts, passing
        self._slots: dict[int, int] = {}  # events by identity
        self._made_by: list[tuple[int, Stream]] = []  # the worker and the stream of each
        self._prepared: dict[int, Prepared] = {}  # by the number of a command
        self._free: list[_Events] = []  # sets of events that no timeline reads
        self.streams: list[Stream] = []
        self._rings: dict[int, weakref.ref] = {}  # of slots, which are not this program's
        self.devices, self._count = devices, len(noted)
        lane_of = _lanes(noted, devices)
        lanes: dict[object, tuple[Device, list[_Command]]] = {}  # a lane's first device
        for number, command in enumerate(noted):
            made = self._made(number, command)
            if made is not None:
                lane = lanes.setdefault(lane_of(command), (devices[command.worker], []))
                lane[1].append(made)
        self._marks: list[Mark] = [
            (worker, phase, self._slot(start), self._slot(stop), size, flops)
            for worker, phase, start, stop, size, flops in marks
        ]
        self._slots.clear()
        self._program = self._whole(lanes.values())

    # --- from commands ----------------------------------------------------------------------

    def _made(self, number: int, command: Command) -> _Command | None:
        made = _Command(number=number, host=_NO, event=_NO, start=_NO, stop=_NO)
        if command.stream not in self.streams:
            self.streams.append(command.stream)
        if not isinstance(command, HandOver):
            made.where = command.stream.pointer
        match command:
            case Record():
                made.kind, made.event = _RECORD, self._new_slot(command, command.event)
            case Wait():
                made.kind, made.event = _WAIT, self._slot(command.event)
            case Start():
                made.kind, made.flops = _START, command.flops
                prepared, at = self._native(command)
                assert prepared.native is not None
                made.function, made.list = prepared.native
                made.addresses = (c_uint64 * 3)(*at)
                self._prepared[number] = prepared
            case Copy():
                if not command.dst.size:
                    return None
                made.kind = _COPY
                self._set_copy(made, command)
            case HandOver():
                made.kind, made.where = _HAND_OVER, command.ring.handle
                self._rings.setdefault(command.ring.handle, weakref.ref(command.ring))
                made.event = _NO if command.after is None else self._slot(command.after)
                made.start = self._new_slot(command, command.start)
                made.stop = self._new_slot(command, command.stop)
                self._set_copy(made, command)
        return made

    def _new_slot(self, command: Record | HandOver, event: Event) -> int:
        number = self._slots[id(event)] = len(self._made_by)
        self._made_by.append((command.worker, command.stream))
        return number

    def _slot(self, event: Event) -> int:
        found = self._slots.get(id(event))
        if found is None:
            raise Unfit("an event comes from elsewhere")
        return found

    def _native(self, command: Start) -> tuple[Prepared, Sequence[int]]:
        call, stream = command.call, command.stream
        if isinstance(call, Product):
            found = call.listed(stream, self._passing)
        else:
            made = self.devices[command.worker].listed(call, stream, self._passing)
            found = (made, (0, 0, 0)) if made else None
        if found is None or found[0].native is None:
            raise Unfit("Python starts its products")
        return found

    def _set_copy(self, made: _Command, command: Copy | HandOver) -> None:
        shape = runs(command.dst, command.src)
        if shape is None:
            raise Unfit("a copy transposes")
        made.to_pitch, made.from_pitch, made.width, made.height = shape
        made.to, made.from_ = to, source = address(command.dst), address(command.src)
        for number, host in enumerate(self._hosts):
            if host.start <= to < host.stop:
                made.host, made.writes_host, made.to = number, True, to - host.start
            elif host.start <= source < host.stop:
                made.host, made.from_ = number, source - host.start

    def _whole(self, lanes: Iterable[tuple[Device, Sequence[_Command]]]) -> _Program:
        pool = native_copier.pool()
        made: list[_Lane] = []
        functions: Sequence[int] = ()
        self._kept: list[Any] = []
        for device, commands in lanes:
            found = device.calls()
            if found is None:
                raise Unfit("its devices are not GPUs")
            functions = found.functions
            array = (_Command * len(commands))(*commands)
            self._kept.append(array)
            made.append(_Lane(found.context, ctypes.addressof(array), len(array)))
        array_of_lanes = (_Lane * len(made))(*made)
        self._kept.append(array_of_lanes)
        return _Program(
            (c_uint64 * 6)(*functions), pool.submit, pool.handle, ctypes.addressof(array_of_lanes),
            len(made), len(self._made_by), len(self._hosts),
        )  # fmt: skip

    # --- a run ------------------------------------------------------------------------------

    def rings(self) -> list[Any] | None:
        """The slots that it copies through, for as long as a run takes: `free_memory` gives them
        back where nothing refers to them. None where that has happened: there is no run then."""
        found = [ring() for ring in self._rings.values()]
        return None if any(ring is None for ring in found) else found

    def carry_out(
        self, hosts: Sequence[int], fresh: bool, progress: Callable[[int], None] | None
    ) -> Marks:
        """Does a run, with host matrices at these addresses, and gives its activities. Returns when
        all streams are idle. Leaves early when it is interrupted. Raises what the driver, or a
        library, said, with a note where `out` is incomplete then and not `fresh`."""
        library, state, stopped = _library(), _State(), c_int()
        events = self._free.pop() if self._free else _Events(self._recorded())
        at = (c_uint64 * len(hosts))(*hosts)
        first = native_copier.pool().numbers(self._count)
        going = c_void_p()  # set by the call itself: Ctrl-C may come before it has returned
        try:
            try:
                library.run_begin(
                    _threads(), ctypes.byref(self._program), events.pointers, at, first,
                    ctypes.addressof(stopped), ctypes.byref(going),
                )  # fmt: skip
                _wait(library, going, state, progress)
            except BaseException:  # Ctrl-C, or an error of `progress`
                library.run_stop(going)
                raise
            finally:
                library.run_end(going, ctypes.byref(state))
            if state.status:
                prepared = self._prepared.get(state.failed)
                (prepared.check if prepared else check)(state.status)
            for stream in self.streams:
                stream.synchronize()
        except BaseException as error:  # nothing may still be at work in memory
            for stream in self.streams:
                with contextlib.suppress(Exception):
                    stream.synchronize()
            if state.wrote and not fresh:
                error.add_note(INCOMPLETE)
            raise
        return Marks(self._marks, events, self._free)

    def _recorded(self) -> list[Event]:
        """An event for each that is numbered."""
        made: list[Event] = [None] * len(self._made_by)
        of_worker: dict[int, list[int]] = {}
        for number, (worker, _stream) in enumerate(self._made_by):
            of_worker.setdefault(worker, []).append(number)
        for worker, numbers in of_worker.items():  # to make a device current takes longest
            with self.devices[worker].using(self._made_by[numbers[0]][1]):
                for number in numbers:
                    made[number] = self._made_by[number][1].mark()
        return made


def _wait(
    library: Library, going: c_void_p, state: _State, progress: Callable[[int], None] | None
) -> None:
    """Until all is started; tells the operations of products that were started meanwhile."""
    over, told = False, 0
    while not over:
        over = library.run_wait(going, WAIT_MS, ctypes.byref(state))
        if progress and state.flops > told:
            progress(state.flops - told)
            told = state.flops


class _Events:
    """Events for a run, by number, and where native threads find them."""

    def __init__(self, events: list[Event]) -> None:
        self.all = events
        self.pointers = (c_void_p * len(events))(*[event.ptr for event in events])


class Marks:
    """The activities of a run, as `Clock.marks`, made when somebody looks. Its events are another
    run's when nobody will."""

    def __init__(self, marks: Sequence[Mark], events: _Events, free: list[_Events]) -> None:
        self._marks, self._events = marks, events.all
        weakref.finalize(self, free.append, events).atexit = False

    def __iter__(self) -> Iterator[tuple]:
        events = self._events
        for worker, phase, start, stop, size, flops in self._marks:
            yield worker, phase, events[start], events[stop], size, flops
