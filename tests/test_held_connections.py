"""Connections of a rank that ends, which a process of its own holds for a while."""

import os
import signal
import sys
import textwrap
import time
import types

import pytest
from support.command import python

from hybrid_gemm.arrays.journal import Journal
from hybrid_gemm.errors import HybridGemmError
from hybrid_gemm.ranks import ending


def test_what_holds_a_ranks_connections_holds_no_lock(tmp_path):
    """For the next job, with --resume, begins when this one has ended."""
    first = Journal(str(tmp_path / "journal"))
    if (child := os.fork()) == 0:
        ending._stay_connected()
        os._exit(0)
    os.waitpid(child, 0)
    first.close()
    deadline = time.monotonic() + ending.HELD_S - 1
    while True:  # until what was left behind has closed it
        try:
            Journal(str(tmp_path / "journal")).close()
            return
        except HybridGemmError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_where_open_files_are_not_listed_nothing_is_left_behind(tmp_path, monkeypatch):
    """Else what holds the connections would hold the output and the locks too."""
    monkeypatch.setattr(ending, "_OPEN_FILES", str(tmp_path / "absent"))
    monkeypatch.setattr(os, "posix_spawnp", lambda *_, **__: pytest.fail("one was left behind"))
    ending._stay_connected()


def test_connections_of_a_rank_that_its_launcher_ends_are_held(monkeypatch):
    """Else a rank that takes its own signal later ends by MPI's error, with MPI's exit code."""
    told = types.SimpleNamespace(si_signo=signal.SIGTERM, si_pid=os.getppid())
    monkeypatch.setattr(signal, "sigwaitinfo", lambda _watched: told)
    monkeypatch.setattr(ending, "_world", lambda: "several ranks")
    held = []
    monkeypatch.setattr(ending, "_stay_connected", lambda: held.append("held"))
    monkeypatch.setattr(ending, "_stop_tools", lambda: held.append("tools"))  # for good
    monkeypatch.setattr(os, "_exit", lambda code: held.append(code) or sys.exit())
    with pytest.raises(SystemExit):
        ending._take([signal.SIGTERM])
    assert held == ["held", "tools", 128 + signal.SIGTERM]


def test_connections_are_held_beside_a_product_of_several_threads():
    """OpenBLAS keeps a fork, and with it Python's lock, until all of its threads have ended."""
    program = """
    import socket, threading, time
    import numpy as np, threadpoolctl
    from hybrid_gemm.ranks import ending

    mine, other = socket.socketpair()
    a = np.ones((3000, 3000))
    with threadpoolctl.threadpool_limits(2):
        multiplying = threading.Thread(target=lambda: [a @ a for _ in range(100)], daemon=True)
        multiplying.start()
        for _ in range(20):
            time.sleep(0.05)
            began = time.monotonic()
            ending._stay_connected()
            assert time.monotonic() - began < 1
    mine.close()
    other.settimeout(0.2)
    try:
        print("closed", other.recv(1))
    except TimeoutError:
        print("held", flush=True)
        ending.os._exit(0)
    """
    assert python("-c", textwrap.dedent(program), timeout=60).stdout == "held\n"
