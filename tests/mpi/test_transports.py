"""The transports between GPUs without a GPU: their books and messages are the same when memory
is shared memory of this host, and NCCL's messages are MPI's. Delays shuffle who is first."""

import contextlib
import ctypes
import mmap
import random
import sys
import time
import types

import numpy as np
import pytest
from support.arrays import WithPointer, integers

from hybrid_gemm import catalog
from hybrid_gemm.arrays.operand import Operand, Operands
from hybrid_gemm.devices.base import HostEvent, HostStream
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.execution.checked_device import CheckedDevice
from hybrid_gemm.execution.checks import Checks
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks import transports
from hybrid_gemm.ranks.rank_plan import make_rank_plan
from hybrid_gemm.ranks.rank_run import RankRun
from hybrid_gemm.ranks.transports import KINDS

pytestmark = pytest.mark.mpi


def array_at(address: int, shape, dtype) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def mapped(path: str, size: int | None = None):
    with open(path, "r+b" if size is None else "w+b") as file:
        if size is not None:
            file.truncate(size)
        memory = mmap.mmap(file.fileno(), 0)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _Event(HostEvent):
    done = True


class _Stream(HostStream):
    cupy = types.SimpleNamespace(ptr=0)

    def record(self, event=None):
        return _Event()


class SharedMemoryDevice(CpuDevice):
    """The cpu with memory of its own, and as much of CuPy as the transports ask for."""

    host_memory = False
    kind = "pretended"
    ordinal = 0

    def __init__(self, folder, rank: int):
        super().__init__(2)
        self.paths, self.kept = {}, []
        device = self

        class Memory:
            def __init__(self, size):
                path = f"{folder}/{rank}-{len(device.paths)}"
                memory, self.ptr = mapped(path, size)
                device.paths[self.ptr] = path
                device.kept.append(memory)

        def open_handle(handle):
            memory, address = mapped(handle.decode())
            device.kept.append(memory)
            return address

        runtime = types.SimpleNamespace(
            ipcGetMemHandle=lambda pointer: device.paths[pointer].encode(),
            ipcOpenMemHandle=open_handle,
            ipcCloseMemHandle=lambda pointer: None,
        )
        cuda = types.SimpleNamespace(
            Device=lambda ordinal: contextlib.nullcontext(),
            Memory=Memory,
            UnownedMemory=lambda pointer, size, owner, ordinal: pointer,
            MemoryPointer=lambda pointer, offset: pointer + offset,
            runtime=runtime,
        )
        self.cp = types.SimpleNamespace(
            cuda=cuda, ndarray=lambda shape, dtype, memptr: array_at(memptr, shape, dtype)
        )

    def stream(self, urgent=False):
        return _Stream()

    def gemm(self, *arguments, **options):
        time.sleep(random.choice([0, 0.001, 0.004, 0.02]))  # others overtake a piece by rounds
        super().gemm(*arguments, **options)

    def sum(self, *arguments, **options):
        time.sleep(random.random() * 0.004)
        super().sum(*arguments, **options)


class PretendedNccl:
    NCCL_CHAR = 0

    def __init__(self, world):
        self.world, self.group = world, []

    def get_unique_id(self):
        return 7

    def NcclCommunicator(self, size, unique, rank):
        return types.SimpleNamespace(
            send=lambda pointer, count, kind, peer, stream: self._add(
                "Isend", pointer, count, peer
            ),
            recv=lambda pointer, count, kind, peer, stream: self._add(
                "Irecv", pointer, count, peer
            ),
            destroy=lambda: None,
        )

    def _add(self, call, pointer, count, peer):
        self.group.append((call, array_at(pointer, count, np.uint8), peer))

    def groupStart(self):
        assert not self.group

    def groupEnd(self):
        requests = [getattr(self.world, call)(data, peer) for call, data, peer in self.group]
        for request in requests:
            request.Wait()
        self.group.clear()


def damage(monkeypatch, kind) -> list:
    """Lets every partial of others arrive with a wrong bit the first time. Returns their list."""
    arrived, real = [], kind._others

    def others(self, round):
        found = real(self, round)
        for source, partial in (found or {}).items():
            if (round, source) not in arrived:
                arrived.append((round, source))
                partial.view("u4")[-1, -1] ^= 1 << 30
        return found

    monkeypatch.setattr(kind, "_others", others)
    return arrived


