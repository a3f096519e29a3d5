"""Sums of host memory by native threads: those of integers and of words are NumPy's, bit by bit,
and those of floating point are as close as rounding allows."""

import ctypes
import subprocess
import time

import ml_dtypes
import numpy as np
import pytest
from support.command import python
from support.devices import open_device

from hybrid_gemm import Runner
from hybrid_gemm.devices import host_checksums, native_sums
from hybrid_gemm.devices.checksums import GROUPS, width
from hybrid_gemm.devices.host_checksums import HostChecksums, line_sums
from hybrid_gemm.errors import VerificationError
from hybrid_gemm.execution import checked_device, staging
from hybrid_gemm.execution.checked_device import CheckedDevice

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SHAPES = [(1, 1), (3, 9), (37, 130), (130, 515), (5, 1100), (515, 64), (4, 0), (0, 4), (1, 40_000)]


def half(dtypes):
    """Every dtype with every second shape, in turn; with the others in campaigns."""
    return [
        pytest.param(dtype, *shape, marks=[pytest.mark.campaign] if (i + j) % 2 else [])
        for i, dtype in enumerate(dtypes)
        for j, shape in enumerate(SHAPES)
    ]


FLAGS = ["-std=c++17", "-fPIC", "-shared", "-pthread"]


@pytest.fixture(autouse=True)
def _compiled():
    if reason := native_sums.unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The library as other CPUs have it, which stops at what C++ does not define."""
    made = tmp_path_factory.mktemp("sums") / "plain.so"
    source, header = native_sums._SOURCE, native_sums._SOURCE.parent
    command = ["g++", *FLAGS, "-O1", "-DWITHOUT_AVX2", f"-I{header}", source, "-o", made]
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"]
    built = subprocess.run([*command, *checks], capture_output=True, text=True)
    if "cannot find" in built.stderr:
        built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(made))
    library.make_sums.argtypes, library.make_sums.restype = [ctypes.c_void_p], None
    return library


@pytest.fixture(params=["this CPU's", "plain"])
def library(request, monkeypatch):
    if request.param == "plain":
        made = request.getfixturevalue("plain")
        monkeypatch.setattr(native_sums, "_library", lambda: made)


@pytest.fixture
def libraries(plain):
    """What gives each library, by name, so that NumPy makes its sums, which take longest, once."""
    return {"this CPU's": native_sums._library, "plain": lambda: plain}


def matrix(rng, dtype, rows, cols):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if dtype.kind in "iu":
        low, high = (int(f(dtype)) for f in (lambda t: np.iinfo(t).min, lambda t: np.iinfo(t).max))
        return rng.integers(low, high, (rows, cols), dtype, endpoint=True)
    spread = 2.0 ** rng.integers(-20, 10, (rows, cols))  # to numbers that float16 has not normally
    return (spread * rng.standard_normal((rows, cols))).astype(dtype)


def views(rng, dtype, rows, cols):
    """Matrices of this shape that lie in all the ways that there are."""
    wide = matrix(rng, dtype, rows + 3, cols + 5)
    yield wide[1 : rows + 1, 3 : cols + 3]
    yield np.asfortranarray(wide)[2 : rows + 2, 1 : cols + 1]
    yield wide[1 : rows + 1, 3 : cols + 3][::-1]
    yield np.asfortranarray(wide)[2 : rows + 2, 1 : cols + 1][:, ::-1]
    yield np.ascontiguousarray(wide[:rows, :cols])
    yield np.asfortranarray(wide[:rows, :cols])
    yield np.repeat(wide, 2, axis=0)[: 2 * rows : 2, :cols]
    yield np.broadcast_to(wide[:1, :cols], (rows, cols))
    apart = bytearray(wide[:rows, :cols].tobytes() + b"\0")
    apart[1:] = wide[:rows, :cols].tobytes()
    yield np.frombuffer(apart, wide.dtype, rows * cols, offset=1).reshape(rows, cols)


def by_numpy(make, *args):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(host_checksums, "LEAST", 1 << 60)
        return make(*args)


def natively(make, *args):
    with pytest.MonkeyPatch.context() as context:
        context.setattr(host_checksums, "LEAST", 0)
        return make(*args)


def close(found, wanted, terms):
    """Whether sums are equal but for the rounding of so many terms' additions."""
    limit = 4 * np.sqrt(terms.shape[1] + 1) * 2.0**-53 * (abs(terms).sum(axis=1, keepdims=True))
    return bool((abs(found - wanted) <= limit).all())


