"""Copies through slots, panels, relays and turns on every device that is here. Sizes are made so
small that small products are cut and copied as large ones are."""

import contextlib
import ctypes
import functools
import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.arrays import integers
from support.devices import REASONS, needs
from support.links import separate_links
from support.small_sizes import small_panels, small_slots, small_turns
from support.timelines import bytes_moved

from hybrid_gemm import Runner, empty_pinned
from hybrid_gemm.devices import open_devices
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.devices.cuda import pinned_memory
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.streams import HostEvent, HostStream
from hybrid_gemm.errors import OutOfMemoryError, UnavailableError, UsageError
from hybrid_gemm.execution import native_copier, staging
from hybrid_gemm.execution.device_memory import MemoryRequests
from hybrid_gemm.execution.transfers import Later, Transfer
from hybrid_gemm.planning import planner

SHAPES = [(70, 90, 50), (33, 200, 65), (5, 7, 300), (1, 100, 9), (40, 40, 0)]
SPLITS = [
    {"threads": 1}, {"threads": 3, "split": "rows"}, {"threads": 3, "split": "cols"},
    {"threads": 4, "split": "cols", "emulate_devices": 4},
    {"threads": 5, "split": "cols", "emulate_devices": 2},
    {"threads": 4, "split": "rows", "emulate_devices": 2},
    {"threads": 2, "split": "rows", "emulate_devices": 4},
    {"threads": 4, "grid": (2, 1, 2), "emulate_devices": 4},
    {"threads": 4, "grid": (2, 2, 1), "emulate_devices": 3},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Small products are cut, and copied in pieces, as large ones are."""
    small_panels(monkeypatch)
    small_turns(monkeypatch)
    small_slots(monkeypatch)
    separate_links(monkeypatch, "small slots")


def products(runner: Runner, rng, **options):
    """Results of products in both orders, with and without C; each is right."""
    for m, n, k in SHAPES:
        for order, beta in (("C", 0), ("F", 2)):
            a = np.asarray(integers(rng, (m, k)), order=order)
            b = np.asarray(integers(rng, (k, n)), order=order)
            c = integers(rng, (m, n))
            out = np.full((m, n), np.nan, "f4")
            result = runner.run(a, b, c, alpha=2, beta=beta, out=out, **options)
            np.testing.assert_array_equal(out, 2 * a @ b + beta * c)
            yield result


@pytest.mark.parametrize("choices", SPLITS, ids=str)
def test_panels_make_the_product_and_bring_each_byte_once(device, choices, rng):
    runner = Runner(device=device, **choices)
    for result in products(runner, rng):
        plan = result.plan
        if device == "cpu":  # its memory is the host's
            continue
        assert bytes_moved(result, "upload") == plan.bytes_h2d
        assert bytes_moved(result, "relay") == plan.bytes_relayed
        assert bytes_moved(result, "reduce") == plan.bytes_peer
        assert bytes_moved(result, "download") == plan.bytes_d2h
        m, n, k = plan.problem.m, plan.problem.n, plan.problem.k
        if k:
            assert plan.bytes_h2d == 4 * (m * k + k * n + bool(plan.problem.beta) * m * n)
            made = len(result.timeline.of("multiply"))
            # A GPU's model of times may find one panel a worker faster.
            assert made > len(plan.workers) or m < 16 or device == "cuda"


@pytest.mark.parametrize("choices", SPLITS[:6], ids=str)
@pytest.mark.parametrize("beta", [0, 3])
def test_turns_keep_to_the_memory_given(kernel_device, choices, beta, rng):
    m, n, k = 70, 50, 90
    a, b, c = integers(rng, (m, k)), integers(rng, (k, n)), integers(rng, (m, n))
    runner = Runner(device=kernel_device, max_device_memory=16_000, **choices)
    result = runner.run(a, b, c, beta=beta)
    np.testing.assert_array_equal(result.c, a @ b + beta * c)
    plan = result.plan
    assert plan.turns_in_memory and plan.turns > 1
    assert max(planner.memory_needs(plan)) <= 16_000  # of one GPU that plays several
    assert bytes_moved(result, "upload") == plan.bytes_h2d > 4 * (m * k + k * n)


def test_turns_read_a_file_too(tmp_path, rng):
    a, b = integers(rng, (120, 150)), integers(rng, (150, 90))
    np.save(tmp_path / "a.npy", a)
    runner = Runner(device="emulator", max_device_memory=40_000)
    got = runner.gemm(np.load(tmp_path / "a.npy", mmap_mode="r"), b)
    np.testing.assert_array_equal(got, a @ b)


def test_memory_too_small_for_any_turn_is_refused():
    a = np.ones((64, 64), "f4")
    with pytest.raises(OutOfMemoryError, match="which has"):
        Runner(device="emulator", max_device_memory=500).gemm(a, a)
    with pytest.raises(OutOfMemoryError):
        Runner(device="emulator", max_device_memory=9000).run(a, a, resident=True)
    with pytest.raises(UsageError, match="takes bytes, at least 1"):
        Runner(device="cpu", max_device_memory=0)


def test_less_memory_than_promised_makes_turns_smaller(monkeypatch, rng):
    real, left = EmulatorDevice.empty, 20_000

    def empty(self, rows, cols, dtype):
        if rows * cols * np.dtype(dtype).itemsize > left // 4:
            raise MemoryError("another program has it")
        return real(self, rows, cols, dtype)

    monkeypatch.setattr(EmulatorDevice, "empty", empty)
    a, b = integers(rng, (100, 75)), integers(rng, (75, 85))
    result = Runner(device="emulator", max_device_memory=10**6).run(a, b)
    np.testing.assert_array_equal(result.c, a @ b)
    assert result.plan.turns_in_memory


@pytest.mark.parametrize("checked", [False, True])
def test_workers_that_share_a_device_add_theirs_first(kernel_device, checked):
    """One after the other, the second and fourth partials would be lost beside the first."""
    a = np.array([[2.0**24, 1, -(2.0**24), 1]] * 6, "f4")
    runner = Runner(
        device=kernel_device, threads=4, split="cols", emulate_devices=2, checked=checked
    )
    result = runner.run(a, np.ones((4, 3), "f4"), alpha=3)
    np.testing.assert_array_equal(result.c, np.full((6, 3), 6, "f4"))
    assert bytes_moved(result, "reduce") == result.plan.bytes_peer == 6 * 3 * 4


def test_sums_are_the_same_from_run_to_run(device, rng):
    a, b = rng.standard_normal((60, 300), "f4"), rng.standard_normal((300, 50), "f4")
    runner = Runner(device=device, threads=4, split="cols", emulate_devices=3)
    first = runner.gemm(a, b)
    for _ in range(5):
        np.testing.assert_array_equal(runner.gemm(a, b), first)


@pytest.mark.parametrize("choices", SPLITS, ids=str)
@pytest.mark.parametrize("resident", [False, True])
def test_one_thread_starts_the_whole_run(kernel_device, choices, resident, monkeypatch, rng):
    monkeypatch.setattr(EmulatorDevice, "queues", True)
    started, start = [], threading.Thread.start

    def recorded(thread):
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", recorded)
    runner = Runner(device=kernel_device, **choices)
    for result in products(runner, rng, resident=resident):
        plan = result.plan  # whose bytes are none where all is there before the clock runs
        assert bytes_moved(result, "upload") == plan.bytes_h2d
        assert bytes_moved(result, "relay") == plan.bytes_relayed
        assert bytes_moved(result, "reduce") == plan.bytes_peer
    # Threads that only copy or compile are named so.
    assert not [name for name in started if not name.startswith(("copy", "copied", "compile"))]


def test_copies_cast_to_the_other_dtype(device, rng):
    for dtype, out in (("f2", "f8"), (">f4", "f4"), ("i2", "i8"), ("f8", "f8")):
        a, b = integers(rng, (50, 60), dtype), integers(rng, (60, 70), dtype)
        into = np.full((50, 70), 99, out, order="F")
        Runner(device=device, threads=2, split="cols").gemm(a, b, out=into)
        np.testing.assert_array_equal(into, a.astype("f8") @ b.astype("f8"))


def test_what_grows_by_a_cast_fits_its_slot(kernel_device, rng):
    """Small copies take a slot whole: as small as the larger of both sides."""
    a, b = integers(rng, (8, 32), "i1"), integers(rng, (32, 1), "i1")  # 256 bytes, 1024 as int32
    np.testing.assert_array_equal(Runner(device=kernel_device).gemm(a, b), a @ b)


def unexpected(*_arguments):
    pytest.fail("it was called")


def test_what_is_copied_at_once_comes_after_what_the_stream_was_given(monkeypatch):
    """Both ways: memory that is written may be what the stream's last product still reads."""
    waited, event = [], HostEvent()

    class Link:
        def upload(self, dst, src, transfer):
            waited.append(transfer.after)
            transfer.finish(HostStream())

        def download(self, dst, src, transfer, after):
            transfer.after = after
            self.upload(dst, src, transfer)

    monkeypatch.setattr(staging, "link", lambda device: Link())
    stream, here, there = SimpleNamespace(record=lambda: event), np.zeros((2, 2)), object()
    staging.copy_all_now(None, [(there, here), (there, here), (here, there)], stream)
    assert waited == [event] * 3


@pytest.mark.parametrize("native", [True, False])
def test_either_kind_of_threads_copies(device, native, monkeypatch, rng):
    """Without a compiler Python's threads copy. With one, native threads copy all that GPUs get
    and give, unless it is cast."""
    separate_links(monkeypatch, f"native: {native}")
    if not native:
        monkeypatch.setattr(native_copier, "unavailable", lambda: "no compiler")
    elif device == "cuda" and not native_copier.unavailable():
        monkeypatch.setattr(staging.Ring, "slot", unexpected)
    for _result in products(Runner(device=device, threads=3, split="cols"), rng):
        pass


@pytest.mark.parametrize(("busy", "most"), [(1, 8), (2, 16), (4, 16)])
def test_as_many_of_pythons_threads_copy_as_the_devices_at_work_want(busy, most, monkeypatch):
    """Whatever other devices were opened with them."""
    monkeypatch.setattr(staging, "cores", lambda: 64)
    monkeypatch.setattr(staging, "_at_once", functools.cache(staging._at_once.__wrapped__))
    devices = open_devices("emulator", 1, emulate=4)
    for device in devices:
        device.together = 4
    links = [staging.Link(device) for device in devices]
    lock, now, seen, all_came = threading.Lock(), [0], [], threading.Event()

    def watched(dst, src):
        with lock:
            now[0] += 1
            seen.append(now[0])
            if now[0] == most:
                all_came.set()
        assert all_came.wait(60)
        time.sleep(0.002)  # one too many comes meanwhile
        dst[...] = src
        with lock:
            now[0] -= 1

    monkeypatch.setattr(staging, "cast_into", watched)
    given = np.arange(20_000, dtype="f4").reshape(200, 100)
    transfers, there = [], [link.device.empty(200, 100, "float32") for link in links[:busy]]
    for link, here in zip(links, there, strict=False):
        transfers.append(Transfer(Later(), ctypes.c_int()))
        link.upload(here, given, transfers[-1])
    for transfer, here in zip(transfers, there, strict=True):
        transfer.wait()
        np.testing.assert_array_equal(here, given)
    assert max(seen) == most


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize(("stage", "nth"), [("launch", 3), ("launch", 50), ("copy", 7)])
def test_a_stage_that_fails_ends_the_run_with_its_own_error(monkeypatch, stage, nth, queues, rng):
    monkeypatch.setattr(EmulatorDevice, "queues", queues)
    runner = Runner(device="emulator", threads=4, split="cols", emulate_devices=2)
    a, b = integers(rng, (64, 64)), integers(rng, (64, 64))
    runner.gemm(a, b)
    real, calls = getattr(EmulatorDevice, stage), []

    def failing(self, *args, **options):
        calls.append(1)
        if len(calls) == nth:
            raise RuntimeError(f"{stage} is out of luck")
        return real(self, *args, **options)

    monkeypatch.setattr(EmulatorDevice, stage, failing)
    out = np.full((64, 64), 7, "f4")
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        runner.gemm(a, b, out=out)
    incomplete = any("incomplete" in note for note in getattr(caught.value, "__notes__", ()))
    assert incomplete or (out == 7).all()  # it is untouched, or said not to be whole
    monkeypatch.setattr(EmulatorDevice, stage, real)
    np.testing.assert_array_equal(runner.gemm(a, b, out=out), a @ b)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("kind", [CpuDevice, EmulatorDevice])
def test_what_is_raised_in_a_copy_that_casts_ends_the_run(monkeypatch, kind, error, rng):
    """Which once left workers that waited for the copy for ever."""
    runner = Runner(device="cpu" if kind is CpuDevice else "emulator", threads=3, split="cols")
    a, b = (integers(rng, (64, 64)).astype("f2") for _ in "ab")
    real, calls = kind.copy, []

    def failing(self, *args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise error("planted")
        return real(self, *args, **options)

    monkeypatch.setattr(kind, "copy", failing)
    with pytest.raises(error):
        runner.gemm(a, b)
    np.testing.assert_array_equal(runner.gemm(a, b), a @ b)


def test_a_failed_download_says_that_out_is_incomplete(monkeypatch, rng):
    a, b = integers(rng, (64, 64)), integers(rng, (64, 64))
    runner = Runner(device="emulator")

    slot = staging.Ring.slot

    def failing(ring):
        if not ring.up:
            raise OSError("the disk is full")
        return slot(ring)

    monkeypatch.setattr(staging.Ring, "slot", failing)
    with pytest.raises(OSError, match="disk is full") as caught:
        runner.gemm(a, b, out=np.zeros((64, 64), "f4"))
    assert any("incomplete" in note for note in caught.value.__notes__)


def test_the_grid_is_checked():
    three = "takes three numbers pm,pn,pk"
    for grid, message in (((2, 2, 2), "is not 4 workers"), ((4, 1), three)):
        with pytest.raises(UsageError, match=message):
            Runner(device="cpu", threads=4, grid=grid).gemm(np.ones((8, 8)), np.ones((8, 8)))
    with pytest.raises(UsageError, match="beside the split"):
        Runner(device="cpu", grid=(2, 1, 1), split="cols").gemm(np.ones((8, 8)), np.ones((8, 8)))
    assert Runner(device="cpu", grid=(2, 1, 2)).threads == 4


@pytest.mark.skipif(REASONS["cuda"] is None, reason="a CUDA device is here")
def test_page_locked_arrays_are_refused_without_a_gpu():
    with pytest.raises(UnavailableError, match="page-locked"):
        empty_pinned((2, 3))


@needs("cuda")
def test_page_locked_arrays_are_copied_straight(rng, monkeypatch):
    assert empty_pinned(5, "int64").shape == (5,) and empty_pinned((0, 3)).shape == (0, 3)
    a, b, out = (empty_pinned(s) for s in ((90, 70), (70, 80), (90, 80)))
    a[...], b[...], out[...] = integers(rng, a.shape), integers(rng, b.shape), np.nan
    assert pinned_memory.is_pinned(a[3:, 5:]) and not pinned_memory.is_pinned(a.copy())
    monkeypatch.setattr(staging.Ring, "slot", unexpected)
    monkeypatch.setattr(staging.Ring, "native", unexpected)
    for split in ("rows", "cols"):
        Runner(device="cuda", threads=3, split=split, emulate_devices=2).gemm(a, b, out=out)
        np.testing.assert_array_equal(out, a @ b)


class Hashed(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(("together", "gap"), [(False, 0), (False, 48), (True, 0)])
def test_matrices_share_memory_only_with_those_of_other_turns(together, gap):
    """`together` as on a GPU, in one piece of memory; with a `gap` in bytes between rows, as where
    accesses are checked."""
    streams, sizes = [], []

    @contextlib.contextmanager
    def using(stream):
        streams.append(stream)
        yield
        streams.pop()

    def empty(rows, cols, dtype):
        assert streams == ["for allocations"] and rows == 1 and cols > 0
        sizes.append(cols)
        return np.empty((rows, cols), dtype)

    device = Hashed(
        using=using, allocation_stream="for allocations", row_gap=gap, empty=empty,
        calls=lambda: "the driver's" if together else None,
    )  # fmt: skip
    memory = MemoryRequests(itertools.count())
    asked = {  # (space, turn, number): shape, storage order, dtype
        ("A", 0, 0): ((5, 7), "n", None), ("A", 0, 1): ((90, 3), "t", "f8"),
        ("A", 1, 0): ((100, 9), "n", None), ("A", 2, 0): ((2, 2), "t", None),
        ("A", 2, 1): ((1, 1), "n", "u1"), ("A", 2, 2): ((300, 1), "n", None),
        ("B", 0, 0): ((0, 4), "n", None), ("B", 0, 1): ((64, 1), "t", None),
        ("C", 5, 0): ((3, 3), "n", None),
    }  # fmt: skip
    slots = [
        memory.request(device, space, turn, shape, dtype or "f4", order)
        for (space, turn, _number), (shape, order, dtype) in asked.items()
    ]
    assert slots == [*range(len(asked))]
    placed, laid_out = [None] * len(asked), memory.layout()
    pieces = laid_out.take()
    laid_out.fill(pieces, placed)
    made = dict(zip(asked, placed, strict=True))
    for key, (shape, order, dtype) in asked.items():
        x = made[key]
        assert x.shape == shape and x.dtype == (dtype or "f4")
        lines = x if order == "n" else x.T
        assert lines.strides == (lines.shape[1] * x.itemsize + gap, x.itemsize) or not x.size
        for other, y in made.items():
            if other != key and other[:1] + other[2:] != key[:1] + key[2:]:
                apart = not together or other[:2] == key[:2] or other[0] != key[0]
                assert not (apart and np.shares_memory(x, y)), (key, other)
    assert len({made["A", turn, 0].ctypes.data for turn in range(3)}) == 1
    taken = laid_out.spans(pieces)[0]
    if not together:
        apart = 3600 + 99 * gap, 2160 + 2 * gap, 1200 + 299 * gap, 1, 256, 36 + 2 * gap
        assert sizes == [*apart]
    else:
        assert sizes == [max(256 + 2304, 3840, 256 + 256 + 1280) + 256 + 256] == [len(taken)]
        assert all((x.ctypes.data - taken.start) % 256 == 0 for x in made.values())
        ends = (x.ctypes.data + x.nbytes for x in made.values())
        assert min(x.ctypes.data for x in made.values()) == taken.start and max(ends) <= taken.stop
