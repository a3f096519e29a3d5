"""What the package keeps with communicators of the caller's. Every rank runs these."""

import contextlib
import dataclasses
import functools
import os
import threading
import time

import numpy as np
import pytest
from support.arrays import integers
from support.ranks import share

from hybrid_gemm import RankRunner, free_memory, gemm, matmul
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.errors import OptionTypeError, OutOfMemoryError, UsageError
from hybrid_gemm.planning.hardware import Links
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.ranks import launch, own_communicator, rank_planner, rank_run
from hybrid_gemm.ranks.own_communicator import staying_if_it_fails
from hybrid_gemm.ranks.rank_planner import RankPlanner
from hybrid_gemm.ranks.redistribution import NOTHING, Part, move

pytestmark = pytest.mark.mpi
A, B = np.arange(20.0).reshape(4, 5), np.arange(15.0).reshape(5, 3)
NOTHING_RAISED = contextlib.nullcontext()
OPTIONS = {"device": "cpu", "rank_timeout": 20}


def heartbeats() -> int:
    return sum(thread.name == "heartbeat" for thread in threading.enumerate())


def open_sockets() -> int:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum("socket:" in os.readlink(link) for link in links if os.path.islink(link))


def test_the_callers_own_messages_are_left_alone(comm):
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    any_of_them = comm.irecv(tag=-1)  # of any rank and tag
    for split in "rows", "cols":
        here = comm.rank == 0
        c = gemm(*((A, B) if here else (None, None)), comm=comm, split=split, distribution="root",
                 result="replicated", **OPTIONS)  # fmt: skip
        np.testing.assert_array_equal(c, A @ B)
    sent = comm.isend("mine", after, tag=7)
    assert any_of_them.wait() == "mine"
    sent.wait()
    # One that is on its way before a product starts, and wanted only after it.
    sent = comm.Isend(np.full(8, -777.0), after, tag=7)
    np.testing.assert_array_equal(gemm(A, B, comm=comm, split="rows", **OPTIONS), A @ B)
    got = np.empty(8)
    comm.Recv(got, before, 7)
    sent.wait()
    assert (got == -777).all()


def test_ranks_that_take_different_kept_runners_are_refused(comm):
    grids = (comm.size, 1, 1), (1, comm.size, 1)
    for _ in range(2):
        for grid in grids:
            np.testing.assert_array_equal(gemm(A, B, comm=comm, grid=grid, **OPTIONS), A @ B)
    if comm.size > 1:
        with pytest.raises(UsageError, match="do not agree on grid"):
            gemm(A, B, comm=comm, grid=grids[comm.rank > 0], **OPTIONS)


def test_a_communicator_that_another_handle_frees_takes_all_along(comm):
    """MPI gives the handle to the next one."""
    from mpi4py import MPI

    free_memory()
    there = heartbeats(), open_sockets()
    for _ in range(4):
        mine = comm.Dup()
        for split in "rows", "cols":
            np.testing.assert_array_equal(gemm(A, B, comm=mine, split=split, **OPTIONS), A @ B)
        assert heartbeats() == there[0] + (comm.size > 1)
        MPI.Comm.f2py(mine.py2f()).Free()
        assert (heartbeats(), open_sockets()) == there


def test_a_runner_is_watched_again_after_free_memory(comm):
    runner = RankRunner(comm, split="cols", **OPTIONS)
    free_memory()
    assert heartbeats() == 0
    np.testing.assert_array_equal(runner.gemm(A, B), A @ B)
    assert heartbeats() == (comm.size > 1)
    runner.close()


def test_memory_that_one_rank_alone_frees_is_refused_on_all(comm):
    """The ranks were out of step: the others waited for ever."""
    product = functools.partial(gemm, A, B, comm=comm, split="cols", **OPTIONS)
    product()
    if comm.size > 1:
        with pytest.raises(UsageError, match=r"do not make the same call: .* free_memory"):
            free_memory() if comm.rank == 1 else product()
    np.testing.assert_array_equal(product(), A @ B)
    assert heartbeats() == (comm.size > 1)
    free_memory()
    if comm.rank == 1:
        free_memory()  # there is nothing to free any more
    np.testing.assert_array_equal(product(), A @ B)


def test_a_runner_of_a_freed_communicator_is_refused(comm):
    mine = comm.Dup()
    runner = RankRunner(mine, split="cols", **OPTIONS)
    runner.gemm(A, B)
    mine.Free()
    for call in functools.partial(runner.gemm, A, B), runner.spec:
        with pytest.raises(UsageError, match="communicator of this RankRunner has been freed"):
            call()
    assert "RankRunner: rank" in repr(runner)
    runner.close()


