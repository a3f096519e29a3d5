"""Arrays as callers give them: NumPy's, a GPU's, or anything with their protocols."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from typing import Any, Protocol

import numpy as np

from ..errors import DTypeError, UsageError
from ..host.resources import cores
from ..problem import make_problem
from .other_libraries import check_dense, library_of, warn_of_meaning
from .strides import address, overlaps_itself
from .strides import is_device_array as is_device_array

# Kinds of dtypes to which NumPy casts numbers, and which hold none: objects, texts and times; so do
# np.void's, whose kind is that of bfloat16 too.
_NO_NUMBERS = "OSUTmM"
# One of these holds all numbers of a dtype of ml_dtypes.
_WIDER = np.dtype("uint8"), np.dtype("int8"), np.dtype("float32")
PIECE = 1 << 18  # elements that a thread of the host works on at a time


def module_of(x: Any) -> Any:
    """The module (numpy or cupy) whose functions take `x`."""
    if not is_device_array(x):
        return np
    import cupy

    return cupy


def as_array(x: Any, name: str = "A") -> Any:
    """NumPy and CuPy arrays as they are; others by their protocol, or by np.asarray.

    Raises `UsageError` for what makes no array, such as a ragged list, and `DTypeError` for None,
    names of files, sparse matrices, mappings, generators and other objects; `name` is the
    operand's.
    """
    if type(x) is np.ndarray or is_device_array(x):
        return x
    if isinstance(x, np.ndarray):
        library = library_of(x)
        return library.view(x, name) if library else x
    if x is None:
        raise DTypeError(f"{name} is None; a matrix is needed")
    if isinstance(x, str | PathLike):
        raise DTypeError(f"{name} is {x!r}; a matrix is needed (numpy.load({x!r}) reads a file)")
    if not library_of(x):
        check_dense(x, name)
    if library := library_of(x):
        return library.view(x, name)
    warn_of_meaning(x, name)
    # Of whose names NumPy would make an array, unless it says itself how one is made.
    if isinstance(x, Mapping) and not hasattr(x, "__array__"):
        raise DTypeError(
            f"{name} is of type {type(x).__name__}, whose entries have names; a matrix is needed, "
            f"such as {name}[{next(iter(x), 'name')!r}]"
        )
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise UsageError(f"{name} makes no array: {error}") from error  # which may be its own
    if array.dtype == object and not array.ndim:
        raise DTypeError(
            f"{name} is of type {type(x).__name__}, of which NumPy makes no matrix; an array or a "
            "list of rows works"
        )
    return array


def as_lists(a: Any, b: Any) -> tuple[list[Any], list[Any]]:
    """The matrices A and B of two lists, sequences or generators. Raises `DTypeError` for what has
    none, and `UsageError` for lists of different lengths."""
    lists: list[list[Any]] = []
    for name, x in (("A", a), ("B", b)):
        try:
            lists.append(list(x))
        except TypeError:
            raise DTypeError(
                f"{name} is of type {type(x).__name__}; a list of matrices is needed"
            ) from None
    left, right = lists
    if len(left) != len(right):
        raise UsageError(
            f"A is a list of {len(left)} and B is a list of {len(right)}; each matrix A takes one B"
        )
    return left, right


@contextlib.contextmanager
def naming_pairs(a: list[Any], b: list[Any]) -> Iterator[None]:
    """Meanwhile what is wrong with the first pair of matrices that are no product is raised with
    its number."""
    try:
        yield
    except (UsageError, DTypeError):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            try:
                make_problem(as_array(x, "A"), as_array(y, "B"))
            except (UsageError, DTypeError) as error:
                raise type(error)(f"pair {i}: {error}") from None
        raise


def broadcast_c(c: Any, m: int, n: int) -> Any:
    """C as m x n, by NumPy's rules: itself, or a view. Raises `UsageError` if it does not
    broadcast."""
    if c.shape == (m, n):
        return c
    try:
        return module_of(c).broadcast_to(c, (m, n))
    except ValueError:
        raise UsageError(
            f"C has shape {tuple(c.shape)}, which does not broadcast to this product's {m} x {n}"
        ) from None


class Multiplier(Protocol):
    """What is asked of the device that multiplies: whether it is a GPU, and its kind in words."""

    on_gpu: bool
    kind: str


def check_device(arrays: Any, device: Multiplier) -> None:
    """Raises `DTypeError` for arrays of a GPU where no GPU multiplies."""
    if not device.on_gpu and any(map(is_device_array, arrays)):
        raise DTypeError(
            f"arrays on a GPU were given, and the device is {device.kind}: cupy.asnumpy copies "
            "them to the host"
        )


def wait_for_streams(*arrays: Any) -> None:
    """Waits for the caller's current streams on the GPUs that have some of the arrays."""
    for ordinal, cp in {x.device.id: module_of(x) for x in arrays if is_device_array(x)}.items():
        with cp.cuda.Device(ordinal):
            cp.cuda.get_current_stream().synchronize()


