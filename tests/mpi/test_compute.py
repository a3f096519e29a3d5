"""`compute=` over ranks: whole numbers exactly, and every rank says what was computed by all.

Run as test_world.py is.
"""

import dataclasses

import numpy as np
import pytest
from support.arrays import integers

from hybrid_gemm import RankRunner, gemm
from hybrid_gemm.errors import UnavailableError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("without_models")]
SHAPES = [(70, 33, 130), (8, 40, 65), (16, 4, 64)]


class Recorded(RankRunner):
    """Keeps what was said of the last product, which is a run of all ranks."""

    def _open_devices(self):
        super()._open_devices()
        settle = self._planner.settle
        self._planner.settle = lambda *told: dataclasses.replace(settle(*told), alone=False)

    def _run(self, *args, **options):
        result = super()._run(*args, **options | {"settled": None})
        self.said = result.compute
        return result


@pytest.fixture
def runner(comm, kernel_device):
    made = []

    def make(**options):
        made.append(Recorded(comm, device=kernel_device, **options))
        return made[0]

    yield make
    made[0].close()


@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize("compute", ["fp32x3", "tf32"])
def test_float32(runner, compute, split, rng):
    here = runner(split=split, compute=compute)
    for m, n, k in SHAPES:
        a, b, c = (integers(rng, shape) for shape in ((m, k), (k, n), (m, n)))
        np.testing.assert_array_equal(here.gemm(a, b, c, alpha=2, beta=-1), 2 * (a @ b) - c)
        assert here.said == ("tf32" if compute == "tf32" else "fp32x3 (fp16 split)")


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_float64_by_residues(comm, runner, split, rng):
    here = runner(split=split, compute="fp64x", kernel="residues_mma")
    a, b, c = (integers(rng, s).astype("f8") for s in ((40, 600), (600, 33), (40, 33)))
    np.testing.assert_array_equal(here.gemm(a, b, c, alpha=2, beta=-1), 2 * (a @ b) - c)
    assert "moduli" in here.said and "native" not in here.said
    a[0, 0], b[0] = np.inf, 1  # the first rank's, whichever way A is cut
    np.testing.assert_array_equal(here.gemm(a, b), a @ b)
    assert "native float64" in here.said
    assert "moduli" in here.said or comm.size == 1


@pytest.mark.parametrize("split", ["rows", "cols"])
def test_every_rank_reports_the_splits_that_any_rank_took(comm, runner, split, rng):
    a, b = integers(rng, (64, 256)), integers(rng, (256, 40))
    a[0, 0], b[0] = np.inf, 1  # the first rank's, whichever way A is cut
    here = runner(split=split, compute="fp32x3")
    np.testing.assert_array_equal(here.gemm(a, b), a @ b)
    strict, others = "strict fp32" in here.said, "fp16 split" in here.said
    assert strict and (others or comm.size == 1), here.said


@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_operands(runner, dtype, split, rng):
    here = runner(split=split)
    for m, n, k in SHAPES:
        a, b = (rng.integers(-1, 2, shape).astype(dtype) for shape in ((m, k), (k, n)))
        got = here.gemm(a, b)
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype("f4"), a.astype("f4") @ b.astype("f4"))
        assert here.said == f"{dtype} on tensor cores, sums in float32"


def test_where_there_are_no_tensor_cores(comm):
    with pytest.raises(UnavailableError, match=r"tf32 needs tensor cores.*is cpu"):
        RankRunner(comm, device="cpu", compute="tf32")


@pytest.mark.parametrize(("split", "device", "result", "dtype"), [  # each pair of their values
    ("rows", "cpu", "replicated", "f4"), ("cols", "emulator", "replicated", "f8"),
    ("rows", "emulator", "root", "f4"), ("cols", "cpu", "root", "f8"),
    ("cols", "emulator", "rows", "f4"), ("rows", "cpu", "rows", "f8"),
    ("cols", "cpu", "rows", "f4"), ("rows", "emulator", "rows", "f8"),
])  # fmt: skip
def test_a_wider_out_of_16_bits_keeps_the_float32_sums(comm, split, device, result, dtype):
    a, b = np.ones((8, 4097), "f2"), np.ones((4097, 6), "f2")  # float16 rounds 4097 to 4096
    rows = len(range(comm.rank * 8 // comm.size, (comm.rank + 1) * 8 // comm.size))
    out = np.zeros((rows if result == "rows" else 8, 6), dtype)
    if result == "root" and comm.rank:
        out = None
    got = gemm(a, b, comm=comm, device=device, split=split, result=result, out=out)
    assert got is out
    if out is not None:
        assert (out == 4097).all()
