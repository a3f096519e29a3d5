"""What one GPU does alone, whether `out` overlaps, and what a `Runner` keeps."""

import contextlib
import ctypes
import gc
import weakref

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.arrays import integers
from support.devices import needs
from support.links import separate_links

import hybrid_gemm
from hybrid_gemm import Runner, devices, gemm
from hybrid_gemm.arrays.caller_arrays import shares_memory
from hybrid_gemm.arrays.strides import fewest_transposed, leading, reach, span
from hybrid_gemm.devices.cuda import driver, launch_list, tensor_maps
from hybrid_gemm.errors import DTypeError
from hybrid_gemm.execution import plan_maker
from hybrid_gemm.planning import planner
from hybrid_gemm.problem import Problem
from hybrid_gemm.programs.planned import Plans

on_cuda = needs("cuda")


@pytest.mark.parametrize("options", [{}, {"threads": 2, "split": "cols"}, {"compute": "fp32x3"}])
def test_a_runner_that_is_dropped_takes_its_memory_along(device, options, rng, monkeypatch):
    """Its memory is freed at once, and not when Python next collects cycles of references."""
    if device == "cpu" and "compute" in options:
        pytest.skip("fp32x3 is for tensor cores")
    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    separate_links(monkeypatch, object())
    gc.collect()
    gc.disable()
    try:
        runner = Runner(device=device, **options)
        np.testing.assert_array_equal(runner.run(a, b).c, a @ b)
        np.testing.assert_array_equal(runner.gemm(a, b), a @ b)
        there = [weakref.ref(x) for x in runner.devices]
        del runner
        assert [x() for x in there] == [None] * len(there)
    finally:
        gc.enable()


def test_memory_kept_for_later_calls_is_given_back(device, rng, monkeypatch):
    seen, open_devices = [], devices.open_devices

    def remember(*arguments, **options):
        opened = open_devices(*arguments, **options)
        seen.extend(map(weakref.ref, opened))
        return opened

    monkeypatch.setattr(devices, "open_devices", remember)
    hybrid_gemm.free_memory()  # another test may have had this runner
    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    for _ in range(2):
        np.testing.assert_array_equal(gemm(a, b, device=device, threads=3), a @ b)
    assert seen and all(x() for x in seen)
    hybrid_gemm.free_memory()
    gc.collect()
    assert not any(x() for x in seen)


@given(st.data())
def test_arrays_share_memory_where_numpy_says_so(data):
    """The addresses alone decide, as they do for arrays of GPUs."""
    whole = np.zeros((12, 14), "f4")

    def view():
        start, stop, step = (st.integers(-14, 14) for _ in range(3))
        row, col = (
            slice(data.draw(start), data.draw(stop), data.draw(step.filter(bool))) for _ in "rc"
        )
        part = whole[row, col]
        return part.T if data.draw(st.booleans()) else part

    x, y = view(), view()
    assert shares_memory(x, y) == np.shares_memory(x, y)


def reach_of(x):
    return reach(x.shape, x.strides, x.itemsize)


@pytest.mark.parametrize(
    "x, of_rows, of_columns",
    [
        (np.zeros((3, 5)), 5, None),
        (np.zeros((5, 3)).T, None, 3),
        (np.zeros((2, 8))[:, :5], 8, None),
        (np.zeros((3, 10))[:, ::2], None, None),
        (np.zeros((1, 5)), 5, 1),  # one row lies in both orders
        (np.zeros((5, 1)), 1, 5),
    ],
)
def test_leading_dimensions_are_what_blas_takes(x, of_rows, of_columns):
    assert (leading(x, "n"), leading(x, "t")) == (of_rows, of_columns)


def test_rather_b_than_a_is_transposed():
    by_rows, by_columns = np.zeros((3, 5)), np.zeros((5, 3)).T
    assert fewest_transposed(("tn", "nt"), by_rows, by_columns) == "nt"
    assert fewest_transposed(("nt", "tn"), by_columns, by_rows) == "tn"
    assert fewest_transposed(("tn", "nt"), by_rows, by_rows) == "nt"


