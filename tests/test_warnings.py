"""What has no effect, or another than it seems, is said; and what --check finds in kernels."""

import io
import warnings

import numpy as np
import pytest
from click.testing import CliRunner
from support.command import one_line, run, run_checked
from support.devices import needs

import hybrid_gemm
from hybrid_gemm.catalog import template
from hybrid_gemm.cli import cli
from hybrid_gemm.errors import DTypeError, HybridGemmWarning, UsageError
from hybrid_gemm.reporting import thread_report

ONES = np.ones((4, 4), "f4")


class Frame:
    """As much of a DataFrame as is needed to lose its index."""

    iloc = None

    def __array__(self, dtype=None, copy=None):
        return ONES.astype(dtype or "f4")


class Quantity(np.ndarray):
    """As much of astropy's as is needed to lose its unit."""

    unit = "m"


class Sparse:
    """As much of SciPy's matrices as shows that they are sparse."""

    def toarray(self):
        return ONES


def archive(**arrays):
    """What `numpy.load` gives of a .npz file."""
    np.savez(file := io.BytesIO(), **arrays)
    file.seek(0)
    return np.load(file)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((np.ma.masked_array(ONES, ONES > 0), ONES), {}, "A is a masked array, and its mask is"),
        ((ONES, Frame()), {}, "B is a Frame, which loses its labels or units"),
        ((ONES.view(Quantity), ONES), {}, "A is a Quantity, which loses its labels or units"),
        ((ONES, ONES), {"out": ONES.copy().view(Quantity)}, "out is a Quantity, which keeps its"),
        ((ONES, ONES, ONES.astype("f8")), {"beta": 1}, "returned in float64"),
        ((ONES, ONES, ONES), {}, "C is not read: beta is 0"),
        ((ONES, ONES), {"max_device_memory": "8GiB"}, "max_device_memory has no effect"),
        ((ONES, ONES), {"emulate_devices": 2, "threads": 3}, "emulate_devices has no effect"),
    ],
    ids=["mask", "frame", "unit", "unit of out", "dtype", "unread", "memory", "devices"],
)
def test_what_is_lost_is_warned_of_at_the_callers_line(arguments, options, says):
    hybrid_gemm.free_memory()  # a kept runner has warned already
    with pytest.warns(HybridGemmWarning, match=says) as caught:
        hybrid_gemm.gemm(*arguments, device="cpu", **options)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.parametrize("call", [hybrid_gemm.gemm, hybrid_gemm.matmul])
def test_an_out_whose_mask_hides_results_is_warned_of(call):
    out = np.ma.masked_array(np.zeros((4, 4), "f4"), ONES > 0)
    for _ in range(2):
        with pytest.warns(HybridGemmWarning, match="out is a masked array") as caught:
            assert call(ONES, ONES, out=out, device="cpu") is out
        assert [w.filename for w in caught] == [__file__]
    assert out.mask.all() and (out.data == 4).all()


def test_memory_of_devices_that_has_no_effect_on_the_cpu_has_none():
    options = {"device": "cpu", "threads": 2, "split": "cols"}
    with pytest.warns(HybridGemmWarning, match="has no effect"):
        plan = hybrid_gemm.plan(64, 64, 64, max_device_memory=1, **options)
    assert plan.panels == hybrid_gemm.plan(64, 64, 64, **options).panels


@pytest.mark.parametrize(
    ("operand", "says"),
    [
        (None, "B is None; a matrix is needed"),
        ("B.npy", r"numpy.load\('B.npy'\) reads a file"),
        ((row for row in ONES), "B is of type generator, of which NumPy makes no matrix"),
        ({1, 2}, "B is of type set, of which NumPy makes no matrix"),
        (np.ndarray, "B is of type type, of which NumPy makes no matrix"),
        (Sparse(), "B is a sparse Sparse; .toarray"),
        (archive(x=ONES), r"B is of type NpzFile.*; a matrix is needed, such as B\['x'\]"),
        ({}, r"B is of type dict, whose entries have names; a matrix is needed, such as B\['nam"),
    ],
)
def test_what_is_no_matrix_is_named(operand, says):
    for multiply in (hybrid_gemm.gemm, hybrid_gemm.matmul):
        with pytest.raises(DTypeError, match=says):
            multiply(ONES, operand, device="cpu")


