"""Results on the screen and in files: JSON, CSV, Markdown and pictures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..arrays import output_files
from ..errors import UsageError
from ..reporting import console, markdown, plots, report
from ..reporting.pictures import Picture, machine
from .base import CONFIRMED, REFUTED, Experiment, Rows
from .engine import experiments

RESULTS = "results.json"
_UNITS = {
    "gflops": "gflop/s", "gbps": "GB/s", "of_peak": "of peak", "m_and_n": "m = n",
    "local_bytes": "local bytes a thread", "shared_bytes": "shared bytes a block",
    "loads_a_madd": "loads a multiply-add", "flop_per_byte": "flop/byte",
    "roofline_gflops": "roofline gflop/s", "warp_sectors": "sectors a warp",
    "block_threads": "threads a block", "worst_error_of_bound": "error / bound",
    "bytes_h2d": "bytes to device", "bytes_d2h": "bytes back",
}  # fmt: skip


def heading(column: str) -> str:
    """A column's name with its unit, for people."""
    for prefix in ("published_", "ratio_"):
        if column.startswith(prefix):
            figure = heading(column.removeprefix(prefix))
            return f"published {figure}" if prefix == "published_" else f"ours / published {figure}"
    if column in _UNITS:
        return _UNITS[column]
    name, _, unit = column.rpartition("_")
    return (
        f"{name.replace('_', ' ')} ({unit})" if unit in ("ms", "us") else column.replace("_", " ")
    )


def cell(value: object) -> str:
    """A value as text: numbers with four digits, None as nothing."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return str(value)


def columns(experiment: Experiment, rows: Rows) -> list[str]:
    """The experiment's columns that have anything in them, and the notes if there are any."""
    return [
        c for c in (*experiment.columns, "note") if any(r.get(c) not in (None, "") for r in rows)
    ]


def show(data: Mapping[str, Any]) -> None:
    """Prints a result (of `engine.run`): each experiment as a table, with its verdicts."""
    known = experiments()
    for result in data["experiments"]:
        experiment, rows = known[result["name"]], Rows(result["rows"])
        shown = columns(experiment, rows)
        if data["device"]["kind"] == "emulator":  # whose rates order kernels otherwise than a GPU's
            shown = [column for column in shown if column != "gflops"]
        text = {c for c in shown if any(isinstance(r.get(c), str) for r in rows)}
        console.line("")
        console.line(f"{experiment.title}: {experiment.question}", style="bold")
        console.table(
            [("<" if c in text else "") + heading(c) for c in shown],
            [[report.note(r) if c == "note" else cell(r.get(c)) for c in shown] for r in rows],
        )
        for v in result["verdicts"]:
            status = v["status"]
            console.line(f"{status}: {v['claim']}", 6, first=2, style=_STYLE.get(status))
            console.line(v["because"], 6)
    tally = summary(data)
    console.line("")
    for said in _modelled(data):
        console.line(said)
    console.line(
        f"{', '.join(f'{n} {status}' for status, n in tally.items())}; "
        f"{data['seconds']:.0f} s on {data['device']['name']}"
    )


def _modelled(data: Mapping[str, Any]) -> list[str]:
    """Which columns were not measured, where there is no GPU."""
    found = {c for r in data["experiments"] for row in r["rows"] for c, x in row.items() if x}
    lines = []
    if data["machine"]["assumed"] and "occupancy" in found:
        name = data["machine"]["name"]
        lines.append(f"Occupancy, waves and roofline are computed, for an {name}.")
    if data["device"]["kind"] == "cpu" and "bytes_h2d" in found:
        lines.append("Bytes are what a GPU's link would carry by the same plan.")
    return lines


_STYLE = {CONFIRMED: "green", REFUTED: "red"}


def summary(data: Mapping[str, Any]) -> dict[str, int]:
    """How many claims of a result have which verdict."""
    out: dict[str, int] = {}
    for result in data["experiments"]:
        for v in result["verdicts"]:
            out[v["status"]] = out.get(v["status"], 0) + 1
    return out


def as_csv(experiment: Experiment, rows: Rows) -> str:
    """All that was measured as CSV: the shown columns first, then the others."""
    others = (name for row in rows for name in row)
    return markdown.csv_of(list(dict.fromkeys([*columns(experiment, rows), *others])), rows)


def as_markdown(experiment: Experiment, rows: Rows, leave_out: Iterable[str] = ()) -> str:
    """The shown columns, less some, as a Markdown table."""
    shown = [c for c in columns(experiment, rows) if c not in leave_out]
    text = {c for c in shown if any(isinstance(r.get(c), str) for r in rows)}
    headings = [("<" if c in text else "") + heading(c) for c in shown]
    return markdown.table(headings, [[cell(r.get(c)) for c in shown] for r in rows])


