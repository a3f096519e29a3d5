"""What a run asks for of mapped files before it reads it, and gives to the disk before it ends."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np
import pytest
from support.command import TESTS, environment
from support.command import run as command
from support.npy import in_memory, write
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm import Runner
from hybrid_gemm.arrays import write_behind
from hybrid_gemm.arrays.npy_files import NpyFile, NpyWriter, Written
from hybrid_gemm.arrays.operand import Operand, Operands
from hybrid_gemm.errors import HybridGemmError
from hybrid_gemm.execution import read_ahead
from hybrid_gemm.execution.read_ahead import ASK_BYTES, ReadAhead
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.planning.reading_order import Need
from hybrid_gemm.problem import make_problem
from hybrid_gemm.reporting.file_report import Files, lines


@pytest.fixture
def names():
    """Finds the threads that these tests are about."""

    def alive():
        return [t for t in threading.enumerate() if t.name in ("read-ahead", "write-behind")]

    return alive


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def integers(rng, *shape):
    return rng.integers(-3, 4, shape).astype("f4")


# --- asking -------------------------------------------------------------------------------


class Played(read_ahead.Disk):
    """A disk that notes what it is asked for, and gives nothing before it may."""

    def __init__(self):
        self.asked, self.may_come, self.has_all = [], threading.Event(), False
        self.may_come.set()

    def cached(self, file, at, size):
        return self.has_all

    def ask(self, file, at, size):
        self.asked.append((file.name[-5], at, size))

    def wait(self, file, at):
        self.may_come.wait(60)

    def read_bytes(self):
        return sum(size for *_, size in self.asked)


@pytest.fixture
def two_files(tmp_path, rng):
    """A and B of 2 MiB each in files, C of zeros, as operands."""
    np.save(tmp_path / "A.npy", integers(rng, 1024, 512))
    np.save(tmp_path / "B.npy", integers(rng, 512, 1024))
    files = NpyFile(tmp_path / "A.npy"), NpyFile(tmp_path / "B.npy")
    a, b = (file.array for file in files)
    c = np.zeros((1024, 1024), "f4")
    operands = Operands(make_problem(a, b), *(Operand.of(x, None) for x in (a, b)), None,
                        Operand.of(c, None))  # fmt: skip
    return operands, files


def covered(asked, name):
    """The bytes that were asked for of a file, which must not overlap."""
    spans = sorted((at, at + size) for x, at, size in asked if x == name)
    for (_, stop), (start, _) in itertools.pairwise(spans):
        assert start == stop
    return spans[0][0], spans[-1][1]


def order(count=4, rows=1024):
    step = rows // count
    yield Need("B", Span(0, 512), Span(0, 1024), 0.0, 1.0)
    for i in range(count):
        yield Need("A", Span(step * i, step * (i + 1)), Span(0, 512), i / count, 1.0)


def test_every_byte_is_asked_for_once_in_the_order_of_need(two_files):
    operands, files = two_files
    disk = Played()
    with ReadAhead(order, operands, 100, disk=disk) as ahead:
        assert until(lambda: ahead.reading)
    assert covered(disk.asked, "A") == (0, files[0].needs)
    assert covered(disk.asked, "B") == (0, files[1].needs)
    assert all(size <= ASK_BYTES for *_, size in disk.asked)
    names = [name for name, *_ in disk.asked]
    assert names == sorted(names, reverse=True)  # B, then A
    assert ahead.reading.bytes == ahead.reading.disk_bytes == files[0].needs + files[1].needs


def test_what_is_in_the_cache_is_not_asked_for(two_files):
    operands, files = two_files
    disk = Played()
    disk.has_all = True
    with ReadAhead(order, operands, 100, disk=disk) as ahead:
        assert until(lambda: ahead.reading)
    assert not disk.asked
    assert ahead.reading.bytes == sum(file.needs for file in files)
    assert ahead.reading.disk_bytes == 0


@pytest.mark.skipif(in_memory(tempfile.gettempdir()), reason="no disk under the temporary folder")
def test_the_system_says_what_is_in_its_cache(two_files):
    _, (file, _) = two_files
    os.fsync(file.descriptor)
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    disk = read_ahead.Disk()
    assert not disk.cached(file, 0, file.needs)
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 5):
        os.pread(file.descriptor, file.needs, 0)
        assert disk.cached(file, 0, file.needs)


def test_what_is_ahead_fits_its_window(two_files):
    operands, _ = two_files
    disk = Played()
    with ReadAhead(order, operands, 100, disk=disk, window=1 << 20) as ahead:
        count = ahead.counting(None)
        quarter = (512 << 10) // ASK_BYTES

        def parts():
            return len([name for name, *_ in disk.asked if name == "A"]) // quarter

        assert until(lambda: parts() == 3)  # what has begun, and two quarters ahead of it
        time.sleep(0.05)
        assert parts() == 3
        count(25)
        assert until(lambda: parts() >= 4)
        count(75)
        assert until(lambda: ahead.reading)


def test_what_a_run_is_through_with_is_not_asked_for(two_files):
    operands, _ = two_files
    disk = Played()

    def late():
        ahead.counting(None)(100)
        yield from order()

    ahead = ReadAhead(late, operands, 100, disk=disk)
    with ahead:
        assert until(lambda: ahead.reading)
    assert not disk.asked


def test_an_error_ends_the_thread_at_once(two_files, names):
    operands, _ = two_files
    disk = Played()
    disk.may_come.clear()  # it gives nothing
    with (
        pytest.raises(KeyboardInterrupt),
        ReadAhead(order, operands, 100, disk=disk, window=1 << 19),
    ):
        assert until(lambda: disk.asked)
        raise KeyboardInterrupt
    assert names()  # nobody has waited for it
    disk.may_come.set()
    assert until(lambda: not names())


def test_threads_keep_no_process(two_files, names, tmp_path):
    operands, _ = two_files
    disk = Played()
    disk.may_come.clear()
    with ReadAhead(order, operands, 100, disk=disk):
        assert until(names)
        assert all(thread.daemon for thread in names())
        disk.may_come.set()


def test_arrays_of_no_file_start_no_thread(names):
    a = np.ones((4, 4), "f4")
    operands = Operands(make_problem(a, a), *(Operand.of(a, None),) * 2, None, Operand.of(a, None))
    with ReadAhead(order, operands, 100) as ahead:
        assert not names()
    assert ahead.reading is None
    assert ahead.counting(None) is None


def test_a_filesystem_without_advice_reads_as_before(two_files):
    class Refusing(Played):
        def ask(self, file, at, size):
            raise OSError(22, "no")

    operands, _ = two_files
    with ReadAhead(order, operands, 100, disk=Refusing()) as ahead:
        assert until(lambda: ahead.reading)
    assert ahead.reading.bytes == 0


@pytest.mark.parametrize("error", [OSError, MemoryError])
def test_a_system_that_does_not_say_what_came_is_no_error(error, monkeypatch):
    def refused(*_given):
        raise error

    monkeypatch.setattr(read_ahead, "open", refused, raising=False)
    assert read_ahead.Disk().read_bytes() == 0


@pytest.mark.parametrize(
    "options", [{}, {"threads": 2, "split": "rows"}, {"threads": 2, "split": "cols"}]
)
def test_a_run_from_files_asks_for_all_once_and_gives_all_of_c(
    tmp_path, rng, monkeypatch, names, device, options
):
    a, b = integers(rng, 300, 420), integers(rng, 420, 260)
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    files = [NpyFile(tmp_path / name) for name in ("A.npy", "B.npy")]
    disk, given = Played(), []
    monkeypatch.setattr(read_ahead, "Disk", lambda: disk)
    entered = ReadAhead.__enter__

    def begun(self):
        entered(self)
        self._thread.join()  # products as small as these may be over before it begins
        return self

    monkeypatch.setattr(ReadAhead, "__enter__", begun)
    monkeypatch.setattr(
        write_behind, "begin_to_write", lambda fd, start, size: given.append((start, start + size))
    )
    with (
        Runner(device=device, **options) as runner,
        NpyWriter(tmp_path / "C.npy", (300, 260), "f4") as writer,
    ):
        result = runner.run(files[0].array, files[1].array, out=writer.array)
        assert covered(disk.asked, "A") == (0, files[0].needs)
        assert covered(disk.asked, "B") == (0, files[1].needs)
        assert result.reading.bytes == sum(file.needs for file in files)
        wanted = set(range(writer.offset, writer.size))
        assert until(lambda: not wanted - {i for start, stop in given for i in range(start, stop)})
    assert sum(stop - start for start, stop in given) == writer.size - writer.offset
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), a @ b)
    assert until(lambda: not names())


# --- writing behind -----------------------------------------------------------------------


def test_parts_are_on_the_disk_before_the_end(tmp_path, rng):
    c = integers(rng, 2000, 1500)
    with NpyWriter(tmp_path / "C.npy", c.shape, "f4") as writer:
        for i in range(0, 2000, 500):
            writer.array[i : i + 500] = c[i : i + 500]
            writer.finished(writer.array[i : i + 500])
        assert until(lambda: writer._behind.bytes == c.nbytes)
    assert writer.written.behind_bytes == c.nbytes
    assert writer.written.bytes == writer.size
    assert min(writer.written.sync_ms, writer.written.read_back_ms) > 0
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), c)


def test_an_error_of_the_disk_is_left_to_the_end(tmp_path, rng, monkeypatch, names):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(write_behind, "begin_to_write", fail)
    write(tmp_path / "C.npy", np.ones((3, 3)))
    with NpyWriter(tmp_path / "D.npy", (3, 3), "f8") as writer:
        writer.array[...] = 1
        writer.finished(writer.array)
        assert until(lambda: not names())
    assert writer.written.behind_bytes == 0
    np.testing.assert_array_equal(np.load(tmp_path / "D.npy"), np.ones((3, 3)))


def test_without_more_threads_a_run_goes_on(tmp_path, two_files, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with ReadAhead(order, two_files[0], 100) as ahead:
        assert ahead.counting(None) is None
    assert ahead.reading is None
    with NpyWriter(tmp_path / "C.npy", (30, 30), "f8") as writer:
        writer.array[...] = 1
        writer.finished(writer.array)
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), np.ones((30, 30)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, HybridGemmError("no")])
def test_a_run_that_fails_leaves_no_thread_and_no_file(tmp_path, monkeypatch, names, error):
    slow = threading.Event()
    monkeypatch.setattr(write_behind, "wait_until_written", lambda *_: slow.wait(60))
    began = time.monotonic()
    with (
        pytest.raises(error if isinstance(error, type) else HybridGemmError),
        NpyWriter(tmp_path / "C.npy", (100, 100), "f8") as writer,
    ):
        writer.finished(writer.array)
        raise error
    assert time.monotonic() - began < 30
    assert not list(tmp_path.iterdir())
    slow.set()
    assert until(lambda: not names())


# --- the command --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, rng):
    """A and B in files, and C as it should be."""
    a, b = integers(rng, 600, 700), integers(rng, 700, 500)
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    return tmp_path, a @ b


def test_the_command_says_what_came_and_went(folder):
    path, c = folder
    done = command(
        "run", "A.npy", "B.npy", "-o", "C.npy", "--device", "cpu", "--json", "out.json",
        check=0, cwd=path,
    )  # fmt: skip
    np.testing.assert_array_equal(np.load(path / "C.npy"), c)
    said = json.loads((path / "out.json").read_text())["files"]
    sizes = [(path / name).stat().st_size for name in ("A.npy", "B.npy", "C.npy")]
    assert 0 <= said["read"]["disk_bytes"] <= said["read"]["bytes"] <= sum(sizes[:2])
    assert said["written"]["bytes"] == sizes[2]
    assert said["on_disk_ms"] > said["written"]["sync_ms"] > 0
    assert "read: " in done.stdout and "written: " in done.stdout


def test_bytes_of_all_repetitions_are_not_told_as_a_part_of_the_file():
    files = Files(output="C.npy", made=True, written=Written(208, 240, 1.0, 2.0, 3.0))
    assert lines(files)[0].startswith("written: 240 bytes while it ran, of a file of 208 bytes;")


def test_the_command_without_files_says_nothing_of_them(tmp_path):
    done = command(
        "run", "--size", 100, "--device", "cpu", "--json", "out.json", check=0, cwd=tmp_path
    )
    assert json.loads((tmp_path / "out.json").read_text())["files"] is None
    assert "disk" not in done.stdout


# The command, whose disk gives nothing for minutes.
STUCK = """
    import sys, time
    from hybrid_gemm import cli
    from hybrid_gemm.execution import read_ahead

    def wait(self, file, at):
        print("waiting", flush=True)
        time.sleep(200)

    read_ahead.Disk.wait = wait
    read_ahead.Disk.cached = lambda *_: False
    read_ahead.FLYING_BYTES = 0
    sys.argv[1:1] = ["run", "A.npy", "B.npy", "-o", "C.npy", "--device", "cpu"]
    cli.main()
