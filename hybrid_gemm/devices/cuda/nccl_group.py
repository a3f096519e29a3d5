"""NCCL between GPUs of this process: communicators, which are kept, and sums that one thread
starts."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ...errors import UnavailableError
from ..base import Array, Event

if TYPE_CHECKING:  # what has GPUs imports it
    from .device import CudaDevice
    from .stream import CudaStream

# All that one thread starts goes to all GPUs before anything that another thread starts: sums that
# wait for each other on different GPUs would never end. Making a group takes the lock twice.
_lock = threading.RLock()
groups: dict[tuple[int, ...], Group] = {}


def unavailable() -> str | None:
    """Why CuPy has no NCCL here, in one line; None if it has."""
    try:
        version()
    except Exception as error:  # no module, or no library that it can load
        return f"CuPy finds no NCCL (pip install nvidia-nccl-cu13, or -cu12): {error}"
    return None


def version() -> str:
    """Such as 2.28.3."""
    from cupy.cuda import nccl

    code = nccl.get_version()
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def group(ordinals: tuple[int, ...]) -> Group:
    """The group of these GPUs, all different; made when it is first asked for."""
    with _lock:
        if ordinals not in groups:
            groups[ordinals] = Group(ordinals)
        return groups[ordinals]


class Group:
    """GPUs that sum together. A GPU's place is its index in `ordinals`.

    Raises `UnavailableError` if NCCL does not start between them.
    """

    def __init__(self, ordinals: tuple[int, ...]):
        from cupy.cuda import nccl

        self.library, self.ordinals = nccl, ordinals
        self.lanes = [lane(ordinal) for ordinal in ordinals]
        try:
            self.comms = nccl.NcclCommunicator.initAll(list(ordinals))
            # NCCL connects GPUs when they first sum: now, while no clock runs.
            numbers = [device.empty(1, 1, "float32") for device, _stream in self.lanes]
            self.bound_sum([(0, numbers)])([])
            self.synchronize()
        except nccl.NcclError as error:
            raise UnavailableError(
                f"NCCL does not start between GPUs {', '.join(map(str, ordinals))}: {error} "
                "(NCCL_DEBUG=WARN says why; the ordered reduction does without)"
            ) from error

    def bound_sum(
        self, strips: Sequence[tuple[int, Sequence[Array]]]
    ) -> Callable[[Sequence[Event]], list[Event]]:
        """A call that starts the sums of all strips, worked out before it is due.

        A strip is its owner's place and a row-major matrix of each GPU, of one shape, leading
        dimension and dtype; their sum, in NCCL's order, will be in the owner's own. The call is
        given the events after which the matrices are there, and returns for each GPU the event
        after which its part is done.
        """
        calls = []
        for owner, matrices in strips:
            kind = getattr(self.library, f"NCCL_{matrices[0].dtype.name.upper()}")
            for parts in zip(*map(_contiguous, matrices), strict=True):
                for comm, part, (_device, stream) in zip(
                    self.comms, parts, self.lanes, strict=True
                ):
                    address = part.data.ptr
                    calls.append(functools.partial(
                        comm.reduce, address, address, part.size, kind,
                        self.library.NCCL_SUM, owner, stream.cupy.ptr,
                    ))  # fmt: skip
        return functools.partial(self._start, calls)

    def _start(self, calls: Sequence[Callable[[], None]], events: Sequence[Event]) -> list[Event]:
        """Starts the sums after these events; the events after which they are done."""
        with _lock:
            for _device, stream in self.lanes:
                for event in events:  # of all GPUs: a sum that waits for one keeps others busy
                    stream.wait(event)
            try:
                with self._together():
                    for call in calls:
                        call()
            except BaseException:  # some GPUs may wait for others for ever
                self.close()
                raise
            after = []
            for device, stream in self.lanes:
                with device.using(stream):
                    after.append(stream.record())
            return after

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """What is called meanwhile starts on all GPUs at its end."""
        self.library.groupStart()
        try:
            yield
        finally:
            self.library.groupEnd()

    def synchronize(self) -> None:
        """Waits until no GPU sums any more."""
        for _device, stream in self.lanes:
            stream.synchronize()

    def close(self) -> None:
        """Ends what still runs; the next call of `group` for these GPUs makes a new one."""
        groups.pop(self.ordinals, None)
        with self._together():
            for comm in self.comms:
                comm.abort()


@functools.cache
def lane(ordinal: int) -> tuple[CudaDevice, CudaStream]:
    """A GPU with the one stream for all that NCCL does there, whatever the group: in the order
    in which it was started, which is the same on all GPUs."""
    from .device import CudaDevice

    device = CudaDevice(ordinal)
    return device, device.stream(urgent=True)


def _contiguous(matrix: Array) -> list[Array]:
    """The fewest parts of a row-major matrix that have no gaps."""
    return [matrix] if matrix.flags.c_contiguous else list(matrix)


@atexit.register
def _close() -> None:
    """Closes all groups while CUDA is still there."""
    for each in list(groups.values()):
        each.close()
