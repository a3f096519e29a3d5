"""Input files that change or are truncated while they are read, that are not read, and whose
product is not kept."""

import hashlib
import os
import re
import signal
import textwrap
import time
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from support.command import one_line, python
from support.npy import write
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm.arrays.npy_files import SAMPLE_BYTES, SAMPLES, NpyFile
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import HybridGemmError


def test_a_changed_input_is_an_error(tmp_path):
    path = tmp_path / "A.npy"
    np.save(path, np.ones((3, 3)))
    file = NpyFile(path)
    file.check_unchanged()
    time.sleep(0.02)
    with open(path, "r+b") as other:
        other.seek(-8, os.SEEK_END)
        other.write(bytes(8))
    with pytest.raises(HybridGemmError, match=r"A\.npy was changed"):
        file.check_unchanged()
    os.truncate(path, 190)  # within its page: reading gives zeros and no SIGBUS
    assert file.array[2, 2] == 0
    with pytest.raises(HybridGemmError, match=r"truncated while it was read: it had 200 bytes"):
        file.check_unchanged()


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ("", ["C is not kept; -o C.npy writes it"]),
        ("--print", []),
        ("--dry-run", []),
        ("-o new.npy", []),
        ("-c A.npy -o new.npy", ["A.npy is not read: beta is 0; --beta 1 adds it"]),
        ("-c A.npy -o new.npy --beta 1", []),
        ("-c A.npy --dry-run", ["A.npy is not read: beta is 0; --beta 1 adds it"]),
        ("-c A.npy --print", ["C is not read: beta is 0; .*"]),
        ("-o new", ["new will hold the bytes of a .npy file, whatever its name says"]),
    ],
)
def test_what_files_will_not_be_is_noted(tmp_path, monkeypatch, options, notes):
    monkeypatch.chdir(tmp_path)
    np.save("A.npy", np.ones((3, 3)))
    arguments = ["run", "A.npy", "A.npy", "--device", "cpu", *options.split()]
    with warnings.catch_warnings(record=True) as warned:  # the product's, which are notes as well
        warnings.simplefilter("always")
        done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    found = re.findall("note: (.*)", done.stderr) + [str(x.message) for x in warned]
    assert len(found) == len(notes) and all(map(re.fullmatch, notes, found))


def test_an_input_whose_time_was_set_back_is_an_error(tmp_path):
    path = tmp_path / "A.npy"
    np.save(path, np.ones((4, 4)))
    file, before = NpyFile(path), path.stat()
    time.sleep(0.05)  # in which the system's clock moves
    path.chmod(0o600)
    os.link(path, tmp_path / "too.npy")
    file.check_unchanged()  # which moved its ctime, and wrote nothing
    (tmp_path / "too.npy").unlink()
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(HybridGemmError, match="was changed while it was read"):
        file.check_unchanged()


def test_an_input_that_is_replaced_was_still_read_whole(tmp_path):
    path = tmp_path / "A.npy"
    np.save(path, np.ones((3, 3)))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    file = NpyFile(path)
    np.save(tmp_path / "other.npy", np.zeros((3, 3)))
    os.replace(tmp_path / "other.npy", path)
    file.check_unchanged()
    assert file.array.sum() == 9
    assert file.sha256() == digest


@pytest.mark.parametrize("rows", [3, 7000])
def test_parts_of_a_file_from_the_first_byte_to_the_last_tell_it_from_others(rows, tmp_path):
    """By these ranks find that they read different files."""
    path = tmp_path / "A.npy"
    np.save(path, np.arange(rows * 99.0).reshape(rows, 99))
    size = path.stat().st_size
    last, first = max(0, size - SAMPLE_BYTES), NpyFile(path).sampled()
    assert first == NpyFile(path).sampled()
    starts = [last * i // (SAMPLES - 1) for i in range(SAMPLES)]
    for at in (
        {128, size - 1, *(starts[i] + 200 for i in (1, 30, 62, 63))} if last else {128, size - 1}
    ):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        other = tmp_path / "other.npy"
        other.write_bytes(data)
        assert NpyFile(other).sampled() != first, at


def test_an_input_for_which_there_are_no_addresses_is_named(tmp_path):
    with open(tmp_path / "huge.npy", "wb") as file:  # a hole of 128 GiB
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (1 << 18, 1 << 17)}
        )
        file.truncate(file.tell() + (1 << 37))
    code = """
        import resource
        from hybrid_gemm import cli
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))
        cli.main()
    """
    done = python("-c", textwrap.dedent(code), "run", "huge.npy", "huge.npy", cwd=tmp_path)
    assert done.returncode == 2
    said = f"hybrid-gemm: huge.npy cannot be mapped into {(1 << 37) + 128} bytes"
    assert one_line(done).startswith(said)


