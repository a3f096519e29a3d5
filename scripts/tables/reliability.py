"""Random products, headers, memory, checks: docs/notes/campaigns.md, docs/reliability.md."""

import collections
from statistics import geometric_mean

from . import grid, paragraphs, result

FUZZ = (
    "cpu", "cpu_small", "cpu_ranks", "emulator", "emulator_again", "emulator_more",
    "emulator_small", "emulator_ranks", "cuda", "cuda_small",
)  # fmt: skip


def products() -> str:
    """Random products by device, ranks and size of pieces."""
    rows = [
        [data["device"], data.get("ranks", ""), "small" if data["small_pieces"] else "usual",
         *(f"{data[x]:,}" for x in ("products", "right", "refused", "wrong", "exception")),
         data["seed"], f"[figures](results/fuzz_{name}.json)"]
        for name, data in ((name, result("fuzz", name)) for name in FUZZ)
    ]  # fmt: skip
    names = [
        "<device",
        "ranks",
        "<pieces",
        "products",
        "right",
        "refused",
        "wrong",
        "exceptions",
        "seed",
    ]
    return grid([*names, "<"], rows)


def headers() -> str:
    """Damaged files by reader."""
    named = {
        "npy": "`.npy` files", "npy_mended": "`.npy` files, after the mends",
        "kernel": "kernel headers", "kernel_again": "kernel headers, after the mends",
        "kernel_mended": "kernel headers, after the last mend",
    }  # fmt: skip
    rows = []
    for what, words in named.items():
        data = result("fuzz", what)
        rows.append([
            words, data["engine"], f"{data['inputs']:,}", f"{data['accepted']:,}",
            len(data["faults"]), f"{data['slowest_ms']:.0f}", data["most_memory_mib"],
            f"[figures](results/fuzz_{what}.json)",
        ])  # fmt: skip
    names = ["<what", "<engine", "inputs", "read", "faults", "slowest (ms)", "memory (MiB)", "<"]
    return grid(names, rows)


def memory() -> str:
    """Allocations that fail, new shapes, runners that are dropped, and mixed products."""
    data = result("memory", "cpu")
    scarce = [
        row for card in ("emulator", "cuda") for row in result("memory_scarce", card)["scarce"]
    ]
    rows = (
        [x["configuration"], x["allocations"], x["right"], x["refused"], x["incomplete"],
         max(0, x["bytes_leaked"]), len(x["wrong"])]
        for x in (*data["shortage"], *scarce)
    )  # fmt: skip
    columns = ["<configuration", "allocations", "right", "refused, `out` untouched",
               "refused, `out` said to be incomplete", "bytes leaked", "wrong"]  # fmt: skip
    said = [
        f"- **New shapes** ({x['device']}): {x['shapes']:,} by one runner; the second half of them "
        f"grew memory by {x['grown_mib']:.1f} MiB."
        for x in data["shapes"]
    ]
    said += [
        f"- **Dropped runners** ({x['device']}): {x['runners']}; threads {x['threads'][0]} before "
        f"and {x['threads'][1]} after, descriptors {x['descriptors'][0]} and "
        f"{x['descriptors'][1]}, memory {x['grown_mib']:+.1f} MiB."
        for x in data["runners"]
    ]
    said += [sentence(card) for sentence in (mixed, again) for card in ("cpu", "cuda")]
    others = ", ".join(f"[{x}](results/memory_scarce_{x}.json)" for x in ("emulator", "cuda"))
    return paragraphs(
        grid(columns, rows),
        "\n".join(said),
        f"([figures](results/memory_cpu.json); of device and page-locked memory {others})",
    )


def mixed(card: str) -> str:
    """One sentence on products of all kinds."""
    (found,) = result("memory_mixed", card)["mixed"]
    where = "a GPU" if card == "cuda" else "CPU and emulator"
    on_card = f", memory of the GPU {found['cards_grown_mib']:+.1f} MiB" if card == "cuda" else ""
    return (
        f"- **Products of all kinds** for {found['seconds'] / 60:.1f} minutes on {where} "
        f"([figures](results/memory_mixed_{card}.json)): {found['right']:,} right, "
        f"{found['refused']:,} refused, {len(found['failures'])} failed; "
        f"{found['mib_after_half']:.0f} MiB after half the time, {found['mib_last']:.0f} MiB at "
        f"the end ({found['grown_mib']:+.1f} MiB{on_card})."
    )


