"""How parts of matrices move between ranks. Every rank runs these."""

import contextlib
import gc
import itertools
import weakref
from unittest import mock

import numpy as np
import pytest

from hybrid_gemm import free_memory, gemm
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.ranks import heartbeat, rank_run, redistribution, transports
from hybrid_gemm.ranks.distributed_operands import DistributedOperands
from hybrid_gemm.ranks.redistribution import NOTHING, Part, move
from hybrid_gemm.ranks.transports.arrivals import by_rows

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("most", [1 << 28, 40, 3])
def test_parts_move_between_any_layouts(comm, monkeypatch, most):
    """Random parts to random parts, in messages of at most so many bytes, or one element; every
    rank draws the same ones."""
    for name in "MESSAGE_BYTES", "PIECE_BYTES", "MOST_BYTES", "LARGE_BYTES":
        monkeypatch.setattr(redistribution, name, most)
    rng = np.random.default_rng(7)
    for _ in range(20):
        rows, cols = rng.integers(1, 30, 2)
        whole = np.arange(rows * cols, dtype="i4").reshape(rows, cols)
        edges = [0, *sorted(rng.integers(0, rows + 1, comm.size - 1)), rows]
        have = [Part(Span(*map(int, e)), Span(0, cols)) for e in itertools.pairwise(edges)]

        def some(size):
            a, b = sorted(int(x) for x in rng.integers(0, size + 1, 2))
            return Span(a, b)

        want = [Part(some(rows), some(cols)) for _ in range(comm.size)]
        mine = have[comm.rank].rows.slice
        part = move(comm, whole[mine], have, want, "i4")
        expected = whole[want[comm.rank].rows.slice, want[comm.rank].cols.slice]
        np.testing.assert_array_equal(part, expected)
    assert move(comm, None, [NOTHING] * comm.size, [NOTHING] * comm.size, "f4").shape == (0, 0)
    there = [Part(Span(0, 2), Span(0, 2)), *[NOTHING] * (comm.size - 1)]
    given = np.eye(2, dtype="f4") if comm.rank == 0 else None
    assert move(comm, given, there, there, "f4").shape == there[comm.rank].shape


def test_few_copies_are_under_way_and_each_that_comes_is_progress(comm, monkeypatch):
    """All pieces that lie with gaps were copied at first."""
    gemm(np.eye(2), np.eye(2), comm=comm, device="cpu", rank_timeout=20)
    beat = heartbeat.known(comm)
    for name in "PIECE_BYTES", "MOST_BYTES":
        monkeypatch.setattr(redistribution, name, 16)
    copies, alive, host = [], [0], redistribution._host

    def counted(*given):
        alive.append(sum(x() is not None for x in copies))
        copies.append(weakref.ref(made := host(*given)))
        return made

    monkeypatch.setattr(redistribution, "_host", counted)
    whole = np.arange(20.0 * comm.size).reshape(20, comm.size).astype("f4")
    have = [Part(Span(0, 20), Span(0, comm.size)), *[NOTHING] * (comm.size - 1)]
    want = [Part(Span(0, 20), Span(r, r + 1)) for r in range(comm.size)]
    before = beat.count
    mine = move(comm, whole if comm.rank == 0 else None, have, want, "f4")
    np.testing.assert_array_equal(mine[:, 0], whole[:, comm.rank])
    assert max(alive) <= 2
    assert comm.size == 1 or beat.count - before >= 5
    free_memory()


def test_memory_that_one_rank_lacks_is_an_error_of_all_ranks(comm, monkeypatch):
    """The others waited for it, and it was told that the ranks were out of step."""
    if comm.size > 1:
        there = [Part(Span(0, 4), Span(0, 5)), *[NOTHING] * (comm.size - 1)]
        given = np.ones((4, 5)) if comm.rank == 0 else None
        most = [*[NOTHING] * (comm.size - 1), Part(Span(0, 1 << 50), Span(0, 5))]
        with pytest.raises(MemoryError, match="Unable to allocate"):
            move(comm, given, there, most, "f8")

    def fails(*_given):
        raise MemoryError("no room")

    a = np.ones((4, 5))
    with monkeypatch.context() as patch:
        patch.setattr(redistribution, "LARGE_BYTES", 0)
        if comm.rank == comm.size - 1:
            patch.setattr(DistributedOperands, "empty", fails)
        with pytest.raises(MemoryError, match="no room"):
            gemm(a, a.T, comm=comm, device="cpu")
    np.testing.assert_array_equal(gemm(a, a.T, comm=comm, device="cpu"), a @ a.T)


def test_no_count_of_mpi_passes_2_to_the_31(comm):
    """Of matrices whose rows have more bytes."""
    rows, cols = Span(0, 2), Span(0, 2**30 + 1)
    pieces = redistribution._pieces(Part(rows, cols), np.dtype("f8"), redistribution.MESSAGE_BYTES)
    assert max(height * width * 8 for height, width in (p.shape for p in pieces)) < 2**31
    assert sum(len(p.cols) for p in pieces) == 2 * len(cols)
    _message, row = by_rows(np.broadcast_to(np.float64(0), (2, len(cols))))
    assert row.Get_size() == 8 * len(cols)
    row.Free()


def test_a_part_that_lies_right_is_not_copied(comm):
    whole = np.zeros((comm.size * 3, 5))
    parts = [Part(Span(3 * r, 3 * r + 3), Span(0, 5)) for r in range(comm.size)]
    mine = whole[parts[comm.rank].rows.slice]
    assert np.shares_memory(move(comm, mine, parts, parts, "f8"), whole)


def test_what_a_failed_call_began_to_receive_comes_where_nothing_else_lies(comm, monkeypatch):
    """It came into other arrays of the program, which had caught the error."""
    if comm.size == 1:
        return
    mine, begun, message = comm.Dup(), [], redistribution._bytes
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    have = [Part(Span(r, r + 1), Span(0, 5)) for r in range(comm.size)]
    fails = mock.Mock(side_effect=MemoryError("no room"))
    with monkeypatch.context() as patch:
        patch.setattr(redistribution, "_host", fails)
        patch.setattr(
            redistribution, "_bytes", lambda x: begun.append(weakref.ref(x)) or message(x)
        )
        with pytest.raises(MemoryError, match="no room"):
            move(mine, np.ones((1, 5)), have, have[1:] + have[:1], "f8")
    fails.reset_mock(side_effect=True)
    gc.collect()
    sent = mine.Isend(np.full(5, float(comm.rank)), before)
    while (come := begun[0]()) is not None and not mine.Iprobe() and come[0, 4] != after:
        pass
    np.testing.assert_array_equal(come, [[after] * 5])
    sent.Wait()
    mine.Free()


def test_what_a_failed_product_began_to_receive_stays(comm, monkeypatch):
    mine, begun = comm.Dup(), []

    def recorded(buffer):
        begun.append(weakref.ref(buffer))
        return by_rows(buffer)

    def fails(*_given):
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(transports.mpi, "by_rows", recorded)
        patch.setattr(rank_run.RankRun, "_multiply", fails)
        with pytest.raises(RuntimeError) if comm.size > 1 else contextlib.nullcontext():
            gemm(np.eye(5), np.eye(5), comm=mine, device="cpu", split="cols")
    mine.Free()
    gc.collect()
    assert len(begun) == comm.size - 1
    assert all(x() is not None for x in begun)
