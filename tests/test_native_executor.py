"""What native threads carry out is what Python's executor does: the same commands in the same
order, and the same bits, on GPUs that are played."""

import contextlib
import copy
import ctypes
import os
import signal
import threading
import time
from ctypes import c_void_p
from types import SimpleNamespace

import numpy as np
import pytest
from support.devices import needs
from support.late_gpus import all_free
from support.late_streams import LateStream, Pool
from support.played_runs import (
    PYTHON,
    WAYS,
    K,
    M,
    N,
    by_python,
    fine_plans,
    operands,
    play,
    played_runner,
    run,
    small_runs,
)
from support.timelines import bytes_moved

from hybrid_gemm import Runner, empty_pinned
from hybrid_gemm.execution import native_copier, native_executor, plan_maker, streamed
from hybrid_gemm.execution.commands import INCOMPLETE, Move, Record, Wait
from hybrid_gemm.execution.streamed import NATIVE
from hybrid_gemm.execution.timeline import PHASES
from hybrid_gemm.planning import planner
from hybrid_gemm.planning.on_grid import Cuts


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_runs(monkeypatch)
    fine_plans(monkeypatch)


@pytest.fixture(params=[(1,), (1, 1, 2)], ids=lambda ks: f"K in {len(ks)}")
def ks(request, monkeypatch):
    """K is cut so, where all of it is on the devices at once."""
    monkeypatch.setattr(planner, "_whole_cuts", lambda task, shape: Cuts(ks=request.param))
    return request.param


def made_by_both(runner, a, b, monkeypatch):
    """C by Python; a run by native threads comes after it."""
    with by_python(monkeypatch):
        result = run(runner, a, b)
    assert result.executor == PYTHON
    assert run(runner, a, b).executor == NATIVE
    return result.c


class Told:
    """What a native program tells the streams of one worker, as `Late.said` has it, with the
    program's numbers of events; and by ring the events at the ends of what goes through slots to a
    device."""

    def __init__(self, program):
        self.by_stream, self.ends, shared, first = {}, {}, set(), {}
        for worker, upload, made in program._commands:
            stream, kind = made.where, ("record", "wait", "copy", "start", "handed over")[made.kind]
            if kind == "handed over":
                if upload:
                    self.ends.setdefault(stream, []).append(made.stop)
                continue
            if first.setdefault(stream, worker) != worker:
                shared.add(stream)
            more = {"record": (made.event,), "wait": (made.event,),
                    "copy": (made.width * made.height,), "start": ()}[kind]  # fmt: skip
            self.by_stream.setdefault(stream, []).append((kind, *more))
        for stream in shared:
            self.by_stream.pop(stream, None)

    def check_order(self, said, handed_over):
        """Each stream was told what the list has for it, in its order, with one event for another.
        What goes through slots to a device was handed over in that order as well."""
        events = {}
        for stream, told in self.by_stream.items():
            heard = [(what, *more) for what, where, *more in said if where == stream]
            assert [x[0] for x in heard] == [x[0] for x in told]
            for (what, *there), (_what, *here) in zip(told, heard, strict=True):
                if what == "copy":
                    assert there == here
                elif what != "start":
                    assert events.setdefault(there[0], here[0]) == here[0]
        assert len(set(events.values())) == len(events) > 0
        for ends in self.ends.values():
            expected = [events[x] for x in ends]
            assert [x for x in handed_over if x in expected] == expected


@pytest.fixture
def handed_over(monkeypatch):
    """What native threads hand over, each by the event at its end, in their order."""
    ends, pool, request = [], native_copier.pool(), native_copier._Request
    kind = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, ctypes.POINTER(request))
    real = kind(pool.submit)

    def submit(to, ring, asked):
        ends.append(asked.contents.stop)
        real(to, ring, asked)

    called = kind(submit)
    monkeypatch.setattr(pool, "submit", ctypes.cast(called, c_void_p).value)
    yield ends
    del called  # native threads are not in it: each run has ended


@pytest.fixture
def noted(monkeypatch):
    """What native programs tell; themselves they would keep memory."""
    lists, real = [], native_executor.NativeProgram.__init__

    def made(program, *args):
        real(program, *args)
        lists.append(Told(program))

    monkeypatch.setattr(native_executor.NativeProgram, "__init__", made)
    return lists


