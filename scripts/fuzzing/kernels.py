"""Kernels that cases name: any that runs on the device, with parameters that its header lists or
allows, and dtypes and sides that it takes. So the emulator reaches what `auto` takes on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Kernel, Variant
from hybrid_gemm.devices.emulator.program import MAX_SHARED_BYTES
from hybrid_gemm.errors import UsageError
from hybrid_gemm.problem import NARROW, REAL_OF

# What operands are that kernels' headers name otherwise.
_HELD = {"tfloat32": "float32", "int8": "float64"}
_COMPLEX = {real: name for name, real in REAL_OF.items()}
# How often a named kernel has parameters that nobody lists. Each is compiled anew, for every dtype
# and layout, which takes as long as many products; listed ones are compiled once for all runs.
UNLISTED = 0.2
TRIES = 500  # of parameters, most of which break a rule


def named(device: str, draw: Any) -> dict[str, Any]:
    """A kernel as options, with the arithmetic that it needs."""
    kernel = draw.of([
        each for each in catalog.kernels().values()
        if each.role in ("gemm", "tensor", "residues") and device in each.runs_on
    ])  # fmt: skip
    made: dict[str, Any] = {"kernel": kernel.name}
    params = unlisted(kernel, draw) if draw.chance(UNLISTED) else draw.of(kernel.params)
    if params and draw.chance(0.7):
        made["params"] = tuple(params.items())
    if kernel.role == "residues":
        made["compute"] = "fp64x"
    elif kernel.role == "tensor":
        rounds = kernel.in_place or kernel.library  # and splits nothing
        made["compute"] = draw.of(("tf32", "tf32" if rounds else "fp32x3"))
    return made


def unlisted(kernel: Kernel, draw: Any) -> Mapping[str, int]:
    """Parameters that the header allows and may not list: of a listed variant, one to three are
    others. Half of the time all of these are larger or smaller by one factor, since most rules are
    about what divides what. The listed ones, where no draw is allowed."""
    listed = dict(draw.of(kernel.params))
    for _ in range(TRIES if listed else 0):
        names = [str(x) for x in draw.rng.permutation(list(listed))[: draw.whole(1, 3)]]
        factor = draw.of((0, 0, 0, 2, 3, 5))
        tried = listed | {x: _other(listed[x], factor, draw) for x in names}
        if _fits(Variant(kernel, tried)):
            return tried
    return listed


def _fits(variant: Variant) -> bool:
    """Whether its header allows a variant, and a GPU has the shared memory in all its dtypes."""
    dtypes = [x for x in variant.kernel.dtypes if variant.suits(x)]
    shared = [variant.launch(1, 1, 1, x).shared_bytes for x in dtypes]
    return bool(shared) and max(shared) <= MAX_SHARED_BYTES


def _other(value: int, factor: int, draw: Any) -> int:
    """Another value of a parameter: by a factor; or where that is 0, by 1, or any small one."""
    if factor:
        return draw.of((value * factor, max(1, value // factor)))
    return draw.of((max(1, value - 1), value + 1, draw.whole(1, 16), draw.whole(1, 2 * value)))


def variant_of(options: dict[str, Any]) -> Variant | None:
    """The variant that options name; None where they name none, or none that is possible."""
    name = options.get("kernel", "auto")
    if name in ("auto", "own"):
        return None
    try:
        return catalog.get(name).variant(dict(options.get("params", ())))
    except UsageError:
        return None


def dtype_for(variant: Variant, draw: Any) -> str:
    """One that the kernel multiplies, or a complex one whose parts it multiplies."""
    dtype = draw.of(variant.kernel.dtypes)
    dtype = _HELD.get(dtype, dtype)
    return _COMPLEX[dtype] if dtype in _COMPLEX and draw.chance(0.15) else dtype


def sides_for(variant: Variant, sides: list[int], draw: Any) -> list[int]:
    """These sides, as few of them shortened as the kernel's limits ask for."""
    for count in range(4):
        for _ in range(40):
            places = draw.rng.permutation(3)[:count]
            tried = [_shorter(x, draw) if i in places else x for i, x in enumerate(sides)]
            if variant.takes(*tried, variant.kernel.dtypes[0]):
                return tried
    return [1, 1, 1]


def _shorter(side: int, draw: Any) -> int:
    return draw.of((min(side, 1), draw.whole(0, min(side, 16)), draw.whole(0, side)))


def reads_narrow(kernel: Kernel, options: dict[str, Any]) -> bool:
    """Whether operands of 16 bits are multiplied as they are."""
    plain = options.get("algorithm") != "strassen"
    return plain and set(NARROW) <= set(kernel.dtypes)
