"""Calls of shapes that were not seen before, and with arrays of every kind: docs/calls.md."""

import math
import statistics

from . import grid, paragraphs, result


def new_shapes() -> str:
    """What the first calls of a shape cost."""
    found = result("new_shapes", "h100")["shapes"]
    calls = [
        [
            f"{row['dtype']} {row.get('compute', row.get('kernel', ''))}".strip(),
            *(f"{row[x] / 1e3:.2f}" for x in ("first_us", "second_us", "third_us", "cupy_us")),
        ]
        for row in found
        if "first_us" in row
    ]
    updates = [
        [
            f"{row['size']}, {row['block']}", row["compute"],
            *(f"{row[x]:.1f}" for x in ("first_ms", "again_ms", "cupy_again_ms")),
        ]
        for row in found
        if "again_ms" in row
    ]  # fmt: skip
    return paragraphs(
        "Host time of the first calls of a shape in ms, 40 shapes of sides from 100 to 1500 whose "
        "arrays lie on an H100, medians, of products that were not verified "
        "([figures](results/new_shapes_h100.json), "
        "[before the choice was made cheaper](results/new_shapes_before_h100.json)):",
        grid(["<dtype", "first", "second", "third", "CuPy's first"], calls),
        "The updates C -= A B of a blocked LU factorization in ms, each of another shape and of "
        "blocks of one matrix: the first time, and when their shapes are known:",
        grid(["<size, block", "<compute", "first", "known", "CuPy"], updates),
    )


def _ratios(name: str, peer: str, script: str, gpu: str = "h100") -> str:
    """A peer's time over ours for calls of every kind. Earlier versions were timed on an H100."""
    of: dict[str, dict[int, str]] = {}
    rows = [x for x in result(name, gpu)["rows"] if "n" in x]
    compared = sum(x.get("difference") is not None for x in rows)
    said = f"of {len(rows)} products {compared} were compared in this run"
    for row in rows:
        of.setdefault(row["what"], {})[row["n"]] = f"{row['ratio']:.2f}"
    sizes = sorted(next(iter(of.values())))
    table = [[what, *(by_size[n] for n in sizes)] for what, by_size in of.items()]
    return paragraphs(
        f"{peer} time over ours for calls back to back on an {gpu.upper()}, at n = "
        + ", ".join(map(str, sizes))
        + f", float32 unless said; {said if compared else 'products were not verified'} "
        f"([figures](results/{name}_{gpu}.json), [of an earlier version]"
        f"(results/{name}_before_h100.json){'' if gpu == 'h100' else ' on an H100'}; {script}):",
        grid(["<what", *map(str, sizes)], table),
    )


def any_arrays() -> str:
    """Arrays of every kind on a GPU."""
    return _ratios("any_arrays", "CuPy's", "`scripts/measure-arrays`")


def host_arrays() -> str:
    """Arrays of every kind of the host."""
    return _ratios("host_arrays", "CuPy's", "`scripts/measure-host-arrays`", gpu="h200")


def checked_calls() -> str:
    """Checked calls before and after integers and whole stacks were judged on the GPU."""
    found = result("checked_calls")
    before = {row["call"]: row for row in found["before"]}
    rows = [
        [row["call"], f"{row['unchecked_us']:.0f}", f"{before[row['call']]['checked_us']:.0f}",
         f"{row['checked_us']:.0f}", f"{row['ratio']:.2f}"]
        for row in found["rows"]
    ]  # fmt: skip
    return paragraphs(
        "Calls on an H200 that are waited for, in us; integers and stacks were judged by Python "
        "or pair by pair before ([figures](results/checked_calls_h200.json)):",
        grid(["<call", "unchecked", "checked, before", "checked", "checked / unchecked"], rows),
    )


def other_calls() -> str:
    """Checked products, stacks, lists, and arrays of two GPUs."""
    return _ratios("other_calls", "CuPy's", "`scripts/measure-calls`, two GPUs")


def tensors() -> str:
    """PyTorch's tensors of every kind."""
    return _ratios("tensors", "PyTorch's", "`scripts/measure-tensors`")


def vocabulary() -> str:
    """The last layer of a language model in PyTorch."""
    found = [x for x in result("tensors", "h100")["rows"] if "padded_us" in x]
    table = [
        [x["what"], *(f"{x[of] / 1e3:.2f}" for of in ("ours_us", "torch_us", "padded_us"))]
        for x in found
    ]
    return paragraphs(
        "The last layer of GPT-2 in bfloat16, x w^T of 8192 tokens, a width of 768 and a "
        "vocabulary of 50,257: rows of y begin on no multiple of 16 bytes. PyTorch's with w padded "
        "to 50,304, too. Times of calls back to back in ms, an H100, of products that were not "
        "verified ([figures](results/tensors_h100.json)):",
        grid(["<what", "`hybrid_gemm.torch.gemm`", "PyTorch", "PyTorch, padded"], table),
    )


def last_layer() -> str:
    """The same in a sentence."""
    there = next(x for x in result("tensors", "h100")["rows"] if "padded_us" in x)
    ours, torch, padded = (there[of] / 1e3 for of in ("ours_us", "torch_us", "padded_us"))
    return (
        f"GPT-2's last layer, of 50,257 columns, takes PyTorch {torch:.1f} ms on an H100, padded "
        f"{padded:.1f}, and `hybrid_gemm.torch.gemm` {ours:.1f} "
        "([gradients too](docs/calls.md#arrays-of-every-kind))."
    )


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
    return paragraphs(
        "Time of the real product over that of cuBLAS's complex one, at shapes drawn at random on "
        "an H100 ([figures](../results/complex_drawn_h100.json), "
        "`scripts/measure-complex FILE drawn`):",
        grid(["<dtype", "<class", "shapes", "geometric mean", "least", "most"], table),
    )
