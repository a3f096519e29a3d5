"""A rank's matrices, on their way to its device and back. A stand-in plays CuPy."""

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.arrays.operand import Operand
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.streams import HostStream
from hybrid_gemm.execution import staging
from hybrid_gemm.ranks.on_device import fetch, put


class Array:
    """A matrix of GPU 0, into which nothing of the host's is assigned, as CuPy has it."""

    __module__ = "cupy"
    device, data = SimpleNamespace(id=0), SimpleNamespace(device_id=0)
    ndim = property(lambda self: self.host.ndim)
    dtype = property(lambda self: self.host.dtype)
    flags = property(lambda self: self.host.flags)
    shape, strides = (
        property(lambda self, x=x: getattr(self.host, x)) for x in ("shape", "strides")
    )

    def __init__(self, host):
        self.host = host

    def astype(self, dtype):
        return Array(self.host.astype(dtype))

    def __setitem__(self, where, value):
        if isinstance(value, np.ndarray):
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self.host[where] = value.host


@pytest.fixture
def waited(monkeypatch):
    """How often the current stream of the GPU was waited for."""
    found = []
    stream = SimpleNamespace(synchronize=lambda: found.append("stream"))
    cuda = SimpleNamespace(
        Device=lambda ordinal: contextlib.nullcontext(), get_current_stream=lambda: stream
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, asarray=lambda x: x))
    return found


def test_a_matrix_is_cast_to_an_array_of_the_gpu(waited):
    out = Array(np.zeros((3, 5), np.float16))
    made = np.arange(15, dtype=np.float32).reshape(3, 5)
    fetch(Operand.of(Array(made), EmulatorDevice()), out)
    np.testing.assert_array_equal(out.host, made)
    assert waited


def test_streams_are_taken_again(monkeypatch):
    """For a memory pool keeps what it keeps for one stream."""
    device, made = EmulatorDevice(), []
    monkeypatch.setattr(
        EmulatorDevice, "stream", lambda self, urgent=False: made.append(self) or HostStream()
    )
    a = np.arange(15, dtype=np.float32).reshape(3, 5)
    for _ in range(3):
        back = np.zeros((3, 5), np.float64)
        fetch(put(device, Operand.of(a), "float32"), back)
        np.testing.assert_array_equal(back, a)
    assert len(made) == 1


@pytest.mark.parametrize("checks", [False, True])
def test_a_device_that_checks_its_copies_makes_them(checks, monkeypatch):
    made = []
    monkeypatch.setattr(staging, "STAGED_BYTES", 1)
    monkeypatch.setattr(staging, "copy_now", lambda *_: made.append("through slots"))
    device = SimpleNamespace(
        on_gpu=True, checks=checks, unwrapped=None, copy=lambda *_: made.append("by the device")
    )
    staging.copy(device, np.zeros((2, 2)), np.ones((2, 2)), None)
    assert made == ["by the device" if checks else "through slots"]