def test_what_is_no_communicator_of_ranks_that_multiply_together_is_refused(comm):
    from mpi4py import MPI

    freed = comm.Dup()
    freed.Free()
    for wrong, says in (MPI.Comm, "class"), (MPI.COMM_NULL, "COMM_NULL"), (freed, "been freed"):
        for call in gemm, matmul:
            with pytest.raises(OptionTypeError, match=says):
                call(A, B, comm=wrong, **OPTIONS)
        with pytest.raises(OptionTypeError, match=says):
            RankRunner(wrong, **OPTIONS)


def test_an_intercommunicator_is_refused_and_does_not_hang(comm):
    if comm.size > 1:
        group = comm.Split(comm.rank > 0, comm.rank)
        between = group.Create_intercomm(0, comm, int(comm.rank == 0), 9)
        with pytest.raises(OptionTypeError, match=r"intercommunicator.* Merge"):
            gemm(A, B, comm=between, **OPTIONS)
        np.testing.assert_array_equal(gemm(A, B, comm=between.Merge(), **OPTIONS), A @ B)


def counting(comm):
    """A communicator like `comm` whose duplicates count their collective calls, and the counts."""
    from mpi4py import MPI

    class Counting(MPI.Intracomm):
        pass

    counts: dict[str, int] = {}

    def counted(name):
        def call(self, *arguments, **keywords):
            counts[name] = counts.get(name, 0) + 1
            return getattr(MPI.Intracomm, name)(self, *arguments, **keywords)

        return call

    for name in ("allgather", "Allreduce", "bcast", "Bcast", "gather", "Barrier", "Split", "Dup",
                 "Allgather"):  # fmt: skip
        setattr(Counting, name, counted(name))
    return Counting(comm.Dup()), counts


@pytest.mark.parametrize("distribution", ["replicated", "root", "rows", "cols"])
def test_a_product_takes_few_collective_calls(comm, distribution):
    mine, counts = counting(comm)
    rows, ks = share(len(A), comm), share(len(B), comm)
    parts = {
        "replicated": (A, B),
        "root": (A, B) if comm.rank == 0 else (None, None),
        "rows": (A[rows], B),
        "cols": (A[:, ks], B[ks]),
    }[distribution]
    for alpha in 1, 1, 2, -1:  # the transport stays, whatever alpha is
        counts.clear()
        gemm(*parts, alpha=alpha, comm=mine, distribution=distribution, split="cols", **OPTIONS)
    assert sum(counts.values()) <= 3, counts
    assert "Split" not in counts
    stack = np.ones((2 * comm.size, 3, 3))
    counts.clear()
    if distribution == "replicated":
        matmul(stack, stack, comm=mine, **OPTIONS)
        assert sum(counts.values()) <= 10, counts  # the first makes a runner
        counts.clear()
        matmul(stack, stack, comm=mine, **OPTIONS)
        assert sum(counts.values()) <= 4 and "allgather" not in counts, counts
    mine.Free()


@pytest.mark.parametrize("side", [4, 384])
def test_small_partials_are_made_and_summed_without_threads(comm, side, monkeypatch, rng):
    """Also those that are made before a thread would look for messages."""
    a = integers(rng, (side, side))
    gemm(a, a, comm=comm, split="cols", **OPTIONS)
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda x: started.append(x.name) or start(x))
    monkeypatch.setattr(rank_run.StreamedExecutor, "play", None)  # nor by a program
    got = gemm(a, a, comm=comm, split="cols", **OPTIONS) if comm.size > 1 else a @ a
    np.testing.assert_array_equal(got, a @ a)
    assert not started


@pytest.mark.parametrize("dtype", ["f4", "c8", "i2"])
@pytest.mark.parametrize("distribution", ["replicated", "rows"])
def test_a_block_that_is_no_sum_is_made_as_one_process_makes_it(
    comm, distribution, dtype, monkeypatch
):
    mine, counts = counting(comm)
    rows = share(len(A), comm) if distribution == "rows" else slice(None)
    a, b = A.astype(dtype)[rows], B.astype(dtype)
    runner = RankRunner(mine, split="rows", **OPTIONS)
    for alpha in 1, 2, 1, 2:
        expected = alpha * (a @ b).astype(dtype)
        np.testing.assert_array_equal(
            runner.gemm(a, b, alpha=alpha, distribution=distribution), expected
        )
        counts.clear()
    monkeypatch.setattr("hybrid_gemm.ranks.runner.RankRun", None)
    monkeypatch.setattr("hybrid_gemm.ranks.rank_planner.make_rank_plan", None)  # it is known
    np.testing.assert_array_equal(
        runner.gemm(a, b, alpha=2, distribution=distribution), 2 * (a @ b).astype(dtype)
    )
    assert counts == {"Allgather": 1}
    mine.Free()


