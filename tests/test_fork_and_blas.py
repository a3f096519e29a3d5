"""No call changes the process: forked children multiply, and BLAS keeps its threads."""

import contextlib
import multiprocessing
import os
import textwrap
import threading

import numpy as np
import pytest
import threadpoolctl
from support.command import python
from support.emulation import needs_emulator

import hybrid_gemm as hg
from hybrid_gemm.devices import cpu
from hybrid_gemm.devices.cpu import CpuDevice
from hybrid_gemm.execution import checks


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the cache will be; not there yet."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- fork ---------------------------------------------------------------------------------

FORK = """
    import multiprocessing, time
    import numpy as np
    import hybrid_gemm as hg
    from hybrid_gemm.devices import cpu
    from hybrid_gemm.execution import staging

    def slow(*args, product=cpu.CpuDevice.multiply):
        time.sleep(0.02)  # so that all threads of the pool are started
        product(*args)

    cpu.CpuDevice.multiply = slow
    cpu.cores = lambda: 8  # so that a worker has several
    staging.SMALL_BYTES = 0  # so that every copy takes the copying threads
    a = np.arange(64 * 64.0).reshape(64, 64) % 7
    runner = hg.Runner(device={device!r}, threads=2, split="rows")

    def multiply():
        for how in (runner.gemm, lambda x, y: hg.gemm(x, y, device={device!r}, threads=2)):
            assert (how(a, a) == a @ a).all()
            assert (how(a[::2], a) == a[::2] @ a).all()

    multiply()
    children = [multiprocessing.get_context("fork").Process(target=multiply) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        print(child.exitcode)
        child.kill()
    multiply()
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("emulator", marks=needs_emulator)])
def test_a_forked_child_multiplies(device):
    done = python("-c", textwrap.dedent(FORK.format(device=device)), timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "0"], done.stderr


def test_locks_that_other_threads_hold_are_free_in_a_child(folder):
    """A fork while another thread compiles, measures or multiplies."""
    code = """
        import os, threading, time
        import numpy as np
        import hybrid_gemm as hg
        from hybrid_gemm.devices.cpu import CpuDevice
        from hybrid_gemm.host import cache

        inside, leave = threading.Event(), threading.Event()

        def hold():
            def make():
                inside.set()
                leave.wait()
                return b"one"

            with CpuDevice(2).session():
                cache.kept("host", "x.so", make)

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        child = os.fork()
        if not child:
            cache.LONGEST_TURN_S = 0  # that of the parent ends after this process
            path, data = cache.kept("host", "x.so", lambda: b"two")
            with CpuDevice(1).session():
                pass
            os._exit(0 if data == b"two" else 9)
        for _ in range(300):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            status = 99
        leave.set()
        thread.join()
        print(status)
    """
    done = python("-c", textwrap.dedent(code), timeout=60)
    assert done.stdout.strip() == "0", done.stderr


# --- BLAS ---------------------------------------------------------------------------------


def blas_threads():
    """Of those libraries that were there when the first product was made: NumPy's. Another test
    may have had SciPy's loaded since, which no product here takes."""
    return [x.num_threads for x in cpu._blas().select(user_api="blas").lib_controllers]


@pytest.mark.parametrize("order", ["first in, first out", "first in, last out"])
@pytest.mark.parametrize("workers", [(2, 2), (1, 2), (2, 1), (1, 1)])
def test_blas_has_its_threads_back_after_calls_that_overlapped(order, workers):
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        first, second = (CpuDevice(n).session() for n in workers)
        first.__enter__()
        second.__enter__()
        assert set(blas_threads()) == {1} or workers == (1, 1)
        for session in (first, second) if "first out" in order else (second, first):
            session.__exit__(None, None, None)
        assert blas_threads() == before


