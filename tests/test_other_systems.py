"""What works where the system is not Linux, or lacks what Linux usually has."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.command import PACKAGE_FOLDER, TESTS, one_line, python, run
from support.devices import needs

from hybrid_gemm.arrays import output_files
from hybrid_gemm.arrays.npy_files import NpyFile, NpyWriter
from hybrid_gemm.devices import native_passes, native_sums
from hybrid_gemm.devices.cuda import driver, launch_list
from hybrid_gemm.devices.emulator import program
from hybrid_gemm.execution import native_copier
from hybrid_gemm.host import compiler, installing, libraries
from hybrid_gemm.host.installing import REQUIRED
from hybrid_gemm.host.libraries import Library, LibraryUnderLock
from hybrid_gemm.programs import signature

PYTHON = f"Python {sys.version.split()[0]}"

# What Python on macOS does not have, taken away.
_AS_ON_MACOS = """
    import os, signal, sys
    gone = ["O_PATH", "O_TMPFILE", "ST_NOEXEC", "fdatasync", "posix_fadvise", "posix_fallocate"]
    gone += ["sched_getaffinity", "sched_setaffinity", *(x for x in dir(os) if "FADV_" in x)]
    for name in gone:
        delattr(os, name)
    del signal.sigwaitinfo
    import numpy, sysconfig, threadpoolctl  # which look at the system for themselves
    sysconfig.get_config_vars()
    sys.platform = "darwin"
"""


def on_macos(code, cwd, **env):
    return python("-c", textwrap.dedent(_AS_ON_MACOS) + textwrap.dedent(code), cwd=cwd, env=env)


def command_on_macos(*words, cwd, **env):
    code = f"sys.argv[1:] = {list(map(str, words))}\nfrom hybrid_gemm.cli import main\nmain()"
    return on_macos(code, cwd, HYBRID_GEMM_CACHE=f"{cwd}/cache", **env)


def test_arrays_are_multiplied_on_macos(tmp_path):
    code = """
        import numpy as np
        import hybrid_gemm as hg
        from hybrid_gemm.devices import native_sums
        a, b = np.random.rand(2, 300, 300)
        np.testing.assert_allclose(hg.gemm(a, b, threads=2, split="cols"), a @ b)
        print(native_sums.unavailable())
    """
    done = on_macos(code, tmp_path, HYBRID_GEMM_CACHE=f"{tmp_path}/cache")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None" or "g++" in done.stdout


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["at once", "resume"])
def test_files_are_multiplied_on_macos(tmp_path, resume):
    a, b = np.random.rand(2, 60, 60)
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    done = command_on_macos("run", "A.npy", "B.npy", "-o", "C.npy", *resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "verification passed" in done.stdout
    np.testing.assert_allclose(np.load(tmp_path / "C.npy"), a @ b)
    assert {x.name for x in tmp_path.iterdir()} - {"cache"} == {"A.npy", "B.npy", "C.npy"}


def test_what_needs_linux_says_so_on_macos(tmp_path):
    done = command_on_macos("run", "--size", 8, "--device", "emulator", cwd=tmp_path)
    assert done.returncode == 5
    assert "device emulator was asked for: the emulator needs Linux" in done.stderr

    ranks = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    done = command_on_macos("run", "--size", 8, cwd=tmp_path, **ranks)
    assert done.returncode == 5
    assert "ranks of MPI need Linux" in done.stderr and "Traceback" not in done.stderr

    code = """
        import hybrid_gemm as hg
        hg.gemm([[1.0]], [[1.0]], comm=object())
    """
    assert "UnavailableError: ranks of MPI need Linux" in on_macos(code, tmp_path).stderr


def test_an_older_python_is_refused_by_its_version():
    """Where a PYTHONPATH leads another module's Python here."""
    done = python("-c", "import sys; sys.version_info = 3, 9, 7; import hybrid_gemm")
    assert done.returncode == 1
    assert "ImportError: hybrid-gemm needs Python 3.11 or newer, and this is" in done.stderr


