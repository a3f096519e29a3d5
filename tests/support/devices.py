"""Devices that are here, and parameters and decorators for tests of one kind of device."""

import functools

import pytest

from hybrid_gemm import devices
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.options import DEVICES as NAMES

KINDS = [name for name in NAMES if name != "auto"]


def _reason(kind: str) -> str | None:
    try:
        devices.choose(kind)
    except UnavailableError as error:
        return str(error)
    return None


# Why each kind of device is not here; None if it is.
REASONS = {kind: _reason(kind) for kind in KINDS}


def marks(kind: str) -> list:
    """Marks of a test that needs such a device: it is skipped, with the reason, without one."""
    skip = pytest.mark.skipif(REASONS[kind] is not None, reason=str(REASONS[kind]))
    return [skip, pytest.mark.gpu] if kind == "cuda" else [skip]


def on(kind: str, value=None):
    """A parameter for tests of one kind of device, skipped where that is not here; its `value` is
    the kind unless another is given."""
    return pytest.param(kind if value is None else value, marks=marks(kind))


def needs(kind: str):
    """Decorates a test that needs such a device."""

    def decorate(test):
        return functools.reduce(lambda made, mark: mark(made), marks(kind), test)

    return decorate


# What tests of any device run on, as pytest's first lines say: each kind that is here, and where
# none is, all of them, skipped.
HERE = [kind for kind in KINDS if REASONS[kind] is None]
DEVICES = [on(kind) for kind in HERE]
KERNEL_DEVICES = [on(kind) for kind in HERE if kind != "cpu"] or [on("emulator"), on("cuda")]


@functools.cache
def open_device(kind: str, **options):
    """A device of that kind, one for all tests; `options` are those of the emulator."""
    if options:
        from hybrid_gemm.devices.emulator import program
        from hybrid_gemm.devices.emulator.device import EmulatorDevice

        return EmulatorDevice(options=program.Options(**options))
    return devices.open_devices(kind, 1, gpus=[0] if kind == "cuda" else None)[0]
