"""Small arrays of the host that one GPU takes whole, with NumPy in its place, and on one."""

import contextlib
import tracemalloc
from types import SimpleNamespace
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import LIES, PARTS_OF_C, integers
from support.devices import needs

import hybrid_gemm as hg
from hybrid_gemm.arrays.strides import runs
from hybrid_gemm.execution import host_copies
from hybrid_gemm.programs import packed
from hybrid_gemm.programs.packed import PackedOnGpu
from hybrid_gemm.programs.program import REFUSING, Call, Program, Unfit

SIDES = 5, 7, 6
DTYPES = "f4", "f8", "f2", "i1", "i2", "u2", "i4", "i8", ">f4", ">i2", "c8", "c16"
WAYS = {
    **LIES,
    "columns with steps": lambda x: np.repeat(x.T, 2, 1)[::-1, ::2].T,
    "with many steps": lambda x: np.repeat(x, 9, 1)[:, ::9],
    "a row, repeated": lambda x: np.broadcast_to(x[0], x.shape),
    "a column, repeated": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "off its size": lambda x: np.frombuffer(b"x" + x.tobytes(), x.dtype, x.size, 1).reshape(
        x.shape
    ),
}


class Device:
    """A GPU whose memory is the host's."""

    on_gpu = False  # its copies go through no slots

    def stream(self):
        return SimpleNamespace(synchronize=lambda: None)

    def using(self, stream):
        return contextlib.nullcontext()

    def empty(self, rows, cols, dtype):
        return np.empty((rows, cols), dtype)

    def pinned(self, size):
        return np.empty(size, np.uint8)

    def copy(self, dst, src, stream):
        assert runs(dst, src) and src.dtype.isnative and src.flags.aligned
        np.copyto(dst, src, casting="no")

    def is_finite(self, matrix):
        return bool(np.isfinite(matrix).all())

    def reads(self, array):
        return array.base is not None  # as if views were page-locked

    def bound_copy(self, dst, src):
        return lambda stream: self.copy(dst, src, stream)


def product(a, b, c, alpha, beta, trans_a, trans_b, out):
    op_a, op_b = a.T if trans_a else a, b.T if trans_b else b
    made = alpha * (op_a.astype("c16") @ op_b.astype("c16"))
    made = made + beta * c.astype("c16") if c is not None else made
    assert out.dtype.isnative and (out.flags.c_contiguous or out.flags.f_contiguous)
    out[...] = made if out.dtype.kind == "c" else made.real
    return out


def make_hosted(multiply=product, counts=(1,), plan=None):
    plans = SimpleNamespace(
        devices=[0], most_hosted=1 << 20, counts=counts, plan=plan,
        options=SimpleNamespace(max_device_memory=None, algorithm="ordinary"),
        settle=lambda problem: problem,
    )  # fmt: skip

    def write(call, _planned):
        return Program([lambda slots: multiply(*slots[:3], *call[3:7], slots[3])])

    single = SimpleNamespace(
        device=Device(), write=write, plans=plans, takes_complex=lambda _problem: True
    )
    return PackedOnGpu(single, None)


def gemm(hosted, a, b, c=None, alpha=1, beta=0, trans_a=False, trans_b=False, out=None):
    """The product, None where it takes a run."""
    call = Call(a, b, c, alpha, beta, trans_a, trans_b, out)
    try:
        return hosted.write(call, lambda _call: REFUSING).play(*call.arrays)
    except Unfit:
        return None


@pytest.fixture(scope="module")
def hosted():
    return make_hosted()


@pytest.mark.parametrize("size", [0, host_copies.PACKED_BYTES])
@given(data=st.data())
def test_arrays_of_any_kind_are_copied_as_they_are(hosted, data, size):
    hosted = PackedOnGpu(hosted.single, None)  # whose buffers are so large
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    (m, n, k), ways = SIDES, st.sampled_from([*WAYS])

    def drawn(*sides, dtype=None):
        x = rng.integers(0, 4, sides).astype(dtype or data.draw(st.sampled_from(DTYPES)))
        return WAYS[data.draw(ways)](x)

    a, b = drawn(m, k), drawn(k, n)
    dtype = np.result_type(a, b)
    beta, c, out = 0, None, None
    if data.draw(st.booleans()):
        out = drawn(m, n, dtype=dtype)
        if not out.flags.writeable:
            out = out.copy()
    if data.draw(st.booleans()):
        beta = 2
        c = out if out is not None and data.draw(st.booleans()) else None
        if c is None:
            c = drawn(m, n, dtype=dtype)[data.draw(st.sampled_from(PARTS_OF_C))]
    wanted = 3 * (a.astype("c16") @ b.astype("c16")) + (beta * c.astype("c16") if beta else 0)
    wanted = wanted if dtype.kind == "c" else wanted.real
    trans_a, trans_b = data.draw(st.booleans()), data.draw(st.booleans())
    x, y = a.T if trans_a else a, b.T if trans_b else b
    with mock.patch.object(host_copies, "PACKED_BYTES", size):
        got = gemm(hosted, x, y, c, 3, beta, trans_a, trans_b, out)
    assert got is not None and got.dtype == dtype and (out is None or got is out)
    np.testing.assert_array_equal(got, wanted.astype(dtype))


