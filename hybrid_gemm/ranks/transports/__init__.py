"""How partials of C get from the rank that made them to the rank that sums them.

Three ways with one interface: by MPI through host memory, by the owner copying its peers'
memory (CUDA IPC, ranks of one node), and by NCCL. In each the owner sums whole pieces in rank
order with the device's own `sum`, so that all three give the same bits. One thread of a rank
calls them all.
"""

from __future__ import annotations

from typing import Any

from ...devices import are_gpus
from ...devices.base import Device
from ...devices.cuda.nccl_group import unavailable as no_library
from ...errors import UnavailableError, in_one_line
from ...options import TRANSPORTS
from .. import launch
from ..rank_plan import RankPlan
from .base import Transport
from .ipc import IpcTransport
from .mpi import MpiTransport
from .nccl import NcclTransport

__all__ = [
    "KINDS", "NAMES", "WORDS", "KeptTransport", "Transport", "names", "no_peer_copies",
    "open_transport",
]  # fmt: skip

NAMES = tuple(name for name in TRANSPORTS if name != "auto")
WORDS = {
    "ipc": "peer copies (CUDA IPC)",
    "nccl": "NCCL messages",
    "mpi": "MPI messages through host memory",
}
KINDS: dict[str, type] = {"ipc": IpcTransport, "nccl": NcclTransport, "mpi": MpiTransport}


class KeptTransport:
    """The transport of this rank's cell, kept from run to run while products are cut alike.
    `asked`, `node` and `device` are as in `open_transport`, `comm` has all ranks."""

    def __init__(self, asked: str, comm: Any, node: int, device: Device) -> None:
        self.asked, self.comm, self.node, self.device = asked, comm, node, device
        self.cut: tuple | None = None  # of the products that it is for
        self.transport: Transport | None = None
        self.words = ""

    def of(self, plan: RankPlan) -> tuple[Transport | None, str]:
        """The transport, None where this rank sums nothing, and how partials are summed, in words.
        Collective."""
        cut = plan.problem.dtype, plan.rounds, plan.workers, plan.panels
        if self.cut == cut:
            return self.transport, self.words
        depth = plan.grid[2]
        cells = [plan.members(first) for first in range(0, plan.ranks, depth)]
        cells = [cell for cell in cells if len(cell) > 1]
        if not cells:
            return None, "none"
        self.close()
        from mpi4py import MPI

        rank = self.comm.rank
        cell = self.comm.Split(rank // depth if plan.adds(rank) else MPI.UNDEFINED, rank)
        self.transport, name, why = open_transport(
            self.asked, self.comm, cells, self.node, cell, plan, self.device
        )
        self.words = f"ordered sum over ranks by {WORDS[name]}" + (f" ({why})" if why else "")
        self.cut = cut
        return self.transport, self.words

    def close(self) -> None:
        """Gives it back. Collective."""
        transport, self.transport, self.cut = self.transport, None, None
        if transport:
            transport.close()
            transport.comm.Free()


def open_transport(asked: str, comm, cells, node: int, cell, plan: RankPlan, device: Device):
    """(the transport, its name, why those before it were not taken) for these cells of ranks.

    `node` names this rank's node, `cell` is the communicator of its cell; a rank that sums
    nothing gets None for a transport. Collective: all ranks get the same name, and raise
    alike: `UnavailableError` for one that cannot work here.
    """
    candidates = names(asked, device.kind)
    facts = [()] * comm.size
    if candidates != ["mpi"]:
        facts = comm.allgather((node, *_gpu_facts(device.unwrapped)))
    checks = {"ipc": _no_ipc, "nccl": _no_nccl, "mpi": lambda facts, cells: None}
    reasons: dict[str, str] = {}
    for name in candidates:
        transport, reason = None, checks[name](facts, cells)
        if not reason:
            try:
                if plan.adds(comm.rank):
                    transport = KINDS[name](cell, plan, comm.rank, device)
            except (RuntimeError, MemoryError) as error:  # the driver, NCCL
                reason = in_one_line(error)
            reason = next(filter(None, comm.allgather(reason)), None)
        if not reason:
            return transport, name, "; ".join(f"no {x.upper()}: {y}" for x, y in reasons.items())
        if transport:  # only another cell cannot have it
            transport.close()
        reasons[name] = reason
    raise launch.agreed(
        UnavailableError(f"transport {asked} was asked for: {reasons[asked]}")
    )  # fmt: skip


def names(asked: str, kind: str) -> list[str]:
    """What to try between devices of a kind, in this order."""
    if not are_gpus(kind) and asked in ("ipc", "nccl"):
        raise UnavailableError(
            f"transport {asked} is between GPUs, and the device is {kind}; "
            "--transport mpi works here"
        )
    if not are_gpus(kind):
        return ["mpi"]
    return list(NAMES) if asked == "auto" else [asked]


def no_peer_copies(comm: Any, node: int, device: Device) -> str | None:
    """Why not all ranks can copy from each other's GPUs, if so; the same on all. Collective."""
    return _no_ipc(comm.allgather((node, *_gpu_facts(device.unwrapped))), [range(comm.size)])


def _gpu_facts(device):
    """This rank's GPU, the GPUs whose memory it can read, and why there is no NCCL, if so."""
    runtime = device.cp.cuda.runtime

    def bus(ordinal: int) -> str:
        return runtime.deviceGetPCIBusId(ordinal)

    reachable = {
        bus(other)
        for other in range(runtime.getDeviceCount())
        if other == device.ordinal or runtime.deviceCanAccessPeer(device.ordinal, other)
    }
    return bus(device.ordinal), reachable, no_library()


def _no_ipc(facts, cells) -> str | None:
    for cell in cells:
        for mine in cell:
            node, _gpu, reachable, _nccl = facts[mine]
            for other in cell:
                if facts[other][0] != node:
                    return f"rank {mine} and rank {other} are on different nodes"
                if facts[other][1] not in reachable:
                    return (
                        f"rank {mine} cannot see the GPU of rank {other} "
                        "(bound away, as by --gpus-per-task, or not linked)"
                    )
    return None


def _no_nccl(facts, cells) -> str | None:
    if reason := next((missing for *_rest, missing in facts if missing), None):
        return reason
    for cell in cells:
        gpus = [facts[rank][:2] for rank in cell]
        if len(set(gpus)) < len(gpus):
            return "ranks share a GPU"
    return None
