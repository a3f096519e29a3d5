"""What `auto` takes at drawn shapes, in and out of the fit: docs/performance.md,
docs/notes/choosing.md."""

import functools
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence

from studies import summary

from hybrid_gemm.bench import drawing
from hybrid_gemm.catalog import ITEM_SIZE

from . import ROOT, fitted_times, grid, paragraphs, result

MODES = {
    "float32": "strict fp32", "float16": "16 bits", "tf32": "TF32",
    "fp32x3": "fp32x3 or strict, to cuBLAS fp32", "float64": "float64",
}  # fmt: skip


def left_out() -> str:
    """What is chosen at drawn shapes that were left out of the fit: ratios to cuBLAS."""
    modes = result("fitted")["modes"]
    title = (
        "Geometric means of cuBLAS's time over that of the kernel taken, device time, of products "
        "that were not verified ([times](results/fitted_times_h200.json.gz), "
        "[figures](results/fitted_h200.json)):"
    )
    # Of geometric means, the limit is a quotient.
    columns = ("own", "own_limit", "auto", "auto_limit", "first", "worst", "regret")
    table = [
        [name if kind == "all" else "", kind, int(worth["shapes"]),
         *(f"{found[x]:.3f}" for x in columns)]
        for mode, name in MODES.items()
        for kind, worth in modes[mode]["worth"].items()
        if kind == "all" or mode != "float64"
        for found in [worth | {
            "own_limit": worth["own"] * (1 + worth["own_regret"]),
            "auto_limit": worth["auto"] * (1 + worth["regret"]),
        }]
    ]  # fmt: skip
    headings = ["<mode", "<shapes", "count", "own", "limit of own", "`auto`", "limit of `auto`",
                "1st percentile", "worst", "regret"]  # fmt: skip
    int32 = modes["int32"]["worth"]["all"]
    said = (
        "cuBLAS does not multiply int32; what is chosen there takes "
        f"{int32['own_regret']:.1%} longer than the fastest candidate, over "
        f"{int(int32['shapes'])} shapes."
    )
    return paragraphs(title, grid(headings, table), said)


@functools.cache
def _by_alignment() -> dict[str, dict[bool, list[float]]]:
    """By mode, cuBLAS's times over those of our fastest kernel: where all rows of A, B and C begin
    on 16 bytes, and where some do not. Modes that have both."""
    by_mode = {}
    for mode, times in fitted_times().items():
        found: dict[bool, list[float]] = {True: [], False: []}
        for m, n, k, layout, _kind, us in times["rows"]:
            of: dict[bool, list[float]] = {True: [], False: []}  # cuBLAS's times, and ours
            for name, x in zip(times["variants"], us, strict=True):
                if x is not None:
                    of[name.startswith("cublas")].append(x)
            if of[True] and of[False]:
                lengths = (m if layout[0] == "t" else k), (k if layout[1] == "t" else n), n
                size = ITEM_SIZE.get(mode, 4)  # TF32 is of float32
                aligned = all(length * size % 16 == 0 for length in lengths)
                found[aligned].append(min(of[True]) / min(of[False]))
        if found[True]:
            by_mode[mode] = found
    return by_mode


def alignments() -> str:
    """How far our kernels lead where rows begin on 16 bytes, and where some do not."""
    table = []
    for mode, found in _by_alignment().items():
        means = {on: f"{statistics.geometric_mean(found[on]):.3f}" for on in found}
        table.append([MODES[mode], *(x for on in found for x in (len(found[on]), means[on]))])
    columns = ["<mode", "shapes, all rows on 16 bytes", "ratio", "others", "ratio"]
    return paragraphs(
        "cuBLAS's time over that of the fastest of our kernels in that arithmetic, by whether all "
        "rows of A, B and C in memory begin on 16 bytes, H200, geometric means of products that "
        "were not verified ([times](results/fitted_times_h200.json.gz)):",
        grid(columns, table),
    )


HELD_OUT = ("float32", "bfloat16", "tf32", "fp32x3")
ON_H200 = (*HELD_OUT, "float64")
MODES_OF_H100 = ("float32", "bfloat16", "float16", "tf32", "fp32x3", "float64")