@pytest.mark.parametrize("text, said", [
    ("__version__ = '1.24.4'", f"is 1.24.4; {REQUIRED['numpy']} or newer is needed"),
    ("raise ImportError('of Python 3.10')", f"does not load in {PYTHON}: of Python 3.10 ("),
    ("raise AttributeError('gone since 3.10')", f"does not load in {PYTHON}: gone since 3.10 ("),
    # As NumPy itself says it, in many lines, where a library of the system's is missing.
    ("""try:
    raise ImportError('libm.so.7: cannot open shared object file')
except ImportError as error:
    raise ImportError('PLEASE READ THIS:\\n' + 99 * 'advice\\n') from error""",
     f"does not load in {PYTHON}: libm.so.7: cannot open shared object file ("),
])  # fmt: skip
def test_a_numpy_that_a_module_puts_in_the_way_is_named(tmp_path, text, said):
    folder = tmp_path / "numpy"
    folder.mkdir()
    (folder / "__init__.py").write_text(text)
    for command in ("run", "--size", 8), ("info",):
        done = run(*command, check=5, PYTHONPATH=str(tmp_path))
        assert f"NumPy in {folder} {said}" in one_line(done)
        assert "PYTHONPATH" in done.stderr
    done = python("-c", "from hybrid_gemm import gemm", env={"PYTHONPATH": str(tmp_path)})
    assert f"UnavailableError: NumPy in {folder} {said}" in done.stderr


@pytest.mark.parametrize("name", ["click", "rich", "threadpoolctl"])
def test_an_older_package_that_a_module_puts_in_the_way_is_named(tmp_path, name):
    file = tmp_path / f"{name}.py"
    file.write_text("__version__ = '1.9.3'")
    done = run("run", "--size", 8, "--device", "cpu", check=5, PYTHONPATH=str(tmp_path))
    said = f"{name} in {file} is 1.9.3; {REQUIRED[name]} or newer is needed (PYTHONPATH"
    assert said in one_line(done)


def test_packages_that_are_required_are_those_of_the_package():
    wanted = tomllib.loads((PACKAGE_FOLDER / "pyproject.toml").read_text())["project"]
    lowest = [x.partition(",")[0] for x in wanted["dependencies"]]  # before releases left out
    assert lowest == sorted(f"{x}>={least}" for x, least in REQUIRED.items())
    for extra in ("cuda12", "cuda13"):
        wheel = f"cupy-{extra}x[ctk]>={installing.CUPY}"
        assert wheel in wanted["optional-dependencies"][extra]


