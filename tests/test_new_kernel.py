"""`hybrid-gemm new-kernel`: a file that compiles, multiplies and is found."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner
from support.command import one_line, python, run
from support.devices import needs

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.bench import kernels, search, selection, study
from hybrid_gemm.catalog import files, template
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import HybridGemmError, UsageError
from hybrid_gemm.host import notes
from hybrid_gemm.kernel_choice import costs, on_gpu
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.problem import Problem


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of one's own kernels, searched by the catalog."""
    monkeypatch.setenv(catalog.VARIABLE, str(tmp_path))
    catalog.kernels.cache_clear()
    yield tmp_path
    catalog.kernels.cache_clear()


def limited(path, limit):
    path.write_text(path.read_text().replace("tile ", f'limits = ["{limit}"]\ntile ', 1))
    catalog.kernels.cache_clear()


def test_writes_what_the_catalog_finds(own):
    made = CliRunner().invoke(cli, ["new-kernel", "trial"])
    assert made.exit_code == 0, made.output
    assert "bench --kernels" in made.output
    kernel = catalog.get("trial")
    assert kernel.path == own / "gemm_trial.cu" and kernel.entry == "gemm_trial"
    for variant in kernel.variants():
        for dtype in kernel.dtypes:
            variant.check(dtype)


@pytest.mark.parametrize("trans", ["", "a", "b", "ab"])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_multiplies(own, kernel_device, rng, trans, dtype):
    template.write("trial")
    a, b, c = (rng.integers(-4, 5, s).astype(dtype) for s in ((37, 45), (45, 51), (37, 51)))
    wanted = 2 * (a @ b) + 3 * c
    a = a.T.copy() if "a" in trans else a
    b = b.T.copy() if "b" in trans else b
    for variant in catalog.get("trial").variants():
        found = hg.gemm(
            a, b, c, alpha=2, beta=3, trans_a="a" in trans, trans_b="b" in trans,
            device=kernel_device, kernel="trial", params=variant.params,
        )  # fmt: skip
        assert (found == wanted).all(), str(variant)


def test_compiles_for_a_gpu(own):
    from hybrid_gemm.devices.cuda import nvrtc
    from hybrid_gemm.errors import UnavailableError

    template.write("trial")
    for variant in catalog.get("trial").variants():
        try:
            _cubin, usage = nvrtc.compile(variant.source("float64"), "sm_90", "trial.cu")
        except UnavailableError as error:
            pytest.skip(str(error))
        assert usage.stack_bytes == 0


@pytest.mark.parametrize(("limit", "takes"), [("1", True), ("k % 8 == 0", True), ("k < 8", False)])
def test_is_in_the_ladder(own, limit, takes):
    from hybrid_gemm.experiments.declared import ladder

    limited(template.write("trial"), limit)
    assert ("trial" in [p.row["kernel"] for p in ladder.points("small", "emulator")]) == takes


def test_a_command_finds_it_too(own):
    template.write("gemm_trial")
    done = subprocess.run(
        [sys.executable, "-m", "hybrid_gemm", "kernels", "trial"],
        capture_output=True, text=True, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0 and "TILE 16, 8" in done.stdout


def test_never_overwrites(own):
    path = template.write("trial")
    path.write_text(path.read_text() + "// my work\n")
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match="already"):
        template.write("trial")
    with pytest.raises(UsageError, match="already"):
        template.write("naive")
    assert path.read_text().endswith("// my work\n")
    link = path.with_name("gemm_linked.cu")
    link.symlink_to("on a disk that is not mounted now")
    with pytest.raises(UsageError, match="exists"):
        template.write("linked")
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["auto", "own", "gemm_own"])
def test_names_with_another_meaning(own, name):
    with pytest.raises(UsageError, match="lets kernels be chosen; give the kernel another name"):
        template.write(name)


@pytest.mark.parametrize("name", ["", "Mine", "1st", "my-kernel", "../mine", "a b"])
def test_names(own, name):
    with pytest.raises(UsageError, match="cannot name"):
        template.write(name)


