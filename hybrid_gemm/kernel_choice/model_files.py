"""The files of models of times (`fitted.py`): the user's own and those that come with the package,
and which of them is asked about a GPU and a shape."""

from __future__ import annotations

import functools
import io
import json
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import catalog
from ..catalog import LAYOUTS, LISTED_FOR, Variant
from ..errors import HybridGemmError, UnavailableError, UsageError
from ..host.notes import note
from . import costs, tables
from .costs import Sides
from .fitted import OPERANDS, Fitted, FittedLibrary, Model, library_places
from .library_kernels import Launched
from .likeness import CONSTANTS, places
from .tables import Machine

HERE = Path(__file__).resolve().parent / "fitted"
WEIGHT = 1e-4  # weights and errors are whole multiples of it in files; unknown errors are -1


def file_name(model: str, mode: str) -> str:
    """A GPU's model of one mode: `nvidia_h200_float32.npz`."""
    return tables.file_name(model).replace(".json", f"_{mode}.npz")


def users_file(model: str, mode: str) -> Path:
    """Where `hybrid-gemm tune` keeps it."""
    return tables.user_table(model).with_name("model_" + file_name(model, mode))


@functools.cache
def model(machine: Machine, mode: str) -> Model | None:
    """What is known of a GPU: by the user's own model, the shipped one, or that of a GPU with the
    same architecture and as many multiprocessors; None where there is none."""
    try:
        path = users_file(machine.model, mode)
        if path.is_file():
            return read(path, machine)
    except (UnavailableError, UsageError) as error:
        note(f"the user's model of times is left out: {error}")
    data = shipped(machine, mode)
    return None if data is None else _of(data, machine)


def knowing(machine: Machine, mode: str, sides: Sides) -> Model | None:
    """The model to ask for a shape: as `model`, or where that has no shape so long, that of a GPU
    with the same architecture and as many multiprocessors which has."""
    own = model(machine, mode)
    if own is None or own.knows(sides):
        return own
    return next((x for x in others(machine, mode) if x.knows(sides)), own)


@functools.cache
def others(machine: Machine, mode: str) -> list[Model]:
    """The models of other GPUs like this one."""
    alike = _alike(machine, mode)
    return [_of(data, machine) for data in alike if data["about"]["model"] != machine.model]


def _of(data: Mapping[str, Any], machine: Machine) -> Model:
    of = data["about"]["model"]
    return from_data(data, machine, lent="" if of == machine.model else of)


def shipped(machine: Machine, mode: str) -> dict[str, Any] | None:
    """The data of the model that comes with the package for a GPU, or for one with the same
    architecture and as many multiprocessors; None where there is neither."""
    own = HERE / file_name(machine.model, mode)
    if own.is_file():
        return _arrays(own)
    alike = _alike(machine, mode)
    return max(alike, key=lambda data: np.count_nonzero(data["errors"] >= 0), default=None)


def _alike(machine: Machine, mode: str) -> list[dict[str, Any]]:
    """The data of the models that come with the package for GPUs with the same architecture and as
    many multiprocessors."""
    found = [_arrays(path) for path in sorted(HERE.glob(f"*_{mode}.npz"))]
    return [
        data for data in found
        if (data["about"]["arch"], data["about"]["multiprocessors"])
        == (machine.arch, machine.multiprocessors)
    ]  # fmt: skip


def read(path: Path, machine: Machine) -> Model:
    """The model in a file. Raises `UsageError` for another or a damaged file, and for a model of
    another likeness."""
    try:
        data = _arrays(path)
        alike = data["about"].get("likeness") == CONSTANTS
        whole = alike and _is_whole(data)
    except (
        OSError, EOFError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError,
        RuntimeError, SyntaxError, HybridGemmError, tokenize.TokenError, zipfile.BadZipFile,
        zlib.error,
    ):  # fmt: skip
        alike, whole = True, False
    if not alike:
        what = "is of another version of hybrid-gemm, and predicts wrong times in this one"
        raise UsageError(f"{path} {what}: remove it, or run `hybrid-gemm tune` again")
    if not whole:
        raise UsageError(
            f"{path} is no model of `hybrid-gemm tune`, or is damaged: remove it, or run tune again"
        )
    return from_data(data, machine)


