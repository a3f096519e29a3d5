"""Result files of the scripts: of one study, of several, or of rows of GPU 0; verdicts; and what is
chosen at drawn shapes, beside libraries."""

import dataclasses
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.bench.drawing import Drawn
from hybrid_gemm.bench.heldout import Bench
from hybrid_gemm.bench.study import cell
from hybrid_gemm.catalog import Variant
from hybrid_gemm.kernel_choice import on_gpu
from hybrid_gemm.problem import make_problem
from hybrid_gemm.reporting import console
from hybrid_gemm.reporting.environment import command_line, environment
from hybrid_gemm.verify import verify


def save(out: str, data: Mapping[str, Any], **packages: str) -> None:
    """Writes a result, whole or not at all: the command, `data`, and the environment with the
    versions of other `packages`."""
    made = {"command": command_line(), **data, "environment": {**environment(), **packages}}
    console.write(out, console.as_json(made) + "\n")


def write(out: str, rows: list[dict], **known: object) -> None:
    """Rows, environment, and what else is `known`; other studies that the file has stay."""
    path, studies = Path(out), {row["study"] for row in rows}
    old = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    kept = [row for row in old["rows"] if row["study"] not in studies]
    save(out, {**old, "command": command_line(), "rows": kept + rows, **known})


def write_of_gpu(out: str, rows: list[dict], **packages: str) -> None:
    """Rows measured on GPU 0 with its name and how many GPUs there are."""
    import cupy

    device = {"name": gpu_name(), "count": cupy.cuda.runtime.getDeviceCount()}
    save(out, {"device": device, "rows": rows}, **packages)


def gpu_name() -> str:
    """Of GPU 0."""
    import cupy

    return cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()


def part_of(side: int) -> slice:
    """Rows or columns that are verified where all would take long on a host."""
    return slice(side // 128, side, max(1, side // 64))


def verdict_of_part(a: Any, b: Any, c: Any, compute: str = "fp32") -> str:
    """Whether these rows and columns of a square C = A B are right."""
    part = part_of(len(c))
    x, y = a[part], b[:, part]
    problem = dataclasses.replace(make_problem(x, y), compute=compute)
    found = verify(problem, x, y, None, c[part, part])
    return "passed" if found and found.passed else "FAILED"


def beside(bench: Bench) -> Variant | None:
    """The library that times of a mode are held against: cuBLAS, fp32x3 beside strict fp32."""
    return catalog.get("cublas").variant() if bench.mode == "fp32x3" else bench.library


def chosen(bench: Bench, drawn: Drawn, *, own: bool) -> tuple[Variant, str]:
    """What `kernel="auto"`, or with `own` "own", takes for a shape, and why."""
    problem, ask = bench.problem(drawn.shape), bench.device.library_launch
    machine, takes = bench.device.machine(problem.dtype), bench.arithmetic.takes(problem)
    choose = on_gpu.on_tensor_cores if takes else on_gpu.strict
    found = choose(machine, problem, drawn.layout, own=own, ask=ask)
    return found or (
        bench.arithmetic.variant_for(problem, machine.multiprocessors), "no model"
    )  # fmt: skip


def summary(rows: Sequence[dict]) -> list[str]:
    """Cells for some rows of scripts/measure-heldout; see its headings."""
    beside = [r for r in rows if r["library_us"]]
    own = [r["library_us"] / r["own_us"] for r in beside]
    auto = [r["library_us"] / r["auto_us"] for r in beside]
    regret = [r["auto_us"] / r["fastest_us"] - 1 for r in rows if r["fastest_us"]]
    wrong = sum(r["verdict"] != "passed" for r in rows)
    return [
        cell(_mean(own), ".3f"), cell(_mean(auto), ".3f"),
        cell(_percentile(auto, 1), ".3f"), cell(min(auto, default=None), ".3f"),
        cell(statistics.mean(regret) if regret else None, ".3f"),
        cell(_percentile(regret, 99), ".3f"), str(wrong),
    ]  # fmt: skip


def _mean(ratios: Sequence[float]) -> float | None:
    return statistics.geometric_mean(ratios) if ratios else None


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if values else None
