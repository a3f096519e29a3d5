"""`matmul` of vectors and stacks, and C that broadcasts, as NumPy has them."""

import contextlib
import itertools
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import integers
from support.devices import needs
from support.late_gpus import counted

import hybrid_gemm as hg
from hybrid_gemm import matmul, problem
from hybrid_gemm.arrays.stacks import merged
from hybrid_gemm.devices.cuda import cublas
from hybrid_gemm.errors import DTypeError, OptionTypeError, UsageError
from hybrid_gemm.kernel_choice import stacks as choice
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.options import Options
from hybrid_gemm.programs.on_gpu import OneGpu
from hybrid_gemm.programs.packed import multiply_of_host
from hybrid_gemm.programs.planned import Planned
from hybrid_gemm.programs.program import REFUSING, Call
from hybrid_gemm.programs.stacks import StacksOnGpu
from hybrid_gemm.programs.writers import Writers

pytestmark = pytest.mark.blas

SHAPES = [
    ((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 3)), ((4, 5, 7), (7,)), ((7,), (4, 7, 3)),
    ((4, 5, 7), (7, 3)), ((5, 7), (4, 7, 3)), ((4, 5, 7), (4, 7, 3)), ((2, 1, 5, 7), (3, 7, 3)),
    ((2, 3, 5, 7), (1, 1, 7, 3)), ((1, 5, 7), (1, 7, 3)), ((0, 5, 7), (7, 3)), ((4, 5, 0), (0, 3)),
    ((4, 0, 7), (7, 3)), ((3, 1, 7), (3, 7, 1)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_shapes_are_numpys(shapes, device, rng):
    a, b = (integers(rng, shape) for shape in shapes)
    expected = np.matmul(a, b)
    got = matmul(a, b, device=device)
    assert np.shape(got) == expected.shape and got.dtype == expected.dtype
    assert isinstance(got, np.ndarray) == isinstance(expected, np.ndarray)
    np.testing.assert_array_equal(got, expected)
    out = np.full(expected.shape, np.nan, "f4")
    given = matmul(a, b, out, device=device)
    assert given is out or (not out.ndim and given == out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "int64"])
def test_dtypes_and_layouts(dtype, rng):
    whole = integers(rng, (4, 6, 8, 10)).astype(dtype)
    vector = integers(rng, (8,)).astype(dtype)
    for view in (whole, whole[::2, 1::2], whole[::-1], whole.swapaxes(0, 1), whole.swapaxes(1, 2)):
        for a, b in ((view, view.swapaxes(-1, -2)), (view.swapaxes(-1, -2), view)):
            np.testing.assert_array_equal(matmul(a, b), np.matmul(a, b))
    np.testing.assert_array_equal(matmul(vector, whole), np.matmul(vector, whole))
    assert matmul(vector, vector).dtype == dtype


def test_a_stack_that_lies_as_one_matrix_is_one_product(monkeypatch, rng):
    calls = counted(monkeypatch, Planned, "__call__")
    a, b = integers(rng, (6, 5, 4)), integers(rng, (4, 3))
    np.testing.assert_array_equal(matmul(a, b, threads=2), a @ b)
    assert len(calls) == 1
    np.testing.assert_array_equal(matmul(a[::2], b, threads=2), a[::2] @ b)
    assert len(calls) == 4
    np.testing.assert_array_equal(matmul(a[::2], b, device="cpu"), a[::2] @ b)
    assert len(calls) == 4  # NumPy's own loop
    assert matmul(a[:, :0], np.ones((6, 4, 3)), threads=2).shape == (6, 0, 3)
    assert len(calls) == 5  # of pairs without elements, one


STRIDED = [
    ((8, 8, 8), (8, 8, 3)), ((2, 3, 5, 7), (2, 3, 7, 4)), ((2, 1, 5, 7), (3, 7, 3)),
    ((6, 1, 9), (6, 9, 2)), ((300, 32, 32), (300, 32, 32)), ((33, 65), (5, 65, 77)),
]  # fmt: skip


@given(st.lists(st.integers(1, 4), max_size=4), st.lists(st.sampled_from([0, 1]), min_size=4,
       max_size=4))  # fmt: skip
def test_merged_sides_lead_to_the_same_places(sides, broadcast):
    whole = np.zeros([size if kept else 1 for size, kept in zip(sides, broadcast, strict=False)])
    views = np.zeros(sides), np.broadcast_to(whole, sides)
    shape, steps = merged(sides, *(x.strides for x in views))
    assert len(shape) <= max(1, len(sides)) and math.prod(shape) == math.prod(sides)
    for view, step in zip(views, steps, strict=True):
        expected = [np.dot(i, view.strides) if sides else 0 for i in np.ndindex(*sides)]
        assert [np.dot(i, step) for i in np.ndindex(*shape)] == expected
    assert merged((4, 5), (40, 8), (160, 32)) == ((20,), [(8,), (32,)])
    assert merged((4, 5), (40, 8), (0, 32)) == ((4, 5), [(40, 8), (0, 32)])


class There(np.ndarray):
    """A matrix of a GPU, as far as `StacksOnGpu` asks."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data, device_id=0)


@pytest.fixture
def stacks(monkeypatch):
    """Stacks of a GPU whose launches are noted in `launched`, as numbers and steps of bytes."""
    device = SimpleNamespace(
        ordinal=0, cp=SimpleNamespace(
            ndarray=There, broadcast_to=lambda x, shape: np.broadcast_to(x, shape, subok=True),
            empty=lambda shape, dtype: np.zeros(shape, dtype).view(There),
            cuda=SimpleNamespace(
                get_current_stream=lambda _gpu: SimpleNamespace(ptr=7, is_capturing=lambda: False)
            ),
        ), bind_cast=lambda src, dst: lambda a, b, c, stream: None,
        prepared=lambda *x: None, is_current=lambda: True, current=contextlib.nullcontext,
    )  # fmt: skip
    plans = SimpleNamespace(
        options=Options(kernel="cublas"), arithmetic=SimpleNamespace(compute="fp32")
    )
    made = StacksOnGpu(OneGpu(device, plans))
    made.launched = []

    def bind(a, b, c, count, steps, *, tf32, starts):
        def start(*at):
            for by in starts:
                here = (x + y for x, y in zip(at, by, strict=True))
                made.launched.append((*here, count, tuple(steps)))
            return 0

        product = cublas.LibraryProduct("", None, np.zeros(2))
        object.__setattr__(product, "on_stream", lambda stream: start)
        return product

    monkeypatch.setattr(cublas, "bind_stack", bind)
    return made


def multiplied(stacks, a, b, c):
    """Whether one GPU multiplies them together."""
    program = stacks.write(Call(a, b, out=c))
    if program is not REFUSING:
        program.play(a, b, None, c)
    return program is not REFUSING


@pytest.fixture
def no_pairs(monkeypatch):
    monkeypatch.setattr(OneGpu, "write", lambda *x, **y: pytest.fail("pair by pair"))


def test_stacks_that_lie_alike_are_one_program(stacks):
    a, b, c, other = (
        np.zeros(s, "f4").view(There) for s in ((6, 5, 7), (6, 7, 3), (6, 5, 3), (6, 5, 3))
    )
    program = stacks.write(Call(a, b, out=c))
    for out in c, c, other:
        assert program.play(a, b, None, out) is out
    at = [(*(x.ctypes.data for x in (a, b, out)), 6, (140, 84, 60)) for out in (c, c, other)]
    assert stacks.launched == at


@pytest.mark.parametrize("side", range(3), ids="mnk")
def test_stacks_of_long_sides_go_pair_by_pair(stacks, monkeypatch, side):
    """Their kernels count sides in an int, and cuBLAS fails at such a C."""
    monkeypatch.setattr(problem, "MAX_SIDE", 64)
    for length, together in ((64, True), (65, False)):
        m, n, k = (length if i == side else 3 for i in range(3))
        a, b, c = (np.zeros((2, *x), "f4").view(There) for x in ((m, k), (k, n), (m, n)))
        assert multiplied(stacks, a, b, c) == together == bool(stacks.launched)
        stacks.launched.clear()


def test_stacks_of_uneven_steps_are_several_launches(stacks):
    a, b, c = (np.zeros(s, "f4").view(There) for s in ((2, 3, 5, 7), (4, 7, 3), (2, 3, 5, 3)))
    b = np.broadcast_to(b[:3], (2, 3, 7, 3), subok=True)
    assert multiplied(stacks, a, b, c)
    at = [x.ctypes.data for x in (a, b, c)]
    second = (at[0] + 3 * 140, at[1], at[2] + 3 * 60)
    assert stacks.launched == [(*x, 3, (140, 84, 60)) for x in (tuple(at), second)]
    stacks.launched.clear()
    a, b, c = (x.swapaxes(0, 1) for x in (a, b, c))  # as many launches
    assert multiplied(stacks, a, b, c)
    assert stacks.launched == [(*x, 3, (140, 84, 60)) for x in (tuple(at), second)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sides", [(30, 40), (3, 40), (40, 3, 30)])
def test_many_launches_of_an_uneven_stack_are_one_of_copies(stacks, sides, turned):
    """Of heads, which lie between the rows of a matrix; few launches are left as they are."""
    order = *range(len(sides)), len(sides) + 1, len(sides)
    a = np.zeros((sides[0], 5, *sides[1:], 7), "f4").view(There)
    a = np.moveaxis(a, 1, -2)
    b = np.zeros((sides[0], 3, *sides[1:], 7), "f4").view(There)
    b = np.moveaxis(b, 1, -2).transpose(order)
    if turned:
        b = np.ascontiguousarray(b).view(There)
    c = np.zeros((*sides, 5, 3), "f4").view(There)
    assert multiplied(stacks, a, b, c)
    if sides == (3, 40):
        assert len(stacks.launched) == 3
        return
    ((*at, count, steps),) = stacks.launched
    assert count == math.prod(sides) and steps == (140, 84, 60)
    assert at[2] == c.ctypes.data and at[0] != a.ctypes.data
    assert (at[1] == b.ctypes.data) == turned


@pytest.mark.parametrize("what", ["backwards", "steps", "dtype", "B once", "C"])
def test_stacks_that_are_not_read_as_they_lie_are_copied_first(stacks, what):
    a, b, c = (np.zeros(s, "f4").view(There) for s in ((6, 5, 7), (6, 7, 3), (6, 5, 3)))
    x, y, z = a, b, c
    if what == "backwards":
        x = a[::-1]
    elif what == "steps":
        x = np.zeros((6, 5, 14), "f4").view(There)[..., ::2]
    elif what == "dtype":
        x = a.astype("f2")
    elif what == "B once":
        y = np.broadcast_to(np.zeros((7, 6), "f4").view(There)[:, ::2], (6, 7, 3), subok=True)
    else:
        z = np.zeros((6, 5, 6), "f4").view(There)[..., ::2]
    assert multiplied(stacks, x, y, z)
    ((*at, count, steps),) = stacks.launched
    assert count == 6 and steps == (140, 0 if what == "B once" else 84, 60)
    moved = [i for i, v in enumerate((x, y, z)) if at[i] != v.ctypes.data]
    assert moved == [{"B once": 1, "C": 2}.get(what, 0)]


@needs("cuda")
def test_any_stacks_of_a_gpu_are_few_launches(no_pairs, rng):
    cp = pytest.importorskip("cupy")
    a, b = (rng.integers(-2, 3, s).astype("f4") for s in ((6, 40, 30), (6, 30, 50)))
    x, y = cp.asarray(a), cp.asarray(b)
    out = cp.zeros((6, 40, 100), "f4")[..., ::2]
    for p, q, into, wanted in (
        (x[::-1], y, None, a[::-1] @ b), (x[:, ::2], y[..., ::3], None, a[:, ::2] @ b[..., ::3]),
        (x.astype("f2"), y, None, a @ b), (x, y.astype("f8"), None, a @ b.astype("f8")),
        (x, y, out, a @ b),
        (x.reshape(2, 3, 40, 30), y[:3, :, ::-1], None, a.reshape(2, 3, 40, 30) @ b[:3, :, ::-1]),
    ):  # fmt: skip
        got = matmul(p, q, into)
        assert got.dtype == wanted.dtype and (into is None or got is out)
        np.testing.assert_array_equal(got.get(), wanted)


@pytest.mark.parametrize("gpus, most, pieces", [
    (1, 1 << 30, [[7]]), (2, 1 << 30, [[3], [4]]), (3, 1 << 30, [[3], [4], []]),
    (1, 3 << 20, [[1, 2, 2, 2]]), (2, 3 << 20, [[1, 2], [2, 2]]), (2, 1 << 20, None),
])  # fmt: skip
def test_stacks_of_the_host_go_to_all_gpus_in_pieces(gpus, most, pieces, rng):
    a, b = integers(rng, (7, 2, 300, 200)), integers(rng, (1, 2, 200, 250))
    b = np.broadcast_to(b, (7, 2, 200, 250))
    c, taken = np.zeros((7, 2, 300, 250), "f4"), [[] for _ in range(gpus)]

    class Gpu:
        def __init__(self, number):
            self.number, self.stacks = number, SimpleNamespace(stackable=lambda *_: True)

        def multiply_stacks(self, multiply, x, y, z):
            taken[self.number].append(len(z))
            return multiply(x, y, z)

    multiply = lambda x, y, z: np.matmul(x, y, out=z) is z  # noqa: E731
    done = multiply_of_host([Gpu(i) for i in range(gpus)], multiply, a, b, c, most)
    assert done == (pieces is not None)
    assert taken == (pieces or [[], []])
    if done:
        np.testing.assert_array_equal(c, a @ b)


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("shapes", STRIDED, ids=str)
def test_stacks_on_a_gpu_are_few_launches(shapes, dtype, no_pairs, rng):
    cp = pytest.importorskip("cupy")
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    a, b = (rng.integers(-2, 3, shape).astype("f4") for shape in shapes)
    expected = np.matmul(a, b)
    x, y = (cp.asarray(v.astype(dtype)) for v in (a, b))

    def check(got):
        np.testing.assert_array_equal(
            got.get().astype("f4" if got.itemsize == 2 else "c16"), expected
        )

    for _ in range(3):  # looked at, remembered
        check(matmul(x, y))
    turned = cp.asarray(np.ascontiguousarray(a.swapaxes(-1, -2)).astype(dtype)).swapaxes(-1, -2)
    out = cp.zeros((*expected.shape[:-1], expected.shape[-1] + 3), dtype)[..., :-3]
    assert matmul(turned, y, out) is out
    check(out)
    np.testing.assert_array_equal(matmul(a, b, device="cuda"), expected)  # from the host


@needs("cuda")
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("options", [{}, {"kernel": "own"}, {"algorithm": "3m"}], ids=str)
def test_complex_stacks_on_a_gpu(options, dtype, rng):
    cp = pytest.importorskip("cupy")
    for shapes in STRIDED:
        a, b = (rng.integers(-2, 3, (2, *s)).astype("f4") for s in shapes)
        a, b = ((x[0] + 1j * x[1]).astype(dtype) for x in (a, b))
        for x, y in ((a, b), (a[..., ::-1], b[..., ::-1, :]), (a, b.real.copy())):
            for _ in range(3):
                got = matmul(cp.asarray(x), cp.asarray(y), **options)
                assert got.dtype == dtype
                np.testing.assert_array_equal(got.get(), x @ y)


@needs("cuda")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sides", [(32, 32, 32), (64, 64, 16), (33, 29, 41)])
def test_stacks_by_our_own_kernels(dtype, sides, monkeypatch, no_pairs, rng):
    cp = pytest.importorskip("cupy")
    monkeypatch.setattr(cublas, "bind_stack", lambda *x, **y: pytest.fail("by cuBLAS"))
    (m, n, k), count = sides, 300
    for turn in range(5):
        a, b = (rng.integers(-2, 3, s).astype("f4") for s in ((count, m, k), (count, k, n)))
        x, y = (cp.asarray(v.astype(np.dtype(dtype))) for v in (a, b))
        if turn > 2:  # B lies along k
            y = cp.ascontiguousarray(y.swapaxes(1, 2)).swapaxes(1, 2)
        got = matmul(x, y, kernel="own")
        np.testing.assert_array_equal(got.get().astype("f4"), a @ b)


@needs("cuda")
def test_stacks_of_large_matrices_and_named_kernels_are_pair_by_pair(monkeypatch, rng):
    cp = pytest.importorskip("cupy")
    a = cp.asarray(integers(rng, (2, 64, 64)))
    monkeypatch.setattr(cublas, "bind_stack", lambda *x, **y: pytest.fail("by one launch"))
    np.testing.assert_array_equal(matmul(a, a, kernel="naive").get(), (a @ a).get())
    monkeypatch.setattr("hybrid_gemm.programs.stacks.STACKED_FLOPS", 1000)
    np.testing.assert_array_equal(matmul(a, a).get(), (a @ a).get())


@needs("cuda")
@pytest.mark.parametrize("compute", ["tf32", "fp32x3", "auto"])
def test_small_stacks_on_tensor_cores_are_few_launches(compute, no_pairs, monkeypatch, rng):
    """In TF32 by cuBLAS; where strict fp32 of the whole stack takes no longer, in that."""
    cp = pytest.importorskip("cupy")
    for shapes in STRIDED:
        a, b = (rng.integers(-2, 3, shape).astype("f4") for shape in shapes)
        x, y = cp.asarray(a), cp.asarray(b)
        for _ in range(3):
            np.testing.assert_array_equal(matmul(x, y, compute=compute).get(), a @ b)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="float64"):
        matmul(x.astype("f8"), y.astype("f8"), compute="tf32")


@needs("cuda")
def test_large_products_of_a_stack_are_split(monkeypatch, rng):
    """In fp32x3 a product after the other, where that is faster."""
    cp = pytest.importorskip("cupy")
    calls = counted(monkeypatch, Writers, "multiply")
    a = cp.asarray(rng.integers(-2, 3, (3, 1200, 1200)).astype("f4"))
    np.testing.assert_array_equal(matmul(a, a, compute="fp32x3").get(), (a @ a).get())
    assert len(calls) == 3


@pytest.mark.parametrize("model", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_which_stacks_are_faster_in_strict_fp32(model):
    machine = Machine(model, 132, 90, 66.9)
    assert choice.strict_is_faster(machine, 64, (256, 256, 256))
    assert not choice.strict_is_faster(machine, 64, (2000, 2000, 2000))
    assert not choice.strict_is_faster(Machine("Some GPU", 7, 80, 1.0), 64, (256, 256, 256))


@pytest.mark.parametrize("shapes, message", [
    (((5, 7), (6, 3)), "5 x 7 and B is 6 x 3"), (((7,), (6,)), "1 x 7 and B is 6 x 1"),
    (((2, 5, 7), (3, 7, 3)), r"\(2,\) .* \(3,\)"), (((), (3, 3)), "A is a number"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(UsageError, match=message):
        matmul(*(np.ones(shape) for shape in shapes))


def test_outputs_that_do_not_fit_are_refused(rng):
    a, b = integers(rng, (4, 5, 5)), integers(rng, (5, 5))
    with pytest.raises(UsageError, match="overlaps A"):
        matmul(a, b, a)  # also where the products one by one would overlap nothing
    with pytest.raises(UsageError, match="overlaps A"):
        matmul(a[1:], b, a[:-1])
    with pytest.raises(UsageError, match=r"shape \(4, 5\)"):
        matmul(a, b, np.empty((4, 5), "f4"))
    with pytest.raises(DTypeError, match="out must be"):
        matmul(a, b, a.tolist())
    with pytest.raises(DTypeError, match="bool"):
        matmul(a.astype(bool), b)
    with pytest.raises(TypeError, match="threads"):
        matmul(a, b, thread=2)


def test_c_broadcasts_to_the_product(device, rng):
    """A row or a column of bias."""
    a, b = integers(rng, (30, 20)), integers(rng, (20, 50))
    for shape, (alpha, beta) in itertools.product(
        [(50,), (1, 50), (30, 1), (1, 1), (), (30, 50)], [(1, 1), (2, -1), (1, 0), (0, 3)]
    ):
        c = integers(rng, shape)
        before = c.copy()
        for threads in (1, 2):
            got = hg.gemm(a, b, c, alpha=alpha, beta=beta, device=device, threads=threads)
            np.testing.assert_array_equal(got, alpha * (a @ b) + beta * c)
            np.testing.assert_array_equal(c, before)
    with pytest.raises(UsageError, match=r"C has shape \(30,\).* 30 x 50"):
        hg.gemm(a, b, np.ones(30), beta=1, device=device)


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4), (4,)])
def test_what_is_for_ranks_needs_a_communicator(shape):
    with pytest.raises(OptionTypeError, match="pass comm too"):
        matmul(np.ones(shape), np.ones((4, 4)), distribution="root", device="cpu")
