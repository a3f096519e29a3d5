"""What kernels reach on one GPU, and what `auto` takes: docs/performance.md, docs/calls.md."""

import json
import statistics

from hybrid_gemm.bench import drawing
from hybrid_gemm.bench.selection import SERIES
from hybrid_gemm.catalog import LAYOUTS

from . import ROOT, fitted_times, grid, kernel_rows, paragraphs, result

CARDS = ("h100", "h200")
THIN = ("skinny", "dots", "tall", "outer")  # and those for 16 bits
LARGE_MB, MB_A_MS = 60, 4.8e3  # A, B and C that memory decides, and its rate by its makers
SIDES = (4096, 8192, 16384)
PEAK_INT32_GFLOPS = 33.4e3  # 132 multiprocessors, 64 multiply-adds a cycle, 1.98 GHz


def standing() -> str:
    """The best of our own kernels against cuBLAS at every shape of the tuned table, by layout,
    but for those of `thin`."""
    device, ratio = _tuned()
    shapes = list(dict.fromkeys(key[:3] for key in ratio))
    title = (
        f"Our fastest kernel of each case against cuBLAS, fp32, {device}, by `hybrid-gemm tune` "
        "([times](../hybrid_gemm/kernel_choice/tuned/nvidia_h200.json)):"
    )
    table = []
    for shape in shapes:
        cells = [f"{ratio[(*shape, x)]:.2f}" if (*shape, x) in ratio else "" for x in LAYOUTS]
        table.append(["{} x {} x {}".format(*shape), *cells])
    means = [
        statistics.geometric_mean([r for key, r in ratio.items() if key[3] == x]) for x in LAYOUTS
    ]
    table.append(["geometric mean", *(f"{x:.2f}" for x in means)])
    return paragraphs(title, grid(["<shape", *map(str.upper, LAYOUTS)], table))


def slower() -> str:
    """The cases of `standing` at which cuBLAS is faster, by layout."""
    device, ratio = _tuned()
    behind = {key: f"{x:.2f}" for key, x in ratio.items() if f"{x:.2f}" < "1.00"}
    table = [
        [layout.upper(), ", ".join(f"{m} x {n} x {k} ({x})" for (m, n, k, of), x in behind.items()
                                   if of == layout) or "none"]
        for layout in LAYOUTS
    ]  # fmt: skip
    title = (
        f"Of the {len(ratio)} cases of [the tuned table](#every-shape-of-the-tuned-table), on an "
        f"{device}, cuBLAS is faster at {len(behind)} ([times]"
        "(../hybrid_gemm/kernel_choice/tuned/nvidia_h200.json)):"
    )
    return paragraphs(title, grid(["<layout", "<shapes, and cuBLAS's time over ours"], table))


def _tuned() -> tuple[str, dict[tuple, float]]:
    """The H200's name, and the ratios of its tuned table in fp32, but for those of `thin`."""
    data = json.loads((ROOT / "hybrid_gemm/kernel_choice/tuned/nvidia_h200.json").read_text())
    ms: dict[tuple, dict] = {}
    for row in data["rows"]:
        if row["dtype"] == "float32" and not 1 < min(row["m"], row["n"]) <= 8:
            key = row["m"], row["n"], row["k"], row["layout"]
            ms.setdefault(key, {})[row["kernel"] == "cublas"] = row["time_ms"]
    # without a kernel of ours, where what was fastest is no longer listed
    ratio = {key: both[True] / both[False] for key, both in ms.items() if len(both) == 2}
    return data["device"]["name"].split(" ", 1)[1], ratio


def thin_products() -> str:
    """What the kernels for small sides take, beside the others and cuBLAS, where they are the
    fastest of ours."""
    times, table = fitted_times(), []
    for mode, size in (("float32", 4), ("float16", 2), ("float64", 8)):
        names = [name.split()[0].removesuffix("_narrow") for name in times[mode]["variants"]]
        found: dict[str, list] = {name: [] for name in THIN}
        for m, n, k, _layout, _kind, us in times[mode]["rows"]:
            timed = [(x, name) for x, name in zip(us, names, strict=True) if x]
            library = min((x for x, name in timed if name == "cublas"), default=None)
            theirs = min((x for x, name in timed if name not in (*THIN, "cublas")), default=None)
            fastest, name = min(timed, key=lambda x: (x[1] == "cublas", x[0]))
            if name in THIN and library and theirs:
                mb = size * (m * k + k * n + m * n) / 1e6
                found[name].append((fastest, library, theirs, mb, 1e3 * mb / MB_A_MS))
        for name, rows in found.items():
            if not rows:  # not in this dtype
                continue
            large = [x for x in rows if x[3] > LARGE_MB]
            before = [min(library, theirs) / us for _, library, theirs, _, us in large]
            table.append([
                name, mode, len(rows), *(_mean(x[i] / x[0] for x in rows) for i in (1, 2)),
                len(large), _mean(before), f"{max(before):.1f}", _mean(x[0] / x[4] for x in large),
            ])  # fmt: skip
    said = (
        "Shapes drawn at random at which one of these is the fastest of our kernels, on an H200 "
        "([times](results/fitted_times_h200.json.gz), of products that were not verified), "
        "geometric means. *Memory* is the time of the bytes of A, B and C at "
        f"{MB_A_MS / 1e3:g} TB/s, for large shapes alone, which have more than {LARGE_MB} MB of "
        "them. *Others* is the fastest of all other kernels, cuBLAS included:"
    )
    columns = ["<kernel", "<dtype", "shapes", "cuBLAS / it", "our others / it", "large shapes",
               "others / memory", "worst others / memory", "it / memory"]  # fmt: skip
    return paragraphs(said, grid(columns, table))