def leads() -> str:
    """What asking for a larger lead costs, and what it spares."""
    table = [
        [MODES[mode] if i == 0 else "", f"{x['lead']:g}", f"{x['auto']:.3f}",
         f"{x['regret']:.1%}", f"{x['slower']:.2%}", f"{x['worst']:.3f}"]
        for mode, rows in result("fitted")["leads"].items() if mode in (*HELD_OUT, "float16")
        for i, x in enumerate(rows)
    ]  # fmt: skip
    columns = ["<mode", "lead, in errors", "mean", "regret", "below 0.97", "worst"]
    return grid(columns, table)


HELD_OUT_HEADINGS = (
    "<mode", "<shapes", "count", "own", "`auto`", "1st percentile", "worst", "wrong"
)  # fmt: skip


def _held_out() -> dict[str, dict]:
    """What was measured at shapes of seeds that nothing was fitted to, by the file's name."""
    names = [name for mode in ON_H200 for name in (mode, *(f"{x}_{mode}" for x in drawing.ALONE))]
    names[names.index("tf32") : 0] = [
        "float16", *(f"{x}_float16" for x in drawing.ALONE)
    ]  # fmt: skip
    files = (ROOT / f"docs/results/heldout_{x}_h200.json" for x in names)
    return {file.name: json.loads(file.read_text()) for file in files if file.exists()}


def _held_out_rows(found: Mapping[str, dict], kinds: Sequence[str]) -> list[list[object]]:
    """Of each mode, and of these of its kinds of shapes."""
    table: list[list[object]] = []
    for data in found.values():
        alone = data["rows"][0]["kind"] in drawing.ALONE.values()
        for kind in kinds:
            rows = [r for r in data["rows"] if kind in (r["kind"], "all")]
            if not rows or (kind == "all" and alone):
                continue
            own, auto, first, worst, _regret, _most, wrong = summary(rows)
            table.append([data["mode"], kind, len(rows), own, auto, first, worst, wrong])
    for above, row in reversed(list(itertools.pairwise(table))):
        row[0] = "" if row[0] == above[0] else row[0]
    return table


def held_out_in_short() -> str:
    """What is chosen at shapes of seeds that nothing was fitted to, without the five classes."""
    kinds = "all", *drawing.ALONE.values()
    return grid(HELD_OUT_HEADINGS, _held_out_rows(_held_out(), kinds))


def held_out() -> str:
    """As `held_out_in_short`, class by class."""
    found = _held_out()
    linked = ", ".join(
        f"[{data['mode']}{', ' + drawing.ALONE[x.split('_')[1]] if x.count('_') > 2 else ''}]"
        f"(results/{x})"
        for x, data in found.items()
    )
    title = (
        "Geometric means, each set of shapes drawn from a seed of its own and looked at once "
        f"({linked}; by scripts/measure-heldout). All are of the shipped models but, in 16 bits, "
        "those of one row or column, one long side, a k of a few, all sides large and round "
        "numbers, which are from before `skinny`; and those in float32 of one long side, a k of a "
        "few and all sides large, and in float16 of a k of a few, which are of models from before "
        "round numbers were fitted. A k of a few in float32 and float16 and one long side are also "
        "from before [wider alignments](#wider-alignments) counted, and in float32 and int32 all "
        "but the five classes in float32 from before [what `tuned` takes was counted "
        "right](#what-tuned-takes). "
        "Each product had a verdict; *wrong*: how many failed it:"
    )
    kinds = "all", *drawing.CLASSES, *drawing.ALONE.values()
    int32 = result("heldout_int32")["rows"]
    regret = float(summary(int32)[4])
    said = (
        f"At {len(int32)} shapes in int32 ([figures](results/heldout_int32_h200.json)) what was "
        f"chosen took {regret:.1%} longer than the fastest candidate on average."
    )
    return paragraphs(title, grid(HELD_OUT_HEADINGS, _held_out_rows(found, kinds)), said)