def test_a_sum_that_comes_again_takes_one_collective_call(comm, rng):
    """Until one rank alone has arrays that lie otherwise, which kernels may take otherwise."""
    mine, counts = counting(comm)
    runner = RankRunner(mine, split="cols", **OPTIONS)
    whole, ks = integers(rng, (4, 3 * comm.size)), share(3 * comm.size, comm)
    a, b, turned = whole[:, ks], whole.T[ks], np.asfortranarray(whole.T[ks])
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    last, more = comm.rank == comm.size - 1, int(comm.size > 1)

    def calls(*given):
        counts.clear()
        got = runner.gemm(*given, distribution="cols", result="replicated")
        np.testing.assert_array_equal(got, whole @ whole.T)
        return sum(counts.values())

    assert calls(a, b) >= 1 + more  # a transport is opened
    assert calls(a, b) == 1
    assert calls(a, turned if last else b) == 1 + more
    for _ in range(2):
        assert calls(a, turned if last else b) == calls(a, b) == 1
    assert calls(a, b if last else turned) == 1 + more
    runner._planner._settled = type(runner._planner._settled)(1)  # all plan anew, and agree again
    assert [calls(a, b) for _ in range(2)] == [1 + more, 1]
    runner.close()
    mine.Free()


def test_products_without_elements_leave_the_ranks_in_step(comm):
    """Also where the kernel that is named is none of the device."""
    empty, runner = np.ones((0, 4)), RankRunner(comm, kernel="naive", **OPTIONS)
    for a, b in (empty, empty.T), (empty.T[:0], empty), (empty, np.ones((4, 3))):
        assert runner.gemm(a, b).shape == (a.shape[0], b.shape[1])
    with pytest.raises(UsageError, match="kernel naive does not run on the cpu device"):
        runner.gemm(A, B)
    assert runner.gemm(empty, empty.T).shape == (0, 0)
    runner.close()


@pytest.mark.parametrize(("algorithm", "calls"), [("ordinary", 2), ("3m", 6)])
def test_a_complex_sum_that_comes_again_takes_few_collective_calls(comm, algorithm, calls, rng):
    """As docs/mpi.md says."""
    mine, counts = counting(comm)
    ks = share(3 * comm.size, comm)
    a = (integers(rng, (4, 3 * comm.size)) + 1j).astype("c8")
    with RankRunner(mine, split="cols", algorithm=algorithm, **OPTIONS) as runner:
        for _ in range(3):
            counts.clear()
            got = runner.gemm(a[:, ks], a.T[ks], distribution="cols", result="replicated")
            np.testing.assert_array_equal(got, a @ a.T)
        assert sum(counts.values()) == (calls if comm.size > 1 else 1), counts
    mine.Free()


def test_a_rank_that_failed_alone_goes_on_over_another_communicator(comm, monkeypatch):
    mine, failing = comm.Dup(), comm.rank == comm.size - 1
    runner = RankRunner(mine, split="cols", **OPTIONS)

    def fails(run):
        multiply(run)
        raise RuntimeError

    multiply, ks = rank_run.RankRun._multiply_all, share(len(B), comm)
    with monkeypatch.context() as patch:
        if failing:
            patch.setattr(rank_run.RankRun, "_multiply_all", fails)
        with pytest.raises(RuntimeError) if failing and comm.size > 1 else NOTHING_RAISED:
            runner.gemm(A[:, ks], B[ks], distribution="cols")  # so that nothing moves after it
    if failing and comm.size > 1:
        for call in runner.gemm, lambda *ab: gemm(*ab, comm=mine), lambda *_: RankRunner(mine):
            with pytest.raises(UsageError, match=r"on this rank alone \(RuntimeError\), so"):
                call(A, B)
        assert own_communicator._left_behind  # messages may still be on their way
    another = mine.Dup()
    mine.Free()
    np.testing.assert_array_equal(gemm(A, B, comm=another, split="cols", **OPTIONS), A @ B)
    assert not own_communicator._left_behind
    another.Free()


def test_buffers_of_a_call_that_failed_stay_while_messages_may_come(comm):
    mine, buffer = comm.Dup(), np.zeros(4)
    request = mine.Irecv(buffer, mine.rank)
    with pytest.raises(ValueError), staying_if_it_fails([buffer], lambda: [request]):
        raise ValueError
    own_communicator.give_back_left_behind()
    assert [each.buffers[0] is buffer for each in own_communicator._left_behind] == [True]
    mine.Send(np.ones(4), mine.rank)
    own_communicator.give_back_left_behind()
    assert not own_communicator._left_behind and (buffer == 1).all()
    mine.Free()


