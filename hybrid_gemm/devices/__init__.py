"""Devices: `cuda`, `cpu` and `emulator` behind the interface of `base.Device`.

Modules of this package are imported inside functions: two threads, of which one imports the
package and the other a module of it, would wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UnavailableError, UsageError, shown
from ..options import DEVICES

if TYPE_CHECKING:
    from .base import Device


def choose(device: str = "auto", gpus: Sequence[int] | None = None) -> tuple[str, str]:
    """The kind of device to use and, where it was chosen here, why.

    Raises `UsageError` for an unknown kind, `UnavailableError` for one that is not here, as GPUs
    may not be that are named by `gpus`.
    """
    if device not in DEVICES:
        raise UsageError(f"no device is called {device!r}; there are {', '.join(DEVICES)}")
    if device in ("auto", "cuda"):
        from .cuda import driver

        reason = driver.unavailable()
        if reason is None:
            return "cuda", "a CUDA device is here" if device == "auto" else ""
        if device == "cuda":
            raise UnavailableError(
                f'device cuda was asked for: {reason}; --device cpu (device="cpu") works here'
            )
        if gpus is not None:
            raise UnavailableError(
                f"GPUs {shown(list(gpus))} were asked for: {reason}; without --gpus (gpus=) the "
                "cpu multiplies"
            )
        return "cpu", reason
    if device == "emulator":
        from .emulator import program as emulation

        if reason := emulation.unavailable():
            raise UnavailableError(f"device emulator was asked for: {reason}")
    return device, ""


def are_gpus(kind: str) -> bool:
    """Whether devices of this kind are GPUs, before any is opened; see `Device.on_gpu`."""
    return kind == "cuda"


def open_first(kind: str) -> Device:
    """One device of a kind: of several GPUs the first."""
    return open_devices(kind, 1, gpus=[0] if are_gpus(kind) else None)[0]


def open_devices(
    kind: str, workers: int, *, gpus: Sequence[int] | None = None, emulate: int | None = None
) -> list[Device]:
    """The devices that `workers` workers share.

    `gpus` are CUDA ordinals (default: all). With `emulate` the first GPU plays that many
    devices; the emulator makes that many, and the cpu has one memory whatever is asked.
    """
    if gpus is not None and not are_gpus(kind):
        raise UsageError(
            f"gpus (--gpus) {shown(list(gpus))} were named, and the device is {kind}; leave them "
            "out, or take device cuda"
        )
    if kind == "cpu":
        from .cpu import CpuDevice

        return [CpuDevice(workers)]
    if kind == "emulator":
        from .emulator.device import EmulatorDevice

        return [EmulatorDevice(workers, part) for part in range(emulate or 1)]
    from .cuda import device as cuda

    ordinals = list(gpus) if gpus is not None else list(range(cuda.count()))
    if not ordinals:
        raise UsageError("gpus (--gpus) names no GPU; it takes numbers such as 0,1")
    if emulate:
        return [cuda.CudaDevice(ordinals[0], part) for part in range(emulate)]
    opened = [cuda.CudaDevice(ordinal) for ordinal in ordinals]
    for device in opened:
        device.together = len(opened)
    for here, there in itertools.permutations(opened, 2):
        here.reads_memory_of(there.ordinal)
    return list(opened)
