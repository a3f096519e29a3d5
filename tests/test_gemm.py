"""`gemm` against NumPy on every device: exact with whole numbers, whatever the split."""

import gc
import time
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrays import integers
from support.devices import DEVICES, open_device

import hybrid_gemm
from hybrid_gemm import Runner, gemm, matmul
from hybrid_gemm.errors import DTypeError, UsageError

pytestmark = pytest.mark.blas

FEW = {"cpu": 150, "emulator": 25, "cuda": 100}
side = st.integers(0, 40) | st.sampled_from([0, 1, 31, 32, 33, 64, 65])


@st.composite
def problems(draw):
    """Matrices in any order and stride with options; `expected` by NumPy in int64."""
    m, n, k = draw(side), draw(side), draw(side)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["float32", "float64", "int32", "float16", "int8", ">f4"]))
    trans_a, trans_b = draw(st.booleans()), draw(st.booleans())

    def matrix(rows, cols):
        whole = integers(rng, (2 * rows + 2, 3 * cols + 3), dtype)
        match draw(st.sampled_from(["c", "f", "padded", "strided", "reversed"])):
            case "c":
                return whole[:rows, :cols].copy("C")
            case "f":
                return whole[:rows, :cols].copy("F")
            case "padded":
                return whole[1 : rows + 1, 2 : cols + 2]
            case "strided":
                return whole[: 2 * rows : 2, : 3 * cols : 3]
        return whole[:rows, :cols][::-1, ::-1]

    a = matrix(k, m) if trans_a else matrix(m, k)
    b = matrix(n, k) if trans_b else matrix(k, n)
    alpha = draw(st.sampled_from([1, 1, 2, -3, 0]))
    beta = draw(st.sampled_from([0, 0, 1, -2]))
    c = matrix(m, n) if beta or draw(st.booleans()) else None
    options = {
        "threads": draw(st.integers(1, 5)),
        "split": draw(st.sampled_from(["rows", "cols", "auto"])),
        "emulate_devices": draw(st.none() | st.integers(1, 3)),
    }
    wide = [x.astype("i8") for x in (a.T if trans_a else a, b.T if trans_b else b)]
    expected = alpha * (wide[0] @ wide[1]) + (beta * c.astype("i8") if c is not None else 0)
    given = {"alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b}
    return a, b, c, given, options, expected.astype(np.result_type(a, b))


@pytest.mark.parametrize("out_kind", ["none", "given", "fortran"])
def test_any_product_equals_numpy(device, out_kind):
    @settings(max_examples=FEW[device])
    @given(problems())
    def check(problem):
        a, b, c, options, choices, expected = problem
        out = None
        if out_kind != "none":
            order = "F" if out_kind == "fortran" else "C"
            out = np.full(expected.shape, -99, expected.dtype, order)
        before = [x.copy() for x in (a, b)]
        got = gemm(a, b, c, **options, **choices, out=out, device=device)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
        assert out is None or got is out
        np.testing.assert_array_equal(a, before[0])
        np.testing.assert_array_equal(b, before[1])

    check()


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_beta_zero_overwrites_and_alpha_zero_reads_nothing(device, split):
    a, b = np.ones((5, 40), "f4"), np.ones((40, 6), "f4")
    nan = np.full((5, 6), np.nan, "f4")
    runner = Runner(device=device, threads=3, split=split)
    np.testing.assert_array_equal(runner.gemm(a, b, nan.copy(), beta=0), 40)
    np.testing.assert_array_equal(runner.gemm(a, b, out=nan.copy()), 40)
    np.testing.assert_array_equal(runner.gemm(a * np.nan, b, np.ones_like(nan), alpha=0, beta=2), 2)
    assert np.isnan(runner.gemm(a, b, nan, beta=1)).all()


def test_nan_and_inf_go_where_blas_sends_them(device):
    a, b = np.ones((4, 33), "f4"), np.ones((33, 5), "f4")
    a[1, 32], a[2, 0], b[7, 3] = np.nan, np.inf, -np.inf
    got = gemm(a, b, device=device, threads=2, split="cols")
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, a @ b)


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_same_bits_every_time(device, split, rng):
    a = rng.standard_normal((150, 170), dtype="f4")
    b = rng.standard_normal((170, 130), dtype="f4")
    runner = Runner(device=device, threads=4, split=split, emulate_devices=2)
    first = runner.gemm(a, b)
    for _ in range(5):
        np.testing.assert_array_equal(runner.gemm(a, b), first)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduce", ["ordered", "critical"])
