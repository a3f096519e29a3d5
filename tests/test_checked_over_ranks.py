"""Checked products over MPI ranks."""

import dataclasses
from pathlib import Path

from support.devices import open_device
from support.ranks import mpirun, needs_mpirun

from hybrid_gemm.planning.plan import CHECKING_BYTES
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks import rank_plan
from hybrid_gemm.ranks.rank_plan import make_rank_plan

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"

RANKS = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from mpi4py import MPI
from fuzzing.faulty import FaultyDevice, flip
from hybrid_gemm import RankRunner, devices
comm, real = MPI.COMM_WORLD, devices.open_devices
rng = np.random.default_rng(1)
a, b = rng.standard_normal((90, 200)), rng.standard_normal((200, 70))
right = RankRunner(comm, device="cpu", split="cols").gemm(a, b)
faults = {("product", 0): flip(3)} if comm.rank == 1 else {("sum", 0): flip(4)}
devices.open_devices = lambda *x, **y: [FaultyDevice(d, faults) for d in real(*x, **y)]
runner = RankRunner(comm, device="cpu", split="cols", checked=True)
done = []
run = runner._run
runner._run = lambda *x, **y: done.append(run(*x, **y | {"settled": None})) or done[-1]
assert runner.gemm(a, b).tobytes() == right.tobytes()
checks = done[0].checks
assert checks.products >= 3 and checks.sums >= 3 and checks.repeated == 3, checks
assert sorted({x.what for x in checks.faults}) == ["product", "sum"], checks
"""


@needs_mpirun
def test_faults_of_ranks_are_mended(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    mpirun(3, script, SCRIPTS, check=0)


PARTIALS = """
import sys
import numpy as np
from mpi4py import MPI
from hybrid_gemm import RankRunner
from hybrid_gemm.errors import VerificationError
from hybrid_gemm.ranks.transports.mpi import MpiTransport
comm, again = MPI.COMM_WORLD, sys.argv[1] == "again"
rng = np.random.default_rng(1)
a, b = rng.standard_normal((90, 200)), rng.standard_normal((200, 70))
right = RankRunner(comm, device="cpu", split="cols").gemm(a, b)

def flip(x):
    x.view("u8")[3, 5:7] ^= 1  # the last bit of two neighbours

others, send, seen = MpiTransport._others, MpiTransport._send, set()

def arriving(self, round):
    found = others(self, round)
    for source in found or ():
        if (source, round) not in seen and comm.rank != 1:
            seen.add((source, round))
            flip(found[source])
    return found

def leaving(self, piece, owner, buffer):
    if comm.rank == 1 and self.owners[owner] == 2:
        flip(buffer.array)
    send(self, piece, owner, buffer)

if again:
    MpiTransport._send = leaving
else:
    MpiTransport._others = arriving
runner = RankRunner(comm, device="cpu", split="cols", checked=True, rounds=3)
done = []
run = runner._run
runner._run = lambda *x, **y: done.append(run(*x, **y | {"settled": None})) or done[-1]
for _ in range(2):
    seen.clear()
    assert runner.gemm(a, b).tobytes() == right.tobytes()
checks = done[-1].checks
assert checks.copies >= 12 and checks.repeated == checks.copies * 2 // 3, checks
assert {x.what for x in checks.faults} == {"partial"}, checks
assert "partial on its way from rank 1 to rank 0: rows 3 to 3" in str(checks.faults[0]), checks
"""


@needs_mpirun
def test_partials_that_are_damaged_between_ranks_are_sent_again(tmp_path):
    script = tmp_path / "partials.py"
    script.write_text(PARTIALS)
    mpirun(3, script, "once", check=0)


@needs_mpirun
def test_a_partial_that_is_damaged_again_is_an_error_that_names_both_ranks(tmp_path):
    script = tmp_path / "partials.py"
    script.write_text(PARTIALS)
    done = mpirun(3, "-m", "mpi4py", script, "again")
    assert done.returncode != 0
    text = " ".join((done.stdout + done.stderr).split())
    assert "VerificationError: partial on its way from rank 1 to rank 2: rows 3 to 3" in text
    assert "again when it was sent again" in text


def test_plans_over_ranks_count_it_too():
    spec = open_device("emulator").spec()
    for beta in (0, 1):
        problem, needs = Problem(512, 512, 512, beta=beta), []
        for checked in (False, True):
            checking = dataclasses.replace(spec, checked=checked)
            needs.append(rank_plan._cost(problem, checking, (1, 1, 2), 1, False, False)[0])
        assert needs[1] - needs[0] == CHECKING_BYTES * (512 + 256) + beta * 4 * 512 * 512 // 2
    on_cpu = open_device("cpu").spec()
    needs = [
        make_rank_plan(Problem(64, 64, 64), dataclasses.replace(on_cpu, checked=checked), 2).needs
        for checked in (False, True)
    ]
    assert needs[0] == needs[1]  # of the host's memory, not of a device's
