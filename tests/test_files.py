"""What happens to files: inputs that change, outputs that vanish, processes that are killed."""

import fcntl
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap

import numpy as np
import pytest
from support.command import COMMAND, environment, one_line, python, run
from support.npy import in_memory, write
from support.ranks import failing_rank, mpirun, needs_mpirun

from hybrid_gemm.arrays import npy_files, output_files
from hybrid_gemm.arrays.file_bytes import CHECK_BYTES, check_shared, read_part, write_part
from hybrid_gemm.arrays.npy_files import NpyWriter
from hybrid_gemm.errors import HybridGemmError, UsageError
from hybrid_gemm.reporting import console

TEMPORARY = re.compile(r"\.hybrid-gemm-.+-\d+-\d+-[0-9a-f]{16}\.tmp")


# --- reading back -------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 60, 128, 5 << 20, -1])
def test_other_bytes_on_the_disk_are_found(tmp_path, kind, monkeypatch, at):
    """The disk is played by `pread`, as reading the real one back ends in it."""
    path, c = tmp_path / "C.npy", np.zeros((1000, 1000))
    size = 128 + c.nbytes
    real = os.pread

    def pread(descriptor, count, start):
        data = bytearray(real(descriptor, count, start))
        if start <= at % size < start + len(data):
            data[at % size - start] ^= 1
        return bytes(data)

    monkeypatch.setattr(os, "pread", pread)
    first = at % size // CHECK_BYTES * CHECK_BYTES
    where = f"bytes {first} to {min(first + CHECK_BYTES, size) - 1} are"
    with pytest.raises(HybridGemmError, match=f"read back from the disk, (its header|{where})"):
        write(path, c)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(in_memory(tempfile.gettempdir()), reason="no disk under the temporary folder")
def test_reading_back_goes_to_the_disk(tmp_path):
    """Between the map and the reading, the pages leave the system's cache."""
    code = """
        import ctypes, mmap, os, sys
        import numpy as np
        from hybrid_gemm.arrays import npy_files

        def cached(descriptor, size):
            data = mmap.mmap(descriptor, size)
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            start = ctypes.addressof(ctypes.c_char.from_buffer(data))
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages) == 0
            return sum(x & 1 for x in pages) / len(pages)

        real = npy_files.checksums_on_disk
        def seen(descriptor, size):
            print(cached(descriptor, size))
            return real(descriptor, size)
        npy_files.checksums_on_disk = seen
        with npy_files.NpyWriter(sys.argv[1], (2000, 1000), "f8") as writer:
            writer.array[...] = 3
    """
    done = python("-c", textwrap.dedent(code), tmp_path / "C.npy")
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.1


@pytest.mark.parametrize(
    "columns", [(0, 50), (0, 30), (10, 30)], ids=["whole rows", "the first", "some"]
)
def test_a_part_is_read_back(tmp_path, monkeypatch, columns, rng):
    left, right = columns
    part = rng.random((50, right - left))
    path = tmp_path / "parts"
    path.write_bytes(bytes(128 + 60 * 50 * 8))
    write_part(str(path), 128, 50, part, 5, left)
    found = np.frombuffer(path.read_bytes()[128:]).reshape(60, 50)
    np.testing.assert_array_equal(found[5:55, left:right], part)
    assert np.count_nonzero(found) == part.size

    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: real(*given)[:-1] + b"\0")
    with pytest.raises(HybridGemmError, match="read back from the disk"):
        write_part(str(path), 128, 50, part, 5, left)
    monkeypatch.setattr(os, "pread", lambda *given: b"")  # truncated by another
    with pytest.raises(HybridGemmError, match="read back from the disk"):
        write_part(str(path), 128, 50, part, 5, left)


