"""Streamed programs, carried out by native threads: `native_executor.cpp`, compiled once by g++ if
that is here."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from ctypes import POINTER, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ..arrays.strides import Array, address, runs
from ..devices.base import Device, Event
from ..devices.cuda.driver import check
from ..devices.roles import Prepared
from ..host import compiler, forks
from ..host.libraries import Library
from . import native_copier, staging
from .commands import (
    INCOMPLETE,
    Call,
    Command,
    Copy,
    Mark,
    Move,
    Multiply,
    Record,
    Split,
    Stream,
    Sum,
    Wait,
)
from .kept_products import DeviceProducts, Product
from .writer import Writer

WAIT_MS = 50  # until the thread that waits looks for Ctrl-C, and says how far the run is
_RECORD, _WAIT, _COPY, _START, _HAND_OVER = range(5)
_NO = -1
_SOURCE = Path(__file__).with_name("native_executor.cpp")


class Unfit(Exception):
    """Why native threads cannot carry a program out."""


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


class NativeProgram:
    """A streamed program, carried out by native threads: its commands with the addresses that they
    have on the devices, and places in the host's matrices, whose addresses `hosts` spans. `slots`
    and `streams` are a play's. Devices' memory with addresses in `passing` is another's between
    plays: one finds its matrices at the same addresses. Raises `Unfit`."""

    def __init__(
        self, program: Writer, slots: Sequence[Any], streams: Mapping[Stream, Any],
        products: Mapping[int, DeviceProducts], hosts: Sequence[range], passing: Sequence[range],
    ) -> None:  # fmt: skip
        self._program, self._slots, self._streams = program, slots, streams
        self._hosts, self._passing = hosts, passing
        self._devices = {w: each.device for w, each in products.items()}
        self._links = {w: staging.link(device) for w, device in self._devices.items()}
        self._products = products
        self._made_by: list[Any] = [None] * program.events  # the worker and the stream of each
        self._prepared: dict[int, Prepared] = {}  # by the number of a command
        self._free: list[_Events] = []  # sets of events that no timeline reads
        self.streams: list[Any] = []
        self._rings: dict[int, weakref.ref] = {}  # of slots, which are not this program's
        self._commands: list[tuple[int, bool, _Command]] = []  # of a worker; an upload
        for command in program.commands:
            self._add(command)
        for _worker, _upload, made in self._commands:
            if made.event != _NO and self._made_by[made.event] is None:
                raise Unfit("an event is never recorded")
        self._count, self._marks = len(self._commands), program.marks
        self._program_in_c = self._whole(self._lanes())
        del self._program, self._slots, self._streams, self._links, self._products

    # --- from commands ----------------------------------------------------------------------

    def _new(self, kind: int, worker: int, stream: Any, *, upload: bool = False) -> _Command:
        """The next command of a worker."""
        number = len(self._commands)
        made = _Command(kind=kind, number=number, host=_NO, event=_NO, start=_NO,
                        stop=_NO, where=stream.pointer)  # fmt: skip
        if stream not in self.streams:
            self.streams.append(stream)
        self._commands.append((worker, upload, made))
        return made

    def _add(self, command: Command) -> None:
        worker = command.worker
        match command:
            case Record():
                self._record(worker, self._streams[command.stream], command.event)
            case Wait():
                self._new(_WAIT, worker, self._streams[command.stream]).event = command.event
            case Copy():
                dst, src = command.dst.of(self._slots), command.src.of(self._slots)
                self._copy(worker, self._streams[command.stream], dst, src)
            case Move():
                self._move(command)
            case Multiply():
                a, b, c = (x.of(self._slots) for x in (command.a, command.b, command.c))
                bound = self._products[worker].bound
                self._start(command, bound(a, b, c, alpha=command.alpha, beta=command.beta))
            case Sum():
                partials = [x.of(self._slots) for x in command.partials]
                bound_sum, out = self._devices[worker].bound_sum, command.out.of(self._slots)
                total = bound_sum(partials, out, alpha=command.alpha, beta=command.beta)
                self._start(command, total)
            case Split():
                part, splitter = command.part.of(self._slots), self._slots[command.part.slot]
                split = splitter.splitter.split_part
                self._start(
                    command, functools.partial(split, command.operand, command.layouts, part)
                )
                self._record(worker, self._streams[command.stream], command.event)
            case Call():
                raise Unfit(command.why)
            case _:
                raise Unfit("NCCL sums")

    def _record(self, worker: int, stream: Any, event: int) -> None:
        self._new(_RECORD, worker, stream).event = event
        self._made_by[event] = worker, stream

    def _start(self, command: Any, call: Callable[[Any], None]) -> None:
        stream, device = self._streams[command.stream], self._devices[command.worker]
        found: tuple[Prepared, Sequence[int]] | None
        if isinstance(call, Product):
            found = call.listed(stream, self._passing)
        else:
            listed = device.listed(call, stream, self._passing)
            found = (listed, (0, 0, 0)) if listed else None
        if found is None or found[0].native is None:
            raise Unfit("Python starts its products")
        made = self._new(_START, command.worker, stream)
        made.flops = getattr(command, "flops", 0)
        made.function, made.list = found[0].native
        made.addresses = (c_uint64 * 3)(*found[1])
        self._prepared[made.number] = found[0]

    def _move(self, command: Move) -> None:
        """Between the host and a device: straight, or through slots by the threads that copy."""
        link, worker = self._links[command.worker], command.worker
        dst, src = command.dst.of(self._slots), command.src.of(self._slots)
        ring, how = link.way(dst, src, up=command.up)
        after, start, stop = command.after, command.start, command.stop
        if how == "straight":
            for event in after:
                self._new(_WAIT, worker, ring.stream).event = event
            self._record(worker, ring.stream, start)
            self._copy(worker, ring.stream, dst, src)
            self._record(worker, ring.stream, stop)
            return
        native = ring.native() if how == "alike" else None
        if native is None:
            raise Unfit("Python's threads copy")
        made = self._new(_HAND_OVER, worker, ring.stream, upload=command.up)
        made.where = native.handle
        self._rings.setdefault(native.handle, weakref.ref(native))
        (made.event,) = after or (_NO,)  # of more than one only turns wait
        made.start, made.stop = start, stop
        self._made_by[start] = self._made_by[stop] = worker, ring.stream
        self._set_copy(made, dst, src)

    def _copy(self, worker: int, stream: Any, dst: Array, src: Array) -> None:
        if dst.size:
            self._set_copy(self._new(_COPY, worker, stream), dst, src)

    def _set_copy(self, made: _Command, dst: Array, src: Array) -> None:
        shape = runs(dst, src)
        if shape is None:
            raise Unfit("a copy transposes")
        made.to_pitch, made.from_pitch, made.width, made.height = shape
        made.to, made.from_ = to, source = address(dst), address(src)
        for number, host in enumerate(self._hosts):
            if host.start <= to < host.stop:
                made.host, made.writes_host, made.to = number, True, to - host.start
            elif host.start <= source < host.stop:
                made.host, made.from_ = number, source - host.start

    def _lanes(self) -> Iterable[tuple[Device, Sequence[_Command]]]:
        """Which thread carries a command out. Where copies are handed over, each worker has its
        own, for it may have to wait for them; and uploads to the devices behind one link have one
        together, which hands them over in the program's order: workers' threads would hand over all
        of one worker's before the next one's. Copies of page-locked memory are not waited for:
        there workers behind one link share a thread, which keeps the order of their copies on
        it."""
        alone = any(made.kind == _HAND_OVER for _worker, _upload, made in self._commands)
        lanes: dict[object, tuple[Device, list[_Command]]] = {}  # a lane's first device
        for worker, upload, made in self._commands:
            device = self._devices[worker]
            key = ("uploads", device.port) if upload else ("link", device.port)
            if alone and not upload:
                key = "worker", worker
            lanes.setdefault(key, (device, []))[1].append(made)
        return lanes.values()

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
        """The slots that it copies through, for as long as somebody has this list: `free_memory`
        gives them back where nothing refers to them. None where that has happened."""
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
                    _threads(), ctypes.byref(self._program_in_c), events.pointers, at, first,
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
        for number, by in enumerate(self._made_by):
            if by is not None:
                of_worker.setdefault(by[0], []).append(number)
        for worker, numbers in of_worker.items():  # to make a device current takes longest
            with self._devices[worker].using(self._made_by[numbers[0]][1]):
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
        self.pointers = (c_void_p * len(events))(*[getattr(x, "ptr", 0) for x in events])


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
