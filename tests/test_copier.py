"""Copying threads without Python, with functions of a driver that are Python's: a device whose
copies are done when its events are waited for."""

import contextlib
import ctypes
import dataclasses
import functools
import mmap
import os
import subprocess
import threading
import time
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import pytest
from support.command import python
from support.late_streams import CONTEXT, as_calls

from hybrid_gemm.devices.cuda.driver import _Copy2D
from hybrid_gemm.execution import native_copier

SLOT, SLOTS, STREAM = 1000, 5, 7
AFTER, START, STOP = 11, 12, 13
# width and height in bytes and runs, pitch of the host's memory, pitch of the device's
SIZES = [(5, 1, 5, 5), (123457, 1, 200000, 123457), (80, 37, 100, 80), (80, 37, 100, 90),
         (3000, 5, 3001, 3300), (7, 300, 7, 7)]  # fmt: skip


class Driver:
    """A stream does one thing that it is told each time one of its events is asked for. `fails`
    names a function, and which of its calls says 700."""

    def __init__(self, fails: tuple[str, int] = ("", 0)):
        self.lock, self.fails = threading.Lock(), fails
        self.todo, self.said, self.counts = [], [], {}
        self.calls = as_calls(lambda name: self._counted(name, getattr(self, name)))

    def _counted(self, name, function):
        def call(*args):
            with self.lock:
                self.counts[name] = self.counts.get(name, 0) + 1
                if (name, self.counts[name]) == self.fails:
                    return 700
                return function(*args) or 0

        return call

    def finish(self):
        """All that the stream was told to do."""
        with self.lock:
            while self.todo:
                self.todo.pop(0)()

    def cuCtxSetCurrent(self, context):
        assert context == CONTEXT

    def cuMemcpyAsync(self, to, source, size, stream):
        self.todo.append(lambda: ctypes.memmove(to, source, size))

    def cuMemcpy2DAsync_v2(self, copy, stream):
        c = _Copy2D.from_buffer_copy(copy.contents)

        def work():
            assert c.dst_pitch >= c.width and c.src_pitch >= c.width
            for i in range(c.height):
                to, source = c.dst_device + i * c.dst_pitch, c.src_device + i * c.src_pitch
                ctypes.memmove(to, source, c.width)

        self.todo.append(work)

    def cuEventRecord(self, event, stream):
        self.todo.append(lambda: self.said.append(event))

    def cuStreamWaitEvent(self, stream, event, flags):
        self.todo.append(lambda: self.said.append(-event))

    def cuEventQuery(self, event):
        if event not in self.said:
            self.todo.pop(0)()
            return 600
        self.said.remove(event)


def ring(driver: Driver, *, up: bool) -> native_copier.Ring:
    if reason := native_copier.unavailable():
        pytest.skip(reason)
    memory = np.empty(SLOT * SLOTS, np.uint8)
    return native_copier.Ring(driver.calls, STREAM, memory, SLOT, range(101, 101 + SLOTS), up=up)


def submit(ring, host, device, width, height, *, after=0, stopped=None):
    """The status that a copy ends with."""
    over, status = threading.Event(), []

    def end(code):
        status.append(code)
        over.set()

    ring.submit(
        host.ctypes.data, device.ctypes.data, (host.strides[0], device.strides[0]),
        (width, height), (after, START, STOP), c_int() if stopped is None else stopped,
        c_int(), end,
    )  # fmt: skip

    def wait():
        assert over.wait(30) and len(status) == 1
        return status[0]

    return wait


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_a_copy_writes_the_whole_matrix_and_nothing_else(up, rng):
    driver = Driver()
    one = ring(driver, up=up)
    made = []
    for width, height, *pitches in SIZES:  # all are handed over before one is waited for
        host, device = (rng.integers(0, 256, (height, p)).astype(np.uint8) for p in pitches)
        wanted = [host.copy(), device.copy()]
        wanted[up][:, :width] = wanted[not up][:, :width]
        made.append((host, device, wanted, submit(one, host, device, width, height)))
    for host, device, wanted, wait in made:
        assert wait() == 0
        driver.finish()  # the device has them when its stream has come so far
        np.testing.assert_array_equal(host, wanted[0])
        np.testing.assert_array_equal(device, wanted[1])


