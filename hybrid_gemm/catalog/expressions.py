"""Integer expressions in kernel headers, such as `ceil(m / BM)`: parsed once, evaluated exactly."""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import CodeType
from typing import Any

import numpy as np

Value = int | Fraction
MAX_LENGTH = 1000  # characters of an expression; longer ones could nest too deep, or take for ever
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_FUNCTIONS: Mapping[str, Any] = {"ceil": math.ceil, "min": min, "max": max}


def _quotient(x: Value, y: Value) -> Value:
    return Fraction(x, y) if x % y else x // y


_KNOWN = {"__builtins__": {}, "quotient": _quotient, **_FUNCTIONS}  # what an expression sees


def _of_each(plain: Callable[..., Any], of_arrays: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numbers and arrays; NumPy takes long for numbers."""

    def of_two(x: Any, y: Any) -> Any:
        arrays = isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
        return (of_arrays if arrays else plain)(x, y)

    return lambda *values: functools.reduce(of_two, values)


_KNOWN_OF_EACH = {  # what it sees where names are arrays
    "__builtins__": {}, "ceil": np.ceil, "min": _of_each(min, np.minimum),
    "max": _of_each(max, np.maximum),
}  # fmt: skip


# Python's own code, since choosing a kernel evaluates hundreds.
@functools.lru_cache(maxsize=4096)
def _parse(expressions: tuple[str, ...], exactly: bool = True) -> CodeType:
    given = [_body(x) for x in expressions]
    body = [_allowed(node, x) for node, x in zip(given, expressions, strict=True)]
    if not exactly:
        body = [_InFloats().visit(node) for node in given]
    whole = ast.Expression(ast.Tuple(body, ast.Load()))
    return compile(ast.fix_missing_locations(whole), "<kernel header>", "eval")


class _InFloats(ast.NodeTransformer):
    """Numbers as floats, which NumPy takes to arrays of them more quickly."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(float(node.value))  # type: ignore[arg-type]


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
                return ast.Call(ast.Name("quotient", ast.Load()), [part(x), part(y)], [])
            case ast.BinOp(left=x, op=op, right=y) if isinstance(op, _OPERATORS):
                return ast.BinOp(part(x), op, part(y))
            case ast.Compare(left=x, ops=[op], comparators=[y]) if isinstance(op, _COMPARISONS):
                return ast.Compare(part(x), [op], [part(y)])
            case ast.Call(ast.Name("ceil"), [ast.BinOp(x, ast.Div(), y)], []):  # -(-x // y)
                down = ast.BinOp(ast.UnaryOp(ast.USub(), part(x)), ast.FloorDiv(), part(y))
                return ast.UnaryOp(ast.USub(), down)
            case ast.Call(ast.Name(name) as function, [_, *_] as args, []) if name in _FUNCTIONS:
                return ast.Call(function, [part(arg) for arg in args], [])
        raise ValueError(f"cannot evaluate {ast.unparse(node)!r} in {expression!r}")

    return part(node)


def evaluate(expression: str, names: Mapping[str, int]) -> int:
    """Value of a header expression: integers, + - * / %, comparisons, ceil, min, max.

    Division is exact, so `ceil(n / BN)` is the number of tiles. A comparison is 1 where it holds
    and 0 elsewhere. Raises `ValueError` on anything else.
    """
    try:
        (value,) = eval(_parse((expression,)), _KNOWN, names)
    except NameError as error:
        raise ValueError(f"cannot evaluate {error.name!r} in {expression!r}") from None
    except (ArithmeticError, RecursionError, TypeError) as error:
        raise ValueError(f"cannot evaluate {expression!r} for {dict(names)}: {error}") from None
    if value.denominator != 1:
        raise ValueError(f"{expression!r} is {value}, not a whole number, for {dict(names)}")
    return int(value)


def evaluate_all(expressions: tuple[str, ...], names: Mapping[str, int]) -> tuple[int, ...]:
    """As `evaluate` of each, in a fraction of the time."""
    try:
        values: tuple[Any, ...] = eval(_parse(expressions), _KNOWN, names)
        if {*map(type, values)} <= {int}:
            return values
    except (ValueError, NameError, ArithmeticError, RecursionError, TypeError):
        pass  # one at a time: the first that has no value says so
    return tuple(evaluate(expression, names) for expression in expressions)


def evaluate_each(
    expressions: tuple[str, ...], names: Mapping[str, float | np.ndarray]
) -> tuple[float | np.ndarray, ...]:
    """As `evaluate_all` of expressions that it knows, where names are floats, and arrays of float64
    of one length: values are floats and such arrays, and are not checked. Those of whole numbers
    below 2^52 are exact."""
    code = _parse(expressions, exactly=False)
    values: tuple[float | np.ndarray, ...] = eval(code, _KNOWN_OF_EACH, names)
    return values
