"""Where memory is short, and what is kept from call to call: short forms of scripts/memory."""

import contextlib
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.devices import open_device
from support.emulation import needs_emulator

import hybrid_gemm
from hybrid_gemm import Runner
from hybrid_gemm.catalog import Launch
from hybrid_gemm.devices import packed_product
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.streams import grown
from hybrid_gemm.errors import OutOfMemoryError
from hybrid_gemm.execution import staging
from hybrid_gemm.host import kept as host_kept
from hybrid_gemm.host.kept import Kept, Known

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fuzzing import growth, judge, shortage  # noqa: E402

# --- an allocation fails ------------------------------------------------------------------


@needs_emulator  # which has the compiler that the failing malloc takes too
@pytest.mark.parametrize(
    "name",
    ["cpu rows, beta", pytest.param("emulator critical", marks=pytest.mark.campaign), "strassen"],
)
def test_any_allocation_that_fails_is_a_clear_error(name, tmp_path):
    found = shortage.campaign(name, tmp_path)
    assert found["wrong"] == []
    assert found["allocations"] >= 3 and found["bytes_leaked"] <= 0
    assert found["refused"] + found["incomplete"] >= found["allocations"]


@pytest.mark.parametrize(("name", "memory"), [  # outside campaigns each name, and each memory
    pytest.param(name, memory, marks=[pytest.mark.campaign] if (i + j) % 2 else [])
    for i, name in enumerate(shortage.ON_DEVICES)
    for j, memory in enumerate(shortage.MEMORIES)
])  # fmt: skip
def test_any_allocation_of_a_device_that_fails_is_a_clear_error(kernel_device, name, memory):
    """Of small matrices: they are allocated as often, and the emulator multiplies slowly."""
    side = 48 if kernel_device == "emulator" else shortage.SIDE
    found = shortage.on_device(kernel_device, name, memory, side)
    assert found["wrong"] == []
    assert found["allocations"] >= (memory == "device") and found["bytes_leaked"] <= 0
    assert found["right"] + found["refused"] + found["incomplete"] == 2 * found["allocations"] + 4


@needs_emulator
def test_memory_of_a_device_that_is_kept_is_found(monkeypatch):
    kept, note = [], shortage.Allocations.note

    def keep(self, device, made):
        note(self, device, made)
        kept.append(made)

    monkeypatch.setattr(shortage.Allocations, "note", keep)
    monkeypatch.setattr(shortage, "SETTLE_S", 0)
    assert "bytes leaked" in " ".join(shortage.on_device("emulator", "cols", "device", 48)["wrong"])


PLANTED = """
    import contextlib, json
    from fuzzing import shortage
    from hybrid_gemm.programs import planned, program
    from hybrid_gemm.devices.cpu import CpuDevice

    shortage.SETTLE_S = 0.1
    kept, right_gemm = [], CpuDevice.gemm

    def gemm(self, variant, a, b, c, **more):
        kept.append(c.copy())
        c[0] = 5
        right_gemm(self, variant, a, b, c, **more)

    CpuDevice.gemm = gemm
    for each in planned, program:
        each.shortage_in_words = lambda task: contextlib.nullcontext()
    print(json.dumps(shortage.Shortage("cpu rows, beta").all()["wrong"]))
"""


@needs_emulator
def test_a_leak_an_unclear_error_and_a_wrong_product_are_found(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLANTED)], capture_output=True, text=True,
        env=shortage.environment(tmp_path), timeout=100,
    )  # fmt: skip
    wrong = " ".join(json.loads(done.stdout))
    assert "MemoryError: Unable to allocate" in wrong
    assert "bytes leaked" in wrong and "wrong after all failures" in wrong


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("shapes", [
    ((2**45, 2, 2), (2**45, 2, 2)), ((2**45, 2, 2), (2, 2)), ((2**29, 1), (1, 2**29)),
], ids=str)  # fmt: skip
def test_a_product_too_large_for_any_memory_is_a_clear_error(device, shapes, dtype):
    a, b = (np.broadcast_to(np.ones((), dtype), shape) for shape in shapes)
    with pytest.raises(OutOfMemoryError, match=r"^(A of shape|m=536870912) .*: .*[^.]; fewer"):
        hybrid_gemm.matmul(a, b, device=device)