def test_a_span_is_from_the_first_byte_to_past_the_last():
    whole = np.zeros((4, 6))
    begin = whole.ctypes.data
    for x, first, last in (
        (whole, 0, 192), (whole[::-1, 1:3], 8, 168), (whole.T[::2, ::-3], 0, 184),
        (whole[2:3, 5:], 136, 144),
    ):  # fmt: skip
        assert span(x) == range(begin + first, begin + last)


@given(st.data())
def test_arrays_apart_have_no_byte_in_common(data):
    """`Reach` never says so of arrays that have one, and of blocks of one matrix it is exact."""
    whole = np.zeros((12, 14), "f4")
    blocks = data.draw(st.booleans())

    def view():
        (top, bottom), (left, right) = (
            sorted(data.draw(st.integers(0, n)) for _ in "ab") for n in whole.shape
        )
        step = st.just(1) if blocks else st.integers(1, 4)
        part = whole[top : bottom : data.draw(step), left : right : data.draw(step)]
        if not blocks and part.size and data.draw(st.booleans()):
            part = np.broadcast_to(part[:1], (3, part.shape[1]))
        return part.T if data.draw(st.booleans()) else part

    x, y = view(), view()
    assume(x.size and y.size)
    meet = reach_of(x).meets(x.ctypes.data, reach_of(y), y.ctypes.data)
    assert meet == reach_of(y).meets(y.ctypes.data, reach_of(x), x.ctypes.data)
    shared = np.shares_memory(x, y)
    assert meet >= shared
    assert not blocks or meet == shared


@pytest.mark.parametrize("first, second", [(np.s_[:6], np.s_[6:]), (np.s_[:, :6], np.s_[:, 6:])])
def test_halves_of_one_matrix_have_no_byte_in_common(first, second):
    whole = np.zeros((12, 14), "f4")
    x, y = whole[first], whole[second]
    assert not reach_of(x).meets(x.ctypes.data, reach_of(y), y.ctypes.data)
    assert not reach_of(y).meets(y.ctypes.data, reach_of(x), x.ctypes.data)


@on_cuda
@pytest.mark.parametrize("options", [{}, {"kernel": "own"}, {"compute": "fp32x3"}])
def test_updates_of_a_factorization_are_started_at_once(options, rng, no_plans):
    """Blocks of one matrix are multiplied where they lie: no plan, and nothing is waited for."""
    import cupy

    x = integers(rng, (300, 300))
    there = cupy.asarray(x)
    with Runner(device="cuda", gpus=[0], **options) as runner:
        for _ in range(3):
            for i in range(60, 300, 60):
                a, b = there[i:, i - 60 : i], there[i - 60 : i, i:]
                c = there[i:, i:]
                x[i:, i:] -= x[i:, i - 60 : i] @ x[i - 60 : i, i:]
                x[i:, i:] %= 8  # stays a small integer
                assert runner.gemm(a, b, c, alpha=-1, beta=1, out=c) is c
                c %= 8
                np.testing.assert_array_equal(c.get(), x[i:, i:])


@on_cuda
def test_device_arrays_stay_on_the_device(rng):
    import cupy

    a, b, c = (integers(rng, s) for s in ((70, 90), (90, 50), (70, 50)))
    for options in (
        {},
        {"kernel": "cublas"},
        {"threads": 4, "split": "cols"},
        {"emulate_devices": 3, "threads": 3},
    ):
        there = [cupy.asarray(x) for x in (a, b, c)]
        got = gemm(*there, alpha=2, beta=1, **options)
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), 2 * a @ b + c)
        out = gemm(there[0], there[1], there[2], beta=1, out=there[2], **options)
        assert out is there[2]
        np.testing.assert_array_equal(out.get(), a @ b + c)
        with pytest.raises(ValueError, match="out overlaps A"):
            gemm(there[0][:, :50], there[1][:50], out=there[0][:, 10:60], **options)
        both = cupy.zeros((70, 100), "f4")
        got = gemm(there[0], there[1], out=both[:, ::2], **options)
        np.testing.assert_array_equal(got.get(), a @ b)
        gemm(both[:, ::2][:50], both[:50, ::2], out=both[:50, 1::2], **options)


