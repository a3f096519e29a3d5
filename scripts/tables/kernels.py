"""What kernels reach on one GPU, and what `auto` takes: docs/performance.md."""

import json
import os
import statistics
import tempfile

from hybrid_gemm.bench.kernels import SERIES
from hybrid_gemm.kernel_choice import nearest_measured
from hybrid_gemm.problem import Problem

from . import ROOT, grid, result

PEAKS = {"float32": 66.9, "float64": 66.9, "int32": 33.4}  # TFLOP/s
NAMES = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
CARDS = {
    card: {dtype: nearest_measured.Machine(name, 132, 90, peak) for dtype, peak in PEAKS.items()}
    for card, name in NAMES.items()
}
LAYOUTS, SIDES = ("nn", "nt", "tn", "tt"), (4096, 8192, 16384)
PEAK_INT32_GFLOPS = 33.4e3  # 132 multiprocessors, 64 multiply-adds a cycle, 1.98 GHz


def standing() -> str:
    """The best of our own kernels against cuBLAS at every shape of the tuned table, by layout,
    but for those of `thin`."""
    data = json.loads((ROOT / "hybrid_gemm/kernel_choice/tuned/nvidia_h200.json").read_text())
    layouts = ("nn", "nt", "tn", "tt")
    ms = {}
    for row in data["rows"]:
        if row["dtype"] == "float32" and not 1 < min(row["m"], row["n"]) <= 8:
            key = row["m"], row["n"], row["k"], row["layout"]
            ms.setdefault(key, {})[row["kernel"] == "cublas"] = row["time_ms"]
    # without a kernel of ours, where what was fastest is no longer listed
    ratio = {key: both[True] / both[False] for key, both in ms.items() if len(both) == 2}
    shapes = list(dict.fromkeys(key[:3] for key in ratio))
    lines = [
        "Our fastest kernel of each case against cuBLAS, fp32, "
        + data["device"]["name"].split(" ", 1)[1] + ", by `hybrid-gemm tune` "
        "([times](../hybrid_gemm/kernel_choice/tuned/nvidia_h200.json)):",
        "",
    ]  # fmt: skip
    table = []
    for shape in shapes:
        cells = [f"{ratio[(*shape, x)]:.2f}" if (*shape, x) in ratio else "" for x in layouts]
        table.append(["{} x {} x {}".format(*shape), *cells])
    means = [
        statistics.geometric_mean([r for key, r in ratio.items() if key[3] == x]) for x in layouts
    ]
    table.append(["geometric mean", *(f"{x:.2f}" for x in means)])
    return "\n".join([*lines, *grid(["<shape", *map(str.upper, layouts)], table)])


def ratios(card: str = "h200") -> dict[tuple, float]:
    """Our fastest strict fp32 kernel against cuBLAS, by layout, m, n and k."""
    found = {}
    for row in result("tuned", card)["rows"]:
        if row["dtype"] == "float32" and row["kernel"] != "cublas":
            key = row["layout"], row["m"], row["n"], row["k"]
            found[key] = max(found.get(key, 0), row["ratio_to_cublas"])
    return found


def _over_shapes(ratio: dict[tuple, float]) -> dict[tuple, float]:
    """Of these the 29 shapes in NN that a mean is taken over."""
    asked = {
        *((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 1000)),
        *SERIES["published"], (4097, 4099, 4101), (16, 8192, 8192), (1, 8192, 8192),
        (8192, 64, 8192), (64, 64, 2**20), (128, 128, 2**18), (512, 512, 2**18),
    }  # fmt: skip
    return {shape: ratio["nn", *shape] for shape in asked}


