"""Commands whose help has groups of options, full sentences and examples; and `-v` and `-q`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from ..errors import nearest
from ..host import notes
from ..options import CHOICES
from ..ranks import launch
from ..ranks.slurm import ENDED

GENERAL = "Other options"
_READ = "HYBRID_GEMM_CACHE", "HYBRID_GEMM_KERNELS"
# Of scripts/slurm-cluster, whose jobs have it too, and of what `slurm` prints.
_OF_SCRIPTS = "HYBRID_GEMM_SLURM", ENDED
Examples = Sequence[tuple[str, str]]  # what it does, as a sentence; the command line


@dataclass
class Talk:
    """How much the command says: `quiet` is results and errors alone; `verbose` adds what is left
    out otherwise."""

    quiet: bool = False
    verbose: bool = False


talk = Talk()


def _set(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    assert parameter.name is not None
    setattr(talk, parameter.name, value)
    if talk.quiet and talk.verbose:
        raise click.UsageError("--quiet and --verbose were given; give one of them")
    notes.quiet = talk.quiet


def _talk_options() -> list[click.Parameter]:
    return [
        click.Option(
            ["-v", "--verbose"], is_flag=True, expose_value=False, callback=_set, is_eager=True,
            help="Say more: the plan before a result, every repetition, tracebacks of errors.",
        ),
        click.Option(
            ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_set, is_eager=True,
            help="Write nothing on stderr but errors: no notes and no progress bar.",
        ),
    ]  # fmt: skip


class _WithExamples(click.Command):
    """A command whose help ends with examples; a command line of theirs is never broken."""

    examples: Examples = ()

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.examples:
            return
        with formatter.section("Examples"):
            for sentence, line in self.examples:
                formatter.write_text(sentence)
                formatter.write(f"{'':{formatter.current_indent + 2}}{line}\n")


class Command(_WithExamples):
    """A subcommand. `groups` are the headings of its options with the parameters' names; those of
    `Options` have their own, and what is left is under "Other options". Its help shows defaults.
    `ranks` says that a launcher may start it as several ranks."""

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]] | None = None,
        examples: Examples = (), ranks: bool = False, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **keywords)
        self.ranks = ranks
        self.params += _talk_options()
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                parameter.show_default = parameter.default != ""
        self.examples = examples
        self._group = {name: choice.group for name, choice in CHOICES.items()}
        for heading, names in (groups or {}).items():
            self._group |= dict.fromkeys(names, heading)
        self._order = list(groups or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; a misspelt option is told the nearest one only."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for p in self.params for name in p.opts]
            name = error.option_name
            if not name.startswith("--"):  # -s, of -size
                name = next((x.split("=")[0] for x in given if x.startswith(name)), name)
            raise click.NoSuchOption(
                name, f"No such option {name!r}{nearest(name, known)}", ctx=ctx
            ) from None
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # whose help is named
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """As click's, where one process is all that there is or `ranks` allows more."""
        for name in os.environ:
            if name.startswith("HYBRID_GEMM_") and name not in (*_READ, *_OF_SCRIPTS):
                notes.note(f"{name} is set, and nothing reads it; {' and '.join(_READ)} are read")
        if not self.ranks:
            launch.alone(ctx.command_path)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options under their headings."""
        listed: dict[str, list[tuple[str, str]]] = {heading: [] for heading in self._order}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                heading = self._group.get(parameter.name or "", GENERAL)
                listed.setdefault(heading, []).append(record)
        listed[GENERAL] = listed.pop(GENERAL, [])  # the last
        for heading, records in listed.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Group(_WithExamples, click.Group):
    """The command itself, which lists its subcommands in the order in which they were added."""

    def __init__(self, *args: Any, examples: Examples = (), **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.examples = examples

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; where an option has no command before it, a command that takes it is told."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            for command in self.commands.values():
                if any(name in parameter.opts for parameter in command.params):
                    line = f"{ctx.command_path} {command.name} {name}"
                    raise click.NoSuchOption(
                        name, f"{name} stands behind a command, as in: {line}", ctx=ctx
                    ) from None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; where files stand in the place of a command, the one that takes them is
        told."""
        if args[0].endswith(".npy"):
            line = f"{ctx.command_path} run A.npy B.npy"
            raise click.UsageError(f"{args[0]!r} is no command; to multiply files: {line}", ctx)
        return super().resolve_command(ctx, args)