def test_the_least_threadpoolctl_knows_the_blas_of_numpy_2():
    """Up to 3.4 it finds none in NumPy's wheels: every worker's product then takes all cores."""
    assert installing._numbers(REQUIRED["threadpoolctl"]) >= (3, 5)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_required_package_that_is_not_there_is_named(tmp_path, name):
    """As in an environment in which Python finds the package alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda x, *rest: None if x == {name!r} else find(x, *rest)\n"
    )
    done = run("run", "--size", 8, "--device", "cpu", check=5, PYTHONPATH=str(tmp_path))
    says = f"{name} is not installed for this Python; to install it: "
    assert one_line(done) == f"hybrid-gemm: {says}{sys.executable} -m pip install {name}"
    if name == "numpy":
        done = python("-c", "from hybrid_gemm import gemm", env={"PYTHONPATH": str(tmp_path)})
        assert f"UnavailableError: {says}" in done.stderr


def test_windows_is_refused_by_its_name():
    done = python("-c", "import sys; sys.platform = 'win32'; import hybrid_gemm")
    assert done.stderr.splitlines()[-1].startswith("ImportError: hybrid-gemm runs on Linux")


def test_a_filesystem_that_reserves_nothing(tmp_path, monkeypatch):
    """musl says so; glibc writes zeros instead."""

    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    writer = NpyWriter(tmp_path / "C.npy", (3, 4), "float32")
    writer.array[:] = 7
    writer.commit()
    assert (np.load(tmp_path / "C.npy") == 7).all()


@pytest.mark.parametrize("killed", [True, False])
def test_what_killed_processes_left_is_removed_without_proc(tmp_path, monkeypatch, killed):
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        if killed:
            other.kill()
            other.wait()
        host = output_files._host()
        left = tmp_path / f".hybrid-gemm-{host}-{other.pid}-0-{'0' * 16}.tmp"
        left.write_bytes(b"a part of C")
        monkeypatch.setattr(output_files.os.path, "exists", lambda path: False)
        output_files.remove_stale(str(tmp_path))
        monkeypatch.undo()
        assert left.exists() is not killed
    finally:
        other.kill()
        other.communicate()


def test_the_hash_of_a_file_is_of_all_of_it_however_often(tmp_path, monkeypatch):
    """Where /dev/fd shares the place in the file, as on macOS, and where there is none."""
    np.save(tmp_path / "A.npy", np.ones((30, 30)))
    file = NpyFile(tmp_path / "A.npy")
    expected = hashlib.sha256((tmp_path / "A.npy").read_bytes()).hexdigest()
    os.lseek(file.descriptor, 100, os.SEEK_SET)
    monkeypatch.setattr("builtins.open", _without_dev_fd(open))
    assert [file.sha256(), file.sha256()] == [expected] * 2


def _without_dev_fd(real):
    def opened(name, *args, **kwargs):
        if str(name).startswith("/dev/fd/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return real(name, *args, **kwargs)

    return opened


def test_the_cache_is_not_shared_by_kinds_of_cpu_without_proc(monkeypatch):
    def no_proc(path, *args, **kwargs):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(Path, "read_text", no_proc)
    found = set()
    for machine in "x86_64", "aarch64":
        monkeypatch.setattr(compiler.platform, "machine", lambda machine=machine: machine)
        found.add(compiler.toolchain.__wrapped__())
    assert len(found) == 2


def test_a_system_that_loads_no_code_from_the_cache_is_named(monkeypatch):
    """As of some security modules, where the folder is not mounted noexec."""

    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(program, "Library", refuse)
    reason = program.unavailable.__wrapped__()
    if "g++ is not installed" in reason:
        pytest.skip(reason)
    assert "failed to map segment" in reason and "HYBRID_GEMM_CACHE names another" in reason


def test_scripts_make_their_checksums_by_what_posix_has(tmp_path):
    """macOS has no sha256sum before version 15."""
    for tool in "cat", "cksum":
        (tmp_path / tool).symlink_to(shutil.which(tool))
    script = ". scripts/setup; found=3.11; hash_for run"
    done = subprocess.run(
        [shutil.which("sh"), "-euc", f"root=$PWD; {script}"], capture_output=True, text=True,
        cwd=TESTS.parent, env={"PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    ("capabilities", "old"),
    [("7.0\n9.0", True), ("6.1", True), ("7.5\n8.0", False), ("12.0", False), ("", False)],
)
def test_set_up_takes_cuda_12_for_gpus_that_cuda_13_left_out(capabilities, old, tmp_path):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{capabilities}\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    done = subprocess.run(
        ["sh", "-uc", "root=$PWD; . scripts/setup; any_gpu_before_75"], cwd=TESTS.parent,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.returncode == 0) == old


def says(monkeypatch, words):
    """Makes the system load no library, and say these bytes of it."""
    loader = SimpleNamespace(dlopen=lambda name, mode: None, dlerror=lambda: words)
    monkeypatch.setattr(libraries, "_loader", loader)


def test_a_library_that_is_not_here_is_said_in_any_locale(monkeypatch):
    """In one that is not UTF-8 ctypes cannot read what the system says."""
    says(monkeypatch, b"libcuda.so.1: B\xf6yle bir dosya yok")
    assert "no NVIDIA driver here" in driver._driver_missing()
    assert compiler.reason(lambda: Library("x.so")) == r"libcuda.so.1: B\xf6yle bir dosya yok"
    with pytest.raises(OSError, match="yle bir dosya yok"):
        LibraryUnderLock("x.so")


@needs("emulator")
@pytest.mark.parametrize(
    "module",
    [launch_list, native_copier, native_passes, native_sums, signature],
    ids=lambda x: x.__name__,
)
def test_native_code_that_is_not_loaded_is_said_in_any_locale(module, monkeypatch):
    """As from a cache that does not let code run."""
    says(monkeypatch, b"\xfdzin yok")
    for name in "native", "_library":
        if known := getattr(module, name, None):
            monkeypatch.setattr(module, name, known.__wrapped__)
    assert module.unavailable.__wrapped__() == r"\xfdzin yok"


def test_a_function_that_a_library_lacks_is_said_in_any_locale(monkeypatch):
    library = Library(None)
    assert library.getpid() == os.getpid() and not hasattr(library, "no_such_function")

    def unreadable(given):
        b"tan\xfdms\xfdz".decode()

    monkeypatch.setattr(library, "_FuncPtr", unreadable)
    assert not hasattr(library, "neither_this_one")
