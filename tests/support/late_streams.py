"""Streams that work late, as GPUs' do: what they are told is done when something waits for it, in
an order of the streams that is drawn anew. Two accesses to memory that nothing orders are noted,
however they came out."""

import ctypes
import itertools
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from ctypes import c_int, c_void_p
from dataclasses import dataclass, field

import numpy as np

from hybrid_gemm.arrays.strides import address
from hybrid_gemm.devices.cuda.driver import _NATIVE, SIGNATURES, Calls
from hybrid_gemm.devices.streams import HostEvent, HostStream

CONTEXT = 9
NOT_READY = 600  # CUDA_ERROR_NOT_READY
UNWRITTEN = 0xAB  # what is in memory that was just taken
_ALIGN = 512  # bytes, of CuPy's pools
_numbers = itertools.count(1 << 20)
_kept = []  # native threads may still be in these functions when a test is over
Clock = dict[int, int]  # by stream: how many of its accesses are over


def as_calls(function: Callable[[str], Callable[..., int]]) -> Calls:
    """What native threads call of a driver, each by the function of that name."""
    functions = [ctypes.CFUNCTYPE(c_int, *SIGNATURES[name])(function(name)) for name in _NATIVE]
    _kept.append(functions)
    return Calls(tuple(ctypes.cast(f, c_void_p).value for f in functions), CONTEXT)


def _join(clock, other):
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def bytes_at(at, pitch, width, height=1):
    """`height` runs of bytes, as an array that does not keep them."""
    whole = (ctypes.c_uint8 * (pitch * (height - 1) + width)).from_address(at)
    return np.ndarray((height, width), np.uint8, whole, strides=(pitch, 1))


def like(x, at):
    """An array whose first element is at an address, which does not keep its memory; laid out as
    another."""
    if not x.size:
        return x
    ends = [(n - 1) * s for n, s in zip(x.shape, x.strides, strict=True)]
    ahead = -sum(min(0, end) for end in ends)
    whole = bytes_at(at - ahead, 0, sum(map(abs, ends)) + x.itemsize)[0].data
    return np.ndarray(x.shape, x.dtype, whole, ahead, x.strides)


def unowned(x):
    """The same array, without keeping its memory."""
    return like(x, address(x))


@dataclass
class Access:
    memory: np.ndarray = field(repr=False)  # not kept by it
    writes: bool
    stream: int
    count: int  # of the stream's
    what: str

    def meets(self, other):
        return (self.writes or other.writes) and np.shares_memory(self.memory, other.memory)

    def after(self, other):
        ways = [f"{x.what} {'writes' if x.writes else 'reads'}" for x in (self, other)]
        return f"{ways[0]} on stream {self.stream} what {ways[1]} on stream {other.stream}"


@dataclass
class Mark:
    """A record of an event: whether it is over, and what is before it."""

    before: Clock
    event: weakref.ref
    over: bool = False


@dataclass
class Queue:
    """What a stream has to do, and what is over before that which it is given next."""

    todo: deque = field(default_factory=deque)
    before: Clock = field(default_factory=dict)
    given: int = 0


class LateEvent(HostEvent):
    """`mark` is its last record."""

    def __init__(self, late):
        self.late, self.seconds, self.ptr, self.mark = late, 0.0, next(_numbers), None
        late.events[self.ptr] = self

    @property
    def done(self):
        return self.mark is None or self.mark.over

    def synchronize(self):
        self.late.wait_for(self)


class LateStream(HostStream):
    def __init__(self, late):
        super().__init__()
        self.late, self.pointer = late, next(_numbers)
        late.queues[self.pointer] = Queue()

    def record(self, event=None):
        event = event or LateEvent(self.late)
        self.late.cuEventRecord(event.ptr, self.pointer)
        return event

    def wait(self, event):
        self.late.cuStreamWaitEvent(self.pointer, event.ptr, 0)

    def passed(self, event):
        return self.late.cuEventQuery(event.ptr) == 0

    def synchronize(self):
        self.late.synchronize(self.pointer)


