"""The version that --version and result files name: with its git commit, in a checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import hybrid_gemm
from hybrid_gemm.cli import cli
from hybrid_gemm.devices.cuda import driver
from hybrid_gemm.reporting import environment

PACKAGE = Path(hybrid_gemm.__file__).parent
FILES = (
    "__init__.py", "errors.py", "host/__init__.py", "host/forks.py", "reporting/__init__.py",
    "reporting/environment.py",
)  # fmt: skip
CPUS = Path("/proc/cpuinfo")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def test_the_suite_takes_no_variables_of_the_package_from_the_shell():
    """Started with HYBRID_GEMM_KERNELS=..., say."""
    assert {x for x in os.environ if x.startswith("HYBRID_GEMM_")} <= {"HYBRID_GEMM_CACHE"}


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", *who, "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path) -> Path:
    """A folder with the part of the package that knows its version."""
    for name in FILES:
        (tmp_path / "hybrid_gemm" / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(PACKAGE / name, tmp_path / "hybrid_gemm" / name)
    return tmp_path


def version(folder: Path, **variables: str) -> str:
    code = "from hybrid_gemm.reporting.environment import version; print(version())"
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=True)
    return done.stdout.strip()


def test_an_installed_package_has_its_version_alone(package):
    assert version(package) == hybrid_gemm.__version__


@needs_git
def test_a_checkout_has_its_commit_and_whether_files_differ(package):
    git(package, "init")
    assert version(package) == hybrid_gemm.__version__, "there is no commit yet"
    git(package, "add", ".")
    git(package, "commit", "-m", "Begin")
    commit = git(package, "rev-parse", "HEAD")[:12]
    clean = f"{hybrid_gemm.__version__} (commit {commit})"
    assert version(package) == clean
    (package / "results.json").write_text("{}")
    assert version(package) == clean, "results are not what runs"
    (package / "kernels").mkdir()
    (package / "kernels" / "gemm_mine.cu").touch()
    changed = f"{hybrid_gemm.__version__} (commit {commit}, modified)"
    assert version(package) == changed
    assert version(package, GIT_DIR="/nowhere", GIT_INDEX_FILE="/none") == changed


@needs_git
def test_another_projects_checkout_is_not_taken_for_ours(package, tmp_path):
    site = package / "venv" / "site-packages"
    shutil.copytree(package / "hybrid_gemm", site / "hybrid_gemm")
    git(package, "init")
    git(package, "add", ".")
    git(package, "commit", "-m", "Begin")
    assert version(site) == hybrid_gemm.__version__


def test_the_command_prints_it():
    done = CliRunner().invoke(cli, ["--version"])
    assert done.exit_code == 0
    commit = r"( \(commit [0-9a-f]{12}(, modified)?\))?"
    number = re.escape(hybrid_gemm.__version__)
    assert re.fullmatch(f"hybrid-gemm {number}{commit}\n", done.output)


def test_result_files_name_the_checkout(tmp_path):
    file = tmp_path / "r.json"
    asked = ["bench", "--device", "cpu", "--shapes", "8", "--samples", "1", "--json", str(file)]
    assert CliRunner().invoke(cli, asked).exit_code == 0
    found = json.loads(file.read_text())["environment"]
    assert found["hybrid_gemm"] == hybrid_gemm.__version__
    assert found.get("checkout") == environment.checkout()
    if models := re.findall(r"^model name\s*: (.*)$", CPUS.read_text(), re.MULTILINE):
        assert found["cpu"]["model"] == models[0].strip()


def test_a_full_gpu_is_described_as_far_as_it_goes(monkeypatch):
    """A result is written where another program has taken all the GPU's memory."""

    class FullError(RuntimeError):
        pass

    class Device:
        def __init__(self, ordinal):
            self.attributes = {"ClockRate": 1_980_000}

        def __enter__(self):
            raise FullError("out of memory")

        def __exit__(self, *error):
            pass

    def no_handle():
        raise FullError("out of memory")

    properties = {
        "name": b"NVIDIA Full", "major": 9, "minor": 0, "multiProcessorCount": 132,
        "sharedMemPerBlock": 49152, "maxThreadsPerBlock": 1024, "l2CacheSize": 50 << 20,
        "maxThreadsPerMultiProcessor": 2048, "totalGlobalMem": 80 << 30,
    }  # fmt: skip
    runtime = SimpleNamespace(
        CUDARuntimeError=FullError, driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000, getDeviceCount=lambda: 1,
        getDeviceProperties=lambda ordinal: properties,
    )  # fmt: skip
    cuda = SimpleNamespace(
        runtime=runtime, Device=Device, device=SimpleNamespace(get_cublas_handle=no_handle),
        cublas=SimpleNamespace(CUBLASError=FullError, getVersion=lambda handle: 130100),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver, "unavailable", lambda: None)
    found = environment.environment()["cuda"]
    assert found["cublas"] is None
    (gpu,) = found["gpus"]
    assert (gpu["name"], gpu["memory_gib"], gpu["memory_free_gib"]) == ("NVIDIA Full", 80, None)
    assert (gpu["compute_capability"], gpu["l2_mib"]) == ("9.0", 50)
    json.dumps(found)


@pytest.mark.parametrize(
    ("program", "said"),
    [("/opt/bin/hybrid-gemm", "hybrid-gemm"), ("/x/hybrid_gemm/__main__.py", "hybrid-gemm"),
     ("scripts/fuzz", "scripts/fuzz"), ("/x/scripts/fuzz", "scripts/fuzz")],
)  # fmt: skip
def test_a_command_line_names_the_program(program, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program, "--json", "/tmp/o.json", "a b"])
    assert environment.command_line() == f"{said} --json o.json 'a b'"


def test_a_blas_that_is_not_known_is_said(monkeypatch):
    """As the reference BLAS, or NumPy's own loops: its threads cannot be limited."""
    monkeypatch.setattr("threadpoolctl.threadpool_info", list)
    assert environment.environment()["blas"] == ["none that threadpoolctl knows"]