def test_calls_at_a_time_have_memory_of_their_own(rng):
    """Also where one fails, which may leave copies to and from it under way."""
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    more = [lambda: program.play(2 * a, b), lambda: program.play(a, 3 * b)]

    def nested(*args):
        if more:
            found.append(more.pop()())
        return product(*args)

    found, hosted = [], make_hosted(nested)
    program = hosted.write(Call(a, b), lambda _call: REFUSING)
    np.testing.assert_array_equal(program.play(a, b), a @ b)
    for got, wanted in zip(found, (2 * a @ b, a @ (3 * b)), strict=True):
        np.testing.assert_array_equal(got, wanted)
    kept = len(hosted.copies._unused)
    more = [lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        program.play(a, b)
    assert kept == 3 and len(hosted.copies._unused) == 2


def test_a_complex_product_is_copied_to_its_place_once(rng):
    a, b = integers(rng, (200, 3), "c8"), integers(rng, (3, 200), "c8")
    hosted, out = make_hosted(), np.empty((200, 200), "c8")
    gemm(hosted, a, b, out=out)
    hosted.single.write = lambda *_given: Program([])
    tracemalloc.start()
    try:
        assert gemm(hosted, a, b, out=out) is out
        assert tracemalloc.get_traced_memory()[1] < out.nbytes
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize("value, fine", [
    (1e30 - 1e30j, True), (complex(0, np.inf), False), (np.nan, False), (complex(1, -np.inf), False)
])  # fmt: skip
@pytest.mark.parametrize("order", "CF")
def test_complex_numbers_are_finite_or_not(value, fine, order):
    """Also those whose squares are not."""
    x = np.ones((5, 7), "c8", order=order)
    x[3, 4] = value
    assert packed._is_finite(x) is fine


def test_only_what_is_packed_takes_a_buffers_memory(rng, monkeypatch):
    """It is not counted where memory is limited, and large arrays are not copied through it."""
    taken, pinned = [], Device.pinned
    monkeypatch.setattr(Device, "pinned", lambda *given: taken.append(given) or pinned(*given))
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    wide = np.ones((6, 30_000), "f4")  # 1.3 MB with the product
    limited = make_hosted()
    limited.single.plans.options.max_device_memory = 1 << 20
    for hosted, of, count in (
        (PackedOnGpu(limited.single, None), b, 0), (make_hosted(), wide, 0), (make_hosted(), b, 1)
    ):  # fmt: skip
        with mock.patch.object(host_copies, "PACKED_BYTES", 1 << 20):
            hosted.single.plans.most_hosted = 2 << 20
            np.testing.assert_array_equal(gemm(hosted, a, of), a @ of)
        assert len(taken) == count


@pytest.mark.parametrize("workers", [1, 2])
def test_what_several_gpus_are_worth_takes_a_run(workers, rng, monkeypatch):
    monkeypatch.setattr("hybrid_gemm.programs.packed.PACKED_BYTES", 0)
    asked, planned = [], []

    def plan(problem, page_locked):
        asked.append((problem.m, problem.n, problem.k, problem.beta, page_locked))
        return SimpleNamespace(workers=[0] * workers)

    a, b, c = integers(rng, (5, 6)), integers(rng, (6, 7)), integers(rng, (5, 7))
    hosted = make_hosted(counts=(1, 2), plan=plan)
    for call in Call(a, b), Call(a[:], b[:], c[:], 1, 1, out=np.ones_like(c)[:]):
        program = hosted.write(call, lambda _call: Program([lambda slots: planned.append(1)]))
        for _ in range(2):  # it is asked once
            program.play(*call.arrays)
    assert len(planned) == (4 if workers > 1 else 0)
    assert asked == [(5, 7, 6, 0, False), (5, 7, 6, 1, True)]
    for dtypes in ("f4", "f8"), ("i1", "i1"), ("c8", "c8"):  # which a run would cast, or make real
        assert gemm(hosted, a.astype(dtypes[0]), b.astype(dtypes[1])) is not None
    assert len(asked) == 2
    hosted.single.plans.most_hosted = 0
    assert gemm(hosted, a[::-1], b) is None  # which one GPU alone takes


@pytest.fixture
def free(monkeypatch):
    """Bytes that the GPU has free, in a list."""
    free = [64 << 20]
    runtime = SimpleNamespace(memGetInfo=lambda: (free[0], 0))
    cp = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(Device, "cp", cp, raising=False)
    return free


def test_what_takes_a_run(hosted, rng):
    a, b = integers(rng, (5, 6)), integers(rng, (6, 7))
    wide, out = np.ones((5, 7)), np.ones((5, 7), "f4")
    read_only = out.copy()
    read_only.flags.writeable = False
    over = np.lib.stride_tricks.as_strided(np.ones(40, "f4"), (5, 7), (4, 4))
    ints, narrow = np.ones((5, 6), "i4"), np.ones((6, 7), ml_dtypes.bfloat16)  # no dtype has both
    for given_ in (
        (a, b[0]), (a[None], b), (a.astype(bool), b), (a * np.complex64(np.inf), b),
        (a.astype("longdouble"), b), (a, b.tolist()), (a, b, out), (a, b, wide, 1, 1),
        (a, b, out[::-1], 1, 1, False, False, out), (a, np.ones((6, 1 << 16), "f4")),
        (ints, narrow), (narrow.T.copy(), narrow[:, :5], ints[:, :5], 1, 1),
    ):  # fmt: skip
        assert gemm(hosted, *given_) is None
    for place in wide, out[:4], read_only, over:
        assert gemm(hosted, a, b, out=place) is None
    assert gemm(hosted, a, integers(rng, (6, 6)), out=a[:, :6]) is None


def test_more_is_copied_of_what_a_run_would_cast(hosted, free, monkeypatch):
    a, b = np.ones((6, 6), "f4"), np.ones((6, 1 << 16), "f2")
    plans = hosted.single.plans
    options = SimpleNamespace(max_device_memory=None, algorithm="ordinary")
    monkeypatch.setattr(plans, "options", options)
    assert gemm(hosted, a, b).shape == (6, 1 << 16)
    assert gemm(hosted, a, b.astype("f4")) is None
    free[0] = 8 << 20
    assert gemm(hosted, a, b) is None
    free[0], plans.options.max_device_memory = 64 << 20, 8 << 20
    assert gemm(hosted, a, b) is None


def test_large_complex_arrays_are_copied_whole_by_one_gpu(hosted, free):
    """A run takes them apart on the host. What has NaN is left to it, with `out` as it was."""
    a, b = np.full((6, 6), 1 + 1j, "c8"), np.ones((6, 1 << 16), "c8")
    plans, free[0] = hosted.single.plans, 256 << 20
    out = np.zeros((6, 1 << 16), "c8")
    assert gemm(hosted, a, b, out=out) is out and (out == 6 + 6j).all()
    b[0, 0], out[:] = np.nan, 7
    assert gemm(hosted, a, b, out=out) is None and (out == 7).all()
    b[0, 0] = 1
    for name, other in (("algorithm", "3m"), ("counts", (1, 2))):
        where = plans.options if name == "algorithm" else plans
        with mock.patch.object(where, name, other):
            assert gemm(hosted, a, b, out=out) is None


@needs("cuda")
@pytest.mark.parametrize("part", PARTS_OF_C, ids=str)
@pytest.mark.parametrize("dtypes", [("f4", "f4"), ("f2", "f4"), ("i1", "i1"), ("f8", "f4"),
                                    ("f4", ">f4"), ("c8", "c8"), ("i8", "u2"), ("f2", "f2")],
                         ids=str)  # fmt: skip
def test_on_a_gpu(dtypes, part, rng, no_plans):
    """Of any size that is copied whole; nothing takes a plan."""
    with hg.Runner(device="cuda", gpus=[0]) as runner:
        cast = dtypes[0] != dtypes[1] or dtypes[0] == "c8"  # which a run would cast, or take apart
        large = [(1600, 1300, 1000)] if cast else []
        for m, n, k in ((70, 90, 50), (1, 300, 20), (700, 600, 450), *large):
            a, b = (
                integers(rng, s).astype(dtype)
                for s, dtype in zip(((m, k), (k, n)), dtypes, strict=True)
            )
            dtype = np.result_type(a, b)
            c = integers(rng, (m, n)).astype(dtype)
            for i, how in enumerate(WAYS):
                x, y = WAYS[how](a), WAYS[[*WAYS][-1 - i]](b)
                wide = "c16" if dtype.kind == "c" else "f8"
                wanted = (2 * (x.astype(wide) @ y.astype(wide)) + c[part]).astype(dtype)
                got = runner.gemm(x, y, c[part], alpha=2, beta=1)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got, wanted)
                out = np.zeros((m, n), dtype, order="CF"[i % 2])
                assert runner.gemm(x, y, c[part], alpha=2, beta=1, out=out) is out
                np.testing.assert_array_equal(out, wanted)


@needs("cuda")
@pytest.mark.parametrize("shapes", [((16, 37, 41), (16, 41, 30)), ((9, 400, 300), (300, 200))])
def test_stacks_on_a_gpu(shapes, rng):
    a, b = (integers(rng, s) for s in shapes)
    for x, y in ((a, b), (a[::-1], b[..., ::-1]), (a[:, ::2], b[..., ::2])):
        for _ in range(2):
            np.testing.assert_array_equal(hg.matmul(x, y, device="cuda"), x @ y)
        out = np.zeros((*x.shape[:-1], 2 * y.shape[-1]), "f4")[..., ::2]
        assert hg.matmul(x, y, out=out, device="cuda") is out
        np.testing.assert_array_equal(out, x @ y)