@pytest.mark.parametrize(("m", "n"), [(3, 0), (0, 3)])
def test_an_empty_c_takes_no_memory_for_a_and_b(device, m, n):
    made = []
    runners = Runner(device=device), Runner(device=device, algorithm="3m")
    for runner, dtype, stack in itertools.product(runners, ("i1", "f2", "c8"), ((), (2,))):
        if stack and device != "cpu":  # pair by pair: as without a stack
            continue
        a, b = (np.broadcast_to(np.ones((), dtype), (*stack, *x)) for x in ((m, 9), (9, n)))
        assert runner.matmul(a, b).shape == (*stack, m, n)  # imports, plans
        a, b = (
            np.broadcast_to(np.ones((), dtype), (*stack, *x)) for x in ((m << 16, 9), (9, n << 16))
        )
        tracemalloc.start()
        try:
            assert runner.matmul(a, b).shape == (*stack, m << 16, n << 16)
            made.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert max(made) < 1 << 17


# --- what is kept -------------------------------------------------------------------------


def test_the_last_things_are_kept():
    kept = Kept(3)
    for key in "abc":
        kept.put(key, key.upper())
    assert kept.get("a") == "A"
    kept.put("d", "D")  # in place of b, which was not used for the longest time
    assert [kept.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    for number in range(100):
        kept.put(number, str(number))
    assert len(kept) == 3 and kept.get(99) == "99"


def test_what_is_known_starts_over_when_it_is_too_much(monkeypatch):
    monkeypatch.setattr(host_kept, "MOST_KNOWN", 2)
    known = Known()
    known["a"], known["b"] = 1, 2
    assert known == {"a": 1, "b": 2}
    known["c"] = 3
    assert known == {"c": 3}


def test_ever_larger_buffers_are_few():
    kept = []
    for wanted in range(1, 5000):
        if all(buffer.size < wanted for buffer in kept):
            kept.append(np.empty(grown(wanted, kept), "f4"))
            assert kept[-1].size >= wanted
    assert len(kept) < 25 and sum(x.size for x in kept) < 3 * kept[-1].size + 25
    huge = np.broadcast_to(np.float32(0), 1 << 30)
    assert grown(huge.size + 1, [huge]) - huge.size == 1 << 24  # 64 MiB more, and not half


def test_ever_larger_products_keep_few_buffers(kernel_device, monkeypatch):
    """Of packed operands, and of kernels' workspaces."""
    device, made = open_device(kernel_device), []
    real = type(device).empty

    def empty(self, rows, cols, dtype):
        matrix = real(self, rows, cols, dtype)
        made.append((weakref.ref(matrix), matrix.nbytes))
        return matrix

    monkeypatch.setattr(type(device), "empty", empty)
    room = packed_product.Room(device, device.stream())
    for count in range(1000, 50000, 500):
        assert room.array("A", count, "float32").size == count
    runner = Runner(device=kernel_device, kernel="tuned")
    a = np.ones((1, 600), "f4")
    for k in range(8, 600, 50):
        assert runner.gemm(a[:, :k], a[:, :k].T) == k
    alive = [size for matrix, size in made if matrix() is not None]
    assert len(alive) < 25 and room.array("A", 1, "float32").size == 1


@pytest.mark.parametrize("somebody_has_memory", [False, True])
def test_what_a_gpu_keeps_goes_before_its_pool(monkeypatch, somebody_has_memory):
    """CuPy's pools free nothing of an allocation of which a part comes back too late."""
    from hybrid_gemm.devices import residue_products
    from hybrid_gemm.devices.cuda import pools
    from hybrid_gemm.devices.cuda.device import CudaDevice

    class Thing:
        """Memory that something keeps."""

    class Pool:
        used = 0

        def free_all_blocks(self):
            freed.append(([x() for x in things], current[:]))

        def used_bytes(self):
            assert current == [3]
            return self.used

    class Current:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            current.append(self.ordinal)

        def __exit__(self, *error):
            current.remove(self.ordinal)

    monkeypatch.setattr(pools, "_outliving", [])
    freed, current = [], []
    device = object.__new__(CudaDevice)
    device.cp, device.ordinal = SimpleNamespace(cuda=SimpleNamespace(Device=Current)), 3
    device.pool = pool = Pool()
    device.table, in_a_stream, by_device = Thing(), Thing(), Thing()
    things = [weakref.ref(x) for x in (device.table, in_a_stream, by_device)]
    device._idle = {False: [SimpleNamespace(scratch=in_a_stream)]}
    residue_products._tables[device] = [by_device]
    del in_a_stream, by_device
    device.free_unused()
    assert freed.pop()[1] == [3] and all(x() for x in things)
    freed.clear()
    pool.used = 512 if somebody_has_memory else 0
    other = object.__new__(CudaDevice)
    other.cp, other.ordinal, other.pool = device.cp, 3, Pool()
    del device
    assert freed == [([None] * 3, [3])] and not current
    assert pools._outliving == ([(pool, other.cp, 3)] if pool.used else [])
    pool.used = 0
    other.free_unused()
    assert pools._outliving == []


@needs_emulator
def test_what_a_graph_writes_transposed_stays_with_the_stream():
    device = open_device("emulator")
    stream, b = device.stream(), np.arange(12, dtype="f4").reshape(3, 4)
    stream.capturing = lambda: True
    kept = [device.transposed(b, "t", stream, name) for name in "ABB"]
    assert all((x == b).all() and x.flags.f_contiguous for x in kept)
    assert np.shares_memory(kept[1], kept[2]) and not np.shares_memory(*kept[:2])
    there = packed_product.room_of(device, stream).array("turned B", 12, "float32")
    assert np.shares_memory(kept[2], there)
    stream.capturing = lambda: False
    assert not np.shares_memory(device.transposed(b, "t", stream, "B"), kept[2])


@pytest.mark.parametrize("captured", [False, True])
def test_what_kernels_find_cleared_is_so_before_a_graph_that_is_recorded_runs(captured):
    """Flags and verdicts stay with a stream: what comes before the graph's first run uses them."""
    from hybrid_gemm.devices.cuda.device import CudaDevice

    class Made:
        size, nbytes, dtype = 64, 256, np.dtype("u4")

        def __init__(self):
            self.data = SimpleNamespace(memset_async=lambda *x: done.append(("cleared", *x)))

        def __setitem__(self, key, value):
            done.append(("queued", value))

    class Own(contextlib.nullcontext):
        def synchronize(self):
            done.append(("waited",))

    done, own = [], Own()
    device = object.__new__(CudaDevice)
    device.ordinal, device._own_stream = 0, own
    device.cp = SimpleNamespace(cuda=SimpleNamespace(Device=contextlib.nullcontext))
    device.empty = lambda *x: Made()
    stream = SimpleNamespace(capturing=lambda: captured, scratch=[])
    launch = Launch((1, 1, 1), (1, 1, 1), workspace_bytes=256, flag_bytes=256)
    device.scratch(launch, "uint32", stream)
    cleared = [("cleared", 0, 256, own), ("waited",)] if captured else [("queued", 0)]
    assert done == cleared
    packed_product.Room(device, stream)
    assert done == 2 * cleared
    device.scratch(launch, "uint32", stream)
    assert done == 2 * cleared


def test_new_shapes_do_not_grow_memory():
    found = growth.new_shapes(400, "cpu", 40)
    assert found["wrong"] == [] and found["shapes"] == 400


def test_runners_that_are_dropped_leave_nothing(device):
    # Other tests run on the GPU at the same time. The emulator's threads keep more with each of
    # some 12 runners, and then no more.
    found = growth.dropped(40 if device == "cpu" else 6, device, warm=18, alone=False)
    assert found["wrong"] == []


def test_runners_that_stay_are_found(monkeypatch):
    stay = []

    def runner(**options):
        stay.append((os.open("/dev/null", os.O_RDONLY), np.ones(1 << 19), Runner(**options)))
        return stay[-1][-1]

    monkeypatch.setattr(hybrid_gemm, "Runner", runner)
    found = growth.dropped(10, "cpu", warm=1)
    for descriptor, *_ in stay:
        os.close(descriptor)
    assert found["grown_mib"] > 30
    assert any(x.startswith("descriptors") for x in found["wrong"])
    assert any(x.startswith("memory grew") for x in found["wrong"])


@needs_emulator
@needs_emulator
def test_products_are_made_beside_a_thread_that_frees_memory_without_a_pause():
    """Python would have each step of theirs wait for the whole interval of its lock."""
    a, stop, interval = np.ones((8, 8), "f4"), threading.Event(), sys.getswitchinterval()

    def free():
        while not stop.is_set():
            hybrid_gemm.free_memory()

    hybrid_gemm.gemm(a, a, device="emulator")  # compiles
    thread = threading.Thread(target=free)
    sys.setswitchinterval(1)
    thread.start()
    try:
        start = time.perf_counter()
        assert (hybrid_gemm.gemm(a, a, device="emulator") == 8).all()
        assert time.perf_counter() - start < 1
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_free_memory_gives_the_buffers_of_copies_back():
    a = np.ones((600, 600), "f4")
    assert (hybrid_gemm.gemm(a, a, device="emulator", threads=2) == 600).all()
    link = weakref.ref(staging.link(EmulatorDevice()))
    hybrid_gemm.free_memory()
    assert link() is None
    assert (hybrid_gemm.gemm(a, a, device="emulator", threads=2) == 600).all()


def test_products_of_all_kinds_do_not_grow_memory():
    said = []
    found = growth.mixed(1, 7, devices=("cpu",), say=said.append)
    assert found["wrong"] == [], said
    assert found["right"] >= 1 and found["mib_last"] > 0


needs_mallinfo = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc does not say what it has given out"
)


