"""`compute=` from the caller's side: what runs, what it says, what is refused."""

import functools
import json

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from support.arrays import integers
from support.devices import needs, on
from support.tensor_cores import operands

import hybrid_gemm as hg
from hybrid_gemm import catalog
from hybrid_gemm.arrays.npy_files import NpyFile
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import UnavailableError, UsageError
from hybrid_gemm.execution import staging
from hybrid_gemm.kernel_choice import compute_modes
from hybrid_gemm.problem import Problem


def test_tf32_that_the_environment_makes_of_strict_fp32_is_said(monkeypatch):
    """Of cuBLAS alone, which the variable reaches."""
    problem = Problem(8, 8, 8)
    for value, said in ("1", "float32 through TF32 (NVIDIA_TF32_OVERRIDE"), ("0", "strict float32"):
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
        library, own = (catalog.get(name).variant() for name in ("cublas", "block_tile"))
        assert compute_modes.ran(library, problem).startswith(said)
        assert compute_modes.ran(own, problem) == "strict float32"
        double = Problem(8, 8, 8, "float64")
        assert compute_modes.ran(library, double) == "strict float64"


pytestmark = pytest.mark.usefixtures("without_models")


@functools.cache
def runner(kind, **options):
    return hg.Runner(device=kind, **options)


@pytest.mark.parametrize("split, threads", [("rows", 1), ("rows", 3), ("cols", 3)])
@pytest.mark.parametrize("compute", ["fp32x3", "tf32", "auto"])
def test_splits(kernel_device, rng, compute, split, threads):
    a, b = integers(rng, (140, 150)), integers(rng, (150, 66))
    here = runner(kernel_device, compute=compute, split=split, threads=threads)
    result = here.run(a, b)
    assert (result.c == a @ b).all()
    assert result.compute == ("tf32" if compute == "tf32" else "fp32x3 (fp16 split)")
    assert result.plan.problem.compute == ("tf32" if compute == "tf32" else "fp32x3")


@pytest.mark.usefixtures("tf32_split_of_small_products")
def test_the_result_names_the_split_that_was_taken(kernel_device):
    a, b, _ = operands("NaN", 20, 30, 40)
    result = runner(kernel_device, compute="fp32x3").run(a, b)
    assert result.compute.endswith("strict fp32)")  # of a device's copies in parts, one at least
    x, y, _ = operands("wide", 400, 30, 512)
    x[:200] = 1
    result = runner(kernel_device, compute="fp32x3", threads=2, split="rows").run(x, y)
    assert "tf32 split" in result.compute
    assert runner(kernel_device).run(a, b).compute == "strict float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("split, threads", [("rows", 1), ("rows", 2), ("cols", 2)])
def test_narrow_operands(device, dtype, split, threads):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-2, 3, s).astype(dtype) for s in ((61, 44), (44, 57)))
    exact = a.astype("f4") @ b.astype("f4")
    here = runner(device, split=split, threads=threads)
    result = here.run(a, b)
    assert result.c.dtype == dtype
    np.testing.assert_array_equal(result.c.astype("f4"), exact.astype(dtype).astype("f4"))
    if device != "cpu":
        assert result.compute == f"{dtype} on tensor cores, sums in float32"
    out = np.ones(exact.shape, "f4")
    np.testing.assert_array_equal(here.gemm(a, b, out, beta=2, out=out), exact + 2)
    mixed = here.run(a, b.astype("f4"))
    assert mixed.c.dtype == np.float32
    np.testing.assert_array_equal(mixed.c, exact)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("split, most", [("rows", None), ("cols", None), ("rows", 900_000)])