@pytest.mark.parametrize("name", ["ipc", "nccl", "mpi"])
@pytest.mark.parametrize(
    ("lanes", "rounds", "damaged"),
    [(1, 2, False), (2, 1, False), (2, 5, False), ("there", 1, False), ("there", 5, False),
     (2, 5, True)],
)  # fmt: skip
def test_pieces_arrive_whole(comm, name, rounds, lanes, damaged, rng, tmp_path, monkeypatch):
    """The rank multiplies by one or two threads (lanes), or has A and B on its device. Partials
    that arrive damaged are sent again."""
    if comm.size == 1:
        pytest.skip("one rank sums nothing")
    folder = comm.bcast(str(tmp_path))
    device = SharedMemoryDevice(folder, comm.rank)
    if name == "nccl":
        module = PretendedNccl(comm.Dup())
        monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
        monkeypatch.setitem(
            sys.modules, "cupy.cuda", types.SimpleNamespace(nccl=module, __name__="cupy.cuda")
        )
        device.empty = lambda rows, cols, dtype: np.empty((rows, cols), dtype).view(WithPointer)
    arrived = []
    if damaged:
        arrived, device = damage(monkeypatch, KINDS[name]), CheckedDevice(device)
    blas = catalog.get("blas").variant()
    for m, n, k in [(40, 30, 50), (3, 70, 64), (1, 1, 9), (200, 5, 21)]:
        problem = Problem(m, n, k, alpha=2, beta=3)
        a, b, c = (integers(rng, shape) for shape in ((m, k), (k, n), (m, n)))
        plan = make_rank_plan(problem, device.spec(), comm.size, split="cols", rounds=rounds)
        summed = plan.adds(comm.rank)
        cell = comm.Split(0 if summed else 1, comm.rank)
        box, strip = plan.box(comm.rank), plan.strip(comm.rank)
        transport = KINDS[name](cell, plan, comm.rank, device) if summed else None
        for _ in range(2):  # transports are kept from run to run
            operands = None
            arrived.clear()
            before = device.tally if damaged else Checks()
            if box:
                mine = (strip.rows.slice, strip.cols.slice) if strip else (slice(0, 0),) * 2
                out = np.full_like(c[mine], -99)
                blocks = a[:, box.ks.slice], b[box.ks.slice], c[mine], out
                home = device if lanes == "there" else None
                operands = Operands(problem, *(Operand.of(x, home) for x in blocks))
            there = box and all(x.lies_on(device) for x in (operands.a, operands.b))
            run = RankRun(
                plan, comm.rank, [device],
                lambda inner: (make_plan(inner, [device.spec()], 1, split="rows"), blas),
                there=bool(there),
            )  # fmt: skip
            run.lanes = 1 if lanes == "there" else lanes
            comm.Barrier()
            run.execute(operands, transport)
            if strip:
                np.testing.assert_array_equal(out, (2 * (a @ b) + 3 * c)[mine])
            if damaged:
                checks = device.tally.since(before)
                assert checks.repeated == len(arrived)
                assert {x.what for x in checks.faults} <= {"partial"}
            comm.Barrier()
        if transport:
            transport.close()


def test_what_another_cell_cannot_have_is_closed(monkeypatch):
    device, closed = types.SimpleNamespace(kind="cuda", unwrapped=None), []
    answers = iter([[(0, "gpu", {"gpu"}, None)], [None, "no memory there"], [None, None]])
    comm = types.SimpleNamespace(rank=0, size=1, allgather=lambda _: next(answers))
    plan = types.SimpleNamespace(adds=lambda rank: True)

    def opened(name):
        return lambda *_: types.SimpleNamespace(close=lambda: closed.append(name))

    monkeypatch.setattr(transports, "_gpu_facts", lambda device: ())
    monkeypatch.setattr(transports, "names", lambda asked, kind: ["ipc", "mpi"])
    monkeypatch.setattr(transports, "KINDS", {name: opened(name) for name in ("ipc", "mpi")})
    _, name, why = transports.open_transport("auto", comm, [[0]], 0, comm, plan, device)
    assert (name, why, closed) == ("mpi", "no IPC: no memory there", ["ipc"])
