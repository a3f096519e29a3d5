"""Products over ranks, on every device that is here; whole numbers make equality exact.

Every rank runs these: `mpirun -n 3 python -m pytest tests/mpi`, or plain pytest for one.
"""

import dataclasses
import gc
import itertools
import time
import weakref

import numpy as np
import pytest
from support.arrays import Other, integers
from support.devices import on
from support.emulation import needs_emulator
from support.ranks import share

import hybrid_gemm
from hybrid_gemm import RankRunner
from hybrid_gemm.arrays.operand import Operand
from hybrid_gemm.errors import (
    UnavailableError,
    UsageError,
)
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks import launch, rank_planner, transports, verify
from hybrid_gemm.ranks import runner as runner_module
from hybrid_gemm.ranks.rank_plan import make_rank_plan
from hybrid_gemm.ranks.redistribution import parts_of
from hybrid_gemm.verify import growth_of

pytestmark = pytest.mark.mpi
SHAPES = [(65, 33, 70), (1, 5, 130), (90, 3, 1), (7, 9, 0), (0, 3, 4), (3, 257, 64), (2, 2, 2)]


@pytest.mark.parametrize(("split", "threads", "rounds"), [  # each pair of their values
    ("rows", 1, None), ("rows", 2, 3), ("cols", 1, 3), ("cols", 2, None), ("auto", 1, None),
    ("auto", 2, 3),
])  # fmt: skip
def test_products_of_replicated_matrices(comm, device, split, threads, rounds, rng):
    runner = RankRunner(comm, device=device, split=split, threads=threads, rounds=rounds)
    for m, n, k in SHAPES:
        a, b, c = (integers(rng, shape) for shape in ((m, k), (k, n), (m, n)))
        got = runner.gemm(a, b, c, alpha=2, beta=-1)
        np.testing.assert_array_equal(got, 2 * (a @ b) - c)
        np.testing.assert_array_equal(runner.gemm(a, b), a @ b)
    runner.close()


@pytest.mark.parametrize("dtypes", [("int8", "int8"), ("float32", "float64")])
def test_sums_of_what_lies_on_devices_in_another_dtype(comm, rng, dtypes):
    """The emulator plays a device that has the caller's arrays, as a GPU may."""
    with RankRunner(comm, device="emulator", grid=(1, 1, comm.size)) as runner:
        runner._described = lambda x: Operand.of(x, runner.devices[0])
        a, b = (integers(rng, s, x) for s, x in zip(((9, 70), (70, 5)), dtypes, strict=True))
        np.testing.assert_array_equal(runner.gemm(a, b), a @ b)


def test_matrices_stay_on_the_host_where_c_is_made_there(comm, rng, monkeypatch):
    """As with GPUs that do not read each other's memory, which emulators play."""
    monkeypatch.setattr(rank_planner, "MOVED_BY_PEERS", 0)
    monkeypatch.setattr(runner_module, "put", lambda *_: pytest.fail("put on a device"))
    a, b = integers(rng, (30, 20)), integers(rng, (20, 10))
    with RankRunner(comm, device="emulator", split="rows") as runner:
        runner._planner.sharing = 1
        np.testing.assert_array_equal(runner.gemm(a, b, result="replicated"), a @ b)