@pytest.mark.parametrize("rows, cols", [*SHAPES, (3, 300_001)])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_lines_are_those_of_numpy(rng, library, rows, cols, size):
    for x in views(rng, f"uint{8 * size}", rows, cols):
        wanted = by_numpy(line_sums, x)
        assert (natively(line_sums, x) == wanted).all()
        if native_sums.takes_lines(x):
            for threads in 1, 3, 16:
                assert (native_sums.lines(x, threads) == wanted).all()
    if rows > 1 and cols > 1:
        assert native_sums.takes_lines(x) and not native_sums.takes_lines(x.copy("F"))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_each_bit_of_each_word_counts(size):
    x = np.full((3, 70), 0xA5 if size == 1 else 2 ** (8 * size) - 7, f"u{size}")
    right = native_sums.lines(x, 1)
    for col in 0, 1, 31, 64, 69:
        for bit in range(8 * size):
            x[1, col] ^= np.array(1 << bit, x.dtype)
            assert (native_sums.lines(x, 1) != right).tolist() == [False, True, False]
            x[1, col] ^= np.array(1 << bit, x.dtype)


@pytest.mark.parametrize(("dtype", "rows", "cols"), half(INTEGERS))
def test_sums_of_integers_are_those_of_numpy(rng, libraries, monkeypatch, dtype, rows, cols):
    sums, b = HostChecksums(open_device("cpu")), matrix(rng, dtype, cols, 70)
    for x in views(rng, dtype, rows, cols):
        for call in (sums.sums, x, None), (sums.product, x, b, None):
            wanted = by_numpy(*call)
            for name, library in libraries.items():
                monkeypatch.setattr(native_sums, "_library", library)
                found = natively(*call)
                assert found.of.dtype == found.second.dtype == np.uint64
                assert np.array_equal(found.of, wanted.of), name
                assert np.array_equal(found.second, wanted.second), name


@pytest.mark.parametrize(("dtype", "rows", "cols"), half(FLOATS))
def test_sums_of_floating_point_are_close(rng, library, dtype, rows, cols):
    sums, b = HostChecksums(open_device("cpu")), matrix(rng, dtype, cols, 70)
    for x in views(rng, dtype, rows, cols):
        wide = x.astype("f8")
        wanted, found = (f(sums.sums, x, None) for f in (by_numpy, natively))
        assert found.of.shape == found.second.shape == (rows, GROUPS)
        assert close(found.of, wanted.of, 2 * wide)
        np.testing.assert_allclose(found.second, wanted.second, rtol=1e-13)
        of_b = by_numpy(sums.sums, b, None)
        wanted = wide @ of_b.of
        made = native_sums.product(x, *of_b, 2) if native_sums.takes(x) else (wanted, None)
        assert close(made[0], wanted, wide * abs(of_b.of).max(axis=1, initial=0))
        if made[1] is not None:
            wanted = wide**2 @ of_b.second.max(axis=1, keepdims=True)
            np.testing.assert_allclose(made[1], wanted, rtol=1e-13)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("order", "CF")
