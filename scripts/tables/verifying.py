"""What verification finds, as docs/notes/verification.md tells it."""

from . import grid, result


def found() -> str:
    """Faults as large as verdicts say that they find."""
    rows = []
    for name in ("verify_power", "verify_power_large"):
        data = result(name, "cpu")
        for of in ("size", "fault"):
            rows += [
                [f"[{name.removeprefix('verify_')}](../results/{name}_cpu.json)",
                 f"{size} x {size}" if of == "size" else size, x["planted"], x["found"]]
                for size, x in data["faults"][of].items()
            ]  # fmt: skip
        rows.append([name, f"right products: {data['clean']}", "", data["false_alarms"]])
    return grid(["<file", "<of these", "planted", "found"], rows)


def smallest() -> str:
    """The smallest faults that `auto` finds."""
    now, before = (
        {(x["arithmetic"], x["size"], x["fault"]): x for x in result(name, "cpu")["smallest"]}
        for name in ("verify_power", "verify_power_before")
    )
    rows = []
    for key, x in now.items():
        then = before.get(key)
        rows.append([
            x["arithmetic"], x["size"], x["fault"], f"{x['half']:.0f}", f"{x['nine_in_ten']:.0f}",
            *([f"{then['half']:.0f}", f"{then['nine_in_ten']:.0f}"] if then else ["", ""]),
        ])  # fmt: skip
    columns = [
        "<arithmetic", "m = n = k", "<fault", "half found", "nine in ten",
        "half, every element compared", "nine in ten, the same",
    ]  # fmt: skip
    return grid(columns, rows)