@pytest.mark.parametrize("split", ["rows", "cols", "auto"])
def test_every_distribution(comm, device, split, rng):
    runner = RankRunner(comm, device=device, split=split)
    for m, n, k in SHAPES:
        a, b, c = (integers(rng, shape) for shape in ((m, k), (k, n), (m, n)))
        rows, ks = share(m, comm), share(k, comm)
        expected = a @ b + c
        options = {"beta": 1, "distribution": "root", "root": comm.size - 1}
        here = comm.rank == comm.size - 1
        got = runner.gemm(*((a, b, c) if here else (None,) * 3), **options)
        assert (got is None) != here
        if here:
            np.testing.assert_array_equal(got, expected)
        got = runner.gemm(a[rows], b, c[rows], beta=1, distribution="rows")
        np.testing.assert_array_equal(got, expected[rows])
        got = runner.gemm(a[:, ks], b[ks], c[rows], beta=1, distribution="cols")
        np.testing.assert_array_equal(got, expected[rows])
        out = np.empty_like(expected)
        got = runner.gemm(
            a[:, ks].T, np.asfortranarray(b[ks].T), trans_a=True, trans_b=True, out=out,
            distribution="cols", result="replicated",
        )  # fmt: skip
        assert got is out
        np.testing.assert_array_equal(got, a @ b)
    runner.close()


def test_uneven_rows(comm, rng):
    """All rows but one with the last rank; C comes back as the rows of A were given."""
    a, b = integers(rng, (40, 30)), integers(rng, (30, 20))
    edges = [0, *[1] * (comm.size - 1), 40]
    mine = slice(*edges[comm.rank : comm.rank + 2]) if comm.size > 1 else slice(0, 40)
    got = hybrid_gemm.gemm(a[mine], b, comm=comm, device="cpu", distribution="rows")
    np.testing.assert_array_equal(got, (a @ b)[mine])


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "int8", ">f4"])
def test_dtypes(comm, device, dtype, rng):
    a, b = integers(rng, (37, 50), dtype), integers(rng, (50, 41), dtype)
    got = hybrid_gemm.gemm(a, b, comm=comm, device=device, split="cols")
    assert got.dtype == np.result_type(a, b)
    np.testing.assert_array_equal(got, (a.astype("i8") @ b.astype("i8")).astype(got.dtype))