@on_cuda
@pytest.mark.parametrize(
    "dtype, options",
    [
        ("float32", {}),
        ("float32", {"kernel": "own"}),
        ("float32", {"kernel": "cublas"}),
        ("float32", {"compute": "fp32x3"}),
        ("float32", {"compute": "tf32"}),
        ("float32", {"compute": "tf32", "kernel": "mma"}),
        ("float64", {}),
        ("float64", {"kernel": "own"}),
        ("float16", {}),
        ("float16", {"kernel": "own"}),
        ("bfloat16", {"kernel": "own"}),
        ("int32", {}),
    ],
)
@pytest.mark.parametrize("shape", [(70, 90, 50), (128, 128, 128), (257, 64, 300)])
def test_prepared_products_are_those_that_python_starts(dtype, options, shape, rng):
    """For other matrices laid out alike, wherever they lie, on whichever stream."""
    import cupy

    m, k, n = shape
    here = Runner(device="cuda", gpus=[0], **options)

    def matrices():
        return [cupy.asarray(integers(rng, s, "f4").astype(dtype)) for s in ((m, k), (k, n))]

    def check(got, a, b, scale=1, added=0):
        product = a.get().astype("f8") @ b.get().astype("f8")
        np.testing.assert_array_equal(got.get(), (scale * product + added).astype(dtype))

    for turn in range(6):
        with cupy.cuda.Stream(non_blocking=True) if turn == 4 else contextlib.nullcontext():
            a, b = matrices()
            check(here.gemm(a, b), a, b)
            out = cupy.full((m, n), -1, dtype)
            assert here.gemm(a, b, out, alpha=2, beta=1, out=out) is out
            check(out, a, b, 2, -1)
            check(here.gemm(b, a, trans_a=True, trans_b=True), b.T, a.T)
            check(here.gemm(a, a, trans_b=True), a, a.T)
            shifted = cupy.empty(m * k + 1, dtype)[1:].reshape(m, k)  # not on 16 bytes
            shifted[...] = a
            check(here.gemm(shifted, b), a, b)
    if launch_list.unavailable() is None or "cublas" in options.values():
        assert any(x.launch and x.launch.native for x in here._programs._table.values())


