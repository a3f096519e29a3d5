"""Why columns were slow: what a split by columns takes as the lab report did it, and as it is done
here."""

import json

from hybrid_gemm.errors import in_words
from hybrid_gemm.experiments import engine
from hybrid_gemm.experiments.base import Rows
from hybrid_gemm.experiments.sizes import LAB, LAB_THREADS, OURS
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.plan import Plan
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem

from . import ROOT, grid, paragraphs

SIDE, MOST = 8192, LAB_THREADS[-1]
FILE = "results/experiments_h200.json"


def _rows() -> Rows:
    """Ours on H200s, at the largest size."""
    data = json.loads((ROOT / "docs" / FILE).read_text())
    (found,) = (x["rows"] for x in data["experiments"] if x["name"] == "column_split")
    return Rows(found).where(n=SIDE)


def _theirs() -> Rows:
    return engine.experiments()["column_split"].theirs().where(n=SIDE)


def published() -> str:
    """The lab's table, and what of it the sum is."""
    table = []
    for row in _theirs():
        compute, whole = row["published_compute_ms"], row["published_compute_and_sum_ms"]
        table.append([row["threads"], *(f"{x:.0f}" for x in (compute, whole, whole - compute))])
    title = f"The lab's times in ms, m = n = k = {SIDE}, float32, all threads on one GPU:"
    return paragraphs(title, grid(["threads", "compute", "compute + sum", "the sum"], table))


def moved() -> str:
    """The bytes that cross between host and GPU, from the plans of both ways."""
    table = []
    for threads in LAB_THREADS:
        plans = [_plan(threads, reduce) for reduce in ("critical", "ordered")]
        table.append([threads, *(in_words(x) for p in plans for x in (p.bytes_h2d, p.bytes_d2h))])
    columns = ["threads", f"{LAB}: up", "down", f"{OURS}: up", "down"]
    lab, ours = (_plan(MOST, x) for x in ("critical", "ordered"))
    times = (lab.bytes_h2d + lab.bytes_d2h) / (ours.bytes_h2d + ours.bytes_d2h)
    return paragraphs(
        f"What crosses between host and GPU, m = n = k = {SIDE}, float32, where one matrix is "
        f"{in_words(4 * SIDE**2)}; from the plans of both ways:",
        grid(columns, table),
        f"With {MOST} threads the lab's way carries {times:.0f} times as much.",
    )


def _plan(threads: int, reduce: str) -> Plan:
    gpu = DeviceSpec("a GPU", "cuda", 0, 1 << 50, tflops=1, memory_gbps=1)
    return make_plan(Problem(SIDE, SIDE, SIDE), [gpu], threads, split="cols", reduce=reduce)


def measured() -> str:
    """Both ways today."""
    table = []
    for row in _rows():
        alone, both = row["multiply_ms"], row["multiply_and_sum_ms"]
        cells = (f"{x:.1f}" for x in (alone, both, row["compute_and_sum_ms"]))
        table.append([row["way"], row["threads"], row["devices"], *cells, f"{both / alone:.2f}"])
    columns = ["<way", "threads", "H200s", "multiply", "multiply + sum", "with copies", "ratio"]
    return paragraphs(
        f"Times in ms, m = n = k = {SIDE}, float32, on NVIDIA H200s ([figures]({FILE})); the ratio "
        "is that of multiply + sum to multiply:",
        grid(columns, table),
    )


def in_short() -> str:
    """The story in a few sentences, with the figures of its picture."""
    (theirs,) = _theirs().where(threads=MOST)
    lab, ours = (_rows().where(way=way, threads=MOST)[0] for way in (LAB, OURS))

    def became(row: dict, prefix: str = "") -> tuple[str, str]:
        compute, whole = row[f"{prefix}compute_ms"], row[f"{prefix}compute_and_sum_ms"]
        return f"{compute:.3g}", f"{whole:.4g}" if whole >= 1000 else f"{whole:.3g}"

    return (
        "The lab report that began this project split A by columns over threads and added their "
        "partial sums in host memory, one after the other. With {} threads {} ms of computing "
        "became {} with the sums. Done that way on {} H200, {} become {}; done our way on {} "
        "H200s, {} become {}. [Why](docs/why-columns-were-slow.md).".format(
            MOST, *became(theirs, "published_"), lab["devices"], *became(lab), ours["devices"],
            *became(ours),
        )
    )  # fmt: skip
