"""The times that people are told to expect on a host, and whether its memory holds the matrices."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from support.command import COMMAND, environment, python, run
from support.devices import needs

import hybrid_gemm
from hybrid_gemm.cli import inputs
from hybrid_gemm.devices import cpu_rates
from hybrid_gemm.host import cache, notes
from hybrid_gemm.planning import disk_rates, link_rates
from hybrid_gemm.planning.hardware import Disk
from hybrid_gemm.reporting import thread_report


@pytest.fixture
def rates(tmp_path, monkeypatch):
    """A cache of rates that is empty, on a host that is idle."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    notes.forget()
    forget()
    yield tmp_path / "cache" / "rates"
    forget()


def forget():
    cpu_rates.rate.cache_clear()
    cpu_rates.memory_gbps.cache_clear()


def plan(size: int, dtype: str = "float32", **options):
    return hybrid_gemm.plan(size, size, size, dtype=dtype, device="cpu", **options)


def test_a_rate_is_measured_once_and_kept(rates):
    found = cpu_rates.rate("float32", several=False)
    assert 0 < found < 100
    (file,) = rates.iterdir()
    assert json.loads(file.read_text()) == {"rate": found}
    file.write_text('{"rate": 0.25}')
    assert cpu_rates.rate("float32", several=False) == found  # in this process
    forget()
    assert cpu_rates.rate("float32", several=False) == 0.25


@pytest.mark.parametrize(
    "text", ["", "[]", *(f'{{"rate": {x}}}' for x in (-1, "NaN", '"1"', 10**400)), "[" * 10**5]
)
def test_a_damaged_rate_is_measured_again_with_a_note(rates, text, capsys):
    cpu_rates.memory_gbps()
    (file,) = rates.iterdir()
    file.write_text(text)
    forget()
    assert cpu_rates.memory_gbps() > 0
    assert f"{file} is damaged" in capsys.readouterr().err
    assert json.loads(file.read_text())["rate"] > 0


