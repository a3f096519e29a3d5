"""Products over ranks by several threads of a process."""

import importlib.machinery
import sys
import threading

import pytest
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm import free_memory, ranks
from hybrid_gemm.ranks import kept_runners

IN_THREADS = """
import sys, threading
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import numpy as np
from mpi4py import MPI
from hybrid_gemm import gemm
from hybrid_gemm.errors import UsageError

class Waiting:
    def __array__(self, *_arguments, **_keywords):
        other.start()  # in the middle of this thread's call
        other.join()
        return a

def call():
    try:
        assert (gemm(a, a, comm=beside, device="cpu", split="cols") == 8).all()
        print("right", flush=True)
    except UsageError as error:
        print(error, flush=True)

a, beside, other = np.ones((8, 8)), MPI.COMM_WORLD.Dup(), threading.Thread(target=call)
assert (gemm(Waiting(), a, comm=MPI.COMM_WORLD, device="cpu", split="cols") == 8).all()
other = threading.Thread(target=call)
other.start()
other.join()
call()
"""


@needs_mpirun
@pytest.mark.parametrize(("level", "within", "after"), [
    ("multiple", "right", "right"),
    ("serialized", "MPI was started with THREAD_SERIALIZED, and another thread is in a", "right"),
    ("funneled", *["MPI was started with THREAD_FUNNELED, and this is not the thread that"] * 2),
    ("single", *["MPI was started with THREAD_SINGLE, and this is not the thread that"] * 2),
])  # fmt: skip
def test_threads_that_mpi_was_not_started_for_are_refused(tmp_path, level, within, after):
    """Open MPI crashed where two of them made products, each over a communicator of its own."""
    program = tmp_path / "in_threads.py"
    program.write_text(IN_THREADS)
    said = sorted(mpirun(2, program, level, timeout=60, check=0).stdout.splitlines())
    expected = sorted([within, after, "right"] * 2)  # the last by the main thread
    assert len(said) == 6 and all(map(str.startswith, said, expected)), said


def test_memory_is_freed_while_another_thread_imports_what_keeps_runners(monkeypatch):
    """It was an AttributeError."""
    name, raised = kept_runners.__name__, []
    begun, free = threading.Event(), threading.Event()

    class Slowly:
        def find_spec(self, wanted, path, target=None):
            spec = importlib.machinery.PathFinder.find_spec(wanted, path)
            if wanted == name:
                execute = spec.loader.exec_module
                spec.loader.exec_module = lambda module: (
                    begun.set(), free.wait(20), execute(module)
                )  # fmt: skip
            return spec

    def frees():
        try:
            free_memory()
        except Exception as error:
            raised.append(error)

    monkeypatch.setattr(sys, "meta_path", [Slowly(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ranks, "kept_runners")
    threads = [threading.Thread(target=x) for x in (lambda: importlib.import_module(name), frees)]
    threads[0].start()
    assert begun.wait(20)
    threads[1].start()
    threads[1].join(0.05)
    free.set()
    for thread in threads:
        thread.join()
    assert not raised