class Late:
    """A driver of such streams, whose functions native threads call, too.

    `races` are accesses that nothing orders, and `errors` what must not be. `fails` names a
    function, which of its calls fails, and by which status; "any" is one of all. Streams do
    something already when they are told to, with this probability: `eager`; with 1 they do all, in
    the order in which they are told, and no access is noted. `said` is what they were told: (what,
    a stream, an event's number or bytes or nothing).
    """

    def __init__(self, random, eager=0.0):
        self.random, self.eager, self.lock = random, eager, threading.RLock()
        self.queues, self.events = {}, weakref.WeakValueDictionary()
        self.accesses, self.races, self.errors, self.said = [], [], [], []
        self.host = {}  # what is over, as the host has waited for it
        self.asked = {}  # or as native threads have asked
        self.fails, self.counts = None, defaultdict(int)
        self.blocks = {}  # devices' memory, and how much, by its address
        self.locked = {}  # page-locked memory likewise
        self.captured = {}  # by stream the work that a graph records, and that is not done
        self.given_back = set()  # of devices' memory: that nobody has
        self.calls = as_calls(lambda name: lambda *args: self.native(name, *args))

    def failing(self, name):
        """The status of a call, before anything is done."""
        # What fails to be asked for stays so in a ring, as CUDA's own errors do.
        names = (name,) if name == "cuEventQuery" else (name, "any")
        with self.lock:
            for each in names:
                self.counts[each] += 1
                if self.fails and self.fails[:2] == (each, self.counts[each]):
                    return self.fails[2]
        return 0

    def native(self, name, *args, of=None):
        """A call from native code, which no error may leave; of a function of another object."""
        try:
            return self.failing(name) or getattr(of or self, name)(*args) or 0
        except BaseException as error:
            self.errors.append(repr(error))
            return 999

    def cuCtxSetCurrent(self, context):
        assert context == CONTEXT

    def cuMemcpyAsync(self, to, source, size, stream):
        self.copy(stream, to, size, source, size, size, 1)

    def cuMemcpy2DAsync_v2(self, copy, stream):
        c = copy.contents
        to, source = (c.dst_device, c.dst_pitch), (c.src_device, c.src_pitch)
        self.copy(stream, *to, *source, c.width, c.height)

    def cuEventRecord(self, event, stream):
        with self.lock:
            queue, event = self.queues[stream], self.events[event]
            event.mark = Mark(dict(queue.before), weakref.ref(event))
            self.said.append(("record", stream, event.ptr))
            queue.todo.append(("record", event.mark))
            self._be_eager(queue)

    def cuStreamWaitEvent(self, stream, event, _flags):
        with self.lock:
            queue, mark = self.queues[stream], self.events[event].mark
            assert mark is not None, "nobody has recorded it"
            self.said.append(("wait", stream, event))
            queue.todo.append(("wait", mark))
            _join(queue.before, mark.before)

    def cuEventQuery(self, event):
        with self.lock:
            event = self.events[event]
            if not event.done:
                self._step()
            if not event.done:
                return NOT_READY
            _join(self.asked, event.mark.before if event.mark else {})
        return 0

    def copy(self, stream, to, to_pitch, source, pitch, width, height):
        assert to_pitch >= width and pitch >= width
        with self.lock:
            dst = bytes_at(to, to_pitch, width, height)
            src = bytes_at(source, pitch, width, height)
            self.said.append(("copy", stream, width * height))
            if self._is_pageable(source):  # it is read when the call returns
                self.synchronize(stream)
                src = src.copy()
            self.give(stream, "a copy", lambda: np.copyto(dst, src), [src], [dst])
            if self._is_pageable(to):
                self.synchronize(stream)

    def is_locked(self, at):
        return any(x <= at < x + size for x, size in list(self.locked.items()))

    def _is_pageable(self, at):
        return not self.is_locked(at) and self._start_of(at) is None

    def _start_of(self, at):
        blocks = list(self.blocks.items())  # other threads take some meanwhile
        return next((x for x, size in blocks if x <= at < x + size), None)

    def give(self, stream, what, work, reads, writes):
        """Has a stream do some work, that reads and writes these arrays."""
        if stream in self.captured:
            self.captured[stream].append((what, work, reads, writes))
            return
        with self.lock:
            queue = self.queues[stream]
            queue.given += 1
            _join(queue.before, self.host)
            for writing, arrays in ((False, reads), (True, writes)):
                for memory in arrays if self.eager < 1 else ():
                    if memory.size:
                        self._note(Access(memory, writing, stream, queue.given, what), queue.before)
            queue.before[stream] = queue.given
            queue.todo.append(("work", work))
            self._be_eager(queue)

    def block_of(self, at):
        """All that was taken at once, of devices' memory, with this address."""
        start = self._start_of(at)
        return (
            np.empty(0, np.uint8) if start is None else bytes_at(start, *2 * [self.blocks[start]])
        )

    def _note(self, access, before):
        if self._start_of(address(access.memory)) in self.given_back:
            self.errors.append(f"{access.what} in memory that was given back")
        for other in self.accesses:
            ordered = other.stream == access.stream or before.get(other.stream, 0) >= other.count
            if not ordered and access.meets(other):
                self.races.append(access.after(other))
        self.accesses.append(access)

    def _be_eager(self, told):
        if self.eager == 1:  # where no other stream has anything to do
            while told.todo:
                self._do(told)
        while 0 < self.eager < 1 and self.random.random() < self.eager and self._step():
            pass

    def _step(self):
        """Does what a stream has to do next; false where none can go on."""
        ready = [
            queue for queue in self.queues.values()
            if queue.todo and (queue.todo[0][0] != "wait" or queue.todo[0][1].over)
        ]  # fmt: skip
        if ready:
            self._do(ready[int(self.random.random() * len(ready))])
        return bool(ready)

    def _do(self, queue):
        kind, what = queue.todo.popleft()
        if kind == "work":
            try:
                what()
            except BaseException as error:
                self.errors.append(repr(error))
        elif kind == "record":
            what.over = True
            if event := what.event():
                event.seconds = time.perf_counter()

    def wait_for(self, event):
        with self.lock:
            if event.mark:
                self._wait(lambda: event.done, event.mark.before)

    def synchronize(self, stream):
        with self.lock:
            queue = self.queues[stream]
            self._wait(lambda: not queue.todo, queue.before)

    def _wait(self, over, before):
        while not over():
            assert self._step(), "streams wait for each other"
        self._know(before)

    def _know(self, before):
        _join(self.host, before)
        self.accesses = [x for x in self.accesses if self.host.get(x.stream, 0) < x.count]

    def at_work(self):
        """Accesses of which nobody knows that they are over."""
        with self.lock:
            self._know(self.asked)
            return self.accesses

    def is_in_use(self, memory):
        return any(np.shares_memory(x.memory, memory) for x in self.accesses)


