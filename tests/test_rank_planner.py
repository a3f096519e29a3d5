"""What ranks settle about a product: where it is made, what is brought there, and what that takes.
Without MPI: the ranks' planners are in one process, and are told what ranks tell each other."""

import types

import ml_dtypes
import numpy as np
import pytest
from support.emulation import needs_emulator

from hybrid_gemm import Runner
from hybrid_gemm.errors import OutOfMemoryError
from hybrid_gemm.options import Options
from hybrid_gemm.problem import Problem
from hybrid_gemm.programs.program import Call
from hybrid_gemm.ranks.distributed_operands import DistributedOperands
from hybrid_gemm.ranks.launch import Place
from hybrid_gemm.ranks.rank_planner import RankPlanner

pytestmark = needs_emulator
N, PLENTY = 1024, 2**40
A = np.ones((N, N), "f4")


class Ranks:
    """Two ranks whose device is the emulator, with memory of its own as a GPU's, or the CPU;
    `sharing` of them have the same. Arrays `on_device` lie in the memory of the rank's."""

    def __init__(self, device="emulator", sharing=1, **options):
        chosen = Options.of({"device": device, **options}, "RankRunner").across_ranks()
        self.on_device = []
        self.planners = []
        for rank in range(2):
            local = Runner(
                device=device, checked=chosen.checked, emulate_devices=chosen.emulate_devices
            )
            place, own = Place(rank, 0, rank, 2, "host"), local.devices[0]
            local._home_of = lambda x, own=own: own if self._is_there(x) else None
            self.planners.append(RankPlanner(2, place, local, chosen, sharing))

    def _is_there(self, x):
        return any(x is other for other in self.on_device)

    def settle(
        self, *given, free=PLENTY, alpha=1, beta=0, distribution="replicated", result=None
    ):  # fmt: skip
        """What the ranks settle for what each has given: A, B, C and out, as far as there are."""
        if distribution == "root":
            each = given, ()
        else:
            each = (given[0], given[1]) if type(given[0]) is tuple else (given, given)

        def called(a=None, b=None, c=None, out=None):
            return Call(a, b, c, alpha, beta, out=out)

        comms = [types.SimpleNamespace(rank=rank, size=2) for rank in range(2)]
        operands = [
            DistributedOperands(comm, called(*x), distribution, result, 0)
            for comm, x in zip(comms, each, strict=True)
        ]
        everyone = [
            planner.told(x)._replace(memory_bytes=free)
            for planner, x in zip(self.planners, operands, strict=True)
        ]
        found = [
            planner.settle(x, everyone)
            for planner, x in zip(self.planners, operands, strict=True)
        ]  # fmt: skip
        assert found[0].plan == found[1].plan
        for name in "alone", "resident", "by_peers", "needs", "want", "wanted":
            assert getattr(found[0], name) == getattr(found[1], name)
        return found[0]


def test_host_arrays_are_put_on_the_gpus_only_if_these_have_room():
    """Also where there was room the last time."""
    ranks, given = Ranks(split="rows"), {"distribution": "root"}
    roomy = ranks.settle(A, A, **given)
    assert roomy.by_peers and roomy.resident and roomy.alone
    at_root, blocks = 3 * A.nbytes, 2 * A.nbytes  # A, B and C there; half of A and C, and B
    assert at_root + blocks <= roomy.needs < 2 * (at_root + blocks)
    assert ranks.settle(A, A, free=roomy.needs, **given).resident
    tight = ranks.settle(A, A, free=roomy.needs - 1, **given)
    assert not tight.by_peers and not tight.resident and tight.alone


def test_small_parts_of_host_arrays_do_not_move_from_gpu_to_gpu():
    small = A[:64, :64]
    settled = Ranks(split="rows").settle(small, small, distribution="root")
    assert settled.alone and not settled.by_peers and not settled.resident


def test_c_that_stays_with_its_rank_is_made_where_the_host_has_it():
    """What all ranks have moves nowhere, and large products take plans of their own."""
    ranks = Ranks(split="rows")
    assert not ranks.settle(A, A, distribution="rows", result="rows").resident
    large = np.broadcast_to(np.ones((), "f4"), (4096, 4096))
    settled = ranks.settle(large, large, distribution="root")
    assert settled.by_peers and settled.alone and not settled.resident


def test_ranks_that_share_a_gpu_put_nothing_on_it_for_each_other():
    settled = Ranks(sharing=2, split="rows").settle(A, A, distribution="root")
    assert not (settled.resident or settled.by_peers or settled.alone)


def test_checked_copies_are_those_of_runs():
    settled = Ranks(split="rows", checked=True).settle(A, A, distribution="root")
    assert not (settled.resident or settled.by_peers)


