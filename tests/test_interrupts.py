"""Ctrl-C while several threads multiply: nothing is at work any more when it reaches the caller."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from hybrid_gemm import Runner
from hybrid_gemm.devices.cpu import CpuDevice

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


def multiply(a, out):
    with Runner(device="cpu", threads=3, split="rows") as runner:
        runner.gemm(a, a, out=out)


def test_an_interrupted_product_writes_no_more(slow, rng):
    began, over = slow
    a, out = rng.random((90, 90)), np.zeros((90, 90))

    def interrupt():
        while not began:
            time.sleep(SLOW_S / 30)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        multiply(a, out)
    assert len(began) == len(over)
    then = out.copy()
    time.sleep(3 * SLOW_S)
    np.testing.assert_array_equal(out, then)


def test_one_that_is_interrupted_as_its_threads_start_does_not_either(slow, rng, monkeypatch):
    began, over = slow
    real, started = threading.Thread.start, []

    def start(self):
        real(self)
        started.append(self)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        multiply(rng.random((90, 90)), np.zeros((90, 90)))
    assert len(started) == 2 and len(began) == len(over)


def test_a_thread_that_dies_as_it_starts_is_not_waited_for(monkeypatch, rng):
    """Python's `start` leaves such a one where a signal's handler raises within it."""
    real = threading.Thread.start

    def start(self):
        monkeypatch.setattr(self, "run", lambda: None)
        real(self)
        raise TimeoutError

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TimeoutError):
        multiply(rng.random((90, 90)), np.zeros((90, 90)))
