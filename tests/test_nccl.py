"""`reduce="nccl"`: exact with whole numbers, on GPUs and where NumPy plays NCCL; its refusals."""

import ctypes
import sys
import types
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from support.arrays import WithPointer, integers
from support.devices import REASONS, needs, on
from support.small_sizes import small_panels

from hybrid_gemm import Runner
from hybrid_gemm.devices.base import HostStream
from hybrid_gemm.devices.cuda import device as cuda
from hybrid_gemm.devices.cuda import nccl_group
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.errors import OutOfMemoryError, UnavailableError, UsageError
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.planner import make_plan, memory_needs
from hybrid_gemm.problem import Problem

GPUS = [
    DeviceSpec(f"gpu {i}", "cuda", i, 2**40, tflops=40, memory_gbps=4000, link_gbps=20)
    for i in range(4)
]
# The last ones leave workers without K, or strips that are columns of a few rows.
SHAPES = [(70, 90, 50), (33, 200, 65), (1, 100, 9), (3, 101, 64), (5, 7, 1), (40, 40, 0)]


@pytest.fixture
def small(monkeypatch):
    small_panels(monkeypatch)


def products(runner: Runner, rng, dtype="float32", **options):
    """Products of all shapes are right, say NCCL where it was, and count what it moved."""
    for (m, n, k), beta in zip(SHAPES, (0, 2, -1, 3, 2, 2), strict=True):
        a, b, c = (integers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        out = np.full((m, n), -99, dtype)
        result = runner.run(a, b, c, alpha=2, beta=beta, out=out, **options)
        expected = 2 * (a.astype("i8") @ b.astype("i8")) + beta * c.astype("i8")
        np.testing.assert_array_equal(out, expected.astype(dtype))
        assert result.reduction.startswith("NCCL ") == bool(result.plan.bytes_peer)
        assert sum(x.bytes for x in result.timeline.of("reduce")) == result.plan.bytes_peer
        yield result.plan


# --- on GPUs ------------------------------------------------------------------------------

COUNT = cuda.count()


def needs_gpus(test):
    """Decorates a test of NCCL between GPUs."""
    few = COUNT < 2 or bool(nccl_group.unavailable())
    skip = pytest.mark.skipif(few, reason=f"{COUNT} GPUs are here; NCCL sums over 2")
    return skip(pytest.mark.gpu(test))


@needs_gpus
@pytest.mark.parametrize("choices", [
    {"split": "cols"}, {"grid": (2, 1, 2), "gpus": (0, 1)}, {"grid": (1, 2, 2), "gpus": (1, 0)},
    {"grid": (3, 1, 2), "gpus": (0, 1)}, {"grid": (2, 1, 2), "gpus": (0, 1, 2)},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("resident", [False, True])
def test_gpus_sum_exactly(choices, resident, small, rng):
    if max(choices.get("gpus", (0,))) >= COUNT:
        pytest.skip(f"{COUNT} GPUs are here")
    runner = Runner(device="cuda", reduce="nccl", **choices)
    for _ in range(2):  # a group is kept
        assert any(len(plan.panels) > 2 for plan in products(runner, rng, resident=resident))


@needs_gpus
@pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "float16", "int8"])
def test_gpus_sum_every_dtype(dtype, small, rng):
    list(products(Runner(device="cuda", reduce="nccl", split="cols"), rng, dtype))


@needs_gpus
def test_gpus_sum_arrays_that_lie_on_one(small, rng):
    import cupy

    a, b, c = (integers(rng, s) for s in ((150, 310), (310, 90), (150, 90)))
    there = [cupy.asarray(x) for x in (a, b, c)]
    runner = Runner(reduce="nccl", split="cols")
    got = runner.gemm(*there, alpha=2, beta=3, out=there[2])
    assert got is there[2]
    np.testing.assert_array_equal(got.get(), 2 * a @ b + 3 * c)


@needs_gpus
def test_a_group_that_was_closed_is_made_anew(small, rng):
    runner = Runner(device="cuda", reduce="nccl", split="cols", gpus=(0, 1))
    list(products(runner, rng))
    nccl_group.group((0, 1)).close()
    list(products(runner, rng))


# --- where NumPy plays NCCL ---------------------------------------------------------------


class Pretended:
    """NCCL's calls on host memory, as strict as NCCL: what a group calls is the same everywhere."""

    NcclError = type("NcclError", (RuntimeError,), {})
    NCCL_SUM, NCCL_FLOAT32, NCCL_INT32 = "sum", "f4", "i4"

    def __init__(self):
        self.made, self.sums, self.calls = [], 0, None
        self.NcclCommunicator = types.SimpleNamespace(initAll=self.init_all)

    def get_version(self):
        return 22803

    def init_all(self, ordinals):
        assert len(set(ordinals)) == len(ordinals)
        self.made.append(tuple(ordinals))
        return [
            types.SimpleNamespace(
                reduce=lambda *call, ordinal=ordinal: self.calls[ordinal].append(call),
                abort=lambda: None,
            )
            for ordinal in ordinals
        ]

    def groupStart(self):
        assert self.calls is None
        self.calls = defaultdict(list)

    def groupEnd(self):
        calls, self.calls = self.calls, None
        for each in zip(*calls.values(), strict=True):
            (_a, _b, count, kind, _sum, root, _stream), *_ = each
            arrays = []
            for ordinal, (source, target, *same, stream) in zip(calls, each, strict=True):
                assert source == target and same == [count, kind, "sum", root]
                assert stream == f"stream {ordinal}"
                size = count * np.dtype(kind).itemsize
                arrays.append(np.frombuffer((ctypes.c_char * size).from_address(source), kind))
            total = sum(arrays)
            for place, array in enumerate(arrays):  # the others' are not to be read any more
                array[...] = total if place == root else -77
            self.sums += 1


def played_by_gpus(spec):
    """`Device.spec` as GPUs have it, each of them a piece of hardware of its own."""

    def made(device, *asked):
        plain = spec(device, *asked)
        changes = {"kind": "cuda", "on_gpu": True, "unit": int(device.name.split(":")[1])}
        return replace(plain, **{x: value for x, value in changes.items() if hasattr(plain, x)})

    return made


@pytest.fixture
def pretended(monkeypatch, small):
    if REASONS["emulator"]:
        pytest.skip(REASONS["emulator"])
    library, empty = Pretended(), EmulatorDevice.empty

    def lane(ordinal):
        stream = HostStream()
        stream.cupy = types.SimpleNamespace(ptr=f"stream {ordinal}")
        return EmulatorDevice(1, ordinal), stream

    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.SimpleNamespace(nccl=library))
    monkeypatch.setattr(nccl_group, "groups", {})
    monkeypatch.setattr(nccl_group, "lane", lane)
    for name, value in {
        "spec": played_by_gpus(EmulatorDevice.spec), "queues": True,
        "ordinal": property(lambda self: int(self.name.split(":")[1])),
        "empty": lambda self, *shape: empty(self, *shape).view(WithPointer),
    }.items():  # fmt: skip
        monkeypatch.setattr(EmulatorDevice, name, value, raising=False)
    return library


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("choices", [
    {"threads": 2, "split": "cols"}, {"threads": 4, "split": "cols"}, {"grid": (2, 1, 2)},
    {"grid": (1, 2, 2), "emulate_devices": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("resident", [False, True])
def test_panels_are_summed_into_the_owners_partials(pretended, choices, dtype, resident, rng):
    workers = choices.get("threads", 4)
    runner = Runner(
        device="emulator", reduce="nccl", **({"emulate_devices": workers} | choices)
    )  # fmt: skip
    sums = [len(plan.strips) for plan in products(runner, rng, dtype, resident=resident)]
    assert pretended.sums > sum(sums) // 2 and max(sums) > 4


def test_groups_are_kept(pretended, rng):
    for _ in range(2):
        runner = Runner(device="emulator", reduce="nccl", split="cols", emulate_devices=3)
        list(products(runner, rng))
    assert pretended.made == [(0, 1, 2), (0, 1)] or pretended.made == [(0, 1, 2)]


def test_a_sum_that_fails_ends_its_group(pretended, monkeypatch, rng):
    runner = Runner(device="emulator", reduce="nccl", split="cols", emulate_devices=2)
    a, b = integers(rng, (40, 60)), integers(rng, (60, 40))
    runner.gemm(a, b)
    failing, end = pretended.NcclError("unhandled system error"), pretended.groupEnd

    def once():
        monkeypatch.setattr(pretended, "groupEnd", end)
        pretended.calls = None
        raise failing

    monkeypatch.setattr(pretended, "groupEnd", once)
    with pytest.raises(RuntimeError, match="unhandled system error"):
        runner.gemm(a, b)
    assert len(pretended.made) == 1
    np.testing.assert_array_equal(runner.gemm(a, b), a @ b)
    assert len(pretended.made) == 2  # another group, since the first one ended
    nccl_group.group((0, 1)).close()
    monkeypatch.setattr(pretended, "groupEnd", once)
    with pytest.raises(UnavailableError, match="does not start between GPUs 0, 1: unhandled"):
        runner.gemm(a, b)


# --- what it plans, and refuses -----------------------------------------------------------


def test_nccl_needs_no_memory_for_partials_of_other_workers():
    problem = Problem(4096, 4096, 4096)
    for resident in (False, True):
        plans = [
            make_plan(problem, GPUS, 4, split="cols", reduce=reduce, resident=resident)
            for reduce in ("ordered", "nccl")
        ]
        ordered, by_nccl = (sum(memory_needs(plan)) for plan in plans)
        assert ordered - by_nccl == 3 * 4096 * 4096 * 4
        assert plans[0].bytes_peer == plans[1].bytes_peer


@pytest.mark.parametrize(
    ("devices", "workers", "options", "message"),
    [
        ([GPUS[0]], 2, {"split": "cols"}, "a GPU for each worker.* 2 workers.*sum on 1 GPU;"),
        ([GPUS[0]] * 2, 2, {"split": "cols"}, "sum on 1 GPU;"),
        (GPUS[:2], 4, {"split": "cols"}, "4 workers.*1 x 1 x 4 sum on 2 GPUs; the ordered"),
        (GPUS[:2], 4, {"grid": (1, 1, 4)}, "no more workers than GPUs"),
        (
            [replace(GPUS[0], kind="cpu", on_gpu=False)],
            2,
            {"split": "cols"},
            "device is cpu; the ordered",
        ),
    ],
)
def test_sums_that_nccl_cannot_make_are_refused(devices, workers, options, message):
    with pytest.raises(UsageError, match=message):
        make_plan(Problem(64, 64, 64), devices, workers, reduce="nccl", **options)


def test_auto_takes_what_nccl_can_sum():
    deep = Problem(8, 8, 2**20)
    there = {"reduce": "nccl", "resident": True}  # from the host, links decide
    assert make_plan(deep, GPUS[:2], 2, **there).split == "cols"
    assert make_plan(deep, GPUS[:2], 4, **there).grid[2] == 2
    assert not make_plan(deep, GPUS[:1], 2, reduce="nccl").summed


def test_sums_are_not_made_in_turns():
    low = [replace(spec, memory_bytes=2**22) for spec in GPUS[:2]]
    problem = Problem(1024, 1024, 1024)
    with pytest.raises(OutOfMemoryError, match="the ordered reduction goes in turns"):
        make_plan(problem, low, 2, split="cols", reduce="nccl")
    assert make_plan(problem, low, 2, split="rows", reduce="nccl").turns_in_memory


@pytest.mark.parametrize("device", [on("cpu"), on("emulator")])
def test_other_devices_are_refused_unless_nothing_is_summed(device, rng):
    a, b = integers(rng, (20, 30)), integers(rng, (30, 20))
    with pytest.raises(UsageError, match=f"between GPUs, and the device is {device}"):
        Runner(device=device, threads=2, split="cols", reduce="nccl").gemm(a, b)
    result = Runner(device=device, threads=2, split="rows", reduce="nccl").run(a, b)
    assert result.reduction == "none"
    np.testing.assert_array_equal(result.c, a @ b)


@needs("cuda")
def test_one_gpu_that_plays_several_is_refused():
    with pytest.raises(UsageError, match="sum on 1 GPU"):
        Runner(device="cuda", emulate_devices=2, split="cols", reduce="nccl").gemm(
            np.ones((8, 8), "f4"), np.ones((8, 8), "f4")
        )


@needs("emulator")
def test_missing_nccl_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", types.ModuleType("cupy.cuda"))
    monkeypatch.delitem(sys.modules, "cupy.cuda.nccl", raising=False)
    monkeypatch.setattr(EmulatorDevice, "spec", played_by_gpus(EmulatorDevice.spec))
    assert "pip install nvidia-nccl" in nccl_group.unavailable()
    runner = Runner(device="emulator", emulate_devices=2, split="cols", reduce="nccl")
    with pytest.raises(UnavailableError, match=r"CuPy finds no NCCL .*ordered one works"):
        runner.plan(Problem(8, 8, 8))
