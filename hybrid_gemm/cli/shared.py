"""What the subcommands share: flags, notes, the bar, and how results are written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from ..errors import HybridGemmError, UsageError
from ..host.notes import on_stderr
from ..options import Options
from .help import talk
from .option_types import DTYPES, WHOLE, File, List, OptionType, known, parameters, shapes


def say(message: str) -> None:
    """A line on stderr, unless it was to be quiet."""
    if not talk.quiet:
        complain(message.replace("\n", "\\n"))  # of a file's name


def complain(message: str) -> None:
    """Writes on stderr, where that takes it. By `print`, which a bar on the screen steps aside
    for."""
    with stderr_may_fail():
        print(on_stderr(message), file=sys.stderr, flush=True)


@contextlib.contextmanager
def stderr_may_fail() -> Iterator[None]:
    """Around words on stderr: a full disk there is no reason to fail."""
    try:
        yield
    except OSError:  # what is left of it would fail again when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def flags_of(asked: type, *names: str, **more: dict[str, Any]) -> Callable:
    """The flags of a dataclass's fields, or of those of these names, as a decorator: of fields that
    have help in their metadata, or are choices of `Options`. `more` is what click takes of some
    besides. Numbers are whole."""

    def decorate(command: Callable) -> Callable:
        for each in reversed(dataclasses.fields(asked)):
            choice, how = each.metadata.get("choice"), {**each.metadata, **more.get(each.name, {})}
            if choice and not choice.of_calls:
                kind = OptionType(each.name, choice)
                how = {"help": choice.help, "metavar": choice.metavar, "type": kind}
            if "help" not in how or (names and each.name not in names):
                continue
            flags = how.pop("names", ()) or (f"--{each.name.replace('_', '-')}",)
            if each.default is False:
                how = {"is_flag": True, "help": how["help"]}
            elif each.name == "params":  # as often as wanted
                flags, how["type"], how["multiple"] = ("--param",), str, True
                how["callback"] = lambda _context, _parameter, given: parameters(given)
            elif not isinstance(each.default, str | tuple):
                how.setdefault("type", WHOLE)
            command = click.option(*flags, each.name, default=each.default, **how)(command)
        return command

    return decorate


device_option = flags_of(Options, "device")
json_option = click.option(
    "--json", "json_file", type=File(),
    help="Write the result as JSON, with its environment; - is stdout.",
)  # fmt: skip


def shapes_option(help: str, *names: str) -> Callable:
    """--shapes, whose help says at {} how they are written."""
    written = (
        "N or MxNxK, comma-separated; 1024:8192:1024 is each multiple of 1024, 1024:16384:x2 each "
        "power of 2."
    )
    return click.option(
        "--shapes", *names, type=List("1024,4096x4096x1024", shapes, several=True), metavar="LIST",
        help=help.format(written),
    )  # fmt: skip


def dtypes_option(help: str, default: str = "float32") -> Callable:
    """--dtype, of which there may be several."""
    return click.option(
        "--dtype", "dtypes", type=List("float32,int32", names=DTYPES), metavar="NAMES",
        default=default, help=help,
    )  # fmt: skip


DTYPES_HELP = (
    "Dtypes of A, B and C, comma-separated: float32, float64, int32, int64, float16, bfloat16."
)
layouts_option = click.option(
    "--layout", "layouts", type=List("nn,tt", names=known("catalog", "LAYOUTS")), metavar="NAMES",
    default="nn", help="Orders of A and B: n as they are, t transposed; comma-separated.",
)  # fmt: skip


def gpus_option(help: str) -> Callable:
    """--gpus, which means something else to each command."""
    return click.option("--gpus", type=List("0,1", int), metavar="0,1", help=help)


def _check_seed(_context: click.Context, _parameter: click.Parameter, seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed}: it takes 0 to 2^63 - 1")
    return seed


SEED: dict[str, Any] = {
    "type": WHOLE, "callback": _check_seed, "help": "The seed of generated input.",
}  # fmt: skip
seed_option = click.option("--seed", default=0, **SEED)
markdown_option = click.option(
    "--markdown", "markdown_file", type=File(), help="Write the table as Markdown."
)


def given_options(context: click.Context, names: Iterable[str]) -> set[str]:
    """Those of a command's options that the user gave."""
    default = click.core.ParameterSource.DEFAULT
    return {name for name in names if context.get_parameter_source(name) is not default}


def refuse_options(context: click.Context, others: Iterable[str], why: str) -> None:
    """Raises `UsageError` if the user gave one of the options `others`."""
    given = given_options(context, others)
    for parameter in context.command.params:
        if parameter.name in given:
            raise UsageError(f"{parameter.opts[0]} {why}")


@contextlib.contextmanager
def progress_bar(shown: bool = True):
    """A bar on stderr for work that lasts; yields `start(flops) -> advance(flops)`."""
    if talk.quiet or not (shown and sys.stderr.isatty()):
        yield lambda total, what: lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    # Rich's stand-in for stdout, before 14.3, says that it is no terminal.
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:

        def start(total, what):
            task = bar.add_task(what, total=total)
            return lambda amount: bar.advance(task, amount)

        yield start


def writable(json_file: str | None, *names: str | None, inputs=()) -> None:
    """Checks, before any work, that these files can be written, each once and over no input. JSON
    alone goes to stdout."""
    from ..arrays.output_files import check_output

    _check_stream(json_file)
    seen = set()
    for name in (x for x in (None if json_file == "-" else json_file, *names) if x is not None):
        target = check_output(name, inputs)
        if target in seen:
            raise UsageError(f"{name} was given for two outputs; give each a file of its own")
        seen.add(target)


def _check_stream(json_file: str | None) -> None:
    """Raises `UsageError` where JSON is to go to a standard output that is closed."""
    if json_file == "-" and sys.__stdout__ is None:
        raise UsageError("--json - writes to standard output, which is closed; give a file name")


@contextlib.contextmanager
def reading_results(*names: str) -> Iterator[None]:
    """Around what takes a result file's data apart: `UsageError` where parts of it are missing, or
    of another kind. `names` are the files'."""
    try:
        yield
    except HybridGemmError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{' or '.join(dict.fromkeys(names))} is no whole result of bench, run or reproduce"
        ) from error


def write_result(
    data: dict, json_file: str | None, show: Callable[[], None],
    write_more: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """JSON where it was asked for, the table on stdout unless JSON is there; `write_more` writes
    other files of the result.

    Files come first, since who reads stdout may have gone, as `head` does. Where one cannot be
    written, the table is shown before the error.
    """
    _check_stream(json_file)
    named = None
    if json_file:
        from ..reporting.console import as_json, write
        from ..reporting.environment import command_line, environment

        text = as_json({"command": command_line(), **data, "environment": environment()})
        if json_file == "-":
            show = functools.partial(click.echo, text)
        else:
            named = functools.partial(write, json_file, text + "\n")
    try:
        if named:
            named()
        write_more()
    except (OSError, HybridGemmError):
        with contextlib.suppress(BrokenPipeError, SystemExit):  # the latter is rich's
            show()
        raise
    show()
