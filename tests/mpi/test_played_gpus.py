"""Ranks that play GPUs: what moves from GPU to GPU, and all that ranks decide about it, without
one. Every rank draws the same products; how its own arrays lie, each draws alone."""

import numpy as np
import pytest
from support.cupy_arrays import Array
from support.emulation import needs_emulator
from support.played_gpus import Memory, held, play

from hybrid_gemm import RankRunner
from hybrid_gemm.devices.kernel_device import KernelDevice
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.execution.plan_maker import PlanMaker
from hybrid_gemm.ranks import peer_memory, rank_planner
from hybrid_gemm.ranks.open_memory import OpenMemory

pytestmark = [pytest.mark.mpi, needs_emulator]
WAYS = [{}, {"checked": True}, {"split": "cols"}, {"split": "rows"}, {"transport": "mpi"}]
ON_GPU = {"host": 0, "gpu": 1, "either": 0.5}  # of arrays that are a GPU's
DTYPES = ["float32", "float64", "int32", "int8", "complex64", "float16", "uint8"]
SIDES = [0, 1, 2, 3, 5, 17, 40, 65]


@pytest.fixture
def gpus(monkeypatch, comm):
    if comm.size == 1:
        pytest.skip("one rank moves nothing")
    yield play(monkeypatch, comm)
    Memory.failing = 0


def part(size, edges, rank):
    """What a rank has of rows or columns that are cut at the edges."""
    cuts = [0, *sorted(int(x * size) for x in edges), size]
    return slice(*cuts[rank : rank + 2])


