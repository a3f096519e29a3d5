"""The emulator as a device: the kernels' own text, compiled by g++, run on the CPU.

It behaves as a GPU would: matrices live in memory of their own and are copied in and out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ... import catalog
from ...catalog import Launch, Variant
from ...host.resources import cores, memory_available
from ...planning.hardware import DeviceSpec
from ..base import Array, Stream
from ..kernel_device import KernelDevice
from ..roles import BoundProduct
from . import program as emulation
from .kept import kept

# Between rows, where accesses are checked: a kernel that takes rows for contiguous is wrong then.
# Rows that began on 16 bytes still do, so kernels that read vectors do so.
_ROW_GAP = 16


class EmulatorDevice(KernelDevice):
    """One of the devices that the CPU plays: number `part`, with the threads of one of `workers`
    workers. `options` say in which order blocks and threads run."""

    kind = "emulator"
    chunk_flops = 10**9

    def __init__(
        self, workers: int = 1, part: int = 0, options: emulation.Options | None = None
    ) -> None:
        super().__init__()
        self.name = f"emulator:{part}"
        self.threads = max(1, cores() // workers)
        self.options = options or emulation.Options()

    def detached(self) -> EmulatorDevice:
        return EmulatorDevice(options=self.options)

    @property
    def row_gap(self) -> int:
        return _ROW_GAP if self.options.sanitize else 0

    def spec(self, dtype: str = "float32", mode: str | None = None) -> DeviceSpec:
        return DeviceSpec(
            self.name, self.kind, 0, memory_available(), tflops=0.002 * cores(), memory_gbps=5,
            link_gbps=5, peer_gbps=5, on_gpu=False,
        )  # fmt: skip

    def empty(self, rows: int, cols: int, dtype: DTypeLike) -> np.ndarray:
        return np.empty((rows, cols), dtype)

    def copy(self, dst: Array, src: Array, stream: Stream) -> None:
        dst[...] = src

    def pointers(self, matrices: Sequence[Array]) -> np.ndarray:
        return np.array([m.ctypes.data for m in matrices], np.uint64)

    def compile(self, variant: Variant, dtype: str, layouts: str) -> None:
        self.load(variant, dtype, layouts)

    def load(self, variant: Variant, dtype: str, layouts: str) -> emulation.Program:
        return emulation.compile(
            variant.source(dtype, layouts),
            variant.kernel.entry,
            include=catalog.directory(),
            options=self.options,
            label=f"{variant} {dtype} {layouts}",
        )

    def bind(
        self, variant: Variant, a: Array, b: Array, c: Array, *, alpha: float, beta: float
    ) -> BoundProduct:
        call = super().bind(variant, a, b, c, alpha=alpha, beta=beta)
        if not self.row_gap:
            return call

        def checked(a: Array, b: Array, c: Array, stream: Stream) -> None:
            with kept(variant, a, b, c, self.row_gap):
                call(a, b, c, stream)

        return checked

    def launch(
        self, function: emulation.Program, launch: Launch, args: Sequence[Any], stream: Stream
    ) -> None:
        with stream.lock:  # as on a GPU, its kernels run one after the other, whoever starts them
            try:
                function.launch(launch, args, threads=self.threads, options=self.options)
            except BaseException:  # blocks that ran were counted, and none was the last
                for _workspace, flags in stream.scratch:
                    flags[...] = 0
                raise
