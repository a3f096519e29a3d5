"""Kernel arguments as the CUDA driver is given them."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.devices import driver

MAP = np.arange(16, dtype=np.uint64).view([("words", np.uint64, 16)])


@pytest.mark.parametrize(
    "args",
    [
        [np.int32(-3)],
        [MAP, MAP[::-1], np.int32(7), np.float32(-0.0), np.int64(2**40)],
        [np.int32(1), np.float64(np.inf), np.int32(2), np.uint64(2**63), np.float32(1.5)],
    ],
    ids=["one", "maps", "mixed"],
)
def test_arguments_lie_where_it_is_said(args):
    values, offsets = driver.packed(args)
    assert len(offsets) == len(args) and all(offset % 8 == 0 for offset in offsets)
    ends = [*offsets[1:], ctypes.sizeof(values)]
    for arg, start, end in zip(args, offsets, ends, strict=True):
        assert start + arg.nbytes <= end
        assert bytes(values)[start : start + arg.nbytes] == arg.tobytes()


def test_matrices_are_given_by_their_address():
    matrix = SimpleNamespace(data=SimpleNamespace(ptr=0x7F0012345600))
    values, offsets = driver.packed([np.int32(5), matrix, np.int32(6)])
    assert bytes(values)[offsets[1] : offsets[2]] == (0x7F0012345600).to_bytes(8, "little")
    assert bytes(values)[offsets[2] :][:4] == (6).to_bytes(4, "little")


def test_what_no_kernel_takes_is_an_error():
    with pytest.raises(KeyError):
        driver.packed([np.complex64(1)])
