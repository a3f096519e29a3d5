"""The accuracy bench: its kinds of data, its errors, its table, files and pictures."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.devices import on
from support.tensor_cores import error_bound

from hybrid_gemm.arrays import generator
from hybrid_gemm.bench import accuracy, selection, study
from hybrid_gemm.bench.accuracy import AccuracyStudy
from hybrid_gemm.bench.kernels import KernelStudy
from hybrid_gemm.bench.study import run
from hybrid_gemm.cli import cli
from hybrid_gemm.cli.pictures import pictures
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import compute_modes
from hybrid_gemm.problem import Problem

pytestmark = pytest.mark.blas


def draw(operand, rows, cols, fill="normal"):
    return generator.generate(rows, cols, seed=3, operand=operand, fill=fill)


def made(kind, m=40, n=50, k=300):
    return accuracy.make(kind, m, n, k, draw)


def test_kinds_are_what_they_say():
    a, b = made("uniform")
    assert min(a.min(), b.min()) >= 0 and max(a.max(), b.max()) < 1
    a, b = made("ill-scaled")
    rows, cols = np.abs(a).max(axis=1), np.abs(b).max(axis=0)
    assert rows.max() / rows.min() > 2**40 and cols.max() / cols.min() > 2**40
    assert (np.abs(a).max(axis=1) / np.median(np.abs(a), axis=1) < 100).all()
    a, b = made("wide")
    assert (np.abs(a).max(axis=1) / np.median(np.abs(a), axis=1) > 2**20).all()
    a, b = made("cancelling")
    half, exact = a[:, :150].astype("f8") @ b[:150], a.astype("f8") @ b
    assert 5e-4 < np.linalg.norm(exact) / np.linalg.norm(half) < 2e-3
    a, b = made("huge")
    assert (np.abs(a).max(axis=1) == 1e8).all() and (np.abs(b).max(axis=0) == 1e8).all()
    assert np.abs(a.astype("f8") @ b).max() < 200
    for kind in accuracy.KINDS:
        a, b = made(kind)
        assert a.shape == (40, 300) and b.shape == (300, 50)
        assert a.dtype == b.dtype == np.float32 and np.isfinite(a).all() and np.isfinite(b).all()
    with pytest.raises(UsageError, match="there are normal, uniform"):
        made("odd")


@pytest.mark.usefixtures("tf32_split_of_small_products")
def test_every_way_has_a_row_with_its_errors(device):
    data = run(AccuracyStudy([(33, 34, 520)], device=device))
    ways = {row["way"] for row in data["rows"]}
    assert len(data["rows"]) == len(ways) * len(accuracy.KINDS)
    assert all(row["verdict"] == "passed" for row in data["rows"])
    assert all(row["frobenius"] > 0 and 0 < row["largest"] < 2e-3 for row in data["rows"])
    if device == "cpu":
        assert ways == {"BLAS fp32"}
        return
    assert {"fp32", "tf32", "fp32x3"} <= ways
    by = {(row["data"], row["way"]): row for row in data["rows"]}
    for kind in accuracy.KINDS:
        strict, halves, tf32 = (by[kind, way] for way in ("fp32", "fp32x3", "tf32"))
        split = "tf32" if kind in ("wide", "huge") else "fp16"
        verdict = ("fp16", "tf32").index(split)
        assert halves["largest"] <= error_bound(halves["kernel"], verdict, 520)
        if device == "emulator":  # elsewhere a small C has its k shared out, and errs less
            assert halves["largest"] < 1.2 * strict["largest"]
        assert tf32["frobenius"] > 30 * halves["frobenius"]
        assert halves["compute"] == f"fp32x3 ({split} split)"


@pytest.mark.parametrize("kind", [on("cuda")])
def test_beside_cublas(kind):
    data = run(AccuracyStudy([(256, 256, 1024)], device=kind))
    by = {(row["data"], row["way"]): row for row in data["rows"]}
    assert by["normal", "cuBLAS fp32"]["frobenius_of_cublas"] == 1
    assert by["normal", "cuBLAS tf32"]["frobenius_of_cublas"] > 100
    assert by["normal", "fp32x3"]["frobenius_of_cublas"] <= 1


def test_a_wrong_product_fails(monkeypatch):
    from hybrid_gemm.devices.cpu import CpuDevice

    def nothing(self, variant, a, b, c, **options):
        c[...] = 0

    monkeypatch.setattr(CpuDevice, "gemm", nothing)
    data = run(AccuracyStudy([(8, 8, 64)], device="cpu", data=["normal"]))
    assert [row["verdict"] for row in data["rows"]] == ["FAILED"]

    def unwritten(self, variant, a, b, c, **options):
        pass

    monkeypatch.setattr(CpuDevice, "gemm", unwritten)
    data = run(AccuracyStudy([(8, 8, 64)], device="cpu", data=["normal"]))
    assert [row["verdict"] for row in data["rows"]] == ["FAILED"]


@pytest.mark.usefixtures("tf32_split_of_small_products")
def test_what_is_off_by_more_than_rounding_fails(device, monkeypatch):
    real = study.multiply_once

    def off(opened, variant, settled, arrays, stream):
        made = real(opened, variant, settled, arrays, stream)
        arrays[2][...] *= 1.01
        return made

    monkeypatch.setattr(study, "multiply_once", off)
    rows = run(AccuracyStudy([(16, 16, 64)], device, ("uniform",)))["rows"]
    assert {row["verdict"] for row in rows} == {"FAILED"}


def test_the_command_and_its_pictures(device, tmp_path):
    table, rows, image = (str(tmp_path / name) for name in ("a.json", "a.csv", "a.svg"))
    asked = ["bench", "--accuracy", "--device", device, "--shapes", "16x16x64,16x16x128"]
    done = CliRunner().invoke(cli, [*asked, "--json", table, "--csv", rows])
    assert done.exit_code == 0, done.output
    assert "cancelling" in done.output
    data = json.loads(Path(table).read_text())
    assert data["environment"]
    with open(rows) as file:
        found = list(csv.DictReader(file))
    assert len(found) == len(data["rows"]) and set(found[0]) == set(AccuracyStudy.columns)
    assert list(pictures(data)) == [
        "accuracy-normal-uniform-cancelling",
        "accuracy-ill-scaled-wide-huge",
    ]
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(cli, ["plot", table, "accuracy-ill-scaled-wide-huge", "-o", image])
    assert done.exit_code == 0, done.output
    assert "Frobenius" in Path(image).read_text()


def test_what_does_not_go_together_is_refused():
    for option in (["--samples", "3"], ["--kernels", "blas"], ["--compute", "tf32"]):
        done = CliRunner().invoke(cli, ["bench", "--accuracy", "--device", "cpu", *option])
        assert "is not for --accuracy" in str(done.exception), done.output


# --- bench --compute ------------------------------------------------------------------------


@pytest.mark.usefixtures("tf32_split_of_small_products")
@pytest.mark.parametrize("compute", ["fp32x3", "tf32"])
@pytest.mark.parametrize("data", ["normal", "wide"])
def test_bench_times_tensor_cores(kernel_device, compute, data):
    found = run(KernelStudy(
        [], [(70, 66, 530)], device=kernel_device, compute=compute, data=data, samples=1,
        layouts=["nn", "tn"],
    ))  # fmt: skip
    own = [row for row in found["rows"] if not row["kernel"].startswith("cublas")]
    assert len(own) == 2
    for row in own:
        split = "tf32" if data == "wide" else "fp16"
        assert row["compute"] == ("tf32" if compute == "tf32" else f"fp32x3 ({split} split)")
        assert row["verdict"] == "passed" and row["time_ms"] > 0 and row["data"] == data
    if kernel_device == "cuda":
        peer = "cublas_tf32" if compute == "tf32" else "cublas"
        assert {row["kernel"] for row in found["rows"]} == {own[0]["kernel"], peer}
        assert all(row["ratio_to_cublas"] for row in own)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bench_times_narrow_operands(kernel_device, dtype):
    found = run(KernelStudy([], [(70, 66, 90)], device=kernel_device, dtypes=[dtype], samples=1))
    for row in found["rows"]:
        assert row["dtype"] == dtype and row["verdict"] == "passed"
        assert row["compute"] == f"{dtype} on tensor cores, sums in float32"
    own = [row["params"]["OUT"] for row in found["rows"] if row["kernel"] != "cublas"]
    assert own == [2]  # what ran is not the variant whose C is float32


def test_bench_refuses_what_is_not_strict(kernel_device):
    variants = selection.select(["mma", "naive"], False, {})
    found = run(KernelStudy(variants, [(20, 20, 20)], device=kernel_device, samples=1))
    notes = {row["kernel"]: row["note"] for row in found["rows"]}
    assert "give compute fp32x3 or tf32" in notes["mma"] and not notes["naive"]
    of_float64 = {"dtypes": ["float64"], "device": kernel_device, "samples": 1}
    found = run(KernelStudy(variants, [(20, 20, 20)], **of_float64))
    notes = {row["kernel"]: row["note"] for row in found["rows"]}
    assert "has no float64 form" in notes["mma"] and not notes["naive"]


def test_a_named_kernel_takes_the_terms_that_compute_asks_for():
    (variant,) = selection.select(["mma"], False, {})
    for compute, terms in (("fp32x3", 3), ("tf32", 1)):
        problem = Problem(9, 9, 9, compute=compute)
        assert compute_modes.as_asked(variant, problem).params["TERMS"] == terms