def test_rounding_stays_within_the_bound(device, dtype, reduce, rng):
    a, b, c = (rng.standard_normal(s).astype(dtype) for s in ((90, 300), (300, 70), (90, 70)))
    got = gemm(a, b, c, alpha=0.3, beta=-1.7, device=device, threads=3, split="cols", reduce=reduce)
    wide = [x.astype("f8") for x in (a, b, c)]
    ref = 0.3 * wide[0] @ wide[1] - 1.7 * wide[2]
    size = 0.3 * abs(wide[0]) @ abs(wide[1]) + 1.7 * abs(wide[2])
    assert (abs(got - ref) <= 303 * np.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("emulate", [None, 1, 4])
def test_out_may_be_c(device, emulate, rng):
    a, b, c = integers(rng, (40, 50)), integers(rng, (50, 60)), integers(rng, (40, 60))
    expected = 2 * a @ b - c
    got = gemm(a, b, c, alpha=2, beta=-1, out=c, device=device, threads=4, split="cols",
               emulate_devices=emulate)  # fmt: skip
    assert got is c
    np.testing.assert_array_equal(c, expected)


def test_out_that_overlaps_is_refused():
    a = np.ones((8, 8), "f4")
    whole = np.ones((9, 8), "f4")
    with pytest.raises(ValueError, match="out overlaps A"):
        gemm(a, np.ones((8, 8), "f4"), out=a)
    with pytest.raises(ValueError, match="out overlaps B"):
        gemm(a, whole[:8], out=whole[1:])
    with pytest.raises(ValueError, match="out overlaps C"):
        gemm(a, a.copy(), whole[:8], beta=1, out=whole[1:])
    even, odd = np.ones((8, 16), "f4")[:, ::2], np.ones((8, 16), "f4")[:, 1::2]
    np.testing.assert_array_equal(gemm(a, even, out=odd), 8)


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_an_out_of_another_class_is_an_out_as_any_other(tmp_path):
    """np.memmap and np.matrix are arrays too: what overlaps is refused, and C may be `out`."""
    a = np.memmap(tmp_path / "a", "f4", "w+", shape=(8, 8))
    a[...] = 1
    with pytest.raises(ValueError, match="out overlaps A"):
        gemm(a, np.ones((8, 8), "f4"), out=np.asarray(a), device="cpu")
    with pytest.raises(ValueError, match="out overlaps C"):
        gemm(np.ones((4, 2), "f4"), np.ones((2, 8), "f4"), a[:4], out=np.asarray(a)[1:5],
             device="cpu")  # fmt: skip
    np.testing.assert_array_equal(np.asarray(a), 1)
    got = gemm(np.ones((8, 2)), np.ones((2, 8)), a, beta=1, out=np.asarray(a), device="cpu")
    np.testing.assert_array_equal(got, 3)


@pytest.mark.filterwarnings("error", "ignore::PendingDeprecationWarning")
def test_a_matrix_gets_inf_without_a_warning():
    large = np.full((2, 2), 2**17, "u8")
    out = np.zeros((2, 2), "f2").view(np.matrix)
    assert gemm(large, large, out=out, device="cpu") is out
    assert np.isinf(out).all()


def test_halves_with_a_wide_c_are_multiplied_in_its_dtype(device):
    for narrow in ("float16", ml_dtypes.bfloat16):
        half, c = np.full((3, 40), 2, narrow), np.full((3, 3), 2**30 + 1, "f8")
        got = gemm(half, half.T, c, beta=1, device=device)
        assert got.dtype == "f8"
        np.testing.assert_array_equal(got, 2**30 + 161)


def test_read_only_out_and_wrong_out_are_refused():
    a = np.ones((4, 4), "f4")
    out = np.zeros((4, 4), "f4")
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only; give an array that can be written"):
        gemm(a, a, out=out)
    with pytest.raises(ValueError, match=r"out has shape \(3, 4\); this product is \(4, 4\)"):
        gemm(a, a, out=np.zeros((3, 4), "f4"))
    with pytest.raises(TypeError, match="int32"):
        gemm(a, a, out=np.zeros((4, 4), "i4"))
    for no_numbers in (object, "U5", "m8[s]", "V4", "V8"):
        with pytest.raises(TypeError, match="does not cast to it"):
            gemm(a.astype("i4"), a.astype("i4"), out=np.zeros((4, 4), no_numbers), device="cpu")
    for dtype in ("f4", "f2"):
        for no_array in ([[0.0] * 4] * 4, memoryview(b"abcd"), "C.npy"):
            with pytest.raises(TypeError, match="out must be an array that can be written, not"):
                gemm(a.astype(dtype), a.astype(dtype), out=no_array, device="cpu")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("split", [{}, {"threads": 2, "split": "cols"}], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_wider_out_of_16_bits_keeps_the_float32_sums(dtype, split, device):
    options = {"device": device, **split}
    a, b = np.ones((3, 4097), "f2"), np.ones((4097, 5), "f2")  # float16 rounds 4097 to 4096
    assert (gemm(a, b, out=np.zeros((3, 5), dtype), **options) == 4097).all()
    assert (gemm(a, b, **options) == 4096).all()
    stack = np.stack([a, a])
    assert (matmul(stack, b, out=np.zeros((2, 3, 5), dtype), **options) == 4097).all()


@pytest.mark.parametrize("options", [{}, {"threads": 2}], ids=str)
@pytest.mark.parametrize("steps", [(0, 4), (4, 4), (4, 0), (-4, -4)], ids=str)
def test_an_out_whose_elements_overlap_is_refused(steps, options):
    a = np.ones((4, 4), "f4")
    out = np.lib.stride_tricks.as_strided(np.zeros(16, "f4")[8:], (4, 4), steps)
    with pytest.raises(UsageError, match="elements of out overlap each other"):
        gemm(a, a, out=out, device="cpu", **options)
    twice = np.lib.stride_tricks.as_strided(np.zeros(16, "f4"), (2, 4, 4), (0, 16, 4))
    with pytest.raises(UsageError, match="elements of out overlap each other"):
        matmul(np.ones((2, 4, 4), "f4"), a, out=twice, device="cpu", **options)


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (np.ones((2, 3)), np.ones((4, 5)), ValueError, "A is 2 x 3 and B is 4 x 5"),
        (np.ones(3), np.ones((3, 5)), ValueError, r"A has shape \(3,\); matrices are 2-D"),
        (np.ones(()), np.ones((3, 5)), ValueError, r"A has shape \(\).*alpha and beta scale"),
        (np.ones((1, 2, 3)), np.ones((3, 5)), ValueError, r"A has shape \(1, 2, 3\).*takes stacks"),
        (np.ones((2, 2), "G"), np.ones((2, 2)), TypeError, "A has dtype complex256"),
        (np.ones((2, 2)), np.ones((2, 2), object), TypeError, "B has dtype object"),
        (np.ones((2, 2), bool), np.ones((2, 2)), TypeError, "A has dtype bool"),
        (np.ones((2, 2), "f4,f4"), np.ones((2, 2)), TypeError, r"\(\['f0'\] is its first field\)"),
        (np.ones((2, 2)), np.zeros((2, 2), "V2"), TypeError, r"\.view\(ml_dtypes\.bfloat16\)"),
    ],
)
def test_bad_operands_are_restated(a, b, error, message):
    with pytest.raises(error, match=message):
        gemm(a, b, device="cpu")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threads": 0}, UsageError, "at least 1"),
        ({"threads": 20_000}, UsageError, "at most 1024"),
        ({"emulate_devices": 2000}, UsageError, "at most 1024"),
        ({"threads": -2}, UsageError, "-2 threads"),
        ({"beta": 1}, UsageError, "no C was given"),
        ({"alpha": "x"}, DTypeError, "alpha must be a real number"),
        ({"alpha": True}, DTypeError, "alpha must be a real number, not True$"),
        (
            {"alpha": 1e39},
            UsageError,
            r"alpha=1e\+39 does not fit float32, whose largest number is",
        ),
        ({"alpha": -(10**400)}, UsageError, "alpha does not fit float32"),
        ({"split": "diagonal"}, UsageError, "rows, cols and auto"),
        ({"device": "tpu"}, UsageError, "auto, cuda, cpu and emulator"),
        ({"device": "cpu", "gpus": [0]}, UsageError, "the device is cpu"),
        ({"device": "cpu", "kernel": "naive"}, UsageError, "does not run on the cpu"),
        ({"device": "cpu", "kernel": "niave"}, UsageError, "did you mean naive"),
        ({"device": "cpu", "params": {"BM": 1}}, UsageError, "name it too, by kernel"),
        ({"device": "cpu", "emulate_devices": 0}, UsageError, "at least 1"),
    ],
)
def test_bad_choices_are_named(options, error, message):
    a = np.ones((4, 4), "f4")
    with pytest.raises(error, match=message):
        gemm(a, a, **options)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_integers_wrap_as_numpy_does(device, dtype, rng):
    info = np.iinfo(dtype)
    a = rng.integers(info.min, info.max, (9, 40), dtype, endpoint=True)
    b = rng.integers(info.min, info.max, (40, 7), dtype, endpoint=True)
    got = gemm(a, b, device=device, threads=2)
    assert got.dtype == a.dtype
    np.testing.assert_array_equal(got, a @ b)


