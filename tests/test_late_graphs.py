"""CUDA graphs that are recorded from calls, on GPUs that are played, whose streams work late."""

import numpy as np
import pytest
from support import late_gpus, played_runs
from support.emulation import needs_emulator

from hybrid_gemm import Runner
from hybrid_gemm.errors import UsageError

M, N, K = 36, 50, 26
pytestmark = needs_emulator
gpus, whole = played_runs.gpus, late_gpus.whole


def recorded(gpus, product, *args, **more):
    """The graph of a product, on a stream that is current meanwhile."""
    stream = gpus.module.cuda.get_current_stream()
    stream.begin_capture()
    graph = None
    try:
        product(*args, **more)
    finally:
        graph = stream.end_capture()
    return graph


def test_a_graph_makes_the_product_of_what_is_there_then(gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="shared_tile")
    with cp.cuda.Stream(non_blocking=True) as stream:
        a, b, out = (cp.empty(shape, "f4") for shape in ((M, K), (K, N), (M, N)))
        graph = recorded(gpus, runner.gemm, a, b, out=out)
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
        for _ in range(4 * (how != "complex")):  # by then the call is known
            runner.gemm(a, b, out=out)
        with pytest.raises(UsageError, match="a graph is being captured"):
            recorded(gpus, runner.gemm, a, b, out=out)


@pytest.mark.parametrize("how", ["with steps", "with steps in out", "complex"])
def test_a_graph_of_stacks_does_not_copy_to_memory_that_is_given_back(how, gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="own")
    dtype = "c8" if how == "complex" else "f4"
    step_a, step_c = 1 + (how == "with steps"), 1 + (how == "with steps in out")
    with cp.cuda.Stream(non_blocking=True):
        a, b = (cp.asarray(whole(rng, *x, dtype=dtype)) for x in ((5, M, 2 * K), (5, K, N)))
        out = cp.empty((5, M, 2 * N), dtype)[..., : N * step_c : step_c]
        with pytest.raises(UsageError, match="a graph is being captured"):
            recorded(gpus, runner.matmul, a[..., : K * step_a : step_a], b, out=out)


def test_a_graph_of_stacks_copies_nothing_to_save_launches(gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[0], kernel="own")
    with cp.cuda.Stream(non_blocking=True) as stream:
        a, b = whole(rng, 9, 9, M, K), whole(rng, 9, 9, K, N)
        wide = cp.empty((9, 10, M, K), "f4")
        x, y, out = wide[:, :9], cp.asarray(b), cp.empty((9, 9, M, N), "f4")
        x[...] = cp.asarray(a)
        graph = recorded(gpus, runner.matmul, x, y, out=out)
        others = [cp.asarray(-a) for _ in range(4)]  # in what was given back
        graph.launch(stream)
        np.testing.assert_array_equal(out.get(), a @ b)
        for other in others:
            np.testing.assert_array_equal(other.get(), -a)


def test_a_graph_does_not_read_copies_on_another_gpu(gpus, rng):
    cp, runner = gpus.module, Runner(device="cuda", gpus=[1], kernel="shared_tile")
    a, b = cp.asarray(whole(rng, M, K)), cp.asarray(whole(rng, K, N))
    cp.cuda.get_current_stream().synchronize()
    with cp.cuda.Stream(non_blocking=True):
        out = cp.empty((M, N), "f4")
        with pytest.raises(UsageError, match="a graph is being captured"):
            recorded(gpus, runner.gemm, a, b, out=out)
        np.testing.assert_array_equal(runner.gemm(a, b).get(), a.get() @ b.get())