def test_a_link_in_place_of_a_part_is_not_followed(tmp_path):
    """Where others may write to the folder, they may exchange the file that ranks fill."""
    other, path = tmp_path / "other", tmp_path / "parts"
    other.write_bytes(b"precious" * 100)
    path.symlink_to(other)
    part = np.ones((5, 5))
    for call in (write_part, read_part):
        with pytest.raises(HybridGemmError, match=f"could not .* {path}"):
            call(str(path), 128, 5, part, 0, 0)
    with pytest.raises(UsageError, match="not the folder"):
        check_shared(str(path))
    assert other.read_bytes() == b"precious" * 100


def test_a_truncated_output_is_named(tmp_path):
    code = """
        import os, sys
        from hybrid_gemm.arrays import npy_files, output_files
        from hybrid_gemm.cli import signals
        output_files._takes_nameless_files = lambda folder: False
        signals.name_truncated_files(3)
        with npy_files.NpyWriter(sys.argv[1], (1000, 1000), "f4") as writer:
            os.truncate(writer.temporary, 100)
            writer.array[...] = 1
    """
    done = python("-c", textwrap.dedent(code), tmp_path / "C.npy", timeout=60)
    assert done.returncode == 1, done.stderr
    assert "rank 3: could not write" in one_line(done) and "was truncated" in one_line(done)
    assert os.listdir(tmp_path) == []


def test_an_output_that_another_made_longer_is_an_error(tmp_path, kind):
    for shared in (False, True):
        with NpyWriter(tmp_path / "C.npy", (8, 8), "f4", shared=shared) as writer:
            os.truncate(writer._file.descriptor, 392)
            with pytest.raises(HybridGemmError, match="it has 392 bytes instead of 384"):
                writer.commit()
            assert os.listdir(tmp_path) == []


def test_a_header_of_ranks_output_that_another_changed_is_an_error(tmp_path):
    """Each rank reads its own part back, and none the header."""
    with NpyWriter(tmp_path / "C.npy", (8, 8), "f4", shared=True) as writer:
        os.pwrite(writer._file.descriptor, b"9", 60)
        with pytest.raises(HybridGemmError, match="its header is another one"):
            writer.commit()
    assert os.listdir(tmp_path) == []


# --- what killed processes leave ----------------------------------------------------------

WRITING = """
    import os, signal, sys, time
    from hybrid_gemm.arrays import npy_files
    writer = npy_files.NpyWriter(sys.argv[1], (1000, 1000), "f4", shared=sys.argv[2] == "shared")
    print("computing", flush=True)
    time.sleep(60)
"""


def writing(path, kind):
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITING), path, kind],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
    )  # fmt: skip
    assert child.stdout.readline() == b"computing\n"
    return child


def test_a_killed_process_leaves_nothing(tmp_path):
    if not output_files._takes_nameless_files(os.open(tmp_path, os.O_RDONLY)):
        pytest.skip("this filesystem has no nameless files")
    with writing(tmp_path / "C.npy", "alone") as child:
        child.kill()
    assert os.listdir(tmp_path) == []


def test_the_next_run_removes_what_a_killed_one_left(tmp_path):
    with writing(tmp_path / "C.npy", "shared") as child:
        (name,) = os.listdir(tmp_path)
        assert TEMPORARY.fullmatch(name) and f"-{child.pid}-" in name
        write(tmp_path / "D.npy", np.ones((2, 2)))
        assert sorted(os.listdir(tmp_path)) == [name, "D.npy"]  # in use
        child.kill()
        child.wait()
        assert name in os.listdir(tmp_path)
        console.write(str(tmp_path / "e.json"), "{}")
    assert sorted(os.listdir(tmp_path)) == ["D.npy", "e.json"]


