"""Plans over ranks, how ranks are found, and the command under mpirun as a user starts it."""

import dataclasses
import json
import os
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import COMMAND, TESTS, environment
from support.ranks import failing_rank, mpirun, needs_mpirun

from hybrid_gemm.devices.cuda.nccl_group import unavailable as no_nccl
from hybrid_gemm.errors import OutOfMemoryError, UsageError
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.problem import Problem
from hybrid_gemm.ranks import transports
from hybrid_gemm.ranks.launch import Place, expected, first_of_job, gpus_of, launcher
from hybrid_gemm.ranks.rank_plan import make_rank_plan

GPU = DeviceSpec(
    "gpu", "cuda", 0, 80 * 2**30, tflops=40, memory_gbps=4000, link_gbps=20, peer_gbps=100
)  # fmt: skip
CPU = DeviceSpec(
    "cpu", "cpu", 0, 2**40, tflops=0.1, memory_gbps=10, host_memory=True, on_gpu=False, alignment=1
)
sizes = st.integers(0, 60)

# --- what ranks tell each other -----------------------------------------------------------


def test_gpus_report_which_others_they_reach_and_whether_nccl_is_here():
    bus, reach = {0: "00:01", 1: "00:02", 2: "00:03"}, {(1, 2)}
    runtime = SimpleNamespace(
        getDeviceCount=lambda: len(bus),
        deviceGetPCIBusId=bus.get,
        deviceCanAccessPeer=lambda here, there: (here, there) in reach,
    )
    device = SimpleNamespace(ordinal=1, cp=SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert transports._gpu_facts(device) == ("00:02", {"00:02", "00:03"}, no_nccl())


# --- plans --------------------------------------------------------------------------------


@given(sizes, sizes, sizes, st.integers(1, 9), st.sampled_from(["rows", "cols", "auto"]),
       st.none() | st.integers(1, 5), st.sampled_from([CPU, GPU]))  # fmt: skip
def test_pieces_tile_every_strip_and_bytes_add_up(m, n, k, ranks, split, rounds, spec):
    plan = make_rank_plan(Problem(m, n, k), spec, ranks, split=split, rounds=rounds)
    made, owned = np.zeros((m, n), int), np.zeros((m, n), int)
    for rank in range(ranks):
        if plan.box(rank) is None:
            assert plan.bytes_sent(rank) == plan.bytes_kept(rank) == 0
            continue
        pieces = plan.pieces(rank)
        for piece in pieces:
            made[piece.rows.slice, piece.cols.slice] += 1
        own = [p for p in pieces if p.owner == rank]
        assert own == plan.owned(rank)
        assert [p.round for p in own] == list(range(len(own)))
        for piece in own:
            owned[piece.rows.slice, piece.cols.slice] += 1
    if m and n:
        depth = len(plan.members(plan.plan.strips[0].owner))
        assert (made == depth).all()
        assert (owned == 1).all()
    sent = sum(plan.bytes_sent(rank) for rank in range(ranks))
    assert sent == sum(plan.bytes_received(rank) for rank in range(ranks))


@given(sizes, sizes, sizes, st.integers(1, 9), st.sampled_from(["rows", "cols", "auto"]),
       st.none() | st.integers(1, 5), st.sampled_from([CPU, GPU]))  # fmt: skip
def test_the_real_plan_of_a_complex_one_tiles_the_same_strips(
    m, n, k, ranks, split, rounds, spec
):  # fmt: skip
    plan = make_rank_plan(Problem(m, n, k, "complex64"), spec, ranks, split=split, rounds=rounds)
    real, made = plan.as_real, np.zeros((m, 2 * n), int)
    assert (real.problem.m, real.problem.n, real.problem.k) == (m, 2 * n, 2 * k)
    for rank in range(ranks):
        strip, wide = plan.strip(rank), real.strip(rank)
        assert plan.flops(rank) == real.flops(rank)
        if strip is None:
            assert wide is None
            continue
        assert (wide.cols.start, wide.cols.stop) == (2 * strip.cols.start, 2 * strip.cols.stop)
        assert plan.by_rows(rank) == real.by_rows(rank)
        for piece in real.owned(rank):
            assert wide.rows.start <= piece.rows.start and piece.rows.stop <= wide.rows.stop
            made[piece.rows.slice, piece.cols.slice] += 1
    if m and n:
        assert (made == 1).all()


def test_a_rank_keeps_slabs_and_strips_and_not_copies_of_c():
    problem = Problem(32768, 32768, 32768)
    c = 4 * 32768**2
    for ranks in (8, 16, 32):
        plan = make_rank_plan(problem, GPU, ranks, split="cols")
        slabs = 2 * c // ranks
        assert plan.bytes_kept(3) < slabs + c // ranks + 4 * c // plan.rounds
        assert plan.bytes_sent(3) == c - c // ranks


def test_grids_are_chosen_where_they_are_faster_or_fit():
    problem = Problem(65536, 65536, 65536)
    plan = make_rank_plan(problem, GPU, 4096)
    assert min(plan.plan.grid) > 1
    assert plan.plan.split == "grid"
    assert plan.predicted_ms < make_rank_plan(problem, GPU, 4096, split="cols").predicted_ms / 2
    with pytest.raises(OutOfMemoryError, match="GiB"):
        make_rank_plan(Problem(2**18, 2**18, 2**18), GPU, 2)
    assert make_rank_plan(problem, GPU, 8, grid=(2, 2, 2)).plan.grid == (2, 2, 2)
    for wrong in ((2, 2), (2, 2, 3), (8, 0, 1)):
        with pytest.raises(UsageError, match="grid"):
            make_rank_plan(problem, GPU, 8, grid=wrong)


def test_blocks_that_lie_on_the_ranks_devices_take_no_memory():
    problem, mib = Problem(4096, 2048, 4096), 2**20
    for split, c in (("rows", 16), ("cols", 16 + 48)):  # a strip; and what is on its way
        small = dataclasses.replace(GPU, memory_bytes=c * mib)
        with pytest.raises(OutOfMemoryError, match="2 ranks"):
            make_rank_plan(problem, small, 2, split=split, rounds=2)
        plan = make_rank_plan(problem, small, 2, split=split, rounds=2, there=True)
        assert plan.plan.split == split


@pytest.mark.parametrize("n", [64, 512, 4096])
def test_what_lies_where_it_is_read_is_not_cut_to_read_less(n):
    """A and B that all ranks have cost no time, so no partial sums have to travel."""
    spec = DeviceSpec("cpu", "cpu", 0, 8 << 30, 0.4, 10, host_memory=True, on_gpu=False)
    for ranks in (2, 3, 8):
        plan = make_rank_plan(Problem(n, n, n), spec, ranks, there=True)
        assert plan.plan.grid[2] == 1
    long = make_rank_plan(Problem(8, 8, 10**6), spec, 4, there=True)
    assert long.plan.grid == (1, 1, 4)


@pytest.mark.parametrize("n", [64, 512, 4096])
def test_two_hosts_bring_rows_to_each_other_and_no_partials(n):
    """Cores sum partials in time of their own, and whole rows travel as they lie."""
    assert make_rank_plan(Problem(n, n, n), CPU, 2).plan.grid == (2, 1, 1)
    assert make_rank_plan(Problem(n, n, 100 * n), CPU, 2).plan.grid == (1, 1, 2)


@pytest.mark.parametrize(("m", "n", "lines"), [(64, 100, 32), (1, 90, 45), (0, 0, 1)])
def test_a_strip_has_no_more_rounds_than_lines(m, n, lines):
    started = time.monotonic()
    plan = make_rank_plan(Problem(m, n, 50), CPU, 2, split="cols", rounds=10**9)
    assert plan.rounds == lines
    assert len(plan.owned(1)) == (lines if m else 0)
    assert plan.bytes_kept(1) == make_rank_plan(
        plan.problem, CPU, 2, split="cols", rounds=lines
    ).bytes_kept(1)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("shape", [(512, 512, 512), (4096, 4096, 4096), (20000, 16, 16)])
def test_hosts_take_one_round_where_memory_lets_them(shape):
    """Cores make large pieces faster."""
    plan = make_rank_plan(Problem(*shape), CPU, 2, split="cols")
    assert plan.rounds == 1
    on_gpus = make_rank_plan(Problem(*shape), GPU, 2, split="cols").rounds
    assert on_gpus == max(1, min(8, shape[0] // 2 // 512))
    less = dataclasses.replace(CPU, memory_bytes=plan.needs - 1)
    assert make_rank_plan(Problem(*shape), less, 2, split="cols").rounds > 1


def test_a_split_by_rows_has_one_round_and_no_sum():
    plan = make_rank_plan(Problem(100, 100, 100), CPU, 4, split="rows")
    assert plan.rounds == 1
    assert not any(plan.summed(rank) or plan.bytes_sent(rank) for rank in range(4))


# --- launchers ----------------------------------------------------------------------------


def test_a_launcher_is_found_by_its_variables():
    assert launcher({}) is None and launcher({"SLURM_NTASKS": "4"}) is None
    assert "Open MPI" in launcher({"OMPI_COMM_WORLD_SIZE": "4"})
    assert "pmix" in launcher({"PMIX_RANK": "0", "SLURM_NTASKS": "4"})
    assert expected({"SLURM_NTASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}) == 1
    assert expected({"SLURM_NTASKS": "4"}) == 1  # an allocation, and nobody has called srun
    assert expected({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}) == 4
    assert first_of_job({}) and first_of_job({"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "1"})
    assert not first_of_job({"SLURM_PROCID": "3"})


@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "threads", "mine"),
    [
        (3, 8, [0, 1, 2, 3, 4, 5, 6, 7], None, [3]),
        (3, 4, [0], None, [0]),  # --gpus-per-task=1: each sees its own as number 0
        (5, 8, [0, 1, 2, 3], None, [1]),  # more ranks than GPUs
        (0, 1, [0, 1, 2, 3], 4, [0, 1, 2, 3]),  # one rank a node, a thread a GPU
        (1, 2, [0, 1, 2, 3], 2, [1, 3]),
        (1, 2, [4, 5, 6, 7], 1, [5]),
    ],
)
def test_gpus_are_dealt_round_within_a_node(local_rank, local_size, visible, threads, mine):
    where = Place(9, 8, local_rank, local_size, "host")
    assert gpus_of(where, visible, threads) == mine


# --- programs -----------------------------------------------------------------------------

ENDS_MPI = """
import threading
import numpy as np
from mpi4py import MPI
from hybrid_gemm import free_memory, gemm
a = np.ones((8, 8))
for comm in MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), MPI.COMM_SELF:
    gemm(a, a, comm=comm, device="cpu", split="cols")
MPI.Finalize()
assert not [x for x in threading.enumerate() if x.name == "heartbeat"]
free_memory()
print("right", flush=True)
"""


@needs_mpirun
@pytest.mark.parametrize("program", [ENDS_MPI, ENDS_MPI[: ENDS_MPI.index("MPI.Finalize")]])
def test_mpi_ends_before_a_program_or_with_it(program):
    """What is kept with communicators that nobody freed calls MPI no more."""
    done = mpirun(2, "-c", program, timeout=60, check=0)
    assert "Traceback" not in done.stderr
    assert done.stdout.count("right") == program.count("right") * 2


# --- the command --------------------------------------------------------------------------


def run(ranks: int, *arguments, **options):
    return mpirun(ranks, "-m", "hybrid_gemm", "run", "--device", "cpu", *arguments, **options)


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_passes_the_tests_of_ranks(ranks):
    # One rank is what plain pytest is; mpirun's is looked at on the CPU. 3 and 4 ranks share the
    # work as 2 do, and the emulator shares it as the CPU does; of 3 it sums partials in a way that
    # it does not of 2. Of 4 the grids, the transports and what is moved between parts are new, and
    # dtypes, verdicts and what is refused are not, nor of 3.
    left_out = {
        1: ["-k", "test_world and not emulator and not verdicts"],
        3: [
            "-k",
            "not (test_compute or dtypes or verdicts or refused or rows or complex "
            "or emulator and (auto or stacks))",
        ],
        4: [
            "-k",
            "test_transports and 2-5 or test_world and not "
            "(emulator or dtypes or verdicts or refused or complex and cols)",
        ],
    }
    done = mpirun(
        ranks, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", TESTS / "mpi",
        "-m", "not gpu", *left_out.get(ranks, []), timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.count(" passed") == ranks


@pytest.fixture
def files(tmp_path, rng):
    a = rng.integers(-4, 5, (61, 80)).astype("f4")
    b = rng.integers(-4, 5, (80, 47)).astype(">f4")
    np.save(tmp_path / "A.npy", a.T)
    np.save(tmp_path / "B.npy", np.asfortranarray(b))
    np.save(tmp_path / "C0.npy", np.ones((61, 47), "f4"))
    return tmp_path, a, b


@needs_mpirun
@pytest.mark.parametrize(("ranks", "split"), [(2, "rows"), (3, "cols"), (4, "auto")])
def test_files_in_and_out(files, ranks, split):
    folder, a, b = files
    done = run(ranks, "A.npy", "B.npy", "--trans-a", "-c", "C0.npy", "--beta", 3, "-o", "C.npy",
               "--split", split, "--threads", 2, cwd=folder, check=0)  # fmt: skip
    np.testing.assert_array_equal(np.load(folder / "C.npy"), a @ b + 3)
    assert sorted(os.listdir(folder)) == ["A.npy", "B.npy", "C.npy", "C0.npy"]
    for text in ("verification passed", "wrote C.npy", f"{ranks} ranks x 2 threads"):
        assert done.stdout.count(text) == 1


@needs_mpirun
def test_generated_input_is_the_same_however_many_ranks(tmp_path):
    options = "--size", 300, "--fill", "integers", "--split", "cols"
    for ranks in (1, 3):
        run(ranks, *options, "-o", tmp_path / f"{ranks}.npy", check=0)
    one, three = (np.load(tmp_path / f"{ranks}.npy") for ranks in (1, 3))
    assert one.any()
    np.testing.assert_array_equal(one, three)


@pytest.mark.slow
@needs_mpirun
def test_the_same_command_gives_the_same_bits(tmp_path):
    for i in range(2):
        run(3, "--size", 300, "--split", "cols", "-o", tmp_path / f"{i}.npy", check=0)
    np.testing.assert_array_equal(*(np.load(tmp_path / f"{i}.npy") for i in range(2)))


@needs_mpirun
def test_json_says_how_ranks_summed(tmp_path):
    done = run(3, "--size", 300, "--split", "cols", "--json", "-", "--repeat", 2, check=0)
    data = json.loads(done.stdout)
    assert data["verify"]["passed"] is True
    assert "MPI" in data["reduction"]
    assert [r["rank"] for r in data["plan"]["ranks"]] == [0, 1, 2]
    assert {a["worker"] for a in data["timeline"]} == {0, 1, 2}
    assert {"multiply", "reduce"} <= {a["phase"] for a in data["timeline"]}
    assert len(data["totals_ms"]) == 2
    assert data["plan"]["ranks"][0]["bytes_sent"] == 200 * 300 * 4


@needs_mpirun
def test_small_matrices_are_printed_by_rank_0():
    done = run(2, "--size", 3, "--fill", "integers", "--print", check=0)
    assert done.stdout.count("C =") == 1


@needs_mpirun
def test_info_says_where_ranks_run():
    done = mpirun(2, "-m", "hybrid_gemm", "info", "--json", "-", check=0)
    data = json.loads(done.stdout)
    assert "mpirun" in data["launcher"]
    assert [(x["rank"], x["local_rank"]) for x in data["ranks"]] == [(0, "0 of 2"), (1, "1 of 2")]


@needs_mpirun
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.npy", "B.npy"], 2, "no such file"),
        (["--size", "8", "--split", "diagonal"], 2, "diagonal"),
        (["--size", "8", "--grid", "2,2,2"], 2, "grid"),
        (["--size", "8", "--transport", "nccl"], 5, "between GPUs"),
        (["--size", "8", "--param", "BM"], 2, "--param BM"),
        (["--size", "8", "--reduce", "critical"], 2, "critical"),
        (["--size", "8", "--reduce", "nccl"], 2, "transport says"),
        (["--no-such-option"], 2, "no-such-option"),
    ],
)
def test_a_wrong_option_has_one_message(files, arguments, code, message):
    done = run(2, *arguments, cwd=files[0], check=code)
    assert message in done.stderr
    assert done.stderr.count("hybrid-gemm: ") + done.stderr.count("Error: ") == 1
    assert "Traceback" not in done.stderr


@needs_mpirun
@pytest.mark.parametrize(
    ("option", "name"),
    [
        (["--alpha", 2], "alpha"),
        (["-o", "C.npy"], "output"),
        (["--repeat", 2], "repeat"),
        (["--dry-run"], "dry_run"),
        (["--rank-timeout", 0], "rank_timeout"),
    ],
)
def test_a_rank_with_another_option_ends_all(tmp_path, option, name):
    command = "run", "--size", 60, "--device", "cpu"
    done = mpirun(
        1, *COMMAND[1:], *command, ":", "-n", 1, *COMMAND, *command, *option,
        timeout=60, cwd=tmp_path, check=2,
    )  # fmt: skip
    assert done.stderr.count(f"hybrid-gemm: ranks do not agree on {name}: rank 0 has") == 1
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []


@needs_mpirun
@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_all_and_leaves_no_file(tmp_path, split, how):
    started = time.monotonic()
    done = run(
        3, "--size", 600, "--split", split, "-o", "C.npy", cwd=tmp_path, timeout=60,
        **failing_rank(1, how),
    )  # fmt: skip
    assert time.monotonic() - started < 15  # the start of Python and MPI included
    assert not (tmp_path / "C.npy").exists()
    if how == "raise":
        assert done.returncode == 5, done.stderr
        assert done.stderr.count("hybrid-gemm: rank 1: this rank is broken on purpose") == 1
        assert os.listdir(tmp_path) == []
    else:
        assert done.returncode not in (0, 5)
        assert not [x for x in os.listdir(tmp_path) if x.endswith(".npy")]


def alone(*arguments, **changes):
    """Runs the command without a launcher, whatever started the tests."""
    launchers = "OMPI_", "PMI", "SLURM"
    inherited = {k: v for k, v in environment().items() if not k.startswith(launchers)}
    return subprocess.run(
        [*COMMAND, "run", "--size", "8", *map(str, arguments)],
        capture_output=True, text=True, env={**inherited, **changes},
    )  # fmt: skip


def test_tasks_of_slurm_without_a_launcher_are_a_clear_error():
    done = alone(SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0")
    assert done.returncode == 2
    assert "SLURM_STEP_NUM_TASKS" in done.stderr and "srun --mpi=pmix" in done.stderr
    quiet = alone(SLURM_NTASKS="4", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="2")
    assert quiet.returncode == 2 and not quiet.stderr


def test_one_process_in_an_allocation_of_several_tasks_runs_alone():
    done = alone(SLURM_NTASKS="4", SLURM_PROCID="0")
    assert done.returncode == 0, done.stderr
    assert "verification passed" in done.stdout


@pytest.mark.parametrize("ranks", [1, 6, 4096])
def test_a_dry_run_shows_what_ranks_send_and_keep(ranks, tmp_path):
    done = alone("--size", 8192, "--device", "cpu", "--split", "cols", "--dry-run",
                 "--ranks", ranks, "--json", tmp_path / "plan.json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sends" in done.stdout and "keeps" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())["plan"]["ranks"]
    assert len(found) == ranks
    assert all(r["bytes_kept"] > 0 for r in found)
    assert (found[0]["bytes_sent"] > 0) == (ranks > 1)


def test_options_of_ranks_without_ranks_are_refused():
    for options in (["--transport", "mpi"], ["--rounds", "2"], ["--ranks", "2"]):
        done = alone(*options)
        assert done.returncode == 2 and options[0] in done.stderr


@needs_mpirun
def test_a_command_of_one_process_refuses_ranks():
    done = mpirun(3, "-m", "hybrid_gemm", "bench", "--shapes", "8")
    assert done.returncode != 0 and not done.stdout.strip()
    (said,) = [x for x in done.stderr.splitlines() if x.startswith("hybrid-gemm: ")]
    assert "hybrid-gemm bench runs in one process" in said and "started 3" in said
