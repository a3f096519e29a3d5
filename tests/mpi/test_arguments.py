"""Arguments that are wrong, on all ranks or on one alone. Every rank runs these."""

import functools

import ml_dtypes
import numpy as np
import pytest

import hybrid_gemm
from hybrid_gemm import RankRunner
from hybrid_gemm.errors import DTypeError, HybridGemmError, OptionTypeError, UsageError
from hybrid_gemm.ranks.launch import together

pytestmark = pytest.mark.mpi


def test_an_error_of_one_rank_is_raised_by_all(comm):
    shape = (4, 5) if comm.rank == comm.size - 1 else (4, 6)
    with pytest.raises(UsageError, match="shape"):
        hybrid_gemm.gemm(np.ones(shape), np.ones((7, 3)), comm=comm, device="cpu")
    bad = np.ones((4, 4), "G" if comm.rank == comm.size - 1 else "f4")
    with pytest.raises(DTypeError, match="complex256"):
        hybrid_gemm.gemm(bad, np.ones((4, 4), "f4"), comm=comm, device="cpu")
    with pytest.raises(UsageError, match="distribution"):
        hybrid_gemm.gemm(bad, bad, comm=comm, device="cpu", distribution="diagonal")
    with pytest.raises(UsageError, match="critical"):
        hybrid_gemm.gemm(bad, bad, comm=comm, device="cpu", reduce="critical")
    if comm.size > 1:
        with pytest.raises(UsageError, match="agree on"):
            hybrid_gemm.gemm(
                np.ones((4, 4)), np.ones((4, 4)), comm=comm, alpha=comm.rank, device="cpu"
            )


@pytest.mark.parametrize("name", ["distribution", "result"])
@pytest.mark.parametrize("value", [False, b"rows", np.zeros(2)], ids=repr)
def test_where_arrays_lie_is_said_by_a_name(comm, name, value):
    a = np.ones((4, 4))
    choice = {name: value} if comm.rank == comm.size - 1 else {}
    with pytest.raises(OptionTypeError, match=f"{name} takes one of replicated, root"):
        hybrid_gemm.gemm(a, a, comm=comm, device="cpu", **choice)


@pytest.mark.parametrize(("error", "raised"), [
    (UsageError, UsageError), (TypeError, TypeError), (MemoryError, MemoryError),
    (FileNotFoundError, HybridGemmError), (UnicodeError, ValueError),
    (KeyError, HybridGemmError), (RuntimeError, HybridGemmError),
])  # fmt: skip
def test_errors_that_all_ranks_raise(comm, error, raised):
    def fails():
        if comm.rank == comm.size - 1:
            raise error("this one")

    says = "this one"
    if error in (KeyError, RuntimeError):  # of which others may not know
        says = f"{error.__name__}: '?this one'?"
    with pytest.raises(raised, match=f"rank {comm.size - 1}: {says}|^{says}$") as caught:
        together(comm, fails)
    assert type(caught.value) is raised
    assert isinstance(caught.value.__cause__, error) == (comm.rank == comm.size - 1)


def test_a_device_that_fails_to_open_on_one_rank_leaves_the_ranks_in_step(comm, monkeypatch):
    """By an error that is none of this package's, such as CUDA's."""
    a = np.ones((4, 4))

    def fails(_runner):
        raise RuntimeError("no context")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(RankRunner, "_local_runner", fails)
        with pytest.raises(HybridGemmError, match="RuntimeError: no context"):
            RankRunner(comm, device="cpu", rank_timeout=20)
    np.testing.assert_array_equal(hybrid_gemm.gemm(a, a, comm=comm, device="cpu"), a @ a)


def test_arguments_that_do_not_fit_on_one_rank_are_refused_by_all(comm):
    a, wrong = np.ones((4, 4)), comm.rank == comm.size - 1
    misspelt = {"thread": 1} if wrong else {}
    runner = RankRunner(comm, device="cpu")
    calls = [
        functools.partial(hybrid_gemm.gemm, comm=comm, device="cpu"),
        functools.partial(hybrid_gemm.matmul, comm=comm, device="cpu"),
        runner.gemm,
        runner.matmul,
    ]
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument 'thread'"):
            call(a, a, **misspelt)
        np.testing.assert_array_equal(call(a, a), a @ a)
    for call in calls[0], calls[2]:
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
            call(a, *[a] * (not wrong))
        with pytest.raises(TypeError, match="takes c by its place"):
            call(a, a, **({"c": a} if wrong else {}))


