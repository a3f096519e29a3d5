"""Calls from host arrays to host arrays, in every arithmetic: docs/gpus.md and its notes."""

from predictions import problem_of

from . import grid, paragraphs, result, samples
from .gpus import bounds


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
    title = (
        "Calls of `Runner.gemm` from ordinary arrays on a host of four H200s, ms, means of two "
        "medians: before; with pieces of up to 2 MiB for a GPU's own threads; and halved "
        "([figures](../results/copy_pieces4_h200.json)):"
    )
    return paragraphs(title, grid(["<arithmetic", "GPUs", *map(str, sizes)], rows))


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
    title = (
        "Calls of `Runner.gemm` from ordinary arrays on hosts of four H200s, medians in ms, of "
        "TF32, fp32x3, float16; behind a semicolon on another host, or on this alone "
        "([figures](../results/copy_threads4_h200.json)):"
    )
    return paragraphs(title, grid(["GPUs", "threads", *map(str, sizes)], rows))


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
    return paragraphs(
        "Python's time over that of native threads, medians of "
        f"{samples(rows)} of the same plan in turns, two H200s "
        "([figures](results/executors2_h200.json), `scripts/measure-host executors`):",
        grid(["<arithmetic", "<memory", *map(str, sizes)], table),
        f"Of {len(rows)} products, {same} had the same bits by both and passed their verdict.",
    )


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
    return paragraphs(title, grid(columns, rows))


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
    taken = [by[n]["time_ms"] / by[n]["predicted_ms"] for by in cells.values() for n in counts]
    near = sum(0.85 <= 1 / x <= 1.15 for x in taken)
    lost = max(
        by[by[0]["workers"]]["time_ms"] / min(by[n]["time_ms"] for n in counts) - 1
        for by in cells.values()
    )
    return sorted(cells.items()), (
        f"Of {len(taken)} predictions {near} are within 15 %; calls take {min(taken):.2f} to "
        f"{max(taken):.2f} times what is predicted. The number of GPUs that is chosen loses "
        f"{100 * lost:.0f} % at worst, over {len(cells)} products."
    )


def _folded(title: str, columns: list[str], rows: list[list], said: str) -> str:
    return paragraphs(
        title,
        f"<details><summary>{len(rows)} products</summary>",
        grid(columns, rows),
        "</details>",
        said,
    )
