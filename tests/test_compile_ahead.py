"""A first product's kernels are compiled while its operands are on their way."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.devices import needs

from hybrid_gemm import Runner, catalog
from hybrid_gemm.errors import KernelError
from hybrid_gemm.execution import staging

WAIT_S = 60


def whole(shape, seed):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32)


class Held:
    """A runner's emulator whose compiler waits until a copy has begun; `order` is what happened."""

    def __init__(self, monkeypatch, runner, fails=False):
        (device,) = runner.devices
        self.order, self.copied = [], threading.Event()
        compile_, load = device.compile, device.load

        def compiling(*kernel):
            self.order.append("compile" if self.copied.wait(WAIT_S) else "compile before copies")
            if fails:
                raise KernelError("no such instruction")
            compile_(*kernel)

        def loading(*kernel):
            self.order.append("load")
            return load(*kernel)

        def copying(copy):
            def begin(*args, **options):
                self.copied.set()
                self.order.append("copy")
                return copy(*args, **options)

            return begin

        device.compile, device.load = compiling, loading
        link = staging.link(device).device  # which does the copies
        monkeypatch.setattr(link, "copy_pinned", copying(link.copy_pinned))


@needs("emulator")
@pytest.mark.parametrize("split", [{}, {"threads": 3, "split": "cols"}])
def test_operands_are_brought_while_kernels_are_compiled(split, monkeypatch):
    runner = Runner(device="emulator", kernel="block_tile", **split)
    held = Held(monkeypatch, runner)
    a, b = whole((70, 50), 1), whole((50, 60), 2)
    assert (runner.gemm(a, b) == a @ b).all()
    assert held.order.index("copy") < held.order.index("compile") < held.order.index("load")
    count = len(held.order)
    assert (runner.gemm(a, b) == a @ b).all()
    assert {"compile", "load"}.isdisjoint(held.order[count:])


@needs("emulator")
def test_a_timed_run_compiles_first(monkeypatch):
    """Its clock is of the product alone."""
    runner = Runner(device="emulator", kernel="block_tile")
    held = Held(monkeypatch, runner)
    held.copied.set()
    a, b = whole((70, 50), 1), whole((50, 60), 2)
    assert (runner.run(a, b).c == a @ b).all()
    assert held.order.index("load") < held.order.index("copy")


@needs("emulator")
def test_what_does_not_compile_is_an_error_of_the_call(monkeypatch):
    runner = Runner(device="emulator", kernel="block_tile")
    Held(monkeypatch, runner, fails=True)
    a, b = whole((70, 50), 1), whole((50, 60), 2)
    before = threading.active_count()
    with pytest.raises(KernelError, match="no such instruction"):
        runner.gemm(a, b)
    until = time.monotonic() + WAIT_S
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


@needs("emulator")
def test_it_is_asked_once_whether_kernels_have_to_be_compiled(monkeypatch):
    """To work a product out takes longer than a small one."""
    runner = Runner(device="emulator", kernel="block_tile")
    (device,) = runner.devices
    asked = []
    kernels_of = device.kernels_of
    monkeypatch.setattr(device, "kernels_of", lambda work: asked.append(1) or kernels_of(work))
    a, b = whole((70, 50), 1), whole((50, 60), 2)
    for _ in range(3):
        assert (runner.gemm(a, b) == a @ b).all()
    assert len(asked) == 1
    assert (runner.run(a, b).c == a @ b).all()  # a timed one loads all before its clock runs
    assert len(asked) == 1


@needs("emulator")
def test_products_of_loaded_kernels_are_worked_out_once(monkeypatch):
    """Another shape takes the kernels of one before."""
    (device,) = Runner(device="emulator", kernel="block_tile").devices
    variant, bound, bind = catalog.get("block_tile").variant(), [], type(device).bind
    monkeypatch.setattr(
        type(device), "bind", lambda self, *args, **kw: bound.append(1) or bind(self, *args, **kw)
    )
    for n in (40, 50):
        a, b, c = whole((70, n), 1), whole((n, 60), 2), np.empty((70, 60), np.float32)
        before = len(bound)
        call = device.loading_together(lambda d, x=(a, b, c): d.bind(variant, *x, alpha=1, beta=0))
        assert (len(bound) - before > 1) is (n == 40)
        call(a, b, c, device.stream())
        assert (c == a @ b).all()


@needs("emulator")
def test_threads_that_load_a_kernel_at_once_get_the_same_one(monkeypatch):
    (device,) = Runner(device="emulator", kernel="block_tile").devices
    both = threading.Barrier(2, timeout=WAIT_S)

    def loading(*kernel):
        both.wait()
        return object()

    monkeypatch.setattr(device, "load", loading)
    variant = catalog.helper("transpose")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: device.function(variant, "float32"), range(2))
    assert first is second


@needs("emulator")
def test_a_forked_child_waits_for_no_compiler_of_its_parent(monkeypatch):
    (device,) = Runner(device="emulator", kernel="block_tile").devices
    variant, compiled = catalog.helper("transpose"), threading.Event()
    monkeypatch.setattr(device, "compile", lambda *kernel: compiled.wait(WAIT_S))
    device.compile_ahead(lambda d: d.function(variant, "float32"))
    if (child := os.fork()) == 0:
        signal.alarm(WAIT_S // 2)  # ends a child that waits
        device.function(variant, "float32")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    compiled.set()
    assert status == 0
