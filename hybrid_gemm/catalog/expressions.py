"""Integer expressions in kernel headers, such as `ceil(m / BM)`: parsed once, evaluated exactly."""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, NoReturn

Value = int | Fraction
_OPERATORS: dict[type, Callable[[Any, Any], Value]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: Fraction,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Value]] = {"ceil": math.ceil, "min": min, "max": max}


MAX_LENGTH = 1000  # characters of an expression; longer ones could nest too deep, or take for ever

_Evaluated = Callable[[Mapping[str, int]], Value]  # a part of an expression, for values of names


@functools.lru_cache(maxsize=4096)
def _parse(expression: str) -> _Evaluated:
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"an expression of {len(expression)} characters; it has {MAX_LENGTH} at most"
        )
    # C spells conjunctions && and ||; the header keeps to one comparison an entry instead.
    try:
        body = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError) as error:
        # ValueError: a null byte, before Python 3.11.4; MemoryError: nested too deep for the parser
        raise ValueError(f"cannot evaluate {expression!r}: {error}") from None
    return _evaluated(body, expression)


def _evaluated(node: ast.expr, expression: str) -> _Evaluated:
    """What computes a node of an expression: a kernel's are evaluated for each of its variants."""

    def part(node: ast.expr) -> _Evaluated:
        match node:
            case ast.Constant(value=int() as value):
                return lambda names: value
            case ast.Name(id=name):
                return lambda names: names[name] if name in names else refuse(node)
            case (
                ast.BinOp(left=left, op=op, right=right)
                | ast.Compare(left=left, ops=[op], comparators=[right])
            ) if type(op) in _OPERATORS:
                apply, x, y = _OPERATORS[type(op)], part(left), part(right)
                return lambda names: apply(x(names), y(names))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _FUNCTIONS:
                function, given = _FUNCTIONS[name], [part(arg) for arg in args]
                return lambda names: function(*(x(names) for x in given))
        return lambda names: refuse(node)

    def refuse(node: ast.expr) -> NoReturn:
        raise ValueError(f"cannot evaluate {ast.unparse(node)!r} in {expression!r}")

    return part(node)


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Value of a header expression: integers, + - * / %, comparisons, ceil, min, max.

    Division is exact, so `ceil(n / BN)` is the number of tiles. A comparison is 1 where it holds
    and 0 elsewhere. Raises `ValueError` on anything else.
    """
    try:
        value = _parse(expression)(names)
    except (ArithmeticError, RecursionError) as error:
        raise ValueError(f"cannot evaluate {expression!r} for {dict(names)}: {error}") from None
    if value.denominator != 1:
        raise ValueError(f"{expression!r} is {value}, not a whole number, for {dict(names)}")
    return int(value)
