"""The ladder of kernels, and ours past it: docs/performance.md."""

from . import grid, kernel_rows, paragraphs, result
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
    title = (
        f"TFLOP/s, fp32, {data['device']['name'].split(' ', 1)[1]}, data on the device, each "
        "product checked in the same run ([all rows](results/ladder_h200.json)):"
    )
    columns = ["<kernel", *("<{} x {} x {}".format(*s) for s in shapes)]
    rows = [[name, *(best.get((name, shape)) for shape in shapes)] for name in names]
    table = [
        [name, *(f"{c / 1e3:.1f}" if c else "" for c in cells)]
        for name, *cells in rows
        if any(cells)
    ]
    table += [*_tuned(shapes), *_splits(shapes)]
    capped = any(str(cell).endswith("*") for row in table for cell in row)
    power = "\\* at the card's power cap." if capped else ""
    return paragraphs(title, grid(columns, table), power, other_card())


def _tuned(shapes) -> list[list[str]]:
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
        ["ours, fastest ([its own run](results/tuned_h200.json))", *rates],
        ["ours / cublas there", *ratios],
    ]


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
        "([more](#h100-and-h200))."
    )


def _splits(shapes) -> list[list[str]]:
    """fp32x3 at the ladder's shapes, packing included, from its own run."""
    rows = {
        (row["m"], row["n"], row["k"]): row
        for row in kernel_rows("fp32x3")
        if row["kernel"] != "cublas"
    }
    name = (
        "`--compute fp32x3` ([at k = 1024](results/fp32x3_h200.json), "
        "[cubes](results/named_fp32x3_h200.json))"
    )
    return [
        [name, *(f"{rows[shape]['gflops'] / 1e3:.0f}" for shape in shapes)],
        ["fp32x3 / cublas fp32 there", *(f"{rows[x]['ratio_to_cublas']:.2f}" for x in shapes)],
    ]
