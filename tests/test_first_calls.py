"""`tune="first-calls"`: which kernels the first calls take, and which is kept."""

import dataclasses
import threading

import numpy as np
import pytest
from support.devices import needs

from hybrid_gemm import Runner, catalog
from hybrid_gemm.errors import HybridGemmWarning, UsageError
from hybrid_gemm.execution.first_calls import FirstCalls
from hybrid_gemm.kernel_choice import model_files, on_gpu
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.options import Options
from hybrid_gemm.problem import Problem

H200 = Machine("NVIDIA H200", 132, 90, 66.9)


class Clock:
    """A device, a stream and events whose time goes on by what products take."""

    now = 0.0

    recorded = False

    def start_clock(self):
        self.now = 0.0

    def capturing(self):
        return self.recorded

    def record(self):
        return Moment(self.now)

    def time_ms(self, event):
        assert event.waited or event.start
        return event.at


class Moment:
    def __init__(self, at):
        self.at, self.waited, self.start = at, False, True

    def synchronize(self):
        self.waited = True


def products(clock, times, calls):
    """Products that add up A and B, take these times, call by call, and note that they ran."""

    def make(name, took):
        took = iter(took)

        def multiply(a, b, c, stream):
            calls.append(name)
            clock.now += next(took, 1.0)
            np.matmul(a, b, out=c)

        return multiply

    return [make(name, took) for name, took in times.items()]


def test_calls_take_turns_and_the_fastest_of_the_second_round_is_kept():
    clock, calls = Clock(), []
    times = {"one": [9, 3], "two": [1, 4], "three": [50, 2]}  # the first calls load
    product = FirstCalls(products(clock, times, calls), clock)
    a, b = np.arange(6.0).reshape(2, 3), np.ones((3, 2))
    for call in range(9):
        c = np.full((2, 2), np.nan)
        product(a, b, c, clock)
        np.testing.assert_array_equal(c, a @ b)
        assert (product.fastest is None) == (call < 6)
    assert calls == ["one", "two", "three"] * 2 + ["three"] * 3
    assert product.fastest is product.products[2]


def test_of_equal_times_the_first_named_is_kept():
    clock, calls = Clock(), []
    product = FirstCalls(products(clock, {"one": [5, 2], "two": [5, 2]}, calls), clock)
    for _ in range(5):
        product(np.eye(2), np.eye(2), np.empty((2, 2)), clock)
    assert calls[-1] == "one"


def test_calls_of_several_threads_choose_too():
    """Each of four calls, by two products, is still running when the fifth comes."""
    clock, running, go_on = Clock(), threading.Semaphore(0), threading.Event()
    at, other = np.ones((2, 2)), np.full((2, 2), np.nan)

    def slow(a, b, c, stream):
        running.release()
        assert go_on.wait(30)
        np.matmul(a, b, out=c)

    product = FirstCalls([slow, slow], clock)
    callers = [threading.Thread(target=product, args=(at, at, other, clock)) for _ in range(5)]
    for caller in callers:
        caller.start()
        assert running.acquire(timeout=30)
    go_on.set()
    for caller in callers:
        caller.join()
    product(at, at, other, clock)
    assert product.fastest is slow and (other == 2).all()


def test_a_product_that_fails_once_is_not_mistaken_for_another():
    clock, calls = Clock(), []
    one, two = products(clock, {"one": [5, 5, 5], "two": [1, 1, 1]}, calls)
    failing = iter([False, True])

    def at_first(a, b, c, stream):
        if next(failing, False):
            raise MemoryError
        one(a, b, c, stream)

    product, x = FirstCalls([at_first, two], clock), np.eye(2)
    failures = 0
    for _ in range(8):
        try:
            product(x, x, np.empty((2, 2)), clock)
        except MemoryError:
            failures += 1
    assert failures == 1 and product.fastest is two


@pytest.mark.parametrize("compute, operands", [("fp32", ""), ("tf32", ""), ("fp32", "float16"),
                                               ("fp32x3", "")])  # fmt: skip
def test_rivals_are_what_models_expect_to_be_fastest(compute, operands):
    problem = Problem(1000, 900, 800, compute=compute, operands=operands)
    choose = on_gpu.strict if (compute, operands) == ("fp32", "") else on_gpu.on_tensor_cores
    first = choose(H200, problem, "nn", own=False)[0]
    rivals = on_gpu.next_fastest(H200, problem, "nn", first, own=False)
    assert len({first, *rivals}) == 3
    times = model_files.model(H200, on_gpu.mode_of(problem)).times_us((1000, 900, 800), "nn", H200)
    if compute != "fp32x3":
        assert min(times, key=times.__getitem__) in {first, *rivals}
    own = on_gpu.next_fastest(H200, problem, "nn", first, own=True, count=99)
    assert own and not any(v.kernel.library for v in own)


def test_rivals_are_expected_to_read_what_beta_scales():
    """Which takes our kernels on tensor cores longer than cuBLAS in 16 bits."""
    plain = Problem(8192, 8192, 256, operands="float16", out_dtype="float16")
    first = on_gpu.on_tensor_cores(H200, plain, "nn", own=True)[0]
    for beta, library in ((0, False), (0.5, True)):
        problem = dataclasses.replace(plain, beta=beta)
        nearest = on_gpu.next_fastest(H200, problem, "nn", first, own=False)[0]
        assert bool(nearest.kernel.library) == library


def test_no_model_no_rivals():
    other = Machine("Some GPU", 7, 80, 1.0)
    first = catalog.get("tuned").variant()
    assert on_gpu.next_fastest(other, Problem(9, 9, 9), "nn", first, own=False) == []


def test_first_calls_choose_among_kernels_and_are_not_checked():
    assert Options().tune == "models"
    with pytest.raises(UsageError, match="kernel tuned was named"):
        Options(tune="first-calls", kernel="tuned")
    with pytest.raises(UsageError, match="checked was given too"):
        Options(tune="first-calls", checked=True)
    with pytest.raises(UsageError, match="first-calls"):
        Options(tune="first-call")


def test_it_is_said_where_first_calls_have_no_effect():
    with pytest.warns(HybridGemmWarning, match="tune has no effect"):
        Runner(device="cpu", tune="first-calls").close()


@needs("cuda")
def test_products_are_right_from_the_first_call_on():
    import cupy

    with Runner(device="cuda", tune="first-calls") as runner:
        a, b = (cupy.asarray(np.random.default_rng(i).integers(-4, 5, (700, 700)), "float32")
                for i in (0, 1))  # fmt: skip
        for _ in range(9):
            assert (runner.gemm(a, b) == a @ b).all()


def test_in_a_graph_nothing_is_timed():
    clock, calls = Clock(), []
    first = FirstCalls(products(clock, {"one": [2.0] * 9, "two": [1.0] * 9}, calls), clock)
    a, b, c = (np.ones((2, 2)) for _ in range(3))
    clock.recorded = True
    for _ in range(5):
        first(a, b, c, clock)
    assert calls == ["one"] * 5 and first.fastest is None
    clock.recorded = False
    for _ in range(5):
        first(a, b, c, clock)
    clock.recorded = True
    first(a, b, c, clock)
    assert calls[5:] == ["one", "two", "one", "two", "two", "two"]
