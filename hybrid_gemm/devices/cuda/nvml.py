"""What a GPU did while it was timed: its clock, its power, and what held it back (NVML)."""

from __future__ import annotations

import functools
from typing import Any

_REASONS = {
    "power cap": 0x4, "hardware slowdown": 0x8, "thermal": 0x20, "hardware thermal": 0x40,
    "power brake": 0x80,
}  # fmt: skip


@functools.cache
def _handle(pci_bus_id: str) -> tuple[Any, Any]:
    """NVML and its GPU at a PCI address; Nones without nvidia-ml-py or the library."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
    except Exception:  # NVML is not everywhere, and timing goes on
        return None, None


def readings(pci_bus_id: str) -> dict[str, Any]:
    """`sm_mhz`, `power_w` and `throttled` (reasons, "" for none) of the GPU at a PCI address, for
    NVML ignores CUDA_VISIBLE_DEVICES; empty without NVML."""
    nvml, handle = _handle(pci_bus_id)
    if nvml is None:
        return {}
    try:
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "power_w": round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "throttled": ", ".join(n for n, bit in _REASONS.items() if reasons & bit),
        }
    except nvml.NVMLError:
        return {}
