"""Plays a streamed program by Python: on the caller's own thread where devices queue what they are
told, and by a thread for each lane elsewhere. Both carry out the same commands, each lane in its
order.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from threading import Barrier, BrokenBarrierError
from typing import Any

from ..arrays import npy_files
from ..arrays.mapped_files import file_of
from ..arrays.npy_files import NpyWriter
from ..arrays.operand import Operands
from ..devices.cuda import nccl_group
from ..errors import UsageError
from ..host import forks
from . import staging
from .commands import (
    INCOMPLETE,
    OUT,
    Call,
    Collective,
    Command,
    Copy,
    Gate,
    Move,
    Multiply,
    Record,
    Split,
    Stream,
    Sum,
    Wait,
)
from .critical_reduction import CriticalReduction
from .device_memory import SharedBlock, SharedBlocks
from .kept_products import DeviceProducts
from .timeline import Clock, marked
from .transfers import Later, Stop, Stopped, Transfer
from .writer import Writer

# Of turns so many steps are written at a time, while no lane has more commands than it may have
# waiting; who writes looks again after a while.
STEPS, WAITING, WAIT_S = 16, 4096, 5e-3

_ALONE = contextlib.nullcontext()
_waiting: set[int] = set()  # the threads that start those of a play, or wait for them
forks.forget_in_child(_waiting.clear)  # new threads there get the numbers of these


class Lease:
    """What one play has of its devices: pieces of memory, and each worker's streams, for the
    block. Raises `MemoryError` if a device has not so much."""

    def __init__(self, program: Writer) -> None:
        self._program, self._stack = program, contextlib.ExitStack()
        self.streams: dict[Stream, Any] = {}
        self.pieces: list[Any] = []

    def __enter__(self) -> Lease:
        try:
            self.pieces += self._program.layout.take()
            for worker in self._program.workers.values():
                *plain, urgent = worker.streams
                for some, is_urgent in (plain, False), ([urgent], True):
                    made = self._stack.enter_context(worker.device.streams(len(some), is_urgent))
                    self.streams.update(zip(some, made, strict=True))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.pieces.clear()  # an error holds the frames that it came through
        self._stack.close()

    @property
    def place(self) -> tuple[int, ...]:
        """What tells it from others: addresses of memory, of streams, and of the links' rings."""
        devices = dict.fromkeys(w.device for w in self._program.workers.values())
        links = [staging.link(device) for device in devices if not device.host_memory]
        rings = [part for link in links for ring in (link.up, link.down) for part in ring.key]
        starts = [x.start for x in self._program.layout.spans(self.pieces)]
        return (*(x.pointer for x in self.streams.values()), *rings, *starts)

    def make_room(self, operands: Operands) -> None:
        """Has what products and copies need besides matrices made while no clock runs."""
        program = self._program
        for worker in program.workers.values():
            device, dtype = worker.device, program.dtype.name
            shapes = {(len(p.rows), len(p.cols)) for p in worker.panels}
            for stream in (self.streams[x] for x in worker.streams[1:-1]):
                with device.using(stream):
                    for m, n in sorted(shapes, key=sum, reverse=True):  # the most room first
                        device.make_room(program.variant, m, n, worker.longest, dtype, stream)
            if not device.host_memory:
                staging.make_rings(device, operands)

    def synchronize(self) -> None:
        """Returns when all its streams are idle."""
        for stream in self.streams.values():
            stream.synchronize()


