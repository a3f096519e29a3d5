"""Calls of shapes that were not seen before, and with arrays of every kind: docs/performance.md."""

from . import grid, result


def new_shapes() -> str:
    """What the first calls of a shape cost, before and after the choice was made cheaper."""
    before, found = (result(x, "h100")["shapes"] for x in ("new_shapes_before", "new_shapes"))
    calls = [
        [
            f"{row['dtype']} {row.get('compute', row.get('kernel', ''))}".strip(),
            f"{old['first_us'] / 1e3:.1f}",
            *(f"{row[x] / 1e3:.2f}" for x in ("first_us", "second_us", "third_us", "cupy_us")),
        ]
        for old, row in zip(before, found, strict=True)
        if "first_us" in row
    ]
    updates = [
        [
            f"{row['size']}, {row['block']}", row["compute"], f"{old['again_ms']:.1f}",
            *(f"{row[x]:.1f}" for x in ("first_ms", "again_ms", "cupy_again_ms")),
        ]
        for old, row in zip(before, found, strict=True)
        if "again_ms" in row
    ]  # fmt: skip
    return "\n".join([
        "Host time of the first calls of a shape in ms, 40 shapes of sides from 100 to 1500 whose "
        "arrays lie on an H100, medians; CuPy's first call beside them "
        "([figures](results/new_shapes_h100.json), "
        "[before](results/new_shapes_before_h100.json)):",
        "",
        *grid(["<dtype", "first, before", "first", "second", "third", "CuPy"], calls),
        "",
        "The updates C -= A B of a blocked LU factorization in ms, each of another shape and of "
        "blocks of one matrix: the first time, and when their shapes are known. Before, such "
        "blocks took a plan each:",
        "",
        *grid(["<size, block", "<compute", "known, before", "first", "known", "CuPy"], updates),
    ])  # fmt: skip


def any_arrays() -> str:
    """CuPy's time over ours for arrays of every kind, now and before."""
    of = {}
    for name in ("any_arrays_before", "any_arrays"):
        for row in result(name, "h100")["rows"]:
            of.setdefault(row["what"], {}).setdefault(row["n"], []).append(row["ratio"])
    sizes = sorted(next(iter(of.values())))
    table = [
        [what, *(f"{old:.2f} → {new:.2f}" if abs(old / new - 1) > 0.3 else f"{new:.2f}"
                 for old, new in (by_size[n] for n in sizes))]
        for what, by_size in of.items()
    ]  # fmt: skip
    return "\n".join([
        "CuPy's time over ours for calls back to back on an H100, the GPU included, at n = "
        + ", ".join(map(str, sizes))
        + ", float32 unless said ([figures](results/any_arrays_h100.json), "
        "[before](results/any_arrays_before_h100.json) where that differs by more than 30 %):",
        "",
        *grid(["<what", *map(str, sizes)], table),
    ])  # fmt: skip
