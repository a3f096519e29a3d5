"""The tables of README."""

import json

from . import ROOT, calls, drawn, earlier, grid, kernel_rows, paragraphs, result
from .kernels import ratios

WAYS = {
    ("ours", "given"): "hybrid-gemm", ("cublasxt", "given"): "cuBLASXt, best settings",
    ("cupy", "given"): "CuPy", ("torch", "given"): "PyTorch",
    ("ours", "fresh"): "hybrid-gemm, new C", ("cupy", "fresh"): "CuPy, new C",
    ("torch", "fresh"): "PyTorch, new C",
}  # fmt: skip
SIDE, COUNTS = 8192, (1, 2, 4)  # GPUs
FILES = [
    f"results/{x}_h200.json"
    for x in ("tuned", "named_fp32x3", "named_tf32", "named_narrow", "experiments")
]


def libraries() -> str:
    """Whole products beside the libraries, at the largest size of each number of GPUs."""
    title = (
        f"From host arrays to host arrays, fp32, medians in ms on NVIDIA H200s; {versions()} "
        "([all, and how each is called](docs/gpus.md#beside-other-libraries)). In a given C, or a "
        "*new* one, which is pageable; CuPy and PyTorch use one GPU:"
    )
    table = []
    for count in COUNTS:
        rows = result(f"peers{count}")["rows"]
        side = max(row["m"] for row in rows)
        for memory in ("pageable", "pinned"):
            found = [r for r in rows if (r["m"], r["memory"]) == (side, memory)]
            ms = {(r["way"], r["c"]): r["time_ms"] for r in found}
            cells = [f"{ms[way]:.0f}" if way in ms else "" for way in WAYS]
            table.append([count, side, memory, *cells])
    return paragraphs(title, grid(["GPUs", "m = n = k", "<arrays", *WAYS.values()], table))


def versions() -> str:
    """Of this package, by number of GPUs, and of those beside it."""
    found = {count: result(f"peers{count}")["environment"] for count in COUNTS}
    gpus: dict[str, list[str]] = {}
    for count, environment in found.items():
        gpus.setdefault(environment["hybrid_gemm"], []).append(str(count))
    own = ", ".join(
        version + (f" on {' and '.join(x)}" if len(gpus) > 1 else "") for version, x in gpus.items()
    )
    number, packages = found[1]["cuda"]["cublas"], found[1]["packages"]
    return (
        f"hybrid-gemm {own}, cuBLAS {number // 10000}.{number // 100 % 100}, "
        f"CuPy {packages['cupy-cuda13x']}, PyTorch {packages['torch']}"
    )


def arithmetics() -> str:
    """Products on one GPU beside cuBLAS of the same arithmetic."""
    strict = ratios()["nn", SIDE, SIDE, SIDE]
    rows = [r for r in result("tuned")["rows"] if _is_square(r) and r["dtype"] == "float32"]
    rates = [max(r["gflops"] for r in rows if (r["kernel"] == "cublas") == c) for c in (0, 1)]
    table = [["strict fp32", *(f"{x / 1e3:.0f}" for x in rates), f"{strict:.2f}"]]
    for name, file, dtype in (
        ("fp32x3: as accurate on most data, on tensor cores", "fp32x3", "float32"),
        ("TF32", "tf32", "float32"),
        ("float16", "narrow", "float16"), ("bfloat16", "narrow", "bfloat16"),
    ):  # fmt: skip
        rows = [r for r in kernel_rows(file) if _is_square(r) and r["dtype"] == dtype]
        ours, theirs = sorted(rows, key=lambda r: r["kernel"].startswith("cublas"))
        cells = [f"{r['gflops'] / 1e3:.0f}" for r in (ours, theirs)]
        table.append([name, *cells, f"{ours['ratio_to_cublas']:.2f}"])
    columns = ["<arithmetic", "our kernel", "cuBLAS (fp32x3: its fp32)", "ratio"]
    return paragraphs(
        f"On one NVIDIA H200 at m = n = k = {SIDE}, data on the GPU, TFLOP/s of the GPU's time; "
        "where cuBLAS is about as fast, the default `--kernel auto` may take that ([strict "
        "fp32](docs/performance.md), [tensor cores](docs/tensor-cores.md), [the host's "
        "time](docs/calls.md)):",
        grid(columns, table),
        f"{drawn.all_sides_large()} {calls.last_layer()}",
        sums(),
        earlier(FILES),
    )


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

    printed = lab["published_compute_and_sum_ms"] / lab["published_compute_ms"]
    whole = lab["compute_and_sum_ms"] / lab["compute_ms"]
    return (
        f"In a split by columns over 8 threads at {SIDE}, multiplying and summing takes "
        f"{costs(ours)} times multiplying alone on {ours['devices']} H200s. The lab report that "
        "this project began with sent the partial sums one by one through host memory: done so, "
        f"with the report's kernel, it takes {costs(lab)} times on {lab['devices']} H200 "
        f"(with copies {whole:.2f}, and {printed:.1f} in the report). "
        "[All rows](docs/experiments.md#columns-over-threads)."
    )
