"""What is written to terminals: of any width, with any encoding."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios

import pytest
from support.command import COMMAND, environment, python
from support.ranks import MPI_ENVIRONMENT, MPIRUN, needs_mpirun

from hybrid_gemm.host.notes import note
from hybrid_gemm.reporting import console


@pytest.mark.parametrize("width", [40, 80, 200])
def test_numbers_stay_whole_in_narrow_terminals(width):
    script = (
        "from hybrid_gemm.reporting import console\n"
        f"console.console.width = {width}\n"
        "console.table(['<name', 'rows of A', 'multiply ms', 'empty'],\n"
        "             [['a' * 30, '12345:67890', '123456.78', None]])\n"
    )
    done = python("-c", script)
    assert "12345:67890" in done.stdout and "123456.78" in done.stdout
    assert "empty" not in done.stdout


def in_terminal(width: int, *arguments, before=(), **changes: str) -> list[str]:
    """The lines that the command, after `before`, writes to a terminal so wide."""
    primary, secondary = pty.openpty()
    termios.tcsetwinsize(secondary, (50, width))
    env = environment(TERM="xterm", **MPI_ENVIRONMENT)
    env.pop("COLUMNS", None)  # which would count instead of the terminal's
    env |= changes
    with subprocess.Popen(
        [*before, *COMMAND, *map(str, arguments)], stdin=secondary, stdout=secondary,
        stderr=secondary, env=env,
    ) as process:  # fmt: skip
        os.close(secondary)
        written = b""
        with contextlib.suppress(OSError):  # as Linux ends a terminal that nobody writes to
            while chunk := os.read(primary, 2**16):
                written += chunk
        process.wait()
    os.close(primary)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.decode()).splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--kernel", "cubals"),
        ("run", "--size", 64, "--device", "cpu", "--resident", "-q"),
        ("run", "--size", 64, "--device", "cpu", "--max-device-memory", "8GiB", "--dry-run"),
        ("run", "--size", 64, "--device", "cpu", "-o", "/dev/full"),
        ("kernels", "shared_tile", "block_tile"),
    ],
)
def test_no_word_is_cut_in_a_terminal(arguments):
    narrow, wide = in_terminal(60, *arguments), in_terminal(400, *arguments)
    assert max(map(len, narrow)) <= 60, narrow
    numbers = re.compile(r"\d+\.\d+")  # times differ
    words = [set(numbers.sub("0", " ".join(x)).split()) for x in (narrow, wide)]
    assert words[0] == words[1]


@pytest.mark.parametrize("columns", ["0", "-5", "wide", ""])
def test_columns_that_are_no_width_are_those_of_the_terminal(columns):
    lines = in_terminal(60, "kernels", "shared_tile", COLUMNS=columns)
    assert "shared_tile" in " ".join(lines) and 40 < max(map(len, lines)) <= 60, lines


@needs_mpirun
def test_ranks_write_for_the_terminal_of_mpirun():
    job = "run", "--size", 64, "--device", "cpu", "--split", "cols"
    before = MPIRUN, "-n", "2"
    narrow, wide = (in_terminal(width, *job, before=before) for width in (60, 300))
    assert max(map(len, narrow)) <= 60 < max(map(len, wide)), narrow
    assert any("kernel: blas   compute: strict float32   reduction:" in x for x in wide)
    (error,) = in_terminal(300, "bench", before=before)[:1]
    assert error.endswith("started 2; start it without")
    assert "start it without" in " ".join(in_terminal(40, "bench", before=before)[:4])


def test_control_characters_of_names_are_escaped(capsys):
    console.line("wrote a\x1b[31m\r.npy in 3 µs")
    assert capsys.readouterr().out == "wrote a\\x1b[31m\\r.npy in 3 µs\n"


def test_facts_stay_whole_in_a_terminal(monkeypatch):
    monkeypatch.setattr(console.console, "width", 40)
    monkeypatch.setattr(console.console, "soft_wrap", False)
    with console.console.capture() as captured:
        console.facts("device: cpu, 2 cores", "kernel: blas", "compute: strict float32")
    assert captured.get() == "device: cpu, 2 cores   kernel: blas\ncompute: strict float32\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_that_the_encoding_lacks_is_escaped(tmp_path, encoding):
    name = "Ж².npy"
    done = subprocess.run(
        [*COMMAND, "run", "--size", "8", "-o", name], cwd=tmp_path, capture_output=True,
        env=environment(PYTHONIOENCODING=encoding, PYTHONUTF8="0", LC_ALL="C.UTF-8"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"wrote \\u0416" in done.stdout
    assert os.listdir(tmp_path) == [name]


def test_a_note_that_no_stderr_takes_is_no_error(monkeypatch):
    """As of a daemon, of a program without a console, and where a disk is full."""
    with open(os.devnull, "w") as closed, open("/dev/full", "w") as full:
        closed.close()
        for stream in (None, closed, full):
            monkeypatch.setattr(sys, "stderr", stream)
            note(f"something that is worth saying to {stream}")
        with contextlib.suppress(OSError):
            full.close()