def test_a_copy_waits_for_its_event_and_records_its_own():
    driver = Driver()
    host, device = np.zeros((40, 100), np.uint8), np.ones((40, 100), np.uint8)
    assert submit(ring(driver, up=False), host, device, 100, 40, after=AFTER)() == 0
    driver.finish()
    assert host.all() and driver.said[:2] == [-AFTER, START] and driver.said[-1] == STOP


def test_a_download_does_not_wait_for_what_the_next_one_waits_for():
    for _ in range(20):
        driver = Driver()
        one = ring(driver, up=False)
        kept, waits = [], []
        for number in range(4):
            host, device = (np.zeros((1, 7 * SLOT), np.uint8) for _ in "ab")
            kept.append((host, device))
            waits.append(submit(one, host, device, 7 * SLOT, 1, after=1000 + number))
        assert [wait() for wait in waits] == [0] * 4
        driver.finish()
        marks = [x for x in driver.said if x < 0 or x in (START, STOP)]
        assert marks == [x for number in range(4) for x in (-1000 - number, START, STOP)]


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
@pytest.mark.parametrize(
    "fails",
    [("cuMemcpyAsync", 1), ("cuMemcpyAsync", 3), ("cuEventRecord", 4), ("cuEventQuery", 2)],
    ids=str,
)
def test_an_error_of_the_driver_ends_the_copy(up, fails):
    driver = Driver(fails)
    one = ring(driver, up=up)
    host, device = (np.zeros((1, 20_000), np.uint8) for _ in "ab")
    assert submit(one, host, device, 20_000, 1)() == 700
    driver.finish()  # what the stream was told before


def test_a_copy_that_is_stopped_leaves_the_rest_out():
    driver, stopped = Driver(), c_int(1)
    one = ring(driver, up=True)
    host, device = np.ones((1, 50_000), np.uint8), np.zeros((1, 50_000), np.uint8)
    assert submit(one, host, device, 50_000, 1, stopped=stopped)() == native_copier.STOPPED
    assert not device.any()
    assert submit(one, host, device, 50_000, 1)() == 0  # and the ring goes on
    driver.finish()
    assert device.all()


@pytest.mark.campaign
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing_and_the_bytes_are_right(sanitizer, tmp_path):
    if reason := native_copier.unavailable():
        pytest.skip(reason)
    source, made = Path(__file__).parent / "support" / "copier_stress.cpp", tmp_path / "stress"
    # Without optimization all accesses are looked at, and it compiles in a third of the time.
    how = ["-std=c++17", "-O0", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    built = subprocess.run(["g++", *how, source, "-o", made], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"g++ has no sanitizer here: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([made, "2", "1"], capture_output=True, text=True, timeout=100)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel gives the sanitizer no memory")
    assert done.returncode == 0, f"{done.returncode}: {done.stdout} {done.stderr[:3000]}"


def test_without_a_compiler_it_says_so():
    code = "from hybrid_gemm.execution import native_copier; print(native_copier.unavailable())"
    done = python("-c", code, env={"PATH": ""})
    assert "g++ is not installed" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "cores, devices, count",
    [(2, 1, 2), (16, 1, 12), (32, 1, 12), (32, 2, 20), (16, 2, 16), (64, 4, 32), (128, 8, 32)],
)
def test_more_devices_have_more_threads(cores, devices, count, monkeypatch):
    monkeypatch.setattr(native_copier, "cores", lambda: cores)
    assert native_copier.threads(devices) == count


