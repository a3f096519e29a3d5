"""A device that loads and launches the catalog's kernels: what is different on GPUs and on the
emulator."""

from __future__ import annotations

import abc
import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..catalog import Launch, Variant
from ..host import forks
from ..host.resources import cores
from .base import Array, Device, Stream
from .roles import BoundProduct

Compiled = tuple[Variant, str, str]  # a kernel, its dtype, and the storage orders of A and B
R = TypeVar("R")
_devices: weakref.WeakSet[KernelLauncher] = weakref.WeakSet()


def _forget() -> None:
    for device in _devices:
        device._coming.clear()  # the threads that compile did not come along


forks.forget_in_child(_forget)


class _Unloaded(Exception):
    """A kernel is not loaded, where only those that are may be taken."""


class KernelLauncher(Device):
    """Loads, keeps and launches kernels. Those that other threads compile are waited for when they
    are loaded."""

    def __init__(self) -> None:
        self._loaded: dict[Compiled, Any] = {}
        self._coming: dict[Compiled, Future[None]] = {}  # that other threads compile
        self._noted: dict[Compiled, None] | None = None  # where kernels are noted and not loaded
        self._thread = threading.local()  # `loads` is False where it takes loaded kernels alone
        _devices.add(self)

    @abc.abstractmethod
    def load(self, variant: Variant, dtype: str, layouts: str) -> Any:
        """The compiled kernel, ready to launch. `layouts` are the storage orders of A and B, such
        as "nt"."""

    @abc.abstractmethod
    def launch(self, function: Any, launch: Launch, args: Sequence[Any], stream: Stream) -> None:
        """Starts a kernel. Arguments are NumPy scalars and matrices of this device."""

    def clear(self, array: Array, stream: Stream) -> None:
        """Fills an array without gaps with zeros."""
        array[...] = 0

    def zeros(self, count: int, dtype: str, stream: Stream) -> Array:
        """A row of zeros that will stay with a stream, where all that comes next finds them."""
        made = self.empty(1, count, dtype)
        made[...] = 0
        return made

    @abc.abstractmethod
    def pointers(self, matrices: Sequence[Array]) -> Array:
        """The matrices' addresses as a uint64 array on this device."""

    @abc.abstractmethod
    def scratch(self, launch: Launch, dtype: str, stream: Stream) -> list[Array]:
        """The stream's workspace for a launch, a vector of that dtype, and its flags, uint32, which
        kernels leave zero; larger ones where this launch needs them."""

    @abc.abstractmethod
    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct:
        """A call that multiplies matrices laid out as these, worked out once for many."""

    def function(self, variant: Variant, dtype: str, layouts: str = "nn") -> Any:
        """As `load`; a kernel that was loaded is kept."""
        key = (variant, dtype, layouts)
        if self._noted is not None:
            self._noted[key] = None
            return None
        if key not in self._loaded:
            if not getattr(self._thread, "loads", True):
                raise _Unloaded
            if coming := self._coming.get(key):
                try:
                    coming.result()
                finally:
                    self._coming.pop(key, None)
            # Of two threads that load it at once, both get the one that is kept.
            return self._loaded.setdefault(key, self.load(variant, dtype, layouts))
        return self._loaded[key]

    def kernels_of(self, work: Callable[[KernelLauncher], object]) -> list[Compiled]:
        """The kernels that `work(device)` would load, such as one that binds a product."""
        noting = copy.copy(self)
        noting._noted = {}
        work(noting)
        return list(noting._noted)

    def compile_all(
        self, kernels: Iterable[Compiled], done: Callable[[Compiled], None] | None = None
    ) -> None:
        """Leaves compiled kernels in the cache, as many at once as there are cores. Calls `done`,
        from any thread, for each. Raises `KernelError` for the first that does not compile."""

        def compiled(kernel: Compiled) -> None:
            self.compile(*kernel)
            if done:
                done(kernel)

        with ThreadPoolExecutor(cores(), thread_name_prefix="compile") as pool:
            list(pool.map(compiled, kernels))

    def loading_together(self, work: Callable[[KernelLauncher], R]) -> R:
        """What `work(device)` returns; the kernels that it loads are compiled at once, if there are
        threads for it."""
        if self._noted is not None:
            return work(self)
        self._thread.loads = False
        try:
            return work(self)  # mostly, all are loaded
        except _Unloaded:
            pass
        finally:
            self._thread.loads = True
        missing = [x for x in self.kernels_of(work) if x not in self._loaded]
        if len(missing) > 1:
            with contextlib.suppress(RuntimeError):  # Python ends, and starts no more threads
                self.compile_all(missing)
        return work(self)

    @property
    def awaits_kernels(self) -> bool:
        return not all(future.done() for future in list(self._coming.values()))

    def compile_ahead(self, work: Callable[[KernelLauncher], object]) -> None:
        """Has the kernels that `work(device)` would load compiled by other threads. What does not
        compile raises its error where it is loaded."""
        if self._noted is not None:
            return
        missing = [
            x for x in self.kernels_of(work) if x not in self._loaded and x not in self._coming
        ]
        if not missing:
            return
        pool = ThreadPoolExecutor(min(len(missing), cores()), thread_name_prefix="compile")
        with contextlib.suppress(RuntimeError):  # Python ends, and starts no more threads
            for kernel in missing:
                self._coming[kernel] = pool.submit(self.compile, *kernel)
        pool.shutdown(wait=False)