def _mean(values) -> str:
    return f"{statistics.geometric_mean(values):.2f}"


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
    square = {(x, n): ratio[x, n, n, n] for x in LAYOUTS for n in (4096, 8192)}
    square["nn", 16384] = ratio["nn", 16384, 16384, 16384]
    int32 = max(r["gflops"] for r in rows if r["dtype"] == "int32" and r["m"] == r["k"] == 4096)
    launches = result("launch")["rows"]
    ours, cupy = launches[0]["ours_us"], launches[0]["cupy_us"]
    auto = {mode: result("fitted")["modes"][mode]["worth"]["all"]
            for mode in ("float32", "float64")}  # fmt: skip
    cases = [
        (f"geometric mean over {len(nn)} shapes, NN", 1.10, mean, ""),
        ("worst of them", 0.97, nn[worst], " x ".join(map(str, worst))),
        *((f"{n} x {n} x {n}", 1.05, square["nn", n], "") for n in (4096, 8192, 16384)),
        *(
            (f"{x.upper()}, {n}", 1.03, square[x, n], "")
            for x in ("nt", "tn", "tt")
            for n in (4096, 8192)
        ),
        (f"`auto`, float32, geometric mean over {int(auto['float32']['shapes'])} shapes drawn",
         1.10, auto["float32"]["auto"], ""),
        *(
            (f"`auto`, {mode}, worst of {int(worth['shapes'])} shapes drawn", 0.97,
             worth["worst"], "")
            for mode, worth in auto.items()
        ),
        ("int32, 4096, of the integer peak", 0.90, int32 / PEAK_INT32_GFLOPS, ""),
        (f"`cupy.matmul` / `Runner.gemm`, n = {launches[0]['size']}, calls back to back", 1.0,
         cupy / ours, f"{cupy:.1f} / {ours:.1f} us"),
    ]  # fmt: skip
    title = (
        "One NVIDIA H200, ratios to cuBLAS of our fastest kernel unless said "
        "([products](results/tuned_h200.json), [`auto`](results/fitted_h200.json) by "
        "cross-validation, [launches](results/launch_h200.json)):"
    )
    table = (
        [what, f"{bar:.2f}", f"{got:.3f}", "" if round(got, 3) >= bar else "short", note]
        for what, bar, got, note in cases
    )
    return paragraphs(title, grid(["<what", "asked", "reached", "<", "<"], table))


def cards() -> str:
    """The same kernels on an H100 and an H200."""
    columns, means = {}, {}
    for card in CARDS:
        ratio = ratios(card)
        nn = _over_shapes(ratio)
        means[card] = {
            f"strict fp32, geometric mean over {len(nn)} shapes, NN": statistics.geometric_mean(
                nn.values()
            ),
        }
        columns[card] = {
            ("strict fp32", x, n): ratio.get((x, n, n, n)) for x in LAYOUTS for n in SIDES
        }
        for name in ("fp32x3", "tf32", "narrow"):
            for row in kernel_rows(name, card):
                if not row["kernel"].startswith("cublas") and row["m"] == row["k"]:
                    what = row["dtype"] if name == "narrow" else name
                    key = what, row["layout"], row["m"]
                    columns[card][key] = row["ratio_to_cublas"]
    title = (
        "Ratios to cuBLAS of the same arithmetic (fp32x3: to cuBLAS fp32). H100 80GB HBM3 "
        "([fp32](results/tuned_h100.json), [fp32x3](results/fp32x3_h100.json), "
        "[TF32](results/tf32_h100.json), [16 bits](results/narrow_h100.json)) and H200 ([fp32]"
        "(results/tuned_h200.json), [fp32x3](results/named_fp32x3_h200.json), [TF32 at "
        "4096](results/tf32_h200.json), [above](results/named_tf32_h200.json), [16 bits "
        "at 4096](results/narrow_h200.json), [above](results/named_narrow_h200.json)), at "
        f"m = n = k = {', '.join(map(str, SIDES))}:"
    )
    table = [[what, "", *(f"{means[card][what]:.2f}" for card in CARDS)] for what in means["h100"]]
    for what, layout in dict.fromkeys(key[:2] for key in columns["h100"]):
        found = ([columns[card].get((what, layout, n)) for n in SIDES] for card in CARDS)
        cells = [", ".join(f"{x:.2f}" if x else "-" for x in line) for line in found]
        table.append([what, layout.upper(), *cells])
    return paragraphs(title, grid(["<what", "<layout", "H100", "H200"], table))