def silent() -> np.errstate:
    """NumPy says nothing about Inf, NaN and what is rounded to 0, as BLAS does not, whatever the
    caller's `numpy.seterr` asks for."""
    return np.errstate(all="ignore")


def cast_into(dst: Any, src: Any) -> None:
    """dst[...] = src, cast as NumPy casts: whole numbers wrap, floats that are too large become
    Inf."""
    with silent():
        if isinstance(dst, np.ndarray):
            np.copyto(dst, src, casting="unsafe")
        else:
            dst[...] = src.astype(dst.dtype)


def by_rows(x: np.ndarray, work: Callable[[slice], None]) -> None:
    """Calls `work` for spans of rows of an array of the host, by several threads if it is large."""
    if not x.size:
        return
    step = max(1, PIECE * len(x) // x.size)
    spans = [slice(i, i + step) for i in range(0, len(x), step)]
    if len(spans) == 1:
        work(spans[0])
    else:
        with ThreadPoolExecutor(min(cores(), len(spans)), "rows") as pool:
            list(pool.map(work, spans))


class _Addresses:
    """Where an array's elements are, in words that NumPy reads: no element is looked at."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (address(array), True), "shape": array.shape,
            "strides": array.strides, "typestr": f"|V{array.itemsize}",
        }  # fmt: skip


def shares_memory(x: Any, y: Any) -> bool:
    """Whether two arrays have a byte in common. One of the host and one of a GPU have none.

    Decided by NumPy for both kinds: CuPy compares all elements' addresses, which takes longer than
    many a product.
    """
    if not (x.size and y.size):
        return False
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        if not np.may_share_memory(x, y):  # by their bounds, which takes a tenth of the time
            return False
    elif is_device_array(x) != is_device_array(y):
        return False
    try:
        return bool(np.shares_memory(_Addresses(x), _Addresses(y), max_work=10**5))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def is_free(out: np.ndarray, a: np.ndarray, b: np.ndarray, c: Any) -> bool:
    """Whether a product can be written to `out` while A, B and C are read."""
    if not out.flags.writeable or (not out.flags.c_contiguous and overlaps_itself(out)):
        return False
    others = (a, b) if c is None or c is out else (a, b, c)
    return not any(shares_memory(x, out) for x in others)


def is_cast_to(out: np.dtype, dtype: str) -> bool:
    """Whether a product of this dtype is cast to an array of that of `out`, by NumPy's rules."""
    if out.kind in _NO_NUMBERS or out.type is np.void:
        return False
    if out.kind == "V":  # of ml_dtypes, whose rules drop imaginary parts and fractions
        out = next(x for x in _WIDER if np.can_cast(out, x))
    return np.can_cast(dtype, out, "same_kind")


def check_out_type(out: Any) -> None:
    """Raises `DTypeError` for an `out` that is no array."""
    if not (isinstance(out, np.ndarray) or is_device_array(out)):
        raise DTypeError(f"out must be an array that can be written, not {type(out).__name__}")


def check_out(
    out: Any, shape: tuple[int, ...], dtype: str, a: Any, b: Any, c: Any = None,
    *, what: str = "this product",
) -> None:  # fmt: skip
    """Raises `UsageError` or `DTypeError` if a product, or `what` of it, of this shape and dtype
    cannot be written to `out`."""
    check_out_type(out)
    if tuple(out.shape) != shape:
        raise UsageError(f"out has shape {tuple(out.shape)}; {what} is {shape}")
    if not is_cast_to(out.dtype, dtype):
        raise DTypeError(
            f"out has dtype {out.dtype}; the product has dtype {dtype}, which does not cast to it"
        )
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise UsageError("out is read-only; give an array that can be written")
    if overlaps_itself(out):
        raise UsageError(
            f"elements of out overlap each other: its strides are {tuple(out.strides)} bytes; give "
            "an array in which each element has memory of its own"
        )
    for name, x in (("A", a), ("B", b)):
        if x is not None and shares_memory(x, out):
            raise UsageError(f"out overlaps {name}; give it memory of its own")
    if c is not None and not is_same(c, out) and shares_memory(c, out):
        raise UsageError("out overlaps C without being C; give it memory of its own, or C")


def is_same(c: Any, out: Any) -> bool:
    """Whether C and `out` are one matrix in one place."""
    if c is out:
        return True
    alike = is_device_array(c) == is_device_array(out) and c.dtype == out.dtype
    alike = alike and c.shape == out.shape and c.strides == out.strides
    return alike and address(c) == address(out)
