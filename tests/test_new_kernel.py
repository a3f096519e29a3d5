"""`hybrid-gemm new-kernel`: a file that compiles, multiplies and is found."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.catalog import template
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import UsageError


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of one's own kernels, searched by the catalog."""
    monkeypatch.setenv(catalog.VARIABLE, str(tmp_path))
    catalog.kernels.cache_clear()
    yield tmp_path
    catalog.kernels.cache_clear()


def test_writes_what_the_catalog_finds(own):
    made = CliRunner().invoke(cli, ["new-kernel", "mine"])
    assert made.exit_code == 0, made.output
    assert "bench --kernels" in made.output
    kernel = catalog.get("mine")
    assert kernel.path == own / "gemm_mine.cu" and kernel.entry == "gemm_mine"
    for variant in kernel.variants():
        for dtype in kernel.dtypes:
            variant.check(dtype)


@pytest.mark.parametrize("trans", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_multiplies(own, kernel_device, rng, trans, dtype):
    template.write("mine")
    a, b, c = (rng.integers(-4, 5, s).astype(dtype) for s in ((37, 45), (45, 51), (37, 51)))
    wanted = 2 * (a @ b) + 3 * c
    a = a.T.copy() if "a" in trans else a
    b = b.T.copy() if "b" in trans else b
    for variant in catalog.get("mine").variants():
        found = hg.gemm(
            a, b, c, alpha=2, beta=3, trans_a="a" in trans, trans_b="b" in trans,
            device=kernel_device, kernel="mine", params=variant.params,
        )  # fmt: skip
        assert (found == wanted).all(), str(variant)


def test_compiles_for_a_gpu(own):
    from hybrid_gemm.devices.cuda import nvrtc
    from hybrid_gemm.errors import UnavailableError

    template.write("mine")
    for variant in catalog.get("mine").variants():
        try:
            _cubin, usage = nvrtc.compile(variant.source("float64"), "sm_90", "mine.cu")
        except UnavailableError as error:
            pytest.skip(str(error))
        assert usage.stack_bytes == 0


def test_is_in_the_ladder(own):
    from hybrid_gemm.experiments.declared import ladder

    template.write("mine")
    assert "mine" in [p.row["kernel"] for p in ladder.points("small", "emulator")]


def test_a_command_finds_it_too(own):
    template.write("gemm_mine")
    done = subprocess.run(
        [sys.executable, "-m", "hybrid_gemm", "kernels", "mine"],
        capture_output=True, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0 and "TILE 16, 8" in done.stdout


def test_never_overwrites(own):
    path = template.write("mine")
    path.write_text(path.read_text() + "// my work\n")
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match="already"):
        template.write("mine")
    with pytest.raises(UsageError, match="already"):
        template.write("naive")
    assert path.read_text().endswith("// my work\n")


@pytest.mark.parametrize("name", ["", "Mine", "1st", "my-kernel", "../mine", "a b"])
def test_names(own, name):
    with pytest.raises(UsageError, match="cannot name"):
        template.write(name)


def test_other_folders(own, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    made = CliRunner().invoke(cli, ["new-kernel", "mine", "--directory", str(elsewhere)])
    assert f"export {catalog.VARIABLE}={elsewhere}" in made.output
    with pytest.raises(UsageError, match="cannot write"):
        template.write("yours", str(elsewhere / "no"))


def test_a_folder_that_is_not_there(own, monkeypatch):
    monkeypatch.setenv(catalog.VARIABLE, str(own / "no"))
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match="no folder"):
        catalog.kernels()
