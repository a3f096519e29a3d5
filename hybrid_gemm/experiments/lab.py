"""The `Lab` that measurements share: a device, its operands, its clock, verdicts and model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .. import catalog, devices
from ..arrays.strides import Array
from ..bench.study import drawn_on_host, elapsed_ms, filling, judged, unwrite, upload
from ..catalog import Variant
from ..devices.base import Device
from ..devices.cuda import nvrtc
from ..devices.cuda.device import CudaDevice
from ..devices.kernel_device import KernelDevice
from ..errors import KernelError, UnavailableError, UsageError
from ..problem import Problem
from . import model
from .base import Row

LONG_MS = 1000.0  # one sample is enough of what takes longer
Operands = tuple[Array, Array, Array]  # op(A), op(B) and room for C


class Lab:
    """A device of the kind `kind`, its operands, its model, and the time that is left.

    `gpus` are the ordinals that runs over several GPUs use (default: all); measurements on one
    GPU take the first. `samples` are timed for each row. `deadline` is the time (of
    `time.monotonic`) after which a row gets no further sample, and `cut` counts the rows that got
    fewer than asked for. `machine` is the device's own model, or with `modelled` a known GPU's
    that stands for a device which is none.
    """

    def __init__(
        self, kind: str, *, gpus: Sequence[int] | None = None, seed: int = 0, samples: int = 3
    ) -> None:
        self.kind, self.gpus, self.seed, self.samples = kind, gpus, seed, samples
        self.first_gpu = gpus[0] if gpus else 0
        named = [self.first_gpu] if gpus or devices.are_gpus(kind) else None
        self.device: Device = devices.open_devices(kind, 1, gpus=named)[0]
        self.stream = self.device.stream()
        self.machine, self.modelled = _machine(self.device)
        self.deadline = float("inf")
        self.cut = 0
        self._kept: dict[str, tuple[tuple, Any]] = {}

    @property
    def gpu(self) -> CudaDevice:
        """The device as a GPU. Raises `UnavailableError` if it is none."""
        if not isinstance(self.device, CudaDevice):
            raise UnavailableError("there is no CUDA device to ask")
        return self.device

    def runs_kernels(self, what: str) -> KernelDevice:
        """The device as one that runs the catalog's kernels. Raises `UsageError` otherwise;
        `what` begins the message: "probes are measured"."""
        if not isinstance(self.device, KernelDevice):
            raise UsageError(f"{what} on devices that run the kernels; the {self.kind} has none")
        return self.device

    def variant(self, kernel: str, params: Mapping[str, int] | None = None) -> Variant:
        """A kernel's default variant with `params`; on a GPU other parameters that count blocks of
        the whole GPU are for its multiprocessors."""
        found = catalog.get(kernel).variant(params)
        if not self.device.on_gpu:
            return found
        return found.for_multiprocessors(self.device.processors, params or {})

    # --- operands -------------------------------------------------------------------------

    def keep(self, what: str, key: tuple, make: Callable[[], Any]) -> Any:
        """What `make` returns, kept until the same `what` is asked for with another `key`.

        Points that share operands follow each other, so that the last of each sort is enough.
        """
        found = self._kept.get(what)
        if found is None or found[0] != key:
            self._kept.pop(what, None)
            found = self._kept[what] = key, make()
        return found[1]

    def hosted(self, m: int, n: int, k: int, dtype: str) -> Operands:
        """A (m x k) and B (k x n) in host memory, and a C whose pages are allocated."""

        def make() -> Operands:
            return *drawn_on_host(m, n, k, dtype, self.seed), np.zeros((m, n), dtype)

        kept: Operands = self.keep("hosted", (m, n, k, dtype), make)
        return kept

    def placed(self, m: int, n: int, k: int, dtype: str, layout: str = "nn") -> Operands:
        """op(A) and op(B) on the device, stored as `layout` says, and room for C."""

        def make() -> Operands:
            a, b, _c = self.hosted(m, n, k, dtype)
            on_device = [
                self.upload(x if order == "n" else np.ascontiguousarray(x.T))
                for x, order in zip((a, b), layout, strict=True)
            ]
            a, b = (x if o == "n" else x.T for x, o in zip(on_device, layout, strict=True))
            return a, b, self.device.empty(m, n, dtype)

        kept: Operands = self.keep("placed", (m, n, k, dtype, layout), make)
        return kept

    def upload(self, host: np.ndarray) -> Array:
        """A host matrix copied into new memory of the device, row-major; waits for the copy."""
        return upload(self.device, host, self.stream)

    def forget(self) -> None:
        """Frees what was kept."""
        self._kept.clear()
        gc.collect()

    # --- times and verdicts ---------------------------------------------------------------

    def sampled(self, take: Callable[[], float]) -> Row:
        """The median and least of samples in ms, taken until there are enough or time is up."""
        taken: list[float] = []
        while True:
            began = time.monotonic()
            taken.append(take())
            now = time.monotonic()
            if len(taken) == self.samples or taken[0] > LONG_MS:
                break
            if now + (now - began) > self.deadline:
                self.cut += 1
                break
        return {"time_ms": statistics.median_low(taken), "min_ms": min(taken),
                "samples": len(taken)}  # fmt: skip

    def timed(self, work: Callable[[], None]) -> Row:
        """The time that the device takes for `work`; on a GPU many repeats between two events."""

        def sampler(count: int) -> Callable[[], float]:
            replay = self.device.repeated(work, count, self.stream)
            return lambda: elapsed_ms(self.device, self.stream, replay) / count

        return self.sampled(filling(sampler, self.device))

    def checked(
        self, problem: Problem, operands: Operands, work: Callable[[], None], growth: float = 1.0
    ) -> Row:
        """Runs `work`, which computes c = a @ b, once; the verdict on C."""
        a, b, c = operands
        unwrite(c)
        work()
        self.stream.synchronize()
        return judged(problem, a, b, c, growth=growth)

    def products(
        self, problem: Problem, operands: Operands, work: Callable[[], None], growth: float = 1.0
    ) -> Row:
        """Verdict, time and rate of `work`, which computes c = a @ b; a wrong one is not timed."""
        with self.device.session():
            figures = self.checked(problem, operands, work, growth)
            if figures["verdict"] == "passed":
                figures |= self.timed(work)
                figures["gflops"] = problem.flops / figures["time_ms"] / 1e6
            else:
                figures["note"] = "wrong, so not timed"
        return figures

    # --- the model ------------------------------------------------------------------------

    def model(self, variant: Variant, m: int, n: int, k: int, dtype: str) -> Row:
        """The columns of `model.describe` for a variant on this machine."""
        usage = None
        if not variant.kernel.library and dtype in variant.kernel.dtypes:
            arch = f"sm_{variant.kernel.arch[2:]}" if variant.kernel.arch.endswith("a") else None
            try:
                source = variant.source(dtype, variant.kernel.layouts[0])
                usage = nvrtc.compile(source, arch or self.machine.arch, f"{variant.name}.cu")[1]
            except (UnavailableError, KernelError):
                usage = None  # no compiler, or none for this machine: the columns stay empty
        return model.describe(variant, dtype, usage, self.machine, m, n, k)


def _machine(device: Device) -> tuple[model.Machine, bool]:
    """The device's limits, or a known GPU's where it is none (then the second is True)."""
    if not isinstance(device, CudaDevice):
        return model.H200, True
    p, attributes = device.properties, device.cp.cuda.Device(device.ordinal).attributes
    # Of an unknown architecture we take 128 multiply-adds a cycle and multiprocessor.
    guess = p["multiProcessorCount"] * 256 * attributes["ClockRate"] / 1e9
    return model.Machine(
        device.model, device.arch, p["multiProcessorCount"], p["maxThreadsPerMultiProcessor"],
        attributes.get("MaxBlocksPerMultiprocessor", 32), p["regsPerMultiprocessor"],
        p["sharedMemPerMultiprocessor"], attributes.get("ReservedSharedMemoryPerBlock", 1024),
        1e3 * (device.peak_tflops("float32") or guess),
        2 * attributes["MemoryClockRate"] * p["memoryBusWidth"] / 8 / 1e6,
    ), False  # fmt: skip