@pytest.mark.parametrize("cores", [1, 3, 16])
def test_no_session_gives_blas_more_threads(cores, monkeypatch):
    """Two ranks with as many threads each as there are cores wait for each other."""
    monkeypatch.setattr("hybrid_gemm.devices.cpu.cores", lambda: cores)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        with CpuDevice(1).session():
            assert set(blas_threads()) == {min(cores, 2)}
            with CpuDevice(2).session():
                assert set(blas_threads()) == {1}
            assert set(blas_threads()) == {min(cores, 2)}
        assert set(blas_threads()) == {2}


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_processes_on_the_same_cores_share_them(workers, monkeypatch):
    monkeypatch.setattr("hybrid_gemm.devices.cpu.cores", lambda: 16)
    device = CpuDevice(workers)
    for processes in (4, 1, 32):
        device.share_cores(processes)
        mine = max(1, 16 // processes)
        assert device.cores == mine and device.share == max(1, mine // workers)
        assert device.blas_threads == (mine if workers == 1 else 1)
        a = np.arange(35.0).reshape(5, 7)
        c = np.empty((5, 5))
        device.gemm(None, a, a.T, c, alpha=1, beta=0, stream=None)
        assert (c == a @ a.T).all()


def test_blas_has_its_threads_back_after_calls_of_many_threads():
    before = blas_threads()
    barrier = threading.Barrier(4)

    def multiply(seed):
        rng = np.random.default_rng(seed)
        barrier.wait()
        for _ in range(20):
            a = np.ones((rng.integers(1, 40), 16))
            assert (hg.gemm(a, a.T, device="cpu", threads=int(rng.integers(1, 4))) == 16).all()

    threads = [threading.Thread(target=multiply, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blas_threads() == before


def test_blas_has_its_threads_back_after_an_error():
    before = blas_threads()
    with contextlib.suppress(KeyError), CpuDevice(2).session(), CpuDevice(2).session():
        raise KeyError
    assert blas_threads() == before


def test_a_fork_amid_a_session_leaves_the_child_its_threads():
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        results = multiprocessing.get_context("fork").SimpleQueue()
        with CpuDevice(2).session():
            child = multiprocessing.get_context("fork").Process(
                target=lambda: results.put(blas_threads())
            )
            child.start()
            child.join(60)
        assert set(results.get()) == {2}


AMID_A_PROPERTY = """
    import os, threading
    import numpy as np
    import hybrid_gemm as hg
    from hybrid_gemm.execution import program_matrices

    a, inside, go_on = np.ones((30, 30)), threading.Event(), threading.Event()

    def slow(*args, real=program_matrices.steps):
        inside.set()
        go_on.wait()
        return real(*args)

    def product():
        return hg.gemm(a, a, device="cpu", threads=2, split="cols")

    program_matrices.steps, real = slow, program_matrices.steps
    threading.Thread(target=product).start()
    inside.wait()
    child = os.fork()
    if not child:
        program_matrices.steps = real
        found = [product()[0, 0]]
        # Of which some have the number of the parent's thread that waits.
        threads = [threading.Thread(target=lambda: found.append(product()[0, 0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(int(found != 9 * [30]))
    _, status = os.waitpid(child, 0)
    go_on.set()
    print(status)
"""


def test_a_child_multiplies_that_was_forked_while_a_worker_made_its_steps():
    done = python("-c", textwrap.dedent(AMID_A_PROPERTY), timeout=100)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_child_multiplies_that_was_forked_while_a_thread_counted_checks(monkeypatch):
    a, runner = np.ones((9, 9), "f2"), hg.Runner(device="cpu", checked=True)
    inside, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def add(*both, real=checks.Checks.__add__):
        if os.getpid() == parent:
            inside.set()
            go_on.wait()
        return real(*both)

    runner.gemm(a, a)
    monkeypatch.setattr(checks.Checks, "__add__", add)
    other = threading.Thread(target=runner.gemm, args=(a, a))
    other.start()
    inside.wait()
    child = multiprocessing.get_context("fork").Process(target=runner.gemm, args=(a, a))
    child.start()
    child.join(20)
    found = child.exitcode
    child.kill()
    go_on.set()
    other.join()
    assert found == 0


IN_BETWEEN = """
    import signal, sys
    import numpy as np, threadpoolctl
    import hybrid_gemm as hg
    from hybrid_gemm.devices import cpu

    a, point, steps = np.ones((30, 30)), int(sys.argv[1]), []

    def step(function):
        def call():
            steps.append(function)
            if len(steps) == point:
                signal.raise_signal(signal.SIGUSR1)
            return function()
        return call

    def product(*_):
        c = hg.gemm(a, a, device="cpu", algorithm="strassen")
        assert c[0, 0] == 30

    product()
    signal.signal(signal.SIGUSR1, product)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        cpu._blas_threads = step(cpu._blas_threads)
        cpu._any_thread_may_limit = step(cpu._any_thread_may_limit)
        with cpu._limits.at_most(1):
            pass
        assert len(steps) >= point, steps
        print({x["num_threads"] for x in threadpoolctl.threadpool_info()})
"""


@pytest.mark.parametrize("point", range(1, 6))
def test_a_signals_handler_may_multiply_while_the_threads_of_blas_are_set(point):
    done = python("-c", textwrap.dedent(IN_BETWEEN), str(point), timeout=100)
    assert (done.stdout, done.stderr) == ("{2}\n", "")
