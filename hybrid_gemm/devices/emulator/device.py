"""The emulator as a device: the kernels' own text, compiled by g++, run on the CPU.

It behaves as a GPU would: matrices live in memory of their own and are copied in and out.
"""

from __future__ import annotations

import numpy as np

from ... import catalog
from ...host.resources import cores, memory_available
from ...planning.planner import DeviceSpec
from ..kernel_device import KernelDevice
from . import program as emulation


class EmulatorDevice(KernelDevice):
    kind = "emulator"
    chunk_flops = 10**9

    def __init__(self, workers: int = 1, part: int = 0, options=None):
        super().__init__()
        self.name = f"emulator:{part}"
        self.threads = max(1, cores() // workers)
        self.options = options or emulation.Options()

    def detached(self):
        return EmulatorDevice(options=self.options)

    def spec(self, dtype="float32") -> DeviceSpec:
        return DeviceSpec(
            self.name, self.kind, 0, memory_available(), tflops=0.002 * cores(), memory_gbps=5,
            link_gbps=5, peer_gbps=5,
        )  # fmt: skip

    def empty(self, rows, cols, dtype):
        return np.empty((rows, cols), dtype)

    def copy(self, dst, src, stream):
        dst[...] = src

    def pointers(self, matrices):
        return np.array([m.ctypes.data for m in matrices], np.uint64)

    def compile(self, variant, dtype, layouts):
        self.load(variant, dtype, layouts)

    def load(self, variant, dtype, layouts):
        return emulation.compile(
            variant.source(dtype, layouts),
            variant.kernel.entry,
            include=catalog.directory(),
            options=self.options,
            label=f"{variant} {dtype} {layouts}",
        )

    def launch(self, function, launch, args, stream):
        function.launch(launch, args, threads=self.threads, options=self.options)
