"""Launches: by Python on a stream the first time, and prepared for it from the second on. Memory of
the host plays a GPU's; the last tests are of GPUs."""

import contextlib
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.arrays import integers
from support.devices import needs
from support.native_calls import STREAM, Prepared, There, aligned, play, there

import hybrid_gemm
from hybrid_gemm.devices.cuda.launch_list import BUSY
from hybrid_gemm.execution.first_calls import FirstCalls
from hybrid_gemm.programs import commands, on_gpu
from hybrid_gemm.programs.launch import CurrentStreams, Launch, Launches
from hybrid_gemm.programs.program import OUT, A, B, Call, Program
from hybrid_gemm.programs.signature import Programs

M, N, K = 8, 12, 4
SHAPES = (M, K), (K, N), (M, N)


class Device:
    """GPU 0. `prepared_for` are what was prepared, and for which addresses."""

    ordinal = 0

    def __init__(self):
        self.cp, self.prepared_for, self.prepares = sys.modules["cupy"], [], True

    def prepared(self, call, *given):
        if not self.prepares:
            return None
        made = Prepared()
        self.prepared_for.append((made, [x.ctypes.data for x in given[:3]]))
        return made


class Launched:
    """Programs of OUT = A B, each with a launch, or all with one where Python alone plays. `called`
    are the addresses of calls from Python, `started` those of launches that are prepared."""

    def __init__(self, *, turned=False, call=None, **more):
        called = []

        def multiply(a, b, c, stream):
            assert stream.busy.value == threading.get_ident()
            called.append(at(a, b, c))

        self.device, self.called, self.programs = Device(), called, Programs()
        views, order = partial(on_gpu._views, (turned,) * 3), (B, A) if turned else (A, B)
        make = (lambda shape, dtype: there(*shape, dtype=dtype)), (M, N), "f4"
        arrays = [there(*shape) for shape in SHAPES]
        looked_at = commands.looks_at(Call(*arrays[:2], out=arrays[2]))
        self.streams = CurrentStreams(self.device)
        self.new = partial(
            Launch, self.streams, call or multiply, make, views, slots=(*order, OUT), **more
        )  # fmt: skip
        self.launch, self.looked_at = self.new(), looked_at
        self.apart = partial(commands.apart, looked_at)
        self.played, self.unfit = [], []  # the slots of plays by Python

    def gemm(self, *args, out=None, native=True):
        """A call, by Python alone if it is not `native`."""
        given = {} if out is None else {"out": out}
        if native and (done := self.programs.play("gemm", args, given)) is not None:
            return done
        launch = Launches([self.new()], self.looked_at) if native else self.launch
        program = Program(
            [self.played.append, *([] if out is None else [self.apart]), launch],
            launch=launch if native else None, otherwise=Program([self.unfit.append]),
        )  # fmt: skip
        return self.programs.first("gemm", (program, Call(*args, out=out)), args, given)

    @property
    def started(self):
        return [at for made, _ in self.device.prepared_for for at in made.started]


@pytest.fixture
def gpu(monkeypatch):
    return play(monkeypatch)


def arrays(*shifts):
    return [aligned(shape, shift=x).view(There)
            for shape, x in zip(SHAPES, shifts or (0, 0, 0), strict=True)]  # fmt: skip


def at(*given):
    return tuple(x.ctypes.data for x in given)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("turned", [False, True])
def test_it_is_prepared_once_for_each_stream_and_what_addresses_leave(gpu, native, turned):
    """And is given the addresses in the order of its views, by Python and by native code."""
    made, given = Launched(turned=turned), []
    for _ in range(2):
        for gpu.stream in STREAM, 13:
            for shifts in (0, 0, 0), (4, 0, 0), (0, 8, 0), (0, 0, 4), (4, 4, 0):
                for _ in range(3):
                    a, b, out = arrays(*shifts)
                    assert made.gemm(a, b, out=out, native=native) is out
                    given.append(at(b, a, out) if turned else at(a, b, out))
    assert sorted(given) == sorted(made.called + made.started)
    assert len(made.called) == len(made.device.prepared_for) == 2 * 5
    assert len(made.played) == (2 * 2 * 5 if native else len(given))
    for one, places in made.device.prepared_for:
        phases = {tuple(x % 16 for x in started) for started in one.started}
        assert phases == {tuple(x % 16 for x in places)} and len(one.started) == 2 * 3 - 1


@pytest.mark.parametrize("why", ["captured", "not preparable", "no native code"])
def test_what_is_not_prepared_stays_pythons(gpu, why):
    made = Launched(preparable=why != "not preparable")
    gpu.capturing, made.device.prepares = why == "captured", why != "no native code"
    for _ in range(4):
        made.gemm(*arrays()[:2])
    assert len(made.called) == len(made.played) == 4 and not made.device.prepared_for
    gpu.capturing, made.device.prepares = False, True
    for _ in range(4):  # once a graph is made
        made.gemm(*arrays()[:2])
    assert len(made.started) == (3 if why == "captured" else 0)