def test_other_folders(own, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    made = CliRunner().invoke(cli, ["new-kernel", "trial", "--directory", str(elsewhere)])
    assert f"export {catalog.VARIABLE}={elsewhere}" in made.output
    folder = elsewhere / "made" / "here"
    assert template.write("yours", str(folder)).parent == folder
    (elsewhere / "file").touch()
    for given, says in (
        (elsewhere / "file" / "no", "cannot make the folder .* Not a directory"),
        (elsewhere / "file", "is no folder; name one"),
        (elsewhere / ("x" * 300), "cannot make the folder .* File name too long"),
        ("", "'' names no folder"),
    ):
        with pytest.raises(UsageError, match=says):
            template.write("theirs", str(given))


def test_the_printed_export_is_for_a_shell(own, tmp_path_factory):
    folder = tmp_path_factory.mktemp("my kernels")
    export = template.next_steps("trial", template.write("trial", str(folder))).split("\n")[0]
    shown = subprocess.run(
        ["sh", "-c", f'{export}; printf %s "${catalog.VARIABLE}"'], capture_output=True, text=True
    )
    assert shown.stdout == f"{folder}:{own}"


def test_a_full_disk_leaves_nothing(own, monkeypatch):
    replace = os.replace

    def fail(*_names):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(HybridGemmError, match=r"could not write .*gemm_trial.cu: No space left"):
        template.write("trial")
    assert os.listdir(own) == []
    monkeypatch.setattr(os, "replace", replace)
    template.write("trial")


def test_a_folder_that_is_not_there(own, monkeypatch):
    monkeypatch.setenv(catalog.VARIABLE, str(own / "no"))
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match="no folder"):
        catalog.kernels()


# --- files that are no kernels ------------------------------------------------------------


def test_a_bad_file_beside_the_projects_kernels_breaks_nothing_else(tmp_path, monkeypatch, capsys):
    """In a checkout, new kernels are written there."""
    folder = tmp_path / "kernels"
    shutil.copytree(files.directory(), folder)
    (folder / "gemm_trial.cu").write_text("/*---\nsumary = 'x'\n---*/\n")
    monkeypatch.setattr(files, "directory", lambda: folder)
    notes.forget()
    catalog.kernels.cache_clear()
    try:
        assert "naive" in catalog.kernels() and "trial" not in catalog.kernels()
    finally:
        catalog.kernels.cache_clear()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "gemm_trial.cu is left out" in said and "sumary" in said


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            'entry   = "gemm_trial"',
            'entry   = "gemm_other"',
            "entry is 'gemm_other', .* has no extern",
        ),
        (
            'extern "C" __global__',
            "__global__",
            "entry is 'gemm_trial', and the text has no extern",
        ),
        ("rung    = 99", "rung    = = 99", "Invalid value"),
        (
            '"ceil(n / TILE)"',
            '"ceil(n / TILE"',
            r"cannot evaluate 'ceil\(n / TILE': [^<]*never closed$",
        ),
        ('"ceil(n / TILE)"', '"ceil(n / (TILE - 16))"', "by zero"),
    ],
)
def test_what_is_asked_for_and_no_kernel_says_why(own, old, new, says):
    path = template.write("trial")
    assert catalog.get("trial").path == path
    path.write_text(path.read_text().replace(old, new, 1))
    catalog.kernels.cache_clear()
    with pytest.raises(UsageError, match=f"gemm_trial.cu holds no kernel: .*{says}"):
        catalog.get("trial")


def test_an_entry_may_stand_in_a_block(own):
    path = template.write("trial")
    block = 'extern "C" {\n__device__ int one() { return 1; }\n__global__'
    text = path.read_text().replace('extern "C" __global__', block, 1)
    path.write_text(text + "}  // extern\n")
    catalog.kernels.cache_clear()
    assert catalog.get("trial").path == path


