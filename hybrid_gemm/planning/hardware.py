"""What planning knows of hardware: `DeviceSpec`, `Links` and `Disk`."""

from __future__ import annotations

import math
from dataclasses import dataclass

Rates = tuple[tuple[int, float], ...]  # (how many at once, GB/s in all), ...


@dataclass(frozen=True)
class Links:
    """GB/s (10^9 bytes) of a host's links: pairs of how many GPUs, or threads for `memcpy`, are
    at it together and what they reach in all. `peers` is a ring, each GPU sending to the next.

    `ordinary` are the rates of one GPU's copies from and to ordinary host memory by the driver
    alone, `staged_h2d`, `staged_d2h` and `staged_both` those of all GPUs' copies between ordinary
    memory and GPUs through page-locked slots, where they were measured. `measured` says when, and
    is empty for assumptions.
    """

    h2d: Rates
    d2h: Rates
    both: Rates
    peers: Rates
    memcpy: Rates
    measured: str = ""
    ordinary: tuple[float, float] | None = None
    staged_h2d: Rates = ()
    staged_d2h: Rates = ()
    staged_both: Rates = ()


@dataclass(frozen=True)
class Disk:
    """GB/s (10^9 bytes) at which a disk gave and took files, where that was seen."""

    read_gbps: float | None = None
    write_gbps: float | None = None

    def with_better(self, other: Disk) -> Disk:
        """The higher ones of two disks' rates."""

        def best(x: float | None, y: float | None) -> float | None:
            return max(filter(None, (x, y)), default=None)

        return Disk(best(self.read_gbps, other.read_gbps), best(self.write_gbps, other.write_gbps))


@dataclass(frozen=True)
class DeviceSpec:
    """What the planner knows of a device.

    `kind` is what users call it (cuda, cpu or emulator), for messages. `unit` tells which devices
    share one piece of hardware (one GPU that plays several). Rates are what the cost model
    assumes, not promises; `best_tflops` is one that no product is known to exceed, `mode_tflops`
    are such rates of what goes to tensor cores (fp32x3, tf32, narrow), where they are known, and
    `links` what was measured of this host's links.

    What planning asks of a device's abilities: `host_memory` (it multiplies matrices of the host
    where they lie), `on_gpu` (NCCL sums between such devices, and tensor cores multiply there),
    and `alignment` (elements): the multiples on which cuts fall where that costs nothing.
    `checked` says that it checks products, which takes memory; `rated` that `tflops` follows from
    times of products that were measured.
    """

    name: str
    kind: str
    unit: int
    memory_bytes: int
    tflops: float
    memory_gbps: float
    link_gbps: float = math.inf
    peer_gbps: float = math.inf
    host_memory: bool = False
    best_tflops: float | None = None
    links: Links | None = None
    on_gpu: bool = True
    alignment: int = 32  # 128-byte lines of float32
    checked: bool = False
    rated: bool = False
    mode_tflops: tuple[tuple[str, float], ...] = ()
