"""The package's own CUDA devices on GPUs that are played, whose streams work late: arrays of GPUs
and of the host, and what is over when a call has returned."""

import contextlib
import functools
import itertools
import threading

import numpy as np
import pytest
from support import late_gpus, played_runs
from support.emulation import needs_emulator

import hybrid_gemm
from hybrid_gemm import Runner
from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.devices.residue_products import ResidueProduct
from hybrid_gemm.errors import OutOfMemoryError
from hybrid_gemm.execution import (
    checked_device,
    native_copier,
    staging,
    transfers,
)
from hybrid_gemm.execution.streamed import NATIVE
from hybrid_gemm.programs import small_checks
from hybrid_gemm.programs.launch import Launch

M, N, K = 36, 50, 26
pytestmark = needs_emulator
gpus, whole = played_runs.gpus, late_gpus.whole


def test_products_of_a_gpu_on_several_streams(gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    made = []
    for turn in range(8):
        a, b = whole(rng, K, M).T if turn % 3 == 0 else whole(rng, M, K), whole(rng, K, N)
        with streams[turn % 2]:
            x, y = cp.asarray(a), cp.asarray(b)
            for call in (runner.gemm, lambda *x: hybrid_gemm.gemm(*x, kernel="naive")):
                made.append((call(x, y), a @ b, streams[turn % 2]))
            del x, y  # before the products are done
    for product, expected, stream in made:
        with stream:
            np.testing.assert_array_equal(product.get(), expected)


def test_products_of_the_host_by_native_threads(gpus, rng):
    runner = Runner(device="cuda", gpus=[0, 1], threads=4, split="cols", kernel="shared_tile")
    for _ in range(4):
        a, b = whole(rng, M, K), whole(rng, K, N)
        result = runner.run(a, b)
        np.testing.assert_array_equal(result.c, a @ b)
        assert not gpus.late.at_work()
    assert result.executor == NATIVE


def test_partial_sums_are_added_one_after_the_other_in_host_memory(gpus, rng):
    way = {"threads": 3, "split": "cols", "reduce": "critical", "kernel": "shared_tile"}
    runner = Runner(device="cuda", gpus=[0, 1], **way)
    for _ in range(4):
        a, b, c = whole(rng, M, K), whole(rng, K, N), whole(rng, M, N)
        result = runner.run(a, b, c, beta=-2)
        np.testing.assert_array_equal(result.c, a @ b - 2 * c)
        assert not gpus.late.at_work()


def test_threads_on_one_stream_have_their_own_residues(gpus, rng, monkeypatch):
    """fp64x waits between its launches, when another thread's product may come."""
    runner = Runner(device="cuda", gpus=[0], compute="fp64x", kernel="residues_mma")
    of_a, of_b = ([rng.integers(-x, x, (20, 20)) * 1.0 for _ in "ab"] for x in (1 << 20, 9))
    made = {}

    def multiply(name, a, b):
        made[name] = runner.gemm(*map(gpus.module.asarray, (a, b))).get(), a @ b

    other = threading.Thread(target=multiply, args=("other", *of_b))
    decide = ResidueProduct._decide

    def decide_and_let_another_go_on(product, *args):
        decided = decide(product, *args)
        if threading.current_thread() is not other:
            other.start()
            other.join(0.5)  # it may have to wait for this one
        return decided

    monkeypatch.setattr(ResidueProduct, "_decide", decide_and_let_another_go_on)
    multiply("first", *of_a)
    other.join()
    for product, expected in made.values():
        np.testing.assert_array_equal(product, expected)


def test_steps_of_a_small_checked_product_are_prepared_and_do_not_wait(gpus, rng, monkeypatch):
    """For the thread that starts them, which holds the stream."""
    runner, started = Runner(device="cuda", gpus=[0], checked=True, kernel="vector"), []
    a, b = (gpus.module.asarray(whole(rng, *sides)) for sides in ((20, 24), (24, 20)))
    real = Launch.begin
    monkeypatch.setattr(Launch, "begin", lambda x, *y: started.append(x.call) or real(x, *y))
    for _ in range(3):
        started.clear()
        runner.gemm(a, b)
    assert [type(call) for call in started] == [small_checks.SmallProduct]


def test_a_prepared_product_waits_for_one_that_is_started_launch_by_launch(gpus, rng, monkeypatch):
    """Both keep the halves of A and B with the stream that they share."""
    runner = Runner(device="cuda", gpus=[0], compute="fp32x3", kernel="mma")
    first, second = ([whole(rng, x, 24), whole(rng, 24, x)] for x in (20, 28))
    of_first, of_second = (list(map(gpus.module.asarray, x)) for x in (first, second))
    for _ in range(3):
        runner.gemm(*of_second)
    made, launch, launched = [], CudaDevice.launch, []
    other = threading.Thread(target=lambda: made.append(runner.gemm(*of_second).get()))

    def launch_and_let_another_go_on(device, *args):
        launch(device, *args)
        launched.append(threading.current_thread())
        if len(launched) == 1:
            other.start()
            other.join(0.5)

    monkeypatch.setattr(CudaDevice, "launch", launch_and_let_another_go_on)
    monkeypatch.setattr(CudaDevice, "prepared", lambda *_given: None)  # which launches, too
    np.testing.assert_array_equal(runner.gemm(*of_first).get(), first[0] @ first[1])
    other.join()
    np.testing.assert_array_equal(made[0], second[0] @ second[1])
    mine = launched.count(threading.current_thread())
    assert mine > 1 and other not in launched[:mine]


@pytest.mark.parametrize("what", ["matrices", "matrices and C", "stacks", "of the host"])
def test_a_checked_product_that_comes_out_wrong_is_made_again(what, gpus, rng, monkeypatch):
    late, give = gpus.late, gpus.late.give
    kernel, stack = ("own", (3,)) if what == "stacks" else ("shared_tile", ())
    runner = Runner(device="cuda", gpus=[0], kernel=kernel, checked=True)
    there = np.asarray if what == "of the host" else gpus.module.asarray
    stream, damaged = gpus.module.cuda.Stream(non_blocking=True), []

    def give_damaged(stream, label, work, reads, writes):
        damages = "_tile" in label and len(damaged) < calls

        def damage():
            work()
            writes[-1][-1, -1] ^= 0x41  # the highest byte of a number

        if damages:
            damaged.append(label)
        give(stream, label, damage if damages else work, reads, writes)

    monkeypatch.setattr(late, "give", give_damaged)
    for calls in range(1, 5):  # the third one is prepared
        a, b = whole(rng, *stack, M, K), whole(rng, *stack, K, N)
        c = whole(rng, *stack, M, N) * (what == "matrices and C")
        with stream:
            if what == "stacks":
                made = runner.matmul(there(a), there(b))
            else:
                made = runner.gemm(there(a), there(b), there(c), beta=1)
            made = made if what == "of the host" else made.get()
        np.testing.assert_array_equal(made, a @ b + c)
        assert len(damaged) == runner.devices[0].tally.repeated == calls


@pytest.mark.parametrize("limit", [None, "MOST_FLOPS", "MOST_ROOM"])
@pytest.mark.parametrize("shape", [(M, N, K), (7, 90, 5)])
def test_small_products_and_their_checks_are_prepared(limit, shape, gpus, rng, monkeypatch):
    """But no larger ones, and none whose sums would take much memory from then on."""
    if limit is not None:
        monkeypatch.setattr(small_checks, limit, 8)
    prepared, are_right = [], small_checks.SmallProduct._are_right

    def counted(self, *args):
        prepared.append(self)
        return are_right(self, *args)

    monkeypatch.setattr(small_checks.SmallProduct, "_are_right", counted)
    runner = Runner(device="cuda", gpus=[0], kernel="shared_tile", checked=True)
    m, n, k = shape
    for beta in (0, 0, 0, 2, 2, 2):
        a, b, c = whole(rng, m, k), whole(rng, k, n), whole(rng, m, n)
        given = map(gpus.module.asarray, (a, b, c) if beta else (a, b))
        made = runner.gemm(*given, alpha=3, beta=beta)
        np.testing.assert_array_equal(made.get(), 3 * a @ b + beta * c)
    assert len(prepared) == (0 if limit else 6)
    assert limit or len(set(map(id, prepared))) < 6  # what comes again is made no more
    assert runner.devices[0].tally.products == 6 and not runner.devices[0].tally.repeated


@pytest.mark.parametrize("size", ["little", "much"])
def test_a_checked_copy_that_comes_out_wrong_is_made_again(size, gpus, rng, monkeypatch):
    """Much goes through the link's slots, and is summed meanwhile on its way to a GPU."""
    late, give, copies, staged = gpus.late, gpus.late.give, itertools.count(), []
    copy_now = staging.copy_now
    monkeypatch.setattr(staging, "copy_now", lambda *x: staged.append(x) or copy_now(*x))
    monkeypatch.setattr(checked_device, "AHEAD_BYTES", 1 if size == "much" else 1 << 20)
    monkeypatch.setattr(staging, "SMALL_BYTES", 0 if size == "much" else 1 << 20)

    def give_damaged(stream, label, work, reads, writes):
        def damage():
            work()
            writes[-1].reshape(-1)[-1] ^= 0x41

        # Of a part of a matrix: sums are multiples of 64 bytes, and a list of addresses is short.
        of_matrix = label == "a copy" and writes[-1].size > 100 and writes[-1].size % 64
        wrong = of_matrix and next(copies) in damaged
        give(stream, label, damage if wrong else work, reads, writes)

    monkeypatch.setattr(late, "give", give_damaged)
    way = {"gpus": [0, 1], "threads": 2, "split": "cols", "kernel": "shared_tile"}
    runner = Runner(device="cuda", checked=True, **way)
    for first in range(0, 9, 2):
        copies, damaged = itertools.count(), (first, 2 * first + 1)
        a, b, c = whole(rng, M, K), whole(rng, K, N), whole(rng, M, N)
        result = runner.run(a, b, c, beta=2)
        np.testing.assert_array_equal(result.c, a @ b + 2 * c)
        assert {fault.what for fault in result.checks.faults} == {"copy"}
        assert result.checks.repeated in (1, 2)  # both may be parts of one copy
    assert bool(staged) == (size == "much")


@pytest.mark.parametrize("way", ["runner", "module", "module again", "of the host"])
def test_a_lack_of_memory_is_told_in_words(way, gpus, rng, monkeypatch):
    cp, a, b = gpus.module, whole(rng, M, K), whole(rng, K, N)
    with cp.cuda.Stream(non_blocking=True):
        x, y = (a if way == "of the host" else cp.asarray(a)), cp.asarray(b)
        product = Runner(device="cuda", gpus=[0], kernel="shared_tile").gemm
        if way.startswith("module"):
            product = functools.partial(hybrid_gemm.gemm, kernel="shared_tile")
        if way == "module again":
            product(x, y)
        with monkeypatch.context() as patch:
            patch.setattr(gpus.late, "failing", lambda name: 2 * (name == "malloc"))
            with pytest.raises(OutOfMemoryError, match=r"m=36 n=50 .*out of memory, for a test"):
                product(x, y)
        np.testing.assert_array_equal(product(x, y).get(), a @ b)


@pytest.mark.parametrize("what", ["cuLaunchKernel", "cuMemcpyAsync", "cuEventRecord", "malloc"])
def test_after_an_error_nothing_is_at_work(what, gpus, rng):
    late = gpus.late
    runner = Runner(device="cuda", gpus=[0, 1], threads=4, split="cols", kernel="shared_tile")
    a, b = whole(rng, M, K), whole(rng, K, N)
    for number in (1, 3, 9, 20):
        late.counts.clear()
        late.fails = what, number, 700
        with contextlib.suppress(late_gpus.CudaError, MemoryError):
            runner.gemm(a, b)
        late.fails = None
        assert not late.at_work()
        np.testing.assert_array_equal(runner.gemm(a, b), a @ b)


@pytest.mark.parametrize("when", ["handed over", "waited for"])
def test_a_copy_that_ctrl_c_ended_is_not_at_work(when, gpus, rng, monkeypatch):
    """Its memory is another array's then."""
    (device,) = Runner(device="cuda", gpus=[0]).devices
    stream, there = device.stream(), device.empty(M, N, "float32")
    here = whole(rng, M, N)
    for _ in range(3):  # the first ones make what copies
        staging.copy_now(device, there, here, stream)

    with monkeypatch.context() as patched:
        submit = native_copier.Ring.submit

        def interrupted(*given):
            patched.undo()  # it comes once
            if when == "handed over":
                submit(*given)
            raise KeyboardInterrupt

        if when == "handed over":
            patched.setattr(native_copier.Ring, "submit", interrupted)
        else:
            patched.setattr(transfers.Later, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staging.copy_now(device, there, here, stream)
    assert not native_copier.pool().ends and not gpus.late.at_work()
    staging.copy_now(device, there, here, stream)
    with device.using(stream):
        np.testing.assert_array_equal(there.get(), here)


@pytest.mark.parametrize("kind", ["native threads", "Python's threads", "a cast"])
def test_a_copy_is_there_when_it_is_over(kind, gpus, rng, monkeypatch):
    """In more pieces than a ring has slots, both ways, after what the stream was given, and from
    and to page-locked memory too; and one that fails says so."""
    (device,) = Runner(device="cuda", gpus=[0]).devices
    stream, (there, other) = device.stream(), (device.empty(M, N, "float32") for _ in "ab")
    if kind == "Python's threads":
        monkeypatch.setattr(native_copier, "unavailable", lambda: "no compiler")

    def locked(x):
        made = device.pinned(x.nbytes).view(x.dtype).reshape(x.shape)
        made[...] = x
        return made

    for turn in range(8):
        here = whole(rng, M, N, dtype="f8" if kind == "a cast" else "f4")
        back = np.zeros_like(here, order="CF"[turn % 2])
        if turn > 5:
            here, back = locked(here), locked(back)
        staging.copy_now(device, there, here, stream)
        device.copy(other, there, stream)
        staging.copy_now(device, back, other, stream)
        np.testing.assert_array_equal(back, here)
        device.copy(other, there, stream)  # and reads what the next upload writes
    stream.synchronize()
    rings = staging.link(device).up, staging.link(device).down
    assert not gpus.late.at_work() and all(x.slots.qsize() <= staging.SLOTS for x in rings)
    here = np.array(here)
    for pair in (there, here), (np.zeros_like(here), there):
        gpus.late.counts.clear()
        gpus.late.fails = "cuMemcpyAsync", 1, 700
        with pytest.raises(late_gpus.CudaError):
            staging.copy_now(device, *pair, stream)
        gpus.late.fails = None
        assert not gpus.late.at_work()