@pytest.mark.parametrize(
    ("limit", "beyond"), [("k % 8 == 0", (64, 64, 63)), ("k * SIZE <= 4096", (64, 64, 2000))]
)
def test_a_kernel_with_limits_leaves_auto_a_choice(own, limit, beyond):
    limited(template.write("trial"), limit)
    mine, gpu = catalog.get("trial").variant(), Machine("a GPU without a model", 82, 86, 10.0)
    assert mine.kernel.limits == (limit,)
    for sides in ((64, 64, 64), beyond):
        assert on_gpu.strict(gpu, Problem(*sides, "int32"))[0]
    inside, outside = (costs.counts(mine, x, "nn", "int32", 82) for x in ((64, 64, 64), beyond))
    assert any(inside) and not any(outside) and len(inside) == len(outside)


def test_a_search_that_times_nothing_fails(own):
    template.write("trial")
    done = CliRunner().invoke(cli, ["tune", "--kernel", "trial", "--device", "cpu"])
    assert isinstance(done.exception, HybridGemmError)
    assert "nothing could be timed: kernel trial does not run on the cpu" in str(done.exception)


def test_a_kernel_that_does_not_compile_is_a_row_of_bench(own, kernel_device):
    path = template.write("trial")
    path.write_text(path.read_text().replace("T sum[PER] = {};", "T sum[PER] = {", 1))
    catalog.kernels.cache_clear()
    mine = selection.select(["trial", "naive"], False, {}, kernel_device)
    data = study.run(kernels.KernelStudy(mine, [(32, 32, 32)], device=kernel_device, samples=1))
    wrong, right = data["rows"]
    assert "does not compile" in wrong["note"] and wrong["time_ms"] is None
    assert right["verdict"] == "passed"


def test_a_variant_with_too_much_shared_memory_is_a_row_of_bench(kernel_device):
    """As some in the space of tuned have, which `tune --kernel tuned` passes over."""
    tuned = catalog.get("tuned")
    both = [tuned.variant({"BK": 32, "STAGES": stages}) for stages in (5, 4)]
    assert both[0].launch(64, 64, 64, "float32").shared_bytes > 227 << 10
    data = study.run(kernels.KernelStudy(both, [(64, 64, 64)], device=kernel_device, samples=1))
    wrong, right = data["rows"]
    assert "256000 bytes of dynamic shared memory" in wrong["note"] and wrong["time_ms"] is None
    assert right["verdict"] == "passed"


# --- the space of parameters --------------------------------------------------------------


def params(name: str, most: int = search.MOST) -> list[dict]:
    return [dict(v.params) for v in search.space(catalog.get(name), most)]


def test_the_space_is_what_the_header_declares_and_its_rules_allow(own):
    path = template.write("trial")
    path.write_text(path.read_text().replace("[1, 2, 4, 8]", "[1, 2, 4, 16]"))
    catalog.kernels.cache_clear()
    found = params("trial")
    assert found[:4] == [dict(v.params) for v in catalog.get("trial").variants()]
    assert {"TILE": 32, "PER": 4} in found and {"TILE": 32, "PER": 16} not in found  # too large
    assert len(found) == len({tuple(x.items()) for x in found}) == 11
    path.write_text(path.read_text().replace("space   =", "# space ="))
    catalog.kernels.cache_clear()
    assert {"TILE": 8, "PER": 4} in params("trial")  # of the listed values
    assert {"TILE": 8, "PER": 8} not in params("trial")


def test_of_a_large_space_what_is_near_the_listed_variants(own):
    template.write("trial")
    near = params("trial", 10)
    assert {"TILE": 16, "PER": 8} in near and {"TILE": 8, "PER": 8} in near
    assert {"TILE": 32, "PER": 1} in near and {"TILE": 32, "PER": 8} not in near
    assert len(near) == 11


