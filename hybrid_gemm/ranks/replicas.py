"""Whether the matrices that all ranks pass are the same: a few elements of each are looked at."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.caller_arrays import silent
from ..errors import UsageError
from .ending import agreed

ACROSS = 8  # lines of a matrix, from which as many elements are looked at
SUMS = 3
_SHOWN = 8  # ranks in a message
_WEIGHTS = np.random.default_rng(0).uniform(0.5, 1.5, (SUMS, 2 * ACROSS**2))  # 2 of a complex
_WEIGHTS *= np.random.default_rng(1).choice((-1.0, 1.0), _WEIGHTS.shape)

Look = tuple[float, ...]


def look(x: Any) -> Look:
    """Sums of at most `ACROSS`^2 elements that lie evenly in a matrix, or in the middle one of a
    stack: weighted ones, and how far those of the same matrix may be apart. Nothing of what has no
    elements, or lies on a GPU: to copy some from there waits for what its stream has to do."""
    if type(x) is not np.ndarray or not x.size:
        return ()
    while x.ndim > 2:
        x = x[len(x) // 2]
    x = np.atleast_2d(x)
    height, width = x.shape
    across = min(width, max(ACROSS, ACROSS**2 // height))
    down = min(height, ACROSS**2 // across)
    rows, cols = height // down, width // across
    few = x[rows // 2 :: rows, cols // 2 :: cols][:down, :across]
    wide = np.complex128 if few.dtype.kind == "c" else np.float64
    with silent():
        values = np.ascontiguousarray(few, wide).reshape(-1).view(np.float64)
        magnitude = float(np.abs(values).sum())
        if not math.isfinite(magnitude):
            values = np.nan_to_num(values, nan=3, posinf=5, neginf=-7)
            magnitude = float(np.abs(values).sum())
        sums = _WEIGHTS[:, : values.size] @ values
    return *sums.tolist(), magnitude * _tolerance(x.dtype)


def _tolerance(dtype: np.dtype) -> float:
    """Of a sum of magnitudes. Ranks that computed their floats with other libraries differ by
    roundings, and C does not differ by more; other matrices do, in one of the sums."""
    if dtype.kind in "iub":
        return 1e-12
    return 1e-2 if dtype.itemsize < 4 else 1e-4


def check(of_ranks: Sequence[Mapping[str, Look]], read: Container[str] = "AB") -> None:
    """Raises `UsageError` on all ranks where what they found by `look` in a matrix is of several
    matrices: each rank would multiply another. `of_ranks` has it by the matrix's name, for each
    rank; only those are held against each other that are `read`."""
    first = of_ranks[0]
    if of_ranks.count(first) == len(of_ranks):
        return
    for name, here in first.items():
        if name not in read:
            continue
        others = [i for i, found in enumerate(of_ranks) if _differ(here, found[name])]
        if others:
            numbers = ", ".join(map(str, others[:_SHOWN])) + ", ..." * (len(others) > _SHOWN)
            message = (
                f"ranks do not pass the same {name}: its elements on rank 0 are not those on rank"
                f"{'s' * (len(others) > 1)} {numbers}. A matrix that is replicated has the same "
                "everywhere; one rank's own goes to all with distribution='root'"
            )
            raise agreed(UsageError(message))


def _differ(x: Look, y: Look) -> bool:
    """Whether two ranks looked at other elements; unknown where one did not look."""
    if not (x and y):
        return False
    apart = max(x[-1], y[-1])
    return any(abs(mine - other) > apart for mine, other in zip(x[:-1], y[:-1], strict=True))
