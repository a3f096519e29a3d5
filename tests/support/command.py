"""Runs the command, and other Python programs, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

import hybrid_gemm
from hybrid_gemm.cli import cli

from . import forked

TESTS = Path(__file__).resolve().parents[1]
PACKAGE_FOLDER = Path(hybrid_gemm.__file__).resolve().parents[1]
COMMAND = [sys.executable, "-m", "hybrid_gemm"]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, where Python finds the package under test and `support`."""
    made = {**os.environ, **changes}
    given = made.get("PYTHONPATH")
    folders = [str(PACKAGE_FOLDER), str(TESTS), *([given] if given else [])]
    return {**made, "PYTHONPATH": os.pathsep.join(folders)}


def run(*arguments, check=None, cwd=None, **changes) -> subprocess.CompletedProcess:
    """Runs `hybrid-gemm` with these arguments, in a process of its own. `check` is the exit code to
    expect; `changes` are those of the environment."""
    words = list(map(str, arguments))
    done = forked.run(words, cwd, changes)
    if done is None:
        done = subprocess.run(
            [*COMMAND, *words], capture_output=True, text=True, cwd=cwd, env=environment(**changes)
        )
    if check is not None:
        assert done.returncode == check, done.stderr
    return done


def run_checked(*arguments, kernels, check=None) -> subprocess.CompletedProcess:
    """As `run`, `hybrid-gemm run --check` with the kernels of a folder, by a process that
    AddressSanitizer watches already: to start one takes longer than to check a small kernel."""
    words, changes = ["run", "--check", *map(str, arguments)], {"HYBRID_GEMM_KERNELS": str(kernels)}
    done = forked.run(words, None, changes, checked=True) or run(*words, **changes)
    if check is not None:
        assert done.returncode == check, done.stderr
    return done


def python(*arguments, env=None, **options) -> subprocess.CompletedProcess:
    """Runs Python with these arguments; `options` are those of `subprocess.run`."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True,
        env=environment(**(env or {})), **options,
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess) -> str:
    """The message of a command that failed, which must be one line and no traceback."""
    lines = [x for x in done.stderr.splitlines() if x.startswith("hybrid-gemm: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0]


def said(*arguments) -> str:
    """What the command writes on stdout, run in this process."""
    done = CliRunner().invoke(cli, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout
