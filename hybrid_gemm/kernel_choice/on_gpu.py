"""Which kernel multiplies on a GPU, and why. Pure.

A shape that was measured on such a GPU gets what was fastest there (`tables.py`); any other what
should be fastest by a fitted model (`choices.py`). Without a model it is the library, on tensor
cores too, or where there is none for the dtype, what a rough model of times prefers
(`time_model.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

from .. import catalog
from ..catalog import Variant
from ..problem import NARROW, Problem
from . import choices, fitted, model_files, tables
from .choices import Choice
from .costs import Sides
from .library_kernels import Launched
from .tables import Machine
from .time_model import candidates, listed, predict_us, runs

NO_MODEL = "no model of times for such a GPU"
# What a library would launch for a problem of operands in a layout, if that can be told.
Ask = Callable[[Problem, str], Launched | None]


def never(_problem: Problem, _layout: str) -> None:
    """An `Ask` where there is no library to ask."""


def forget() -> None:
    """Has tables and models read again from now on, because one was written."""
    tables.forget()
    for known in (
        model_files.model, model_files.others, choices.fastest, choices.fastest_of,
        choices.best_tflops, _known, _rows,
    ):  # fmt: skip
        known.cache_clear()


def strict(
    machine: Machine, problem: Problem, layout: str = "nn", *, own: bool = False, ask: Ask = never
) -> tuple[Variant, str]:
    """The variant that multiplies in a dtype's own arithmetic, and why it is this one.

    `layout` are the storage orders of op(A) and op(B), such as "nt"; `own` leaves libraries out;
    `ask` tells what the library would launch.
    """
    p = problem
    if found := _measured(machine, own, (p.m, p.n, p.k, p.dtype, layout)):
        variant = min(found, key=found.__getitem__)
        return variant, f"fastest measured at {p.m} x {p.n} x {p.k} {layout}"
    if choice := _fitted(machine, p.dtype, p, layout, own, ask):
        return choice.variant, choice.why
    possible = candidates(machine, problem, own)
    for variant in possible:
        if variant.kernel.library:
            return variant, NO_MODEL
    return (
        min(possible, key=lambda v: (predict_us(v, machine, problem), -v.kernel.rung)),
        "by the cost model",
    )


def for_panels(
    machine: Machine, problem: Problem, layout: str, panels: Mapping[Sides, int],
    found: tuple[Variant, str], *, own: bool,
) -> tuple[Variant, str]:  # fmt: skip
    """The variant for several products, so many of each m, n and k, in the arithmetic of the one
    that was `found` for the whole: that one, unless another should take less time for all of them
    together."""
    whole = found[0]
    mode = mode_of(problem)
    if mode in ("fp32x3", "tf32") and whole.kernel.role != "tensor":
        mode = "float32"
    products = tuple((sides, n) for sides, n in panels.items() if all(sides))
    if sum(n for _, n in products) < 2 or mode not in fitted.OPERANDS:
        return found
    adds = bool(problem.beta)
    choice = choices.fastest_of(machine, mode, products, layout, whole, own=own, adds=adds)
    if choice is None:
        return found
    return choice.variant, f"{choice.why} for {sum(n for _, n in products)} panels"


def next_fastest(
    machine: Machine, problem: Problem, layout: str, first: Variant, *, own: bool, count: int = 2
) -> list[Variant]:
    """The variants that models expect to be fastest but for `first`; none without a model."""
    mode, sides = mode_of(problem), (problem.m, problem.n, problem.k)
    times: dict[Variant, float] = {}
    for each in (mode, "float32") if mode == "fp32x3" else (mode,):
        known = model_files.knowing(machine, each, sides) if each in fitted.OPERANDS else None
        times |= known.times_us(sides, layout, machine, adds=bool(problem.beta)) if known else {}
    others = [v for v in times if v != first and not (own and v.kernel.library)]
    return sorted(others, key=times.__getitem__)[:count]


def own_on_tensor_cores(machine: Machine, problem: Problem, layout: str) -> Choice | None:
    """Our kernel for a problem that goes to tensor cores; None without a model of such a GPU."""
    return _fitted(machine, mode_of(problem), problem, layout, own=True)


def on_tensor_cores(
    machine: Machine, problem: Problem, layout: str, *, own: bool, ask: Ask = never
) -> tuple[Variant, str] | None:
    """As `strict`, for a problem that goes to tensor cores; None where neither a model of such a
    GPU nor a library does.

    fp32x3 and TF32 are multiplied in strict fp32, which is as accurate or more, where that should
    be faster.
    """
    mode = mode_of(problem)
    choice = _fitted(machine, mode, problem, layout, own or mode == "fp32x3", ask)
    if choice is None:
        variant = None if own else _library(machine, problem)
        return (variant, NO_MODEL) if variant else None
    if mode in ("fp32x3", "tf32"):
        fp32 = replace(problem, compute="fp32")
        plain = _fitted(machine, "float32", fp32, layout, own)
        if plain and choices.may_be_faster(plain, choice):  # asking takes a tenth of a second
            plain = _fitted(machine, "float32", fp32, layout, own, ask)
        if plain and choices.strict_is_faster(mode, plain, choice):
            return plain.variant, f"strict fp32 {plain.why}; {mode} {choice.why}"
    return choice.variant, choice.why


def _library(machine: Machine, problem: Problem) -> Variant | None:
    """The library's kernel for a problem that goes to tensor cores; None in fp32x3, which it has
    not."""
    role = {"tf32": "tensor", "float16": "gemm"}.get(mode_of(problem))
    libraries = (x.variant() for x in catalog.kernels().values() if x.library and x.role == role)
    able = (x for x in libraries if x.kernel.runs_at(machine.arch) and runs(x, problem))
    return next(able, None)


def mode_of(problem: Problem) -> str:
    """The mode of a settled problem's model: float16 for both types of 16 bits."""
    if problem.operands in NARROW:
        return "float16"
    return problem.compute if problem.compute != "fp32" else problem.dtype


def _fitted(
    machine: Machine, mode: str, problem: Problem, layout: str, own: bool, ask: Ask = never
) -> Choice | None:
    if mode not in fitted.OPERANDS:
        return None
    case = machine, mode, (problem.m, problem.n, problem.k), layout
    fastest = functools.partial(choices.fastest, *case, own=own, adds=bool(problem.beta))
    choice = fastest()
    # A library in TF32 is compared with strict fp32 too.
    sure = choice and not (choice.doubtful or (mode == "tf32" and choice.variant.kernel.library))
    if choice and not sure and (launched := ask(problem, layout)):
        choice = fastest(launched=launched)
    return choice


def _measured(machine: Machine, own: bool, case: tables.Case) -> dict[Variant, float]:
    """The times of the variants that were measured on such a GPU at this shape, dtype and layout,
    and run there."""
    m, n, k, dtype, _layout = case
    rows = _rows(machine).get(case, ())
    known = _known(machine, own) if rows else {}
    found = {known.get((x["kernel"], tuple(x["params"].items()))): x["time_ms"] for x in rows}
    return {v: ms for v, ms in found.items() if v and runs(v, Problem(m, n, k, dtype))}


@functools.cache
def _rows(machine: Machine) -> dict[tables.Case, list[tables.Row]]:
    found: dict[tables.Case, list[tables.Row]] = {}
    for row in tables.table(machine):
        found.setdefault(tables.case(row), []).append(row)
    return found


@functools.cache
def _known(machine: Machine, own: bool) -> dict[tuple, Variant]:
    """The listed variants by kernel and parameters."""
    return {(v.name, tuple(v.params.items())): v for v in listed(machine, own)}
