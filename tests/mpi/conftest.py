"""Fixtures of the tests that every rank runs."""

import pytest
from support.ranks import AbortOnFailure


@pytest.fixture(scope="session")
def comm(request):
    """All ranks; one where these tests are not run by mpirun."""
    MPI = pytest.importorskip("mpi4py.MPI", reason="mpi4py is not installed", exc_type=ImportError)
    if MPI.COMM_WORLD.size > 1:
        request.config.pluginmanager.register(AbortOnFailure(MPI.COMM_WORLD))
    return MPI.COMM_WORLD
