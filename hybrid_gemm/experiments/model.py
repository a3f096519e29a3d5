"""The model of a kernel, before anything is timed: traffic, occupancy, roofline. Pure.

The figures follow from the kernel's header (its grid, block and parameters), from the registers
and memory that the compiler reports (`Usage`) and from the machine's limits. No kernel is known
by name, so that a new kernel has a model too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..catalog import ITEM_SIZE, Variant
from ..devices.cuda.nvrtc import Usage
from ..errors import UsageError

WARP = 32
SECTOR = 32  # bytes: the least that memory moves
# Multiply-adds of a dtype a clock, as a share of float32's (compute capability 9.0).
RATE = {"float32": 1.0, "float64": 0.5, "int32": 0.5, "int64": 0.125}
_FAR = 2**20  # a side so large that blocks at the edges do not count


@dataclass(frozen=True)
class Machine:
    """A GPU's limits. Memory is in bytes, `gflops` is 10^9 float32 operations a second, `gbps`
    is 10^9 bytes of its memory a second."""

    name: str
    arch: str
    multiprocessors: int
    threads: int  # a multiprocessor
    blocks: int  # a multiprocessor
    registers: int  # a multiprocessor
    shared: int  # a multiprocessor
    shared_reserved: int  # of it, by the system for each block
    gflops: float
    gbps: float

    @property
    def warps(self) -> int:
        """The most warps that a multiprocessor holds at once."""
        return self.threads // WARP


P100 = Machine("Tesla P100", "sm_60", 56, 2048, 32, 65536, 64 << 10, 0, 9_500, 732)
V100 = Machine("Tesla V100", "sm_70", 80, 2048, 32, 65536, 96 << 10, 0, 15_700, 900)
H200 = Machine("NVIDIA H200", "sm_90", 132, 2048, 32, 65536, 228 << 10, 1024, 66_900, 4_800)


@dataclass(frozen=True)
class Tile:
    """The rows and columns of C that one block computes, and the block's threads (x, y, z)."""

    rows: int
    cols: int
    block: tuple[int, int, int]


def tile(variant: Variant, dtype: str) -> Tile | None:
    """A block's share of C, as the header says; None for kernels that do not multiply, and for
    those that multiply small matrices only."""
    if not variant.kernel.tile:
        return None
    try:
        block = variant.launch(_FAR, _FAR, _FAR, dtype).block
    except UsageError:
        return None
    return Tile(*variant.tile, block)


def waves(blocks: int, machine: Machine, a_multiprocessor: int = 1) -> int:
    """The rounds in which a grid runs, with `a_multiprocessor` blocks at a time on each."""
    return math.ceil(blocks / (machine.multiprocessors * max(1, a_multiprocessor)))


# --- occupancy ----------------------------------------------------------------------------


def resident_blocks(
    machine: Machine, threads: int, registers: int, shared_bytes: int
) -> tuple[int, str]:
    """How many blocks a multiprocessor holds at once, and which limit decides that.

    `threads` are of a block, `registers` of a thread, `shared_bytes` of a block. Registers are
    allocated for a warp in units of 256, by four schedulers; shared memory in units of 256 bytes.
    """
    warps = math.ceil(threads / WARP)
    limits = {"blocks": machine.blocks, "threads": machine.warps // warps}
    if registers:
        a_warp = math.ceil(registers * WARP / 256) * 256
        limits["registers"] = machine.registers // 4 // a_warp * 4 // warps
    if shared := shared_bytes + machine.shared_reserved:
        limits["shared memory"] = machine.shared // (math.ceil(shared / 256) * 256)
    least = min(limits, key=limits.__getitem__)
    return limits[least], least


def occupancy(machine: Machine, threads: int, registers: int, shared_bytes: int) -> float:
    """The warps that a multiprocessor holds at once, as a share of the most it can hold."""
    blocks, _why = resident_blocks(machine, threads, registers, shared_bytes)
    return blocks * math.ceil(threads / WARP) / machine.warps


# --- traffic ------------------------------------------------------------------------------


def sectors(addresses: Iterable[int]) -> int:
    """The memory sectors that one access of a warp touches, from its threads' byte addresses."""
    return len({address // SECTOR for address in addresses})


@dataclass(frozen=True)
class Traffic:
    """Reads of A and B from global memory, as if there were no caches.

    `loads`: elements read for each multiply-add. `flop_per_byte`: 2 flops a multiply-add, over
    the bytes moved, in sectors where threads read for themselves. `warp_sectors`: sectors of A
    and of B that a warp moves in a step of K; None where blocks read whole tiles.
    """

    loads: float
    flop_per_byte: float
    warp_sectors: tuple[int, int] | None


def traffic(block: Tile, layout: str, dtype: str, staged: bool) -> Traffic:
    """The traffic of a block's tile for operands stored as `layout` says; `staged` means that
    the block reads them through shared memory."""
    size = ITEM_SIZE[dtype]
    if staged:
        sides, area = block.rows + block.cols, block.rows * block.cols
        return Traffic(sides / area, 2 * area / (sides * size), None)
    bx, by, _bz = block.block
    down, across = block.rows // by, block.cols // bx  # a thread's own elements of C
    warp = [(t % bx, t // bx) for t in range(min(WARP, bx * by))]
    # Rows of A, and columns of B where it is transposed, lie far apart.
    along = _FAR * size if layout[1] == "t" else size
    a = sum(sectors((y * down + i) * _FAR * size for _x, y in warp) for i in range(down))
    b = sum(sectors((x * across + j) * along for x, _y in warp) for j in range(across))
    flops = 2 * len(warp) * down * across
    return Traffic((down + across) / (down * across), flops / ((a + b) * SECTOR), (a, b))


def roofline_gflops(machine: Machine, flop_per_byte: float, dtype: str) -> float:
    """The rate that a kernel cannot exceed: the arithmetic's, or what memory's rate allows."""
    return min(machine.gflops * RATE[dtype], flop_per_byte * machine.gbps)


# --- all of it ----------------------------------------------------------------------------


def describe(
    variant: Variant, dtype: str, usage: Usage | None, machine: Machine, m: int, n: int, k: int
) -> dict[str, Any]:
    """The model as columns of a row; what is not known is left out.

    `usage` is None where there is no compiler: then only what follows from the header is there.
    Raises `UsageError` where the kernel cannot take the sizes.
    """
    if variant.kernel.library:
        return {}
    launch, block = variant.launch(m, n, k, dtype), tile(variant, dtype)
    threads = math.prod(launch.block)
    out: dict[str, Any] = {"blocks": math.prod(launch.grid), "block_threads": threads}
    if block is not None:
        out |= {"block_rows": block.rows, "block_cols": block.cols}
    if usage is None:
        return out
    shared = usage.shared_bytes + launch.shared_bytes
    held, limit = resident_blocks(machine, threads, usage.registers, shared)
    out |= {
        "registers": usage.registers,
        "local_bytes": usage.stack_bytes,
        "shared_bytes": shared,
        "occupancy": occupancy(machine, threads, usage.registers, shared),
        "occupancy_limit": limit,
        "waves": waves(out["blocks"], machine, held),
    }
    if block is not None:
        moved = traffic(block, variant.kernel.layouts[0], dtype, staged=shared > 0)
        out |= {
            "loads_a_madd": moved.loads,
            "warp_sectors": moved.warp_sectors and sum(moved.warp_sectors),
            "flop_per_byte": moved.flop_per_byte,
            "roofline_gflops": roofline_gflops(machine, moved.flop_per_byte, dtype),
        }
    return out