def test_narrow_results_are_rounded_once(kernel_device, dtype, split, most, monkeypatch):
    """C comes back in 16 bits where each element is written once. Sums over workers, and C that
    is made in turns over k, come back in 32 bits."""
    rng = np.random.default_rng(4)
    shapes = (200, 1300), (1300, 136), (200, 136)
    a, b, c = (rng.integers(-2, 3, s).astype(dtype) for s in shapes)
    exact = 0.5 * (a.astype("f4") @ b.astype("f4")) + 3 * c.astype("f4")
    options = {"threads": 2, "emulate_devices": 1, "max_device_memory": most}
    here = runner(kernel_device, split=split, **options)
    downloaded, download = [], staging.Link.download

    def recorded(link, dst, src, *arguments):
        downloaded.append(src.dtype)
        download(link, dst, src, *arguments)

    monkeypatch.setattr(staging.Link, "download", recorded)
    out = np.full(exact.shape, np.nan, dtype)
    result = here.run(a, b, c, alpha=0.5, beta=3, out=out)
    np.testing.assert_array_equal(out.astype("f4"), exact.astype(dtype).astype("f4"))
    chunks = max(len(w.chunks) for w in result.plan.workers)
    assert (chunks > 1) == (most is not None)
    assert set(downloaded) == {np.dtype(dtype if split == "rows" and not most else "float32")}
    downloaded.clear()
    c = c.astype("f4") + 0.25  # which 16 bits may not hold
    here.run(a, b, c, alpha=0.5, beta=3, out=out)
    np.testing.assert_array_equal(out.astype("f4"), (exact + 0.75).astype(dtype).astype("f4"))
    assert set(downloaded) == {np.dtype("float32")}


