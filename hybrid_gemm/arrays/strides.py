"""How matrices lie in memory: views of NumPy's or CuPy's, looked at and not touched."""

from __future__ import annotations

import numpy as np


def leading(view, order: str) -> int | None:
    """The leading dimension of a view read row-major ('n') or column-major ('t'), if it is."""
    step = 1 if order == "n" else -1
    (count, length), (outer, inner) = view.shape[::step], view.strides[::step]
    size = view.dtype.itemsize
    if count <= 1 or length == 0:
        return max(1, length) if length <= 1 or inner == size else None
    if length > 1 and inner != size:
        return None
    return outer // size if outer % size == 0 and outer >= size * max(1, length) else None


def runs(dst, src) -> tuple[int, int, int, int] | None:
    """Pitches of both, width and height in bytes and runs of a copy between matrices of one
    storage order; None if they have none in common. One run is what peers copy faster."""
    for order in "nt":
        lds, ldd = leading(src, order), leading(dst, order)
        if lds and ldd:
            size = src.itemsize
            height, width = src.shape if order == "n" else src.shape[::-1]
            if lds == ldd == width:
                return height * width * size, height * width * size, height * width * size, 1
            return ldd * size, lds * size, width * size, height
    return None


def address(array) -> int:
    """Of the first element of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def layout(view) -> tuple[str, int] | None:
    """('n', ld) for a row-major view, ('t', ld) for a column-major one, None for neither."""
    for order in "nt":
        if ld := leading(view, order):
            return order, ld
    return None