@pytest.mark.parametrize(("first", "others"), [("i4", "i8"), ("f4", "f8"), ("f8", "c16")])
def test_parts_of_several_dtypes_keep_their_values_where_they_move(comm, first, others, rng):
    """The first rank's dtype holds its own rows, and not those of the others."""
    a, b, c = (integers(rng, shape, others) for shape in ((9, 8), (8, 6), (9, 6)))
    large = np.array(2**40 + (1j if others == "c16" else 1)).astype(others)
    a[9 // comm.size :] += large
    c[9 // comm.size :] += large
    rows, ks = share(9, comm), share(8, comm)

    def mine(x):
        return x[rows] if comm.rank else x[rows].real.astype(first)

    options = {"comm": comm, "device": "cpu", "result": "replicated"}
    for split in "rows", "cols":
        got = hybrid_gemm.gemm(mine(a), b, distribution="rows", split=split, **options)
        np.testing.assert_array_equal(got, a @ b)
    got = hybrid_gemm.gemm(a[:, ks], b[ks], mine(c), beta=1, distribution="cols", **options)
    np.testing.assert_array_equal(got, a @ b + c)


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_a_c_that_is_not_read_widens_the_product(comm, split):
    a, c = np.full((6, 6), 1e30, "f4"), np.zeros((6, 6), "f8")
    got = hybrid_gemm.gemm(a, a, c, comm=comm, device="cpu", split=split)
    assert got.dtype == "f8"
    np.testing.assert_allclose(got, a.astype("f8") @ a.astype("f8"))


@pytest.mark.parametrize(("split", "dtype", "algorithm"), [
    ("rows", "complex128", "ordinary"), ("cols", "complex64", "ordinary"),
    ("cols", "complex128", "3m"), ("auto", "complex64", "ordinary"), ("rows", "complex64", "3m"),
])  # fmt: skip
def test_complex_products(comm, device, split, dtype, algorithm, rng):
    runner = RankRunner(comm, device=device, split=split, threads=2, rounds=3, algorithm=algorithm)
    for m, n, k in [(65, 33, 70), (7, 9, 0), (0, 3, 4), (3, 257, 64), (2, 3, 8), (2, 9, 8)]:
        a, b, c = (
            (integers(rng, shape) + 1j * integers(rng, shape)).astype(dtype)
            for shape in ((m, k), (k, n), (m, n))
        )
        rows, ks = share(m, comm), share(k, comm)
        got = runner.gemm(
            a.T, b.conj().T, c, alpha=1j, beta=1 - 1j, trans_a=True, trans_b="c"
        )  # fmt: skip
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, 1j * (a @ b) + (1 - 1j) * c)
        got = runner.gemm(a[rows], b, c[rows], beta=2, distribution="rows")
        np.testing.assert_array_equal(got, (a @ b + 2 * c)[rows])
        out = np.empty((m, n), "c16")
        got = runner.gemm(
            a[:, ks].conj().T, np.asfortranarray(b[ks].T), trans_a="c", trans_b=True, out=out,
            distribution="cols", result="replicated",
        )  # fmt: skip
        assert got is out
        np.testing.assert_array_equal(got, a @ b)
    runner.close()


def test_an_alpha_of_nan_is_agreed_upon(comm):
    a = np.ones((7, 7), "f4")
    for split in ("rows", "cols"):
        c = hybrid_gemm.gemm(a, a, alpha=float("nan"), comm=comm, device="cpu", split=split)
        assert np.isnan(c).all()


def test_ranks_agree_on_conjugates(comm):
    a = np.ones((4, 4), "c8")
    if comm.size > 1:
        with pytest.raises(UsageError, match="conjugates"):
            hybrid_gemm.gemm(a, a, comm=comm, device="cpu", trans_a="c" if comm.rank else True)


def test_every_grid_of_the_user_gives_the_product(comm, rng):
    a, b = integers(rng, (50, 60)), integers(rng, (60, 70))
    for pm, pn in itertools.product(range(1, 5), repeat=2):
        if comm.size % (pm * pn) == 0:
            runner = RankRunner(comm, device="cpu", grid=(pm, pn, comm.size // pm // pn))
            np.testing.assert_array_equal(runner.gemm(a, b), a @ b)


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_resident_runs(comm, device, split, rng):
    a, b = integers(rng, (50, 60)), integers(rng, (60, 70))
    runner = RankRunner(comm, device=device, split=split)
    plan = runner.plan(Problem(50, 70, 60, "float32"), resident=True)
    box, strip = plan.box(comm.rank), parts_of(plan)[comm.rank]
    mine = a[box.rows.slice, box.ks.slice], b[box.ks.slice, box.cols.slice]
    out = np.empty(strip.shape, "f4")
    for _ in range(2):
        done = runner.run(plan, *mine, None, out, resident=True)
        np.testing.assert_array_equal(out, (a @ b)[strip.rows.slice, strip.cols.slice])
    assert isinstance(done, hybrid_gemm.Result) and done.c is out and done.plan is plan
    assert done.problem == plan.problem and f"{comm.size} worker" in repr(done)
    if comm.rank == 0:
        assert {"multiply"} <= {x.phase for x in done.timeline}
    runner.close()


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_times_count_from_when_all_ranks_are_ready(comm, device, split, rng, monkeypatch):
    """A rank that was ready early waits for the others: its times do not tell of that."""
    together = launch.together

    def slowly(*given):
        ready = together(*given)
        time.sleep(0.2)
        return ready

    a, b = integers(rng, (50, 60)), integers(rng, (60, 70))
    with RankRunner(comm, device=device, split=split) as runner:
        plan = runner.plan(Problem(50, 70, 60, "float32"))
        box, strip = plan.box(comm.rank), parts_of(plan)[comm.rank]
        mine = a[box.rows.slice, box.ks.slice], b[box.ks.slice, box.cols.slice]
        monkeypatch.setattr(launch, "together", slowly)
        done = runner.run(plan, *mine, None, np.empty(strip.shape, "f4"))
    most = done.total_ms + 100  # a clock starts before the whole's, by what a busy core takes
    assert 0 < done.timeline.multiply_and_sum_ms <= most
    assert max(x.stop_ms for x in done.timeline) <= most


@pytest.mark.parametrize("transport", transports.NAMES)
def test_transports_give_the_same_bits(comm, device, transport, rng):
    if device != "cuda" and transport != "mpi":
        with pytest.raises(UnavailableError, match="between GPUs"):
            hybrid_gemm.gemm(
                np.ones((4, 4)), np.ones((4, 4)), comm=comm, device=device, transport=transport,
                split="cols",
            )  # fmt: skip
        return
    options = {"device": device, "split": "cols", "rounds": 3}
    plain = RankRunner(comm, transport="mpi", **options)
    other = RankRunner(comm, transport=transport, **options)
    shapes = [(3, 257, 64), (1, 1, 9)]
    large = [(513, 257, 700), (4097, 1025, 3001), (129, 8191, 515)]
    for m, n, k in [*shapes, *(large if device == "cuda" else [(131, 65, 190)])]:
        a, b = rng.standard_normal((m, k), "f4"), rng.standard_normal((k, n), "f4")
        expected = plain.gemm(a, b)
        try:
            for _ in range(3):
                np.testing.assert_array_equal(other.gemm(a, b), expected)
        except UnavailableError as error:
            pytest.skip(str(error))
        a, b, c = (integers(rng, shape) for shape in ((m, k), (k, n), (m, n)))
        np.testing.assert_array_equal(
            other.gemm(a, b, c, alpha=2, beta=3), 2 * (a @ b) + 3 * c
        )  # fmt: skip
    plain.close()
    other.close()


@pytest.mark.parametrize("device", [on("cuda")])
def test_arrays_on_a_gpu_stay_there(comm, device, rng):
    import cupy

    runner = RankRunner(comm, device=device, split="cols")
    with cupy.cuda.Device(runner.devices[0].ordinal):
        a, b = integers(rng, (130, 200)), integers(rng, (200, 70))
        ks = share(200, comm)
        got = runner.gemm(cupy.asarray(a[:, ks]), cupy.asarray(b[ks]), distribution="cols")
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_array_equal(got.get(), (a @ b)[share(130, comm)])
        got = runner.gemm(cupy.asarray(a), cupy.asarray(b))
        np.testing.assert_array_equal(got.get(), a @ b)
    runner.close()


def test_arrays_of_another_library_come_back_as_its_own(comm, rng):
    runner = RankRunner(comm, device="cpu")
    a, b = integers(rng, (30, 40)), integers(rng, (40, 20))
    got = runner.gemm(Other(a), Other(b))
    assert type(got) is Other
    np.testing.assert_array_equal(got.array, a @ b)
    rows = share(30, comm)
    got = runner.gemm(Other(a[rows]), b, distribution="rows")
    np.testing.assert_array_equal(got.array, (a @ b)[rows])
    here = comm.rank == 0
    got = runner.gemm(*((Other(a), b) if here else (None, None)), distribution="root")
    assert type(got) is (Other if here else type(None))
    runner.close()


def test_an_out_takes_this_ranks_rows_in_its_dtype(comm, device, rng):
    a, b = integers(rng, (9, 5)), integers(rng, (5, 7))
    rows = share(9, comm)
    for out in np.zeros((9, 7), "f8")[rows], np.zeros((7, 9), "f4").T[rows]:
        options = {"comm": comm, "device": device, "result": "rows"}
        assert hybrid_gemm.gemm(a, b, out=out, **options) is out
        np.testing.assert_array_equal(out, (a @ b)[rows])


def test_c_broadcasts(comm, device, rng):
    a, b = integers(rng, (8, 5)), integers(rng, (5, 7))
    rows, here = share(8, comm), comm.rank == 0
    for c in integers(rng, (1, 7)), integers(rng, (7,)), integers(rng, (8, 1)), np.float32(3):
        expected = a @ b + c
        options = {"beta": 1, "comm": comm, "device": device}
        got = hybrid_gemm.gemm(a, b, c, **options)
        np.testing.assert_array_equal(got, expected)
        of_rows = c[rows] if np.shape(c) == (8, 1) else c
        got = hybrid_gemm.gemm(a[rows], b, of_rows, distribution="rows", **options)
        np.testing.assert_array_equal(got, expected[rows])
        given = (a, b, c) if here else (None,) * 3
        got = hybrid_gemm.gemm(*given, distribution="root", **options)
        if here:
            np.testing.assert_array_equal(got, expected)
    with pytest.raises(UsageError, match="does not broadcast to this product's 8 x 7"):
        hybrid_gemm.gemm(a, b, np.ones((3, 7), "f4"), **options)


def test_options_of_ranks_need_a_communicator():
    with pytest.raises(TypeError, match="transport is for products over ranks"):
        hybrid_gemm.gemm(np.ones((2, 2)), np.ones((2, 2)), transport="mpi")


@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("mode", ["full", "auto"])
def test_verdicts_find_what_is_wrong_anywhere(comm, split, dtype, mode, rng, monkeypatch):
    monkeypatch.setattr("hybrid_gemm.verify.FULL_FLOPS", 0)
    monkeypatch.setattr("hybrid_gemm.verify.SAMPLED", 5)
    m, n, k = 61, 40, 53
    a, b, c = (integers(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))
    runner = RankRunner(comm, device="cpu", split=split)
    plan = runner.plan(Problem(m, n, k, dtype, alpha=2, beta=3))
    box, strip = plan.box(comm.rank), parts_of(plan)[comm.rank]
    mine = strip.rows.slice, strip.cols.slice
    blocks = a[box.rows.slice, box.ks.slice], b[box.ks.slice, box.cols.slice], c[mine]
    right = (2 * (a @ b) + 3 * c)[mine]
    assert verify.verify(comm, plan, *blocks, right, mode=mode).passed
    wrong = right.copy()
    if comm.rank == comm.size - 1:
        wrong[-1, -1] += 100
    assert not verify.verify(comm, plan, *blocks, wrong, mode=mode).passed
    if dtype == "float32":
        wrong = np.where(np.arange(n) == (7 if comm.rank == 0 else -1), np.nan, right)
        assert not verify.verify(comm, plan, *blocks, wrong.astype("f4"), mode=mode).passed
    assert verify.verify(comm, plan, *blocks, wrong, mode="off") is None


def test_strassen_is_judged_by_its_own_errors(comm, rng):
    n, levels = 256, 3
    a, b = (rng.standard_normal((n, n), "f4") for _ in "ab")
    runner = RankRunner(comm, device="cpu", split="rows", algorithm="strassen", levels=levels)
    plan = runner.plan(Problem(n, n, n))
    box = plan.box(comm.rank)
    blocks = a[box.rows.slice, box.ks.slice], b[box.ks.slice, box.cols.slice], None
    mine = parts_of(plan)[comm.rank]
    strip = runner.run(plan, *blocks, np.empty((len(mine.rows), len(mine.cols)), "f4")).c
    ordinary, its_own = (
        verify.verify(comm, plan, *blocks, strip, mode="full", growth=growth).worst
        for growth in (1, growth_of("strassen", levels))
    )
    assert its_own < 1 < ordinary


def test_all_ranks_make_the_same_plan(comm):
    runner = RankRunner(comm, device="cpu")
    plan = runner.plan(Problem(300, 200, 100))
    assert all(other == plan for other in comm.allgather(plan))
    assert plan.grid == make_rank_plan(plan.problem, runner.spec(), comm.size).grid


def test_a_runner_that_is_dropped_takes_its_memory_along(comm, device, rng):
    """At once, as one of threads does; its transports are closed by all ranks together."""
    a, b = integers(rng, (40, 30)), integers(rng, (30, 20))
    gc.collect()
    gc.disable()
    try:
        runner = RankRunner(comm, device=device, split="cols")
        np.testing.assert_array_equal(runner.gemm(a, b), a @ b)
        runner.close()
        there = [weakref.ref(runner), *map(weakref.ref, runner.devices)]
        del runner
        alive = [x() is not None for x in there]
    finally:
        gc.enable()
    assert not any(alive)


@needs_emulator
def test_a_rank_that_saw_less_memory_decides_as_the_others(comm, rng):
    """What a rank finds alone in a decision of all, the others would wait for."""
    a, b = integers(rng, (40, 30)), integers(rng, (30, 20))
    with RankRunner(
        comm, device="emulator", kernel="naive", split="rows", rank_timeout=20
    ) as runner:
        planner = runner._planner
        planner.sharing = 1  # so that each multiplies its rows alone
        if comm.rank == comm.size - 1:
            few = [dataclasses.replace(spec, memory_bytes=1) for spec in planner._specs]
            planner.__dict__["_specs"] = tuple(few)
        np.testing.assert_array_equal(runner.gemm(a, b), a @ b)


CHOICES = {
    "dtypes": ["f4 f4 f4", "f8 f8 f8", "f4 f4 f8", "c8 f4 c8"],
    "orders": ["CCC", "FCC", "CFC", "CCF"],
    "trans_a": ["n", "t", "c"],
    "trans_b": ["n", "t", "c"],
    "alpha": [1, 2],
    "beta": [1, 0, -1],
    "out": [None, "f8", "c16", "c"],  # C itself
    "result": ["rows", "replicated", "root"],
}


@pytest.mark.filterwarnings("ignore:C is:hybrid_gemm.errors.HybridGemmWarning")
@pytest.mark.parametrize("distribution", ["replicated", "root", "rows", "cols"])
def test_calls_that_differ_in_one_thing_are_told_apart(comm, distribution):
    """What a call told is found again by its signature."""
    n, draw = 3 * comm.size, np.random.default_rng(8)  # the same on all ranks
    mine, every = share(n, comm), slice(None)
    part = {
        "rows": ((mine, every), (every, every), (mine, every)),
        "cols": ((every, mine), (mine, every), (mine, every)),
    }.get(distribution, [(every, every)] * 3)
    usual = {name: values[0] for name, values in CHOICES.items()}
    with RankRunner(comm, device="cpu", rank_timeout=20) as runner:
        for name, value in ((x, y) for x, values in CHOICES.items() for y in values):
            for how in usual, usual | {name: value}:
                call(runner, comm, draw, n, part, distribution, **how)


def call(runner, comm, draw, n, part, distribution, *, dtypes, orders, out, result, **how):
    whole = [draw.integers(-3, 4, (n, n)).astype(x) for x in dtypes.split()]
    held = [np.array(x[at], order=o) for x, at, o in zip(whole, part, orders, strict=True)]
    for i, trans in enumerate((how["trans_a"], how["trans_b"])):  # of op(A) and op(B)
        if trans != "n":
            held[i] = (held[i].conj() if trans == "c" else held[i]).T
    a, b, c = whole
    expected = how["alpha"] * (a @ b) + how["beta"] * c
    if result == "rows":
        expected = expected[share(n, comm)]
    if out == "c":
        out = held[2] if held[2].shape == expected.shape else None
    elif out is not None:
        out = np.zeros(expected.shape, out if expected.dtype.kind == "f" else "c16")
    if distribution == "root" and comm.rank:
        held = [None] * 3
        out = None if out is None else np.zeros_like(out)
    got = runner.gemm(*held, out=out, distribution=distribution, result=result, **how)
    if result == "root" and comm.rank:
        assert got is None
    else:
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype if out is None else got is out