def held_out_h100() -> str:
    """The same on an H100, by the H200's models and by its own."""
    kinds = {"": "", **{f"{x}_": f", {kind}" for x, kind in drawing.ALONE.items()}}
    named = [
        (f"{mode}{kind}", of, f"{short}{mode}{models}")
        for short, kind in (*kinds.items(), ("beta_", ", beta = 0.5"))
        for mode in MODES_OF_H100
        for of, models in (
            ("the H200's", "_lent"), ("its own before lines were fitted", "_before"),
            ("its own", ""),
        )
        if models != "_before" or short == "lines_"
    ]  # fmt: skip
    table = []
    for shapes, of, name in named:
        file = ROOT / f"docs/results/heldout_{name}_h100.json"
        if not file.exists():
            continue
        rows = json.loads(file.read_text())["rows"]
        own, auto, first, worst, _regret, _most, wrong = summary(rows)
        linked = f"[{of}](results/{file.name})"
        table.append([shapes, linked, len(rows), own, auto, first, worst, wrong])
    headings = [
        "<mode", "<models", "shapes", "own", "`auto`", "1st percentile", "worst", "wrong"
    ]  # fmt: skip
    said = "H100 80GB HBM3, shapes of all classes, each set drawn from a seed of its own:"
    return paragraphs(said, grid(headings, table))


def beta() -> str:
    """What adding to C costs, before kernels read it as they do now and since, beside cuBLAS."""

    def timed(name: str) -> dict[tuple, dict]:
        rows = result(name)["rows"]
        whole = (r for r in rows if all(r[x] for x in r if x.endswith("us")))
        return {(r["mode"], *r["shape"], r["layout"]): r for r in whole}

    def mean(rows: Sequence[dict], over: str, under: str) -> str:
        ratio = statistics.geometric_mean([r[over] / r[under] for r in rows])
        return f"{ratio:.2f}"

    before, now = timed("beta_before"), timed("beta")
    table = []
    for mode in dict.fromkeys(key[0] for key in now):
        both = [key for key in now if key[0] == mode]
        new = [now[key] for key in both]
        old = [before[key] for key in both if key in before]
        ours, library = ("own_beta_us", "own_us"), ("library_beta_us", "library_us")
        plain, adding = ("library_us", "own_us"), ("library_beta_us", "own_beta_us")
        table.append([
            mode, len(both), mean(old, *ours) if old else "", mean(new, *ours),
            mean(new, *library), mean(new, *plain), mean(old, *adding) if old else "",
            mean(new, *adding),
        ])  # fmt: skip
    headings = [
        "<mode", "shapes", "cost, ours before", "cost, ours since", "cost, cuBLAS",
        "ratio without beta", "ratio with beta, before", "ratio with beta, since",
    ]  # fmt: skip
    return paragraphs(
        "H200, beta = 0.5, shapes drawn at random and round ones, geometric means, "
        "[before](results/beta_before_h200.json) and [since](results/beta_h200.json) kernels read "
        "C by many loads at once, by `scripts/measure-beta`. They were changed with these shapes "
        "in view, and nothing was verified in these runs. *Cost* is the time with beta over that "
        "without; *ratio* is cuBLAS's time over ours:",
        grid(headings, table),
        "Verified, at shapes of seeds not used before, cuBLAS's time over ours and over that of "
        "what is chosen. Those called *more*, and float64, were measured later, when "
        "`double_buffered` read C for four rows at once, and *float64, more* when `mma_double` "
        "read two:",
        _verified_with_beta(),
    )


def _verified_with_beta() -> str:
    """A table: what kernels that add to C are worth, and the choice among them."""
    table = []
    modes = "float32", "float64", "bfloat16", "float16", "fp32x3", "tf32"
    # Sets looked at before `store_tile` read four rows at once, and more after it.
    for name in (*modes, "float32_more", "fp32x3_more", "tf32_more", "float64_more"):
        rows = result(f"heldout_beta_{name}")["rows"]
        own, auto, _first, worst, _regret, _most, wrong = summary(rows)
        linked = f"[{name.replace('_', ', ')}](results/heldout_beta_{name}_h200.json)"
        table.append([linked, len(rows), own, auto, worst, wrong])
    columns = ["<mode", "shapes", "own", "`auto`", "`auto`, worst", "wrong"]
    return grid(columns, table)