def test_a_changed_file_is_read_after_free_memory_and_a_new_one_at_once(own):
    """In a notebook, whose process goes on, a kernel was edited and the old one multiplied."""
    path = template.write("trial")
    before = catalog.get("trial")
    path.write_text(before.path.read_text() + "// changed\n")
    hg.free_memory()
    after = catalog.get("trial")
    assert after.text == before.text + "// changed\n" and after != before
    hg.free_memory()
    assert catalog.get("trial") is after, "nothing changed, so nothing is read"
    path.with_name("gemm_late.cu").write_text(path.read_text().replace("gemm_trial", "gemm_late"))
    assert catalog.get("late").name == "late"
    path.unlink()
    hg.free_memory()
    with pytest.raises(UsageError, match="no kernel is called 'trial'"):
        catalog.get("trial")


def test_a_wrong_space_is_left_out_with_its_reason(own, capsys):
    path = template.write("trial")
    for space, says in (
        ("{TILES = [8]}", "space names 'TILES'"),
        ("{TILE = 8}", "space cannot be"),
    ):
        line = next(x for x in path.read_text().splitlines() if x.startswith("space"))
        path.write_text(path.read_text().replace(line, f"space = {space}"))
        notes.forget()
        catalog.kernels.cache_clear()
        assert "trial" not in catalog.kernels() and says in capsys.readouterr().err


def test_tune_searches_the_space_of_one_kernel(own, kernel_device):
    path = template.write("trial")
    path.write_text(path.read_text().replace("[8, 16, 32], PER = [1, 2, 4, 8]", "[16], PER = [2]"))
    catalog.kernels.cache_clear()
    done = CliRunner().invoke(cli, [
        "tune", "--kernel", "trial", "--device", kernel_device, "--samples", "1", "--shapes", "32",
        "--json", str(own / "found.json"),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "fastest at 32 x 32 x 32 float32: TILE=" in done.output
    rows = json.loads((own / "found.json").read_text())["rows"]
    assert all(row["verdict"] == "passed" for row in rows)
    assert [row["time_ms"] for row in rows] == sorted(row["time_ms"] for row in rows)
    assert len(rows) == len(params("trial"))


@pytest.mark.parametrize(("name", "dtype"), [("mma", "float16"), ("mma_double", "float64")])
def test_a_kernel_without_float32_is_tuned_in_its_first_dtype(
    name, dtype, kernel_device, monkeypatch
):
    """In a few variants of its space, which are compiled."""
    whole = search.space
    monkeypatch.setattr(search, "space", lambda *given, **more: whole(*given, **more)[:3])
    done = CliRunner().invoke(cli, [
        "tune", "--kernel", name, "--device", kernel_device, "--samples", "1", "--shapes", "8",
        "--json", "-",
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert {row["dtype"] for row in json.loads(done.stdout)["rows"]} == {dtype}


def test_a_part_of_products_is_not_tuned():
    done = CliRunner().invoke(cli, ["tune", "--kernel", "wgmma_across"])
    assert "multiplies nothing by itself" in str(done.exception)


def test_tune_of_a_kernel_refuses_what_is_for_the_table():
    for option in (["--quick"], ["-o", "t.json"], ["--links"]):
        done = CliRunner().invoke(cli, ["tune", "--kernel", "naive", *option])
        assert isinstance(done.exception, UsageError)


@needs("emulator")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_kernel_that_crashes_says_how_to_find_the_line(own, threads):
    """A crash of another cause, of this process or another kernel, is none of it."""
    path = template.write("mine")
    text = path.read_text()
    path.write_text(text.replace("store(C + row", "store(C + (1LL << 40) * (row + 1)"))
    assert path.read_text() != text
    options = "--size", 40, "--device", "emulator", "--threads", threads
    done = run("run", "--kernel", "mine", *options, "-q", HYBRID_GEMM_KERNELS=str(own))
    assert done.returncode == -signal.SIGSEGV
    assert "outside its memory" in (said := one_line(done)) and "--check" in said
    code = """
        import os, signal
        import hybrid_gemm as hg, numpy as np
        hg.gemm(np.eye(3), np.eye(3), device="emulator")
        os.kill(os.getpid(), signal.SIGSEGV)
        os.kill(os.getpid(), signal.SIGSEGV)
    """
    done = python("-c", textwrap.dedent(code))
    assert done.returncode == -signal.SIGSEGV and done.stderr == ""