def bars() -> str:
    """What was asked of our own kernels and of `auto`, and what they reached."""
    ratio, rows = ratios(), result("tuned")["rows"]
    nn = _over_shapes(ratio)
    mean, worst = statistics.geometric_mean(nn.values()), min(nn, key=nn.get)
    square = {(x, n): ratio[x, n, n, n] for x in ("nn", "nt", "tn", "tt") for n in (4096, 8192)}
    square["nn", 16384] = ratio["nn", 16384, 16384, 16384]
    int32 = max(r["gflops"] for r in rows if r["dtype"] == "int32" and r["m"] == r["k"] == 4096)
    launch = result("launch")["rows"][0]
    chosen = [(r, dtype) for _shape, _layout, dtype, _kernel, r in choices()]
    cases = [
        (f"geometric mean over {len(nn)} shapes, NN", 1.10, mean, ""),
        ("worst of them", 0.97, nn[worst], " x ".join(map(str, worst))),
        *((f"{n} x {n} x {n}", 1.05, square["nn", n], "") for n in (4096, 8192, 16384)),
        *(
            (f"{x.upper()}, {n}", 1.03, square[x, n], "")
            for x in ("nt", "tn", "tt")
            for n in (4096, 8192)
        ),
        *(
            (f"`auto`, {dtype}, worst of {len(mine)} shapes drawn", 0.99, min(mine), "")
            for dtype in ("float32", "float64", "int32")
            for mine in [[r for r, d in chosen if d == dtype]]
        ),
        ("int32, 4096, of the integer peak", 0.90, int32 / PEAK_INT32_GFLOPS, ""),
        (f"`cupy.matmul` / a warm `Runner.gemm`, n = {launch['size']}, host included", 1.0,
         launch["cupy_us"] / launch["ours_us"],
         f"{launch['cupy_us']:.1f} / {launch['ours_us']:.1f} us"),
    ]  # fmt: skip
    lines = [
        "One NVIDIA H200, ratios to cuBLAS of our fastest kernel unless said "
        "([products](results/tuned_h200.json), `auto` [here](results/auto_h200.json) and "
        "[here](results/auto_seed7_h200.json), "
        "[launches](results/launch_h200.json)):",
        "",
    ]
    table = (
        [what, f"{bar:.2f}", f"{got:.3f}", "" if round(got, 3) >= bar else "short", note]
        for what, bar, got, note in cases
    )
    return "\n".join([*lines, *grid(["<what", "asked", "reached", "<", "<"], table)])


def cards() -> str:
    """The same kernels on an H100 and an H200."""
    columns, means = {}, {}
    for card in CARDS:
        ratio = ratios(card)
        nn = _over_shapes(ratio)
        drawn = [r for *_case, dtype, _kernel, r in choices(card) if dtype == "float32"]
        means[card] = {
            f"strict fp32, geometric mean over {len(nn)} shapes, NN": statistics.geometric_mean(
                nn.values()
            ),
            f"`auto`, worst of {len(drawn)} shapes drawn": min(drawn),
        }
        columns[card] = {
            ("strict fp32", x, n): ratio.get((x, n, n, n)) for x in LAYOUTS for n in SIDES
        }
        for name in ("fp32x3", "tf32", "narrow"):
            for row in result(name, card)["rows"]:
                if not row["kernel"].startswith("cublas") and row["m"] == row["k"]:
                    what = row["dtype"] if name == "narrow" else name
                    key = what, row["layout"], row["m"]
                    columns[card][key] = row["ratio_to_cublas"]
    lines = [
        "Ratios to cuBLAS of the same arithmetic (fp32x3: to cuBLAS fp32). H100 80GB HBM3 "
        "([fp32](results/tuned_h100.json), [`auto`](results/auto_h100.json), "
        "[and more](results/auto_seed7_h100.json), [fp32x3](results/fp32x3_h100.json), "
        "[TF32](results/tf32_h100.json), [16 bits](results/narrow_h100.json)) and H200, at "
        f"m = n = k = {', '.join(map(str, SIDES))}:",
        "",
    ]
    table = [
        [what, "", *(f"{means[card][what]:.2f}" for card in ("h100", "h200"))]
        for what in means["h100"]
    ]
    for what, layout in dict.fromkeys(key[:2] for key in columns["h100"]):
        found = ([columns[card].get((what, layout, n)) for n in SIDES] for card in ("h100", "h200"))
        cells = [", ".join(f"{x:.2f}" if x else "-" for x in line) for line in found]
        table.append([what, layout.upper(), *cells])
    return "\n".join([*lines, *grid(["<what", "<layout", "H100", "H200"], table)])


