"""Fills the cache of compiled kernels, so that no later product waits for a compiler."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays.strides import layout, stand_in
from ..devices.kernel_launcher import Compiled, KernelLauncher
from ..errors import UsageError, counted
from ..kernel_choice import tables
from ..problem import make_problem
from ..reporting import console
from ..runner import Runner
from .study import Note, Progress, Shape

Case = tuple[Shape, str, str]  # m, n, k; dtype; storage orders of A and B


def warm(
    shapes: Sequence[Shape] | None, *, dtypes: Sequence[str], layouts: Sequence[str],
    progress: Progress | None = None, note: Note | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Compiles what products of these shapes need, as many kernels at once as there are cores.

    Without shapes, those of the table of measured times for this GPU. `options` are a `Runner`'s,
    and so is the choice of kernels. Returns the kernels, with their dtype and layouts. Raises
    `UsageError` for a device that compiles nothing, and for one without a table where no shapes
    are given, and `KernelError` where a kernel does not compile.
    """
    runner = Runner(**options)
    began = time.perf_counter()
    devices = [x for x in runner.devices if isinstance(x, KernelLauncher)]
    if not devices:
        raise UsageError(f"the {runner.kind} device compiles no kernels; cuda and emulator do")
    kinds = {(x.capability, x.machine(dtypes[0])): x for x in devices}  # GPUs that are alike
    rows: list[dict[str, Any]] = []
    products = 0
    for device in kinds.values():
        cases = list(_cases(device, shapes, dtypes, layouts))
        products += len(cases)
        needed = dict.fromkeys(x for case in cases for x in _needed(runner, device, case))
        _compile(device, list(needed), progress)
        rows += [
            {"device": device.describe(), "variant": str(variant), "dtype": dtype, "layout": layout}
            for variant, dtype, layout in needed
        ]
    if note:
        for reason in _native(devices):
            note(reason)
    return {
        "products": products, "kernels": rows,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def _cases(
    device: KernelLauncher, shapes: Sequence[Shape] | None, dtypes: Sequence[str],
    layouts: Sequence[str],
) -> Iterator[Case]:  # fmt: skip
    for dtype in dtypes:
        found = list(dict.fromkeys(shapes or _measured(device, dtype)))
        if not found:
            raise UsageError(
                f"there is no table of measured times of {dtype} for {device.describe()}: name "
                "shapes, with --shapes"
            )
        yield from ((shape, dtype, layout) for shape in found for layout in layouts)


def _measured(device: KernelLauncher, dtype: str) -> list[Shape]:
    """The shapes that were measured on such a GPU; in float32, for operands of 16 bits."""
    machine = device.machine(dtype)
    rows = tables.table(machine) if machine else ()
    return [
        (row["m"], row["n"], row["k"])
        for row in rows
        if row["dtype"] in (dtype, "float32" if np.dtype(dtype).itemsize == 2 else dtype)
    ]


def _needed(runner: Runner, device: KernelLauncher, case: Case) -> list[Compiled]:
    """The kernels of one product: of arrays on this device, and of arrays of the host."""
    (m, n, k), dtype, layouts = case
    a, b, c = stand_in(m, k, dtype, layouts[0]), stand_in(k, n, dtype, layouts[1]), (m, n)
    problem = runner.plans.settle(make_problem(a, b, stand_in(*c, dtype, "n")))
    if not problem.flops:
        return []
    layouts = "".join((layout(x) or "n")[0] for x in (a, b))  # a row or column lies in both
    plan = runner.plan(problem)
    chosen = {runner.plans.choice(plan, layouts)[0]: plan.summed}
    if len(runner.devices) == 1 or device.kind == "cuda":
        alone = runner.plans.alone(problem, layouts, device)
        if alone is not None:
            chosen.setdefault(alone, False)

    def prepare(noting: KernelLauncher) -> None:
        for variant, summed in chosen.items():
            noting.prepare(variant, a, b, problem.operands, summed=summed)

    return device.kernels_of(prepare)


def _compile(device: KernelLauncher, kernels: list[Compiled], progress: Progress | None) -> None:
    advance = progress(len(kernels), device.describe()) if progress else lambda amount: None
    lock = threading.Lock()

    def done(kernel: Compiled) -> None:
        with lock:
            advance(1)

    device.compile_all(kernels, done)


def _native(devices: Sequence[KernelLauncher]) -> Iterator[str]:
    """Compiles the host's own native code, too; why it cannot be, if so."""
    if not any(device.on_gpu for device in devices):
        return
    from ..devices import native_passes, native_sums
    from ..devices.cuda import launch_list
    from ..execution import native_copier, native_executor
    from ..programs import signature

    for what, reason in (
        ("copies are made by Python", native_copier.unavailable()),
        ("runs are carried out by Python", native_executor.unavailable()),
        ("calls are found by Python", signature.unavailable()),
        ("launches are made by Python", launch_list.unavailable()),
        ("sums for checks are made by NumPy", native_sums.unavailable()),
        ("sums for verdicts are made by NumPy", native_passes.unavailable()),
    ):
        if reason:
            yield f"{what}: {reason}"


def show(data: dict[str, Any]) -> None:
    """Prints what `warm` returned."""
    rows = data["kernels"]
    console.table(
        ["<kernel", "<dtype", "<layout"], [[r["variant"], r["dtype"], r["layout"]] for r in rows]
    )
    console.line(
        f"{counted(len(rows), 'kernel')} of {counted(data['products'], 'product')} in the cache, "
        f"after {data['seconds']:.1f} s"
    )
