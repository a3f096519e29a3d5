"""Which parameters make one kernel fastest: its whole space timed, on any device that runs it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import catalog, devices
from ..catalog import LISTED_FOR, Kernel, Variant
from ..errors import UsageError, counted
from ..reporting import console
from . import study
from .kernels import KernelStudy
from .selection import multiprocessors
from .study import Note, Progress, Row, Shape, parameters

# Without shapes: what a GPU is busy with, and what the emulator multiplies in a second.
USUAL: dict[str, Shape] = {"cuda": (2048, 2048, 2048)}
SMALL: Shape = (128, 128, 128)
MOST = 256  # combinations that are all timed; of a larger space, those near the listed ones


def space(kernel: Kernel, most: int = MOST, count: int = LISTED_FOR) -> list[Variant]:
    """The variants to try on a GPU with `count` multiprocessors: first those that the header lists,
    then every combination of the values in its `space` (else of those it lists) that its rules
    allow.

    Where these are more than `most`, instead of all of them those that differ from a listed
    variant in one parameter.
    """
    listed = [variant.for_multiprocessors(count) for variant in kernel.variants()]
    values = {name: list(dict.fromkeys([*(v.params[name] for v in listed),
                                        *kernel.space.get(name, ())]))
              for name in listed[0].params}  # fmt: skip
    if math.prod(map(len, values.values())) <= most:
        tried = [dict(zip(values, x, strict=True)) for x in itertools.product(*values.values())]
    else:
        tried = [{**v.params, name: x} for v in listed for name in values for x in values[name]]
    suiting = (v for v in (Variant(kernel, params) for params in tried) if v.suits())
    return list(dict.fromkeys([*listed, *suiting]))


def search(
    name: str, shapes: Sequence[Shape] | None, *, device: str, dtypes: Sequence[str] | None,
    layouts: Sequence[str], samples: int, progress: Progress | None, note: Note,
) -> dict[str, Any]:  # as a study's choices  # fmt: skip
    """Times every variant in a kernel's space, the fastest first in each shape and dtype.

    Without `dtypes` that is float32, or the first that the kernel multiplies. The result is a
    study's, with the kernel's default variant as "default". Raises `UsageError` for an unknown
    kernel, one that multiplies nothing by itself, and one without parameters.
    """
    kernel = catalog.product(name)
    kind, _why = devices.choose(device)
    variants = space(kernel, count=multiprocessors(kind))
    if len(variants) < 2:
        raise UsageError(f"kernel {name} has no parameters to choose")
    if not dtypes:
        dtypes = ["float32" if "float32" in kernel.dtypes else kernel.dtypes[0]]
    timing = KernelStudy(
        variants, shapes or [USUAL.get(kind, SMALL)], device=device,
        dtypes=dtypes, layouts=layouts, samples=samples,
    )  # fmt: skip
    note(f"{counted(len(variants), 'variant')} of {name} to time")
    data = study.run(timing, progress=progress, note=note)
    data["rows"].sort(key=lambda row: (*_case(row), row["time_ms"] or float("inf")))
    return {**data, "default": dict(variants[0].params)}


def _case(row: Row) -> tuple:
    return row["m"], row["n"], row["k"], row["dtype"], row["layout"]


def show(data: Mapping[str, Any]) -> None:
    """Prints the rows as a table, and the fastest parameters of each shape below."""
    study.show(KernelStudy, data)
    for case, found in itertools.groupby(data["rows"], _case):
        rows = [row for row in found if row["time_ms"]]
        if not rows:
            continue
        m, n, k, dtype, _layout = case
        default = next((r for r in rows if r["params"] == data["default"]), None)
        words = f"fastest at {m} x {n} x {k} {dtype}: {parameters(rows[0])}"
        if default:
            words += f", {default['time_ms'] / rows[0]['time_ms']:.2f} times as fast as the default"
        console.line(words)
    if data["device"]["kind"] == "emulator":
        console.line("(times of g++'s code on this CPU; a GPU's may order variants otherwise)")