def test_files_are_closed_with_the_arrays(tmp_path):
    path = tmp_path / "A.npy"
    np.save(path, np.ones((3, 3)))
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(20):
        write(tmp_path / "C.npy", NpyFile(path).array)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1


# A run whose input is truncated once it was opened, so that reading it is a SIGBUS for sure.
TRUNCATED = """
    import os, sys
    from hybrid_gemm import cli
    from hybrid_gemm.cli import job
    real = job.Job.run
    def truncated(self, progress):
        os.truncate(os.environ["VICTIM"], 5000)
        return real(self, progress)
    job.Job.run = truncated
    sys.argv[0] = "hybrid-gemm"
    cli.main()
"""


@pytest.mark.parametrize(
    "victim, dtype, options",
    [
        ("A.npy", "f4", ["--device", "cpu"]),
        ("B.npy", "f4", ["--device", "cpu"]),
        ("A.npy", "f4", ["--device", "cpu", "--threads", 3, "--split", "cols"]),
        ("B.npy", "f2", ["--device", "cpu"]),
        ("A.npy", "f4", ["--device", "emulator"]),
        ("B.npy", "f2", ["--device", "emulator", "--threads", 2]),
        ("A.npy", "i4", ["--device", "cpu", "--verify", "full"]),
        ("B.npy", ">f8", ["--device", "cpu"]),
    ],
)
def test_a_truncated_input_ends_the_run_with_its_name(tmp_path, dtype, options, victim):
    side = 100 if "emulator" in options else 700
    for name in ("A.npy", "B.npy"):
        np.save(tmp_path / name, np.ones((side, side), dtype))
    done = python(
        "-c", textwrap.dedent(TRUNCATED), "run", "A.npy", "B.npy", "-o", "C.npy", *options,
        cwd=tmp_path, env={"VICTIM": victim}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert f"{victim} was truncated while it was read" in one_line(done)
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.npy"]


def test_a_bus_error_of_another_cause_is_still_one(tmp_path):
    code = """
        import mmap, os, resource, sys
        from hybrid_gemm.cli import signals
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signals.name_truncated_files()
        with open(sys.argv[1], "w+b") as file:
            file.truncate(10000)
            data = mmap.mmap(file.fileno(), 10000)
            file.truncate(0)
            data[9000]
    """
    done = python("-c", textwrap.dedent(code), tmp_path / "other", timeout=60)
    assert done.returncode == -signal.SIGBUS


@needs_mpirun
@pytest.mark.parametrize("split", ["rows", "cols"])
def test_a_truncated_input_ends_all_ranks_with_its_name(tmp_path, split):
    for name in ("A.npy", "B.npy"):
        np.save(tmp_path / name, np.ones((700, 700), "f4"))
    done = mpirun(
        2, "-c", textwrap.dedent(TRUNCATED), "run", "A.npy", "B.npy", "-o", "C.npy",
        "--device", "cpu", "--split", split, cwd=tmp_path, timeout=60, VICTIM="B.npy",
    )  # fmt: skip
    assert done.returncode == 1, (done.returncode, done.stderr)
    assert re.search(r"hybrid-gemm: rank [01]: B\.npy was truncated while it was read", done.stderr)
    assert "MPI_ABORT was invoked" in done.stderr  # and does not leave the others to the launcher
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["A.npy", "B.npy"]
