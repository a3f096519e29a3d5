"""How fast a GPU's PCIe link is by its generation and width, as Linux tells them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

DEVICES = Path("/sys/bus/pci/devices")
# Bits of data in a bit on the wire, by GT/s: 8b/10b, 128b/130b, and flits of 256 bytes, 236 of
# them data (PCI Express base specification 6.0).
_ENCODED = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130,
            64.0: 236 / 256}  # fmt: skip
_MOST_LANES = 32
# What copies from and to pinned memory reach of that: 55.0 of 63.0 GB/s, one H200 at 32 GT/s by 16
# lanes, docs/results/peers1_h200.json.
SHARE = 0.87
_USES_HOST_PAGE_TABLES = 100  # cudaDevAttrPageableMemoryAccessUsesHostPageTables


@functools.cache
def of_gpu(cupy: Any, ordinal: int) -> float | None:
    """As `gbps`, of a GPU as CUDA numbers it; None also where it reads the host's page tables, for
    then its data comes over NVLink, beside PCIe (Grace Hopper, POWER9)."""
    runtime = cupy.cuda.runtime
    if runtime.deviceGetAttribute(_USES_HOST_PAGE_TABLES, ordinal):
        return None
    return gbps(runtime.deviceGetPCIBusId(ordinal))


def gbps(address: str) -> float | None:
    """GB/s that copies from and to pinned memory reach, each way, over the link of the device at a
    PCI address ("0000:18:00.0"); None where Linux does not tell."""
    gpu = DEVICES / address.lower()
    speed, lanes = _of_link(gpu, "speed"), _of_link(gpu, "width")
    if speed not in _ENCODED or not 1 <= lanes <= _MOST_LANES:
        return None
    return SHARE * speed * _ENCODED[speed] * lanes / 8


def _of_link(gpu: Path, what: str) -> float:
    """GT/s or lanes of a device's link; 0 where that is not told.

    A link is what the lesser of its two ends can be. Now it may be less, since an idle GPU slows
    its link down; or more, where a virtual machine made up the other end.
    """
    port = gpu / ".."  # by the system, which follows the link that `gpu` is
    ends = [_number(end / f"max_link_{what}") for end in (gpu, port)]
    return max(min(filter(None, ends), default=0.0), _number(gpu / f"current_link_{what}"))


def _number(file: Path) -> float:
    """What a file begins with, such as "32.0 GT/s PCIe" or "16"; 0 where it is none or 255, which
    stands for an unknown width."""
    try:
        found = float(file.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    return found if 0 < found < 255 else 0.0