@needs_mallinfo
def test_the_same_products_again_do_not_grow_memory():
    found = growth.again(0.5, 7, devices=("cpu",))
    assert found["wrong"] == []
    assert found["products"] >= 1 and len(found["rounds"]) >= 3


@needs_mallinfo
def test_what_each_product_leaves_behind_is_found(monkeypatch):
    left = []

    def leaves(_case):
        left.append(bytearray(4 << 20))
        return judge.Outcome(judge.RIGHT)

    monkeypatch.setattr(growth, "judge", leaves)
    monkeypatch.setattr(growth, "draw", lambda *_: None)
    monkeypatch.setattr(growth, "MOST_GROWTH_MIB", 1)
    (said,) = growth.again(0.01, 7, devices=("cpu",))["wrong"]
    assert said.startswith("memory grew by")


@needs_mallinfo
def test_what_each_product_leaves_on_a_gpu_is_found(monkeypatch):
    monkeypatch.setattr(growth, "judge", lambda _case: judge.Outcome(judge.RIGHT))
    monkeypatch.setattr(growth, "draw", lambda *_: None)
    taken = itertools.count(0, 100)
    monkeypatch.setattr(growth, "cards_mib", lambda _devices: next(taken))
    (said,) = growth.again(0.01, 7, devices=("cpu",))["wrong"]
    assert "GPU" in said


def test_a_dropped_runner_gives_back_at_once_what_its_checks_keep(device):
    """No circle of references holds it until Python collects garbage."""
    runner = Runner(device=device, threads=1, checked=True)
    runner.gemm(np.ones((8, 8), "f4"), np.ones((8, 8), "f4"))
    sums = weakref.ref(runner.devices[0].sums)
    gc.disable()
    try:
        del runner
        assert sums() is None
    finally:
        gc.enable()