@pytest.mark.parametrize(("root", "error", "says"), [
    (0.5, OptionTypeError, "root takes a whole number; 0.5 was given"),
    ("a", OptionTypeError, "root takes a whole number; 'a' was given"),
    (True, OptionTypeError, "root takes a whole number"),
    (-1, UsageError, "root=-1; there are ranks 0 to"),
])  # fmt: skip
def test_a_root_that_is_no_rank_is_refused_by_all(comm, root, error, says):
    a, here = np.ones((4, 4)), comm.rank == comm.size - 1
    for call, x in (hybrid_gemm.gemm, a), (hybrid_gemm.matmul, a), (hybrid_gemm.matmul, a[None]):
        for given in root, root if here else 0:
            with pytest.raises(error, match=says):
                call(x, x, comm=comm, device="cpu", result="root", root=given)
    got = hybrid_gemm.gemm(a, a, comm=comm, device="cpu", result="root", root=np.int64(0))
    assert (got is None) == (comm.rank > 0)


def test_an_alpha_that_is_no_number_on_one_rank_is_refused_by_all(comm):
    if comm.size > 1:
        a, alpha = np.ones((4, 4)), np.array([1.0, 2.0]) if comm.rank else 1.0
        with pytest.raises(UsageError, match="do not agree on alpha"):
            hybrid_gemm.gemm(a, a, alpha=alpha, comm=comm, device="cpu")


class Failing:
    """An array of a library that cannot give it away."""

    def __init__(self, error):
        self.error = error

    def __array__(self, *_arguments, **_keywords):
        raise self.error


class Unsaid(Exception):
    """Its message takes what is not there any more."""

    def __str__(self):
        raise AttributeError("mine")


@pytest.mark.parametrize("error", [RuntimeError, KeyError, ZeroDivisionError, BufferError, Unsaid])
def test_an_array_whose_own_code_fails_on_one_rank_is_refused_by_all(comm, error):
    a = np.ones((4, 4))
    wrong = Failing(error("mine")) if comm.rank == comm.size - 1 else a
    for call in hybrid_gemm.gemm, hybrid_gemm.matmul:
        with pytest.raises(HybridGemmError, match=f"{error.__name__}: .*(mine|Attr)"):
            call(wrong, a, comm=comm, device="cpu", rank_timeout=20)
    np.testing.assert_array_equal(hybrid_gemm.gemm(a, a, comm=comm, device="cpu"), a @ a)


def test_an_alpha_that_cannot_be_sent_is_refused_by_all(comm):
    a, alpha = np.ones((4, 4)), (lambda: 1) if comm.rank == comm.size - 1 else 1
    for name in "alpha", "beta":
        with pytest.raises(DTypeError, match=f"{name} must be a number, not <function"):
            hybrid_gemm.gemm(a, a, a, comm=comm, device="cpu", rank_timeout=20, **{name: alpha})


def test_what_cannot_be_sent_leaves_the_ranks_in_step(comm):
    """Also an alpha that is an array of objects, and choices of stacks."""
    last, stack = comm.rank == comm.size - 1, np.ones((3, 4, 4))
    for calls, error in (
        (lambda x: hybrid_gemm.matmul(stack, stack, comm=comm, device="cpu", result=x), UsageError),
        (lambda x: hybrid_gemm.matmul(stack, stack, comm=comm, device="cpu",
                                      distribution=x or "replicated"), UsageError),
        (lambda x: hybrid_gemm.gemm(stack[0], stack[0], comm=comm, device="cpu",
                                    alpha=np.array(x or 1, object)), HybridGemmError),
    ):  # fmt: skip
        with pytest.raises((error, TypeError)):
            calls((lambda: 0) if last else None)
        got = hybrid_gemm.matmul(stack, stack, comm=comm, device="cpu", rank_timeout=20)
        np.testing.assert_array_equal(got, stack @ stack)