def test_only_stale_files_are_removed(tmp_path):
    host = output_files._host()
    with subprocess.Popen(["true"]) as ended:
        pass
    mine, start = os.getpid(), output_files._started(os.getpid())
    end = "0123456789abcdef.tmp"
    kept = [
        f".hybrid-gemm-{host}-{mine}-{start}-{end}",  # its process lives
        output_files._temporary_name(),
        f".hybrid-gemm-other.{host}-{ended.pid}-1-{end}",  # of another host
        f".hybrid-gemm-{host}-{ended.pid}-1-0123.tmp",  # of no name that we make
        f".hybrid-gemm-{end}",
        f"{host}-{ended.pid}-1-{end}",
        "C.npy",
    ]
    stale = [
        f".hybrid-gemm-{host}-{ended.pid}-1-{end}",
        f".hybrid-gemm-{host}-{mine}-1-{end}",  # its number has another process now
    ]
    locked = f".hybrid-gemm-{host}-{ended.pid}-2-{end}"  # by a process of another container
    folder = f".hybrid-gemm-{host}-{ended.pid}-3-{end}"
    link = f".hybrid-gemm-{host}-{ended.pid}-4-{end}"
    for name in [*kept, *stale, locked]:
        (tmp_path / name).touch()
    (tmp_path / folder).mkdir()
    (tmp_path / link).symlink_to("C.npy")
    with open(tmp_path / locked, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        output_files.remove_stale(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, locked, folder, link])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file of another user")
def test_files_of_others_are_not_removed(tmp_path):
    with subprocess.Popen(["true"]) as ended:
        pass
    name = f".hybrid-gemm-{output_files._host()}-{ended.pid}-1-0123456789abcdef.tmp"
    (tmp_path / name).touch()
    os.chown(tmp_path / name, 65534, 65534)
    output_files.remove_stale(str(tmp_path))
    assert os.listdir(tmp_path) == [name]


def test_a_strange_host_name_makes_a_plain_file_name(tmp_path, monkeypatch):
    output_files._host.cache_clear()
    monkeypatch.setattr(socket, "gethostname", lambda: "a/b ü*(" + "x" * 200)
    try:
        write(tmp_path / "C.npy", np.ones((2, 2)), shared=False)
        assert output_files._host().startswith("a_b____x")
        assert TEMPORARY.fullmatch(output_files._temporary_name())
        monkeypatch.setattr(output_files, "_started", lambda process: None)  # without /proc
        assert TEMPORARY.fullmatch(output_files._temporary_name())
    finally:
        output_files._host.cache_clear()


def test_a_process_of_any_name_writes(tmp_path, kind, named_by_half_a_letter):
    write(tmp_path / "C.npy", np.ones((2, 2)))
    assert os.listdir(tmp_path) == ["C.npy"]


def test_a_forked_child_leaves_its_parents_file(tmp_path):
    code = """
        import os, sys
        from hybrid_gemm.arrays import npy_files
        with npy_files.NpyWriter(sys.argv[1], (3, 3), "f4", shared=True) as writer:
            if not os.fork():
                sys.exit()
            os.wait()
            print(os.listdir("."))
    """
    done = python("-c", textwrap.dedent(code), "C.npy", cwd=tmp_path)
    assert done.returncode == 0 and TEMPORARY.search(done.stdout), done
    assert os.listdir(tmp_path) == ["C.npy"]


# --- over ranks ---------------------------------------------------------------------------


@needs_mpirun
def test_the_next_run_removes_what_killed_ranks_left(tmp_path):
    done = mpirun(
        2, "-m", "hybrid_gemm", "run", "--device", "cpu", "--size", 600, "-o", "C.npy",
        cwd=tmp_path, timeout=60, **failing_rank(0, "kill"),
    )  # fmt: skip
    assert done.returncode
    run("run", "--size", 8, "-o", "D.npy", cwd=tmp_path, check=0)
    assert os.listdir(tmp_path) == ["D.npy"]


@needs_mpirun
def test_sha256_over_ranks(tmp_path):
    for name in ("A.npy", "B.npy"):
        np.save(tmp_path / name, np.ones((40, 40)))
    mpirun(2, "-m", "hybrid_gemm", "run", "A.npy", "B.npy", "-o", "C.npy", "--sha256",
           "--device", "cpu", "--json", "r.json", cwd=tmp_path, check=0)  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())["sha256"]
    for name in "ABC":
        assert found[name] == hashlib.sha256((tmp_path / f"{name}.npy").read_bytes()).hexdigest()


