"""Several GPUs and ranks: docs/gpus.md, docs/mpi.md."""

import re

from predictions import problem_of

from hybrid_gemm.planning import cost_model, link_rates
from hybrid_gemm.problem import Problem

from . import grid, result, samples


def ranks() -> str:
    """Ways of multiplying and summing over 4 GPUs, beside multiplying alone."""
    data = result("ranks4")
    sizes = sorted({row["size"] for row in data["rows"]})
    ms = {(row["way"], row["size"]): row["median_ms"] for row in data["rows"]}
    lines = [
        f"Medians of {samples(data['rows'])} in ms on 4 GPUs ({data['gpu']}), `cols`, data on the "
        "devices, all in one run by `scripts/measure-ranks` ([figures](results/ranks4_h200.json)):",
        "",
    ]
    ways = dict.fromkeys(row["way"] for row in data["rows"])
    rows = (
        [re.sub(r"\b1 rounds", "1 round", way), *(f"{ms[way, n]:.1f}" for n in sizes)]
        for way in ways  # which the file has from before `counted` made them
    )
    lines += grid(["<way", *map(str, sizes)], rows)
    launch = data["launch_to_first_product_s"]
    if launch is None:
        return "\n".join(lines)
    return "\n".join([*lines, "", f"From launch to the first product: {launch:.1f} s."])


def copy_pieces() -> str:
    """Calls from ordinary arrays, before and since pieces are for a GPU's own threads."""
    data = result("copy_pieces4")
    times: dict = {}
    for row in data["rows"]:
        if row["host"] == 2 and row["threads"] == 8 + 4 * row["gpus"]:
            key = row["code"], row["gpus"], row["arithmetic"], row["size"]
            times.setdefault(key, []).append(row["time_ms"])
    mean = {key: sum(ms) / len(ms) for key, ms in times.items()}
    codes = list(dict.fromkeys(row["code"] for row in data["rows"]))
    sizes = sorted({row["size"] for row in data["rows"]})
    rows = [
        [arithmetic, str(gpus), *(" -> ".join(f"{mean[code, gpus, arithmetic, n]:.1f}"
                                              for code in codes) for n in sizes)]
        for arithmetic in ("fp32x3", "tf32", "float16")
        for gpus in (1, 2, 4)
    ]  # fmt: skip
    lines = [
        "Calls of `Runner.gemm` from ordinary arrays on a host of four H200s, ms, means of two "
        "medians: before; with pieces of up to 2 MiB for a GPU's own threads; and halved "
        "([figures](../results/copy_pieces4_h200.json)):",
        "",
    ]
    return "\n".join(lines + grid(["<arithmetic", "GPUs", *map(str, sizes)], rows))


def copy_threads() -> str:
    """Calls from ordinary arrays by the number of threads that copy, on two hosts."""
    data, times = result("copy_threads4"), {}
    for row in data["rows"]:
        as_now = row["downloads_from_slots"] is None and not row["mib_for_a_thread"]
        pieces = 2048 if row["gpus"] == 1 else 1024
        if as_now and row["piece_kib"] == pieces and row["host"] < 3:
            cell = row["gpus"], row["threads"], row["size"]
            times.setdefault(cell, {})[row["host"], row["arithmetic"]] = row["time_ms"]
    sizes = (4096, 8192, 16384)
    rows = [
        [str(gpus), str(threads), *(
            "; ".join(
                ", ".join(f"{of[host, x]:.1f}" for x in ("tf32", "fp32x3", "float16"))
                for host in (1, 2) if (host, "tf32") in of
            )
            for n in sizes for of in [times[gpus, threads, n]]
        )]
        for gpus, threads in sorted({cell[:2] for cell in times})
    ]  # fmt: skip
    lines = [
        "Calls of `Runner.gemm` from ordinary arrays on hosts of four H200s, medians in ms, of "
        "TF32, fp32x3, float16; behind a semicolon on another host, or on this alone "
        "([figures](../results/copy_threads4_h200.json)):",
        "",
    ]
    return "\n".join(lines + grid(["GPUs", "threads", *map(str, sizes)], rows))


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
    lines = [
        "Ranks on as many H200s of one host, float32, medians in ms by "
        "`scripts/measure-rank-calls` ([two](results/rank_calls_h200.json), "
        "[four](results/rank_calls4_h200.json)): "
        "`RankRunner.gemm`, then the same by hand, which is CuPy's product and mpi4py's calls on "
        "host arrays (`Scatter`, `Bcast`, `Allgather`, `Gather`, `Reduce_scatter_block`):",
        "",
        *grid(columns, rows),
    ]
    return "\n".join(lines)