def test_promotion_is_numpys(device):
    for x, y in (("f2", "f4"), ("i4", "f4"), ("i1", "u1"), ("f4", "f8"), ("i8", "f4")):
        a, b = np.ones((3, 4), x), np.ones((4, 2), y)
        assert gemm(a, b, device=device).dtype == np.result_type(a, b)


def test_matmul_and_lists_and_plan():
    np.testing.assert_array_equal(matmul([[1, 2]], [[3], [4]]), [[11]])
    plan = hybrid_gemm.plan(100, 100, 100, split="cols", threads=4, device="cpu")
    assert plan.grid == (1, 1, 4)


def test_a_failing_worker_stops_the_others_with_its_own_error(monkeypatch):
    from hybrid_gemm.devices.cpu import CpuDevice

    runner = Runner(device="cpu", threads=4, split="cols")
    real = CpuDevice.gemm

    def failing(self, variant, a, b, c, **options):
        if a[0, 0] == 7:
            raise RuntimeError("worker 2 is out of luck")
        return real(self, variant, a, b, c, **options)

    monkeypatch.setattr(CpuDevice, "gemm", failing)
    a = np.zeros((64, 64), "f4")
    a[0, 32] = 7
    with pytest.raises(RuntimeError, match="out of luck"):
        runner.gemm(a, a.copy())


