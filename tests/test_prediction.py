"""The times that people are told to expect on a host, and whether its memory holds the matrices."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time

import pytest
from support.command import COMMAND, environment, python, run
from support.devices import needs

import hybrid_gemm
from hybrid_gemm.cli import inputs
from hybrid_gemm.devices import cpu_rates
from hybrid_gemm.host import cache, notes, resources
from hybrid_gemm.planning import disk_rates, link_rates
from hybrid_gemm.planning.hardware import DeviceSpec, Disk, Links
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem
from hybrid_gemm.reporting import thread_report


@pytest.fixture
def rates(tmp_path, monkeypatch):
    """A cache of rates that is empty, on a host that is idle."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    busy(monkeypatch, 0.0)
    notes.forget()
    forget()
    yield tmp_path / "cache" / "rates"
    forget()


def busy(monkeypatch, share):
    """Plays a host of whose cores' time other processes have a share."""
    monkeypatch.setattr(cpu_rates.OthersTime, "share", lambda self: share)


def forget():
    cpu_rates._during.clear()
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


def run_idle(tmp_path, *lines):
    """The command, after these lines, in a process of an idle host."""
    code = (
        "import resource, sys",
        "from hybrid_gemm.cli import main",
        "from hybrid_gemm.devices import cpu_rates",
        "cpu_rates.OthersTime.share = lambda self: 0.0",
        *lines,
        "sys.argv[1:] = 'run --size 600 --device cpu --json -'.split()",
        "main()",
    )
    cache = {"HYBRID_GEMM_CACHE": str(tmp_path / "cache")}
    done = python("-c", "\n".join(code), cwd=tmp_path, env=cache)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verify"]["passed"]
    return found, done.stderr


def test_a_cache_that_takes_no_file_fails_no_run(tmp_path):
    """As on a disk that is full."""
    found, said = run_idle(tmp_path, "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))")
    assert found["of_predicted"] > 0
    assert "cannot write to the cache folder" in said and "File too large" in said
    assert not list((tmp_path / "cache" / "rates").iterdir())


@pytest.mark.parametrize(
    ("share", "why"),
    [(0.4, "other processes had 40 % of the cores' time"), (None, "does not tell")],
)
def test_a_busy_host_is_not_measured_and_nothing_is_expected_of_it(rates, monkeypatch, share, why):
    with monkeypatch.context() as during:
        busy(during, share)
        said = thread_report.expected(plan(600))
        assert why in said["unpredicted"] and said["predicted_ms"] is said["phases_ms"] is None
        assert not rates.is_dir() or not list(rates.iterdir())
    assert thread_report.expected(plan(600))["predicted_ms"] > 0
    cpu_rates.watch()
    busy(monkeypatch, share)  # and as busy while it multiplied
    assert why in thread_report.expected(plan(600))["unpredicted"]


def test_nothing_is_expected_of_thin_products(rates):
    thin = hybrid_gemm.plan(4000, 4000, 100, device="cpu")
    assert "a side is below" in thread_report.expected(thin)["unpredicted"]
    parts = plan(1200, threads=4, split="rows")
    assert "a side is below" in thread_report.expected(parts)["unpredicted"]


def test_others_are_those_that_are_not_this_process():
    """As far as ticks tell. A child is one of them until it has ended."""
    beside = resources.OthersTime()
    spin = "import time\nwhile time.process_time() < 1: pass"
    with subprocess.Popen([sys.executable, "-c", spin]) as child:
        while child.poll() is None:
            shares = alone, had = resources.OthersTime().share(), beside.share()
            assert all(0 <= share < 1.1 for share in shares)
            time.sleep(0.02)
    assert had > 0.2 / len(os.sched_getaffinity(0)) and alone < 0.1


def test_what_is_expected_follows_from_the_rate_and_leaves_plans_alone(rates):
    planned = plan(1600)
    cpu_rates.rate("float32", several=False)
    cpu_rates.memory_gbps()
    for file in rates.iterdir():
        file.write_text('{"rate": 0.5}' if "float32" in file.name else '{"rate": 1e6}')
    forget()
    said = thread_report.expected(planned)
    assert said["unpredicted"] is None
    assert said["predicted_ms"] == pytest.approx(2 * 1600**3 / 0.5e9)
    assert plan(1600).predicted_ms == planned.predicted_ms != said["predicted_ms"]


def test_three_products_take_three_times_as_long(rates):
    one = thread_report.expected(plan(600))["predicted_ms"]
    assert thread_report.expected(plan(600), 3)["predicted_ms"] == pytest.approx(3 * one)


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
def test_a_host_that_cannot_be_measured_fails_no_run(rates, monkeypatch, what, name, instead):
    """By then the product is there: nothing is expected of it, and the result says why."""
    with monkeypatch.context() as during:
        during.setattr(what, name, instead)
        said = thread_report.expected(plan(600))
    assert said["predicted_ms"] is None
    assert said["unpredicted"].startswith("this host cannot be measured: ")


def test_an_error_of_another_kind_is_no_lack_of_threads(rates, monkeypatch):
    def broken(*_):
        raise NotImplementedError("a fault of the program")

    monkeypatch.setattr(cpu_rates, "ThreadPoolExecutor", broken)
    with pytest.raises(NotImplementedError):
        thread_report.expected(plan(600))


def test_a_run_within_little_memory_is_reported(tmp_path):
    """Its limit leaves room for the product, and not for what measures the host's memory."""
    limit = (
        "cpu_rates.BYTES = 1 << 40",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 39, 1 << 39))",
    )
    found, _said = run_idle(tmp_path, *limit)
    assert found["of_predicted"] is None
    assert "cannot be measured" in found["plan"]["unpredicted"]


@needs("emulator")
def test_nothing_is_expected_of_the_emulator():
    said = thread_report.expected(hybrid_gemm.plan(16, 16, 16, device="emulator"))
    assert "not of a GPU" in said.pop("unpredicted") and set(said.values()) == {None}


@needs("emulator")
def test_no_rate_of_the_emulator_is_shown():
    """Its kernels are in another order than a GPU's."""
    done = run("run", "--size", 64, "--device", "emulator", check=0)
    assert "total" in done.stdout and "flop" not in done.stdout.lower()
    done = run("bench", "--device", "emulator", "--kernels", "naive", "--shapes", 32, check=0)
    assert "not of a GPU" in done.stdout and "flop" not in done.stdout


def on_gpu(**known):
    links = dataclasses.replace(LINKS, **known.pop("links", {}))
    spec = DeviceSpec(
        "GPU", "cuda", 0, 80 << 30, 50.0, 3000.0, 50.0, best_tflops=60.0, rated=True, links=links
    )
    return make_plan(Problem(4096, 4096, 4096), [dataclasses.replace(spec, **known)], 1)


LINKS = Links(*[((1, 50.0),)] * 3, ((1, math.inf),), ((16, 60.0),), "2026-01-01")


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({}, None),
        ({"rated": False}, "no rate of such products is known on GPU"),
        ({"links": {"measured": ""}}, "tune --links"),
    ],
)
def test_a_prediction_on_a_gpu_holds_where_its_rates_were_measured(known, why, capsys):
    plan = on_gpu(**known)
    said = thread_report.expected(plan)
    assert (said["predicted_ms"] is None) == (why is not None)
    thread_report.print_plan(plan, "k")
    shown = capsys.readouterr().out.splitlines()[-1]
    assert why in said["unpredicted"] if why else "about" in shown and "2026-01-01" in shown
    assert ("at least" in shown) == ("links" not in known)


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
