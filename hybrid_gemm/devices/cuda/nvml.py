"""What a GPU did while it was timed: its clock, its power, and what held it back (NVML)."""

from __future__ import annotations

import contextlib


class Monitor:
    """Readings of one GPU, found by its PCI address: NVML ignores CUDA_VISIBLE_DEVICES.

    Without nvidia-ml-py or the library every reading is empty.
    """

    def __init__(self, pci_bus_id: str):
        self._nvml = self._handle = None
        with contextlib.suppress(Exception):  # NVML is not everywhere, and timing goes on
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode())
            self._nvml = pynvml

    def read(self) -> dict:
        """`sm_mhz`, `power_w` and `throttled` (reasons, "" for none); empty without NVML."""
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            return {
                "sm_mhz": nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM),
                "power_w": round(nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000),
                "throttled": ", ".join(n for n, bit in _REASONS.items() if reasons & bit),
            }
        except nvml.NVMLError:
            return {}


_REASONS = {
    "power cap": 0x4, "hardware slowdown": 0x8, "thermal": 0x20, "hardware thermal": 0x40,
    "power brake": 0x80,
}  # fmt: skip