def test_writing_does_nothing(monkeypatch, rng, noted):
    late = play(monkeypatch)
    runner, (a, b, _c) = played_runner(**WAYS[2]), operands(rng)
    told, seen = [], []

    def nothing(program, *_args):
        seen.append((list(late.said), list(told)))
        raise RuntimeError("enough")

    monkeypatch.setattr(native_executor.NativeProgram, "carry_out", nothing)
    with pytest.raises(RuntimeError, match="enough") as caught:
        run(runner, a, b, progress=told.append)
    assert not getattr(caught.value, "__notes__", [])
    ((said, told_before),) = seen
    assert noted and not told_before
    tables = (8 * 3,)  # bytes of those that sums take: addresses, which are there before any run
    assert not [x for x in said if x[0] in ("copy", "start", "wait") and x[2:] != tables]


@pytest.mark.parametrize(
    "pinned, order, with_c",
    [(False, "C", False), (True, "F", True), (False, "F", True)],
    ids=["pageable", "pinned", "transposed"],
)
@pytest.mark.parametrize("choices", WAYS, ids=str)
def test_native_threads_do_what_python_does(
    choices, pinned, order, with_c, ks, monkeypatch, rng, noted, handed_over
):
    late = play(monkeypatch, pinned=pinned)
    runner = played_runner(**choices)
    a, b, c = operands(rng, order)
    made = []
    for executor in (PYTHON, NATIVE, NATIVE):
        late.said.clear()
        handed_over.clear()
        with by_python(monkeypatch) if executor == PYTHON else contextlib.nullcontext():
            result = run(runner, a, b, c if with_c else None)
        assert result.executor == executor
        made.append((result.c, {x: bytes_moved(result, x) for x in PHASES},
                     sorted((x.worker, x.phase) for x in result.timeline)))  # fmt: skip
        assert all(x.stop_ms >= x.start_ms > 0 for x in result.timeline)
        del result  # its events are those of a later run
    for c_made, *activities in made:
        np.testing.assert_array_equal(c_made, made[0][0])
        assert activities == [*made[0][1:]]
    (told,) = noted
    told.check_order(late.said, handed_over)
    x, y, z = operands(rng, order)  # elsewhere in memory
    again = run(runner, x, y, z if with_c else None)
    assert again.executor == NATIVE
    np.testing.assert_allclose(again.c, 2 * x @ y + (3 * z if with_c else 0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_run_that_comes_again_has_nothing_made_anew(pinned, monkeypatch, rng):
    """No plan, no choice of a kernel, no run, no event, no thread; nor is free memory asked for."""
    play(monkeypatch, pinned=pinned)
    runner = played_runner(**WAYS[4])
    a, b, c = operands(rng)
    wanted = [run(runner, a, b, c) for _ in range(3)][-1].c
    made, tasks = [], set(os.listdir("/proc/self/task"))
    for owner, name in (
        (plan_maker, "make_plan"), (plan_maker, "choose"), (streamed, "Writer"), (streamed, "Play"),
        (type(runner.devices[0]), "spec"), (LateStream, "record"), (LateStream, "__init__"),
    ):  # fmt: skip
        real = getattr(owner, name)

        def counted(*args, _real=real, _name=name, **more):
            made.append(_name)
            return _real(*args, **more)

        monkeypatch.setattr(owner, name, counted)
    for _ in range(8):
        again = run(runner, a, b, c)
        assert again.executor == NATIVE
        np.testing.assert_array_equal(again.c, wanted)
        del again  # its events are those of a later run
    assert not made
    assert set(os.listdir("/proc/self/task")) <= tasks  # one of another test may have ended


def test_a_kernel_is_chosen_once(monkeypatch, rng):
    play(monkeypatch)
    chosen, real = [], plan_maker.choose
    monkeypatch.setattr(
        plan_maker, "choose", lambda *x, **more: chosen.append(x) or real(*x, **more)
    )
    runner = played_runner(threads=2)
    a, b, _c = operands(rng)
    for _ in range(3):
        runner.run(a, b, resident=True)
    assert len(chosen) == 1
    runner.run(np.asfortranarray(a), b, resident=True)  # for which another may be faster
    assert len(chosen) == 2


def test_a_run_goes_on_where_its_room_is_not_to_be_had(monkeypatch, rng):
    play(monkeypatch)
    runner = played_runner(**WAYS[2])
    a, b, _c = operands(rng)
    wanted = made_by_both(runner, a, b, monkeypatch)
    take, taken = Pool.take, all_free(runner.devices)
    for _ in range(2):  # in memory elsewhere
        result = run(runner, a, b)
        np.testing.assert_array_equal(result.c, wanted)
        assert result.executor == NATIVE
    del taken
    assert run(runner, a, b).executor == NATIVE
    refused = []

    def no_memory(*what):
        if not refused:
            refused.append(what)
            raise MemoryError
        return take(*what)

    monkeypatch.setattr(Pool, "take", no_memory)
    made, real = [], plan_maker.PlanMaker.prepare

    def counted(*args, **more):
        made.append(1)
        return real(*args, **more)

    monkeypatch.setattr(plan_maker.PlanMaker, "prepare", counted)
    for _ in range(2):
        result = run(runner, a, b)
        assert refused and result.executor == NATIVE
        np.testing.assert_array_equal(result.c, wanted)
    assert len(made) == 1  # and is found again afterwards


def test_a_timeline_looked_at_later_is_that_of_its_own_run(monkeypatch, rng):
    play(monkeypatch)
    runner = played_runner(**WAYS[2])
    a, b, _c = operands(rng)
    made_by_both(runner, a, b, monkeypatch)
    results, took_ms = [], []
    for _ in range(3):
        began = time.perf_counter()
        results.append(run(runner, a, b))
        took_ms.append((time.perf_counter() - began) * 1e3)
    for result, most in zip(results, took_ms, strict=True):
        assert result.executor == NATIVE
        assert 0 < max(x.stop_ms for x in result.timeline) <= most


@pytest.mark.parametrize(
    "what", [("cuEventRecord", 20), ("cuLaunchKernelEx", 3), ("cuMemcpyAsync", 2)], ids=str
)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_an_error_ends_the_run_with_its_own_words(what, pinned, monkeypatch, rng):
    late = play(monkeypatch, pinned=pinned)
    runner = played_runner(**WAYS[2])
    a, b, _c = operands(rng)
    wanted = made_by_both(runner, a, b, monkeypatch)
    late.counts.clear()
    late.fails = (*what, 700)
    out = np.full((M, N), 7, "f4")
    with pytest.raises(RuntimeError, match="the driver said 700") as caught:
        runner.run(a, b, alpha=2, out=out)
    incomplete = any("incomplete" in note for note in getattr(caught.value, "__notes__", ()))
    assert incomplete or (out == 7).all()  # it is untouched, or said not to be whole
    late.fails = None
    again = run(runner, a, b)
    np.testing.assert_array_equal(again.c, wanted)
    assert again.executor == NATIVE


def test_an_error_at_the_end_says_what_it_leaves(monkeypatch, rng):
    play(monkeypatch)
    runner = played_runner(**WAYS[2])
    a, b, _c = operands(rng)
    made_by_both(runner, a, b, monkeypatch)

    def fail(stream):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(LateStream, "synchronize", fail)
    for out, notes in ((np.zeros((M, N), "f4"), [INCOMPLETE]), (None, [])):
        with pytest.raises(RuntimeError, match="an illegal address") as caught:
            runner.run(a, b, alpha=2, out=out)
        assert getattr(caught.value, "__notes__", []) == notes


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_command_that_is_missing_hangs_no_run(pinned, monkeypatch, rng):
    """Each in turn is left out of the list. It ends nonetheless, since all wait for commands before
    them in the list; what waits for an event that nothing records is no program."""
    real, missing, kinds = native_executor.NativeProgram.__init__, -1, []

    def without(native, program, *more):
        commands = program.commands
        kinds[:] = [type(x) for x in commands]
        program = copy.copy(program)
        program.commands = [x for i, x in enumerate(commands) if i != missing]
        real(native, program, *more)

    monkeypatch.setattr(native_executor.NativeProgram, "__init__", without)
    play(monkeypatch, pinned=pinned)
    a, b, _c = operands(rng)
    run(played_runner(**WAYS[2]), a, b)
    found, whole = {}, list(kinds)
    for kind in set(whole):
        places = [i for i, x in enumerate(whole) if x is kind]
        for missing in places[:: len(places) // 6 | 1]:
            runner = played_runner(**WAYS[2])
            ended: list[str] = []
            first = threading.Thread(
                target=lambda at=runner, to=ended: to.append(run(at, a, b).executor),
                daemon=True,
            )
            first.start()
            first.join(20)
            assert ended, f"a run without {kind.__name__}, number {missing}, does not end"
            found.setdefault(kind, set()).update(ended)
    assert NATIVE in found[Wait] & found[Move if pinned else Wait]
    assert "python (an event is never recorded)" in found[Record]


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_ctrl_c_ends_a_run_soon(pinned, monkeypatch, rng):
    late = play(monkeypatch, pinned=pinned)
    runner = played_runner(**WAYS[1])
    a, b, _c = operands(rng)
    wanted = made_by_both(runner, a, b, monkeypatch)
    calls, failing, pause_s = [], late.failing, 0.0

    def interrupting(name):
        calls.append(name)
        if pause_s and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(pause_s)
        return failing(name)

    late.failing = interrupting
    run(runner, a, b)
    whole = len(calls)
    calls.clear()
    pause_s = 0.2
    with pytest.raises(KeyboardInterrupt):
        run(runner, a, b)
    assert 3 <= len(calls) < whole / 2, whole
    pause_s = 0
    np.testing.assert_array_equal(run(runner, a, b).c, wanted)


def test_progress_is_told_and_its_error_ends_the_run(monkeypatch, rng):
    play(monkeypatch)
    runner = played_runner(**WAYS[1])
    a, b, _c = operands(rng)
    told = []
    for _ in range(3):
        told.clear()
        assert run(runner, a, b, progress=told.append).executor == NATIVE
        assert sum(told) == 2 * M * N * K

    def fail(flops):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        run(runner, a, b, progress=fail)
    assert run(runner, a, b).executor == NATIVE  # with the same streams


def test_copies_on_one_link_keep_their_order():
    """Workers share a thread where nothing waits for a copy; otherwise each has its own, and
    uploads through slots theirs."""
    ports = ["cuda:0", "cuda:1", "cuda:0"]
    devices = {worker: SimpleNamespace(port=port) for worker, port in enumerate(ports)}
    native = object.__new__(native_executor.NativeProgram)
    native._devices = devices

    def threads_of(*commands):
        kinds = native_executor._COPY, native_executor._HAND_OVER
        native._commands = [
            (worker, upload, SimpleNamespace(kind=kinds[handed], where=(worker, handed, upload)))
            for handed, upload in commands for worker in devices
        ]  # fmt: skip
        return [[x.where[0] for x in lane] for _device, lane in native._lanes()]

    copies, up, down = (False, False), (True, True), (True, False)
    assert threads_of(copies) == [[0, 2], [1]]
    assert threads_of(up) == [[0, 2], [1]]
    assert threads_of(copies, up) == [[0], [1], [2], [0, 2], [1]]
    assert threads_of(down, up) == [[0], [1], [2], [0, 2], [1]]


@needs("cuda")
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
@pytest.mark.parametrize(
    "dtype, compute", [("f4", "fp32"), ("f4", "fp32x3"), ("f4", "tf32"), ("f2", "fp32")]
)
@pytest.mark.parametrize("choices", WAYS[:1] + WAYS[2:], ids=str)
def test_on_gpus_the_bits_are_the_same(choices, dtype, compute, memory, ks, monkeypatch):
    empty, beta = (empty_pinned, 2) if memory == "pinned" else (np.empty, 0)
    runner = Runner(device="cuda", compute=compute, **choices)
    m, n, k = 400, 304, 520
    made, executors = [], []
    for _ in range(5):
        # Matrices lie elsewhere each time, with the same numbers.
        a, b, c = (empty(shape, dtype) for shape in ((m, k), (k, n), (m, n)))
        numbers = np.random.default_rng(7)
        for x in (a, b, c):
            x[...] = numbers.standard_normal(x.shape, "f4")
        with contextlib.nullcontext() if made else by_python(monkeypatch):
            result = runner.run(a, b, c if beta else None, beta=beta, out=c)
        executors.append(result.executor)
        assert all(x.stop_ms >= x.start_ms >= 0 for x in result.timeline)
        made.append((c, bytes_moved(result, "upload"), len(result.timeline)))
    # Sums of 16 bits are kept in 32, and rounded on their way to the host.
    parts_of_k = choices.get("split") == "cols" or choices.get("grid", (1, 1, 1))[2] > 1
    summed = parts_of_k or len(ks) > 1
    rounded = dtype == "f2" and summed
    assert executors[0] == PYTHON
    assert executors[-1] == ("python (Python's threads copy)" if rounded else NATIVE)
    for x in made:
        np.testing.assert_array_equal(x[0], made[0][0])
        assert x[1:] == made[0][1:]