def _is_whole(data: Mapping[str, Any]) -> bool:
    """Whether a model's data has all that predictions take, of its kind and size. What lacks a part
    may raise an error of Python's instead."""
    about, library, shapes = data["about"], data["about"]["library"], len(data["sides"])
    entries = [(known(each), each) for each in about["variants"]]
    reaches = (len(entries), *[data["reaches"].shape[-1]] * 2)
    wanted = {
        "sides": (shapes, 3), "layouts": (shapes,), "errors": (2, shapes),
        "weights": (len(entries), shapes), "reaches": reaches,
    }  # fmt: skip
    least_one = [data["sides"]]
    if library is not None:
        launches, rows = len(data["library_sides"]), data["library_launched"]
        entries.append((catalog.get(library["kernel"]).variant(), library))
        wanted |= {
            "library_sides": (launches, 3), "library_layouts": (launches,),
            "library_launched": (launches, 5), "library_weights": (launches,),
            "library_errors": (launches,),
        }  # fmt: skip
        least_one += [data["library_sides"], rows[:, 1:], 1 + rows[:, 0]]
        if {*map(type, library["kernels"])} != {str} or rows[:, 0].max() >= len(library["kernels"]):
            return False
    return all(
        data[name].size and data[name].shape == shape and _means_something(data[name])
        for name, shape in wanted.items()
    ) and all(
        [x.dtype.kind == "i" and x.min() >= 1 for x in least_one]
        + [_are_numbers(entry, about["mode"], variant) for variant, entry in entries if variant]
    )


def _means_something(found: np.ndarray) -> bool:
    """Whether elements are numbers, and none is Inf or NaN; or words such as nt."""
    if found.dtype.kind == "U":
        return bool(np.isin(found, LAYOUTS).all())
    return found.dtype.kind in "if" and bool(np.isfinite(found).all())


def _are_numbers(entry: Mapping[str, Any], mode: str, variant: Variant) -> bool:
    """Whether an entry has as many constants as a variant has counts, and all are finite."""
    counts = costs.counts(variant, (1, 1, 1), "nn", OPERANDS[mode], LISTED_FOR)
    return len(entry["constants"]) == len(counts) and all(
        isinstance(x, int | float) and abs(x) <= sys.float_info.max
        for x in (entry["mean"], *entry["constants"])
    )


def known(entry: Mapping[str, Any]) -> Variant | None:
    """The variant of an entry of variants; None where its kernel or parameters are gone."""
    kernel, params = catalog.kernels().get(entry["kernel"]), entry["params"]
    if kernel is None or params.keys() != kernel.params[0].keys():
        return None
    variant = Variant(kernel, dict(params))
    possible = all(type(x) is int for x in params.values()) and variant.suits()
    return variant if possible else None


def as_bytes(data: Mapping[str, Any]) -> bytes:
    """A model's data as the content of a file, which `read` reads."""
    file = io.BytesIO()
    arrays = {name: x for name, x in data.items() if name != "about"}
    np.savez_compressed(file, about=np.array(json.dumps(data["about"])), **arrays)
    return file.getvalue()


def _arrays(path: Path) -> dict[str, Any]:
    """What `as_bytes` was given."""
    with np.load(path, allow_pickle=False) as file:
        return {**file, "about": json.loads(str(file["about"]))}


def from_data(data: Mapping[str, Any], machine: Machine, lent: str = "") -> Model:
    """The model in data as `bench/fitting.py` makes it; of kernels and parameters that are gone
    nothing."""
    about = data["about"]
    mode: str = about["mode"]
    found = []
    for each, weights, reached in zip(
        about["variants"], data["weights"], data["reaches"], strict=True
    ):
        variant = known(each)
        if variant is None:
            continue
        constants = np.array(costs.with_parts(variant, each["constants"]), float)
        reached = reached[: len(constants), : len(constants)]
        found.append(Fitted(variant, constants, float(each["mean"]), weights * WEIGHT, reached))
    library = functools.partial(_library, data, mode, machine) if about["library"] else None
    return Model(
        mode, places(data["sides"], data["layouts"], OPERANDS[mode]), tuple(found),
        _errors(data["errors"]), library, machine.multiprocessors, lent,
    )  # fmt: skip


def _errors(whole: np.ndarray) -> np.ndarray:
    return np.where(whole < 0, np.nan, whole * WEIGHT)


def _library(data: Mapping[str, Any], mode: str, machine: Machine) -> FittedLibrary:
    """What is known of a library's launches."""
    about = data["about"]["library"]
    kernels, rows = tuple(about["kernels"]), data["library_launched"]
    launched = [Launched(kernels[x[0]], *x[1:]) for x in rows.tolist()]
    at = library_places(
        data["library_sides"], data["library_layouts"], launched, OPERANDS[mode],
        machine.multiprocessors,
    )  # fmt: skip
    variant = catalog.get(about["kernel"]).variant()
    fit = Fitted(
        variant, np.array(about["constants"], float), float(about["mean"]),
        data["library_weights"] * WEIGHT, np.zeros(0),
    )  # fmt: skip
    return FittedLibrary(kernels, at, rows[:, 0], fit, _errors(data["library_errors"]))