def calls() -> str:
    """What a call costs the host."""
    found = result("launch")
    title = (
        "Host time of a call in microseconds, which does not wait for the GPU: matrices of "
        "128 x 128 that lie on an H200, medians of 2000 calls, of products that were not verified "
        "([figures](results/launch_h200.json)):"
    )
    table = [
        [row["arrays"], row["dtype"], row.get("compute") or row.get("kernel") or "",
         *(f"{row[x]:.1f}" if x in row else "" for x in
           ("out_us", "new_us", "runner_us", "library_us", "library_new_us"))]
        for row in found["calls"] if "out_us" in row
    ]  # fmt: skip
    headings = ["<arrays", "<dtype", "<option", "`gemm(out=)`", "`gemm`", "`Runner.gemm(out=)`",
                "library, out=", "library"]  # fmt: skip
    ratios = [row["ratio"] for row in found["small"]]
    said = (
        f"Calls back to back, the GPU included, {len(ratios)} shapes of sides from 16 to 512 in "
        f"float32: `auto` is {min(ratios):.2f} to {max(ratios):.2f} times as fast as "
        f"`cupy.matmul` (median {statistics.median(ratios):.2f})."
    )
    return paragraphs(title, grid(headings, table), said)


def first_calls() -> str:
    """The first product of a process, by what is multiplied and what the cache holds."""
    seconds: dict[str, dict[str, float]] = {}
    for x in result("launch")["first"]:
        name = "CuPy" if x["what"] == "cupy" else x.get("compute") or x.get("kernel") or x["dtype"]
        seconds.setdefault(name, {})[x["cache"]] = x["first_product_s"]
    table = [
        [name, *(f"{of[x]:.2f}" if x in of else "" for x in ("cold", "warm"))]
        for name, of in seconds.items()
    ]
    return paragraphs(
        "The first product of a process, 1024^3 from NumPy arrays on an H200, in seconds from the "
        "program's first line, imports included ([figures](results/launch_h200.json)). Cold: no "
        "kernel was compiled before:",
        grid(["<", "cold", "warm"], table),
    )


def copied_ahead() -> str:
    """First products whose kernels are compiled while A and B are copied, and the other order."""
    table, kind = [], {True: "pinned", False: "pageable"}
    for x in result("launch")["ahead"]:
        starts, stops = zip(*x["compiled_ms"], strict=True)
        began = min(starts)
        table.append([
            x["size"], x.get("compute") or "float32", kind[x["page_locked"]],
            "at once" if x["ahead"] else "compiled first",
            *(f"{(ms - began) / 1e3:.2f}" for ms in (max(stops), x["uploads_ms"][0])),
            f"{x['uploaded_before_compiled']:.0%}",
            *(f"{ms / 1e3:.2f}" for ms in (x["products_ms"][0] - began, x["first_call_ms"])),
        ])  # fmt: skip
    return paragraphs(
        "The first call of `gemm` with arrays of the host and no kernel compiled before, and the "
        "same with compiling before copying ([figures](results/launch_h200.json)). Seconds; "
        '"copying from" and "first product" count '
        'from when the compiler begins; "copied" is the share of A and B that is on the GPU when '
        "the last kernel is compiled, which is as far as the plan lets copies run ahead:",
        grid(
            [
                "m = n = k",
                "<compute",
                "<arrays",
                "<order",
                "compiling",
                "copying from",
                "copied",
                "first product",
                "whole call",
            ],
            table,
        ),
    )


def double() -> str:
    """float64 on tensor cores beside cuBLAS and our other kernels, by class of drawn shapes."""
    mode = fitted_times()["float64"]
    names = [name.split()[0] for name in mode["variants"]]
    of_class: dict[str, list[tuple[float, float]]] = {}
    for *_shape, kind, us in mode["rows"]:
        best: dict[str, float] = {}
        for name, x in zip(names, us, strict=True):
            if x is not None:
                best[name] = min(x, best.get(name, x))
        library, double = best.pop("cublas", None), best.pop("mma_double", None)
        if library and double and best and kind in drawing.CLASSES:
            ratios = library / min(best.values()), library / double
            of_class.setdefault(kind, []).append(ratios)
    table = [
        [
            kind,
            len(ratios),
            *(f"{statistics.geometric_mean([ratio[i] for ratio in ratios]):.2f}" for i in (0, 1)),
        ]
        for kind, ratios in of_class.items()
    ]
    return paragraphs(
        "cuBLAS's time over that of the fastest of our other kernels, and over that of the fastest "
        "`mma_double`, float64 on H200s, geometric means of products that were not verified "
        "([times](results/fitted_times_h200.json.gz)):",
        grid(["<shapes", "count", "ours on ordinary cores", "`mma_double`"], table),
    )
