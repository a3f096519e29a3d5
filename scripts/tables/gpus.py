"""Several GPUs and ranks: docs/gpus.md, docs/mpi.md."""

import re

from hybrid_gemm.planning import cost_model, link_rates
from hybrid_gemm.problem import Problem

from . import grid, paragraphs, result, samples


def ranks() -> str:
    """Ways of multiplying and summing over 4 GPUs, beside multiplying alone."""
    data = result("ranks4")
    sizes = sorted({row["size"] for row in data["rows"]})
    ms = {(row["way"], row["size"]): row["median_ms"] for row in data["rows"]}
    title = (
        f"Medians of {samples(data['rows'])} in ms on 4 GPUs ({data['gpu']}), `cols`, data on the "
        "devices, all in one run by `scripts/measure-ranks` ([figures](results/ranks4_h200.json)):"
    )
    ways = dict.fromkeys(row["way"] for row in data["rows"])
    rows = (
        [re.sub(r"\b1 rounds", "1 round", way), *(f"{ms[way, n]:.1f}" for n in sizes)]
        for way in ways  # which the file has from before `counted` made them
    )
    launch = data["launch_to_first_product_s"]
    said = "" if launch is None else f"From launch to the first product: {launch:.1f} s."
    return paragraphs(title, grid(["<way", *map(str, sizes)], rows), said)


def rank_calls() -> str:
    """Calls of two and of four ranks, beside what one would write with CuPy and mpi4py."""
    two, four = (
        {(r["case"], r["n"]): r for r in result(name)["rows"]}
        for name in ("rank_calls", "rank_calls4")
    )
    sizes = (128, 1024, 8192)
    words = {
        "host": "of the host", "gpu": "on GPUs", "rows": "rows", "replicated": "replicated",
        "root": "root", "cols": "cols", "rows to replicated": "rows, result replicated",
    }  # fmt: skip
    rows = [
        [f"{words[place]}: {words[case]}", *(
            "{ours_ms:.2g}, {by_hand_ms:.2g}".format(**row)
            if max(row["ours_ms"], row["by_hand_ms"]) < 10
            else "{ours_ms:.0f}, {by_hand_ms:.0f}".format(**row)
            for found in (two, four)
            for row in (found[f"{place} {case}", n] for n in sizes)
        )]
        for place in ("host", "gpu")
        for case in ("rows", "rows to replicated", "replicated", "root", "cols")
    ]  # fmt: skip
    columns = ["<arrays: distribution", *(f"{x}, {n}" for x in ("two", "four") for n in sizes)]
    return paragraphs(
        "Ranks on as many H200s of one host, float32, medians in ms by "
        "`scripts/measure-rank-calls` ([two](results/rank_calls_h200.json), "
        "[four](results/rank_calls4_h200.json)): "
        "`RankRunner.gemm`, then the same by hand, which is CuPy's product and mpi4py's calls on "
        "host arrays (`Scatter`, `Bcast`, `Allgather`, `Gather`, `Reduce_scatter_block`):",
        grid(columns, rows),
    )


def scaling() -> str:
    """Strong and weak scaling over ranks, by `cols`."""
    rows = (
        [r["study"], r["ranks"], f"{r['m']} x {r['n']} x {r['k']}", f"{r['total_ms']:.1f}",
         f"{r['gflops'] / 1e3:.1f}", f"{r['efficiency']:.3f}"]
        for r in result("scaling4")["rows"]
    )  # fmt: skip
    return paragraphs(
        "By `cols`, data on the devices, one rank for each GPU, medians of "
        f"{samples(result('scaling4')['rows'])} in ms, each product verified ([commands "
        "and samples](results/scaling4_h200.json)):",
        grid(["<study", "ranks", "<m x n x k", "ms", "TFLOP/s", "of ideal"], rows),
    )


