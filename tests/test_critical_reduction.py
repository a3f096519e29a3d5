"""The lab's reduction: workers add their partial sums to C in host memory, one after the other."""

import threading

import numpy as np
import pytest
from support.arrays import integers

from hybrid_gemm import Runner, devices
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.devices.wrapped import WrappedDevice
from hybrid_gemm.execution.commands import INCOMPLETE

WAY = {"threads": 3, "split": "cols", "reduce": "critical"}
M, N, K = 40, 30, 60


class Adding(WrappedDevice):
    """A device whose worker with the first part of K multiplies last; `added` are the first
    elements of what is added, in order."""

    def __init__(self, device, added, others) -> None:
        super().__init__(device)
        self.added, self.others = added, others

    def bound_gemm(self, variant, a, b, c, *, alpha, beta):
        make = self.device.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)
        first = float(a[0, 0]) == 1

        def call(stream):
            if first:
                self.others.acquire(timeout=100)
                self.others.acquire(timeout=100)
            make(stream)
            if not first:
                stream.synchronize()
                self.others.release()

        return call

    def gemm(self, variant, a, b, c, *, alpha, beta, stream):
        self.bound_gemm(variant, a, b, c, alpha=alpha, beta=beta)(stream)

    def add(self, total, partial, stream):
        self.added.append(float(partial[0, 0]))
        self.device.add(total, partial, stream)


@pytest.fixture
def added(monkeypatch):
    real, added, others = devices.open_devices, [], threading.Semaphore(0)

    def opened(*args, **keywords):
        return [Adding(device, added, others) for device in real(*args, **keywords)]

    monkeypatch.setattr(devices, "open_devices", opened)
    return added


@pytest.mark.parametrize("kind", ["cpu", "emulator"])
def test_workers_add_in_their_order_whoever_is_ready_first(kind, added):
    a, b = np.ones((M, K), "f4"), np.ones((K, N), "f4")
    a[:, K // 3 :] = 2
    a[:, 2 * K // 3 :] = 3
    with Runner(device=kind, **WAY) as runner:
        done = runner.run(a, b)
    assert added == [K // 3, 2 * K // 3, K]
    assert (done.c == 2 * K).all()


OUTS = {
    "new": lambda: None,
    "in rows": lambda: np.full((M, N), np.nan, "f4"),
    "in columns": lambda: np.full((N, M), np.nan, "f4").T,
    "with gaps": lambda: np.full((2 * M, 3 * N), np.nan, "f4")[::2, ::3],
    "float64": lambda: np.full((M, N), np.nan, "f8"),
    "float16": lambda: np.full((M, N), np.nan, "f2"),
}


@pytest.mark.parametrize("beta", [0, -2])
@pytest.mark.parametrize("out", OUTS)
def test_it_adds_into_any_out(device, out, beta, rng):
    a, b, c = integers(rng, (M, K)), integers(rng, (K, N)), integers(rng, (M, N))
    added, out = beta * c, OUTS[out]()
    if not beta:  # C is not read
        c = None if out is None else np.full_like(c, np.nan)
    with Runner(device=device, **WAY) as runner:
        done = runner.run(a, b, c, beta=beta, out=out)
    assert out is None or done.c is out
    np.testing.assert_array_equal(done.c, a @ b + added)


@pytest.mark.parametrize("alpha", [3e38, np.inf])
@pytest.mark.parametrize(("out", "beta"), [("in rows", 0), ("in rows", 1), ("float64", 1)])
def test_alpha_is_a_factor_of_the_whole_sum(device, out, beta, alpha):
    """And not of partial sums, which are Inf of both signs then."""
    a, b, c = np.full((M, K), -1, "f4"), np.ones((K, N), "f4"), np.ones((M, N), "f4")
    a[:, : K // 3] = 2 + 1 / K
    b *= 3
    with Runner(device=device, **WAY) as runner:
        done = runner.run(a, b, c, alpha=alpha, beta=beta, out=OUTS[out]())
    exact = np.float32(alpha) * (a.astype("f8") @ b)
    assert np.isfinite(exact).all() == np.isfinite(alpha)
    np.testing.assert_allclose(done.c, exact, rtol=1e-4)


@pytest.mark.parametrize(("out", "changed"), [("in rows", True), ("float64", False)])
def test_an_error_says_whether_out_was_changed(out, changed, monkeypatch):
    def fail(*_):
        raise RuntimeError("no sum")

    monkeypatch.setattr(CpuDevice, "add", fail)
    a, b = np.ones((M, K), "f4"), np.ones((K, N), "f4")
    with Runner(device="cpu", **WAY) as runner, pytest.raises(RuntimeError, match="no sum") as told:
        runner.run(a, b, out=OUTS[out]())
    assert getattr(told.value, "__notes__", []) == [INCOMPLETE] * changed
