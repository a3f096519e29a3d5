"""Finds and reads kernel files: the package's own, and those of `$HYBRID_GEMM_KERNELS`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError, nearest
from ..host.notes import note
from ..options import DEVICES
from .kernel import ITEM_SIZE, LAYOUTS, Kernel, Variant

VARIABLE = "HYBRID_GEMM_KERNELS"
MAX_BYTES = 1 << 24  # of a kernel file
PRODUCTS = "gemm", "tensor", "residues"  # roles of kernels that make products by themselves

# The CPU's, which needs no file: so that a program that lacks the package's data multiplies.
BLAS = Kernel(
    "blas", Path(__file__), "", library="numpy", runs_on=("cpu",), rung=210,
    summary="NumPy's matmul: the host's BLAS for floats; integers exactly, by float64's BLAS or "
    "NumPy's loops",
    source="S1, the article: the host's reference",
)  # fmt: skip
_HEADER_KEYS = {x.name for x in dataclasses.fields(Kernel)} - {"name", "path", "text"}
_TEXTS = (".cu", ".cuh", ".toml")
_OF_TEXT = {".cu": "entry", ".toml": "library"}  # the key that says whose text multiplies
# Those of an entry of `tma`: the operand, and boxes as lists of two expressions.
_TMA_KEYS = {"operand", "along_k", "across_k", "box", "where"}


def directory() -> Path:
    """Where the kernel files are: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def own_directories() -> list[Path]:
    """Folders of the user's own kernels, from `$HYBRID_GEMM_KERNELS` (separated as in PATH).

    Their files may include the project's .cuh files, not .cuh files of their own.
    """
    given = os.environ.get(VARIABLE, "")
    return [Path(folder) for folder in given.split(os.pathsep) if folder]


def _folders() -> list[Path]:
    return [directory(), *own_directories()]


def _name(path: Path) -> str:
    return path.stem.removeprefix("gemm_")


