"""Copies between a GPU, the host and other GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays.caller_arrays import wait_for_streams
from ...arrays.on_gpus import copy_into, moved
from ...arrays.strides import address, layout, leading, runs
from ..base import Array, Stream
from ..roles import Copies, Facts, Streams
from . import driver, pinned_memory

_ENABLED_ALREADY = 704  # cudaErrorPeerAccessAlreadyEnabled
OwnStream = Any  # a `CudaStream`: every device takes streams of its own


class CudaCopies(Streams, Copies):
    """Those of a `CudaDevice`."""

    cp: Any
    ordinal: int

    def calls(self) -> driver.Calls:
        with self.cp.cuda.Device(self.ordinal):
            return driver.calls(self.cp.cuda.driver.ctxGetCurrent())

    def reads(self, array: np.ndarray) -> bool:
        return pinned_memory.is_pinned(array)

    def reaches(self, other: Facts) -> bool:
        return other.ordinal == self.ordinal or bool(
            self.cp.cuda.runtime.deviceCanAccessPeer(self.ordinal, other.ordinal)
        )

    def reads_memory_of(self, ordinal: int) -> bool:
        runtime = self.cp.cuda.runtime
        with self.cp.cuda.Device(self.ordinal):
            if not runtime.deviceCanAccessPeer(self.ordinal, ordinal):
                return False
            try:
                runtime.deviceEnablePeerAccess(ordinal)
            except runtime.CUDARuntimeError as error:
                return bool(error.status == _ENABLED_ALREADY)
        return True

    def copy(self, dst: Array, src: Array, stream: OwnStream) -> None:
        """2-D asynchronous copies in any direction: slabs need no repacking on the host."""
        self.bound_copy(dst, src)(stream)

    def bound_copy(self, dst: Array, src: Array) -> Callable[[Stream], None]:
        if not dst.size:
            return lambda stream: None
        if not (shape := runs(dst, src)):
            return lambda stream: self._copy_turned(dst, src, stream)
        if not isinstance(dst, np.ndarray) and not isinstance(src, np.ndarray):
            return lambda stream: self.copy_pinned(dst, src, stream)  # returns at once, too
        runtime, kept = self.cp.cuda.runtime, (dst, src)
        way, to, source = runtime.memcpyDefault, address(dst), address(src)
        to_pitch, pitch, width, height = shape

        def copy_2d(stream: OwnStream, _kept: Any = kept) -> None:
            runtime.memcpy2DAsync(to, to_pitch, source, pitch, width, height, way, stream.cupy.ptr)

        def copy_run(stream: OwnStream, _kept: Any = kept) -> None:
            runtime.memcpyAsync(to, source, width, way, stream.cupy.ptr)

        return copy_2d if height > 1 else copy_run

    def copy_pinned(self, dst: Array, src: Array, stream: OwnStream) -> None:
        shape = dst.size and runs(dst, src)
        if not shape:
            self.copy(dst, src, stream)
            return
        to_pitch, pitch, width, height = shape
        if height > 1:
            driver.copy_2d(
                address(dst), to_pitch, address(src), pitch, width, height, stream.cupy.ptr
            )
        else:
            driver.copy(address(dst), address(src), width, stream.cupy.ptr)

    def _copy_turned(self, dst: Array, src: Array, stream: OwnStream) -> None:
        """A copy between matrices that have no storage order in common."""
        hosts = isinstance(dst, np.ndarray), isinstance(src, np.ndarray)
        if not hosts[1] and src.data.device_id != self.ordinal:
            with self.using(stream):
                src = moved(src, self.ordinal)
            self.copy(dst, src, stream)
        elif not layout(src):
            # Neither order: a strided host view is made whole first, a device view by CuPy.
            src = np.ascontiguousarray(src) if hosts[1] else src.copy()
            self.copy(dst, src, stream)
        elif hosts[0]:  # a result given back in the caller's own order
            whole = np.empty(dst.shape, dst.dtype, "C" if leading(src, "n") else "F")
            self.copy(whole, src, stream)
            stream.synchronize()
            dst[...] = whole
        elif dst.data.device_id != self.ordinal:
            with self.using(stream):
                copy_into(dst, src)
            wait_for_streams(dst)
        else:
            dst[...] = self.cp.asarray(src)