class Pool:
    """A device's memory. What is given back is given again to what asks on the same stream: the
    lowest address first, so that runs alike find the same."""

    def __init__(self, late):
        self.late, self.kept, self.free, self.held = late, {}, defaultdict(list), 0

    def take(self, size, stream):
        """Bytes, given back when nothing refers to them. Raises `MemoryError`."""
        late, size = self.late, max(_ALIGN, -(-size // _ALIGN) * _ALIGN)
        if late.failing("malloc"):
            raise MemoryError("out of memory, for a test")
        with late.lock:
            if self.free[stream, size]:
                at = min(self.free[stream, size])
                self.free[stream, size].remove(at)
                late.given_back.remove(at)
            else:
                memory = np.empty(size + _ALIGN, np.uint8)
                at = -(-memory.ctypes.data // _ALIGN) * _ALIGN
                self.kept[at], late.blocks[at] = memory, size
            taken = bytes_at(at, size, size)
            if not late.is_in_use(taken):
                taken[...] = UNWRITTEN
            self.held += size
        owner = (ctypes.c_uint8 * size).from_address(at)
        weakref.finalize(owner, self._back, at, size, stream).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    def _back(self, at, size, stream):
        self.held -= size
        self.late.given_back.add(at)
        self.free[stream, size].append(at)

    def __del__(self):
        self._drop()

    def free_all(self):
        """Gives back to the system what is free, once all streams are idle."""
        with self.late.lock:
            for stream in list(self.late.queues):
                self.late.synchronize(stream)
            self._drop()

    def _drop(self):
        for free in self.free.values():
            while free:
                at = free.pop()
                del self.kept[at], self.late.blocks[at]
                self.late.given_back.remove(at)