def test_every_number_is_read_as_numpy_reads_it(dtype, order, library):
    """Each of 16 bits; Inf and NaN are of their rows and groups alone."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if kind.itemsize == 2:
        x = np.arange(1 << 16, dtype=np.uint16).view(kind)[:, None]
    else:
        last = np.finfo(kind).max, np.finfo(kind).tiny, np.finfo(kind).smallest_subnormal
        x = np.array([0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, *last], kind)[:, None]
    x = np.asarray(np.hstack([x, np.zeros((len(x), 69), kind)]), order=order)
    ones = np.ones(GROUPS * width(70))
    found, squares = native_sums.weighted(x, ones, width(70), 2)
    with np.errstate(all="ignore"):
        wide = x[:, 0].astype("f8")
        np.testing.assert_array_equal(found[:, 0], wide)
        np.testing.assert_array_equal(squares[:, 0], wide * wide)
    assert not found[:, 1:].any() and not squares[:, 1:].any()


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("rows, cols", [(700, 333), (3, 70_000), (2, 200_000), (100, 70_000)])
@pytest.mark.parametrize("order", "CF")
def test_threads_change_no_bit(rng, monkeypatch, dtype, rows, cols, order):
    monkeypatch.setattr(native_sums, "LINE_BYTES", 1000)
    monkeypatch.setattr(native_sums, "EACH_BYTES", 1000)
    monkeypatch.setattr(native_sums, "EACH_ELEMENTS", 1000)
    x = np.asarray(matrix(rng, dtype, rows, cols), order=order)
    weights = HostChecksums(open_device("cpu")).weights.of(cols, exact=dtype == "int32")
    sums = [
        np.asarray(rng.standard_normal((cols, GROUPS)) * 1e6, weights.dtype.str.replace("u", "i"))
        .astype(weights.dtype) for _ in "12"
    ]  # fmt: skip
    found = set()
    for threads in 1, 2, 5, 16:
        made = (
            *native_sums.weighted(x, weights, width(cols), threads),
            *native_sums.product(x, *sums, threads),
        )
        found.add(b"".join(part.tobytes() for part in made))
    assert len(found) == 1
    wide = x.astype(weights.dtype)
    assert np.allclose(made[2], wide @ sums[0], rtol=1e-9, atol=1e-3)


def test_what_lies_otherwise_is_left_to_numpy(rng, monkeypatch):
    x = rng.standard_normal((400, 600))
    for view in x[:, ::2], x[::2, ::-1], x.astype(">f8"), x > 0:
        assert not native_sums.takes(view)
    sums = HostChecksums(open_device("cpu"))
    monkeypatch.setattr(native_sums, "weighted", None)
    assert sums.sums(x[:, ::2], None).of.shape == (400, GROUPS)


def test_little_is_left_to_numpy_without_compiling():
    code = (
        "import numpy as np; from hybrid_gemm.devices import host_checksums, native_sums;"
        "host_checksums.line_sums(np.ones((200, 200), 'u4'));"
        "print(native_sums.unavailable.cache_info().currsize)"
    )
    done = python("-c", code)
    assert done.stdout == "0\n", done.stderr


def test_without_a_compiler_it_says_so_and_numpy_sums():
    code = (
        "import numpy as np; from hybrid_gemm.devices import host_checksums, native_sums;"
        "print(host_checksums.line_sums(np.ones((3, 100_000), 'u4')), native_sums.unavailable())"
    )
    done = python("-c", code, env={"PATH": ""})
    assert "[100000 100000 100000] g++ is not installed" in done.stdout, done.stderr


class Copies:
    """Copies to a GPU that is none; each of `faults` is done to one of them, in turn."""

    def __init__(self, monkeypatch, *faults):
        self.faults, self.made = list(faults), 0
        monkeypatch.setattr(checked_device, "AHEAD_BYTES", 1 << 20)
        monkeypatch.setattr(staging, "copy_now", self.copy)
        self.device = CheckedDevice(open_device("cpu"))
        self.device.on_gpu = True

    def copy(self, device, dst, src, stream):
        dst[...] = src
        self.made += 1
        if self.faults:
            self.faults.pop(0)(dst, src)


def flip(dst, src):
    dst.view("u4")[700, 300] ^= 1 << 13


def flip_and_change(dst, src):
    """The source is another one from then on."""
    flip(dst, src)
    src[5, 6] += 1


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("faults", [(), (flip,), (flip, flip), (flip_and_change,)])
def test_sums_of_the_source_are_made_during_the_copy(rng, monkeypatch, order, faults):
    copies = Copies(monkeypatch, *faults)
    src = np.asarray(rng.standard_normal((900, 800)), np.float32, order=order)
    dst = np.empty_like(src)
    copies.device.copy(dst, src, copies.device.stream())
    assert (dst == src).all() and copies.made == 1 + len(faults)
    tally = copies.device.tally
    assert (tally.copies, tally.repeated) == (1, int(bool(faults)))
    assert len(tally.faults) == len(faults)
    if order == "C" and faults:
        assert 700 in range(*tally.faults[0].rows)


def test_copies_that_stay_wrong_and_that_fail_are_errors(rng, monkeypatch):
    src = rng.standard_normal((900, 800), np.float32)
    copies = Copies(monkeypatch, flip, flip, flip)
    with pytest.raises(VerificationError, match="3 times"):
        copies.device.copy(np.empty_like(src), src, copies.device.stream())

    def failed(dst, src):
        raise OSError("no such link")

    copies = Copies(monkeypatch, failed)
    with pytest.raises(OSError, match="no such link"):
        copies.device.copy(np.empty_like(src), src, copies.device.stream())


def test_compiling_is_no_part_of_a_products_time(monkeypatch, rng):
    """g++ takes a second, once for a host."""
    compiled = []

    def slowly():
        if not compiled:
            time.sleep(0.5)
            compiled.append(True)

    monkeypatch.setattr(native_sums, "unavailable", slowly)
    a, b = rng.standard_normal((2, 300, 300))
    with Runner(device="cpu", threads=2, checked=True) as runner:
        done = runner.run(a, b)
    assert compiled
    assert done.total_ms < 500