def test_timeline_accounts_for_every_worker(device):
    a = np.ones((64, 256), "f4")
    result = Runner(device=device, threads=4, split="cols", emulate_devices=2).run(a, a.T.copy())
    assert {x.worker for x in result.timeline.of("multiply")} == {0, 1, 2, 3}
    assert sum(x.flops for x in result.timeline) == result.plan.problem.flops
    assert result.timeline.multiply_and_sum_ms >= result.timeline.multiply_ms > 0
    moved = sum(x.bytes for x in result.timeline.of("upload"))
    assert moved == result.plan.bytes_h2d
    assert sum(x.bytes for x in result.timeline.of("download")) == result.plan.bytes_d2h
    assert sum(x.bytes for x in result.timeline.of("reduce")) == result.plan.bytes_peer


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"emulate_devices": 1}, "ordered sum on the device"),
        ({"emulate_devices": 2}, "ordered sum on the device, peer copies, as panels are ready"),
        ({"reduce": "critical"}, "critical (one worker at a time, through host memory)"),
        ({"split": "rows"}, "none"),
    ],
    ids=str,
)
def test_a_result_says_how_partials_were_summed(options, words, monkeypatch, rng):
    a, b = integers(rng, (20, 30)), integers(rng, (30, 10))
    with Runner(**{"device": "emulator", "threads": 2, "split": "cols", **options}) as runner:
        assert runner.run(a, b).reduction == words
        if "peer copies" in words:
            monkeypatch.setattr(type(runner.devices[0]), "reaches", lambda *_: False)
            staged = words.replace("peer copies", "copies staged through host memory")
            assert runner.run(a, b).reduction == staged


def test_a_timeline_looked_at_later_is_of_its_own_run_and_keeps_no_arrays(device):
    runner = Runner(device=device, threads=4, split="cols", emulate_devices=2)
    a = np.ones((64, 256), "f4")
    first, kept = runner.run(a, a.T.copy()), weakref.ref(a)
    second = runner.run(a, a.T.copy())
    del a
    until = time.monotonic() + 60
    while kept() is not None and time.monotonic() < until:  # a copying thread's last reference
        gc.collect()
    assert kept() is None
    for result in first, second:
        times = [(x.start_ms, x.stop_ms) for x in result.timeline]
        assert all(0 <= start <= stop <= result.total_ms + 5 for start, stop in times)
    assert repr(first.timeline).startswith("<Timeline: ")


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_resident_runs_move_nothing_while_the_clock_runs(device, split, rng):
    a, b = integers(rng, (70, 90)), integers(rng, (90, 50))
    runner = Runner(device=device, threads=3, split=split)
    result = runner.run(a, b, resident=True)
    np.testing.assert_array_equal(result.c, a @ b)
    assert not result.timeline.of("upload") and not result.timeline.of("download")


