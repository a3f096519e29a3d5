"""What the subcommands share: option types, notes, the bar, and how results are written."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import UsageError
from ..options import AUTOMATIC_KERNELS, CHOICES, DEFAULTS, Choice

_WHOLE = re.compile(r"-?[0-9]+")


def say(message: str) -> None:
    """A line on stderr. By `print`, which a bar on the screen steps aside for."""
    print(message, file=sys.stderr, flush=True)


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


class OptionType(click.ParamType):
    """Text of one of `Options`' choices, parsed as that choice says."""

    def __init__(self, name: str, choice: Choice) -> None:
        self.name, self.choice = name, choice

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.choice.parse(value)
        except UsageError as error:
            raise UsageError(f"{param.opts[0] if param else self.name}: {error}") from None

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        names: Iterable[str] = self.choice.names
        if self.name == "kernel":
            from .. import catalog

            names = [*AUTOMATIC_KERNELS, *(kernel.name for kernel in catalog.gemm_kernels())]
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def option_flags(*names: str) -> Callable:
    """The flags of these choices of `Options` (default all), as a decorator.
    `params` is --param NAME=NUMBER, as often as wanted."""

    def decorate(command: Callable) -> Callable:
        for name in reversed(names or tuple(CHOICES)):
            choice, default = CHOICES[name], DEFAULTS[name]
            if name == "params":
                flag = click.option(
                    "--param", "params", multiple=True, metavar=choice.metavar, help=choice.help,
                    callback=lambda ctx, param, value: parameters(value),
                )  # fmt: skip
            else:
                flag = click.option(
                    f"--{name.replace('_', '-')}", name, type=OptionType(name, choice),
                    default=default, show_default=default is not None, metavar=choice.metavar,
                    help=choice.help,
                )  # fmt: skip
            command = flag(command)
        return command

    return decorate


def parameters(given: tuple[str, ...]) -> dict[str, int]:
    out = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not _WHOLE.fullmatch(value):
            raise UsageError(f"--param {text}: it takes NAME=NUMBER, such as BM=128")
        out[name] = int(value)
    return out


def shape(text: str) -> tuple[int, int, int]:
    sides = tuple(int(x) for x in text.lower().split("x"))
    if len(sides) not in (1, 3) or min(sides) < 0:
        raise ValueError(text)
    m, n, k = sides * 3 if len(sides) == 1 else sides
    return m, n, k


device_option = option_flags("device")
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
    for name in (x for x in names if x is not None):
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
