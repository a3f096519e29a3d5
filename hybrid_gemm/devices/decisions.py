"""How products came out whose arithmetic depends on their data: fp32x3 and fp64x."""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from . import residue_products, tensor_core_products
from .base import Device


def taken(device: Device, problem: Problem) -> np.ndarray:
    """How many products in a problem's arithmetic were made in each way so far on a device, as
    `compute_modes.words` takes them. Waits for them."""
    if problem.compute == "fp64x":
        return residue_products.taken(device)
    return tensor_core_products.verdicts(device, problem)