def test_a_critical_sum_of_resident_matrices_adds_to_c(device, rng):
    """Which waited once for a C that nobody brings."""
    a, b, c = integers(rng, (70, 90)), integers(rng, (90, 50)), integers(rng, (70, 50))
    runner = Runner(device=device, threads=3, split="cols", reduce="critical")
    result = runner.run(a, b, c, beta=2, resident=True)
    np.testing.assert_array_equal(result.c, a @ b + 2 * c)


def test_room_for_parts_is_made_before_the_clock_runs(kernel_device, rng, monkeypatch):
    """And only once: streams do in a second run what they did in the first."""
    streams, seen, kind = [], [], type(open_device(kernel_device))
    stream, start = kind.stream, kind.start_clock

    def new_stream(device, urgent=False):
        streams.append(stream(device, urgent))
        return streams[-1]

    def start_clock(device):
        rooms = [(id(s), [id(room) for room, _flags in s.scratch]) for s in streams if s.scratch]
        seen.append(sorted(rooms))
        start(device)

    monkeypatch.setattr(kind, "stream", new_stream)
    monkeypatch.setattr(kind, "start_clock", start_clock)
    a, b = integers(rng, (300, 40)), integers(rng, (40, 60))
    here = Runner(device=kernel_device, kernel="tuned", threads=2, split="rows")
    for _ in range(3):
        np.testing.assert_array_equal(here.run(a, b).c, a @ b)  # with a clock each time
    used = min(2, len(here.devices))
    runs = seen[used - 1 :: used]  # each device that is used starts its clock
    assert len(runs[0]) == 2 and all(len(rooms) == 1 for _stream, rooms in runs[0])
    assert runs == 3 * [runs[0]]


@pytest.mark.parametrize(
    "dtype, into, high",
    [("uint32", "float64", 2**32), ("uint32", "int64", 2**32), ("int8", "float32", 100),
     ("uint8", "int64", 200), ("int32", "float64", 2**31), ("float32", "float64", 1000),
     ("float32", "float16", 10)],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"threads": 3, "split": "cols"}], ids=str)
@pytest.mark.filterwarnings("error")
def test_out_of_another_dtype_gets_the_finished_product(device, dtype, into, high, options, rng):
    """As NumPy does: the product is finished in its own dtype, where integers wrap, then cast."""
    a, b = (rng.integers(0, high, shape).astype(dtype) for shape in ((20, 30), (30, 25)))
    expected = gemm(a, b, device=device, **options)
    if np.dtype(dtype).kind != "f":
        np.testing.assert_array_equal(expected, np.matmul(a, b))
    out = np.empty((20, 25), into)
    assert gemm(a, b, device=device, out=out, **options) is out
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out, expected.astype(into))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threads": 2, "split": "cols"},
        {"threads": 2, "split": "cols", "reduce": "critical"},
        {"algorithm": "strassen"},
        {"algorithm": "3m"},
    ],
    ids=str,
)
def test_a_product_is_silent_whatever_numpy_is_to_raise(device, options, dtype):
    finfo = np.finfo(dtype)
    for value in (finfo.tiny, finfo.max, np.inf, np.nan):
        a, narrow = np.full((6, 6), value, dtype), "c8" if dtype == "c8" else "f2"
        with np.errstate(all="raise"):
            gemm(a, a, a, alpha=3, beta=2, device=device, **options)
            gemm(a, a, a, alpha=1e-30, beta=1e-30, device=device, **options)
            gemm(a, a, out=np.zeros((6, 6), narrow), device=device, **options)
            matmul(np.stack([a, a]), np.stack([a, a]), device=device, **options)


@pytest.mark.parametrize("bad", [True, 1 + 0j], ids=str)
def test_a_call_that_was_known_does_not_let_wrong_factors_in(device, bad):
    runner, a = Runner(device=device), np.ones((32, 32), "f4")
    for name in ("alpha", "beta"):
        for _ in range(2):
            runner.gemm(a, a, a, **{name: 1.0})
        with pytest.raises(DTypeError, match=f"{name} must be a real number"):
            runner.gemm(a, a, a, **{name: bad})