def choices(card: str = "h200") -> list[tuple]:
    """At each shape of `scripts/measure-auto`: what `auto` takes by the shipped table, and the
    fastest's time over its own: cuBLAS's, or in int32 that of all that was timed."""
    timed = {}
    for name in ("auto", "auto_seed7"):
        for row in result(name, card)["rows"]:
            key = (row["m"], row["n"], row["k"]), row["layout"], row["dtype"]
            timed.setdefault(key, []).append(row)
    found = []
    with tempfile.TemporaryDirectory() as empty:  # no user's table
        os.environ["HYBRID_GEMM_CACHE"] = empty
        for (shape, layout, dtype), rows in timed.items():
            variant, _why = nearest_measured.fastest(
                CARDS[card][dtype], Problem(*shape, dtype), layout
            )
            kernel = variant.name, dict(variant.params)
            (mine,) = (r["time_ms"] for r in rows if (r["kernel"], r["params"]) == kernel)
            other = min(r["time_ms"] for r in rows if dtype == "int32" or r["kernel"] == "cublas")
            found.append((shape, layout, dtype, variant.name, other / mine))
    return found


def auto() -> str:
    """What `auto` takes at shapes that no table has."""
    lines = [
        "`auto` at shapes drawn at random by `scripts/measure-auto` "
        "(times of [one seed](results/auto_h200.json) and "
        "[another](results/auto_seed7_h200.json)), against cuBLAS; int32 against the fastest of "
        "what tuning would time. Where it takes cuBLAS the ratio is 1:",
        "",
    ]
    found = choices()
    table = [
        [" x ".join(map(str, shape)), layout.upper(), dtype, kernel, f"{ratio:.3f}"]
        for shape, layout, dtype, kernel, ratio in found
        if kernel != "cublas"
    ]
    table.append([f"{len(found) - len(table)} others", "", "", "cublas", "1.000"])
    columns = ["<shape", "<layout", "<dtype", "<takes", "ratio"]
    return "\n".join([*lines, *grid(columns, table)])


def thin() -> str:
    """What `auto` takes for a few rows or columns at sizes that its table has not."""
    timed = {}
    for row in result("thin")["rows"]:
        case = (row["m"], row["n"], row["k"]), row["layout"]
        timed.setdefault(case, {})[row["kernel"], *row["params"].values()] = row["time_ms"]
    held = [case for case in timed if 2048 in case[0]]
    sizes = sorted({min(shape) for shape, _layout in held})
    found = {}
    for shape, layout in held:
        variant, _why = nearest_measured.fastest(CARDS["h200"]["float32"], Problem(*shape), layout)
        ms = timed[shape, layout]
        ratio = ms["cublas",] / ms[variant.name, *variant.params.values()]
        best = ms["cublas",] / min(ms.values())
        found.setdefault(min(shape), []).append((ratio, best, variant.name))
    lines = [
        "A few rows or columns of C, the others 2048 and 8192 either way, in four layouts, by "
        "`scripts/measure-auto thin` ([times](results/thin_h200.json)): what `auto` takes by "
        "measurements at other sizes, against cuBLAS, and the fastest timed, cuBLAS included:",
        "",
    ]
    columns = ["<rows or columns", "products", "by ours", "`auto`, geometric mean", "worst",
               "fastest"]  # fmt: skip
    table = []
    for size in sizes:
        ratios, bests, names = zip(*found[size], strict=True)
        mean, best = map(statistics.geometric_mean, (ratios, bests))
        table.append([size, len(ratios), len(names) - names.count("cublas"), f"{mean:.2f}",
                      f"{min(ratios):.2f}", f"{best:.2f}"])  # fmt: skip
    return "\n".join([*lines, *grid(columns, table)])