# --- the command --------------------------------------------------------------------------


def test_an_empty_output_name_is_refused():
    for flag in ("-o", "--json", "--trace"):
        done = run("run", "--size", 8, flag, "", check=2)
        assert "cannot write '': it names no file" in one_line(done)


@pytest.mark.parametrize("name", ["C.npy", "a b\\\n\tc.npy"])
def test_a_file_that_is_mounted_alone_is_refused(tmp_path, name):
    """As containers mount them: no other file can take its place."""
    (tmp_path / "outside").write_text("before")
    (tmp_path / name).touch()
    mounted = ["unshare", "-rm", "bash", "-c", 'mount --bind outside "$1" && shift && exec "$@"']
    if subprocess.run([*mounted, "bash", name, "true"], cwd=tmp_path).returncode:
        pytest.skip("nothing can be mounted here")
    for wrong in (["-o", name], ["--json", name]):
        command = [*COMMAND, "run", "--size", "8", "--device", "cpu", *wrong]
        done = subprocess.run(
            [*mounted, "bash", name, *command], cwd=tmp_path, capture_output=True, text=True,
            env=environment(),
        )  # fmt: skip
        assert done.returncode == 2 and "mounted alone" in one_line(done)
    assert (tmp_path / "outside").read_text() == "before"


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--resume"]])
def test_a_name_of_another_format_is_refused(tmp_path, more):
    done = run("run", "--size", 8, "-o", "C.h5", *more, cwd=tmp_path, check=2)
    assert "C is written as .npy, and the name ends in .h5" in one_line(done)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["C.npy", "C.NPY", "a.b/C"])
def test_a_name_that_ends_in_npy_or_in_nothing_is_taken(tmp_path, name):
    (tmp_path / "a.b").mkdir()
    run("run", "--size", 8, "-o", name, cwd=tmp_path, check=0)
    assert npy_files.NpyFile(tmp_path / name).array.shape == (8, 8)


def test_sha256_of_files(tmp_path):
    for name in ("A.npy", "B.npy"):
        np.save(tmp_path / name, np.ones((4, 4)))
    done = run("run", "A.npy", "B.npy", "-o", "C.npy", "--sha256", "--json", "r.json",
               cwd=tmp_path, check=0)  # fmt: skip
    found = json.loads((tmp_path / "r.json").read_text())["sha256"]
    for name in "ABC":
        digest = hashlib.sha256((tmp_path / f"{name}.npy").read_bytes()).hexdigest()
        assert found[name] == digest
        assert f"SHA-256 of {name}: {digest}" in done.stdout
    data = json.loads(run("run", "--size", 8, "-o", "C.npy", "--sha256", "--json", "-",
                          cwd=tmp_path, check=0).stdout)  # fmt: skip
    digest = hashlib.sha256((tmp_path / "C.npy").read_bytes()).hexdigest()
    assert data["sha256"] == {"A": None, "B": None, "C": digest}
    assert "sha256" not in json.loads(run("run", "--size", 8, "--json", "-", check=0).stdout)


def test_a_file_that_cannot_be_read_for_its_sha256_is_named(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    path = tmp_path / "A.npy"
    np.save(path, np.ones((4, 4)))
    file = npy_files.NpyFile(path)
    monkeypatch.setattr(npy_files.hashlib, "file_digest", fail)
    for read in (lambda: npy_files.sha256(path), file.sha256):
        with pytest.raises(HybridGemmError, match=f"could not read {path}: Input/output error"):
            read()


def test_sha256_needs_files():
    assert "--sha256 is for files" in one_line(run("run", "--size", 8, "--sha256", check=2))
    assert "--sha256" in run("run", "--help", check=0).stdout
