"""`hybrid-gemm compare`: what changed between two results."""

from __future__ import annotations

import click

from ..errors import SlowerError, UsageError, VerificationError, counted
from . import shared
from .help import Command
from .option_types import File


@click.command(
    cls=Command,
    groups={"Measuring": ("least",), "Output": ("json_file", "markdown_file")},
    examples=[
        ("Keep what there is, and measure again after a change:",
         "hybrid-gemm bench --shapes 1024:4096:x2 --json old.json"),
        ("Say which rows are faster, slower or within noise:",
         "hybrid-gemm compare old.json new.json"),
        ("Let a change count from 5 % on, and write a table:",
         "hybrid-gemm compare old.json new.json --least 0.05 --markdown change.md"),
    ],
)  # fmt: skip
@click.argument("old", type=File(), metavar="OLD.json")
@click.argument("new", type=File(), metavar="NEW.json")
@click.option(
    "--least",
    type=float,
    default=0.02,
    metavar="FRACTION",
    help="The least change that counts, as a fraction of the old time.",
)
@shared.json_option
@shared.markdown_option
def compare(
    old: str, new: str, least: float, json_file: str | None, markdown_file: str | None
) -> None:
    """Compare two results of bench or run, row by row.

    A row is faster or slower where its medians differ by more than their noise. The exit code is
    4 if a row is slower, and 3 if a new product is wrong.
    """
    from ..bench import compare as comparing
    from ..bench.compare import GIVE
    from ..bench.study import FAILED
    from ..experiments.output import load
    from ..reporting import console, markdown

    if not 0 <= least < 1:
        raise UsageError(
            f"--least {least:g}: it takes a fraction of at least 0 and below 1, such as 0.02"
        )
    shared.writable(json_file, markdown_file, inputs=[old, new])
    before, after = load(old, GIVE), load(new, GIVE)
    with shared.reading_results(old, new):
        data = comparing.compare(before, after, names=(old, new), least=least)
        table, words = comparing.table(data), comparing.words(data)
    if len(set(data["devices"])) > 1:
        shared.say(f"note: the devices differ: {' and '.join(map(repr, data['devices']))}")
    if markdown_file:
        console.write(markdown_file, f"{markdown.table(table.headings, table.rows)}\n\n{words}\n")

    def show() -> None:
        console.table(table.headings, table.rows, title=table.title)
        console.line(words)

    shared.write_result(data, json_file, show)
    if wrong := sum(row.get("verdict") == FAILED for row in comparing.rows_of(after, new)):
        raise VerificationError(f"{counted(wrong, 'row')} of {new} with a wrong product")
    if slower := data["counts"][comparing.SLOWER]:
        raise SlowerError(f"{slower} of {len(data['rows'])} rows are slower")
