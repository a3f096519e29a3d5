"""A `Lab`: the device of an experiment, with its operands, clock, verdicts and model."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import numpy as np

from ..arrays import generator
from ..catalog import Variant
from ..devices import open_devices
from ..devices.cuda import nvrtc
from ..errors import KernelError, UnavailableError
from ..host.resources import cores
from ..problem import Problem
from ..verify import verify
from . import model

SAMPLE_MS = 2.0  # a sample on a GPU lasts at least so long
LONG_MS = 1000.0  # past this one sample does


class Lab:
    """What measurements share: a device, its operands, its model, and the time that is left."""

    def __init__(self, kind: str, *, gpus=None, seed: int = 0, samples: int = 3):
        self.kind, self.gpus, self.seed, self.samples = kind, gpus, seed, samples
        first = (list(gpus) if gpus else [0])[:1]
        self.device = open_devices(kind, 1, gpus=first if kind == "cuda" else None)[0]
        self.first_gpu = first[0]
        self.stream = self.device.stream()
        self.machine, self.modelled = _machine(self.device)
        self.deadline = float("inf")
        self.cut = 0  # rows that got fewer samples than asked for
        self._kept: dict = {}

    # --- operands -------------------------------------------------------------------------

    def keep(self, what: str, key: tuple, make: Callable):
        """The last thing of each sort is kept: points that share operands follow each other."""
        found = self._kept.get(what)
        if found is None or found[0] != key:
            self._kept.pop(what, None)
            found = self._kept[what] = key, make()
        return found[1]

    def hosted(self, m: int, n: int, k: int, dtype: str):
        """A (m x k), B (k x n) in host memory, and a C whose pages are there."""

        def make():
            a, b = (
                generator.generate(*shape, dtype, seed=self.seed, operand=x, threads=cores())
                for x, shape in (("A", (m, k)), ("B", (k, n)))
            )
            return a, b, np.zeros((m, n), dtype)

        return self.keep("hosted", (m, n, k, dtype), make)

    def placed(self, m: int, n: int, k: int, dtype: str, layout: str = "nn"):
        """op(A) and op(B) on the device, stored as `layout` says, and room for C."""

        def make():
            a, b, _c = self.hosted(m, n, k, dtype)
            on_device = [
                self.upload(x if order == "n" else np.ascontiguousarray(x.T))
                for x, order in zip((a, b), layout, strict=True)
            ]
            views = [x if o == "n" else x.T for x, o in zip(on_device, layout, strict=True)]
            return *views, self.device.empty(m, n, dtype)

        return self.keep("placed", (m, n, k, dtype, layout), make)

    def upload(self, host):
        there = self.device.empty(*host.shape, host.dtype.name)
        self.device.copy(there, host, self.stream)
        self.stream.synchronize()
        return there

    def forget(self) -> None:
        """Frees what was kept."""
        self._kept.clear()
        gc.collect()

    # --- time and truth -------------------------------------------------------------------

    def sampled(self, take: Callable[[], float]) -> dict:
        """Samples of a time in ms until there are enough, or the experiment's time is up."""
        taken = []
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

    def timed(self, work: Callable[[], None]) -> dict:
        """How long the device takes for `work`; on a GPU between two events, many at a time."""

        def sampler(count):
            replay = self.device.repeated(work, count, self.stream)
            return lambda: self._elapsed(replay) / count

        take = sampler(1)
        if self.kind == "cuda":
            take()
            count = min(1000, int(SAMPLE_MS / max(take(), 1e-3)))
            take = sampler(count) if count > 1 else take
        return self.sampled(take)

    def _elapsed(self, work) -> float:
        self.device.start_clock()
        start = self.stream.record()
        work()
        stop = self.stream.record()
        self.stream.synchronize()
        return self.device.time_ms(stop) - self.device.time_ms(start)

    def checked(
        self, problem: Problem, a, b, c, work: Callable[[], None], growth: float = 1.0
    ) -> dict:
        """Runs `work` once on a poisoned C; the verdict on what it made."""
        c[...] = np.nan if c.dtype.kind == "f" else -(2**30)
        work()
        self.stream.synchronize()
        return judged(verify(problem, a, b, None, c, growth=growth))

    def products(self, problem: Problem, a, b, c, work, growth: float = 1.0) -> dict:
        """Verdict and time of one way to make C; what is wrong is not timed."""
        with self.device.session():
            figures = self.checked(problem, a, b, c, work, growth)
            if figures["verdict"] == "passed":
                figures |= self.timed(work)
                figures["gflops"] = problem.flops / figures["time_ms"] / 1e6
            else:
                figures["note"] = "wrong, so not timed"
        return figures

    # --- the model ------------------------------------------------------------------------

    def model(self, variant: Variant, m: int, n: int, k: int, dtype: str) -> dict:
        """The model of a variant on this machine (or on the one that stands for it)."""
        usage = None
        if not variant.kernel.library and dtype in variant.kernel.dtypes:
            arch = f"sm_{variant.kernel.arch[2:]}" if variant.kernel.arch.endswith("a") else None
            try:
                source = variant.source(dtype, variant.kernel.layouts[0])
                usage = nvrtc.compile(source, arch or self.machine.arch, f"{variant.name}.cu")[1]
            except (UnavailableError, KernelError):
                usage = None  # no compiler, or none for this machine: the columns stay empty
        return model.describe(variant, dtype, usage, self.machine, m, n, k)


def judged(verdict) -> dict:
    """A verdict as figures of a row."""
    return {
        "verdict": "passed" if verdict.passed else "FAILED",
        "worst_error_of_bound": verdict.worst,
    }


def _machine(device) -> tuple[model.Machine, bool]:
    """The device's limits, or a known GPU's where there is none (then the second is True)."""
    if device.kind != "cuda":
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