def scaling() -> str:
    """Strong and weak scaling over ranks, by `cols`."""
    rows = (
        [r["study"], r["ranks"], f"{r['m']} x {r['n']} x {r['k']}", f"{r['total_ms']:.1f}",
         f"{r['gflops'] / 1e3:.1f}", f"{r['efficiency']:.3f}"]
        for r in result("scaling4")["rows"]
    )  # fmt: skip
    return "\n".join(
        [
            "By `cols`, data on the devices, one rank for each GPU, medians of "
            f"{samples(result('scaling4')['rows'])} in ms, each product verified ([commands "
            "and samples](results/scaling4_h200.json)):",
            "",
            *grid(["<study", "ranks", "<m x n x k", "ms", "TFLOP/s", "of ideal"], rows),
        ]
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
    lines = [
        "GB/s in all, by `hybrid-gemm tune --links` in the run of the next table "
        "([figures](results/peers4_h200.json)):",
        "",
    ]
    cells = {n: [gbps.get((*kind, n)) for kind in kinds.values()] for n in counts}
    lines += grid(
        ["<GPUs together", *kinds],
        ([n, *(f"{c:.0f}" if c else "" for c in row)] for n, row in cells.items()),
    )
    pairs = [r["gbps"] for r in rows if r["link"] == "peer"]
    copied = {r["at_once"]: r["gbps"] for r in rows if r["link"] == "memcpy"}
    threads = ", ".join(map(str, copied))
    return "\n".join([
        *lines, "",
        f"One GPU to another, a pair at a time: {min(pairs):.0f} to {max(pairs):.0f}. Copies on "
        f"the host into pinned memory by {threads} threads: "
        + ", ".join(f"{x:.0f}" for x in copied.values()) + ".",
    ])  # fmt: skip


def bounds(data: dict, row: dict, problem: Problem) -> dict[str, float]:
    """The terms of a row's bound: those that it has, and of files of before `h2d+d2h` was one, that
    of the links that were measured with it."""
    had = row.get("bounds_ms") or {row["bound_by"]: row["bound_ms"]}
    found = cost_model.links_bound(
        problem, link_rates.from_data(data["links"]), row["gpus"] or len(data["devices"]),
        page_locked=row["memory"] == "pinned",
    )  # fmt: skip
    return {"h2d+d2h": found["h2d+d2h"]} | had


PEERS = "peers1", "peers2", "peers4", "peers4_first"  # of a case in two of them, the first counts


def peers() -> str:
    """Whole products beside other libraries', on one, two and four GPUs."""
    lines = [
        "Times in ms from host arrays to host arrays, fp32, medians of "
        f"{samples(row for file in PEERS for row in result(file)['rows'])}, all ways in turn in "
        "one run of a version of this package by `hybrid-gemm bench --libraries` ([one "
        "GPU](results/peers1_h200.json), [two](results/peers2_h200.json), "
        "[four](results/peers4_h200.json), [other sizes](results/peers4_first_h200.json)). CuPy "
        "and PyTorch use one GPU and make a fresh C, which is pageable: "
        "`(cupy.asarray(a) @ cupy.asarray(b)).get()`, and `.cuda()`, `@` and `.cpu()` of "
        "PyTorch's; in brackets is how many times as long as ours each takes, with a fresh C where "
        "it makes one.",
        "",
    ]
    columns = ["<GPUs", "<version", "<m = n = k", "<memory", "ours", "ours, fresh C",
               "cuBLASXt, best settings", "CuPy", "PyTorch", "bound", "ours / bound"]  # fmt: skip
    table, shown = [], set()
    for file in PEERS:
        data = result(file)
        rows, version = data["rows"], data["environment"]["hybrid_gemm"]
        for case in dict.fromkeys((r["m"], r["memory"]) for r in rows):
            found = {(r["way"], r["c"]): r for r in rows if (r["m"], r["memory"]) == case}
            ours = found["ours", "given"]
            if (ours["gpus"], *case) in shown:
                continue
            shown.add((ours["gpus"], *case))

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
                ours["gpus"], version, *case, f"{ours['time_ms']:.1f}",
                f"{found['ours', 'fresh']['time_ms']:.0f}", xt, cell("cupy", "fresh"),
                cell("torch", "fresh"), f"{ms:.0f}, {by}",
                f"{ours['time_ms'] / ms:.2f}",
            ])  # fmt: skip
    return "\n".join([*lines, *grid(columns, table)])