def test_what_is_right_warns_of_nothing():
    unmasked = np.ma.masked_array(ONES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for a in (ONES, unmasked, ONES.tolist(), ONES.astype("f8")):
            hybrid_gemm.gemm(a, ONES, device="cpu")
        hybrid_gemm.gemm(ONES, ONES, ONES, beta=1, device="cpu")
        hybrid_gemm.gemm(ONES, ONES, c := ONES.copy(), out=c, device="cpu")
        hybrid_gemm.gemm(ONES.astype("f8"), ONES, ONES, beta=1, device="cpu")


def test_options_without_effect_are_one_note_each():
    done = run("run", "--size", 64, "--device", "cpu", "--resident", "--max-device-memory", "1GiB",
               "--repeat", 2, check=0)  # fmt: skip
    for option in ("--resident", "--max-device-memory"):
        assert done.stderr.count(f"note: {option} has no effect") == 1
    assert "Warning" not in done.stderr


@needs("emulator")
def test_options_with_an_effect_have_no_note():
    done = run("run", "--size", 16, "--device", "emulator", "--resident", "--max-device-memory",
               "1GiB", check=0)  # fmt: skip
    assert "no effect" not in done.stderr


def test_many_workers_are_not_all_listed(capsys):
    plan = hybrid_gemm.plan(64, 64, 2000, device="cpu", threads=1000, split="cols")
    thread_report.print_plan(plan, "blas")
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 80 and "936 workers more" in printed
    assert max(map(len, printed.splitlines())) < 200 and "0+1+...+999" in printed


# --- run --check --------------------------------------------------------------------------


def changed_kernel(folder, name: str, old: str, new: str) -> None:
    """The template of a new kernel with one change."""
    text = template.text(name)
    assert old in text
    (folder / f"gemm_{name}.cu").write_text(text.replace(old, new, 1))


@needs("emulator")
def test_check_finds_reads_outside_and_races(tmp_path):
    changed_kernel(tmp_path, "outside", "row < m && tx < left ?", "tx < left ?")
    changed_kernel(tmp_path, "racing", "__syncthreads();  // the tiles are whole", "")

    def checked(kernel: str, check: int):
        return run_checked("--kernel", kernel, "--size", 40, kernels=tmp_path, check=check)

    outside = one_line(checked("outside", 1))
    assert "past the end of an array of 7024 bytes" in outside
    assert "called at gemm_outside.cu:" in outside
    racing = one_line(checked("racing", 1))
    assert "has a race" in racing and "a barrier is missing" in racing
    changed_kernel(
        tmp_path, "reads_c", "sum[i], alpha, beta)", "sum[i] + T(0) * C[0], alpha, beta)"
    )
    reads_c = checked("reads_c", 3)
    assert "is nan" in one_line(reads_c), "new memory holds NaN, so that C is seen to be read"
    changed_kernel(tmp_path, "prints", "T sum[PER] = {};", 'T sum[PER] = {}; printf("k=%d.", k);')
    assert "k=40." in checked("prints", 0).stdout
    changed_kernel(tmp_path, "takes_more", "long long ldc)", "long long ldc, T* workspace)")
    assert "takes 12 arguments; a launch gives it 11" in one_line(checked("takes_more", 1))
    right = run("run", "--check", "--kernel", "naive", "--size", 40, check=0)  # starts another
    assert "same bits in 3 orders" in right.stdout and "verification passed" in right.stdout


@needs("emulator")
@pytest.mark.parametrize(
    "old, new, size",
    [
        ("if (row < m && col < n) store(", "if (row < m) store(", 80),
        ("col < n && ty < left ?", "ty < left ?", 464),
        ("row < m && tx < left ?", "row < m ?", 20),
    ],
    ids=["C", "B", "A"],
)
def test_check_finds_what_is_just_beyond_a_small_matrix(tmp_path, old, new, size):
    """Devices have whole lines of memory for matrices; what is left of the last is none. Between
    two rows lie 16 bytes more."""
    changed_kernel(tmp_path, "beyond", old, new)
    sides = "-m", 1, "-n", 20, "-k", 5
    done = run_checked("--kernel", "beyond", *sides, kernels=tmp_path, check=1)
    said = one_line(done)
    assert f"past the end of an array of {size} bytes" in said and "gemm_beyond.cu:" in said


@needs("emulator")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("if (row + 1 < m && col < ldc) C[row * ldc + n] = T(7);", "the rows of C, number 0"),
        ("if (row == 3) ((T*) A)[row * lda + 2] = T(0);", "writes to A, at row 3, column 2"),
    ],
    ids=["between rows", "A"],
)
def test_check_finds_writes_beside_c(tmp_path, more, says):
    """Inside the memory that a matrix has, where a caller's view would have other data."""
    changed_kernel(tmp_path, "writes", "// 3. Store.", f"__syncthreads(); {STORES} {more} }}  //")
    done = run_checked("--kernel", "writes", "--size", 20, kernels=tmp_path, check=1)
    assert says in one_line(done)


STORES = "for (int i = 0; i < PER; ++i) { const unsigned row = row0 + i * TILE + ty;"
PACKED = {
    "A": ("a_at(A, lda, ", "a_at(A, TRANS_A ? m : k, "),
    "B": ("b_at(B, ldb, ", "b_at(B, TRANS_B ? k : n, "),
    "C": ("store(C + row * ldc + col", "store(C + row * n + col"),
}


@needs("emulator")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("which", PACKED)
@pytest.mark.campaign
def test_check_finds_each_kernel_that_takes_rows_for_contiguous(tmp_path, which, turned):
    takes_for_contiguous(tmp_path, which, turned)


@needs("emulator")
def test_check_finds_a_kernel_that_takes_rows_for_contiguous(tmp_path):
    for which, turned in (("A", True), ("B", False), ("C", False)):
        takes_for_contiguous(tmp_path, which, turned)


def takes_for_contiguous(folder, which, turned):
    """Rows of checked matrices lie apart, so k and n do not do for leading dimensions."""
    name = f"packed_{which.lower()}"
    changed_kernel(folder, name, *PACKED[which])
    lie = ("--trans-a", "--trans-b") if turned else ()
    code, says = (1, "writes behind the end of") if which == "C" else (3, "is nan")
    done = run_checked("--kernel", name, "--size", 40, *lie, kernels=folder, check=code)
    assert says in one_line(done)


def test_check_is_the_emulators():
    for options, says in ((["--device", "cpu"], "--device cpu"), (["--ranks", "2"], "--ranks")):
        done = CliRunner().invoke(cli, ["run", "--check", *options])
        assert isinstance(done.exception, UsageError) and says in str(done.exception)


@pytest.mark.parametrize(
    ("sides", "says"),
    [((), "m=200 n=184 k=168"), (("-m", 33), "m=33 n=184 k=168"), (("--size", 40), "m=40 n=40")],
)
def test_checked_sides_that_are_not_given_are_small(sides, says, monkeypatch):
    monkeypatch.setattr("hybrid_gemm.cli.check.restart_checked", lambda: None)
    done = CliRunner().invoke(cli, ["run", "--check", "--dry-run", *map(str, sides)])
    assert says in done.stdout, done.exception or done.stderr
