"""Calls of shapes that were not seen before, and with arrays of every kind: docs/performance.md."""

import math
import statistics

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


def _ratios(name: str, peer: str, more: str) -> str:
    """A peer's time over ours for calls of every kind, now and before."""
    of: dict[str, dict[int, list[float | None]]] = {}
    for file in (name, f"{name}_before"):
        for row in result(file, "h100")["rows"]:
            if file == name or row["n"] in of.get(row["what"], {}):
                ratios = of.setdefault(row["what"], {}).setdefault(row["n"], [])
                ratios.append(row.get("ratio"))  # none where the call failed
    sizes = sorted(next(iter(of.values())))

    def cell(new: float, *before: float | None) -> str:
        for old in before:
            if old is None:
                return f"failed → {new:.2f}"
            if abs(old / new - 1) > 0.3:
                return f"{old:.2f} → {new:.2f}" if old >= 0.01 else f"{old:.1g} → {new:.2f}"
        return f"{new:.2f}"

    table = [[what, *(cell(*by_size[n]) for n in sizes)] for what, by_size in of.items()]
    return "\n".join([
        f"{peer} time over ours for calls back to back on an H100, at n = "
        + ", ".join(map(str, sizes))
        + f", float32 unless said ([figures](results/{name}_h100.json), "
        f"[before](results/{name}_before_h100.json) where that differs by more than 30 %{more}):",
        "",
        *grid(["<what", *map(str, sizes)], table),
    ])  # fmt: skip


def any_arrays() -> str:
    """Arrays of every kind on a GPU."""
    return _ratios("any_arrays", "CuPy's", "; `scripts/measure-arrays`")


def host_arrays() -> str:
    """Arrays of every kind of the host."""
    return _ratios("host_arrays", "CuPy's", "; `scripts/measure-host-arrays`")


def other_calls() -> str:
    """Checked products, stacks, lists, and arrays of two GPUs."""
    return _ratios("other_calls", "CuPy's", "; `scripts/measure-calls`, two GPUs")


def tensors() -> str:
    """PyTorch's tensors of every kind."""
    return _ratios("tensors", "PyTorch's", "; `scripts/measure-tensors`")


def complex_drawn() -> str:
    """The two ways of a complex product, by class of shape."""
    of: dict[tuple[str, str], list[float]] = {}
    for row in result("complex_drawn", "h100")["rows"]:
        of.setdefault((row["dtype"], row["class"]), []).append(row["real_us"] / row["cublas_us"])
    table = [
        [*what, len(found), f"{math.exp(statistics.mean(map(math.log, found))):.2f}",
         f"{min(found):.2f}", f"{max(found):.2f}"]
        for what, found in of.items()
    ]  # fmt: skip
    return "\n".join([
        "Time of the real product over that of cuBLAS's complex one, at shapes drawn at random on "
        "an H100 ([figures](../results/complex_drawn_h100.json), "
        "`scripts/measure-complex FILE drawn`):",
        "",
        *grid(["<dtype", "<class", "shapes", "geometric mean", "least", "most"], table),
    ])  # fmt: skip
