"""Products that are not of two real matrices, beside what else multiplies them:
docs/calls.md."""

import statistics

from . import asked, grid, paragraphs, result


def complex_numbers() -> str:
    """Complex products beside CuPy's."""
    rows = result("complex")["rows"]
    by: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        by.setdefault((row["dtype"], row["compute"]), {})[row["size"]] = row
    sizes = sorted({row["size"] for row in rows})
    table = [
        [what[0], asked(what[1]), *(f"{of[n][x]:{how}}" if n in of else "" for n in sizes
                  for x, how in (("ours_tflops", ".0f"), ("ratio", ".2f"))),
         f"{max(row['ours_error'] / row['cupy_error'] for row in of.values()):.2f}"]
        for what, of in by.items()
    ]  # fmt: skip
    headings = ["<dtype", "<compute", *(x for n in sizes for x in (f"TFLOP/s at {n}", "of CuPy")),
                "error, of CuPy's"]  # fmt: skip
    return paragraphs(
        "Complex products of square matrices that lie on an H200, expansion and packing included, "
        "beside CuPy's (cuBLAS) in the same run; operations are those of four real products, and "
        "errors the largest over abs(A) abs(B) ([figures](results/complex_h200.json), "
        "`scripts/measure-complex`):",
        grid(headings, table),
    )


def stacks() -> str:
    """Stacks of products beside torch.bmm."""
    rows = result("stacks")["rows"]
    table = [
        [row["dtype"], row["count"], f"{row['m']} x {row['n']} x {row['k']}",
         f"{row['ours_ms'] * 1e3:.1f}", f"{row['torch_ms'] * 1e3:.1f}", f"{row['ratio']:.2f}"]
        for row in rows
    ]  # fmt: skip
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    narrow = result("stack_narrow")["rows"]
    small = [row["ratio"] for row in narrow if row["side"] <= 32]
    headings = ["<dtype", "count", "<m x n x k", "us a call", "`torch.bmm`, us", "ratio"]
    return paragraphs(
        "Stacks that lie on an H200, calls that follow one another, beside PyTorch in the same run "
        "([figures](results/stacks_h200.json), `scripts/measure-stacks`):",
        grid(headings, table),
        f"Geometric mean: {mean:.2f}. Squares of 16 bits with sides of 8 to 32, 256 to 10,000 of "
        f"them, in graphs: {min(small):.2f} to {max(small):.2f} times as fast as cuBLAS "
        "([figures](results/stack_narrow_h200.json)).",
    )


def vectors() -> str:
    """Matrices times vectors beside a copy."""
    rows = result("matvec")["rows"]
    sides = sorted({row["side"] for row in rows})
    marks = {"gemv": "", "gemv_narrow": "", "vector": " v", "cublas": " c"}
    ours: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    copies: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        dtype, side, lies = row["dtype"], row["side"], "rows" if row["layout"] == "n" else "columns"
        way = ours.setdefault(dtype, {}).setdefault((row["product"], f"by {lies}"), {})
        way[side] = f"{row['gbps'] / 1000:.2f}{marks[row['kernel'].split()[0]]}"
        copies.setdefault(dtype, {}).setdefault(side, []).append(row["copy_gbps"] / 1000)
    table = []
    for dtype, ways in ours.items():
        copied = {side: f"{statistics.median(rates):.2f}" for side, rates in copies[dtype].items()}
        for what, of in {**ways, ("a copy", ""): copied}.items():
            table.append([dtype, *what, *(of.get(n, "") for n in sides)])
    headings = ["<dtype", "<product", "<A lies", *map(str, sides)]
    return paragraphs(
        "A square matrix times a vector on an H200, in graphs: TB/s of the bytes that have to "
        "move, by the kernel that `auto` takes (c: cuBLAS, v: `vector`, others: `gemv` and "
        "`gemv_narrow`); *a copy* within the GPU's memory moves as many, half of them in and half "
        "out ([figures](results/matvec_h200.json), `scripts/measure-matvec`):",
        grid(headings, table),
    )
