"""A stream of a GPU: CuPy's, with events recorded by the driver."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from ctypes import c_uint64
from typing import Any

from ..base import Event, Stream
from ..streams import T
from . import cublas, driver


class CudaStream(Stream):
    """A stream of a GPU; `cupy` is CuPy's object for it."""

    def __init__(self, cupy_stream: Any) -> None:
        super().__init__()
        self.cupy = cupy_stream
        self.pointer = cupy_stream.ptr
        self.cublas: cublas.Handle | None = None  # made when it is needed
        self.busy = c_uint64(0)  # the thread that is in `start`, for native code without the lock

    def start(self, launches: Callable[[], T]) -> T:
        """As `Stream.start`; prepared products of this stream by other threads wait, too."""
        with self.lock:
            before = self.busy.value
            try:
                self.busy.value = threading.get_ident()
                return launches()
            finally:
                self.busy.value = before

    def prepare_cublas(self) -> cublas.Handle:
        """The stream's handle, made on the current GPU if there is none yet."""
        if self.cublas is None:
            self.cublas = cublas.Handle(self.cupy.ptr)
        return self.cublas

    def record(self, event: Event = None) -> Event:
        import cupy

        if event is None:  # a thread that waits for it leaves its core to others
            event = cupy.cuda.Event(block=True)
        driver.call("cuEventRecord", event.ptr, self.cupy.ptr)
        return event

    def mark(self, *, timed: bool = True) -> Event:
        import cupy

        # Nobody is to be woken, which takes an interrupt.
        return self.record(cupy.cuda.Event(disable_timing=not timed))

    def wait(self, event: Event) -> None:
        driver.call("cuStreamWaitEvent", self.cupy.ptr, event.ptr, 0)

    def passed(self, event: Event) -> bool:
        return not driver.call("cuEventQuery", event.ptr, fine=driver.NOT_READY)

    def capturing(self) -> bool:
        return bool(self.cupy.is_capturing())

    def unrestricted(self) -> contextlib.AbstractContextManager[None]:
        """Lets this thread allocate and load meanwhile, where a graph records what is queued."""
        return driver.relaxed_capture() if self.capturing() else contextlib.nullcontext()

    def synchronize(self) -> None:
        self.cupy.synchronize()
