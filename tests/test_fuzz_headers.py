"""Damaged .npy files and kernel headers: a short form of scripts/fuzz-headers, and its finds."""

import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.command import python

from hybrid_gemm.catalog.expressions import evaluate
from hybrid_gemm.catalog.files import read_kernel
from hybrid_gemm.errors import UsageError

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fuzzing import headers  # noqa: E402


@pytest.mark.parametrize("what", headers.WHAT)
def test_damaged_headers_are_refused_or_read_right(what, tmp_path):
    check, seeds, _words = headers.WHAT[what]
    path = tmp_path / ("a.npy" if what == "npy" else "gemm_a.cu")
    draw = random.Random(20261122)
    taken = [check(data, path) for data in seeds]
    taken += [check(headers.mutated(what, draw), path) for _ in range(400)]
    assert 10 < sum(taken) < 390


@pytest.mark.parametrize(
    "error", [KeyError("x"), MemoryError(), UsageError("two\nlines")], ids=repr
)
def test_another_error_is_a_fault(error, monkeypatch, tmp_path):
    def broken(path):
        raise error

    monkeypatch.setattr(headers, "open_npy", broken)
    monkeypatch.setattr(headers, "read_kernel", broken)
    with pytest.raises(headers.Fault):
        headers.check_npy(headers.NPY_SEEDS[0], tmp_path / "a.npy")
    with pytest.raises(headers.Fault):
        headers.check_kernel(headers.KERNEL_SEEDS[0], tmp_path / "gemm_a.cu")


def test_a_reader_that_differs_from_numpys_is_a_fault(monkeypatch, tmp_path):
    real = headers.open_npy
    monkeypatch.setattr(headers, "open_npy", lambda path: real(path)[::-1])
    with pytest.raises(headers.Fault, match="other elements"):
        headers.check_npy(headers.NPY_SEEDS[0], tmp_path / "a.npy")

    def refusing(path):
        raise UsageError("it is not here")

    monkeypatch.setattr(headers, "open_npy", refusing)
    with pytest.raises(headers.Fault, match="it was refused"):
        headers.check_npy(headers.NPY_SEEDS[0], tmp_path / "a.npy")


def test_headers_of_version_3_that_numpy_refuses_are_refused(tmp_path):
    """Those not in UTF-8, or with what only Python 2 and older versions of the format have."""
    right = headers.npy_file("'<i8'", "(2, 6)", version=3)
    path = tmp_path / "a.npy"
    for comment, taken in ((b"#\xc3\xa4 ", True), (b"#\xff\xff ", False)):
        assert headers.check_npy(right.replace(b"}    ", b"}" + comment), path) == taken
    of_python_2 = right.replace(b"(2, 6), }  ", b"(2L, 6L), }")
    assert not headers.check_npy(of_python_2, path)


@pytest.mark.filterwarnings("error")
def test_what_python_2_wrote_is_read_without_a_warning(tmp_path, monkeypatch):
    """And without changing what becomes of warnings: they are one for all threads, and two that
    changed them in turn left all warnings ignored."""
    filters, read = [], np.lib.format.read_array_header_1_0
    monkeypatch.setattr(
        np.lib.format, "read_array_header_1_0",
        lambda file: filters.append([*warnings.filters]) or read(file),
    )  # fmt: skip
    right = headers.npy_file("'<i8'", "(2, 6)")
    path = tmp_path / "a.npy"
    path.write_bytes(right.replace(b"(2, 6), }  ", b"(2L, 6L), }"))
    assert headers.open_npy(path).shape == (2, 6)
    assert filters == [[*warnings.filters]]


HEADER = headers.KERNEL_SEEDS[0].decode()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("source ", 'tma = "s"\nsource ', "the header's tma cannot be 's'"),
        ("source ", 'tma = ["s"]\nsource ', "the header's tma cannot be"),
        ('["BM", "BN"]', '["BM", "B$N"]', "cannot evaluate 'B$N'"),
        ('["BM", "BN"]', '["BM", "1 / 0"]', "cannot evaluate '1 / 0'"),
        ('["BM", "BN"]', '["BM", "\\u0000"]', "cannot evaluate"),
        ('["BM", "BN"]', f'["BM", "{"-" * 5000}1"]', "an expression of 5001 characters"),
        ("[{BM = 16, BN = 16}, {BM = 8, BN = 32}]", "{BM = 16}", "the header's params cannot be"),
        ("source ", 'scales = ["\\n"]\nsource ', r"scales names '\n', which is no parameter"),
        ("source ", 'space = {"\\n" = [1]}\nsource ', r"space names '\n', which is no parameter"),
        ("[{BM = 16, BN = 16}, {BM = 8, BN = 32}]", r'[{"B\nM" = 16}]', "params cannot be"),
        ("{BM = 16, BN = 16}", '{BM = "16", BN = 16}', "it is a list of tables of whole numbers"),
        ('"1"]', "1]", "it is three expressions in strings, for x, y and z"),
        ("source ", 'layouts = ["n"]\nsource ', "it is a list of strings, some of nn, nt, tn, tt"),
        ("ceil(n / BN)", "n // BN", "numbers, names, + - * / %, one comparison, ceil(a / b), min"),
        ("ceil(n / BN)", "(n + BN - 1) / BN", "/ is exact, and ceil(a / b) rounds up"),
        ("ceil(n / BN)", "ceil(N / BN)", "which knows m, n, k, BM, BN, SIZE"),
    ],
    ids=range(16),
)
def test_a_header_of_nonsense_is_refused_in_words(old, new, words, tmp_path):
    path = tmp_path / "gemm_trial.cu"
    assert old in HEADER
    path.write_text(HEADER.replace(old, new))
    with pytest.raises(UsageError) as caught:
        read_kernel(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_expression_without_a_value_refuses_the_product(tmp_path):
    path = tmp_path / "gemm_trial.cu"
    path.write_text(HEADER.replace("source ", 'workspace = "4 % (k - 7)"\nsource ', 1))
    (variant, *_) = read_kernel(path.with_name("gemm_trial.cu")).variants()
    assert "cannot evaluate '4 % (k - 7)'" in variant.refusal(
        device="cpu" if "cpu" in variant.kernel.runs_on else "cuda", dtype="float32", m=8, n=8, k=7
    )


def test_expressions_that_nest_deep_are_refused():
    for text in ("(" * 400 + "1" + ")" * 400, "-" * 900 + "1", "1+" * 499 + "1", "9*" * 400 + "9"):
        try:
            assert evaluate(text, {}) > 0
        except ValueError as error:
            assert "\n" not in str(error)


def test_the_script_says_what_it_tried(tmp_path):
    result = tmp_path / "fuzz.json"
    done = python(SCRIPTS / "fuzz-headers", "kernel", "--engine", "words", "--count", 50, "--json",
                  result, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"inputs": 50' in result.read_text() and '"faults": []' in result.read_text()


def test_the_memory_of_who_starts_the_script_is_not_its_own():
    """What a process held before it became another program counts in the other's ru_maxrss."""
    large = (
        "import subprocess, sys; kept = b'1' * (1200 << 20); "
        "sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
    )
    done = python("-c", large, SCRIPTS / "fuzz-headers", "kernel", "--engine", "words",
                  "--count", 5, timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
