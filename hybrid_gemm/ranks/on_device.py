"""A rank's matrices, put on its device before a run and fetched from it after."""

from __future__ import annotations

import numpy as np

from ..arrays.operand import Operand
from ..devices.base import Device


def put(home: Device, matrix: Operand, dtype: str) -> Operand:
    """A matrix on a device, brought there if it is not, in the dtype that is computed in."""
    if matrix.home is home and matrix.dtype == dtype:
        return matrix
    stream = home.stream()
    with home.using(stream):
        there = home.empty_like(matrix.array, dtype)
        home.copy(there, matrix.array.astype(dtype, copy=False), stream)
        stream.synchronize()
    return Operand.of(there, home)


def fetch(matrix: Operand, out: np.ndarray) -> None:
    """A matrix that lies on a device, into `out`."""
    device = matrix.home
    stream = device.stream()
    with device.using(stream):
        host = np.empty(matrix.shape, matrix.dtype)
        device.copy(host, matrix.array, stream)
        stream.synchronize()
    out[...] = host
