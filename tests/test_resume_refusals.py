"""What `hybrid-gemm run --resume` refuses: the panels of another product, and other options."""

import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support import resuming
from support.resuming import KEPT, changed, counted, interrupted, journal, resume

from hybrid_gemm import catalog
from hybrid_gemm.arrays.unfinished import Unfinished
from hybrid_gemm.catalog import template
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import HybridGemmError, UsageError
from hybrid_gemm.reporting.environment import VARIABLES

folder = resuming.folder


# --- another product ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--alpha", 2], "alpha was 1.0 and is 2.0"),
        (["--panel", 20], "--panel was 30 and is 20"),
        (["--threads", 2], "--threads was None and is 2"),
        (["--split", "cols"], "--split was auto and is cols"),
        (["--compute", "auto"], "--compute was fp32 and is auto"),
        (["--kernel", "blas"], "--kernel was auto and is blas"),
        (["--algorithm", "strassen"], "--algorithm was ordinary and is strassen"),
        (["-c", "C0.npy", "--beta", 1], "C was none and is a file with SHA-256 "),
        (["--device", "emulator"], "the device was cpu with 1 workers and is emulator"),
    ],
)
def test_a_journal_of_another_product_is_refused(folder, monkeypatch, options, words):
    np.save("C0.npy", np.ones((70, 50), "f4"))
    interrupted(monkeypatch, 2)
    before = {name: Path(name).read_bytes() for name in KEPT}
    with pytest.raises(UsageError, match=words) as refused:
        resume(*options)
    assert "is of another product" in str(refused.value) and "\n" not in str(refused.value)
    assert {name: Path(name).read_bytes() for name in KEPT} == before
    assert counted(resume()) == (2, 4)


@pytest.mark.parametrize("name", ["A", "B"])
def test_other_content_of_the_same_size_and_time_is_refused(folder, monkeypatch, name):
    interrupted(monkeypatch, 2)
    status = os.stat(f"{name}.npy")
    changed(f"{name}.npy", -5)
    os.utime(f"{name}.npy", ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UsageError, match=f"{name} was a file with SHA-256 .* and is a file with"):
        resume()


def test_the_same_content_by_another_name_is_taken_up(folder, monkeypatch):
    interrupted(monkeypatch, 2)
    os.rename("A.npy", "moved.npy")
    assert counted(resume(inputs=("moved.npy", "B.npy"))) == (2, 4)


def test_other_transposes_of_square_matrices_are_refused(folder, monkeypatch, rng):
    np.save("A.npy", rng.standard_normal((40, 40)))
    interrupted(monkeypatch, 1)
    with pytest.raises(UsageError, match="--trans-a was False and is True"):
        resume("--trans-a")


def test_another_number_of_blas_threads_is_refused(folder, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    interrupted(monkeypatch, 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with pytest.raises(UsageError, match="the environment was none and is OMP_NUM_THREADS=7"):
        resume()


@pytest.fixture
def own(folder, monkeypatch):
    """The folder as one of kernels, searched by the catalog."""
    monkeypatch.setenv(catalog.VARIABLE, str(folder))
    catalog.kernels.cache_clear()
    yield
    catalog.kernels.cache_clear()


def test_a_kernel_that_was_changed_is_refused(own, monkeypatch):
    """Its text decides the bits, and its name and parameters stay."""
    path = template.write("trial")
    interrupted(monkeypatch, 2, "--kernel", "trial", device="emulator")
    path.write_text(path.read_text() + "// another\n")
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match=r"text of the kernels was SHA-256 .* and is SHA-256"):
        resume("--kernel", "trial", device="emulator")


def test_a_kernel_that_the_cpu_does_not_take_may_be_changed(own, monkeypatch):
    path = template.write("trial")
    interrupted(monkeypatch, 2)
    path.unlink()
    catalog.kernels.cache_clear()
    assert counted(resume()) == (2, 4)


def test_a_panel_that_is_multiplied_in_another_way_is_refused(tmp_path):
    """As where other memory is free, and K is cut elsewhere."""
    path = tmp_path / "C.npy"
    made = Unfinished(path, (40, 40), "f4", 20, dict)
    made.array[...] = 1
    made.finish(0, "K cut at [0]")
    made.close()
    made = Unfinished(path, (40, 40), "f4", 20, dict)
    with pytest.raises(HybridGemmError, match=r"another way \(K cut at \[0, 9\]\) than"):
        made.finish(1, "K cut at [0, 9]")
    made.close()
    assert [x["panel"] for x in journal(path).done if "panel" in x] == [0]


# --- what is asked ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--repeat", 2], "without --repeat"),
        (["--trace", "t.json"], "without --trace"),
        (["--resident"], "without --resident"),
        (["--dry-run"], "without --dry-run"),
        (["--panel", 0], "--panel 0: it takes at least 1"),
        (["--json", "C.npy.unfinished"], "was given for two outputs"),
    ],
)
def test_what_does_not_go_with_resume_is_refused(folder, options, words):
    with pytest.raises(UsageError, match=words):
        resume(*options)
    assert sorted(os.listdir()) == ["A.npy", "B.npy"]


def test_resume_needs_an_output_and_panel_needs_resume():
    for options, words in ((["--resume"], "give -o C.npy"), (["--panel", "5"], "is for --resume")):
        done = CliRunner().invoke(cli, ["run", "--size", "8", *options])
        assert isinstance(done.exception, UsageError) and words in str(done.exception)


def test_an_input_is_not_the_unfinished_file(folder):
    os.rename("A.npy", KEPT[0])
    with pytest.raises(UsageError, match="it is the input"):
        resume(inputs=(KEPT[0], "B.npy"))
