"""Several threads of each rank, and what the package keeps for them. Every rank runs these."""

import contextlib
import itertools
import threading

import numpy as np
import pytest

from hybrid_gemm import RankRunner, free_memory, gemm
from hybrid_gemm.errors import UsageError
from hybrid_gemm.ranks import launch, own_communicator

pytestmark = pytest.mark.mpi
A, B = np.arange(20.0).reshape(4, 5), np.arange(15.0).reshape(5, 3)
OPTIONS = {"device": "cpu", "rank_timeout": 20}


def test_one_thread_at_a_time_makes_calls_over_a_communicator(comm):
    class Waiting:
        """A matrix that another thread's call comes before."""

        def __array__(self, *_arguments, **_keywords):
            other.start()
            other.join()
            np.testing.assert_array_equal(gemm(A, B, comm=comm, **OPTIONS), A @ B)  # this thread's
            return A

    def call():
        for start in (
            lambda: gemm(A, B, comm=comm, **OPTIONS), lambda: RankRunner(comm, **OPTIONS),
            lambda: runner.gemm(A, B), lambda: gemm(A, B, comm=beside, **OPTIONS),
        ):  # fmt: skip
            try:
                start()
            except UsageError as error:
                refused.append(str(error))

    refused, beside, other = [], comm.Dup(), threading.Thread(target=call)
    runner = RankRunner(comm, **OPTIONS)
    np.testing.assert_array_equal(gemm(Waiting(), B, comm=comm, **OPTIONS), A @ B)
    assert len(refused) == 3 and all("another thread of this process" in x for x in refused)
    np.testing.assert_array_equal(runner.gemm(A, B), A @ B)


def test_memory_is_freed_over_communicators_in_one_order_on_all_ranks(comm, monkeypatch):
    """Whose threads made calls over several, and began in another order on each rank: the ranks
    waited for each other for ever."""
    free_memory()
    beside, told = {f"{i}": comm.Dup() for i in range(3)}, []
    for name, mine in beside.items():
        np.testing.assert_array_equal(gemm(A, B, comm=mine, **OPTIONS), A @ B)
        own_communicator.known(mine).comm.Set_name(name)
    if comm.rank % 2:
        monkeypatch.setattr(own_communicator, "_all", own_communicator._all[::-1])
    with monkeypatch.context() as patch:
        patch.setattr(launch, "tell", lambda mine, *_rest: told.append(mine.Get_name()))
        patch.setattr(own_communicator.Own, "close", lambda own: None)
        free_memory()
    assert sorted(told) == sorted(beside)
    assert comm.allgather(told) == [told] * comm.size
    for mine in beside.values():
        mine.Free()


def test_threads_whose_first_calls_meet_find_what_each_other_keeps(comm, monkeypatch):
    """By two keys, a rank did not find one's own communicator again, and made another alone."""
    from mpi4py import MPI

    numbers, both, found = itertools.count(), threading.Barrier(2), []

    class Slow:
        @staticmethod
        def Create_keyval(delete_fn):  # of MPI.Comm
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.05)
            return next(numbers)

        @staticmethod
        def Set_attr(_key, _value):  # of MPI.COMM_SELF
            pass

    for name in "Comm", "COMM_SELF":
        monkeypatch.setattr(MPI, name, Slow)
    monkeypatch.setattr(own_communicator, "_key", None)
    call = own_communicator._key_of_attribute
    threads = [threading.Thread(target=lambda: found.append(call())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0, 0]


def test_memory_is_not_freed_under_another_threads_call(comm):
    """Their messages met each other."""

    class Waiting:
        def __array__(self, *_arguments, **_keywords):
            other.start()
            other.join()
            return A

    def free():
        try:
            free_memory()
        except UsageError as error:
            refused.append(str(error))

    refused, other = [], threading.Thread(target=free)
    np.testing.assert_array_equal(gemm(A, B, comm=comm, **OPTIONS), A @ B)
    np.testing.assert_array_equal(gemm(Waiting(), B, comm=comm, **OPTIONS), A @ B)
    assert comm.size == 1 or "another thread of this process" in refused[0]