def lying(x, draw, gpus, *, on_gpu):
    """A matrix as one may lie: in either order, with steps, backwards, on this or another GPU."""
    how = draw.integers(5)
    if how == 1:
        x = np.asfortranarray(x)
    elif how == 2:
        wide = np.zeros((2 * x.shape[0] + 1, 2 * x.shape[1] + 1), x.dtype)
        wide[: 2 * x.shape[0] : 2, : 2 * x.shape[1] : 2] = x
        x = wide[: 2 * x.shape[0] : 2, : 2 * x.shape[1] : 2]
    elif how == 3 and not on_gpu:
        x = x[::-1].copy()[::-1].astype(x.dtype.newbyteorder())
    return gpus.array(x, int(draw.integers(2))) if on_gpu else x


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(1, 5))]
)
def test_products_of_all_kinds(comm, gpus, seed, monkeypatch):
    common, mine = np.random.default_rng(seed), np.random.default_rng(1000 * seed + comm.rank)
    ways = [*WAYS, {"grid": (1, 1, comm.size)}]
    runners = [RankRunner(comm, kernel="naive", rank_timeout=20, **way) for way in ways]
    moved = 0
    for _ in range(25):
        monkeypatch.setattr(rank_planner, "MOVED_BY_PEERS", int(common.choice([0, 0, 1 << 40])))
        monkeypatch.setattr(peer_memory, "STAGED_BYTES", int(common.choice([64, 300, 1 << 20])))
        runner = runners[common.integers(len(runners))]
        m, n, k = (int(x) for x in common.choice(SIDES, 3))
        dtype = str(common.choice(DTYPES))
        distribution = str(common.choice(["replicated", "root", "rows", "cols"]))
        result, root = str(common.choice(["replicated", "root", "rows"])), comm.size - 1
        alpha, beta = int(common.choice([0, 1, 2])), int(common.choice([0, 1]))
        a, b, c = (common.integers(-3, 4, s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
        edges = common.random((2, comm.size - 1))
        rows, ks = (part(s, e, comm.rank) for s, e in zip((m, k), edges, strict=True))
        given = {
            "replicated": (a, b, c), "rows": (a[rows], b, c[rows]),
            "cols": (a[:, ks], b[ks], c[rows]),
            "root": (a, b, c) if comm.rank == root else (None,) * 3,
        }[distribution]  # fmt: skip
        for _ in range(common.integers(1, 4)):  # each time with arrays that lie otherwise
            place = str(common.choice(list(ON_GPU)))
            x, y, z = (
                v if v is None else lying(v, mine, gpus, on_gpu=mine.random() < ON_GPU[place])
                for v in given
            )
            Memory.failing = int(mine.random() < 0.15)
            z = z if beta else None
            got = runner.gemm(
                x, y, z, alpha=alpha, beta=beta, distribution=distribution, result=result, root=root
            )
            expected = alpha * (a @ b) + beta * c
            if result == "rows":
                whole = part(m, [r / comm.size for r in range(1, comm.size)], comm.rank)
                expected = expected[rows if distribution == "rows" else whole]
            if result == "root" and comm.rank != root:
                assert got is None
                continue
            assert isinstance(got, Array) == any(isinstance(v, Array) for v in (x, y, z))
            np.testing.assert_array_equal(held(got), expected)
        moved += any(each._peers.memory is not None for each in runners)
    for runner in runners:
        runner.close()
    assert moved and not gpus.opened


def test_memory_that_cannot_be_opened(comm, gpus, monkeypatch):
    """By MPI instead, unless peer copies were asked for: that is said on all ranks."""
    monkeypatch.setattr(rank_planner, "MOVED_BY_PEERS", 0)
    a, b = (np.arange(30.0 * 30).reshape(30, 30) % x for x in (5, 7))
    given = {"distribution": "root", "root": 0}
    x, y = (a, b) if comm.rank == 0 else (None, None)
    for transport in ("auto", "ipc"):
        runner = RankRunner(comm, kernel="naive", split="rows", transport=transport)
        Memory.failing = int(comm.rank == comm.size - 1)
        if transport == "ipc":
            with pytest.raises(UnavailableError, match=r"ipc was asked for: .*for a test"):
                runner.gemm(x, y, **given)
        got = runner.gemm(x, y, **given)
        assert got is None if comm.rank else np.array_equal(got, a @ b)
        runner.close()


def test_three_real_products_of_arrays_of_another_gpu(comm, gpus):
    """C is made on the rank's own GPU, and goes from there to that of A."""
    rng = np.random.default_rng(5)
    a, b, c = (rng.integers(-3, 4, (20, 20)) + 1j * rng.integers(-3, 4, (20, 20)) for _ in "ABC")
    with RankRunner(comm, kernel="naive", split="cols", algorithm="3m") as runner:
        x, y, z = (gpus.array(v, (comm.rank + 1) % 2) for v in (a, b, c))
        got = runner.gemm(x, y, z, beta=2)
    assert got.gpu == x.gpu
    np.testing.assert_array_equal(held(got), a @ b + 2 * c)


@pytest.mark.parametrize("algorithm", ["ordinary", "3m"])
def test_what_two_lanes_read_of_another_gpu_is_there_when_they_multiply(comm, gpus, algorithm):
    """One of them copies it, and the other waits for that copy."""
    rng = np.random.default_rng(5)
    with RankRunner(comm, kernel="naive", split="cols", algorithm=algorithm) as runner:
        for _ in range(30):
            a, b, c = (rng.integers(-3, 4, x).astype("c8") for x in ((7, 9), (9, 5), (7, 5)))
            x, y, z = (gpus.array(v, (comm.rank + 1) % 2) for v in (a, b, c))
            np.testing.assert_array_equal(held(runner.gemm(x, y, z, beta=1)), a @ b + c)


@pytest.mark.parametrize("distribution", ["replicated", "root"])
@pytest.mark.parametrize("of_b", [(2, 3, 5, 5), (5, 5)])
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64"])
def test_stacks_of_stacks_on_another_gpu(comm, gpus, dtype, of_b, distribution):
    """They are gathered and put in order there."""
    rng = np.random.default_rng(6)
    a, b = (rng.integers(0, 4, s).astype(dtype) for s in ((2, 3, 5, 5), of_b))
    given = (a.swapaxes(2, 3), b) if distribution == "replicated" or not comm.rank else ()
    x, y = (gpus.array(v, (comm.rank + 1) % 2) for v in given) if given else (None, None)
    with RankRunner(comm, kernel="naive") as runner:
        got = runner.matmul(x, y, distribution=distribution)
    assert (got.gpu == x.gpu) if given else got is None
    if given:
        np.testing.assert_array_equal(held(got), a.swapaxes(2, 3) @ b)


def test_parts_of_two_dtypes_move_from_other_gpus(comm, gpus, monkeypatch):
    """They are cast on the rank's own GPU, from which they are moved."""
    monkeypatch.setattr(rank_planner, "MOVED_BY_PEERS", 0)
    a, b = (np.arange(30.0 * 30).reshape(30, 30) % x for x in (5, 7))
    rows = part(30, [r / comm.size for r in range(1, comm.size)], comm.rank)
    mine = a[rows].astype("f8" if comm.rank else "f4")
    with RankRunner(comm, kernel="naive", split="cols") as runner:
        x, y = (gpus.array(v, (comm.rank + 1) % 2) for v in (mine, b))
        got = runner.gemm(x, y, distribution="rows")
        assert runner._peers.memory is not None
    np.testing.assert_array_equal(held(got), (a @ b)[rows])


def test_a_sum_that_comes_again_is_worked_out_once(comm, gpus, monkeypatch):
    """Its kernels, its products and where its pieces lie are kept; its numbers are not."""
    runner = RankRunner(comm, kernel="naive", split="cols")
    worked_out = []
    kept = [(PlanMaker, "choice"), (KernelDevice, "bind"), (OpenMemory, "matrix")]
    kept.append((PlanMaker, "specs"))
    for owner, name in kept:
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *x, _real=real, **y: worked_out.append(_real) or _real(*x, **y)
        )
    rng = np.random.default_rng(7)
    for again in range(3):
        a, b = (rng.integers(-3, 4, (20, 20)).astype("f4") for _ in "AB")
        ks = part(20, [r / comm.size for r in range(1, comm.size)], comm.rank)
        worked_out.clear()
        got = runner.gemm(gpus.array(a[:, ks]), gpus.array(b[ks]), distribution="cols")
        np.testing.assert_array_equal(held(got), (a @ b)[ks])
        names = {x.__name__ for x in worked_out}
        assert names == (set() if again else {name for _owner, name in kept})
    runner.close()
    assert not gpus.opened


def test_the_stand_in_is_as_strict_as_cupy(gpus):
    x = gpus.array(np.ones((2, 2)))
    with pytest.raises(TypeError, match="not allowed"):
        np.asarray(x)
    with pytest.raises(ValueError, match="ndarray cannot be used"):
        x[...] = np.ones((2, 2))
    with gpus.cupy.cuda.Device(99), pytest.raises(AssertionError, match="is the current one"):
        x.copy()
    assert x.get() is not x.held