def _read(path: Path) -> Kernel:
    """The kernel of one file; raises `OSError`, `ValueError` or `TypeError` for what is none."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a FIFO would wait for a writer
        raise ValueError("it is no ordinary file")
    if status.st_size > MAX_BYTES:
        raise ValueError(f"it has {status.st_size} bytes; a kernel has {MAX_BYTES} at most")
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".toml":
        header = text
    else:
        start, end = text.find("/*---"), text.find("---*/")
        if start != 0 or end < 0:
            raise ValueError("a kernel file begins with a /*--- ... ---*/ header")
        header = text[5:end]
    table = tomllib.loads(header)
    if unknown := table.keys() - _HEADER_KEYS:
        first = min(unknown)
        hint = nearest(first, _HEADER_KEYS)
        raise ValueError(f"the header has no key {first!r}{hint}")
    for key in ("summary", "source", _OF_TEXT[path.suffix]):
        if not table.get(key):
            raise ValueError(f"the header has no {key}, which a {path.suffix} file needs")
    for key, value in table.items():
        if isinstance(value, list):
            table[key] = tuple(value)
    if table.get("params") == ():
        del table["params"]
    _check_kinds(table)
    _check_launch(table)
    if path.suffix == ".cu":
        _check_entry(text[end:], table["entry"])
    return Kernel(name=_name(path), path=path, text=text if path.suffix == ".cu" else "", **table)


_C_NAMES = re.compile(r'extern\s*"C"(\s*\{.*|[^;}]*)', re.DOTALL)  # what C's rules name
_CALLED = re.compile(r"\b(\w+)\s*\(")


def _check_entry(text: str, entry: str) -> None:
    """Raises `ValueError` where the text has no function that a launch would find by `entry`.

    By another name, or without extern "C", it would compile, and be missing on the GPU.
    """
    if not any(entry in _CALLED.findall(found[0]) for found in _C_NAMES.finditer(text)):
        raise ValueError(
            f"the header's entry is {entry!r}, and the text has no "
            f'extern "C" __global__ void {entry}(...)'
        )


def _check_launch(table: Mapping[str, Any]) -> None:
    """Raises `UsageError` for a header that does not say what a launch needs to know."""
    multiplies = table.get("role", "gemm") in ("gemm", "tensor", "across")
    if multiplies and not table.get("library") and len(table.get("tile", ())) != 2:
        raise UsageError(
            "the header of a kernel that multiplies says which tile of C a block "
            'computes, such as tile = ["BM", "BN"] (rows and columns; docs/kernels.md)'
        )
    if "SHARES" in table.get("params", ({},))[0] and not table.get("step"):
        raise UsageError(
            "the header of a kernel with the parameter SHARES says of how much k a share "
            'has a whole multiple, such as step = "SPAN / SIZE" (docs/kernels.md)'
        )
    for entry in table.get("tma", ()):
        boxes = entry.keys() & {"along_k", "across_k", "box"}
        if entry.get("operand") not in ("A", "B", "C") or entry.keys() - _TMA_KEYS or not boxes:
            raise UsageError(
                "an entry of tma names an operand, A, B or C, and its box: along_k and "
                f"across_k for A and B, box for C (docs/kernels.md); found {entry}"
            )
    known = table.get("params", ({},))[0]
    for key in ("space", "scales"):
        if unknown := [repr(name) for name in table.get(key, ()) if name not in known]:
            raise UsageError(f"{key} names {', '.join(unknown)}, which is no parameter")


def _texts(value: Any, among: tuple[str, ...] = ()) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(x, str) and (not among or x in among) for x in value
    )


def _some_of(names: Iterable[str]) -> str:
    return f"a list of strings, some of {', '.join(names)}"


# What a key is, in words, and whether a value is that.
_FLAG = "true or false", lambda v: isinstance(v, bool)
_THREE = "three expressions in strings, for x, y and z", lambda v: _texts(v) and len(v) == 3
_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "params": (
        "a list of tables of whole numbers, all with the same names, such as [{TILE = 16}]",
        lambda v: isinstance(v, tuple) and all(isinstance(x, dict) for x in v)
        and all(x.keys() == v[0].keys() and all(type(y) is int for y in x.values()) for x in v)
        and all(map(str.isidentifier, v[0])),
    ),
    "block": _THREE,
    "grid": _THREE,
    "require": ("a list of expressions in strings", _texts),
    "limits": ("a list of expressions in strings", _texts),
    "dtypes": (_some_of(ITEM_SIZE), lambda v: _texts(v, tuple(ITEM_SIZE)) and v),
    "layouts": (_some_of(LAYOUTS), lambda v: _texts(v, LAYOUTS) and v),
    "runs_on": (_some_of(DEVICES[1:]), lambda v: _texts(v, DEVICES[1:]) and v),  # without auto
    "arch": (
        'a string such as ">=70" or "==90a"',
        lambda v: isinstance(v, str) and re.fullmatch(r"(>=|==)\d+a?", v),
    ),
    "rung": ("a whole number", lambda v: type(v) is int),
    "tile": (
        "two expressions in strings, for rows and columns",
        lambda v: not v or (_texts(v) and len(v) == 2),
    ),
    "persistent": _FLAG,
    "early": _FLAG,
    "in_place": _FLAG,
    "tma": (
        "a list of tables, one for each operand",
        lambda v: isinstance(v, tuple) and all(isinstance(x, dict) for x in v),
    ),
    "scales": ("a list of parameters", _texts),
    "space": (
        "a table of lists of whole numbers, such as {TILE = [8, 16]}",
        lambda v: isinstance(v, dict)
        and all(isinstance(x, list) and x and all(type(y) is int for y in x) for x in v.values()),
    ),
}  # fmt: skip


def _check_kinds(table: Mapping[str, Any]) -> None:
    """Raises `ValueError` where a header's values are not of the kind they must be."""
    for key, value in sorted(table.items()):
        words, holds = _RULES.get(key, ("a string", lambda v: isinstance(v, str)))
        if not holds(value):
            raise ValueError(f"the header's {key} cannot be {value!r}; it is {words}")


def _check(kernel: Kernel) -> None:
    """Raises `ValueError` or `TypeError` where an expression of a header means nothing."""
    for variant in kernel.variants():
        try:
            variant.check(kernel.dtypes[0])
            variant.launch(64, 64, 64, kernel.dtypes[0])
        except UsageError:
            pass  # a rule of its own that it breaks is said when it is asked for
        if kernel.tile and min(variant.tile) < 1:
            raise ValueError(f"{variant} has a tile of {variant.tile}")


def read_kernel(path: Path) -> Kernel:
    """The kernel of a file. Raises `UsageError` for a file that holds none."""
    try:
        kernel = _read(path)
        _check(kernel)
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(str(error)) from error
    return kernel


def _kernels_in(folder: Path) -> Iterator[Kernel]:
    """The kernels of a folder; a note for each file that holds none."""
    for path in _files(folder):
        try:
            yield read_kernel(path)
        except UsageError as error:
            note(f"{path} is left out: {error}")


def _files(folder: Path) -> list[Path]:
    try:
        if not folder.is_dir() and folder == directory():
            raise UsageError(
                f"the package's kernels are to be in {folder}, which is no folder: it runs from "
                "files, not from a zip; install it with pip, and have what freezes it collect its "
                "data (PyInstaller: --collect-data hybrid_gemm)"
            )
        if not folder.is_dir():
            raise UsageError(f"{VARIABLE} names {folder}, which is no folder (mkdir -p makes it)")
        return sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".toml"))
    except OSError as error:
        raise UsageError(f"{VARIABLE} names {folder}: {error.strerror}") from error