@needs("cuda")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kernel", ["cublas", "own", "auto"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "m, n, k", [(17, 852, 40242), (5135, 3, 7177), (298, 33, 173287), (66, 286, 76422)]
)
def test_sums_of_parts_of_k_stay_in_float32(m, n, k, dtype, kernel, turned):
    import cupy

    # The parts of k sum to large numbers and all of it to 1, which sums of 16 bits would not give.
    column = np.ones(k)
    column[: (k - 1) // 2] = -1
    column[-1] = k % 2
    a, b = np.ones((m, k), dtype), np.repeat(column.astype(dtype)[:, None], n, 1)
    if turned:
        a, b = (cupy.asarray(np.ascontiguousarray(x.T)).T for x in (a, b))
    else:
        a, b = cupy.asarray(a), cupy.asarray(b)
    done = hg.gemm(a, b, device="cuda", gpus=[0], kernel=kernel)
    assert (done.get().astype("f4") == 1).all()


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_device_arrays_are_multiplied_where_they_lie(dtype):
    import cupy

    here = hg.Runner(device="cuda", gpus=[0])
    host = np.random.default_rng(0).integers(-2, 3, (96, 96)).astype(dtype)
    a = cupy.asarray(host)
    for x in (a, a.T, a[1:, 1:]):  # the last does not begin on 16 bytes
        exact = x.get().astype("f4") @ x.get().astype("f4")
        for out in (None, cupy.empty(x.shape, "f4")):
            done = here.gemm(x, x, out=out)
            np.testing.assert_array_equal(done.get().astype("f4"), exact.astype(done.dtype))
    wide = cupy.asarray(host.astype("f4"))
    done = hg.gemm(wide, wide, compute="fp32x3")
    np.testing.assert_array_equal(done.get(), host.astype("f4") @ host.astype("f4"))


@pytest.mark.parametrize(
    "kernel, dtype, compute",
    [
        ("mma", "float32", "fp32x3"),
        ("mma_in_place", "float32", "tf32"),
        ("mma", "bfloat16", "fp32"),
        ("outer_narrow", "float16", "fp32"),
        ("residues_mma", "float64", "fp64x"),
    ],
)
def test_a_named_kernel_leaves_c_where_nothing_is_multiplied(kernel_device, kernel, dtype, compute):
    """C = beta C, where k or alpha is 0: as other kernels give it."""
    how = {"device": kernel_device, "kernel": kernel, "compute": compute, "beta": 2}
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for k, alpha in (0, 1), (3, 0):
        a, b, c = (np.ones(shape, dtype) for shape in ((4, k), (k, 5), (4, 5)))
        for threads in 1, 2:
            got = hg.gemm(a, b, c, alpha=alpha, threads=threads, **how)
            np.testing.assert_array_equal(got, np.full((4, 5), 2, dtype))


def test_strassen_over_tensor_cores(kernel_device, rng):
    a, b = integers(rng, (72, 80)), integers(rng, (80, 67))
    options = {"algorithm": "strassen", "levels": 1}
    for compute in ("fp32x3", "tf32"):
        found = hg.gemm(a, b, device=kernel_device, compute=compute, **options)
        assert (found == a @ b).all()
    narrow = a.astype("f2"), b.astype("f2")
    result = runner(kernel_device, **options).run(*narrow)
    assert result.compute == "strict float32"


def test_an_unavailable_compute_mode_is_refused_by_name(rng):
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    for compute in ("fp32x3", "tf32"):
        with pytest.raises(UnavailableError, match=f"{compute} needs tensor cores.*is cpu"):
            hg.gemm(a, b, device="cpu", compute=compute)
    result = runner("cpu", compute="auto").run(a, b)
    assert result.compute == "strict float32" and (result.c == a @ b).all()
    with pytest.raises(UsageError, match="there are fp32, fp32x3, tf32, fp64x and auto"):
        hg.gemm(a, b, device="cpu", compute="fp8")


@pytest.mark.parametrize(
    ("arch", "takes"),
    [(75, "fp32"), (80, "fp32x3"), (86, "fp32"), (89, "fp32"), (90, "fp32x3"), (100, "fp32x3"),
     (103, "fp32x3"), (120, "fp32"), (121, "fp32")],
)  # fmt: skip
def test_auto_takes_fp32x3_where_tensor_cores_are_fast_enough_for_it(arch, takes):
    """Three products on tensor cores are to take less time than one outside them."""
    auto = compute_modes.arithmetic_for("auto", None, kind="cuda", arch=arch)
    assert auto.settle(Problem(500, 600, 700)).compute == takes
    if arch >= 80:
        asked = compute_modes.arithmetic_for("fp32x3", None, kind="cuda", arch=arch)
        assert asked.settle(Problem(500, 600, 700)).compute == "fp32x3"
        assert auto.takes(auto.settle(Problem(500, 600, 700, operands="float16")))


def test_names_that_do_not_go_together():
    mma, naive = catalog.get("mma").variant(), catalog.get("naive").variant()
    wgmma = catalog.get("wgmma").variant()
    cuda = {"kind": "cuda"}
    with pytest.raises(UsageError, match=r"naive does not use them; mma does"):
        compute_modes.arithmetic_for("tf32", naive, kind="emulator", arch=0)
    with pytest.raises(UnavailableError, match=r"wgmma needs .* 9\.0; .* 8\.0: mma works"):
        compute_modes.arithmetic_for("tf32", wgmma, arch=80, **cuda)
    with pytest.raises(UnavailableError, match=r"wgmma needs .* 10\.0: mma works"):
        compute_modes.arithmetic_for("tf32", wgmma, arch=100, **cuda)
    with pytest.raises(UnavailableError, match=r"capability 7\.5"):
        compute_modes.arithmetic_for("fp32x3", None, arch=75, **cuda)
    assert compute_modes.arithmetic_for("auto", None, arch=75, **cuda).variant is None
    assert compute_modes.arithmetic_for("fp32x3", None, arch=90, **cuda).variant.name == "wgmma"
    assert compute_modes.arithmetic_for("fp32x3", None, arch=89, **cuda).variant.name == "mma"
    residues = catalog.get("residues_mma").variant()
    emulator = {"kind": "emulator", "arch": 0}
    with pytest.raises(UsageError, match="compute is fp32: give float64 and compute fp64x"):
        compute_modes.arithmetic_for("fp32", residues, **emulator)
    with pytest.raises(UsageError, match="compute is tf32: kernel mma multiplies float32 in that"):
        compute_modes.arithmetic_for("tf32", residues, **emulator)
    with pytest.raises(UsageError, match="kernel residues_mma multiplies float64 in that"):
        compute_modes.arithmetic_for("fp64x", mma, **emulator)
    for dtype in "float32", "int32":  # which the named kernel multiplies in no arithmetic
        with pytest.raises(UsageError, match=rf"this product is in {dtype}: convert with \.astype"):
            compute_modes.arithmetic_for("fp64x", residues, **emulator).settle(
                Problem(5, 6, 7, dtype)
            )
    with pytest.raises(UsageError, match=r"its own arithmetic: convert with \.astype"):
        compute_modes.arithmetic_for("tf32", mma, **emulator).settle(Problem(5, 6, 7, "float64"))
    problem = Problem(5, 6, 7)
    with pytest.raises(UsageError, match="not in fp32; give compute fp32x3 or tf32"):
        compute_modes.arithmetic_for("fp32", mma, kind="emulator", arch=0).settle(problem)
    with pytest.raises(UsageError, match="tf32 is for float32; this product is in float64"):
        compute_modes.arithmetic_for("tf32", None, kind="emulator", arch=0).settle(
            Problem(5, 6, 7, "float64")
        )
    integer = compute_modes.arithmetic_for("auto", None, kind="emulator", arch=0).settle(
        Problem(5, 6, 7, "int32")
    )
    assert integer.compute == "fp32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_library_reads_16_bits_where_it_runs(dtype):
    cublas = catalog.get("cublas").variant()
    posed = Problem(9, 8, 7, operands=dtype, out_dtype=dtype)
    for kind, arch in ("cuda", 90), ("cuda", 75), ("emulator", 0), ("cpu", 0):
        arithmetic = compute_modes.arithmetic_for("fp32", cublas, kind=kind, arch=arch)
        read = arithmetic.settle(posed).operands
        assert read == (dtype if arch == 90 else "float32")
    a = np.ones((4, 4), dtype)
    for device in ("cpu", "emulator"):
        with pytest.raises(UsageError, match="cublas"):
            hg.gemm(a, a, device=device, kernel="cublas")


def test_dtypes_without_a_common_one_are_refused():
    with pytest.raises(TypeError, match="no dtype holds both float16 and bfloat16"):
        hg.gemm(np.ones((2, 3), "f2"), np.ones((3, 2), "bfloat16"), device="cpu")


def test_bfloat16_files(tmp_path):
    matrix = np.arange(6).reshape(2, 3).astype("bfloat16")
    np.save(tmp_path / "A.npy", matrix)
    found = NpyFile(tmp_path / "A.npy").array
    assert found.dtype == "bfloat16" and (found == matrix).all()


@pytest.mark.parametrize("kind", [on("emulator"), on("cuda")])
def test_the_command(kind, tmp_path):
    options = ["--device", kind, "--verify", "full", "--json", "-"]
    sizes = ["-m", "70", "-n", "67", "-k", "90"]
    said = {
        "--compute fp32x3": "fp32x3 (fp16 split)", "--compute tf32": "tf32",
        "--dtype bfloat16": "bfloat16 on tensor cores, sums in float32",
        "--compute fp32": "strict float32",
    }  # fmt: skip
    for asked, compute in said.items():
        made = CliRunner().invoke(cli, ["run", *sizes, *asked.split(), *options])
        assert made.exit_code == 0, made.output
        found = json.loads(made.stdout)
        assert found["compute"] == compute and found["verify"]["passed"]
    out = str(tmp_path / "C.npy")
    made = CliRunner().invoke(cli, ["run", *sizes, "--dtype", "bfloat16", "-o", out, *options])
    assert made.exit_code == 0, made.output
    assert NpyFile(out).array.dtype == "bfloat16"