@pytest.mark.parametrize("given", ["A", "B", "C"])
def test_copies_of_a_matrix_have_one_dtype_on_all_ranks(comm, given):
    """Ranks that each have all of it would multiply different numbers."""
    if comm.size == 1:
        return
    a = np.full((4, 4), 0.1)
    arrays = {x: a.astype("f4") if x == given and comm.rank else a for x in "ABC"}
    options = {"comm": comm, "device": "cpu", "beta": 1}
    with pytest.raises(DTypeError, match=f"ranks do not agree on the dtype of {given}: .*float32"):
        hybrid_gemm.gemm(*arrays.values(), **options)
    swapped = a.astype(a.dtype.newbyteorder()) if comm.rank else a  # of the same numbers
    got = hybrid_gemm.gemm(swapped, a, a, **options)
    np.testing.assert_array_equal(got, hybrid_gemm.gemm(a, a, a, **options))
    if given != "C":
        with pytest.raises(DTypeError, match=f"dtype of {given}"):
            hybrid_gemm.matmul(arrays["A"], arrays["B"], comm=comm, device="cpu")


@pytest.mark.parametrize("distribution", ["root", "replicated", "rows", "cols"])
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_the_byte_order_of_one_rank_is_its_own(comm, name, distribution):
    """A swapped bfloat16 that is unpickled swaps the dtype that the whole process has."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    edge = 3 * comm.size
    a = (np.arange(edge * edge).reshape(edge, edge) % 7).astype(dtype)
    mine = slice(3 * comm.rank, 3 * comm.rank + 3)
    x, y = {"rows": (a[mine], a), "cols": (a[:, mine], a[mine])}.get(distribution, (a, a))
    if comm.rank == comm.size - 1 or distribution == "root":
        x, y = (z.astype(dtype.newbyteorder()) for z in (x, y))
    if distribution == "root" and comm.rank:
        x = y = None
    got = hybrid_gemm.gemm(
        x, y, comm=comm, device="cpu", distribution=distribution, result="replicated"
    )
    whole = a.astype("f4") @ a.astype("f4")
    assert got.dtype == a.dtype and dtype.isnative
    np.testing.assert_array_equal(got, whole.astype(dtype))


@pytest.mark.parametrize(("out", "error", "says"), [
    (np.zeros((4, 4), "i4"), DTypeError, "out has dtype int32; .* float32"),
    (np.zeros((5, 4), "f4"), UsageError, r"out has shape \(5, 4\); this product is \(4, 4\)"),
    (np.zeros((2, 4, 4), "f4"), UsageError, "out has shape"),
    ([[0] * 4] * 4, DTypeError, "out must be an array"),
    (np.broadcast_to(np.float32(0), (4, 4)), UsageError, "read-only"),
])  # fmt: skip
def test_an_out_that_does_not_take_the_product_is_refused(comm, out, error, says):
    a = np.ones((4, 3), "f4")
    with pytest.raises(error, match=says):
        hybrid_gemm.gemm(a, a.T, out=out, comm=comm, device="cpu")
    wrong = out if comm.rank == comm.size - 1 else None  # of one rank alone
    with pytest.raises(error, match=says):
        hybrid_gemm.gemm(a, a.T, out=wrong, comm=comm, device="cpu")


def test_an_out_of_all_rows_is_refused_where_a_rank_gets_its_own(comm):
    a = np.ones((2 * comm.size, 3))
    whole = np.zeros((2 * comm.size + 1, 3))
    with pytest.raises(UsageError, match=r"this rank's part of the product, rows 0:2, is \(2, 3\)"):
        hybrid_gemm.gemm(a, np.ones((3, 3)), out=whole, comm=comm, device="cpu", result="rows")


def test_ranks_that_make_different_calls_are_refused(comm):
    if comm.size == 1:
        return
    a, first = np.ones((4, 4)), comm.rank == 0
    with pytest.raises(UsageError, match="same call: rank 0 makes gemm, rank 1 matmul"):
        (hybrid_gemm.gemm if first else hybrid_gemm.matmul)(a, a, comm=comm, device="cpu")
    runner = RankRunner(comm, device="cpu")
    call = functools.partial(hybrid_gemm.gemm, comm=comm, device="cpu") if first else runner.matmul
    with pytest.raises(UsageError, match="rank 0 makes gemm or matmul with comm, rank 1 matmul"):
        call(a, a)
    np.testing.assert_array_equal(hybrid_gemm.gemm(a, a, comm=comm, device="cpu"), a @ a)


@pytest.mark.parametrize(("distribution", "wrong", "says"), [
    ("rows", {"B": (4, 3)},
     r"B does not fit together: rank 0 has shape \(5, 3\), rank 1 \(4, 3\); .*pass the same$"),
    ("rows", {"A": (4, 6)},
     r"A does .* rank 1 \(4, 6\); with distribution='rows' ranks pass rows .* all as long$"),
    ("cols", {"A": (3, 5)}, r"A does .* ranks pass columns of one matrix, all as high$"),
    ("cols", {"B": (4, 3)},
     r"shapes do not match: .* joins A of the ranks' columns, of which rank 0 has 4 x 5; B of the "
     r"ranks' rows, of which rank 0 has 5 x 3\)$"),
    ("rows", {"C": (4, 3), "beta": 1}, r"C is missing on rank 0"),
])  # fmt: skip
def test_what_does_not_fit_is_said_as_ranks_gave_it(comm, distribution, wrong, says):
    if comm.size == 1:
        return
    shapes = {"A": (4, 5), "B": (5, 3)} | (wrong if comm.rank == 1 else {})
    a, b, c = (np.ones(shapes[x]) if x in shapes else None for x in "ABC")
    with pytest.raises(UsageError, match=says):
        hybrid_gemm.gemm(
            a, b, c, beta=wrong.get("beta", 0), comm=comm, device="cpu", distribution=distribution
        )


def test_the_one_choice_that_differs_is_named(comm):
    if comm.size == 1:
        return
    a, last = np.ones((4, 4)), comm.rank == comm.size - 1
    for name, value in {"alpha": 2.0, "result": "rows", "distribution": "rows"}.items():
        with pytest.raises(UsageError, match=f"ranks do not agree on {name}: rank 0 has "):
            hybrid_gemm.gemm(a, a, comm=comm, device="cpu", **({name: value} if last else {}))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("f4", (4, 4)), ("F", (60, 70)), ("i4", (1, 300)), (ml_dtypes.bfloat16, (300, 1))],
    ids=str,
)
def test_a_replicated_matrix_is_the_same_on_all_ranks(comm, dtype, shape):
    """Where it is not, each rank would multiply another, and C be a mixture without a word."""
    rng, last = np.random.default_rng(5), comm.size - 1
    same = rng.integers(-9, 9, shape).astype(dtype)
    other = rng.integers(-9, 9, shape).astype(dtype) if comm.rank == last else same
    gemm = functools.partial(hybrid_gemm.gemm, comm=comm, device="cpu")
    matmul = functools.partial(hybrid_gemm.matmul, comm=comm, device="cpu")
    transposed, square = np.ascontiguousarray(same.T), same @ same.T
    calls = [
        ("A", lambda x: gemm(x, transposed)),
        ("A", lambda x: matmul(x, transposed)),
        ("A", lambda x: matmul(np.stack([x, x]), transposed)),
        ("B", lambda x: gemm(transposed, x)),
        ("B", lambda x: gemm(transposed, x, distribution="rows")),
        ("B", lambda x: gemm(same, x, trans_b=True)),
        ("C", lambda x: gemm(square, same, x, beta=1)),
    ]
    for name, call in calls:
        call(same)
        if last:
            says = f"do not pass the same {name}: .*rank 0 are not those on rank {last}\\."
            with pytest.raises(UsageError, match=says):
                call(other)
        call(same)
    gemm(square, same, other)  # whose C no rank reads
    gemm(other, transposed, alpha=0)


def test_replicated_floats_may_differ_by_roundings(comm):
    a = np.random.default_rng(1).uniform(-1, 1, (50, 50)).astype("f4")
    mine = np.nextafter(a, np.float32(comm.rank)) if comm.rank else a
    c = hybrid_gemm.gemm(mine, mine, comm=comm, device="cpu")
    np.testing.assert_allclose(c, a @ a, atol=1e-5)
    a[0, 6:9] = np.nan, np.inf, -np.inf
    hybrid_gemm.gemm(a, a, comm=comm, device="cpu")
    with np.errstate(all="raise"):
        huge = np.full((9, 9), np.finfo(float).max)
        assert np.isposinf(hybrid_gemm.gemm(huge, huge, comm=comm, device="cpu")).all()
