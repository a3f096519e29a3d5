"""How far products lie from those to which a variant's constants were fitted. Pure.

Sides that are near do not tell: constants of counts that hardly varied where a variant was timed
may be anything, and where a product has much of these, its predicted time is worth little. What
tells is the leverage of a product in the fit, whose root is in proportion to the error that the
constants bring with them (Hoaglin and Welsch 1978).
"""

from __future__ import annotations

import numpy as np

_LEAST = 1e-9  # of what counts vary by, taken of counts that follow from others
_FARTHEST = 100.0  # where nothing is known any more


def of(shares: np.ndarray) -> np.ndarray:
    """A matrix that `distances` asks, by the counts at each product that was timed, as shares of
    its time. What has a count that none of these has is far from all."""
    scales = np.sqrt((shares**2).sum(0))
    scales[scales == 0] = 1
    even = shares / scales
    alike = even.T @ even + _LEAST * np.eye(len(scales))
    found = np.linalg.inv(np.linalg.cholesky(alike)) / scales
    farthest = np.sqrt(((shares @ found.T) ** 2).sum(1).max())
    return (found / farthest).astype(np.float32)


def distances(shares: np.ndarray, reaches: np.ndarray) -> np.ndarray:
    """How many times as far products, each with a matrix of its own, lie as the farthest of those
    that were timed; 1 for those that do not lie farther."""
    moved = (reaches @ shares[:, :, None])[:, :, 0]
    moved *= moved
    return np.minimum(np.maximum(np.sqrt(moved.sum(1)), 1.0), _FARTHEST)
