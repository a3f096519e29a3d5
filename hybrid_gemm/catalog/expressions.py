"""Integer expressions in kernel headers, such as `ceil(m / BM)`: parsed once, evaluated exactly."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Value = int | Fraction
# Expressions, for values of names.
_Evaluated = Callable[[Mapping[str, int]], tuple[Value, ...]]
MAX_LENGTH = 1000  # characters of an expression; longer ones could nest too deep, or take for ever
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS: Mapping[str, Any] = {"ceil": math.ceil, "min": min, "max": max}
_AT: Any = {"lineno": 1, "col_offset": 0}  # of nodes that are made here: the compiler asks for it


# What an expression sees.
_KNOWN = {
    "__builtins__": {}, "quotient": lambda x, y: Fraction(x, y) if x % y else x // y, **_FUNCTIONS,
}  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _parse(expressions: tuple[str, ...]) -> _Evaluated:
    # Python's own code, since choosing a kernel evaluates hundreds.
    body = ast.Tuple([_allowed(_body(x), x) for x in expressions], ast.Load(), **_AT)
    code = compile(ast.Expression(body), "<kernel header>", "eval")
    return lambda names: eval(code, _KNOWN, names)


def _body(expression: str) -> ast.expr:
    if len(expression) > MAX_LENGTH:
        raise ValueError(
            f"an expression of {len(expression)} characters; it has {MAX_LENGTH} at most"
        )
    # C spells conjunctions && and ||; the header keeps to one comparison an entry instead.
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"cannot evaluate {expression!r}: {error.msg}") from None
    except (ValueError, MemoryError) as error:
        # ValueError: a null byte, before Python 3.11.4; MemoryError: nested too deep for the parser
        raise ValueError(f"cannot evaluate {expression!r}: {error}") from None


def _allowed(node: ast.expr, expression: str) -> ast.expr:
    """A node of an expression as Python evaluates it exactly."""

    def part(node: ast.expr) -> ast.expr:
        match node:
            case ast.Constant(value=int()):
                return node
            case ast.Name(id=name) if name not in _KNOWN:
                return node
            case ast.BinOp(left=x, op=ast.Div(), right=y):
                quotient = ast.Name("quotient", ast.Load(), **_AT)
                return ast.Call(quotient, [part(x), part(y)], [], **_AT)
            case ast.BinOp(left=x, op=op, right=y) if isinstance(op, _OPERATORS):
                return ast.BinOp(part(x), op, part(y), **_AT)
            case ast.Compare(left=x, ops=[op], comparators=[y]) if isinstance(op, _COMPARISONS):
                return ast.Compare(part(x), [op], [part(y)], **_AT)
            case ast.Call(ast.Name("ceil"), [ast.BinOp(x, ast.Div(), y)], []):  # -(-x // y)
                below = ast.UnaryOp(ast.USub(), part(x), **_AT)
                down = ast.BinOp(below, ast.FloorDiv(), part(y), **_AT)
                return ast.UnaryOp(ast.USub(), down, **_AT)
            case ast.Call(ast.Name(name) as function, [_, *_] as args, []) if name in _FUNCTIONS:
                return ast.Call(function, [part(arg) for arg in args], [], **_AT)
        raise ValueError(
            f"cannot evaluate {ast.unparse(node)!r} in {expression!r}; an expression has whole "
            "numbers, names, + - * / %, one comparison, ceil(a / b), min and max"
        )

    return part(node)


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Value of a header expression: integers, + - * / %, comparisons, ceil, min, max.

    Division is exact, so `ceil(n / BN)` is the number of tiles. A comparison is 1 where it holds
    and 0 elsewhere. Raises `ValueError` on anything else.
    """
    try:
        (value,) = _parse((expression,))(names)
    except NameError as error:
        raise ValueError(
            f"cannot evaluate {error.name!r} in {expression!r}, which knows {', '.join(names)}"
        ) from None
    except (ArithmeticError, RecursionError, TypeError) as error:
        raise ValueError(f"cannot evaluate {expression!r} for {dict(names)}: {error}") from None
    if value.denominator != 1:
        raise ValueError(
            f"{expression!r} is {value}, not a whole number, for {dict(names)}; "
            "/ is exact, and ceil(a / b) rounds up"
        )
    return int(value)


def evaluate_all(expressions: tuple[str, ...], names: Mapping[str, int]) -> tuple[int, ...]:
    """As `evaluate` of each, in a fraction of the time."""
    try:
        values = _parse(expressions)(names)
        if {*map(type, values)} <= {int, bool}:
            return tuple(map(int, values))
    except (ValueError, NameError, ArithmeticError, RecursionError, TypeError):
        pass  # one at a time: the first that has no value says so
    return tuple(evaluate(expression, names) for expression in expressions)


def with_values(expression: str, names: Mapping[str, int]) -> str:
    """An expression with values in the place of these names."""
    return re.sub(_NAME, lambda found: str(names.get(found[0], found[0])), expression)