def test_sums_of_real_matrices_are_made_on_the_gpus_and_complex_ones_where_arrays_lie():
    for dtype, there in (("f4", True), ("c8", False)):
        settled = Ranks(split="cols").settle(A.astype(dtype), A.astype(dtype))
        assert not settled.alone
        assert settled.resident == settled.by_peers == there
    whole = Ranks(split="rows").settle(A.astype("c8"), A.astype("c8"), distribution="root")
    assert whole.alone and whole.by_peers


@pytest.mark.parametrize("sharing", [1, 2])
def test_arrays_on_gpus_are_multiplied_where_they_lie(sharing):
    """By ranks that share one, too; where one rank has them on the host, they are brought."""
    for mixed in False, True:
        ranks, other = Ranks(sharing=sharing, split="rows"), A.copy()
        ranks.on_device = [A]
        settled = ranks.settle((A, A), (other if mixed else A, A))
        assert settled.by_peers == (not mixed or sharing == 1)
        assert settled.alone == (not mixed or sharing == 1)
        assert not (settled.resident and not mixed)


@pytest.mark.parametrize(("dtype", "split", "free", "fits"), [
    ("f4", "auto", A.nbytes, True), ("i1", "auto", A.nbytes, False),
    ("f4", "rows", 2 * A.nbytes, True), ("f4", "cols", 2 * A.nbytes, False),
])  # fmt: skip
def test_only_what_is_multiplied_where_it_lies_takes_no_memory(dtype, split, free, fits):
    """Not what is converted first, nor rows of A of which a split by columns brings others."""
    a, ranks = A.astype(dtype), Ranks(split=split)
    ranks.on_device = [a]
    given = {"distribution": "replicated" if split == "auto" else "rows", "free": free}
    if fits:
        assert ranks.settle(a, a, **given).alone
    else:
        with pytest.raises(OutOfMemoryError, match="on 2 ranks"):
            ranks.settle(a, a, **given)


def test_the_cpu_multiplies_where_the_host_has_everything():
    for split, alone in (("rows", True), ("cols", False)):
        settled = Ranks("cpu", split=split).settle(A, A)
        assert settled.alone == alone
        assert not (settled.resident or settled.by_peers)


def test_a_wider_c_widens_the_arithmetic_of_every_block():
    """One process would multiply A and B alone in their own dtype."""
    for dtype, beta, alone in (("f8", 0, False), ("f8", 1, True), ("f4", 0, True)):
        settled = Ranks("cpu", split="rows").settle(A, A, A.astype(dtype), beta=beta)
        assert settled.problem.out_dtype == np.dtype(dtype).name and settled.alone == alone
    narrow = A.astype(ml_dtypes.bfloat16)
    settled = Ranks("cpu", split="rows").settle(narrow, narrow, None, A.copy())
    assert settled.problem.out_dtype == "float32"


@pytest.mark.parametrize("distribution", ["replicated", "rows", "cols"])
@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_alpha_0_brings_no_rank_anything_of_a_and_b(device, distribution):
    a, b = (A, A[:512]) if distribution == "cols" else (A, A)
    given = (a[:, :512], b, A[:512]) if distribution == "cols" else (a, b, A)
    settled = Ranks(device).settle(*given, alpha=0, beta=1, distribution=distribution)
    assert settled.problem.k == 0 and not settled.plan.sums
    assert not any(part & part for x in "AB" for part in settled.want[x])
    made = np.zeros((settled.problem.m, settled.problem.n), int)
    for part in settled.want["C"]:
        made[part.rows.slice, part.cols.slice] += 1
    assert (made == 1).all()


def test_the_devices_of_a_rank_multiply_together():
    one, two = (Ranks(emulate_devices=n).planners[0].own_spec().tflops for n in (1, 2))
    assert two == 2 * one


def test_ranks_that_share_a_device_have_their_share_of_it():
    alone, sharing = (Ranks(sharing=s).planners[0].own_spec() for s in (1, 4))
    assert sharing.memory_bytes == pytest.approx(alone.memory_bytes / 4, rel=0.2)
    assert sharing.tflops == alone.tflops / 4
    on_cpu = [Ranks("cpu", sharing=s).planners[0].own_spec() for s in (1, 4)]
    assert on_cpu[0].tflops == on_cpu[1].tflops  # which is that of its cores already


def test_products_without_elements_are_not_shared_out():
    planner = Ranks("cpu").planners[0]
    spec = planner.own_spec()
    for problem in Problem(0, 4, 4), Problem(4, 4, 0):
        assert not planner.faster_together(spec, problem, 1)
    large = Problem(8192, 8192, 8192)
    assert planner.faster_together(spec, large, 1) and not planner.faster_together(spec, large, 2)
