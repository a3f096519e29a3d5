"""Tensor cores beside cuBLAS: docs/tensor-cores.md, docs/fp64x.md."""

import statistics

from hybrid_gemm.bench.accuracy import KINDS

from . import asked, grid, kernel_rows, paragraphs, result


def splits() -> str:
    """float32 by three products on tensor cores, packing included, beside cuBLAS fp32."""
    title = (
        "fp32x3, packing included, beside cuBLAS fp32 in the same run: ratio, and TFLOP/s of ours "
        "([normal](results/fp32x3_h200.json), [1024, 4096, 8192 and 16384 "
        "cubed](results/named_fp32x3_h200.json), [wide](results/fp32x3_wide_h200.json), "
        "[huge](results/fp32x3_huge_h200.json)):"
    )
    columns = ["<m x n x k", "<data", "<split", "of cuBLAS", "TFLOP/s", "<held back by"]
    table, ratios = [], []
    for name in ("fp32x3", "fp32x3_wide", "fp32x3_huge"):
        cases = sorted(_beside(name).items(), key=lambda x: (x[0][2] == x[0][4], x[0][2]))
        for (_dtype, _layout, m, n, k), both in cases:
            ours = both[False]
            split = ours["compute"].removeprefix("fp32x3 (").removesuffix(")")
            table.append([
                f"{m} x {n} x {k}", ours["data"], split, f"{ours['ratio_to_cublas']:.2f}",
                f"{ours['gflops'] / 1e3:.0f}", _clock(both),
            ])  # fmt: skip
            if ours["data"] == "normal" and m >= 1024:
                ratios.append(ours["ratio_to_cublas"])
    mean = statistics.geometric_mean(ratios)
    return paragraphs(
        title,
        grid(columns, table),
        f"Geometric mean over the {len(ratios)} sizes from 1024 up, normal data: {mean:.2f}.",
    )


def residues() -> str:
    """float64 by residues of int8 beside cuBLAS DGEMM, and what int8 sustains."""
    data = result("fp64x")
    random = data["random"]["rows"]
    worst = min(row["ratio"] for row in random)
    taken = [row for row in random if "moduli" in row["compute"]]
    title = (
        "fp64x, everything included, beside cuBLAS DGEMM in the same run, normal data "
        "([figures](results/fp64x_h200.json), scripts/measure-fp64x):"
    )
    table = [
        [
            str(row["m"]), asked(row["compute"]).removeprefix("fp64x (").removesuffix(")"),
            f"{row['ratio']:.2f}", f"{row['ours_tflops']:.0f}", f"{row['cublas_tflops']:.0f}",
        ]
        for row in data["sizes"]["rows"]
    ]  # fmt: skip
    columns = ["m = n = k", "<by", "of cuBLAS", "TFLOP/s", "cuBLAS"]
    apart = ", in a run of their own" if "note" in data["limit"] else ""
    limits = [
        [
            str(row["size"]), row["what"], f"{row['tops']:.0f}", str(row["power_w"]),
            str(row["sm_mhz"]),
        ]
        for row in data["limit"]["rows"]
    ]  # fmt: skip
    return paragraphs(
        title,
        grid(columns, table),
        f"Of {len(random)} shapes drawn at random, with sides from 64 to 12288, "
        f"{len(taken)} were made by residues; the worst ratio of all is {worst:.2f}.",
        f"The product of random residues alone, 14 moduli, and cuBLAS's int8 product{apart}:",
        grid(["m = n = k", "<product", "TOP/s", "W", "MHz"], limits),
    )


