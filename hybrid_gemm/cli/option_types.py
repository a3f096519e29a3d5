"""Types of options: they check a value in one line, and shells complete it."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import UsageError, nearest, shown
from ..options import AUTOMATIC_KERNELS, Choice

Names = Sequence[str] | Callable[[], Iterable[str]]  # or what finds them (`known`)
_WHOLE = re.compile(r"-?[0-9]{1,99}")  # what is longer, Python may refuse to read


def _complete(names: Names, incomplete: str, before: str = "") -> list[CompletionItem]:
    found = names() if callable(names) else names
    return [CompletionItem(before + name) for name in found if name.startswith(incomplete)]


def known(module: str, name: str) -> Callable[[], Iterable[str]]:
    """What finds the names that a module of the package has, or makes, under `name`, once they are
    asked for: most modules take long to import."""

    def names() -> Iterable[str]:
        found = getattr(importlib.import_module(f"..{module}", __package__), name)
        return found() if callable(found) else found

    return names


KERNELS, DTYPES = known("catalog", "product_names"), known("catalog", "DTYPES")
EXPERIMENTS = known("experiments.engine", "names")


class Named(click.ParamType):
    """One of some names. With `check=False` the command checks it, and shells complete it here."""

    def __init__(self, names: Names, *, check: bool = True) -> None:
        self.name, self.names, self.check = "name", names, check

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if self.check:
            known = list(self.names() if callable(self.names) else self.names)
            if value not in known:
                _refuse(value, known, param)
        return value

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return _complete(self.names, incomplete)


class Whole(click.ParamType):
    """A whole number."""

    name = "n"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return int(value)
        except ValueError:
            self.fail(f"{shown(value)} is not a whole number such as 8", param, ctx)


WHOLE = Whole()


class Factor(click.ParamType):
    """alpha or beta: a number, complex ones such as 1-2j too."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        for kind in (int, float, complex):  # a float has 53 bits of a whole number
            with contextlib.suppress(ValueError):
                found = kind(value.replace("i", "j") if kind is complex else value)
                parts = (found.real, found.imag) if kind is complex else (found,)
                if "inf" not in value.lower() and any(abs(x) == math.inf for x in parts):
                    self.fail(f"{value} is beyond the largest number of float64", param, ctx)
                return found
        self.fail(f"{value!r} is not a number such as 0.5 or 1-2j", param, ctx)


def _refuse(value: str, known: Sequence[str], param: Any) -> None:
    flag = param.opts[0] if param else "the value"
    raise UsageError(f"{flag} {value!r}: it takes {', '.join(known)}{nearest(value, known)}")


class List(click.ParamType):
    """Comma-separated values; `each` turns one into what the command wants. With `names`, each has
    to be one of them; with `several`, `each` gives a list."""

    def __init__(
        self, name: str, each: Callable[[str], Any] = str, *, names: Names = (),
        check: bool = True, several: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.each, self.names = name, each, names
        self.check, self.several = check, several

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, list):
            return value
        flag = "/".join(param.opts) if param else "the value"
        texts = [x for x in value.split(",") if x]
        if not texts:
            raise UsageError(f"{flag} {value!r} is empty; it takes a list such as {self.name}")
        known = list(self.names() if callable(self.names) else self.names) if self.check else []
        for text in texts if known else ():
            if text not in known:
                _refuse(text, known, param)
        try:
            found = [self.each(x) for x in texts]
        except UsageError as error:
            raise UsageError(f"{flag} {value!r}: {error}") from None
        except ValueError:
            raise UsageError(f"{flag} {value!r} is not a list such as {self.name}") from None
        return [x for each in found for x in each] if self.several else found

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return _complete(self.names, last, before + comma)


class File(click.ParamType):
    """The name of a file or, with `kind` "dir", of a folder, which shells complete; the command
    checks it."""

    def __init__(self, kind: str = "file") -> None:
        self.name = kind

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type=self.name)]


class OptionType(click.ParamType):
    """Text of one of `Options`' choices, parsed and checked as that choice says."""

    def __init__(self, name: str, choice: Choice) -> None:
        self.name, self.choice = name, choice

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not isinstance(value, str):
            return value
        flag = param.opts[0] if param else self.name
        try:
            parsed = self.choice.parse(value)
        except UsageError as error:
            raise UsageError(f"{flag}: {error}") from None
        return self.choice.check(flag, parsed)

    def shell_complete(self, ctx: Any, param: Any, incomplete: str) -> list[CompletionItem]:
        if self.name == "kernel":
            return _complete([*AUTOMATIC_KERNELS, *KERNELS()], incomplete)
        return _complete(self.choice.names, incomplete)


def parameters(given: Iterable[str]) -> dict[str, int]:
    """The parameters of a kernel that `--param NAME=NUMBER` gave."""
    out: dict[str, int] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not _WHOLE.fullmatch(value):
            raise UsageError(f"--param {shown(text)}: it takes NAME=NUMBER, such as BM=128")
        if name in out:
            raise UsageError(f"--param {name}={out[name]} and {text} were given; give one of them")
        out[name] = int(value)
    return out


Shape = tuple[int, int, int]
MOST_SHAPES = 1000  # of one range


def shape(text: str) -> Shape:
    """m, n, k of "1024" or "4096x4096x1024"."""
    from ..problem import INT_LIMIT

    sides = tuple(int(x) for x in text.lower().split("x"))
    if len(sides) not in (1, 3) or min(sides) < 0:
        raise ValueError(text)
    if max(sides) > INT_LIMIT:
        raise UsageError(f"{text} is too large; a side is at most {INT_LIMIT}")
    m, n, k = sides * 3 if len(sides) == 1 else sides
    return m, n, k


def shapes(text: str) -> list[Shape]:
    """The shape of "N" or "MxNxK", or those of a range of cubes: "1024:8192:1024" adds 1024 until
    8192, "1024:16384:x2" doubles. The last is never passed."""
    if ":" not in text:
        return [shape(text)]
    no_range = UsageError(f"{text} is no range: it takes START:STOP:STEP or START:STOP:xFACTOR")
    if text.count(":") != 2:
        raise no_range
    start, stop, step = text.lower().split(":")
    size, last = int(start), int(stop)
    by, times = (int(step[1:]), True) if step.startswith("x") else (int(step), False)
    if size < 1 or last < size or by < (2 if times else 1):
        raise no_range
    found = []
    while size <= last:
        found.append(shape(str(size)))
        size = size * by if times else size + by
        if len(found) > MOST_SHAPES:
            raise UsageError(f"{text} is more than {MOST_SHAPES} sizes")
    return found
