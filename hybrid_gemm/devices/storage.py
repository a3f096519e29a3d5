"""The storage order of a matrix that is known to have one."""

from __future__ import annotations

from ..arrays.strides import layout
from .roles import Array


def stored(view: Array) -> tuple[str, int]:
    """("n", leading dimension) of a row-major matrix, ("t", leading dimension) of a column-major
    one. Raises `ValueError` for a view that is neither, which no kernel reads."""
    found = layout(view)
    if found is None:
        raise ValueError(f"a view with strides {view.strides} has no leading dimension")
    return found
