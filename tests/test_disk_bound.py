"""What disks take of a product from files, as terms of the bound and of the prediction."""

import dataclasses
import json

import numpy as np
import pytest
from support.command import run as command

from hybrid_gemm import Runner
from hybrid_gemm.arrays.npy_files import Written
from hybrid_gemm.execution.read_ahead import Reading
from hybrid_gemm.host import notes
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.problem import Problem
from hybrid_gemm.reporting import thread_report
from hybrid_gemm.reporting.file_report import Files


@pytest.fixture
def rates(tmp_path, monkeypatch):
    """No rate of a disk is known yet."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "A.npy").write_bytes(bytes(1000))
    return Files((str(tmp_path / "A.npy"),), str(tmp_path / "C.npy"), 4 << 30)


MIB = 1 << 20


def seen(files, read_ms=1e3, write_ms=1e3):
    """After a run that read and wrote 100 MiB in so many ms."""
    return dataclasses.replace(
        files, made=True, reading=Reading(120 * MIB, 100 * MIB, read_ms), on_disk_ms=5e3,
        written=Written(100 * MIB, 100 * MIB, write_ms, 10.0, 10.0),
    )  # fmt: skip


def on_gpu(size=4096):
    """A plan for a GPU whose rates are known."""
    spec = DeviceSpec(
        "GPU", "cuda", 0, 80 << 30, 50.0, 3000.0, 50.0, best_tflops=60.0, rated=True
    )  # fmt: skip
    problem = Problem(size, size, size, "float32")
    return make_plan(problem, [spec], 1, resident=True)


def test_a_slow_disk_is_the_bound(rates):
    plan = on_gpu()
    alone = thread_report.expected(plan)
    assert alone["bound_by"] == "compute"
    slow = seen(rates, read_ms=20e3)
    said = thread_report.expected(plan, 1, slow)
    assert said["bound_by"] == "disk out"  # 4 GiB at 0.1 GB/s
    assert said["bounds_ms"]["disk in"] == pytest.approx(20e3)
    assert said["predicted_ms"] == pytest.approx(20e3 + alone["predicted_ms"] / 8)
    little = dataclasses.replace(slow, bytes_out=MIB)
    said = thread_report.expected(plan, 1, little)
    assert (said["bound_by"], said["bound_ms"]) == ("disk in", pytest.approx(20e3))


def test_a_fast_disk_is_not_the_bound(rates):
    fast = dataclasses.replace(seen(rates, 0.01, 0.01), bytes_out=MIB)
    said = thread_report.expected(on_gpu(), 1, fast)
    assert said["bound_by"] == "compute"
    assert {"disk in", "disk out"} < said["bounds_ms"].keys()


def test_what_is_not_known_is_left_out_and_said(rates, capsys):
    said = thread_report.expected(on_gpu(), 1, rates)
    assert said["bounds_ms"].keys() == {"compute"}
    thread_report.print_plan(on_gpu(), "k", files=rates)
    assert "at least" not in capsys.readouterr().out
    assert "rate of writing is not known" in (why := said["unpredicted"]) and why == rates.unknown
    assert said["predicted_ms"] is None and Files().unknown == ""
    few = dataclasses.replace(rates, reading=Reading(MIB, MIB, 5.0), made=True)
    assert "disk in" not in thread_report.expected(on_gpu(), 1, few)["bounds_ms"]
    cached = dataclasses.replace(rates, reading=Reading(MIB, 0, 5.0), made=True)
    assert "reading" not in cached.unknown  # nothing came from the disk


def test_what_a_run_sees_is_kept_for_the_next_plan(rates):
    seen(rates, read_ms=2e3, write_ms=4e3).keep()
    source, target = rates.disks
    assert source.read_gbps == pytest.approx(100 * MIB / 2e9)
    assert target.write_gbps == pytest.approx(100 * MIB / 4e9)
    assert rates.unknown == ""
    seen(rates, read_ms=9e3, write_ms=1e3).keep()  # the better ones stay
    source, target = dataclasses.replace(rates).disks
    assert source.read_gbps == pytest.approx(100 * MIB / 2e9)
    assert target.write_gbps == pytest.approx(100 * MIB / 1e9)


@pytest.mark.parametrize(
    "text", ["", "[]", *(f'{{"read_gbps": {x}, "write_gbps": 1}}' for x in (-1, 10**400))]
)
def test_a_damaged_table_of_rates_is_left_out(rates, text, capsys, tmp_path):
    seen(rates).keep()
    (file,) = (tmp_path / "cache" / "disks").iterdir()
    file.write_text(text)
    notes.forget()
    assert "is not known" in rates.unknown
    assert f"{file} is no table" in capsys.readouterr().err


def test_the_result_is_held_against_when_c_was_on_the_disk(rates, capsys):
    c = np.ones((8, 8), "f4")
    with Runner(device="cpu") as runner:
        result = runner.run(c, c)
    files = seen(rates, write_ms=2e3)
    data = thread_report.result_data(result, None, [result.total_ms], files)
    assert data["plan"]["bound_by"] == "disk out"
    assert data["of_bound"] == pytest.approx(5e3 / data["plan"]["bound_ms"])
    thread_report.print_result(result, None, "cpu", files)
    said = capsys.readouterr().out
    assert "100 MiB from the disk, 20 MiB from the cache" in said
    assert "the bound (" in said and "by disk out" in said
    files = dataclasses.replace(files, on_disk_ms=11 * data["plan"]["bound_ms"])
    thread_report.print_result(result, None, "cpu", files)
    assert "bound" not in capsys.readouterr().out  # far from it something else decides


def test_a_dry_run_has_the_disk_in_its_bound(rates, tmp_path):
    """At rates that an earlier run saw, if none of the files is in the cache."""
    seen(rates).keep()
    for name in ("A.npy", "B.npy"):
        np.save(tmp_path / name, np.ones((500, 500), "f4"))
    words = ["run", "A.npy", "B.npy", "-o", "C.npy", "--device", "cpu", "--dry-run"]
    done = command(
        *words, "--json", "-", check=0, cwd=tmp_path, HYBRID_GEMM_CACHE=str(tmp_path / "cache")
    )
    bounds = json.loads(done.stdout)["plan"]["bounds_ms"]
    assert bounds["disk in"] == pytest.approx((2 * 500 * 500 * 4 + 256) / (100 * MIB) * 1e3)
    assert bounds["disk out"] == pytest.approx(500 * 500 * 4 / (100 * MIB) * 1e3)