"""


def stuck(path, *options):
    code = textwrap.dedent(STUCK)
    return subprocess.Popen(
        [sys.executable, "-c", code, *options], cwd=path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_a_disk_that_hangs_keeps_no_finished_run(folder):
    path, c = folder
    with stuck(path) as running:
        assert running.wait(100) == 0, running.stderr.read()
    np.testing.assert_array_equal(np.load(path / "C.npy"), c)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_whose_disk_hangs(folder, number):
    path, _c = folder
    with stuck(path, "--repeat", "100000") as running:  # which has not ended by then
        assert running.stdout.readline() == "waiting\n"
        running.send_signal(number)
        assert running.wait(60) == 128 + number
    assert sorted(x.name for x in path.iterdir()) == ["A.npy", "B.npy"]


@needs_mpirun
@pytest.mark.parametrize("split", ["rows", "cols"])
def test_ranks_ask_for_their_own_blocks(folder, split):
    """Rows of A and all of B, or all rows of A, of which each has half, and half the rows of B."""
    path, c = folder
    program = TESTS / "support" / "files_over_ranks.py"
    mpirun(2, program, "run", "A.npy", "B.npy", "-o", "C.npy", "--device", "cpu", "--split", split,
           cwd=path, check=0)  # fmt: skip
    np.testing.assert_array_equal(np.load(path / "C.npy"), c)
    for rank in range(2):
        asked = json.loads((path / f"asked-{rank}.json").read_text())
        for name, halved in (("A.npy", split == "rows"), ("B.npy", split == "cols")):
            size = (path / name).stat().st_size
            wanted = size // 2 if halved else size
            found = sum(count for file, _, count in asked if file == name)
            assert wanted - 128 <= found <= wanted + 2 * ASK_BYTES
