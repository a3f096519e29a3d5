"""Emulated devices that native threads copy to and start products on: the functions of CUDA's
driver are Python's, and do at once what they are told."""

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from ctypes import c_int, c_uint64, c_void_p

import numpy as np
import pytest

from hybrid_gemm.devices.cuda.driver import _NATIVE, SIGNATURES, Calls
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.streams import HostEvent, HostStream
from hybrid_gemm.execution import native_executor, staging

from .links import separate_links
from .small_sizes import small_panels, small_slots

CONTEXT = 9
_kept = []  # native threads may still be in these functions when a test is over
_numbers = itertools.count(1000)


def as_calls(function: Callable[[str], Callable[..., int]]) -> Calls:
    """What native threads call of a driver, each by the function of that name."""
    functions = [ctypes.CFUNCTYPE(c_int, *SIGNATURES[name])(function(name)) for name in _NATIVE]
    _kept.append(functions)
    return Calls(tuple(ctypes.cast(f, c_void_p).value for f in functions), CONTEXT)


class PlayedEvent(HostEvent):
    def __init__(self, driver):
        self.seconds, self.ptr = 0.0, next(_numbers)
        driver.events[self.ptr] = self


class PlayedStream(HostStream):
    def __init__(self, driver):
        super().__init__()
        self.driver, self.pointer = driver, next(_numbers)

    def record(self, event=None):
        event = event or PlayedEvent(self.driver)
        self.driver.cuEventRecord(event.ptr, self.pointer)
        return event

    def wait(self, event):
        self.driver.cuStreamWaitEvent(self.pointer, event.ptr, 0)


class Listed:
    """A call as a native one: see `roles.Prepared`."""

    def __init__(self, driver, call, stream):
        def work():
            call(stream)
            driver.log("start", stream.pointer)

        def start(_list, *_addresses):
            return driver.counted("start", work)

        self.function = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_uint64)(start)
        _kept.append(self.function)
        self.native = ctypes.cast(self.function, c_void_p).value, 0

    def check(self, status):
        raise RuntimeError(f"a product said {status}")


class Driver:
    """`said` is what was done: (what, a stream, an event's number or nothing). `fails` names a
    function, which of its calls from native threads fails, and by which status."""

    def __init__(self):
        self.lock, self.fails, self.counts = threading.Lock(), None, {}
        self.said, self.events, self.pause_s = [], {}, 0.0
        self.calls = as_calls(lambda name: self._native(name, getattr(self, name)))

    def _native(self, name, function):
        return lambda *args: self.counted(name, lambda: function(*args))

    def counted(self, name, function):
        """The status of a call from a native thread."""
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.fails and self.fails[:2] == (name, self.counts[name]):
                return self.fails[2]
        time.sleep(self.pause_s)
        try:
            function()
        except BaseException as error:  # seen by the test, for the call says so
            self.said.append(("error", repr(error)))
            return 999
        return 0

    def log(self, *what):
        self.said.append(what)

    def cuCtxSetCurrent(self, context):
        assert context == CONTEXT

    def cuMemcpyAsync(self, to, source, size, stream):
        ctypes.memmove(to, source, size)
        self.log("copy", stream, size)

    def cuMemcpy2DAsync_v2(self, copy, stream):
        c = copy.contents
        assert c.dst_pitch >= c.width and c.src_pitch >= c.width
        for i in range(c.height):
            to, source = c.dst_device + i * c.dst_pitch, c.src_device + i * c.src_pitch
            ctypes.memmove(to, source, c.width)
        self.log("copy", stream, c.width * c.height)

    def cuEventRecord(self, event, stream):
        self.events[event].seconds = time.perf_counter()
        self.log("record", stream, event)

    def cuStreamWaitEvent(self, stream, event, _flags):
        assert self.events[event].seconds, "nobody has recorded it"
        self.log("wait", stream, event)

    def cuEventQuery(self, event):
        pass


class Memory:
    """Devices' memory for runs, at the same addresses in each run."""

    def __init__(self):
        self.buffers, self.next, self.real = [], 0, EmulatorDevice.empty

    def empty(self, device, rows, cols, dtype):
        if rows != 1 or dtype != "uint8":
            return self.real(device, rows, cols, dtype)
        if self.next == len(self.buffers) or self.buffers[self.next].size != cols:
            self.buffers[self.next :] = [np.empty((1, cols), np.uint8)]
        self.next += 1
        return self.buffers[self.next - 1]


def play(monkeypatch, *, pinned: bool = False) -> tuple[Driver, Memory]:
    """Emulated devices are as GPUs are to native threads from now on, in this test. With `pinned`
    they read all host memory. `Memory.next` is set to 0 before each run."""
    driver, memory = Driver(), Memory()

    def check(status):
        raise RuntimeError(f"the driver said {status}")

    def listed(device, call, stream, passing):
        return Listed(driver, call, stream)

    for name, value in {
        "queues": True,
        "stream": lambda device, urgent=False: PlayedStream(driver),
        "calls": lambda device: driver.calls,
        "listed": listed,
        "reads": lambda device, array: pinned,
        "empty": lambda device, *what: memory.empty(device, *what),
        "prepared": lambda device, *args: None,
    }.items():
        monkeypatch.setattr(EmulatorDevice, name, value)
    monkeypatch.setattr(native_executor, "check", check)
    monkeypatch.setattr(staging.driver, "check", check)
    return driver, memory


def small_runs(monkeypatch) -> None:
    """For tests of what native threads carry out: products cut and copied as large ones are, over
    links of their own. Skips where there are no such threads."""
    if reason := native_executor.unavailable():
        pytest.skip(reason)
    small_panels(monkeypatch)
    small_slots(monkeypatch)
    separate_links(monkeypatch, f"played {next(_numbers)}")
