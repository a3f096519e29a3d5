"""The cache of programs that were compiled for the emulator."""

import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.emulation import Compiler, needs_emulator, run_kernel

from hybrid_gemm.catalog import Launch
from hybrid_gemm.devices.emulator import program as emulation
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.host import cache

pytestmark = needs_emulator


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """An empty cache, and a compiler that counts its calls."""
    return Compiler(tmp_path, monkeypatch)


def test_a_program_in_the_cache_is_not_compiled_again(tmp_path, compiler):
    text = '#include "part.cuh"\nextern "C" __global__ void kernel(int* x) { x[0] = PART; }'
    x = np.zeros(1, np.int32)
    (tmp_path / "part.cuh").write_text("#define PART 5\n")
    for _ in range(2):
        run_kernel(text, [x], tmp_path)
    assert compiler.calls == 1 and x[0] == 5
    assert len(list((tmp_path / "cache" / "emulator").glob("*.so"))) == 1
    (tmp_path / "part.cuh").write_text("#define PART 6\n")
    run_kernel(text, [x], tmp_path)
    assert compiler.calls == 2 and x[0] == 6


class OfProcesses(dict):
    """Locks that threads do not share, as processes do not."""

    def setdefault(self, _path, lock):
        return lock


@pytest.mark.parametrize("locks", [dict, OfProcesses])
def test_threads_and_processes_compile_each_text_once(tmp_path, compiler, monkeypatch, locks):
    monkeypatch.setattr(cache, "_locks", locks())
    kernel = 'extern "C" __global__ void kernel(int* x) {{ x[0] = {}; }}'
    kernels = [(kernel.format(i % 2), "kernel", f"k{i}") for i in range(4)]

    def compiled(kernel):
        text, entry, label = kernel
        return emulation.compile(text, entry, include=tmp_path, label=label)

    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(compiled, kernels))
    assert [p.label for p in programs] == ["k0", "k1", "k2", "k3"]
    assert compiler.calls == 2
    assert compiler.log.read_text().count("\n") == 3  # and once what both are linked to
    for i, each in enumerate(programs):
        x = np.full(1, 9, np.int32)
        each.launch(Launch((1, 1, 1), (1, 1, 1)), [x])
        assert x[0] == i % 2
    assert not list((tmp_path / "cache").glob("*/*.lock")) and not cache._turns


def test_who_waits_too_long_for_a_process_that_compiles_does_so_itself(tmp_path, monkeypatch):
    """For that one may be stopped."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    made = cache.directory("host") / "made"
    with open(f"{made}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waits = threading.Thread(target=cache.kept, args=("host", "made", lambda: b"waited"))
        waits.start()
        waits.join(0.05)
        assert waits.is_alive() and not made.exists()
        monkeypatch.setattr(cache, "LONGEST_TURN_S", 0)
        assert cache.kept("host", "other", lambda: b"alone")[1] == b"alone"
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_locks", {})
            assert cache.kept("host", "made", lambda: b"itself")[1] == b"itself"
    waits.join()
    assert made.read_bytes() == b"itself"


def test_cache_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("HYBRID_GEMM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.directory("emulator") == tmp_path / "hybrid-gemm" / "emulator"
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "own"))
    path = cache.directory("emulator")
    assert path == tmp_path / "own" / "emulator" and path.is_dir()
    cache.atomic_write(path / "x", b"one")
    cache.atomic_write(path / "x", b"two")
    assert (path / "x").read_bytes() == b"two" and os.listdir(path) == ["x"]
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(path / "x"))
    with pytest.raises(UnavailableError, match="HYBRID_GEMM_CACHE"):
        cache.directory("emulator", lasting=True)


def test_files_have_the_permissions_that_others_have(tmp_path):
    """Those of the umask, or of the file that is replaced."""
    (tmp_path / "made").touch()
    cache.atomic_write(tmp_path / "written", b"")
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "made").stat().st_mode
    (tmp_path / "written").chmod(0o640)
    cache.atomic_write(tmp_path / "written", b"")
    assert (tmp_path / "written").stat().st_mode & 0o777 == 0o640
    with pytest.raises(TypeError):
        cache.atomic_write(tmp_path / "written", "text")
    assert sorted(os.listdir(tmp_path)) == ["made", "written"]
