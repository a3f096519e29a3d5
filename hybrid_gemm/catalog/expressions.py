"""Integer expressions in kernel headers, such as `ceil(m / BM)`: parsed once, evaluated exactly."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_OPERATORS: dict[type, Callable[[Any, Any], int | Fraction]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: Fraction(a) / Fraction(b),
    ast.Mod: lambda a, b: a % b,
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
_FUNCTIONS: dict[str, Callable[..., int | Fraction]] = {"ceil": math.ceil, "min": min, "max": max}


MAX_LENGTH = 1000  # characters of an expression; longer ones could nest too deep, or take for ever


@functools.lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"an expression of {len(expression)} characters; it has {MAX_LENGTH} at most"
        )
    # C spells conjunctions && and ||; the header keeps to one comparison an entry instead.
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, MemoryError) as error:  # MemoryError: nested too deep for the parser
        raise ValueError(f"cannot evaluate {expression!r}: {error}") from None


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Value of a header expression: integers, + - * / %, comparisons, ceil, min, max.

    Division is exact, so `ceil(n / BN)` is the number of tiles. A comparison is 1 where it holds
    and 0 elsewhere. Raises `ValueError` on anything else.
    """

    def walk(node: ast.expr) -> int | Fraction:
        match node:
            case ast.Constant(value=int() as value):
                return value
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](walk(left), walk(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](walk(left), walk(right))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(walk, args))
        raise ValueError(f"cannot evaluate {ast.unparse(node)!r} in {expression!r}")

    try:
        value = walk(_parse(expression))
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(f"cannot evaluate {expression!r} for {dict(names)}: {error}") from None
    if value.denominator != 1:
        raise ValueError(f"{expression!r} is {value}, not a whole number, for {dict(names)}")
    return int(value)