def links() -> str:
    """How fast bytes travel on the host of four GPUs."""
    data = result("peers4")
    rows = data["links"]["rows"]
    kinds = {
        "pinned to GPU": ("h2d", "pinned"), "to host": ("d2h", "pinned"),
        "both ways": ("both", "pinned"), "pageable to GPU": ("h2d", "pageable"),
        "to host ": ("d2h", "pageable"), "each GPU to the next": ("ring", "device"),
    }  # fmt: skip
    gbps = {(r["link"], r["memory"], r["at_once"]): r["gbps"] for r in rows}
    counts = sorted({r["at_once"] for r in rows if r["link"] == "h2d"})
    cells = {n: [gbps.get((*kind, n)) for kind in kinds.values()] for n in counts}
    table = ([n, *(f"{c:.0f}" if c else "" for c in row)] for n, row in cells.items())
    pairs = [r["gbps"] for r in rows if r["link"] == "peer"]
    copied = {r["at_once"]: r["gbps"] for r in rows if r["link"] == "memcpy"}
    threads = ", ".join(map(str, copied))
    return paragraphs(
        "GB/s in all, by `hybrid-gemm tune --links` in the run of the next table "
        "([figures](results/peers4_h200.json)):",
        grid(["<GPUs together", *kinds], table),
        f"One GPU to another, a pair at a time: {min(pairs):.0f} to {max(pairs):.0f}. Copies on "
        f"the host into pinned memory by {threads} threads: "
        f"{', '.join(f'{x:.0f}' for x in copied.values())}.",
    )


def bounds(data: dict, row: dict, problem: Problem) -> dict[str, float]:
    """The terms of a row's bound: those that it has, and of files of before `h2d+d2h` was one, that
    of the links that were measured with it."""
    had = row.get("bounds_ms") or {row["bound_by"]: row["bound_ms"]}
    found = cost_model.links_bound(
        problem, link_rates.from_data(data["links"]), row["gpus"] or len(data["devices"]),
        page_locked=row["memory"] == "pinned",
    )  # fmt: skip
    return {"h2d+d2h": found["h2d+d2h"]} | had


PEERS = "peers1", "peers2", "peers4"


def peers() -> str:
    """Whole products beside other libraries', on one, two and four GPUs."""
    title = (
        "Times in ms from host arrays to host arrays, fp32, medians of "
        f"{samples(row for file in PEERS for row in result(file)['rows'])}, all ways in turn in "
        "one run of a version of this package by `hybrid-gemm bench --libraries` ([one "
        "GPU](results/peers1_h200.json), [two](results/peers2_h200.json), "
        "[four](results/peers4_h200.json)). In a "
        "given C, or a *new* one, which is pageable. CuPy and PyTorch use one GPU: "
        "`(cupy.asarray(a) @ cupy.asarray(b)).get(out=c)`, and `.cuda()`, `@` and `copy_` into C "
        "of PyTorch's (`.get()` and `.cpu()` make a new one); in brackets is how many times as "
        "long as ours each takes in such a C."
    )
    columns = [
        "<GPUs", "<version", "<m = n = k", "<memory", "ours", "cuBLASXt, best settings", "CuPy",
        "PyTorch", "ours, new C", "CuPy, new C", "PyTorch, new C", "bound", "ours / bound",
    ]  # fmt: skip
    table = []
    for file in PEERS:
        data = result(file)
        rows, version = data["rows"], data["environment"]["hybrid_gemm"]
        for case in dict.fromkeys((r["m"], r["memory"]) for r in rows):
            found = {(r["way"], r["c"]): r for r in rows if (r["m"], r["memory"]) == case}
            ours = found["ours", "given"]

            def cell(way: str, c: str, found=found) -> str:
                if (way, c) not in found:
                    return ""
                row = found[way, c]
                return f"{row['time_ms']:.0f} ({row['ratio_to_ours']:.1f})"

            xt = found["cublasxt", "given"]["settings"].split(",")
            xt = f"{cell('cublasxt', 'given')}, {xt[0]}" + (", pinning" if "on" in xt[1] else "")
            problem = Problem(ours["m"], ours["n"], ours["k"], ours["dtype"])
            ms, by = max((ms, by) for by, ms in bounds(data, ours, problem).items())
            table.append([
                ours["gpus"], version, *case, f"{ours['time_ms']:.1f}", xt,
                cell("cupy", "given"), cell("torch", "given"),
                f"{found['ours', 'fresh']['time_ms']:.0f}", cell("cupy", "fresh"),
                cell("torch", "fresh"), f"{ms:.0f}, {by}",
                f"{ours['time_ms'] / ms:.2f}",
            ])  # fmt: skip
    return paragraphs(title, grid(columns, table))


