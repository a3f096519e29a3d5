"""Ctrl-C while several threads multiply: nothing is at work any more when it reaches the caller."""

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from types import SimpleNamespace

import numpy as np
import pytest

import hybrid_gemm as hg
from hybrid_gemm import Runner
from hybrid_gemm.devices import checksums, cpu
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.errors import UsageError
from hybrid_gemm.execution import checked_device, checks, player

SLOW_S = 0.3


@pytest.fixture
def slow(monkeypatch):
    """Has products take a while, the first one longest; gives those that began, and those that
    are over."""
    real, began, over = CpuDevice.gemm, [], []

    def gemm(self, *args, **options):
        began.append(1)
        time.sleep(SLOW_S if len(began) > 1 else 3 * SLOW_S)
        real(self, *args, **options)
        over.append(1)

    monkeypatch.setattr(CpuDevice, "gemm", gemm)
    return began, over


def interrupt_once(began):
    """Sends Ctrl-C as soon as something has begun."""

    def send():
        while not began:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send).start()


def multiply(a, out):
    with Runner(device="cpu", threads=3, split="rows") as runner:
        runner.gemm(a, a, out=out)


def test_an_interrupted_product_writes_no_more(slow, rng):
    began, over = slow
    a, out = rng.random((90, 90)), np.zeros((90, 90))
    interrupt_once(began)
    with pytest.raises(KeyboardInterrupt):
        multiply(a, out)
    assert len(began) == len(over)
    then = out.copy()
    time.sleep(3 * SLOW_S)
    np.testing.assert_array_equal(out, then)


@pytest.fixture
def starts(monkeypatch):
    """Has threads of products, Python's `Thread`s or not, started by another function."""

    def replace(start):
        monkeypatch.setattr(threading, "_start_new_thread", start, raising=False)
        monkeypatch.setattr(player, "start_new_thread", start, raising=False)

    return replace


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_what_a_handler_raises_as_threads_start_is_raised(error, slow, rng, starts, monkeypatch):
    """Python's `Thread.start` makes a KeyError of a TimeoutError."""
    (began, over), started = slow, []

    def start(*given):
        started.append(start_new_thread(*given))
        if len(started) == 2:
            while len(began) < 2:
                time.sleep(0.001)
            raise error

    monkeypatch.setitem(globals(), "SLOW_S", 0.03)
    starts(start)
    with pytest.raises(error):
        multiply(rng.random((90, 90)), np.zeros((90, 90)))
    assert len(began) == len(over) == 2


def test_a_thread_that_never_begins_is_not_waited_for(starts, rng):
    def start(*_given):
        raise TimeoutError

    starts(start)
    with pytest.raises(TimeoutError):
        multiply(rng.random((90, 90)), np.zeros((90, 90)))


def test_a_handler_that_would_wait_for_ever_for_pythons_locks_is_refused(slow, rng, monkeypatch):
    """It comes while `join` has the lock that new threads wait for: the product hung."""
    a = rng.integers(-4, 5, (30, 30)).astype("f4")
    raised = []

    def in_between(*_):
        with pytest.raises(UsageError, match="threads=1 there") as refused:
            hg.gemm(a, a, device="cpu", threads=2)
        raised.append(refused.value)
        np.testing.assert_array_equal(hg.gemm(a, a, device="cpu", threads=1), a @ a)

    monkeypatch.setitem(globals(), "SLOW_S", 0.03)
    before = signal.signal(signal.SIGINT, in_between)
    try:
        interrupt_once(slow[0])
        np.testing.assert_array_equal(hg.gemm(a, a, device="cpu", threads=3), a @ a)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(raised) == 1
    np.testing.assert_array_equal(hg.gemm(a, a, device="cpu", threads=2), a @ a)


def test_threads_are_refused_while_python_ends(rng, monkeypatch):
    """None begins then: in a __del__ that Python called last, the product hung."""
    a = rng.integers(-4, 5, (30, 30)).astype("f4")
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    with pytest.raises(UsageError, match="while Python ends"):
        hg.gemm(a, a, device="cpu", threads=2)
    np.testing.assert_array_equal(hg.gemm(a, a, device="cpu", threads=1), a @ a)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("dtype", ["f4", "f2"])  # of which the second is cast, in a run