def residue_errors() -> str:
    """The largest errors of fp64x and of cuBLAS DGEMM."""
    title = (
        "The largest error over abs(A) abs(B), in units of u = 2^-53, of 128 x 96 elements of C, "
        "m = n = 4096, against long double, and that of cuBLAS DGEMM "
        "([figures](results/fp64x_h200.json)). Data: normal; uniform in [0, 1); and (uniform - "
        "0.5) exp(phi normal):"
    )
    table = [
        [
            row["data"], str(row["k"]), f"{row['ours']:.2f}", f"{row['cublas']:.2f}",
            f"{row['ratio']:.2f}", row["compute"].split(",")[0],
        ]
        for row in result("fp64x")["errors"]["rows"]
    ]  # fmt: skip
    columns = ["<data", "k", "fp64x", "cuBLAS", "ratio", "<by"]
    return paragraphs(title, grid(columns, table))


def rounded() -> str:
    """TF32 and 16 bits beside cuBLAS of the same arithmetic."""
    cases = {**_beside("tf32"), **_beside("narrow")}
    sizes = sorted({case[2] for case in cases})
    title = (
        "One product, beside cuBLAS of the same arithmetic in the same run: ratio "
        "([TF32](results/tf32_h200.json), [16 bits](results/narrow_h200.json), later NN and NT at "
        "8192 and 16384: [TF32](results/named_tf32_h200.json), "
        "[16 bits](results/named_narrow_h200.json)):"
    )
    table = []
    for dtype, layout in dict.fromkeys(case[:2] for case in cases):
        found = {n: cases.get((dtype, layout, n, n, n)) for n in sizes}
        ratios = [both[False]["ratio_to_cublas"] for both in found.values() if both]
        name = {"float32": "float32 as TF32"}.get(dtype, dtype)
        cells = [f"{b[False]['ratio_to_cublas']:.2f}" if b else "" for b in found.values()]
        cells.append(f"{statistics.geometric_mean(ratios):.2f}")
        table.append([name, layout.upper(), *cells])
    columns = ["<operands", "<layout", *map(str, sizes), "geometric mean"]
    return paragraphs(title, grid(columns, table))


def errors() -> str:
    """Errors of fp32x3 on each kind of data, and those of others beside them."""
    data = result("accuracy")
    rows = {(r["data"], r["way"], r["k"]): r for r in data["rows"]}
    kinds = list(dict.fromkeys(r["data"] for r in data["rows"]))
    ks = sorted({r["k"] for r in data["rows"]})
    shown = [k for k in (256, 4096, 65536) if k in ks]
    title = (
        f"Frobenius errors at k = {', '.join(map(str, shown))}, and fp32x3's against cuBLAS fp32's "
        f"at the k from {ks[0]} to {ks[-1]} where it does worst, "
        "by `hybrid-gemm bench --accuracy`, m = n = 1024 ([figures](results/accuracy_h200.json)). "
        f"Data: {'; '.join(f'*{kind}*, {words}' for kind, words in KINDS.items())}."
    )
    columns = ["<data", "fp32x3", "cuBLAS fp32", "TF32", "Frobenius, worst", "largest, worst",
               "<split"]  # fmt: skip
    table = []
    for kind in kinds:
        cells = [
            "<br>".join(f"{rows[kind, way, k]['frobenius']:.1e}" for k in shown)
            for way in ("fp32x3", "cuBLAS fp32", "tf32")
        ]
        ours = [rows[kind, "fp32x3", k] for k in ks]
        cells += [f"{max(r[f'{x}_of_cublas'] for r in ours):.2f}" for x in ("frobenius", "largest")]
        said = dict.fromkeys(r["compute"].removeprefix("fp32x3 (")[:-1] for r in ours)
        table.append([kind, *cells, ", ".join(said)])
    return paragraphs(title, grid(columns, table))


def _beside(name: str) -> dict:
    """Ours and cuBLAS by case, of a run of `bench --compute`."""
    found = {}
    for row in kernel_rows(name):
        case = row["dtype"], row["layout"], row["m"], row["n"], row["k"]
        found.setdefault(case, {})[row["kernel"].startswith("cublas")] = row
    return found


def _clock(both: dict) -> str:
    """What held the card back during either."""
    words = dict.fromkeys(row["throttled"] for row in both.values() if row["throttled"])
    return ", ".join(words)
