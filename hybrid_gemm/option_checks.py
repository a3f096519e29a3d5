"""How values of options are checked, and read from the command line's text.

A check takes an option's name and a value, and returns the value in the form that is kept. It
raises `OptionTypeError` for a wrong type and `UsageError` for a wrong value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .errors import OptionTypeError, UsageError, listed, nearest, shown

MOST_PARAMETER = 2**31 - 1  # kernels have them as int
MAX_LEVELS = 6  # of Strassen's algorithm
MOST_WORKERS = 1024  # a thread for each core of the largest hosts; plans of more take seconds
MOST_RANKS = 65536  # of a dry run; the plan takes 8 s


def one_of(noun: str, names: Iterable[str]) -> Callable[[str, Any], str]:
    names = tuple(names)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise OptionTypeError(f"{name} takes one of {listed(names)}; {shown(value)} was given")
        if value not in names:
            raise UsageError(
                f"no {noun} is called {value!r}; there are {listed(names)}{nearest(value, names)}"
            )
        return value

    return check


def check_name(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise OptionTypeError(f"{name} takes a name; {shown(value)} was given")
    return value


def check_whole(name: str, value: Any) -> int:
    """A whole number: NumPy's integers too, but no text, no bool and no 4.0."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise OptionTypeError(f"{name} takes a whole number; {shown(value)} was given")


def at_least(least: int, noun: str, most: int | None = None) -> Callable[[str, Any], int | None]:
    def check(name: str, value: Any) -> int | None:
        if value is None:
            return None
        count = check_whole(name, value)
        if count < least:
            raise UsageError(f"{shown(count)} {noun} asked for; it takes at least {least}")
        if most is not None and count > most:
            raise UsageError(f"{shown(count)} {noun} asked for; it takes at most {most}")
        return count

    return check


def check_yes_or_no(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    import numpy as np  # here: `--help` does without

    if isinstance(value, np.bool_):
        return bool(value)
    raise OptionTypeError(f"{name} takes True or False; {shown(value)} was given")


def check_levels(name: str, value: Any) -> int:
    levels = check_whole(name, value)
    if not 0 <= levels <= MAX_LEVELS:
        raise UsageError(
            f"{shown(levels)} levels of Strassen asked for; it takes 0 to {MAX_LEVELS}"
        )
    return levels


def check_numbers(name: str, value: Any, such_as: str) -> tuple[int, ...] | None:
    """Whole numbers; a single one stands for a list of itself. `such_as` is an example."""
    if value is None:
        return None
    if isinstance(value, str | bytes | Mapping):
        raise OptionTypeError(
            f"{name} takes whole numbers such as {such_as}; {shown(value)} was given"
        )
    try:
        return tuple(check_whole(name, x) for x in value)
    except OptionTypeError:
        raise
    except TypeError:  # not a sequence
        return (check_whole(name, value),)


def check_gpus(name: str, value: Any) -> tuple[int, ...] | None:
    numbers = check_numbers(name, value, "(0, 1)")
    if numbers == ():
        raise UsageError(f"{name} names no GPU; it takes numbers such as 0,1")
    if numbers and (min(numbers) < 0 or len(set(numbers)) < len(numbers)):
        raise UsageError(f"{name} takes different GPU numbers from 0 on; {shown(value)} was given")
    return numbers


def check_grid(name: str, value: Any) -> tuple[int, int, int] | None:
    sides = check_numbers(name, value, "(2, 1, 2)")
    if sides is None:
        return None
    if len(sides) != 3 or min(sides) < 1:
        text = " x ".join(map(shown, sides))
        raise UsageError(f"{name} is {text}; it takes three numbers pm,pn,pk, each at least 1")
    return sides[0], sides[1], sides[2]


def check_params(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    if value is None:
        return ()
    try:
        pairs = dict(value)
    except (TypeError, ValueError):
        raise OptionTypeError(
            f"{name} takes a kernel's parameters such as {{'BM': 128}}; {shown(value)} was given"
        ) from None
    found = [(str(key), check_whole(f"{name}[{key!r}]", x)) for key, x in pairs.items()]
    for key, number in found:
        if abs(number) > MOST_PARAMETER:
            raise UsageError(f"{name}[{key!r}] is {shown(number)}; it takes 1 to {MOST_PARAMETER}")
    return tuple(sorted(found))


def bytes_of(text: str) -> int:
    """Bytes of a size with its unit, such as 8GiB (2^30) or 500MB (10^6)."""
    number = text.strip().rstrip("BiKMGT").strip()
    unit = text.strip()[len(number) :].strip()
    if not unit and number.replace(".", "", 1).isdigit():
        raise UsageError(f"{text} has no unit; a size is such as {text}GiB or {text}MB")
    prefix, base = unit.removesuffix("B"), 1000
    if prefix.endswith("i"):
        prefix, base = prefix[:-1], 1024
    try:
        return int(float(number) * base ** ("", "K", "M", "G", "T").index(prefix))
    except (ValueError, OverflowError):
        raise UsageError(f"{shown(text)} is not a size such as 8GiB or 500MB") from None


def check_memory(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str):
        try:
            size = check_whole(name, value)
        except OptionTypeError:
            raise OptionTypeError(
                f"{name} takes bytes, as a whole number or as text such as '8GiB'; "
                f"{shown(value)} was given"
            ) from None
    else:
        size = bytes_of(value)
    if size < 1:
        raise UsageError(f"{name} is {shown(size)}; it takes bytes, at least 1")
    return size


def check_seconds(name: str, value: Any) -> float:
    if isinstance(value, bool | str):
        raise OptionTypeError(f"{name} takes seconds; {shown(value)} was given")
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise OptionTypeError(f"{name} takes seconds; {shown(value)} was given") from None
    except OverflowError:  # a whole number beyond float64
        seconds = math.inf if value > 0 else -math.inf
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{name} is {seconds:g}; it takes a finite number of seconds, at least 0")
    return seconds


def parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{shown(text)} is not a number") from None


def parse_integers(text: str) -> list[int]:
    try:
        return [int(x) for x in text.split(",") if x]
    except ValueError:
        raise UsageError(f"{shown(text)} is not a list of whole numbers such as 0,1") from None


def parse_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{shown(text)} is not a whole number") from None


def parse_grid(text: str) -> list[int]:
    """As `2,1,2`, and as results print it: `2 x 1 x 2`."""
    try:
        return [int(x) for x in text.replace("x", ",").split(",")]
    except ValueError:
        raise UsageError(f"{shown(text)} is not a grid such as 2,1,2") from None