@pytest.mark.parametrize("measured", ["rates", "disks", "links"])
def test_no_folder_for_what_is_measured_is_a_note(rates, measured, monkeypatch, capsys):
    """As in a container whose file system is read-only, /tmp too."""

    def none(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    rates.parent.touch()
    monkeypatch.setattr(tempfile, "mkdtemp", none)
    monkeypatch.setattr(cache, "temporary_folders", [])
    if measured == "rates":
        assert cpu_rates.memory_gbps() > 0
    elif measured == "disks":
        disk_rates.keep(1, Disk(2.0, 3.0))
        assert disk_rates.known(1) == Disk()
    else:
        link_rates.forget()
        assert link_rates.known(("aa",)) is None
    assert "No usable temporary directory" in capsys.readouterr().err


def test_a_cache_that_takes_no_file_fails_no_run(tmp_path):
    """As on a disk that is full."""
    command = [sys.executable, "-m", "hybrid_gemm", "run", "--size", "64", "--device", "cpu"]
    ran = subprocess.run(
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *command],
        env={**os.environ, "HYBRID_GEMM_CACHE": str(tmp_path / "cache")},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0 and "verification passed" in ran.stdout, ran.stderr
    assert "cannot write to the cache folder" in ran.stderr and "File too large" in ran.stderr
    assert not list((tmp_path / "cache" / "rates").iterdir())


def test_a_busy_hosts_rate_is_kept_for_a_while(rates, monkeypatch):
    """Commands that follow each other measure once, and none later takes it for the host's."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    now = time.time()
    found = cpu_rates.rate("int32", several=True)
    (file,) = rates.iterdir()
    kept = json.loads(file.read_text())
    assert kept["rate"] == found > 0 and 0 <= kept["until"] - cpu_rates.BUSY_S - now < 60
    file.write_text(json.dumps(kept | {"rate": 0.25}))
    forget()
    assert cpu_rates.rate("int32", several=True) == 0.25
    file.write_text(json.dumps({"rate": 0.25, "until": now}))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    forget()
    assert cpu_rates.rate("int32", several=True) != 0.25
    assert json.loads(file.read_text()).keys() == {"rate"}


def test_what_is_expected_follows_from_the_rate_and_leaves_plans_alone(rates):
    planned = plan(1600)
    cpu_rates.rate("float32", several=False)
    cpu_rates.memory_gbps()
    for file in rates.iterdir():
        file.write_text('{"rate": 0.5}' if "float32" in file.name else '{"rate": 1e6}')
    forget()
    said = thread_report.expected(planned)
    assert said["predicted_ms"] == pytest.approx(2 * 1600**3 / 0.5e9)
    assert plan(1600).predicted_ms == planned.predicted_ms != said["predicted_ms"]


def no_memory(*args):
    raise MemoryError("Unable to allocate 64.0 MiB")


def no_threads(*args, **options):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("what", "name", "instead"),
    [
        (cpu_rates.np, "ones", no_memory),
        (cpu_rates, "ThreadPoolExecutor", no_threads),
        (cpu_rates, "memory_available", lambda: 2 * cpu_rates.BYTES - 1),
    ],
    ids=["memory refused", "no threads", "little memory"],
)
def test_a_host_that_cannot_be_measured_fails_no_run(
    rates, monkeypatch, capsys, what, name, instead
):
    """By then the product is there: nothing is expected of it, and a note says why."""
    monkeypatch.setattr(what, name, instead)
    assert set(thread_report.expected(plan(64)).values()) == {None}
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("hybrid-gemm: this host is not measured, so no time is expected: ")
    monkeypatch.undo()


def test_an_error_of_another_kind_is_no_lack_of_threads(rates, monkeypatch):
    def broken(*_):
        raise NotImplementedError("a fault of the program")

    monkeypatch.setattr(cpu_rates, "ThreadPoolExecutor", broken)
    with pytest.raises(NotImplementedError):
        thread_report.expected(plan(64))


def test_a_run_within_little_memory_is_reported(tmp_path):
    """Its limit leaves room for the product, and not for what measures the host's memory."""
    code = """
        import resource, sys
        from hybrid_gemm.cli import main
        from hybrid_gemm.devices import cpu_rates
        cpu_rates.BYTES = 1 << 40
        resource.setrlimit(resource.RLIMIT_AS, (1 << 39, 1 << 39))
        sys.argv[1:] = "run --size 64 --device cpu --json r.json".split()
        main()
    """
    done = python(
        "-c",
        textwrap.dedent(code),
        cwd=tmp_path,
        env={"HYBRID_GEMM_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    assert "no time is expected" in done.stderr and "verification passed" in done.stdout
    assert json.loads((tmp_path / "r.json").read_text())["of_predicted"] is None


@needs("emulator")
def test_nothing_is_expected_of_the_emulator():
    planned = hybrid_gemm.plan(16, 16, 16, device="emulator")
    assert set(thread_report.expected(planned).values()) == {None}


def test_a_dry_run_says_whether_the_hosts_memory_is_enough(tmp_path):
    small = inputs.host_memory(inputs.Inputs.of(inputs.InputRequest(size=64)), "auto")
    assert small.bytes == 3 * 64**2 * 4 and small.fits is True
    file, size = tmp_path / "plan.json", 10**6
    done = run("run", "--size", size, "--device", "cpu", "--dry-run", "--json", file, check=0)
    found = json.loads(file.read_text())["host_memory"]
    assert found["bytes"] == 3 * size**2 * 4 and found["fits"] is False
    assert "they do not fit" in done.stdout


@pytest.mark.parametrize("limit", ["-v", "-d"])
def test_what_ulimit_leaves_is_what_a_run_may_take(tmp_path, limit):
    """4 GB of it, of which the process has some already; the matrices take 4.8."""
    for more, code in ([], 1), (["--dry-run"], 0):
        command = [*COMMAND, "run", "--size", "20000", "--device", "cpu", "--verify", "off", *more]
        done = subprocess.run(
            ["bash", "-c", f'ulimit {limit} 4000000; exec "$@"', "bash", *command],
            capture_output=True, text=True, env=environment(OPENBLAS_NUM_THREADS="1"),
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "they do not fit" in done.stdout or "of host memory" in done.stderr