def resident() -> str:
    """Products of data on the GPUs: what summing and starting cost, and scaling."""
    rows = result("gpus4")["rows"]
    mine = [r for r in rows if r["study"] == "resident"]
    one = {r["size"]: r["total_ms"] for r in mine if r["gpus"] == 1}
    lines = [
        f"Data on the GPUs, medians of {samples(mine)} in ms by `scripts/measure-gpus resident` "
        "([figures](results/gpus4_h200.json)); *alone* is the workers' products without sum or "
        "copy, in turn with the whole:",
        "",
    ]
    columns = ["<m = n = k", "<GPUs", "<split", "alone", "whole", "alone / whole", "times one GPU"]
    table = []
    for r in mine:
        alone, total = r["alone_ms"], r["total_ms"]
        table.append([
            r["size"], r["gpus"], r["split"] if r["gpus"] > 1 else "", f"{alone:.2f}",
            f"{total:.2f}", f"{alone / total:.3f}", f"{one[r['size']] / total:.2f}",
        ])  # fmt: skip
    return "\n".join([*lines, *grid(columns, table)])


def limited() -> str:
    """One GPU with and without a limit to its memory."""
    rows = result("limited1")["rows"]
    lines = [
        "One H200 from pageable arrays, without and with `--max-device-memory`, one run of each, "
        "by `scripts/measure-gpus limited` ([figures](results/limited1_h200.json)):",
        "",
    ]
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
    return "\n".join([*lines, *grid(columns, table)])


def copying() -> str:
    """What copies carry where products take little."""
    rows = result("carried2")["rows"]
    lines = [
        f"From host arrays in TF32 and float16 on {rows[0]['gpus']} H200s, medians of "
        f"{samples(rows)} in ms by `scripts/measure-gpus copying` "
        "([figures](results/carried2_h200.json)); GB/s is of A, B and C together:",
        "",
    ]
    columns = ["<m = n = k", "<dtype", "<memory", "copying threads", "whole", "multiplying", "GB/s"]
    table = (
        [r["size"], r["dtype"], r["memory"], r["copying_threads"] or "", f"{r['total_ms']:.1f}",
         f"{r['multiply_ms']:.1f}", f"{r['gbps']:.0f}"]
        for r in rows
    )  # fmt: skip
    return "\n".join([*lines, *grid(columns, table)])


def small() -> str:
    """Whole calls through one GPU, through all, and what is chosen."""
    rows = result("small2")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    ms = {(row["memory"], row["size"], row["way"]): row["time_ms"] for row in rows}
    lines = [
        f"Whole calls on a host of {rows[0]['gpus']} H200s, fp32, medians of "
        f"{samples(rows)} in ms by `scripts/measure-gpus small` "
        "([figures](results/small2_h200.json)):",
        "",
    ]
    where = {"host": "pageable, on the host", "device": "on one GPU"}
    table = (
        [n, where[memory], *(f"{ms[memory, n, way]:.3g}" for way in ways)]
        for memory, n in dict.fromkeys((row["memory"], row["size"]) for row in rows)
    )
    return "\n".join([*lines, *grid(["<m = n = k", "<arrays", *ways], table)])


def executors() -> str:
    """Native threads beside Python's executor, from arrays of the host."""
    rows = [r for r in result("executors2")["rows"] if len(r["options"]["gpus"]) == 2]
    by: dict[tuple, dict[int, float]] = {}
    for r in rows:
        ratios = by.setdefault((r["arithmetic"], r["memory"]), {})
        ratios[r["size"]] = r["python_ms"] / r["native_ms"]
    sizes = sorted({r["size"] for r in rows})
    table = ([*what, *(f"{of[n]:.2f}" for n in sizes)] for what, of in by.items())
    same = sum(r["same_bits"] and r["verdict"] == "passed" for r in rows)
    lines = [
        "Python's time over that of native threads, medians of "
        f"{samples(rows)} of the same plan in turns, two H200s "
        "([figures](results/executors2_h200.json), `scripts/measure-host executors`):",
        "",
        *grid(["<arithmetic", "<memory", *map(str, sizes)], table),
        "",
        f"Of {len(rows)} products, {same} had the same bits by both and passed their verdict.",
    ]
    return "\n".join(lines)


def host_arrays() -> str:
    """Calls with host arrays in every arithmetic by one GPU, two, and as many as are chosen."""
    data = result("host2", "h100")
    cells, said = _of_calls(data, (1, 2))
    rows = [
        [*cell, by[0]["workers"],
         *(f"{by[n]['time_ms']:.1f}" for n in (1, 2)),
         *(f"{by[n]['predicted_ms'] / by[n]['time_ms']:.2f}" for n in (1, 2)),
         *(f"{_of_bound(data, by[n]):.2f}" for n in (1, 2))]
        for cell, by in cells
    ]  # fmt: skip
    columns = ["<arithmetic", "<arrays", "m = n = k", "GPUs chosen", "one GPU", "two",
               "predicted / measured, one", "two", "measured / bound, one", "two"]  # fmt: skip
    of = ", ".join(sorted({x["name"] for x in data["environment"]["cuda"]["gpus"]}))
    title = (
        f"Whole calls of `Runner.gemm` on two GPUs ({of}), medians of "
        f"{samples(data['rows'])} in ms, by `scripts/measure-host ways` after `tune --links` "
        "([figures](results/host2_h100.json)). The constants of the prediction are from another "
        "host:"
    )
    return _folded(title, columns, rows, said)