@pytest.mark.parametrize("native", [True, False])
def test_what_a_launch_says(gpu, native):
    """Where another thread starts one on its stream, it is Python's turn, which waits; what fails
    is an error, and OUT that overlaps another product's matter."""
    made = Launched()
    a, b, out = arrays()
    for _ in range(2):
        made.gemm(a, b, out=out, native=native)
    ((prepared, _),) = made.device.prepared_for
    for prepared.status, called in (BUSY, 2), (0, 2):
        assert made.gemm(a, b, out=out, native=native) is out and len(made.called) == called
    prepared.status = 700
    with pytest.raises(MemoryError, match="700"):
        made.gemm(a, b, out=out, native=native)
    prepared.status = 0
    apart = len(made.called), len(made.started)
    whole = np.zeros(M * (N + K), "f4").view(There)
    out = whole[: M * N].reshape(M, N)
    made.gemm(whole[-M * K - 4 : -4].reshape(M, K), b, out=out, native=native)
    assert len(made.unfit) == 1 and apart == (len(made.called), len(made.started))


def test_it_becomes_the_fastest_of_its_first_calls_and_is_prepared(gpu):
    ran = []
    one, other = (lambda *_given, took=took: ran.append(took) for took in (5, 1))
    clock = SimpleNamespace(start_clock=lambda: None, time_ms=lambda event: event.at)
    made = Launched(call=FirstCalls([one, other], clock), preparable=False)
    made.streams().record = lambda: SimpleNamespace(at=sum(ran), synchronize=lambda: None)
    for _ in range(9):
        made.gemm(*arrays()[:2])
    assert ran == [5, 1, 5, 1, 1, 1] and len(made.started) == 3


def test_an_interrupted_start_leaves_its_stream_to_other_threads(gpu):
    """Also while the error is held, as an interactive Python holds the last one."""
    made, left, ended = Launched(preparable=False), 0, 0
    stream, given = made.streams(), arrays()

    def interrupt(_frame, event, _argument):
        nonlocal left
        if event in ("call", "return"):
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return interrupt

    with ThreadPoolExecutor(1) as other:
        for ended in range(999):
            left, held = ended, None
            sys.settrace(interrupt)
            try:
                made.launch.start(*given)
            except KeyboardInterrupt as error:
                held = error
            finally:
                sys.settrace(None)
            taken = other.submit(stream.lock.acquire, timeout=1).result()
            assert taken and not stream.busy.value
            other.submit(stream.lock.release).result()
            if held is None:
                break
    assert 5 < ended < 998


def test_the_gpu_with_the_kernels_lives_as_long_as_a_program_is_kept(gpu):
    made = Launched()
    programs, held, a, b = made.programs, weakref.ref(made.device), *arrays()[:2]
    made.gemm(a, b)
    gc.disable()  # nothing is left to it
    try:
        del made
        assert programs.play("gemm", (a, b), {}).shape == (M, N) and held() is not None
        assert len(held().prepared_for[0][0].started) == 1
        programs.forget()
        assert held() is None
    finally:
        gc.enable()


def test_its_gpu_is_the_current_one_while_a_program_is_played():
    now, seen = SimpleNamespace(gpu=1), []

    @contextlib.contextmanager
    def current():
        before, now.gpu = now.gpu, 0
        yield
        now.gpu = before

    place = SimpleNamespace(is_current=lambda: now.gpu == 0, current=current)
    Program([lambda slots: seen.append(now.gpu)], place=place).play(1, 2)
    assert seen == [0] and now.gpu == 1


# --- on GPUs ------------------------------------------------------------------------------


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize(
    "sides", [(1024,), (16, 256), (512, 64), (8, 77), (70, 0)], ids=lambda x: "x".join(map(str, x))
)
def test_native_plays_have_the_bits_of_first_ones(dtype, sides, rng):
    """Also where what cuBLAS launches is recorded, for matrices that lie elsewhere, and on another
    stream, which has programs of its own. `sides` are the stack's and the matrices', or 0."""
    import cupy

    shape = (*sides, sides[-1]) if sides[-1] else sides[:1] * 2
    shapes, made = (shape, shape if sides[-1] else shape[:1]), np.dtype(dtype)
    pairs = [[cupy.asarray(rng.standard_normal(s).astype("f4").astype(made)) for s in shapes]
             for _ in range(3)]  # fmt: skip
    bits = lambda x: x.view(np.uint8)  # noqa: E731
    first = [bits(hybrid_gemm.Runner(device="cuda", gpus=[0]).matmul(*pair)) for pair in pairs]
    cupy.cuda.Device().synchronize()  # another stream would not wait for these
    for trial in range(6):
        with cupy.cuda.Stream(non_blocking=True) if trial > 3 else cupy.cuda.Stream.null:
            for pair, expected in zip(pairs, first, strict=True):
                out = cupy.empty_like(expected.view(made))
                assert hybrid_gemm.matmul(*pair, out=out) is out
                assert bool((bits(out) == expected).all())
                assert bool((bits(hybrid_gemm.matmul(*pair)) == expected).all())


@needs("cuda")
def test_a_new_thread_starts_what_another_prepared(rng):
    """Whose context is not the new thread's yet."""
    import cupy

    a, b = (cupy.asarray(integers(rng, (70, 70))) for _ in "ab")
    expected, out = (a @ b).get(), cupy.zeros((70, 70), "f4")

    def work():
        return [hybrid_gemm.gemm(a, b, out=out) is out for _ in range(2)]

    assert all(work() + work())
    out.fill(0)
    cupy.cuda.Device().synchronize()
    with ThreadPoolExecutor(1) as thread:
        assert all(thread.submit(work).result())
    np.testing.assert_array_equal(out.get(), expected)
