"""Products over ranks whose parts go from GPU to GPU; whole numbers make equality exact."""

import itertools

import numpy as np
import pytest
from support.arrays import integers
from support.devices import on
from support.ranks import share

from hybrid_gemm import RankRunner
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.ranks import peer_memory, rank_planner
from hybrid_gemm.ranks.redistribution import Part

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("device", [on("cuda")])
def test_parts_move_from_gpu_to_gpu(comm, device, monkeypatch):
    """As parts move by MPI, with memory that is opened anew for more, in turns of a few rows."""
    import cupy

    with RankRunner(comm, device=device) as runner:
        peers = runner._peers
        if not peers.usable():
            pytest.skip("these ranks do not read each other's memory")
        monkeypatch.setattr(peer_memory, "STAGED_BYTES", 600)
        rng, moved = np.random.default_rng(8), 0
        with cupy.cuda.Device(runner.devices[0].ordinal):
            for size in (10, 30, 20, 60):
                for dtype in ("i4", "f2", "c16"):
                    rows, cols = rng.integers(1, size, 2)
                    whole = np.arange(rows * cols).reshape(rows, cols).astype(dtype)
                    edges = [0, *sorted(rng.integers(0, rows + 1, comm.size - 1)), rows]
                    have = [
                        Part(Span(*map(int, e)), Span(0, int(cols)))
                        for e in itertools.pairwise(edges)
                    ]
                    some = [
                        Part(*(Span(*sorted(map(int, rng.integers(0, x + 1, 2)))) for x in sides))
                        for sides in [(rows, cols)] * comm.size
                    ]
                    everything = [Part(Span(0, int(rows)), Span(0, int(cols)))] * comm.size
                    for want in (some, everything):
                        mine, wanted = have[comm.rank].rows.slice, want[comm.rank]
                        for given in (cupy.asarray(whole[mine]), whole[mine], whole.T[:, mine].T):
                            part = peers.move(given, have, want, np.dtype(dtype))
                            np.testing.assert_array_equal(
                                cupy.asnumpy(part), whole[wanted.rows.slice, wanted.cols.slice]
                            )
                            moved += 1
        assert moved == 72


@pytest.mark.parametrize("device", [on("cuda")])
@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_c_comes_to_gpus_as_it_is_wanted(comm, device, rng, transport):
    import cupy

    with RankRunner(comm, device=device, transport=transport) as runner:
        with cupy.cuda.Device(runner.devices[0].ordinal):
            for m, n, k in ((33, 20, 50), (300, 170, 90), (7, 5, 3), (1, 40, 9)):
                a, b, c = (integers(rng, x) for x in ((m, k), (k, n), (m, n)))
                whole = [cupy.asarray(x) for x in (a, b)]
                rows, ks = share(m, comm), share(k, comm)
                given = {
                    "replicated": whole,
                    "rows": [whole[0][rows], whole[1]],
                    "cols": [whole[0][:, ks], whole[1][ks]],
                }
                for distribution, (x, y) in given.items():
                    for result in ("replicated", "rows", "root"):
                        for _ in range(2):
                            got = runner.gemm(x, y, distribution=distribution, result=result)
                            if result == "root" and comm.rank:
                                assert got is None
                                continue
                            assert isinstance(got, cupy.ndarray)
                            expected = (a @ b)[rows] if result == "rows" else a @ b
                            np.testing.assert_array_equal(got.get(), expected)
                out = cupy.asarray(c)
                got = runner.gemm(*whole, out, beta=2, out=out)
                assert got is out
                np.testing.assert_array_equal(out.get(), a @ b + 2 * c)
        assert runner._peers.usable() == (transport == "auto") or comm.size == 1


@pytest.mark.parametrize("device", [on("cuda")])
@pytest.mark.parametrize("options", [
    {}, {"split": "cols"}, {"compute": "fp32x3"}, {"checked": True}, {"transport": "mpi"},
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "complex128", "int8"])
@pytest.mark.parametrize("least", [0, 1 << 40])
def test_arrays_of_the_host(comm, device, rng, options, dtype, least, monkeypatch):
    """However they are distributed, and whether what moves is enough for GPUs to do that."""
    monkeypatch.setattr(rank_planner, "MOVED_BY_PEERS", least)
    if options.get("compute") and dtype != "float32":
        pytest.skip("of float32")
    out_dtype = "int8" if dtype == "int8" else "complex128"
    with RankRunner(comm, device=device, **options) as runner:
        for m, n, k in ((90, 70, 130), (33, 65, 64), (5, 300, 1), (1, 1, 700)):
            a, b, c = (integers(rng, s).astype(dtype) for s in ((m, k), (k, n), (m, n)))
            if dtype[0] == "c":
                a += 1j * integers(rng, a.shape)
            rows, ks, root = share(m, comm), share(k, comm), comm.rank == 0
            given = {
                "replicated": (a, np.asfortranarray(b), c),
                "root": (a, b, c) if root else (None,) * 3,
                "rows": (a[rows], b, c[rows]),
                "cols": (a[:, ks], b[ks], c[rows]),
            }
            for distribution, (x, y, z) in given.items():
                for result in ("replicated", "rows", "root"):
                    lies = {"distribution": distribution, "result": result}
                    for beta in (0, 2):
                        got = runner.gemm(x, y, z, beta=beta, **lies)
                        if result == "root" and not root:
                            assert got is None
                            continue
                        assert type(got) is np.ndarray
                        expected = a @ b + beta * c
                        if result == "rows":
                            expected = expected[rows]
                        np.testing.assert_array_equal(got, expected)
                    out = np.zeros((n, m), out_dtype).T
                    if distribution == "replicated" and result == "replicated":
                        assert runner.gemm(x, y, out=out, **lies) is out
                        np.testing.assert_array_equal(out, a @ b)


@pytest.mark.parametrize("device", [on("cuda")])
@pytest.mark.parametrize("least", [0, 1 << 40])
def test_roots_on_a_gpu(comm, device, rng, least, monkeypatch):
    """Matrices of one rank's GPU: the others have none, and get the host's arrays."""
    import cupy

    monkeypatch.setattr(rank_planner, "MOVED_BY_PEERS", least)
    a, b = integers(rng, (70, 130)), integers(rng, (130, 90))
    with RankRunner(comm, device=device) as runner, cupy.cuda.Device(runner.devices[0].ordinal):
        given = (cupy.asarray(a), cupy.asarray(b)) if comm.rank == 0 else (None, None)
        for result in ("root", "replicated", "rows"):
            got = runner.gemm(*given, distribution="root", result=result)
            if result == "root" and comm.rank:
                assert got is None
                continue
            assert isinstance(got, np.ndarray if comm.rank else cupy.ndarray)
            expected = (a @ b)[share(70, comm)] if result == "rows" else a @ b
            np.testing.assert_array_equal(cupy.asnumpy(got), expected)