class Play:
    """One play of a program with these matrices, A, B, C and OUT. `progress(flops)` is called, from
    any lane's thread, as products are started. `clock` is started and stopped by a program's gates;
    somebody else does where it has none. Raises `MemoryError` if shared blocks have no room."""

    def __init__(
        self, program: Writer, operands: Operands, lease: Lease, clock: Clock | None,
        products: Mapping[int, DeviceProducts], progress: Callable[[int], None] | None = None,
        shared: SharedBlocks | None = None,
    ) -> None:  # fmt: skip
        self.program, self.lease, self.clock = program, lease, clock
        self.products, self.progress = products, progress
        c = None if operands.c is None else operands.c.array
        self.slots: list[Any] = [operands.a.array, operands.b.array, c, operands.out.array]
        self.slots += [None] * (program.slots - len(self.slots))
        program.layout.fill(lease.pieces, self.slots)
        self.stop, self.wrote = Stop(), False  # whether `out` is no longer what it was
        self.to_file = file_of(operands.out.array, NpyWriter) is not None
        self.events = [Later() for _ in range(program.events)]
        self._shared: list[SharedBlock] = []
        for key, layout, wanted, parts in program.common:
            assert shared is not None
            self._shared.append(block := shared.block(key, layout, wanted, parts))
            for slot, array in zip(wanted, block.arrays, strict=True):
                self.slots[slot] = array
        for event, (i, kind, part) in program.common_events.items():
            self.events[event] = getattr(self._shared[i], kind)[part]
        self.transfers: list[tuple[Move, Transfer]] = []
        self._groups: list[Any] = []
        self._bound: dict[int, Callable[[Any], None]] = {}
        self.stop.futures = self.events

    # --- lanes ----------------------------------------------------------------------------

    def play(self, operands: Operands) -> None:
        """Returns when all is done, and raises the first error of any lane, with nothing still at
        work in memory, and a note if `out` is incomplete then."""
        critical = None
        try:
            if not self.program.on_device:
                critical = CriticalReduction(operands)
                self.slots[OUT] = critical.sum
            for command in self.program.commands:
                if isinstance(command, Collective):
                    self._groups.append(nccl_group.group(self._places(command)))
            self._play()
            self._land()
            self.lease.synchronize()
            if critical is not None:
                critical.end()
        except BaseException as error:
            self._fail(error)
            for group in self._groups:
                with contextlib.suppress(Exception):
                    group.synchronize()
            with contextlib.suppress(Exception):
                self.lease.synchronize()
            if (critical or self).wrote and not operands.fresh:
                (self.stop.error or error).add_note(INCOMPLETE)
            if self.stop.error in (None, error):
                raise
            raise self.stop.error from None  # no name here holds it, for it holds this frame
        finally:
            for _move, transfer in self.transfers:
                transfer.wait()
            self.let_go()

    def _play(self) -> None:
        program, lanes = self.program, self.program.lanes
        if program.queued or len(lanes) == 1:
            with uncollected() if program.queued else _ALONE:
                self._carry_out(program.commands)
            return
        for gate in program.gates:
            passed = functools.partial(self._pass, gate)
            self.gates = [*self.gates, Barrier(len(lanes), passed)]
        me = _not_waiting()
        try:  # and no context manager: see `Stream.start`
            _waiting.add(me)
            self._in_threads()
        finally:
            _waiting.discard(me)
        if self.stop.error is not None:
            raise self.stop.error

    gates: Sequence[Barrier] = ()

    def _carry_out(self, commands: Iterable[Command]) -> None:
        """Carries out some commands, each with its device and stream as the current ones."""
        stopped, current = self.stop.flag, None
        with contextlib.ExitStack() as stack:
            for command in commands:
                if stopped.value:
                    raise Stopped
                stream = getattr(command, "stream", None)
                if stream is not current:
                    current = stream
                    stack.close()
                    if stream is not None:
                        device = self.products[command.worker].device
                        stack.enter_context(device.using(self.lease.streams[stream]))
                _DO[type(command)](self, command)

    def _in_threads(self) -> None:
        """Plays each lane in a thread of its own, and meanwhile writes what is left to write."""
        lanes = {name: SimpleQueue[Command | None]() for name in self.program.lanes}
        for name, commands in self.program.lanes.items():
            for command in commands:
                lanes[name].put(command)
        overs, begun = [Later() for _ in lanes], list[Later]()
        try:
            for lane, over in zip(lanes.values(), overs, strict=True):
                # Not Python's `Thread`: where a signal's handler raises within its `start`, it
                # raises a KeyError instead, or keeps a lock for which the thread waits for ever.
                given: list[Callable[[], None]] = [functools.partial(self._guarded, lane)]
                start_new_thread(_work, (given, over, begun))
            while not (self.program.whole or self.stop.flag.value):
                more = self.program.write_more(STEPS)
                self.events += [Later() for _ in range(self.program.events - len(self.events))]
                for command in more:
                    lanes[command.worker, command.lane].put(command)
                while max(x.qsize() for x in lanes.values()) > WAITING and not self.stop.flag.value:
                    time.sleep(WAIT_S)
            for lane in lanes.values():
                lane.put(None)
            for over in overs:
                over.result()
        except BaseException as error:  # Ctrl-C, or no more threads: stop at the next step
            self._fail(error)
            for lane in lanes.values():
                lane.put(None)
            # A thread that has not begun yet finds that the play has stopped.
            for over in begun:
                over.result()
            raise

    def _guarded(self, commands: SimpleQueue[Command | None]) -> None:
        try:
            self._carry_out(iter(commands.get, None))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Lets every lane leave at its next command. To have left so is no error."""
        if not isinstance(error, Stopped | BrokenBarrierError):
            self.stop(error)
        for gate in self.gates:
            gate.abort()

    def _land(self) -> None:
        """Waits for all copies. Raises the error of one that failed."""
        for move, transfer in self.transfers:
            transfer.done.result()
            if transfer.stop is not None:  # else there was nothing to copy
                transfer.stop.synchronize()
                self.events[move.start].settle(transfer.start)

    def marks(self) -> list[tuple]:
        """What was done between which events."""
        found = []
        for worker, phase, start, stop, size, flops in self.program.marks:
            if self.events[start].settled and (last := self.events[stop].result()) is not None:
                found.append((worker, phase, self.events[start].result(), last, size, flops))
        return found

    def let_go(self) -> None:
        """Gives memory back now, and not when Python finds what refers to what; an error holds the
        frames that it came through."""
        self.slots.clear()
        self.transfers.clear()
        self._bound.clear()
        self._shared.clear()
        self.stop.futures, self.stop.error = [], None
        self.gates = ()  # which refer to this

    # --- commands -------------------------------------------------------------------------

    def _record(self, command: Record) -> None:
        self.events[command.event].settle(self.lease.streams[command.stream].record())

    def _wait(self, command: Wait) -> None:
        event = self.events[command.event].result()
        if event is not None:
            self.lease.streams[command.stream].wait(event)

    @marked("relay")
    def _copy(self, command: Copy) -> None:
        device = self.products[command.worker].device
        dst, src = command.dst.of(self.slots), command.src.of(self.slots)
        device.bound_copy(dst, src)(self.lease.streams[command.stream])

    def _claims(self, shared: tuple[int, int] | None, kind: str) -> bool:
        """Whether a part is this play's to bring or to split."""
        return shared is None or self._shared[shared[0]].claim(kind, shared[1])

    def _move(self, command: Move) -> None:
        if self._claims(command.shared, "ready"):
            (self._upload if command.up else self._download)(command)

    @marked("upload")
    def _upload(self, command: Move) -> None:
        link, transfer = self._transfer(command)
        for event in command.after:  # a link waits for one, and these are of several streams
            self.events[event].result().synchronize()
        link.upload(command.dst.of(self.slots), command.src.of(self.slots), transfer)

    @marked("download")
    def _download(self, command: Move) -> None:
        self.wrote = True
        link, transfer = self._transfer(command)
        (after,) = (self.events[event].result() for event in command.after)
        place = command.dst.of(self.slots)
        if self.to_file:
            transfer.landed = functools.partial(npy_files.finished, place)
        link.download(place, command.src.of(self.slots), transfer, after)

    def _transfer(self, command: Move) -> tuple[staging.Link, Transfer]:
        transfer = Transfer(self.events[command.stop], self.stop.flag)
        with self.stop.lock:
            self.transfers.append((command, transfer))
        return staging.link(self.products[command.worker].device), transfer

    def _product(self, command: Multiply) -> Callable[[Any], None]:
        """A product, worked out."""
        a, b, c = (x.of(self.slots) for x in (command.a, command.b, command.c))
        return self.products[command.worker].bound(a, b, c, alpha=command.alpha, beta=command.beta)

    def _total(self, command: Sum) -> Callable[[Any], None]:
        """A sum, worked out."""
        partials = [x.of(self.slots) for x in command.partials]
        out = command.out.of(self.slots)
        device = self.products[command.worker].device
        return device.bound_sum(partials, out, alpha=command.alpha, beta=command.beta)

    @marked("multiply")
    def _multiply(self, command: Multiply) -> None:
        if command.c.slot == OUT:
            self.wrote = True
        call = self._bound[id(command)] if self._bound else self._product(command)
        call(self.lease.streams[command.stream])
        if self.progress:
            self.progress(command.flops)
        if command.final and self.to_file and command.c.slot == OUT:
            npy_files.finished(command.c.of(self.slots))

    @marked("reduce")
    def _sum(self, command: Sum) -> None:
        if command.out.slot == OUT:
            self.wrote = True
        call = self._bound[id(command)] if self._bound else self._total(command)
        call(self.lease.streams[command.stream])
        if command.out.slot == OUT and self.to_file:
            npy_files.finished(command.out.of(self.slots))

    def _split(self, command: Split) -> None:
        if not self._claims(command.shared, "halves"):
            return
        part, stream = command.part.of(self.slots), self.lease.streams[command.stream]
        splitter = self.slots[command.part.slot].splitter
        splitter.split_part(command.operand, command.layouts, part, stream)
        self.events[command.event].settle(stream.record())

    def _call(self, command: Call) -> None:
        if not self._claims(command.shared, "ready"):
            return
        if command.writes_out:
            self.wrote = True
        device, stream = self.products[command.worker].device, self.lease.streams[command.stream]
        args = [x.of(self.slots) for x in command.args]
        self.events[command.start].settle(stream.record())
        command.call(device, stream, *args)
        self.events[command.stop].settle(stream.record())
        if command.writes_out and self.to_file:
            npy_files.finished(args[0])

    def _places(self, command: Collective) -> tuple[int, ...]:
        ordinals = (self.products[w].device.ordinal for w in command.workers)
        return tuple(x for x in ordinals if x is not None)  # the planner lets only GPUs sum so

    def _collect(self, command: Collective) -> None:
        strips = [(at, [x.of(self.slots) for x in partials]) for at, partials in command.strips]
        group = nccl_group.group(self._places(command))
        done = group.bound_sum(strips)([self.events[e].result() for e in command.after])
        for event, after in zip(command.done, done, strict=True):
            self.events[event].settle(after)

    def _gate(self, command: Gate) -> None:
        if self.gates:
            self.gates[self.program.gates.index(command)].wait()
        else:
            self._pass(command)

    def _pass(self, gate: Gate) -> None:
        """Lets all through."""
        for event in gate.after:
            if (after := self.events[event].result()) is not None:
                after.synchronize()
        assert self.clock is not None  # only timed plays have operands brought before
        if not gate.starts:
            self.lease.synchronize()
            self.clock.stop()
            return
        for command in self.program.commands:  # worked out before they are due
            if isinstance(command, Multiply):
                self._bound[id(command)] = self._product(command)
            elif isinstance(command, Sum):
                self._bound[id(command)] = self._total(command)
        self.lease.synchronize()
        self.clock.start()


