"""The roles of devices: a wrapped device does everything as the device that it wraps."""

import inspect

from hybrid_gemm.devices.base import Device
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.devices.roles import Facts
from hybrid_gemm.devices.wrapped import WrappedDevice

# Made of other members, so that the wrapped device's own are called.
DERIVED = {"empty_like", "time_ms"}
# What a wrapper does in its own way.
OWN = {"bind", "preparable", "prepared", "prepare_ahead", "listed", "splitter"}


def public(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_wrapping_hands_on_every_member():
    wrapper = WrappedDevice(CpuDevice())
    handed_on = {name for name in vars(WrappedDevice) if not name.startswith("_")}
    assert public(Device) | set(inspect.get_annotations(Facts)) == handed_on | DERIVED
    for name in handed_on - OWN:
        assert getattr(wrapper, name) == getattr(wrapper.device, name)