def test_memory_is_looked_at_for_new_products_and_large_ones(comm, monkeypatch):
    """By each rank alone; ranks that have too little for a product that they made refuse it."""
    runner = RankRunner(comm, split="cols", **OPTIONS)
    own_spec, looked = RankPlanner.own_spec, []

    def counted(planner):
        looked.append(planner)
        return dataclasses.replace(own_spec(planner), memory_bytes=memory)

    monkeypatch.setattr(RankPlanner, "own_spec", counted)
    memory = 10**9
    for times in 1, 0, 0:
        looked.clear()
        np.testing.assert_array_equal(runner.gemm(A, B), A @ B)
        assert len(looked) == times
    np.testing.assert_array_equal(runner.gemm(np.asfortranarray(A), B), A @ B)
    assert len(looked) == 1
    monkeypatch.setattr(rank_planner, "LITTLE", 0 if comm.rank else 1e-3)
    looked.clear()
    memory = 10**9 if comm.rank == 0 else 1
    if comm.size > 1:
        with pytest.raises(OutOfMemoryError, match="has 1 byte"):
            runner.gemm(A, B)
        assert len(looked) == bool(comm.rank)
    runner.close()


def test_what_ranks_tell_is_short_where_links_were_measured(comm, monkeypatch):
    mine, counts = counting(comm)
    runner = RankRunner(mine, split="cols", **OPTIONS)
    rates = [tuple((1 << i, x + i / 3) for i in range(4)) for x in range(8)]
    links, own_spec = Links(*rates[:5], "a day", (1.5, 2.5), *rates[5:]), RankPlanner.own_spec
    monkeypatch.setattr(
        RankPlanner, "own_spec", lambda planner: dataclasses.replace(own_spec(planner), links=links)
    )
    for _ in range(2):
        counts.clear()
        np.testing.assert_array_equal(runner.gemm(A, B), A @ B)
    assert counts == {"Allgather": 1}
    runner.close()
    mine.Free()


@pytest.mark.parametrize("look_s", [0, 60])
def test_ranks_look_before_they_sleep(comm, look_s, monkeypatch):
    monkeypatch.setattr(rank_run, "LOOK_S", look_s)
    slept, sleep = [], time.sleep
    monkeypatch.setattr(rank_run.time, "sleep", lambda s: slept.append(s) or sleep(s))
    for rounds in 1, 2:
        got = gemm(A, B, comm=comm, split="cols", rounds=rounds, **OPTIONS)
        np.testing.assert_array_equal(got, A @ B)
    assert not (look_s and slept)


def test_texts_of_any_length_are_told(comm):
    for length in 0, 10, launch.SHORT, launch.SHORT + comm.rank, 10**5:
        texts = launch._allgather(comm, bytes([comm.rank]) * length)
        assert [set(text) for text in texts] == [
            {rank} if length else set() for rank in range(comm.size)
        ]
        assert texts[comm.rank] == bytes([comm.rank]) * length


def test_a_brief_product_is_made_at_once_and_its_parts_are_sent(comm, monkeypatch, rng):
    """Whatever the number of ranks and rounds: each piece would read all of B again."""
    made, gemm_of_cpu = [], CpuDevice.gemm
    for shape, rounds in ((40, 9, 500), None), ((3, 70, 64), 2), ((5, 4, 0), None):
        a, b, c = (integers(rng, x) for x in (shape[::2], shape[:0:-1], shape[:2]))
        runner = RankRunner(comm, split="cols", rounds=rounds, **OPTIONS)
        expected = 2 * (a @ b) - c
        np.testing.assert_array_equal(runner.gemm(a, b, c, alpha=2, beta=-1), expected)
        with monkeypatch.context() as patch:
            patch.setattr(
                CpuDevice, "gemm", lambda *x, **y: made.append(x[4].shape) or gemm_of_cpu(*x, **y)
            )
            np.testing.assert_array_equal(runner.gemm(a, b, c, alpha=2, beta=-1), expected)
        if comm.size > 1 and shape[2]:
            assert made.pop() == shape[:2]
        assert not made


def test_what_one_rank_has_goes_to_all_by_a_broadcast(comm):
    mine, counts = counting(comm)
    source = comm.size - 1
    whole = Part(Span(0, 4), Span(0, 5))
    have = [whole if rank == source else NOTHING for rank in range(comm.size)]
    given = A if comm.rank == source else None
    np.testing.assert_array_equal(move(mine, given, have, [whole] * comm.size, "f8"), A)
    assert counts == ({"Bcast": 1} if comm.size > 1 else {})
    mine.Free()
