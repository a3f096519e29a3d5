"""The tables of README."""

import csv

from . import ROOT, grid, result
from .kernels import ratios


def ladder() -> str:
    """gflop/s of every kernel's best variant at a few shapes, cuBLAS beside them."""
    data = result("ladder")
    shapes = [(1024, 1024, 1024), (4096, 4096, 1024), (4096,) * 3, (8192,) * 3]
    best = {}
    for row in data["rows"]:
        shape = row["m"], row["n"], row["k"]
        if row["gflops"] and row["verdict"] == "passed":
            key = row["kernel"], shape
            best[key] = max(best.get(key, 0), row["gflops"])
    names = list(dict.fromkeys(row["kernel"] for row in data["rows"]))
    lines = [
        "TFLOP/s, fp32, " + data["device"]["name"].split(" ", 1)[1]
        + ", data on the device, each product checked in the same run "
        "([all rows](docs/results/ladder_h200.json)):",
        "",
        "| kernel | " + " | ".join("{} x {} x {}".format(*s) for s in shapes) + " |",
        "|---|" + "---|" * len(shapes),
    ]  # fmt: skip
    for name in names:
        cells = [best.get((name, shape)) for shape in shapes]
        if any(cells):
            lines.append(
                f"| {name} | " + " | ".join(f"{c / 1e3:.1f}" if c else "" for c in cells) + " |"
            )
    return "\n".join([*lines, *tuned(shapes), "", other_card(), "", split_by_columns()])


def tuned(shapes) -> list[str]:
    """The fastest of our own kernels, and its ratio to cuBLAS, from a run of their own."""
    data = result("tuned")
    rates, ratios = [], []
    for shape in shapes:
        rows = [
            row
            for row in data["rows"]
            if (row["m"], row["n"], row["k"]) == shape
            and (row["dtype"], row["layout"]) == ("float32", "nn")
            and row["kernel"] != "cublas"
        ]
        best = max(rows, key=lambda row: row["gflops"])
        rates.append(f"{best['gflops'] / 1e3:.1f}")
        ratios.append(f"{best['ratio_to_cublas']:.2f}" + (" *" if best["throttled"] else ""))
    return [
        "| ours, fastest ([its own run](docs/results/tuned_h200.json)) | "
        + " | ".join(rates) + " |",
        "| ours / cublas there | " + " | ".join(ratios) + " |",
        *splits_row(shapes),
        "",
        "\\* at the card's power cap.",
    ]  # fmt: skip


def other_card() -> str:
    """The same squares on an H100, in a line."""
    sides = (4096, 8192, 16384)
    strict = ratios("h100")
    own = [f"{strict['nn', n, n, n]:.2f}" for n in sides]
    split = {
        row["m"]: f"{row['ratio_to_cublas']:.2f}"
        for row in result("fp32x3", "h100")["rows"]
        if row["kernel"] != "cublas"
    }
    return (
        f"On an H100, squares of {', '.join(map(str, sides))}: ours run at {', '.join(own)} of "
        f"cuBLAS's speed, fp32x3 {', '.join(split[n] for n in sides)} "
        "([more](docs/performance.md))."
    )


def splits_row(shapes) -> list[str]:
    """fp32x3 at the ladder's shapes, packing included, from its own run."""
    data = result("fp32x3")
    rows = {
        (row["m"], row["n"], row["k"]): row for row in data["rows"] if row["kernel"] != "cublas"
    }
    rates = " | ".join(f"{rows[shape]['gflops'] / 1e3:.0f}" for shape in shapes)
    ratios = " | ".join(f"{rows[shape]['ratio_to_cublas']:.2f}" for shape in shapes)
    return [
        f"| `--compute fp32x3` ([its own run](docs/results/fp32x3_h200.json)) | {rates} |",
        f"| fp32x3 / cublas fp32 there | {ratios} |",
    ]


def whole() -> str:
    """Whole products from host arrays, and over ranks, beside the peers, in a few lines."""
    rows = result("peers1")["rows"]
    rows = [row for row in rows if row["memory"] == "pageable"]
    ways = {"ours": "hybrid-gemm", "cublasxt": "cuBLASXt, best settings",
            "cupy": "CuPy", "torch": "PyTorch"}  # fmt: skip
    sizes = sorted({row["m"] for row in rows})
    best = {}
    for row in rows:
        key = row["way"], row["m"]
        best[key] = min(best.get(key, row["time_ms"]), row["time_ms"])
    lines = [
        "From host arrays to host arrays (pageable, fp32) on one H200, ms "
        "([all](docs/gpus.md)):",
        "",
    ]  # fmt: skip
    table = ([n, *(f"{best[way, n]:.0f}" for way in ways)] for n in sizes)
    lines += grid(["<m = n = k", *ways.values()], table)
    several = {
        (count, row["memory"], row["way"]): row["time_ms"]
        for count, file in (("Two", "peers2"), ("Four", "peers4"))
        for row in result(file)["rows"]
        if row["m"] == 32768 and row["c"] == "given"
    }
    data = result("ranks4")
    ms = {row["way"]: row["median_ms"] for row in data["rows"] if row["size"] == 16384}
    ours = min(time for way, time in ms.items() if way.startswith("ranks"))
    return "\n".join([
        *lines, "",
        *(
            f"{count} H200s, 32768: "
            + "; ".join(
                f"{memory} arrays {several[count, memory, 'ours']:.0f} ms, cuBLASXt "
                f"{several[count, memory, 'cublasxt']:.0f}"
                for memory in ("pageable", "pinned")
            )
            + "."
            for count in ("Two", "Four")
        ),
        "",
        f"Four MPI ranks with an H200 each, `cols` at 16384, data on the GPUs: {ours:.1f} ms; "
        f"their products alone take {ms['multiply alone']:.1f}, and with NCCL's reduce-scatter "
        f"after them {ms['sequential NCCL reduce-scatter']:.1f} ([all](docs/mpi.md)).",
    ])  # fmt: skip


def split_by_columns() -> str:
    """What the sum costs in a split by columns, ours and the lab's."""
    data = result("cols8")
    workers = len(data["plan"]["workers"])
    ours = data["multiply_and_sum_ms"] / data["multiply_ms"]
    with open(ROOT / "hybrid_gemm/experiments/published/lab_table3_cols.csv") as file:
        rows = [
            r for r in csv.DictReader(file) if r["n"] == "8192" and int(r["threads"]) == workers
        ]
    lab = float(rows[0]["compute_and_sum_ms"]) / float(rows[0]["compute_ms"])
    return (
        f"Split by columns over {workers} threads at 8192, multiplying and summing takes "
        f"{ours:.3f} of multiplying alone ([run](docs/results/cols8_h200.json)); "
        f"the lab's took {lab:.2f}."
    )