def four_gpus() -> str:
    """The same by one GPU, two, four, and as many as are chosen."""
    counts = (1, 2, 4)
    data = result("host4")
    cells, said = _of_calls(data, counts)
    rows = [
        [*cell, *(f"{by[n]['time_ms']:.1f}" for n in counts),
         by[0]["workers"], f"{by[0]['time_ms']:.1f}",
         f"{_of_bound(data, by[0]):.2f}"]
        for cell, by in cells
    ]  # fmt: skip
    columns = ["<arithmetic", "<arrays", "m = n = k", "one GPU", "two", "four", "GPUs chosen",
               "as chosen", "as chosen / bound"]  # fmt: skip
    title = (
        "Whole calls of `Runner.gemm` on a host of four H200s, medians of "
        f"{samples(data['rows'])} in ms, by `scripts/measure-host ways` after `tune --links` "
        "([figures](results/host4_h200.json)):"
    )
    return _folded(title, columns, rows, said)


# What was asked of calls from host arrays, as multiples of the bound: by one GPU, and by as many as
# are chosen (0).
ASKED: dict[tuple[str, int], dict[int, float]] = {
    ("pageable", 1): {8192: 1.5, 16384: 1.3, 32768: 1.2},
    ("pinned", 1): {8192: 1.35, 16384: 1.2, 32768: 1.1},
    ("pageable", 0): {16384: 1.6, 32768: 1.35},
    ("pinned", 0): {16384: 1.4, 32768: 1.2},
}


def host_bars() -> str:
    """What was asked of calls from host arrays, what was reached, and how long products take."""
    data, rows, met = result("host4"), [], 0
    cells, _ = _of_calls(data, (1, 2, 4))
    for (memory, count), asked in ASKED.items():
        for (arithmetic, arrays, size), by in cells:
            arithmetics = ("fp32x3", "tf32") if count else ("fp32x3", "tf32", "float16")
            if arrays != memory or arithmetic not in arithmetics or size not in asked:
                continue
            row = by[count]
            terms = bounds(data, row, problem_of(arithmetic, size))
            term = max(terms, key=terms.__getitem__)
            reached = row["time_ms"] / terms[term]
            met += round(reached, 2) <= asked[size]
            rows.append([
                memory, row["workers"] if count else f"as chosen, {row['workers']}", arithmetic,
                size, f"{row['time_ms']:.1f}", f"{terms[term]:.1f}, {term}",
                f"{row['phases']['multiply'][2] / row['workers']:.1f}",
                asked[size], f"{reached:.2f}", "" if round(reached, 2) <= asked[size] else "missed",
            ])  # fmt: skip
    columns = ["<arrays", "<GPUs", "<arithmetic", "m = n = k", "ms", "<bound (ms)",
               "multiplying (ms)", "asked: ms / bound", "reached", "<"]  # fmt: skip
    title = (
        "Calls of `Runner.gemm` on a host of four H200s, of [these](../results/host4_h200.json); "
        f"*multiplying* is what a GPU's products take in one more run. {met} of {len(rows)} are "
        "reached:"
    )
    return "\n".join([title, "", *grid(columns, rows)])


def _of_bound(data: dict, row: dict) -> float:
    """The time of a row of measure-host as a multiple of its bound."""
    problem = problem_of(row["arithmetic"], row["size"])
    return row["time_ms"] / max(bounds(data, row, problem).values())


def _of_calls(data: dict, counts: tuple[int, ...]) -> tuple[list[tuple], str]:
    """Each arithmetic, memory and size with its rows by the number of GPUs (0: as chosen), and what
    predictions and the choice of that number are worth."""
    cells: dict[tuple, dict[int, dict]] = {}
    for row in data["rows"]:
        key = row["arithmetic"], row["memory"], row["size"]
        cells.setdefault(key, {})[row["gpus"]] = row
    near = sum(
        0.85 <= by[n]["predicted_ms"] / by[n]["time_ms"] <= 1.15
        for by in cells.values() for n in counts
    )  # fmt: skip
    lost = max(
        by[by[0]["workers"]]["time_ms"] / min(by[n]["time_ms"] for n in counts) - 1
        for by in cells.values()
    )
    return sorted(cells.items()), (
        f"Of {len(counts) * len(cells)} predictions {near} are within 15 %. The number of GPUs "
        f"that is chosen loses {100 * lost:.0f} % at worst, over {len(cells)} products."
    )


def _folded(title: str, columns: list[str], rows: list[list], said: str) -> str:
    return "\n".join([
        title, "", f"<details><summary>{len(rows)} products</summary>", "",
        *grid(columns, rows), "", "</details>", "", said,
    ])  # fmt: skip