@functools.cache
def kernels() -> Mapping[str, Kernel]:
    """Every kernel by name, in the order of the ladder: by `rung`, then by name.

    A file that is no kernel is left out, with a note: in a checkout, new kernels are written
    beside those of the project. Raises `UsageError` where two files have one name, or
    `$HYBRID_GEMM_KERNELS` no folder.
    """
    _as_read.cache_clear()
    _as_read()
    found = {BLAS.name: BLAS}
    for kernel in (k for folder in _folders() for k in _kernels_in(folder)):
        if kernel.name in found:
            other = found[kernel.name].path
            raise UsageError(f"two kernels are called {kernel.name}: {other} and {kernel.path}")
        found[kernel.name] = kernel
    return {k.name: k for k in sorted(found.values(), key=lambda k: (k.rung, k.name))}


def gemm_kernels() -> list[Kernel]:
    """The kernels that multiply."""
    return [kernel for kernel in kernels().values() if kernel.role == "gemm"]


def product_names() -> list[str]:
    """The kernels that make products by themselves."""
    return [kernel.name for kernel in kernels().values() if kernel.role in PRODUCTS]


def get(name: str) -> Kernel:
    """The kernel of that name; `UsageError` names the nearest one otherwise."""
    if kernel := _alone(name):
        return kernel
    if name not in kernels() and _is_there(name):  # it was written since
        forget_changed()
    try:
        return kernels()[name]
    except KeyError:
        known = product_names()
        raise UsageError(
            f"no kernel is called {name!r}{nearest(name, known)}; there are {', '.join(known)}"
        ) from None


def _alone(name: str) -> Kernel | None:
    """The package's kernel of that name without all others, of which to read the headers takes a
    tenth of a second: a process that multiplies on the CPU needs one. None where all are read
    already, or are to be: for folders of the user's own, and for what is no kernel."""
    if kernels.cache_info().currsize or own_directories() or not name.isidentifier():
        return None
    if name == BLAS.name:
        return BLAS
    folder = directory()
    files = (folder / f"{x}{suffix}" for x in (name, f"gemm_{name}") for suffix in _OF_TEXT)
    found = [path for path in files if _name(path) == name and path.exists()]
    if len(found) != 1:
        return None
    try:
        status = found[0].stat()
        return _read_alone(found[0], status.st_mtime_ns, status.st_size)
    except (OSError, UsageError):
        return None


@functools.lru_cache(maxsize=8)
def _read_alone(path: Path, _changed: int, _bytes: int) -> Kernel:
    return read_kernel(path)


def _is_there(name: str) -> bool:
    """Whether a file has that name; `UsageError` where it holds no kernel."""
    for path in (path for folder in _folders() for path in _files(folder)):
        if _name(path) == name:
            try:
                read_kernel(path)
            except UsageError as error:
                raise UsageError(f"{path} holds no kernel: {error}") from None
            return True
    return False


def product(name: str) -> Kernel:
    """As `get`, a kernel that makes products by itself; `UsageError` for a part of others."""
    kernel = get(name)
    if kernel.role not in PRODUCTS:
        raise UsageError(
            f"kernel {name} is a part of products or experiments, and multiplies nothing by "
            f"itself; of those that do there are {', '.join(product_names())}"
        )
    return kernel


@functools.cache
def helper(role: str) -> Variant:
    """The default variant of the one kernel with that role (`transpose`, `sum`, ...)."""
    found = [k for k in kernels().values() if k.role == role]
    if len(found) != 1:
        names = " and ".join(k.path.name for k in found) or "no kernel file"
        raise UsageError(f"{names} in {directory()} has the role {role}, which one has to have")
    return found[0].variant()


@functools.cache
def included() -> dict[str, bytes]:
    """The texts that kernels include, by their names."""
    return {path.name: path.read_bytes() for path in sorted(directory().glob("*.cuh"))}


@functools.cache
def include_digest() -> str:
    """Changes when a text that kernels include changes; part of every cache key."""
    digest = hashlib.sha256()
    for name, text in included().items():
        digest.update(name.encode() + text)
    return digest.hexdigest()


def _stamps() -> list[tuple[str, int, int]]:
    """The files that there are and may be looked at, with when they changed and their bytes."""
    found = []
    for folder in _folders():
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                if path.suffix in _TEXTS:
                    with contextlib.suppress(OSError):
                        status = path.stat()
                        found.append((str(path), status.st_mtime_ns, status.st_size))
    return sorted(found)


@functools.cache
def _as_read() -> list[tuple[str, int, int]]:
    return _stamps()


def forget_changed() -> None:
    """Kernel files are read anew when they are next needed, if one changed since, came or went."""
    if not kernels.cache_info().currsize:
        return
    with contextlib.suppress(UsageError):  # where folders of one's own are none any more
        if _stamps() == _as_read():
            return
    for known in (kernels, helper, included, include_digest, _as_read):
        known.cache_clear()


def text_digest() -> str:
    """Changes when the text of a kernel, or one that kernels include, changes."""
    digest = hashlib.sha256(include_digest().encode())
    for name, kernel in kernels().items():
        digest.update(f"{name} {len(kernel.text)} {kernel.text}".encode())
    return digest.hexdigest()
