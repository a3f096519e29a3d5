"""`hybrid-gemm tune`: measures shapes drawn at random on a GPU, and fits its models of times."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..arrays import output_files
from ..catalog import Variant
from ..devices.cuda.device import CudaDevice
from ..errors import UsageError
from ..kernel_choice import fitted, model_files, on_gpu
from ..kernel_choice.tables import Machine
from ..reporting import console, environment
from . import drawing, fitting, heldout, left_out
from .study import Note, Progress, Row, cell

SEED = 3  # below 1000, and of shapes that no shipped model is fitted to
LEAST = 40  # shapes that a model is fitted to


def make(
    gpu: CudaDevice, modes: Sequence[str], *, minutes: float, seed: int = SEED,
    output: str | None = None, progress: Progress | None = None, note: Note = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Fits a model for each mode (`heldout.MODES`) to as many shapes as minutes allow, and keeps it
    in the user's cache, or in the directory `output`. Where the package has a model of such a GPU,
    or of another with the same architecture and as many multiprocessors, what is fitted is by how
    much this GPU's times differ from those that it predicts.

    Returns rows of what each model is worth by cross-validation (`left_out.worth`), the measured
    times as "times", and the directory as "models". Raises `UsageError` for modes that are unknown
    or have no model, for a directory that cannot be written, before anything is measured, and where
    the minutes were too few.
    """
    began = time.monotonic()
    if unknown := [mode for mode in modes if mode not in fitted.OPERANDS]:
        known = ", ".join(fitted.OPERANDS)
        raise UsageError(f"no model is made of mode {unknown[0]!r}; there are {known}")
    if not minutes > 0:
        raise UsageError(f"minutes={minutes:g}: shapes are timed for more than 0 minutes")
    folder = Path(output) if output else None
    files = [
        output_files.check_output(
            folder / model_files.file_name(gpu.model, mode) if folder
            else model_files.users_file(gpu.model, mode)
        )
        for mode in modes
    ]  # fmt: skip
    note(f"compiling, then timing drawn shapes in {', '.join(modes)} for {minutes:g} minutes")
    benches = [heldout.Bench(gpu, mode) for mode in modes]
    for bench in benches:
        bench.compile()
    measured = _measure(benches, seed, began + 60 * minutes, progress)
    rows = []
    for bench, file in zip(benches, files, strict=True):
        row, model = _fit(gpu, bench, measured[bench.mode])
        output_files.write_file(file, model_files.as_bytes(model))
        rows.append(row)
    on_gpu.forget()
    return {
        "device": {"kind": "cuda", "name": gpu.describe()}, "seed": seed, "rows": rows,
        "times": measured, "models": str(Path(files[0]).parent),
        "environment": environment.environment(),
    }  # fmt: skip


def _measure(
    benches: Sequence[heldout.Bench], seed: int, until: float, progress: Progress | None
) -> dict[str, list[Row]]:
    """Rows of times by mode, until the time is over."""
    advance = progress(10**6, "timing") if progress else lambda _: None
    measured: dict[str, list[Row]] = {bench.mode: [] for bench in benches}
    shapes = iter(drawing.draw(seed, 5000, (*drawing.FITTED, drawing.LONG, drawing.TINY)))
    while time.monotonic() < until and (drawn := next(shapes, None)):
        for bench in benches:
            measured[bench.mode].append(heldout.timed(bench, drawn))
        advance(1)
    return measured


def _fit(gpu: CudaDevice, bench: heldout.Bench, rows: Sequence[Row]) -> tuple[Row, dict[str, Any]]:
    if len(rows) < LEAST:
        raise UsageError(
            f"{len(rows)} shapes were timed in {bench.mode}, and a model needs {LEAST}: "
            "give more --minutes, or fewer --modes"
        )
    names: dict[str, Variant] = {
        str(v): v
        for row in rows
        for v in bench.candidates(bench.problem(tuple(row["shape"])))
        if str(v) in row["us"]
    }
    measured = fitting.measured_from(rows, list(names.values()))
    machine = gpu.machine(fitted.OPERANDS[bench.mode].replace("float16", "float32"))
    made, data = fit(measured, machine, model_files.shipped(machine, bench.mode))
    row = {"mode": bench.mode, "variants": len(names), **left_out.worth(made)["all"]}
    return row, data


def fit(
    measured: fitting.Measured, machine: Machine, base: Mapping[str, Any] | None = None
) -> tuple[left_out.LeftOut, dict[str, Any]]:
    """Fits a model to a mode's times on a machine, but for those that something disturbed: what
    tells its worth, and its data, as `model_files` reads it. With `base`, the data of the model of
    such a GPU or of another, it continues that one."""
    known = model_files.from_data(base, machine) if base else None
    counts = measured.counts(machine.multiprocessors)
    measured = fitting.undisturbed(measured, counts, known)
    found = fitting.fit(measured, counts, known)
    library = fitting.fit_library(measured, machine, known)
    data = fitting.data(measured, found, machine, library, base)
    return left_out.LeftOut(measured, found, library), data


def show(data: Mapping[str, Any]) -> None:
    """What `make` found, as a table on stdout."""
    console.table(
        ["<mode", "shapes", "own", "auto", "auto, worst", "regret", "own regret"],
        [
            [row["mode"], row["shapes"],
             *(cell(row.get(x), ".3f") for x in ("own", "auto", "worst", "regret", "own_regret"))]
            for row in data["rows"]
        ],
        title=f"{data['device']['name']}: the library's time over that of what is chosen, at "
        "shapes left out of the fit",
    )  # fmt: skip
    console.line(f"kept in {data['models']}")