def test_a_handler_may_multiply_at_each_line_of_what_checks(dtype, rng):
    """It waited for ever for locks that its own thread had."""
    a, runner = rng.integers(-4, 5, (9, 9)).astype(dtype), Runner(device="cpu", checked=True)
    files = checksums.__file__, checked_device.__file__, checks.__file__
    lines: set[tuple[str, int]] = set()

    def multiply():
        np.testing.assert_array_equal(runner.gemm(a, a), a.astype("f4") @ a)

    def in_between(frame, event, _argument):
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in lines:
            lines.add(place)
            sys.settrace(None)
            multiply()
            sys.settrace(entered)
        return in_between

    def entered(frame, _event, _argument):
        return in_between if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        multiply()
    finally:
        sys.settrace(before)
    # None is lost; but a trace also comes where no signal does, between a test and what follows it.
    assert len(lines) > 20 and runner.devices[0].tally.products >= len(lines)


def test_an_interrupted_run_leaves_its_thread_to_others():
    """Also while the error is held, as an interactive Python holds the last one."""
    program = SimpleNamespace(gates=[], lanes="12", queued=False)
    held, ended, left = [], 0, 0

    def interrupt(_frame, event, _argument):
        nonlocal left
        left -= event in ("call", "return")
        if left < 0:
            raise KeyboardInterrupt
        return interrupt

    for ended in range(80):
        played = object.__new__(player.Play)
        played.program, played.stop = program, SimpleNamespace(error=None)
        played._in_threads = lambda: None
        left, before = ended, len(held)
        sys.settrace(interrupt)
        try:
            played._play()
        except KeyboardInterrupt as error:
            held.append(error)
        finally:
            sys.settrace(None)
        assert not player._waiting
        if len(held) == before:
            break
    assert 5 < ended < 79


@pytest.fixture
def parts(monkeypatch):
    """Has two workers share eight cores, so that each cuts its products into parts, which take a
    while; gives the parts that began, and those that are over."""
    real, began, over = CpuDevice.multiply, [], []

    def multiply(self, *args):
        began.append(1)
        time.sleep(SLOW_S)
        real(self, *args)
        over.append(1)

    monkeypatch.setattr(cpu, "cores", lambda: 8)
    monkeypatch.setattr(CpuDevice, "multiply", multiply)
    return began, over


def fail(a, out, error):
    """Multiplies by a worker that cuts its product into parts; raises an error. Then nothing is
    at work any more, and `out` is the caller's."""
    with pytest.raises(error):
        CpuDevice(2).gemm(None, a, a, out, alpha=1, beta=0, stream=None)
    out[...] = 7
    time.sleep(2 * SLOW_S)
    assert (out == 7).all()


def test_parts_of_a_product_write_no_more_when_one_has_failed(parts, rng, monkeypatch):
    began, over = parts
    slow = CpuDevice.multiply

    def multiply(self, a, *rest):
        if a[0, 0] == 2:
            while len(began) < 3:  # the others
                time.sleep(0.01)
            raise MemoryError
        slow(self, a, *rest)

    monkeypatch.setattr(CpuDevice, "multiply", multiply)
    a = rng.random((160, 160))
    a[0, 0] = 2  # the first part, which is waited for first
    fail(a, np.zeros((160, 160)), MemoryError)
    assert len(began) == len(over) == 3


def test_parts_write_no_more_where_no_more_threads_start(parts, rng, monkeypatch):
    """A pool of threads keeps what it could start no thread for."""
    began, over = parts
    real, started = threading.Thread.start, []

    def start(self):
        if "ThreadPoolExecutor" in self.name:
            started.append(self)
            if len(started) >= 3:
                raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    fail(rng.random((160, 160)), np.zeros((160, 160)), RuntimeError)
    assert began and len(began) == len(over)


def test_parts_write_no_more_when_the_thread_that_waits_is_interrupted(parts, rng, monkeypatch):
    began, over = parts
    interrupt_once(began)
    fail(rng.random((160, 160)), np.zeros((160, 160)), KeyboardInterrupt)
    assert began and len(began) == len(over)