_DO: Mapping[type, Callable[[Play, Any], None]] = {
    Record: Play._record, Wait: Play._wait, Copy: Play._copy, Move: Play._move,
    Multiply: Play._multiply, Sum: Play._sum, Split: Play._split, Call: Play._call,
    Collective: Play._collect, Gate: Play._gate,
}  # fmt: skip


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collection of garbage, which may take 30 ms of the one thread that starts
    everything (docs/notes/several-gpus.md)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _work(given: list[Callable[[], None]], over: Later, begun: list[Later]) -> None:
    """What a thread does. It refers to nothing of its play any more when that goes on: what is
    dropped then is given back at once."""
    begun.append(over)
    try:
        given.pop()()
    finally:
        over.settle()


def _not_waiting() -> int:
    """This thread's number. Refuses a play within another one's wait, as of a signal's handler:
    what it interrupted may hold a lock that new threads need. Refuses one while Python ends:
    threads begin no more then, and would be waited for for ever."""
    if sys.is_finalizing():
        raise UsageError(
            "a product by several threads was asked for while Python ends, as in the __del__ of an "
            "object that is freed last: no thread begins then. Multiply by threads=1 there, or "
            "before the end of the main program"
        )
    me = threading.get_ident()
    if me in _waiting:
        raise UsageError(
            "a product by several threads was asked for while this thread waits for the threads "
            "of another one, as in a signal's handler: Python could wait for ever for a lock. "
            "Multiply by threads=1 there, or once the other product has ended"
        )
    return me
