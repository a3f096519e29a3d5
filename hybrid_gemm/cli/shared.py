"""What the subcommands share: option types, notes, the bar, and how results are written."""

from __future__ import annotations

import contextlib
import sys

import click

from ..errors import UsageError


def say(message: str) -> None:
    click.echo(message, err=True)


class List(click.ParamType):
    """Comma-separated values; `each` turns one into what the command wants."""

    def __init__(self, name: str, each=str):
        self.name, self.each = name, each

    def convert(self, value, param, ctx):
        if isinstance(value, list):
            return value
        try:
            return [self.each(x) for x in value.split(",") if x]
        except ValueError:
            self.fail(f"{value!r} is not a list such as {self.name}", param, ctx)


class Bytes(click.ParamType):
    """A number of bytes, with a unit or without."""

    name = "size"

    def convert(self, value, param, ctx):
        if isinstance(value, int):
            return value
        number = value.rstrip("BiKMGT")
        unit = value[len(number) :].removesuffix("B")
        base = 1024 if unit.endswith("i") else 1000
        try:
            return int(float(number) * base ** ["", "K", "M", "G", "T"].index(unit[:1]))
        except ValueError:
            self.fail(f"{value!r} is not a size such as 8GiB or 500MB", param, ctx)


def parameters(given: tuple[str, ...]) -> dict[str, int]:
    out = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not value.lstrip("-").isdigit():
            raise UsageError(f"--param {text}: it takes NAME=NUMBER, such as BM=128")
        out[name] = int(value)
    return out


def shape(text: str) -> tuple[int, int, int]:
    sides = [int(x) for x in text.lower().split("x")]
    if len(sides) not in (1, 3) or min(sides) < 0:
        raise ValueError(text)
    return tuple(sides * 3 if len(sides) == 1 else sides)


device_option = click.option(
    "--device",
    default="auto",
    metavar="NAME",
    help="auto, cuda, cpu or emulator.",
    show_default=True,
)
json_option = click.option(
    "--json", "json_file", metavar="FILE", help="Write the result as JSON; - is stdout."
)


@contextlib.contextmanager
def progress_bar(shown: bool = True):
    """A bar on stderr for work that lasts; yields `start(flops) -> advance(flops)`."""
    if not (shown and sys.stderr.isatty()):
        yield lambda total, what: lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def start(total, what):
            task = bar.add_task(what, total=total)
            return lambda amount: bar.advance(task, amount)

        yield start


def writable(*names: str | None, inputs=()) -> None:
    """Checks, before any work, that these files can be written, each once and over no input."""
    from ..arrays.npy_files import check_output

    seen = set()
    for name in filter(None, names):
        target = name if name == "-" else check_output(name, inputs)
        if target in seen:
            raise UsageError(f"{name} was given for two outputs; give each a file of its own")
        seen.add(target)


def write_result(data: dict, json_file: str | None, show) -> None:
    """JSON where it was asked for, the table on stdout unless JSON is there."""
    if json_file != "-":
        show()
    if json_file:
        from ..reporting.console import as_json
        from ..reporting.environment import command_line, environment

        data = {"command": command_line(), **data, "environment": environment()}
        if json_file == "-":
            click.echo(as_json(data))
        else:
            from ..reporting.console import write

            write(json_file, as_json(data) + "\n")