def verdict_lines(verdicts: Iterable[Mapping[str, str]]) -> list[str]:
    """The verdicts as lines of a Markdown list."""
    return [f"- **{v['status']}**: {v['claim']} {_sentence(v['because'])}" for v in verdicts]


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def digest(result: Mapping[str, Any]) -> str:
    """A hash of one experiment's rows, which its picture carries: it says if that is current."""
    text = console.as_json({"rows": result["rows"]})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pictures_of(data: Mapping[str, Any]) -> dict[str, Picture]:
    """The picture of each experiment in a result that has one, by name; empty for data of another
    kind."""
    if "experiments" not in data:
        return {}
    known, where = experiments(), machine(data["device"]["name"])
    return {
        each.name: each.picture(Rows(result["rows"]), each.theirs(), where)
        for result in data["experiments"]
        if (each := known.get(result["name"])) and each.picture
    }


def pictures(data: Mapping[str, Any]) -> dict[str, bytes]:
    """The picture of each experiment, drawn as SVG, by name."""
    by_name = {result["name"]: result for result in data["experiments"]}
    return {
        name: plots.draw(picture, "svg", f"rows {digest(by_name[name])}")
        for name, picture in pictures_of(data).items()
    }


def write(directory: str, data: Mapping[str, Any]) -> None:
    """Writes a result into a folder: JSON, CSV, a report and pictures, each whole or not at all.

    All are on the disk before the first takes its place. In a folder with earlier results only
    what those wrote is replaced or removed. Raises `UsageError` for other folders that are not
    empty, and for a place that cannot be written.
    """
    check_directory(directory)
    target = Path(os.path.realpath(directory))
    known, old = experiments(), _earlier(target) or []
    files: dict[str, bytes] = {}
    for result in data["experiments"]:
        experiment, rows = known[result["name"]], Rows(result["rows"])
        files[f"{experiment.name}.csv"] = as_csv(experiment, rows).encode()
    files["report.md"] = _report(data).encode()
    files |= {f"{name}.svg": image for name, image in pictures(data).items()}
    files[RESULTS] = f"{console.as_json(dict(data))}\n".encode()  # the last
    made = not target.exists()
    target.mkdir(exist_ok=True)
    try:
        output_files.write_files({str(target / name): content for name, content in files.items()})
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # it holds files by now
                target.rmdir()
        raise
    for name in {f"{x}{ending}" for x in old for ending in (".csv", ".svg")} - files.keys():
        (target / name).unlink(missing_ok=True)


def check_directory(directory: str) -> None:
    """Raises `UsageError` if `write` could not write there, `UnavailableError` without
    matplotlib."""
    plots.needed()
    if not directory:
        raise UsageError("cannot write results: '' names no folder")
    if not os.path.isdir(directory):
        if os.path.exists(directory):
            raise UsageError(f"cannot write results to {directory}: it is a file; name a folder")
        output_files.check_output(directory.rstrip(os.sep))  # that can be made where a file can
        return
    output_files.check_output(os.path.join(directory, RESULTS))
    if os.listdir(directory) and _earlier(Path(directory)) is None:
        raise UsageError(
            f"cannot write results to {directory}: it holds other files, and no {RESULTS} of "
            "reproduce; name a new folder"
        )


def _earlier(folder: Path) -> list[str] | None:
    """The experiments of this package whose results a folder holds; None where it holds none."""
    try:
        found = load(str(folder))["experiments"]
        return [x["name"] for x in found if x["name"] in experiments()]
    except (UsageError, LookupError, TypeError):
        return None


def _report(data: Mapping[str, Any]) -> str:
    """A result as a page of Markdown, with links to the pictures."""
    known = experiments()
    lines = [f"# Experiments on {data['device']['name']}", ""]
    lines += [f"`{data['command']}`", ""] if "command" in data else []
    for said in _modelled(data):
        lines += [said, ""]
    for result in data["experiments"]:
        experiment, rows = known[result["name"]], Rows(result["rows"])
        lines += [f"## {experiment.title}", "", f"{experiment.question} ({experiment.source})", ""]
        if experiment.picture:
            lines += [f"![{experiment.title}]({experiment.name}.svg)", ""]
        lines += [as_markdown(experiment, rows), "", *verdict_lines(result["verdicts"]), ""]
    return "\n".join(lines)


def load(path: str, give: str = "give a result of reproduce") -> dict[str, Any]:
    """The data of a result file, or of a folder that `reproduce -o` wrote.

    Raises `UsageError` if there is no such file, or it holds no JSON object; `give` is what it says
    then of the files that the caller takes.
    """
    place = os.path.join(path, RESULTS) if os.path.isdir(path) else path
    try:
        # Asked before opening: opening a named pipe would wait for a writer.
        reason = output_files.not_a_file(os.stat(place).st_mode)
        text = "" if reason else Path(place).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{place or repr(place)}: no such file") from None
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{place} is not JSON; {give}") from None
    if reason:
        raise UsageError(f"{place} {reason}; {give}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # also an integer of thousands of digits
        raise UsageError(f"{place} is not JSON; {give}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{place} holds no result; {give}")
    return data
