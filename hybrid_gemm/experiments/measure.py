"""The measurements that experiments are made of: each takes a `Lab` and returns columns of a row.

The lab's device and stream are current while they run. A measurement that is not possible raises
a `HybridGemmError`, or returns a row whose "note" says why.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import catalog
from ..bench.libraries import Check
from ..bench.study import FAILED, PASSED, drawn_on_host
from ..catalog import Variant
from ..devices import choose, open_devices
from ..devices.cuda.device import CudaDevice
from ..devices.emulator import program as emulation
from ..devices.kernel_device import KernelDevice
from ..devices.strassen import Strassen
from ..errors import UnavailableError
from ..execution.result import Result
from ..execution.streamed import is_settled
from ..planning.plan import Plan
from ..problem import Problem
from ..runner import Runner
from ..verify import GROWTH
from . import model
from .base import Row
from .lab import Lab, Operands

Params = Mapping[str, int] | None  # of a kernel; the default ones for those not named
MOST_WARM_UPS = 5  # runs, until those that come again are carried out alike

# --- products on the device ---------------------------------------------------------------


def product(
    lab: Lab, *, kernel: str, m: int, n: int, k: int, params: Params = None,
    dtype: str = "float32", layout: str = "nn",
) -> Row:  # fmt: skip
    """A kernel's product with the data on the device, and its model."""
    variant = lab.variant(kernel, params)
    figures: Row = {"variant": str(variant)} | lab.model(variant, m, n, k, dtype)
    if reason := variant.refusal(device=lab.kind, dtype=dtype, m=m, n=n, k=k):
        return figures | {"note": reason}
    a, b, c = lab.placed(m, n, k, dtype, layout)

    def work() -> None:
        lab.device.gemm(variant, a, b, c, alpha=1, beta=0, stream=lab.stream)

    figures |= lab.products(Problem(m, n, k, dtype), (a, b, c), work)
    if lab.device.on_gpu and "gflops" in figures:
        figures["peak_gflops"] = lab.machine.gflops * model.RATE[dtype]
        figures["of_peak"] = figures["gflops"] / figures["peak_gflops"]
    return figures


def product_and_occupancy(lab: Lab, *, kernel: str, n: int, params: Params = None) -> Row:
    """As `product` for n x n x n in float32; on a GPU also the occupancy that the CUDA driver
    computes, as "driver_occupancy"."""
    figures = product(lab, kernel=kernel, m=n, n=n, k=n, params=params)
    variant = lab.variant(kernel, params)
    if isinstance(lab.device, CudaDevice) and "verdict" in figures and not variant.kernel.library:
        figures["driver_occupancy"] = _driver_occupancy(lab.device, lab.machine, variant, n)
    return figures


