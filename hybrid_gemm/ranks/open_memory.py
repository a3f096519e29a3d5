"""Memory of GPUs that the ranks of one node open to each other (CUDA IPC)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class OpenMemory:
    """`size` bytes of this rank's GPU, and what the other ranks of `comm` opened, each as much as
    it said. Collective, to make and to close. RuntimeError on all ranks, with one's reason, where
    one has too little memory or cannot open it."""

    def __init__(self, comm: Any, device: Any, size: int) -> None:
        self.comm, self.device = comm, device
        self.cp = device.unwrapped.cp
        self.memory: Any = None
        self.bases: list[int] = []  # of each rank's memory, in this rank's addresses
        runtime, handle, refused = self.cp.cuda.runtime, None, ""
        with self._here():
            try:
                # Not from a pool: a handle opens a whole allocation.
                self.memory = self.cp.cuda.Memory(max(1, size))
                handle = runtime.ipcGetMemHandle(self.memory.ptr)
            except (MemoryError, RuntimeError) as error:
                refused = str(error) or type(error).__name__
            handles = comm.allgather(handle)
            try:
                for rank, theirs in enumerate(handles if None not in handles else ()):
                    mine = rank == comm.rank
                    self.bases.append(self.memory.ptr if mine else runtime.ipcOpenMemHandle(theirs))
            except RuntimeError as error:
                refused = str(error) or type(error).__name__
        if reason := next(filter(None, comm.allgather(refused)), ""):
            self.close()
            raise RuntimeError(reason)

    def matrix(self, rank: int, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
        """A matrix that lies in a rank's memory from `offset` bytes on, for this rank's GPU."""
        cp, size = self.cp, math.prod(shape) * np.dtype(dtype).itemsize
        at, ordinal = self.bases[rank] + offset, self.device.ordinal
        memory = cp.cuda.UnownedMemory(at, size, self, ordinal)
        return cp.ndarray(shape, dtype, cp.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        """Gives the memory back, after all ranks have closed it."""
        with self._here():
            for rank, base in enumerate(self.bases):
                if rank != self.comm.rank:
                    self.cp.cuda.runtime.ipcCloseMemHandle(base)
            self.bases = []
            self.comm.Barrier()  # nobody frees what another still has open
            self.memory = None

    def _here(self) -> contextlib.AbstractContextManager[Any]:
        return self.cp.cuda.Device(self.device.ordinal)
