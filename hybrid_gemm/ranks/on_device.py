"""A rank's matrices, put on its device before a run and fetched from it after."""

from __future__ import annotations

import numpy as np

from ..arrays.caller_arrays import cast_into, wait_for_streams
from ..arrays.on_gpus import copy_into
from ..arrays.operand import Operand
from ..arrays.strides import Array, is_device_array
from ..devices.base import Device
from ..execution import staging


def put(home: Device, matrix: Operand, dtype: str, *, read: bool = True) -> Operand:
    """A matrix on a device, brought there if it is not, in the dtype that is computed in. One that
    is not `read` is written later."""
    if matrix.home is home and matrix.dtype == dtype:
        return matrix
    with home.streams(1) as (stream,), home.using(stream):
        there = home.empty_like(matrix.array, dtype)
        if read:
            array = staging.cast(home, matrix.array, matrix.home, there.dtype, stream)
            staging.copy(home, there, array, stream)
        stream.synchronize()
    return Operand.of(there, home)


def fetch(matrix: Operand, out: Array) -> None:
    """A finished matrix that lies on a device, into `out` of the host or of a GPU, cast as NumPy
    casts."""
    if is_device_array(out):
        copy_into(out, matrix.array)
        wait_for_streams(out)
        return
    device = matrix.home
    straight = out.dtype == matrix.dtype and out.flags.c_contiguous
    with device.streams(1) as (stream,), device.using(stream):
        host = out if straight else np.empty(matrix.shape, matrix.dtype)
        staging.copy(device, host, matrix.array, stream)
        stream.synchronize()
    if not straight:
        cast_into(out, host)
