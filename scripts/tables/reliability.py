"""Random products, damaged headers, and memory: docs/reliability.md."""

from . import ROOT, grid, result

PIECES = tuple(
    pieces for device in ("cpu", "emulator", "cuda")
    for pieces in (("fuzz", device), (f"fuzz_{device}", "small"))
)  # fmt: skip


def products() -> str:
    """Random products by device and size of pieces."""
    found = [(f"{name}_{card}.json", result(name, card)) for name, card in PIECES]
    rows = [
        [data["device"], "small" if data["small_pieces"] else "usual",
         *(f"{data[x]:,}" for x in ("products", "right", "refused", "wrong", "exception")),
         data["seed"], f"[figures](results/{name})"]
        for name, data in found
    ]  # fmt: skip
    names = ["<device", "<pieces", "products", "right", "refused", "wrong", "exceptions", "seed"]
    return "\n".join(grid([*names, "<"], rows))


def headers() -> str:
    """Damaged files by reader."""
    named = {
        "npy": "`.npy` files", "kernel": "kernel headers",
        "kernel_mended": "kernel headers, after the mend",
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
    return "\n".join(grid(names, rows))


def memory() -> str:
    """Allocations that fail, new shapes, runners that are dropped, and mixed products."""
    data = result("memory", "cpu")
    rows = (
        [x["configuration"], x["allocations"], x["right"], x["refused"], x["incomplete"],
         max(0, x["bytes_leaked"]), len(x["wrong"])]
        for x in data["shortage"]
    )  # fmt: skip
    columns = ["<configuration", "allocations", "right", "refused, `out` untouched",
               "refused, `out` said to be incomplete", "bytes leaked", "wrong"]  # fmt: skip
    lines = [*grid(columns, rows), ""]
    lines += [
        f"- **New shapes** ({x['device']}): {x['shapes']:,} by one runner; the second half of them "
        f"grew memory by {x['grown_mib']:.1f} MiB."
        for x in data["shapes"]
    ]
    lines += [
        f"- **Dropped runners** ({x['device']}): {x['runners']}; threads {x['threads'][0]} before "
        f"and {x['threads'][1]} after, descriptors {x['descriptors'][0]} and "
        f"{x['descriptors'][1]}, memory {x['grown_mib']:+.1f} MiB."
        for x in data["runners"]
    ]
    (mixed,) = result("memory_mixed", "cpu")["mixed"]
    lines.append(
        f"- **Products of all kinds** for {mixed['seconds'] / 60:.0f} minutes on CPU and emulator: "
        f"{mixed['right']:,} right, {mixed['refused']:,} refused, {len(mixed['failures'])} failed; "
        f"{mixed['mib_after_half']:.0f} MiB after half the time, {mixed['mib_last']:.0f} MiB at "
        f"the end ({mixed['grown_mib']:+.1f} MiB)."
    )
    return "\n".join([*lines, "", "([figures](results/memory_cpu.json), "
                      "[of the mixed products](results/memory_mixed_cpu.json))"])  # fmt: skip


def checked() -> str:
    """Faults planted in checked products, right products, and what checks cost, by device."""
    found = [
        (card, result("checked", card))
        for card in ("cpu", "emulator", "cuda")
        if (ROOT / f"docs/results/checked_{card}.json").exists()
    ]
    rows = [
        [f"[{card}](results/checked_{card}.json)",
         *(f"{data['total'].get(x, 0):,}" for x in ("planted", "above", "found above",
                                                    "same bits above", "found")),
         *(f"{data['alarms'].get(x, 0):,}" for x in ("products", "sums compared", "repeated",
                                                     "confirmed"))]
        for card, data in found
    ]  # fmt: skip
    columns = ["<device", "faults", "above the limit", "of these found", "of these mended",
               "found in all", "right products", "sums compared", "false alarms",
               "confirmed"]  # fmt: skip
    return "\n".join(grid(columns, rows))


def checking_cost() -> str:
    """What checks cost on a GPU, by arithmetic and size."""
    data = result("checked_cost")
    rows = [
        [x["arithmetic"], x["size"], f"{x['device plain ms']:.3f}",
         f"{x['device checked ms']:.3f}", f"{100 * x['device cost']:.1f} %",
         f"{100 * x['gemm cost']:.1f} %"]
        for x in data["overhead"]
    ]  # fmt: skip
    names = ["<arithmetic", "m = n = k", "product (ms)", "checked (ms)", "cost",
             "cost of a whole `gemm`"]  # fmt: skip
    (gpu,) = {x["name"] for x in data["environment"]["cuda"]["gpus"]}
    return "\n".join(
        [*grid(names, rows), "", f"({gpu}, [figures](results/checked_cost_h200.json))"]
    )
