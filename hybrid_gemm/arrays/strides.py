"""How matrices lie in memory: their order and leading dimension, read off a view's strides.

A view is a 2-D array of NumPy's or CuPy's. Order `n` is row-major: elements of a row are
neighbours, and the leading dimension is the number of elements from one row to the next. Order
`t` is column-major, and the leading dimension goes from one column to the next. Nothing here
reads an element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

# An array of NumPy's or CuPy's. They have no type in common, and neither library's annotations
# admit the other's arrays in arithmetic, so code that computes with either takes this.
Array = Any


class View(Protocol):
    """What is read of a 2-D array of NumPy's or CuPy's. Strides are in bytes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def strides(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...


def leading(view: View, order: str) -> int | None:
    """The leading dimension, in elements, of a view read in `order` "n" or "t".

    None if its elements do not lie in that order. A matrix of a single row (or column) lies in
    both: `leading(np.zeros((3, 5)), "n") == 5`, and in order "t" it is None.
    """
    step = 1 if order == "n" else -1
    (count, length), (outer, inner) = view.shape[::step], view.strides[::step]
    size = view.dtype.itemsize
    if count <= 1 or length == 0:
        return max(1, length) if length <= 1 or inner == size else None
    if length > 1 and inner != size:
        return None
    return outer // size if outer % size == 0 and outer >= size * max(1, length) else None


class StandIn(NamedTuple):
    """How a matrix would lie that there is not."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: np.dtype


def stand_in(rows: int, cols: int, dtype: str, order: str) -> StandIn:
    """A matrix without elements, for what asks how it lies."""
    of = np.dtype(dtype)
    row_major = cols * of.itemsize, of.itemsize
    col_major = of.itemsize, rows * of.itemsize
    return StandIn((rows, cols), row_major if order == "n" else col_major, of)


def turned(view: View, order: str) -> bool:
    """Whether a matrix has to be transposed to lie in an order. One that lies in neither, as with
    steps both ways, is copied row by row first."""
    if leading(view, order):
        return False
    return order == "t" or bool(leading(view, "t"))


def fewest_transposed(layouts: Iterable[str], a: View, b: View) -> str:
    """The one of a kernel's layouts, storage orders of A and B such as "nt", for which the fewest
    operands are transposed first, and rather B than A."""
    of_a, of_b = ({order: turned(x, order) for order in "nt"} for x in (a, b))
    return min(layouts, key=lambda orders: 2 * of_a[orders[0]] + of_b[orders[1]])


def runs(dst: View, src: View) -> tuple[int, int, int, int] | None:
    """How to copy `src` to `dst`, of equal shape and dtype, as a 2-D copy of bytes.

    Returns the pitch of `dst`, the pitch of `src`, the width of a contiguous run, all in bytes,
    and the number of runs. None if the two have no storage order in common. Matrices without
    gaps are one run, which GPUs copy to each other faster than many.
    """
    for order in "nt":
        lds, ldd = leading(src, order), leading(dst, order)
        if lds and ldd:
            size = src.dtype.itemsize
            height, width = src.shape if order == "n" else src.shape[::-1]
            if lds == ldd == width:
                return height * width * size, height * width * size, height * width * size, 1
            return ldd * size, lds * size, width * size, height
    return None


def overlaps_itself(view: View) -> bool:
    """Whether elements of a view lie over each other, as those of a broadcast view do. A view
    whose rows and columns are interleaved, which `as_strided` alone makes, is taken for one."""
    if 0 in view.shape:
        return False
    reach = view.dtype.itemsize
    pairs = zip(view.strides, view.shape, strict=True)
    for step, size in sorted((abs(step), size) for step, size in pairs if size > 1):
        if step < reach:
            return True
        reach += step * (size - 1)
    return False


class Reach(NamedTuple):
    """The bytes that an array's elements lie in: `extent` from the first to past the last, and of
    these runs of `width` that begin `pitch` apart; a pitch of 0 where all are one run. `before` are
    those in front of the array's address."""

    extent: int
    pitch: int
    width: int
    before: int = 0

    def meets(self, at: int, other: Reach, other_at: int) -> bool:
        """Whether an array at this address may have a byte in common with another one. Never said
        of two parts of one matrix that have none, such as blocks side by side."""
        at, other_at = at - self.before, other_at - other.before
        if at >= other_at + other.extent or other_at >= at + self.extent:
            return False
        pitch = self.pitch or other.pitch
        if not pitch or pitch != (other.pitch or pitch):
            return True
        apart = (at - other_at) % pitch
        return apart < other.width or apart + self.width > pitch


NOWHERE = Reach(0, 0, 0)  # of an array that is not read


def reach(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Reach:
    """That of an array with these strides, in bytes."""
    steps = sorted([(abs(step), n) for n, step in zip(shape, strides, strict=True) if n > 1])
    before = -sum([(n - 1) * min(0, step) for n, step in zip(shape, strides, strict=True)])
    extent = sum((n - 1) * step for step, n in steps) + itemsize
    if steps and len(shape) <= 2:
        pitch, count = steps[-1]
        width = extent - (count - 1) * pitch
        if width < pitch:
            return Reach(extent, pitch, width, before)
    return Reach(extent, 0, extent, before)


def is_device_array(x: object) -> bool:
    """Whether `x` is a CuPy array."""
    module = type(x).__module__ or ""  # numpy.ctypeslib's types name none
    return module.partition(".")[0] == "cupy"


def lies(array: Any) -> tuple[Any, ...]:
    """How an array lies: what programs, products and runs of one kind have in common."""
    return array.shape, array.strides, array.dtype


def address(array: Array) -> int:
    """The address of the first element of a NumPy or CuPy array."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def span(array: Array) -> range:
    """The addresses of a NumPy or CuPy array's bytes, from the first to past the last; of one that
    has an element."""
    start = stop = address(array)
    for step, count in zip(array.strides, array.shape, strict=True):
        start, stop = start + min(0, step * (count - 1)), stop + max(0, step * (count - 1))
    return range(start, stop + array.itemsize)


def layout(view: View) -> tuple[str, int] | None:
    """The order of a view and its leading dimension: ("n", ld) or ("t", ld); None for neither.

    A view that lies in both orders is "n".
    """
    for order in "nt":
        if ld := leading(view, order):
            return order, ld
    return None


def stored(view: View) -> tuple[str, int]:
    """As `layout`, of a matrix that is known to have one. Raises `ValueError` for a view that has
    none, which no kernel reads."""
    found = layout(view)
    if found is None:
        raise ValueError(f"a view with strides {view.strides} has no leading dimension")
    return found