def again(card: str) -> str:
    """One sentence on the same products, made more than once."""
    (found,) = result("memory_again", card)["again"]
    where = "a GPU" if card == "cuda" else "CPU and emulator"
    rounds = len(found["rounds"])
    return (
        f"- **The same {found['products']:,} products of all kinds, {rounds} times** on {where} "
        f"([figures](results/memory_again_{card}.json)): {len(found['failures'])} failed; from the "
        f"second time to the last, memory grew by {found['grown_mib']:.1f} MiB, and what malloc "
        f"has given out by {found['given_out_grown_mib']:.1f} MiB."
    )


def checked() -> str:
    """Faults planted in checked products, right products, and what checks cost, by device."""
    found = [
        (card, result("checked", card))
        for card in ("cpu", "emulator", "cuda", "cuda_more", "cuda_two")
    ]
    rows = [
        [f"[{card.partition('_')[0]}{', two GPUs' * (data.get('gpus', 0) == 2)}]"
         f"(results/checked_{card}.json)",
         *(f"{data['total'].get(x, 0):,}" for x in ("planted", "above", "found above",
                                                    "same bits above", "found")),
         *(f"{data['alarms'].get(x, 0):,}" for x in ("products", "sums compared", "repeated",
                                                     "confirmed"))]
        for card, data in found
    ]  # fmt: skip
    columns = ["<device", "faults", "above the limit", "of these found", "of these mended",
               "found in all", "right products", "sums compared", "false alarms",
               "confirmed"]  # fmt: skip
    return grid(columns, rows)


ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}  # others are float32
BYTES_PER_MS = 4.2e9  # that an H200 reads


def checking_cost() -> str:
    """What checks cost on a GPU, by arithmetic and size, and what reading A, B and C once takes."""
    data = result("checked_cost")
    rows = []
    for x in data["overhead"]:
        reading = 3 * x["size"] ** 2 * ITEM_BYTES.get(x["arithmetic"], 4) / BYTES_PER_MS
        rows.append([
            x["arithmetic"], x["size"], f"{x['device plain ms']:.3f}",
            f"{x['device checked ms']:.3f}", f"{100 * x['device cost']:.1f} %",
            f"{100 * reading / x['device plain ms']:.1f} %", f"{100 * x['gemm cost']:.1f} %",
            f"{100 * x['loop cost']:.1f} %",
        ])  # fmt: skip
    names = ["<arithmetic", "m = n = k", "product (ms)", "checked (ms)", "cost",
             "of reading A, B, C once", "of a whole `gemm`", "of `gemm` in a loop"]  # fmt: skip
    (gpu,) = {x["name"] for x in data["environment"]["cuda"]["gpus"]}
    return paragraphs(grid(names, rows), f"({gpu}, [figures](results/checked_cost_h200.json))")


def checking_drawn() -> str:
    """How many times as long a checked call takes at shapes drawn at random, by class."""
    data = result("checked_drawn")
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for x in data["overhead"]:
        times[x["kind"], x["arithmetic"]].append(x["checked ms"] / x["plain ms"])
    rows = [
        [*way, len(found), f"{geometric_mean(found):.1f}", f"{max(found):.1f}"]
        for way, found in times.items()
    ]
    names = ["<shapes", "<arithmetic", "products", "mean", "worst"]
    (gpu,) = {x["name"] for x in data["environment"]["cuda"]["gpus"]}
    return paragraphs(grid(names, rows), f"({gpu}, [figures](results/checked_drawn_h200.json))")


def verdicts() -> str:
    """Verdicts that were made again, by file, and those that are left."""
    data = result("verdicts")
    made = collections.defaultdict(list)
    for row in data["rows"]:
        made[row.get("file", "")].append(row)
    wanted = {"": len(made[""]), **data["products"]}
    rows = [
        [f"[{name}](results/{name})" if name else "over two devices that one GPU plays",
         sum(data["held"].get(name, {}).values()) or "", count, len(made[name]),
         sum(not x["passed"] for x in made[name]),
         f"{max((x['worst'] for x in made[name]), default=0):.2f}"]
        for name, count in wanted.items()
    ]  # fmt: skip
    names = ["<file", "old verdicts", "products", "judged again", "wrong",
             "largest error of its bound"]  # fmt: skip
    left = sum(name not in data["products"] for name in data["held"])
    return paragraphs(
        grid(names, rows),
        "([figures](results/verdicts_h200.json), each with its power)",
        f"Verdicts of {left} other files are as they were.",
    )
