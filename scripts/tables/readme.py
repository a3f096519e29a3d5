"""The tables of README."""

import json

from . import ROOT, grid, result
from .kernels import ratios

WAYS = {"ours": "hybrid-gemm", "cublasxt": "cuBLASXt, best settings", "cupy": "CuPy",
        "torch": "PyTorch"}  # fmt: skip
SIDE = 8192


def libraries() -> str:
    """Whole products beside the libraries, at the largest size of each number of GPUs."""
    lines = [
        "From host arrays to host arrays, fp32, ms, on 1, 2 and 4 NVIDIA H200s "
        "([all](docs/gpus.md#beside-other-libraries)):",
        "",
    ]
    table = []
    for count in (1, 2, 4):
        rows = result(f"peers{count}")["rows"]
        side = max(row["m"] for row in rows)
        for memory in ("pageable", "pinned"):
            best: dict[str, float] = {}
            for row in rows:
                if (row["m"], row["memory"]) == (side, memory):
                    way = row["way"]
                    best[way] = min(best.get(way, row["time_ms"]), row["time_ms"])
            cells = [f"{best[way]:.0f}" if way in best else "" for way in WAYS]
            table.append([count, side, memory, *cells])
    return "\n".join([*lines, *grid(["GPUs", "m = n = k", "<arrays", *WAYS.values()], table)])


def arithmetics() -> str:
    """Products on one GPU beside cuBLAS of the same arithmetic."""
    strict = ratios()["nn", SIDE, SIDE, SIDE]
    rows = [r for r in result("tuned")["rows"] if _is_square(r) and r["dtype"] == "float32"]
    rates = [max(r["gflops"] for r in rows if (r["kernel"] == "cublas") == c) for c in (0, 1)]
    table = [["strict fp32", *(f"{x / 1e3:.0f}" for x in rates), f"{strict:.2f}"]]
    for name, file, dtype in (
        ("fp32x3: as accurate, on tensor cores", "fp32x3", "float32"), ("TF32", "tf32", "float32"),
        ("float16", "narrow", "float16"), ("bfloat16", "narrow", "bfloat16"),
    ):  # fmt: skip
        rows = [r for r in result(file)["rows"] if _is_square(r) and r["dtype"] == dtype]
        ours, theirs = sorted(rows, key=lambda r: r["kernel"].startswith("cublas"))
        cells = [f"{r['gflops'] / 1e3:.0f}" for r in (ours, theirs)]
        table.append([name, *cells, f"{ours['ratio_to_cublas']:.2f}"])
    columns = ["<arithmetic", "hybrid-gemm", "cuBLAS (fp32x3: its fp32)", "ratio"]
    return "\n".join([
        f"On one NVIDIA H200 at m = n = k = {SIDE}, data on the GPU, TFLOP/s of the GPU's time "
        "([all](docs/performance.md), [tensor cores](docs/tensor-cores.md)); what a call takes the "
        "host, which does not wait, [is apart](docs/calls.md):",
        "", *grid(columns, table), "", sums(), "", ranks(),
    ])  # fmt: skip


def _is_square(row: dict) -> bool:
    return (row["m"], row["n"], row["k"], row["layout"]) == (SIDE, SIDE, SIDE, "nn")


def sums() -> str:
    """What the sum costs in a split by columns: ours, and the lab report's way, on one card."""
    data = json.loads((ROOT / "docs/results/experiments_h200.json").read_text())
    (found,) = (x["rows"] for x in data["experiments"] if x["name"] == "column_split")
    rows = {r["way"]: r for r in found if (r["n"], r["threads"]) == (SIDE, 8)}
    ours, lab = rows["ours"], rows["the lab's way"]

    def costs(row: dict) -> str:
        return f"{row['multiply_and_sum_ms'] / row['multiply_ms']:.2f}"

    return (
        f"What the sum of a split by columns costs, {SIDE} over 8 threads on H200s: multiplying "
        f"and summing takes {costs(ours)} of multiplying alone, and {costs(lab)} where partials go "
        "one by one through host memory, as in the lab report that this project began with; "
        f"from host arrays to host arrays this takes {ours['compute_and_sum_ms']:.0f} ms on "
        f"{ours['devices']} GPUs, and the lab's way {lab['compute_and_sum_ms']:.0f} ms on "
        f"{lab['devices']} ([all rows](docs/experiments.md#columns-over-threads))."
    )


def ranks() -> str:
    """One product over ranks, beside NCCL, in a line."""
    rows = result("ranks4")["rows"]
    ms = {row["way"]: row["median_ms"] for row in rows if row["size"] == 16384}
    ours = min(time for way, time in ms.items() if way.startswith("ranks"))
    return (
        f"Four MPI ranks with an H200 each, `cols` at 16384, data on the GPUs: {ours:.1f} ms; "
        f"their products alone take {ms['multiply alone']:.1f}, and with NCCL's reduce-scatter "
        f"after them {ms['sequential NCCL reduce-scatter']:.1f} ([all](docs/mpi.md))."
    )