def test_pages_are_made_without_a_change_to_them():
    page, pages = mmap.PAGESIZE, 3000
    with mmap.mmap(-1, page * pages, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # each page by itself, so that none is left out
        array = np.frombuffer(memory, np.uint8)
        array[5 * page + 1] = 7
        array[9 * page] = 8
        assert resident(array).nonzero()[0].tolist() == [5, 9]
        here = ring(Driver(), up=False)
        for part in array[:page], array[page:-3], array[:0]:
            here.touch(part)
        until = time.monotonic() + 30
        while here.pool.ends and time.monotonic() < until:
            time.sleep(0.001)
        assert not here.pool.ends and resident(array).all()
        assert array[5 * page + 1] == 7 and array[9 * page] == 8 and array.sum() == 15
        del array, part
        while True:  # until nothing of it is kept, so that it can be closed
            with contextlib.suppress(BufferError):
                memory.close()
                break
            assert time.monotonic() < until
            time.sleep(0.001)


def resident(array: np.ndarray) -> np.ndarray:
    """Which pages of memory there are."""
    found = np.empty(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [c_void_p, c_size_t, c_void_p]
    assert mincore(array.ctypes.data, array.nbytes, found.ctypes.data) == 0
    return found & 1


def test_bytes_written_while_pages_are_made_stay(rng):
    here = ring(Driver(), up=False)
    for _ in range(5):
        array, given = np.empty(9_000_000, np.uint8), rng.integers(0, 256, 9_000_000, np.uint8)
        here.touch(array)
        array[:] = given
        np.testing.assert_array_equal(array, given)


class Several(Driver):
    """One for rings of several devices, whose copies are over only when it is `open`."""

    def __init__(self):
        self.open = True
        super().__init__()

    def cuCtxSetCurrent(self, context):
        assert CONTEXT <= context < CONTEXT + 4

    def cuEventQuery(self, event):
        return super().cuEventQuery(event) if self.open else 600

    def ring(self, device: int, *, up: bool) -> native_copier.Ring:
        """Slots for copies of 256 KiB, which are not cut further."""
        size, slots = 256 << 10, 40
        first = 1000 * (2 * device + up)
        return native_copier.Ring(
            dataclasses.replace(self.calls, context=CONTEXT + device), STREAM,
            np.empty(size * slots, np.uint8), size, range(first, first + slots), up=up,
        )  # fmt: skip


@pytest.fixture
def threads_of_many_cores(monkeypatch):
    """What says of the copying threads how often each of them has slept, once all of them do. The
    pool is the test's own, and takes itself to be on a host of 64 cores."""
    if reason := native_copier.unavailable():
        pytest.skip(reason)
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("this system does not tell of threads")
    monkeypatch.setattr(native_copier, "cores", lambda: 64)
    monkeypatch.setattr(native_copier, "pool", functools.cache(native_copier.Pool))
    native_copier.pool()
    others = set(os.listdir("/proc/self/task"))

    def slept():
        found, runs = {}, False
        for thread in set(os.listdir("/proc/self/task")) - others:
            status = Path(f"/proc/self/task/{thread}/status").read_text()
            found[thread] = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
            runs |= "\nState:\tR" in status
        return found, runs

    def settled():
        until, before, (found, runs) = time.monotonic() + 30, {}, slept()
        while runs or found != before:
            assert time.monotonic() < until
            time.sleep(0.1)
            before, (found, runs) = found, slept()
        return found

    return settled


def test_there_are_as_many_threads_as_devices_with_rings_want(threads_of_many_cores):
    driver, rings = Several(), []
    for device, count in ((0, 12), (0, 12), (1, 20), (3, 28), (2, 32), (1, 32)):
        rings.append(driver.ring(device, up=bool(len(rings) % 2)))
        assert len(threads_of_many_cores()) == count


def test_threads_that_the_devices_at_work_do_not_want_sleep(threads_of_many_cores):
    """As many wake as a run's devices want, whatever ran before, and in runs alike the same."""
    driver = Several()
    rings = [driver.ring(device, up=True) for device in range(4)]
    size = 8 << 20
    host, there = (np.zeros((1, size), np.uint8) for _ in "ab")

    def copies(count):
        driver.open = False  # all are under way at once
        waits = [submit(rings[i], host, there, size, 1) for i in range(count)]
        driver.open = True
        assert [wait() for wait in waits] == [0] * count

    def pages(count):
        for one in rings[:count]:
            one.touch(np.empty(64 << 20, np.uint8))

    before = threads_of_many_cores()
    assert len(before) == 32
    for work, devices, count in (
        (copies, 1, 12), (copies, 2, 20), (copies, 4, 32), (copies, 1, 12), (pages, 1, 12),
    ):  # fmt: skip
        for _run in range(3):
            work(devices)
            after = threads_of_many_cores()
        woken = [thread for thread in after if after[thread] != before[thread]]
        assert len(woken) == count, (work, devices)
        before = after
