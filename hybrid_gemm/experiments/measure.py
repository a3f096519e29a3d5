"""The measurements that experiments are made of. Each takes a `Lab` and gives a row's figures.

They run with the lab's device and stream current.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np

from .. import catalog
from ..arrays import generator
from ..catalog import Variant
from ..devices import choose, open_devices
from ..devices.emulator import program as emulation
from ..devices.kernel_device import KernelDevice
from ..devices.strassen import Strassen
from ..errors import UnavailableError, UsageError
from ..problem import Problem
from ..runner import Runner
from ..verify import GROWTH, verify
from . import model
from .lab import Lab, judged

# --- products on the device ---------------------------------------------------------------


def product(
    lab: Lab, *, kernel: str, m: int, n: int, k: int, params: Mapping[str, int] | None = None,
    dtype: str = "float32", layout: str = "nn", driver: bool = False,
) -> dict:  # fmt: skip
    """A kernel's product, data on the device, beside its model.

    With `driver`, what the CUDA driver says of its occupancy too.
    """
    variant = catalog.get(kernel).variant(params)
    figures = {"variant": str(variant)} | lab.model(variant, m, n, k, dtype)
    if reason := variant.refusal(device=lab.kind, dtype=dtype, m=m, n=n, k=k):
        return figures | {"note": reason}
    problem = Problem(m, n, k, dtype)
    a, b, c = lab.placed(m, n, k, dtype, layout)
    if driver and lab.kind == "cuda" and not variant.kernel.library:
        figures["driver_occupancy"] = _driver_occupancy(lab, variant, m, n, k, dtype)

    def work():
        lab.device.gemm(variant, a, b, c, alpha=1, beta=0, stream=lab.stream)

    figures |= lab.products(problem, a, b, c, work)
    if lab.kind == "cuda" and "gflops" in figures:
        figures["peak_gflops"] = lab.machine.gflops * model.RATE[dtype]
        figures["of_peak"] = figures["gflops"] / figures["peak_gflops"]
    return figures


def _driver_occupancy(lab: Lab, variant: Variant, m, n, k, dtype: str) -> float:
    launch = variant.launch(m, n, k, dtype)
    threads = int(np.prod(launch.block))
    function = lab.device.function(variant, dtype, variant.kernel.layouts[0])
    blocks = lab.device.cp.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(
        function.ptr, threads, launch.shared_bytes
    )
    return blocks * -(-threads // model.WARP) / lab.machine.warps


def strassen(lab: Lab, *, kernel: str, levels: int, n: int, dtype: str = "float32") -> dict:
    """A product by so many levels of Strassen's algorithm; 0 is the kernel alone.

    `error` is the Frobenius norm of the error of 64 rows over that of the rows.
    """
    variant = catalog.get(kernel).variant()
    if reason := variant.refusal(device=lab.kind, dtype=dtype, m=n, n=n, k=n):
        return {"note": reason}
    a, b, c = lab.placed(n, n, n, dtype)
    device = Strassen(lab.device, levels)

    def work():
        device.gemm(variant, a, b, c, alpha=1, beta=0, stream=lab.stream)

    figures = lab.products(Problem(n, n, n, dtype), a, b, c, work, GROWTH**levels)
    rows = slice(0, n, max(1, n // 64))
    exact = a[rows].astype("f8") @ b.astype("f8")
    squares = [float((x**2).sum()) for x in (c[rows].astype("f8") - exact, exact)]
    return figures | {"error": (squares[0] / squares[1]) ** 0.5}


def padded(lab: Lab, *, kernel: str, n: int, to: int, params=None, dtype: str = "float32") -> dict:
    """An n x n x n product with A and B copied into zeros of side `to` first, in the time.

    C is the corner of a larger matrix and is not copied back. gflops count n alone.
    """
    variant = catalog.get(kernel).variant(params)
    if reason := variant.refusal(device=lab.kind, dtype=dtype, m=to, n=to, k=to):
        return {"note": reason}
    if not isinstance(lab.device, KernelDevice):
        raise UsageError("padding is measured on devices that run the kernels")
    a, b, _c = lab.placed(n, n, n, dtype)
    zeros = np.zeros((to, to), dtype)
    wide_a, wide_b = lab.upload(zeros), lab.upload(zeros)
    wide_c = lab.device.empty(to, to, dtype)

    def work():
        lab.device.copy_here(wide_a[:n, :n], a, lab.stream)
        lab.device.copy_here(wide_b[:n, :n], b, lab.stream)
        lab.device.gemm(variant, wide_a, wide_b, wide_c, alpha=1, beta=0, stream=lab.stream)

    return lab.products(Problem(n, n, n, dtype), a, b, wide_c[:n, :n], work)


def transposition(lab: Lab, *, n: int, dtype: str = "float32") -> dict:
    """The time to transpose B alone."""
    if not isinstance(lab.device, KernelDevice):
        raise UsageError("transposing is measured on devices that run the kernels")
    _a, b, _c = lab.placed(n, n, n, dtype)
    right = bool((lab.device.transposed(b, lab.stream) == b).all())
    figures = lab.timed(lambda: lab.device.transposed(b, lab.stream))
    return figures | {"verdict": "passed" if right else "FAILED"}


# --- whole runs, host to host ---------------------------------------------------------------


def run(
    lab: Lab, *, n: int, threads: int = 1, split: str = "rows", reduce: str = "ordered",
    kernel: str = "own", params=None, alone: bool = False,
) -> dict:  # fmt: skip
    """A product by threads, matrices in host memory, copies in the time.

    With `alone` as the lab did it: all threads on one GPU, each with memory of its own that
    is allocated within the time, and its own copy of what it reads. Otherwise workers share
    what they can, keep their memory, and use every GPU.

    compute_ms: first upload to last product. compute_and_sum_ms: the whole run. multiply_ms
    and multiply_and_sum_ms: without the copies in; of a run of its own in which every block is
    on its device beforehand, for else workers wait for each other's copies (not with `alone`).
    """
    on_kernels = lab.kind != "cpu"
    options = {"device": lab.kind, "threads": threads, "split": split, "reduce": reduce}
    options["kernel"] = kernel if on_kernels else "auto"  # the cpu has its BLAS alone
    options["params"] = params if on_kernels else None
    if lab.kind == "cuda":
        options["gpus"] = [lab.first_gpu] if alone else lab.gpus
    if alone and on_kernels:
        options["emulate_devices"] = threads
    a, b, c = lab.hosted(n, n, n, "float32")
    kept = None if alone else Runner(**options)
    runs = []

    def take() -> float:
        runner = kept or Runner(**options)
        runs.append(runner.run(a, b, out=c))
        if alone:
            del runner
            gc.collect()  # its memory goes back, so that the next run allocates
        return runs[-1].total_ms

    c[...] = np.nan
    take()
    figures = judged(_verified_host(lab, runs[0].plan.problem, a, b, c))
    if figures["verdict"] != "passed":
        return figures | {"note": "wrong, so not timed"}
    if lab.samples > 1:  # the first run was the warm-up
        runs.clear()
        figures |= lab.sampled(take)
    else:
        figures |= {"time_ms": runs[0].total_ms, "min_ms": runs[0].total_ms, "samples": 1}
    result = next(r for r in runs if r.total_ms == figures["time_ms"])
    line = placed = result.timeline
    if kept:
        again = [kept.run(a, b, out=c, resident=True).timeline for _ in range(lab.samples)]
        placed = sorted(again, key=lambda x: x.multiply_and_sum_ms)[len(again) // 2]
    if not result.variant.kernel.library:
        figures |= lab.model(result.variant, n, n, n, "float32")
    return figures | {
        "variant": str(result.variant),
        "reduction": result.reduction,
        "devices": len({d.unit for d in result.plan.devices}),
        "gflops": result.gflops,
        "compute_ms": line.span_ms("upload", "multiply"),
        "compute_and_sum_ms": result.total_ms,
        "multiply_ms": placed.multiply_ms,
        "multiply_and_sum_ms": placed.multiply_and_sum_ms,
        "bytes_h2d": result.plan.bytes_h2d,
    }


def _verified_host(lab: Lab, problem: Problem, a, b, c):
    """Host matrices judged; on the GPU where there is one, which is much quicker."""
    if lab.kind == "cuda":
        cp = lab.device.cp
        with cp.cuda.Device(lab.first_gpu):
            a, b, c = (cp.asarray(x) for x in (a, b, c))
            found = verify(problem, a, b, None, c)
            del a, b, c
            cp.get_default_memory_pool().free_all_blocks()
        return found
    return verify(problem, a, b, None, c)


def library_cold(lab: Lab, *, n: int) -> dict:
    """cublasSgemm in a fresh process, host to host, with the handle made within the time.

    handle_ms is the handle alone, warm_ms a second product with the same handle.
    """
    if lab.kind != "cuda":
        raise UnavailableError("cuBLAS needs a CUDA device")
    command = [sys.executable, "-m", f"{__package__}.library_cold", str(n), str(lab.first_gpu)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no word"]
        raise UnavailableError(f"cuBLAS in a process of its own failed: {lines[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# --- memory and properties ------------------------------------------------------------------


def probe(lab: Lab, *, kernel: str, count: int, touched: int, params=None) -> dict:
    """A probe of global memory over `count` floats, of which it changes `touched`.

    gbps: bytes read and written usefully a second.
    """
    if not isinstance(lab.device, KernelDevice):
        raise UsageError("probes of memory run on the cuda and emulator devices")
    variant = catalog.get(kernel).variant(params)
    device = lab.device
    function = device.function(variant, "float32")
    src = lab.keep("probe", (count,), lambda: lab.upload(np.ones((1, count), np.float32)))
    dst = device.empty(1, count, "float32")
    launch = variant.launch(1, count, 0, "float32")
    args = [np.int32(count), src, dst]

    def work():
        device.launch(function, launch, args, lab.stream)

    dst[...] = 0
    work()
    lab.stream.synchronize()
    found = int((dst == 2).sum())
    figures = {"verdict": "passed" if found == touched else "FAILED"}
    if found != touched:
        return figures | {"note": f"{found} elements were changed, not {touched}"}
    figures |= lab.timed(work)
    return figures | {
        "time_us": figures["time_ms"] * 1e3,
        "gbps": 2 * 4 * touched / figures["time_ms"] / 1e6,
    }


def emulated(lab: Lab, *, kernel: str, n: int) -> dict:
    """A kernel's text on the emulator, whatever the device: whole numbers, held to be equal."""
    choose("emulator")  # says why not, where it cannot run
    variant = catalog.get(kernel).variant()
    device = open_devices("emulator", 1)[0]
    a, b = (
        generator.generate(n, n, "float32", seed=lab.seed, operand=x, fill="integers") for x in "AB"
    )
    c = np.full((n, n), np.nan, np.float32)
    device.prepare(variant, a, b, "float32")
    device.start_clock()
    start = device.stream().record()
    device.gemm(variant, a, b, c, alpha=1, beta=0, stream=device.stream())
    figures = {"time_ms": device.time_ms(device.stream().record()) - device.time_ms(start)}
    right = bool((c == a @ b).all())
    return figures | {"verdict": "passed" if right else "FAILED", "variant": str(variant)}


def emulated_race(lab: Lab, *, order: str) -> dict:
    """A kernel that lacks a barrier, on the emulator with its threads in this order.

    `wrong` is how many of its 32 results are.
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


def limit(lab: Lab, *, read: Callable[[model.Machine, Mapping], int]) -> dict:
    """One property of the GPU: `read(machine, properties)`."""
    if lab.kind != "cuda":
        raise UnavailableError("there is no CUDA device to ask")
    return {"value": read(lab.machine, lab.device.properties)}
