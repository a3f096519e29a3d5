"""Kernels that cases name: any that runs on the device, with parameters that its header lists, and
dtypes and sides that it takes. So the emulator reaches what `auto` takes on a GPU."""

from __future__ import annotations

from typing import Any

from hybrid_gemm import catalog
from hybrid_gemm.catalog import Kernel, Variant
from hybrid_gemm.errors import UsageError
from hybrid_gemm.problem import NARROW, REAL_OF

# What operands are that kernels' headers name otherwise.
_HELD = {"tfloat32": "float32", "int8": "float64"}
_COMPLEX = {real: name for name, real in REAL_OF.items()}


def named(device: str, draw: Any) -> dict[str, Any]:
    """A kernel as options, with the arithmetic that it needs."""
    kernel = draw.of([
        each for each in catalog.kernels().values()
        if each.role in ("gemm", "tensor", "residues") and device in each.runs_on
    ])  # fmt: skip
    made: dict[str, Any] = {"kernel": kernel.name}
    params = draw.of(kernel.params)
    if params and draw.chance(0.7):
        made["params"] = tuple(params.items())
    if kernel.role == "residues":
        made["compute"] = "fp64x"
    elif kernel.role == "tensor":
        rounds = kernel.in_place or kernel.library  # and splits nothing
        made["compute"] = draw.of(("tf32", "tf32" if rounds else "fp32x3"))
    return made


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
