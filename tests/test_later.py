"""What threads of a run wait for is settled once, whoever comes first."""

import gc
import threading

import pytest

from hybrid_gemm.execution.player import uncollected
from hybrid_gemm.execution.transfers import Later


def test_the_first_value_counts():
    later = Later()
    later.settle(1)
    later.settle(2)
    later.settle(error=ValueError("late"))
    assert later.result() == 1


def test_an_error_is_raised_by_all_who_ask():
    later = Later()
    later.settle(error=ValueError("no"))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            later.result()


def test_all_who_wait_are_woken():
    for count in (1, 3):
        for _ in range(200):
            later, found, ready = Later(), [], threading.Barrier(count + 2)

            def wait(later=later, found=found, ready=ready):
                ready.wait()
                found.append(later.result())

            def end(value, later=later, ready=ready):
                ready.wait()
                later.settle(value)

            threads = [threading.Thread(target=wait) for _ in range(count)]
            threads += [threading.Thread(target=end, args=(x,)) for x in "ab"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            assert len(found) == count and set(found) < {"a", "b"}


def test_garbage_is_collected_again_afterwards():
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
