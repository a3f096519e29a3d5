"""Predicted times beside measured ones, for measure-host: each row of `ways` is planned anew with
the links and devices that its file has. No GPU needed."""

import dataclasses
import json
import statistics
from collections import defaultdict
from pathlib import Path

from hybrid_gemm.planning import cost_model, link_rates
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem

# How operands are multiplied, and what they are.
ARITHMETIC = {
    "fp32": ("fp32", "float32"), "fp32x3": ("fp32x3", "float32"), "tf32": ("tf32", "float32"),
    "float16": ("fp32", "float16"), "bfloat16": ("fp32", "bfloat16"),
}  # fmt: skip
NEAR, LOST = 0.15, 0.03  # of the measured time: what a prediction may miss, and a choice lose


def problem_of(arithmetic: str, size: int) -> Problem:
    """The product of a row of measure-host."""
    compute, dtype = ARITHMETIC[arithmetic]
    kinds = {} if dtype == "float32" else {"operands": dtype, "out_dtype": dtype}
    return Problem(size, size, size, compute=compute, **kinds)


def described(devices, links) -> dict:
    """What planning knew of devices (their specs) and links (the data of `tune --links`, or
    None), as data that `compared` reads."""
    specs = [dataclasses.asdict(dataclasses.replace(spec, links=None)) for spec in devices]
    return {"devices": specs, "links": links}


def compared(data: dict, *, by_run: bool = False) -> list[dict]:
    """A row for each row of `ways` in a result file's data: `predicted_ms`, `measured_ms` (with
    `by_run`: of the run's own clock, and what a call takes besides) and `chosen`, the number of
    GPUs that the prediction takes."""
    specs = _specs(data)
    rows = []
    for row in data["rows"]:
        if row["study"] != "host":
            continue
        problem = problem_of(row["arithmetic"], row["size"])
        pinned, most = row["memory"] == "pinned", len(specs)
        chosen = make_plan(problem, specs, link_rates.counts(most), page_locked=pinned)
        count = row["gpus"] or row["workers"]  # as many as were chosen then
        plan = make_plan(problem, specs[:count], count, page_locked=pinned)
        measured = row["time_ms"]
        if by_run and not cost_model.is_hosted(plan):
            measured = row["run_ms"] + cost_model.CALL_MS
        cell = {name: row[name] for name in ("size", "arithmetic", "memory", "gpus")}
        rows.append(cell | {
            "predicted_ms": plan.predicted_ms, "measured_ms": measured,
            "chosen": len(chosen.workers),
        })  # fmt: skip
    return rows


def _specs(data: dict) -> list[DeviceSpec]:
    """The devices of a result file, with its links."""
    if "devices" not in data:
        raise SystemExit("the file does not say what its devices are: measure `ways` anew")
    found = link_rates.from_data(data["links"]) if data["links"] else None
    return [
        DeviceSpec(**{
            **spec, "links": found,
            "mode_tflops": tuple((name, rate) for name, rate in spec["mode_tflops"]),
        })
        for spec in data["devices"]
    ]  # fmt: skip


def losses(rows: list[dict]) -> list[float]:
    """What the chosen number of GPUs takes longer than the best, as a share, of each cell."""
    cells = defaultdict(dict)
    for row in rows:
        if row["gpus"]:
            cell = row["size"], row["arithmetic"], row["memory"]
            cells[cell][row["gpus"]] = row
    found = []
    for by_count in cells.values():
        times = {count: row["measured_ms"] for count, row in by_count.items()}
        chosen = next(iter(by_count.values()))["chosen"]
        if len(times) > 1 and chosen in times:
            found.append(times[chosen] / min(times.values()) - 1)
    return found


def show(path: str, *, by_run: bool = False) -> None:
    """Prints `compared`, how many cells are within 15 %, and what choosing GPUs loses."""
    rows = compared(json.loads(Path(path).read_text()), by_run=by_run)
    ratios = []
    for row in rows:
        ratio = row["predicted_ms"] / row["measured_ms"]
        ratios.append(ratio)
        print(
            f"{row['size']:6} {row['arithmetic']:8} {row['memory']:8} {row['gpus']} GPUs: "
            f"predicted {row['predicted_ms']:8.2f}, measured {row['measured_ms']:8.2f} ms, "
            f"{ratio:5.2f}" + ("" if abs(ratio - 1) <= NEAR else " *")
        )
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    print(
        f"{near} of {len(ratios)} cells within {NEAR:.0%}, ratios {min(ratios):.2f} to "
        f"{max(ratios):.2f}, median {statistics.median(ratios):.2f}"
    )
    if lost := losses(rows):
        print(
            f"choosing GPUs loses {statistics.mean(lost):.1%} in the mean, {max(lost):.1%} at "
            f"worst, more than {LOST:.0%} at {sum(x > LOST for x in lost)} of {len(lost)} cells"
        )