@on_cuda
def test_a_tensor_map_is_the_same_wherever_its_address_comes_from():
    import cupy

    matrix, other = (cupy.zeros((1, 64, 64), "f2") for _ in "ab")
    made, expected = (
        tensor_maps.tensor_map("float16", x.data.ptr, (64, 64, 1), (128, 8192), (64, 64, 1))
        for x in (matrix, other)
    )
    room = np.zeros(1024, np.uint8)
    start = -(-room.ctypes.data // 64) * 64
    ctypes.memmove(start, made.ctypes.data, 128)
    assert driver.function("cuTensorMapReplaceAddress")(start, other.data.ptr) == 0
    assert ctypes.string_at(start, 128) == expected.tobytes()


@on_cuda
def test_prepared_products_keep_no_array_of_the_caller(rng):
    import cupy

    here = Runner(device="cuda", gpus=[0])
    out = cupy.empty((70, 50), "f4")
    gone = []
    for _ in range(3):
        a, b = (cupy.asarray(integers(rng, s)) for s in ((70, 90), (90, 50)))
        here.gemm(a, b, out=out)
        gone += [weakref.ref(a), weakref.ref(b)]
    del a, b
    assert not any(x() for x in gone)


@on_cuda
def test_small_products_stay_on_the_gpu_that_has_them(rng, monkeypatch):
    """Of several GPUs all are used where nothing else was said, but not for what one does in less
    time than it takes to start them."""
    import cupy

    here, runs = Runner(device="cuda"), []
    real = Plans._carry_out
    monkeypatch.setattr(
        Plans, "_carry_out", lambda self, *x, **y: runs.append(1) or real(self, *x, **y)
    )
    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    gpus = sorted({device.ordinal for device in here.devices})
    for ordinal in gpus:
        with cupy.cuda.Device(ordinal):
            got = here.gemm(cupy.asarray(a), cupy.asarray(b))
            assert got.device.id == ordinal and not runs
            np.testing.assert_array_equal(got.get(), a @ b)
    if len(gpus) > 1:
        Runner(device="cuda", split="cols").gemm(cupy.asarray(a), cupy.asarray(b))
        monkeypatch.setattr(planner, "START_MS", -1)
        Runner(device="cuda").gemm(cupy.asarray(a), cupy.asarray(b))
        Runner(device="cuda").gemm(a, b)
        assert len(runs) == 3


@on_cuda
@pytest.mark.parametrize("kernel", ["cublas", "tuned"])
def test_a_runner_may_be_dropped_while_a_graph_is_captured(kernel, rng):
    """Whenever Python finds that it is not needed any more."""
    import cupy

    a, b = (cupy.asarray(integers(rng, s)) for s in ((70, 90), (90, 50)))
    kept, old = (Runner(device="cuda", kernel=kernel, threads=1) for _ in "ab")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = kept.gemm(a, b)
        for make in old.gemm, old.run:
            make(a.get(), b.get())
        stream.synchronize()
        out.fill(-1)
        stream.begin_capture()
        kept.gemm(a, b, out=out)
        del old, make
        kept.gemm(a, b, out, alpha=2, beta=1, out=out)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
    np.testing.assert_array_equal(out.get(), 3 * a.get() @ b.get())


@on_cuda
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_arrays_of_the_host_are_copied_whole(dtype, rng, monkeypatch):
    """By the calling thread, as long as a run would take longer to set up."""
    runs, real = [], Plans._carry_out
    monkeypatch.setattr(
        Plans, "_carry_out", lambda self, *x, **y: runs.append(1) or real(self, *x, **y)
    )
    here = Runner(device="cuda")
    a, b, c = (integers(rng, s, dtype) for s in ((70, 90), (90, 50), (70, 50)))
    out = np.full_like(c, np.nan)
    assert here.gemm(a, b, out=out) is out
    np.testing.assert_array_equal(out, a @ b)
    np.testing.assert_array_equal(here.gemm(a.T.copy(), b, c, alpha=2, beta=-1, trans_a=True),
                                  2 * a @ b - c)  # fmt: skip
    np.testing.assert_array_equal(here.gemm(np.asfortranarray(a), b), a @ b)
    np.testing.assert_array_equal(here.gemm(a, a, trans_a=np.False_, trans_b=np.True_), a @ a.T)
    whole = c.copy()
    assert here.gemm(a, b, whole, beta=1, out=whole) is whole
    np.testing.assert_array_equal(whole, a @ b + c)
    assert not runs
    with pytest.raises(ValueError, match="A is 70 x 90"):
        here.gemm(a, b[1:].copy())
    with pytest.raises(ValueError, match="out overlaps A"):
        here.gemm(a, a.T.copy(), out=a[:, :70])
    np.testing.assert_array_equal(here.gemm(a[:, ::2], b[::2]), a[:, ::2] @ b[::2])
    assert not runs
    with pytest.raises(MemoryError, match="KiB"):  # the limit holds for these too
        Runner(device="cuda", gpus=[0], max_device_memory=50_000).gemm(a, b)
    monkeypatch.setattr(plan_maker, "HOSTED_BYTES", {"pinned": 0})
    runs.clear()
    np.testing.assert_array_equal(here.gemm(a, b), a @ b)
    assert len(runs) == 1
    np.testing.assert_array_equal(here.gemm(a, b, alpha=np.array(2.0)), 2 * a @ b)


def test_arrays_on_a_device_need_no_second_copy_in_its_memory(kernel_device):
    """However little is free beside them, the kernel for one device is found."""
    here = Runner(device=kernel_device, max_device_memory=1000, threads=1)
    with pytest.raises(MemoryError, match=r"needs 48 KiB on .*, which has 1000 bytes free"):
        here.plan(Problem(64, 64, 64), resident=True)
    variant = here.plans.alone(Problem(64, 64, 64), "nn", here.devices[0])
    assert variant.refusal(device=kernel_device, dtype="float32", m=64, n=64, k=64) is None


@on_cuda
@pytest.mark.parametrize("options", [{}, {"threads": 1}, {"threads": 3, "split": "rows"}])
def test_a_run_takes_no_memory_for_arrays_on_its_gpu(options, rng):
    import cupy

    (a, b, c) = (cupy.asarray(integers(rng, s)) for s in ((70, 90), (90, 50), (70, 50)))
    here = Runner(device="cuda", max_device_memory=1000, gpus=[0], **options)
    result = here.run(a, b, c, beta=2)
    np.testing.assert_array_equal(result.c.get(), a.get() @ b.get() + 2 * c.get())
    assert planner.memory_needs(result.plan) == [0]
    with pytest.raises(MemoryError, match=r"on cuda:0, which has 1000 bytes free"):
        here.run(a, b.astype("f8"))


def test_arrays_of_a_gpu_are_refused_where_none_multiplies():
    class Array:  # as CuPy's
        shape, strides, ndim, dtype = (8, 8), (32, 4), 2, np.dtype("f4")

    Array.T, Array.__module__ = Array(), "cupy"
    for pair in (Array(), np.ones((8, 8), "f4")), (np.ones((8, 8), "f4"), Array()):
        with pytest.raises(DTypeError, match="the device is cpu: cupy"):
            Runner(device="cpu").run(*pair)
    with pytest.raises(DTypeError, match="the device is cpu: cupy"):
        Runner(device="cpu").run(np.ones((8, 8), "f4"), np.ones((8, 8), "f4"), out=Array())


@on_cuda
def test_one_worker_is_on_the_gpu_that_has_the_arrays(rng):
    import cupy

    last = cupy.cuda.runtime.getDeviceCount() - 1
    with cupy.cuda.Device(last):
        a, b = (cupy.asarray(integers(rng, s)) for s in ((70, 90), (90, 50)))
        here = Runner(device="cuda")
        result = here.run(a, b)
        np.testing.assert_array_equal(result.c.get(), a.get() @ b.get())
    (worker,) = result.plan.workers
    assert result.plan.devices[worker.device].unit == result.c.device.id == last
    assert f"cuda:{last}" in here.describe(result.plan)


@on_cuda
def test_the_streams_of_every_gpu_are_waited_for(rng):
    """Whichever GPU is current when the product is asked for."""
    import cupy

    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long cycles) {'
        " long long start = clock64(); while (clock64() - start < cycles); }",
        "spin",
    )
    with cupy.cuda.Device(cupy.cuda.runtime.getDeviceCount() - 1):
        there, late, other = cupy.asarray(a), cupy.zeros_like(a), cupy.asarray(b)
        cupy.cuda.Stream(non_blocking=True).use()
        try:
            spin((1,), (1,), (100_000_000,))
            late[...] = there
            with cupy.cuda.Device(0):
                got = Runner(device="cuda", threads=2, split="cols").run(late, other).c
        finally:
            cupy.cuda.Stream.null.use()
    np.testing.assert_array_equal(got.get(), a @ b)