def resident() -> str:
    """Products of data on the GPUs: what summing and starting cost, and scaling."""
    rows = result("gpus4")["rows"]
    mine = [r for r in rows if r["study"] == "resident"]
    one = {r["size"]: r["total_ms"] for r in mine if r["gpus"] == 1}
    title = (
        f"Data on the GPUs, medians of {samples(mine)} in ms by `scripts/measure-gpus resident` "
        "([figures](results/gpus4_h200.json)); *alone* is the workers' products without sum or "
        "copy, in turn with the whole:"
    )
    columns = ["<m = n = k", "<GPUs", "<split", "alone", "whole", "alone / whole", "TFLOP/s",
               "times one GPU"]  # fmt: skip
    table = []
    for r in mine:
        alone, total = r["alone_ms"], r["total_ms"]
        table.append([
            r["size"], r["gpus"], r["split"] if r["gpus"] > 1 else "", f"{alone:.2f}",
            f"{total:.2f}", f"{alone / total:.3f}", f"{2 * r['size'] ** 3 / total / 1e9:.0f}",
            f"{one[r['size']] / total:.2f}",
        ])  # fmt: skip
    return paragraphs(title, grid(columns, table))


def limited() -> str:
    """One GPU with and without a limit to its memory."""
    rows = result("limited1")["rows"]
    title = (
        "One H200 from pageable arrays, without and with `--max-device-memory`, one run of each, "
        "by `scripts/measure-gpus limited` ([figures](results/limited1_h200.json)):"
    )
    columns = ["<m = n = k", "<limit", "planned memory", "turns", "to the GPU", "s", "of the first"]
    table = []
    for row in rows:
        limit = row["max_device_memory"]
        table.append([
            row["size"], f"{limit / 2**30:.0f} GiB" if limit else "none",
            f"{row['memory_bytes'] / 2**30:.1f} GiB", row["turns"],
            f"{row['bytes_h2d'] / 2**30:.0f} GiB", f"{row['total_ms'] / 1e3:.2f}",
            f"{row['total_ms'] / rows[0]['total_ms']:.2f}",
        ])  # fmt: skip
    return paragraphs(title, grid(columns, table))


def copying() -> str:
    """What copies carry where products take little."""
    rows = result("carried2")["rows"]
    title = (
        f"From host arrays in TF32 and float16 on {rows[0]['gpus']} H200s, medians of "
        f"{samples(rows)} in ms by `scripts/measure-gpus copying` "
        "([figures](results/carried2_h200.json)); GB/s is of A, B and C together:"
    )
    columns = ["<m = n = k", "<dtype", "<memory", "copying threads", "whole", "multiplying", "GB/s"]
    table = (
        [r["size"], r["dtype"], r["memory"], r["copying_threads"] or "", f"{r['total_ms']:.1f}",
         f"{r['multiply_ms']:.1f}", f"{r['gbps']:.0f}"]
        for r in rows
    )  # fmt: skip
    return paragraphs(title, grid(columns, table))


def small() -> str:
    """Whole calls through one GPU, through all, and what is chosen."""
    rows = result("small2")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    ms = {(row["memory"], row["size"], row["way"]): row["time_ms"] for row in rows}
    title = (
        f"Whole calls on a host of {rows[0]['gpus']} H200s, fp32, medians of "
        f"{samples(rows)} in ms by `scripts/measure-gpus small` "
        "([figures](results/small2_h200.json)):"
    )
    where = {"host": "pageable, on the host", "device": "on one GPU"}
    table = (
        [n, where[memory], *(f"{ms[memory, n, way]:.3g}" for way in ways)]
        for memory, n in dict.fromkeys((row["memory"], row["size"]) for row in rows)
    )
    return paragraphs(title, grid(["<m = n = k", "<arrays", *ways], table))
