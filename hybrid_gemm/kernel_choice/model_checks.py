"""What the data of a model of times (`model_files.py`) has to have, and what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .. import catalog
from ..catalog import LISTED_FOR, Variant
from ..errors import shown
from . import costs
from .fitted import OPERANDS

_ABOUT = {
    "model": str, "arch": int, "multiprocessors": int, "mode": str, "variants": list,
    "library": (dict, type(None)),
}  # fmt: skip
_VARIANT = {"kernel": str, "params": dict, "constants": list, "mean": float}
_LIBRARY = {"kernel": str, "kernels": list, "constants": list, "mean": float}
_KINDS = {"i": "whole numbers", "if": "numbers", "U": "words"}
# Arrays: the kinds of their elements, in NumPy's letters, and their sides, of which those with a
# name are the same wherever it stands.
_ARRAYS: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "sides": ("i", ("shapes", 3)), "layouts": ("U", ("shapes",)), "errors": ("if", (2, "shapes")),
    "weights": ("if", ("variants", "shapes")), "reaches": ("if", ("variants", "counts", "counts")),
}  # fmt: skip
_ARRAYS_OF_LIBRARY: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "library_sides": ("i", ("launches", 3)), "library_layouts": ("U", ("launches",)),
    "library_launched": ("i", ("launches", 5)), "library_weights": ("if", ("launches",)),
    "library_errors": ("if", ("launches",)),
}  # fmt: skip


def fault(data: Mapping[str, Any]) -> str | None:
    """What is missing in a model's data, or wrong with it, in a few words; None if nothing is."""
    return next(_faults(data), None)


# What a fault is about may be looked at once those before it are none.
def _faults(data: Mapping[str, Any]) -> Iterator[str]:
    about = data["about"]
    yield from _wrong(about, _ABOUT, "about")
    if about["mode"] not in OPERANDS:
        yield f"there is no mode {about['mode']!r}"
    if not about["variants"]:
        yield "variants is empty"
    for each in about["variants"]:
        yield from _wrong(each, _VARIANT, "an entry of variants")
    sizes = {"variants": len(about["variants"])}
    yield from _wrong_arrays(data, _ARRAYS, sizes)
    yield from _below_one("sides", data["sides"])
    for each in about["variants"]:
        if variant := known(each):
            yield from _wrong_constants(variant, each["constants"], about["mode"])
    library = about["library"]
    if library is not None:
        yield from _wrong(library, _LIBRARY, "library")
        if library["kernel"] not in catalog.kernels():
            yield f"there is no kernel {library['kernel']!r}"
        if not all(isinstance(x, str) for x in library["kernels"]):
            yield f"kernels of library are names, and not {shown(library['kernels'])}"
        yield from _wrong_arrays(data, _ARRAYS_OF_LIBRARY, sizes)
        yield from _below_one("library_sides", data["library_sides"])
        yield from _below_one("library_launched", data["library_launched"][:, 1:])
        variant = catalog.get(library["kernel"]).variant()
        yield from _wrong_constants(variant, library["constants"], about["mode"])
        of = data["library_launched"][:, 0]
        if of.min() < 0 or of.max() >= len(library["kernels"]):
            yield "library_launched names kernels that library has not"


def known(each: Mapping[str, Any]) -> Variant | None:
    """The variant of an entry of variants; None where its kernel or parameters are gone."""
    kernel, params = catalog.kernels().get(each["kernel"]), each["params"]
    if kernel is None or params.keys() != kernel.params[0].keys():
        return None
    variant = Variant(kernel, dict(params))
    possible = all(type(x) is int for x in params.values()) and variant.suits()
    return variant if possible else None


def _wrong_constants(variant: Variant, found: list[Any], mode: str) -> Iterator[str]:
    count = len(costs.counts(variant, (1, 1, 1), "nn", OPERANDS[mode], LISTED_FOR))
    if len(found) != count or not all(map(_is_number, found)):
        yield f"constants of {variant.name} are {count} numbers, and not {shown(found)}"


def _is_number(x: Any) -> bool:
    """Whether this is a number that float64 holds, and no Inf or NaN."""
    return isinstance(x, int | float) and abs(x) <= sys.float_info.max


def _below_one(name: str, found: np.ndarray) -> Iterator[str]:
    if found.min() < 1:
        yield f"{name} has some below 1"


def _wrong(found: Any, kinds: Mapping[str, Any], what: str) -> Iterator[str]:
    if not isinstance(found, dict):
        yield f"{what} cannot be {shown(found)}"
    for name, kind in kinds.items():
        if name not in found:
            yield f"{what} has no {name}"
        elif not (_is_number(found[name]) if kind is float else isinstance(found[name], kind)):
            yield f"{name} of {what} cannot be {shown(found[name])}"


def _wrong_arrays(
    data: Mapping[str, Any], wanted: Mapping[str, tuple[str, tuple[str | int, ...]]],
    sizes: dict[str, int],
) -> Iterator[str]:  # fmt: skip
    """Of arrays; `sizes` are those of the sides that are known, and come to be."""
    for name, (kinds, sides) in wanted.items():
        if name not in data:
            yield f"it has no {name}"
        found = data[name]
        if len(found.shape) == len(sides):
            for side, size in zip(sides, found.shape, strict=True):
                if isinstance(side, str):
                    sizes.setdefault(side, size)
        if not found.size:
            yield f"{name} is empty"
        shape = tuple(sizes.get(side, side) if isinstance(side, str) else side for side in sides)
        if found.dtype.kind not in kinds or found.shape != shape:
            is_now, is_to_be = (" x ".join(map(str, x)) for x in (found.shape, shape))
            yield f"{name} is {found.dtype} of {is_now}, not {_KINDS[kinds]} of {is_to_be}"
        if kinds == "if" and not np.isfinite(found).all():
            yield f"{name} has Inf or NaN"
        if kinds == "U" and not np.isin(found, catalog.LAYOUTS).all():
            yield f"{name} are words such as nt"
