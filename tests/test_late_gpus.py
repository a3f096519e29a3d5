"""The package's own CUDA devices on GPUs that are played, whose streams work late: arrays of GPUs
and of the host, graphs, and what is over when a call has returned."""

import contextlib
import random

import numpy as np
import pytest
from support import late_gpus
from support.emulation import needs_emulator
from support.played_driver import small_runs

import hybrid_gemm
from hybrid_gemm import Runner
from hybrid_gemm.errors import UsageError
from hybrid_gemm.execution import native_copier, staging, transfers
from hybrid_gemm.execution.kept_programs import NATIVE
from hybrid_gemm.execution.single_thread_schedule import uncollected

M, N, K = 36, 50, 26
pytestmark = needs_emulator


@pytest.fixture(params=[0, 0.8], ids=["late", "eager"])
def gpus(request, monkeypatch):
    """Two GPUs; afterwards nothing was done without an order."""
    small_runs(monkeypatch)
    played = late_gpus.play(monkeypatch, random.Random(1), 2, eager=request.param)
    with uncollected():  # the driver's lock is not held by who closes a ring: others look at it
        yield played
    hybrid_gemm.free_memory()  # no kept runner has a played GPU
    assert not played.late.races and not played.late.errors


def whole(rng, *shape, dtype="f4"):
    return rng.integers(-9, 9, shape).astype(dtype)


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


def recorded(gpus, runner, a, b, out):
    """The graph of a product, on a stream that is current meanwhile."""
    stream = gpus.module.cuda.get_current_stream()
    stream.begin_capture()
    graph = None
    try:
        runner.gemm(a, b, out=out)
    finally:
        graph = stream.end_capture()
    return graph


def test_a_graph_makes_the_product_of_what_is_there_then(gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    with cp.cuda.Stream(non_blocking=True) as stream:
        a, b, out = (cp.empty(shape, "f4") for shape in ((M, K), (K, N), (M, N)))
        graph = recorded(gpus, runner, a, b, out)
        for _ in range(3):
            x, y = whole(rng, M, K), whole(rng, K, N)
            a[...], b[...] = cp.asarray(x), cp.asarray(y)
            others = [cp.asarray(x) for _ in range(4)]  # in what was given back
            graph.launch(stream)
            np.testing.assert_array_equal(out.get(), x @ y)
            del others


@pytest.mark.parametrize("how", ["of two dtypes", "with steps", "complex"])
def test_a_graph_does_not_copy_to_memory_that_is_given_back(how, gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    with cp.cuda.Stream(non_blocking=True):
        dtype = {"of two dtypes": "f8", "complex": "c8"}.get(how, "f4")
        a, b = cp.asarray(whole(rng, M, 2 * K, dtype=dtype)), cp.asarray(whole(rng, K, N))
        a = a[:, ::2] if how == "with steps" else a[:, :K]
        out = cp.empty((M, N), dtype)
        with pytest.raises(UsageError, match="a graph is being captured"):
            recorded(gpus, runner, a, b, out)


def test_a_graph_does_not_read_copies_on_another_gpu(gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[1], kernel="shared_tile")
    a, b = cp.asarray(whole(rng, M, K)), cp.asarray(whole(rng, K, N))
    cp.cuda.get_current_stream().synchronize()
    with cp.cuda.Stream(non_blocking=True):
        out = cp.empty((M, N), "f4")
        with pytest.raises(UsageError, match="a graph is being captured"):
            recorded(gpus, runner, a, b, out)
        np.testing.assert_array_equal(runner.gemm(a, b).get(), a.get() @ b.get())


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
