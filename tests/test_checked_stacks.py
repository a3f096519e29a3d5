"""Stacks of small products on a GPU, which are checked together; here the emulator plays it."""

import contextlib
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from support.arrays import WithPointer, integers
from support.devices import marks, open_device

from hybrid_gemm import catalog
from hybrid_gemm.devices import stack_products
from hybrid_gemm.devices.checksums import GROUPS, KernelChecksums
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.devices.streams import HostStream
from hybrid_gemm.errors import VerificationError
from hybrid_gemm.execution.checked_device import CheckedDevice
from hybrid_gemm.execution.checked_work import CheckedWork
from hybrid_gemm.options import Options
from hybrid_gemm.programs import small_checks
from hybrid_gemm.programs.on_gpu import OneGpu
from hybrid_gemm.programs.program import REFUSING, Call
from hybrid_gemm.programs.stacks import StacksOnGpu

pytestmark = marks("emulator")
COUNT, M, N, K = 5, 33, 70, 20


@pytest.mark.parametrize("orders", catalog.LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_sums_of_a_stack_are_those_of_its_pairs(kernel_device, rng, orders, dtype):
    device = open_device(kernel_device)
    stream, sums = device.stream(), KernelChecksums(device)
    same = {"rtol": 1e-12, "atol": 1e-9}
    # Several blocks and shares of k, of which the emulator makes those of every dtype and order.
    large = kernel_device != "emulator" or (len(dtype) + catalog.LAYOUTS.index(orders)) % 3 == 0
    for m, n, k in ((33, 70, 20), (1, 1, 1), *([(257, 5, 600)] if large else [])):
        with device.using(stream):
            stacks = []
            for (rows, cols), order in zip(((m, k), (k, n), (m, n)), (*orders, "n"), strict=True):
                lines, length = (rows, cols) if order == "n" else (cols, rows)
                there = device.empty(3 * (lines + 2), length, dtype)
                device.copy(there, rng.standard_normal(there.shape).astype(dtype), stream)
                there = there.reshape(3, lines + 2, length)[:, :lines]  # apart from each other
                stacks.append(there if order == "n" else there.swapaxes(1, 2))
            a, b, c = stacks
            product = sums.product(a, b, stream)
            pairs = [sums.product(x, y, stream).whole() for x, y in zip(a, b, strict=True)]
            c = c.copy()
            of_c, of_each = sums.sums(c, stream), [sums.sums(x, stream) for x in c]
            stream.synchronize()
        assert product.of.shape == (-(-k // 256), 3 * m, GROUPS)
        for i in range(2):
            wanted = np.concatenate([_host(x[i]) for x in pairs])
            np.testing.assert_allclose(_host(product.whole()[i]), wanted, **same)
            wanted = np.concatenate([_host(x[i]) for x in of_each])
            np.testing.assert_array_equal(_host(of_c[i]), wanted)


class Array(WithPointer):
    """As CuPy's, on GPU 0."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


class Played(EmulatorDevice):
    """A GPU, which counts what is started there."""

    ordinal, capability = 0, 90
    is_current, current = staticmethod(lambda: True), contextlib.nullcontext
    prepared = staticmethod(lambda *_: None)

    def __init__(self):
        super().__init__()
        self.started, stream = Counter(), SimpleNamespace(ptr=1, is_capturing=lambda: False)
        cuda = SimpleNamespace(get_current_stream=lambda _gpu: stream)
        self.cp = SimpleNamespace(ndarray=Array, cuda=cuda)

    def launch(self, function, launch, args, stream):
        self.started[function.label.split()[0]] += 1
        super().launch(function, launch, args, stream)


class Stream(HostStream):
    pointer, waits = 1, 0
    unrestricted = staticmethod(contextlib.nullcontext)

    def synchronize(self):
        self.waits += 1


class Gpu:
    """C = A @ B of stacks, with products checked or not; `faults` are done to C when it is made."""

    def __init__(self, monkeypatch, *, checked=True):
        self.device, self.stream, self.faults = Played(), Stream(), []
        self.checked = CheckedDevice(self.device) if checked else None
        plans = SimpleNamespace(
            options=Options(kernel="own"), arithmetic=SimpleNamespace(compute="fp32"),
            settle=lambda problem: problem, alone=lambda *_given: None,
        )  # fmt: skip
        gpu = OneGpu(self.device, plans, self.checked)
        gpu.streams._known[1] = self.stream
        self.stacks = StacksOnGpu(gpu)
        real = stack_products.bind_stack

        def bind(*args):
            make = real(*args)

            def call(a, b, c, stream):
                make(a, b, c, stream)
                if self.faults:
                    self.faults.pop(0)(c)

            return call

        monkeypatch.setattr(stack_products, "bind_stack", bind)

    def multiply(self, a, b):
        c = np.full((*a.shape[:-1], b.shape[-1]), np.nan, a.dtype).view(Array)
        return self.stacks.write(Call(a, b, out=c)).play(a, b, None, c)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.fixture
def pair(rng):
    return [integers(rng, s).view(Array) for s in ((COUNT, M, K), (COUNT, K, N))]


def put(value, *where):
    def fault(c):
        for place in where:
            c[place] = value

    return fault


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_stack_is_judged_at_once(gpu, pair, monkeypatch, dtype):
    a, b = (x.astype(dtype) for x in pair)
    wanted = Gpu(monkeypatch, checked=False).multiply(a, b)
    gpu.multiply(a, b)  # makes weights, and waits for them
    gpu.device.started.clear()
    gpu.stream.waits = 0
    got = gpu.multiply(a.reshape(1, *a.shape), b.reshape(1, *b.shape))
    assert got.tobytes() == wanted.tobytes()
    assert gpu.stream.waits == 1 and gpu.checked.tally.products == 2 * COUNT
    checks = {"check_product": 1, "check_sums": 1, "check_judge": 1}
    assert gpu.device.started == {**checks, next(iter(gpu.device.started)): 1}
    assert not (gpu.checked.tally.repeated or gpu.checked.tally.confirmed)


@pytest.mark.parametrize("room", [small_checks.MOST_ROOM, 0])
def test_damaged_products_of_a_stack_are_made_again(gpu, pair, monkeypatch, room):
    monkeypatch.setattr(small_checks, "MOST_ROOM", room)
    wanted = pair[0] @ pair[1]
    gpu.faults.append(put(1000, (1, 30, 69), (1, 32, 3), (4, 0, 0)))
    np.testing.assert_array_equal(gpu.multiply(*pair), wanted)
    tally = gpu.checked.tally
    assert (tally.products, tally.repeated, tally.confirmed) == (COUNT, 2, 0)
    first, last = tally.faults
    assert first.rows in ((30, 31), (32, 33)) and last.rows == (0, 1) and last.cols == (0, 16)


def test_what_the_judge_on_the_device_alone_finds_wrong_is_counted(gpu, pair, monkeypatch):
    real, spot = small_checks.SmallProduct._are_right, (1, 30, 69)

    def suspicious(*arrays):
        real(*arrays)
        return False

    monkeypatch.setattr(small_checks.SmallProduct, "_are_right", suspicious)
    monkeypatch.setattr(CheckedWork, "suspicious", lambda *_: True)
    wanted = pair[0] @ pair[1]
    gpu.faults.append(put(np.nextafter(wanted[spot], np.float32(np.inf)), spot))
    np.testing.assert_array_equal(gpu.multiply(*pair), wanted)
    tally = gpu.checked.tally
    assert (tally.products, tally.repeated, tally.confirmed) == (COUNT, 1, 0)
    assert tally.faults[0].rows == (30, 31)


def test_a_stack_with_inf_is_confirmed_beside_a_fault(gpu, pair):
    a, b = pair
    a[2, 3, 4] = np.inf
    b[2, 4] = 1
    gpu.faults.append(put(np.nan, (0, 5, 6)))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(gpu.multiply(a, b), a @ b)
    tally = gpu.checked.tally
    assert (tally.products, tally.repeated, tally.confirmed) == (COUNT, 1, 1)
    assert tally.faults[0].rows == (5, 6)


def test_wrong_again_is_an_error_that_names_rows_of_its_product(gpu, pair):
    gpu.faults += [put(1000, (3, 7, 8))] * 3
    with pytest.raises(VerificationError, match=r"rows 7 to 7, .*again when it was made again"):
        gpu.multiply(*pair)


def test_stacks_that_are_checked_pair_by_pair(gpu, pair, monkeypatch):
    a, b = pair
    c = np.zeros((COUNT, M, 2 * N), "f4").view(Array)
    assert gpu.stacks.write(Call(a, b, out=c[:, :, ::2])) is REFUSING
    assert gpu.stacks.write(Call(a, b, out=c[:, :, :N])) is REFUSING  # with gaps
    assert not gpu.stacks.stackable(a, b, c)  # of the host: copies are checked, too
    monkeypatch.setattr(KernelChecksums, "worth_stacking", lambda *_: False)
    assert gpu.stacks.write(Call(a, b, out=np.zeros((COUNT, M, N), "f4").view(Array))) is REFUSING


def test_large_matrices_are_worth_their_own_launches():
    sums = KernelChecksums(open_device("emulator"))
    for count, n, worth in ((64, 64, True), (1000, 16, True), (64, 1024, False)):
        assert sums.worth_stacking(np.broadcast_to(np.float32(0), (count, n, n)), n) == worth


def _host(x):
    return x if isinstance(x, np.ndarray) else x.get()