def _driver_occupancy(gpu: CudaDevice, machine: model.Machine, variant: Variant, n: int) -> float:
    """The active warps as a share of the most, by the driver's count of resident blocks."""
    launch = variant.launch(n, n, n, "float32")
    threads = int(np.prod(launch.block))
    function = gpu.function(variant, "float32", variant.kernel.layouts[0])
    blocks = gpu.cp.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
        function.ptr, threads, launch.shared_bytes
    )
    return float(blocks * -(-threads // model.WARP) / machine.warps)


def strassen(lab: Lab, *, kernel: str, levels: int, n: int) -> Row:
    """A product by so many levels of Strassen's algorithm; 0 is the kernel alone.

    "error" is the Frobenius norm of the error of 64 rows over that of these rows.
    """
    variant = lab.variant(kernel)
    if reason := variant.refusal(device=lab.kind, dtype="float32", m=n, n=n, k=n):
        return {"note": reason}
    a, b, c = lab.placed(n, n, n, "float32")
    device = Strassen(lab.device, levels)

    def work() -> None:
        device.gemm(variant, a, b, c, alpha=1, beta=0, stream=lab.stream)

    figures = lab.products(Problem(n, n, n), (a, b, c), work, GROWTH**levels)
    rows = slice(0, n, max(1, n // 64))
    exact = a[rows].astype("f8") @ b.astype("f8")
    squares = [float((x**2).sum()) for x in (c[rows].astype("f8") - exact, exact)]
    return figures | {"error": (squares[0] / squares[1]) ** 0.5}


def padded(lab: Lab, *, kernel: str, n: int, to: int) -> Row:
    """An n x n x n product whose A and B are copied into zeros of side `to` first, within the
    time. C is the corner of a larger matrix and is not copied back; "gflops" counts n alone.
    """
    variant = lab.variant(kernel)
    if reason := variant.refusal(device=lab.kind, dtype="float32", m=to, n=to, k=to):
        return {"note": reason}
    device = lab.runs_kernels("padding is measured")
    a, b, _c = lab.placed(n, n, n, "float32")
    zeros = np.zeros((to, to), np.float32)
    wide_a, wide_b = lab.upload(zeros), lab.upload(zeros)
    wide_c = device.empty(to, to, "float32")

    def work() -> None:
        device.copy_here(wide_a[:n, :n], a, lab.stream)
        device.copy_here(wide_b[:n, :n], b, lab.stream)
        device.gemm(variant, wide_a, wide_b, wide_c, alpha=1, beta=0, stream=lab.stream)

    return lab.products(Problem(n, n, n), (a, b, wide_c[:n, :n]), work)


def transposition(lab: Lab, *, n: int) -> Row:
    """The time to transpose B (n x n) alone."""
    device = lab.runs_kernels("transposing is measured")
    _a, b, _c = lab.placed(n, n, n, "float32")
    right = bool((device.transposed(b, "t", lab.stream) == b).all())
    figures = lab.timed(lambda: device.transposed(b, "t", lab.stream))
    return figures | {"verdict": PASSED if right else FAILED}


# --- whole runs, host to host ---------------------------------------------------------------


def run(
    lab: Lab, *, n: int, threads: int = 1, split: str = "rows", reduce: str = "ordered",
    kernel: str = "own", params: Params = None, alone: bool = False,
) -> Row:  # fmt: skip
    """An n x n x n product by threads, matrices in host memory, copies within the time.

    With `alone` as the lab did it: all threads on one GPU, each with memory of its own that
    is allocated within the time, and its own copy of what it reads. Otherwise workers share
    what they can, keep their memory, and use every GPU.

    "compute_ms" is from the first upload to the last product, "compute_and_sum_ms" the whole run.
    "multiply_ms" and "multiply_and_sum_ms" are without the copies in. They come from another
    run, in which every block is on its device beforehand, because otherwise workers wait for each
    other's copies; with `alone` from the same run.
    """
    choices = {"threads": threads, "split": split, "reduce": reduce}
    make = functools.partial(_runner, lab, alone, {"kernel": kernel, "params": params}, **choices)
    kept = None if alone else make()
    operands = a, b, c = lab.hosted(n, n, n, "float32")
    runs: list[Result] = []

    def take() -> float:
        runner = kept or make()
        runs.append(runner.run(a, b, out=c))
        if alone:
            del runner
            gc.collect()  # its memory goes back, so that the next run allocates
        return runs[-1].total_ms

    c[...] = np.nan
    take()
    figures = _judged_host(lab, runs[0].plan.problem, operands)
    if figures["verdict"] != PASSED:
        return figures | {"note": "wrong, so not timed"}
    if lab.samples > 1:  # the first runs are warm-ups
        while kept and not is_settled(runs[-1].executor) and len(runs) < MOST_WARM_UPS:
            take()
        runs.clear()
        figures |= lab.sampled(take)
    else:
        figures |= {"time_ms": runs[0].total_ms, "min_ms": runs[0].total_ms, "samples": 1}
    result = next(r for r in runs if r.total_ms == figures["time_ms"])
    placed = result.timeline
    if kept:
        again = [kept.run(a, b, out=c, resident=True).timeline for _ in range(lab.samples)]
        placed = sorted(again, key=lambda x: x.multiply_and_sum_ms)[len(again) // 2]
    return figures | _run_figures(lab, result) | {
        "multiply_ms": placed.multiply_ms, "multiply_and_sum_ms": placed.multiply_and_sum_ms,
    }  # fmt: skip


def run_kernel(lab: Lab, **given: Any) -> Row:
    """As `run`, of a row that is about its kernel: no BLAS stands in for it."""
    lab.runs_kernels("kernels are timed")
    return run(lab, **given)


def _runner(lab: Lab, alone: bool, kernel: Mapping[str, Any], **choices: Any) -> Runner:
    """A runner on the lab's device; the cpu multiplies by its BLAS alone."""
    options = {"device": lab.kind, **choices}
    if isinstance(lab.device, KernelDevice):
        options |= kernel
        if alone:
            options["emulate_devices"] = choices["threads"]
    if lab.device.on_gpu:
        options["gpus"] = [lab.first_gpu] if alone else lab.gpus
    return Runner(**options)


def _run_figures(lab: Lab, result: Result) -> Row:
    """What a run's result says of itself, and the model of its kernel."""
    problem = result.plan.problem
    sides = problem.m, problem.n, problem.k
    library = result.variant.kernel.library
    return {
        **({} if library else lab.model(result.variant, *sides, problem.dtype)),
        "variant": str(result.variant),
        "reduction": result.reduction,
        "devices": len({d.unit for d in result.plan.devices}),
        "gflops": result.gflops,
        "compute_ms": result.timeline.span_ms("upload", "multiply"),
        "compute_and_sum_ms": result.total_ms,
        **_crossing(result.plan),
    }


def _crossing(plan: Plan) -> Row:
    """The bytes of a plan that go from host memory to devices and back. Of the CPU, whose memory
    is the host's, those of the same plan for a GPU."""
    apart = [dataclasses.replace(spec, host_memory=False) for spec in plan.devices]
    plan = dataclasses.replace(plan, devices=tuple(apart))
    return {"bytes_h2d": plan.bytes_h2d, "bytes_d2h": plan.bytes_d2h}


def _judged_host(lab: Lab, problem: Problem, operands: Operands) -> Row:
    """The verdict on host matrices; computed on the GPU where there is one, which is quicker."""
    a, b, c = operands
    check = Check(problem, a, b, lab.first_gpu if lab.device.on_gpu else None)
    found = check(c)
    check.release()
    return found


def library_cold(lab: Lab, *, n: int) -> Row:
    """cublasSgemm of n x n x n in a new process, host to host; the handle is made within the
    time. "handle_ms" is the handle alone, "warm_ms" a second product with the same handle.
    """
    if not lab.device.on_gpu:
        raise UnavailableError("cuBLAS needs a CUDA device")
    module = f"{__package__}.library_cold"
    # -P: nothing is imported from the working directory, which may be anyone's.
    command = [sys.executable, "-P", "-m", module, str(n), str(lab.first_gpu)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise UnavailableError(f"cuBLAS in a process of its own failed: {lines[-1]}")
    figures: Row = json.loads(done.stdout.splitlines()[-1])
    return figures


# --- memory and properties ------------------------------------------------------------------


def probe(lab: Lab, *, kernel: str, count: int, touched: int, params: Params = None) -> Row:
    """A probe kernel of global memory over `count` floats, of which it changes `touched`.

    "gbps" is 10^9 bytes a second, of those that it reads and writes usefully.
    """
    device = lab.runs_kernels("probes of memory are measured")
    variant = catalog.get(kernel).variant(params)
    function = device.function(variant, "float32")
    src = lab.keep("probe", (count,), lambda: lab.upload(np.ones((1, count), np.float32)))
    dst = device.empty(1, count, "float32")
    launch = variant.launch(1, count, 0, "float32")
    args = [np.int32(count), src, dst]

    def work() -> None:
        device.launch(function, launch, args, lab.stream)

    dst[...] = 0
    work()
    lab.stream.synchronize()
    found = int((dst == 2).sum())
    if found != touched:
        note = f"{found} elements were changed, not {touched}"
        return {"verdict": FAILED, "note": note}
    figures = lab.timed(work)
    return figures | {
        "verdict": PASSED,
        "time_us": figures["time_ms"] * 1e3,
        "gbps": 2 * 4 * touched / figures["time_ms"] / 1e6,
    }


def emulated(lab: Lab, *, kernel: str, n: int) -> Row:
    """A kernel's source on the emulator, whatever the lab's device is.

    The matrices are whole numbers, so that the product must be equal to NumPy's.
    """
    choose("emulator")  # raises with the reason, where it cannot run
    variant = catalog.get(kernel).variant()
    device = open_devices("emulator", 1)[0]
    a, b = drawn_on_host(n, n, n, "float32", lab.seed, "integers")
    c = np.full((n, n), np.nan, np.float32)
    device.prepare(variant, a, b, "float32")
    device.start_clock()
    start = device.stream().record()
    device.gemm(variant, a, b, c, alpha=1, beta=0, stream=device.stream())
    time_ms = device.time_ms(device.stream().record()) - device.time_ms(start)
    right = bool((c == a @ b).all())
    verdict = PASSED if right else FAILED
    return {"time_ms": time_ms, "verdict": verdict, "variant": str(variant)}


def emulated_race(lab: Lab, *, order: str) -> Row:
    """A kernel that lacks a barrier, on the emulator with its threads in this order.

    "wrong" is how many of its 32 results are.
    """
    choose("emulator")
    options = emulation.Options(order=order)
    program = emulation.compile(
        _RACE, "race", include=catalog.directory(), options=options, label="race"
    )
    out = np.full(32, -1, np.int32)
    program.launch(catalog.Launch((1, 1, 1), (32, 1, 1)), [out], options=options)
    return {"wrong": int((out != np.maximum(np.arange(32) - 1, 0)).sum())}


# Thread t reads what thread t - 1 writes, without a barrier in between.
_RACE = """
extern "C" __global__ void race(int* out) {
    __shared__ int part[32];
    const int t = threadIdx.x;
    part[t] = t;
    out[t] = part[t > 0 ? t - 1 : 0];
}
"""


def limit(lab: Lab, *, read: Callable[[model.Machine, Mapping[str, Any]], int]) -> Row:
    """One property of the GPU: `read(machine, properties)`, these as CUDA's runtime has them."""
    return {"value": read(lab.machine, lab.gpu.properties)}
