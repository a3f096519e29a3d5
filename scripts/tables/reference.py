"""Reference pages from the code: docs/cli.md from the help texts, docs/api.md from docstrings."""

import inspect
import re
import types

import click

import hybrid_gemm
from hybrid_gemm.cli import cli
from hybrid_gemm.options import CHOICES, DEFAULTS, OPTIONS_HEADING

from . import grid

WIDTH = 80  # of a terminal, for help texts
LINE = 88  # of a signature
EXAMPLE = r"(?m)^(?:>>>.*\n?(?:(?!>>>).+\n?)*)+"  # down to an empty line


def commands() -> str:
    """What `--help` prints of the command and of each subcommand."""
    name = "hybrid-gemm"
    top = click.Context(cli, info_name=name, terminal_width=WIDTH, **cli.context_settings)
    sections = [f"## {name}\n\n{_fenced(cli.get_help(top))}"]
    for sub in sorted(cli.commands):
        command = cli.commands[sub]
        context = click.Context(command, parent=top, info_name=sub, terminal_width=WIDTH)
        sections.append(f"## {name} {sub}\n\n{_fenced(command.get_help(context))}")
    return "\n\n".join(sections)


def _fenced(text: str, language: str = "text") -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return f"```{language}\n{lines}\n```"


def names() -> str:
    """Signature and docstring of every public name, with the methods of classes."""
    return "\n\n".join(_described(name, getattr(hybrid_gemm, name)) for name in _public())


def _public() -> list[str]:
    """Functions first, each kind in alphabetical order."""
    return sorted(
        hybrid_gemm.__all__, key=lambda x: (inspect.isclass(getattr(hybrid_gemm, x)), x.lower())
    )


def _described(name: str, thing, level: int = 2) -> str:
    """A heading, the signature and the docstring; of a class the members too."""
    head = "#" * level + f" `{name}`"
    if isinstance(thing, property):
        return f"{head}\n\n{_markdown(thing.fget.__doc__)}"
    parts = [head, _fenced(_signature(name, thing), "python"), _markdown(thing.__doc__)]
    if inspect.isclass(thing):
        for member, found in vars(thing).items():
            shown = isinstance(found, types.FunctionType | property | classmethod)
            if shown and not member.startswith("_") and found.__doc__:
                parts.append(_described(f"{name}.{member}", _unbound(found), level + 1))
    return "\n\n".join(parts)


def _unbound(member):
    return member.__func__ if isinstance(member, classmethod) else member


def _signature(name: str, thing) -> str:
    """`name(parameters) -> result`, on one line, or a parameter a line where that is too long.
    All options together are `**options`."""
    found = inspect.signature(thing)
    given = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    if takes_options := {"kernel", "split"} <= {p.name for p in given}:
        given = [p for p in given if p.name not in CHOICES]
    back = found.return_annotation
    end = "" if back is found.empty or inspect.isclass(thing) else f" -> {_word(back)}"
    words = [str(p.replace(annotation=_Word(_word(p.annotation)))) if p.annotation is not p.empty
             else str(p) for p in given]  # fmt: skip
    kinds = [p.kind for p in given]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        words.insert(kinds.count(inspect.Parameter.POSITIONAL_ONLY), "/")
    if takes_options:
        words.append("**options")
    line = f"{name}({', '.join(words)}){end}"
    if len(line) <= LINE:
        return line
    return f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"


class _Word(str):
    """An annotation that is printed as it stands."""

    __repr__ = str.__str__


def _word(annotation) -> str:
    """An annotation as the source has it."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__name__", str(annotation))


def _markdown(docstring: str | None) -> str:
    """A docstring as Markdown, whose examples are code; the options have a table of their own."""
    text = inspect.cleandoc(docstring or "").partition(f"\n\n{OPTIONS_HEADING}")[0]
    return re.sub(EXAMPLE, lambda m: _fenced(m[0].strip(), "pycon") + "\n", text).strip()


def options() -> str:
    """Every option of `Options`: its default, and what it means."""
    rows = []
    for name, choice in CHOICES.items():
        default = DEFAULTS[name]
        text = (choice.in_python or choice.help).replace("|", "\\|")
        rows.append([f"`{name}`", f"`{default!r}`", text])
    return grid(["<option", "<default", "<meaning"], rows)


def exit_codes() -> str:
    """The exit codes of the errors, from `errors.py`, and those that are no error's."""
    from hybrid_gemm import errors

    found: dict[int, list[str]] = {}
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.HybridGemmError):
            doc = " ".join(kind.__doc__.split()).split(". ")[0].rstrip(".")
            if kind is not errors.HybridGemmError:
                found.setdefault(kind.exit_code, []).append(f"{doc} (`{name}`)")
    rows = ([code, "; ".join(texts)] for code, texts in sorted(found.items()))
    return grid(["code", "<errors"], rows)
