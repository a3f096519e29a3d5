"""How ranks are found, and the command under mpirun as a user starts it."""

import json
import os
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
from support.command import COMMAND, environment
from support.devices import needs
from support.ranks import failing_rank, mpirun, needs_mpirun, pytest_over_ranks

from hybrid_gemm.devices.cuda.nccl_group import unavailable as no_nccl
from hybrid_gemm.host.resources import memory_available
from hybrid_gemm.ranks import transports
from hybrid_gemm.ranks.launch import Place, expected, first_of_job, gpus_of, launcher

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


# --- the command --------------------------------------------------------------------------


def run(ranks: int, *arguments, **options):
    return mpirun(ranks, "-m", "hybrid_gemm", "run", "--device", "cpu", *arguments, **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_mpirun
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.campaign)])
def test_every_rank_passes_the_tests_of_ranks(ranks):
    # One rank is what plain pytest is; mpirun's is looked at on the CPU. 3 and 4 ranks share the
    # work as 2 do, and the emulator shares it as the CPU does, so that of most tests one way to
    # share it is enough there; of 3 it sums partials in a way that it does not of 2. Of 4 the
    # grids, the transports and what is moved between parts are new, and dtypes, verdicts and what
    # is refused are not, nor of 3.
    chosen = {
        1: "(test_world or test_redistribution) and not emulator and not verdicts",
        2: "not (emulator and (test_complex and not cols-complex64 or test_every and not cols or "
        "test_products_of_replicated and not cols-2 or residues and rows))",
        3: "not (test_compute or dtypes or verdicts or refused or rows or complex or kinds[0] "
        "or kinds[1] or of_stacks or emulator and (auto or stacks) or arrive and not 2-5)",
        4: "test_transports and 2-5-False or test_redistribution or test_world and not "
        "(emulator or dtypes or verdicts or refused or complex and cols)",
    }
    pytest_over_ranks(ranks, "-k", chosen[ranks])


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(600)
@needs_mpirun
@pytest.mark.parametrize(
    ("ranks", "selected"), [(2, ["--campaigns"]), (3, ["--campaigns"]), (2, ["-k", "emulator"])]
)
def test_every_rank_passes_campaigns(ranks, selected):
    """And all that the emulator does, of which there is a sample above."""
    pytest_over_ranks(ranks, *selected)


@needs_mpirun
def test_an_empty_c_is_made_by_no_kernel():
    assert "kernel: none " in run(2, "--size", 0).stdout


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


@needs_mpirun
def test_json_says_how_ranks_summed_and_the_same_bits_come_again(tmp_path):
    options = "--size", 300, "--split", "cols", "--json", "-"
    files = tmp_path / "0.npy", tmp_path / "1.npy"
    done, _again = (
        run(3, *options, "--repeat", times, "-o", file, check=0)
        for times, file in zip((2, 1), files, strict=True)
    )
    np.testing.assert_array_equal(*map(np.load, files))
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
    places = [(x["rank"], x["local_rank"], x["local_size"]) for x in data["ranks"]]
    assert places == [(0, 0, 2), (1, 1, 2)]


@needs_mpirun
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.npy", "B.npy"], 2, "no such file"),
        (["--size", "8", "--split", "diagonal"], 2, "diagonal"),
        (["--size", "8", "--grid", "2,2,2"], 2, "grid"),
        (["--size", "8", "--transport", "nccl"], 5, "between GPUs"),
        (["--size", "8", "--param", "BM"], 2, "--param 'BM'"),
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
def test_a_product_without_k_shows_its_alpha_over_ranks(tmp_path):
    options = "-m", 4, "-n", 4, "-k", 0, "--alpha", 3, "--beta", 2
    for more in ["--dry-run"], ["-o", "C.npy", "--resume"], ["--json", "C.json"]:
        done = run(2, *options, *more, cwd=tmp_path, check=0)
        assert "k=0 float32, alpha=3 beta=2" in done.stdout
    assert json.loads((tmp_path / "C.json").read_text())["problem"]["alpha"] == 3
    assert "alpha=3 beta=2" in run(1, *options, "--dry-run", "--ranks", 2, check=0).stdout


@needs_mpirun
def test_a_plan_for_ranks_elsewhere_is_made_by_one_process():
    done = run(2, "--size", 8, "--dry-run", "--ranks", 4, check=2)
    assert "run --ranks runs in one process" in done.stderr and not done.stdout


@needs_mpirun
@pytest.mark.parametrize("more", [[], ["--resume"]], ids=["whole", "resume"])
def test_files_of_one_name_and_size_that_differ_are_refused(tmp_path, more):
    """As on the disk of each node: each rank would verify its strip by its own files."""
    for rank in 0, 1:
        (tmp_path / str(rank)).mkdir()
        np.save(tmp_path / str(rank) / "A.npy", np.full((300, 300), rank, "f4"))
        np.save(tmp_path / str(rank) / "B.npy", np.ones((300, 8), "f4"))
    command = "run", "--device", "cpu", "--split", "rows", "A.npy", "B.npy"
    command = *command, "-o", tmp_path / "C.npy", *more
    done = mpirun(
        1, *COMMAND[1:], *command, ":", "-n", 1, "--wdir", tmp_path / "1", *COMMAND, *command,
        timeout=60, cwd=tmp_path / "0", check=2,
    )  # fmt: skip
    assert done.stderr.count("ranks do not agree on the content of A.npy: rank 0 has") == 1
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]


@needs_mpirun
def test_ranks_that_run_different_commands_are_told_which():
    done = mpirun(
        1, *COMMAND[1:], "run", "--size", 60, "--device", "cpu", ":", "-n", 1, *COMMAND, "info",
        timeout=60, check=2,
    )  # fmt: skip
    says = "ranks do not agree on the command: rank 0 has 'run', rank 1 has 'info'"
    assert done.stderr.count(f"hybrid-gemm: {says}") == 1


@needs_mpirun
@pytest.mark.parametrize("split", ["rows", "cols"])
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_all_and_leaves_no_file(tmp_path, split, how):
    done = run(
        3, "--size", 600, "--split", split, "-o", "C.npy", cwd=tmp_path,
        timeout=60,  # after which --rank-timeout would end it
        **failing_rank(1, how),
    )  # fmt: skip
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


@needs("emulator")
def test_a_plan_over_ranks_names_the_variant_that_their_pieces_take():
    """The first that is listed has smaller limits than this C, and is not the one that runs."""
    done = alone("--size", 24, "--device", "emulator", "--kernel", "dots", "--ranks", 2,
                 "--dry-run")  # fmt: skip
    assert "kernel: dots BM=8 BN=8 " in done.stdout, done.stdout


@pytest.mark.parametrize("ranks", [1, 6, 1024])
def test_a_dry_run_shows_what_ranks_send_and_keep(ranks, tmp_path):
    done = alone("--size", 8192, "--device", "cpu", "--split", "cols", "--dry-run",
                 "--ranks", ranks, "--json", tmp_path / "plan.json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sends" in done.stdout and "keeps" in done.stdout
    found = json.loads((tmp_path / "plan.json").read_text())["plan"]["ranks"]
    assert len(found) == ranks
    assert all(r["bytes_kept"] > 0 for r in found)
    assert (found[0]["bytes_sent"] > 0) == (ranks > 1)


@needs_mpirun
def test_ranks_multiply_files_larger_than_memory(tmp_path):
    """Files with holes, each as large as twice the memory of this host; of an alpha of 0 they are
    not read."""
    k = memory_available() // 64
    for name, shape in (("A.npy", (32, k)), ("B.npy", (k, 32))):
        with open(tmp_path / name, "wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + 4 * 32 * k)
    files = "A.npy", "B.npy", "--verify", "off"
    run(2, *files, "--alpha", 0, "-o", "C.npy", cwd=tmp_path, check=0)
    assert not np.load(tmp_path / "C.npy").any()
    elsewhere = run(1, *files, "--dry-run", "--ranks", 2, cwd=tmp_path, check=0)
    assert "keeps up to" in elsewhere.stdout


LITTLE_MEMORY = """
import sys
from hybrid_gemm import cli
from hybrid_gemm.devices import cpu
cpu.memory_available = lambda: 100_000
sys.argv[0] = "hybrid-gemm"
cli.main()
"""


@needs_mpirun
@pytest.mark.parametrize("more", [[], ["--resume", "--panel", 40]])
def test_pages_of_files_are_not_counted_as_memory_of_ranks(tmp_path, rng, more):
    a, b = rng.standard_normal((60, 2000)), rng.standard_normal((2000, 70))
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    files = "A.npy", "B.npy", "-o", "C.npy", "--device", "cpu"
    mpirun(2, "-c", LITTLE_MEMORY, "run", *files, *more, cwd=tmp_path, check=0)
    np.testing.assert_allclose(np.load(tmp_path / "C.npy"), a @ b)


def test_options_of_ranks_without_ranks_are_refused():
    for options in (["--transport", "mpi"], ["--rounds", "2"], ["--ranks", "2"]):
        done = alone(*options)
        assert done.returncode == 2 and options[0] in done.stderr


@needs_mpirun
def test_options_of_ranks_have_no_effect_on_the_only_one():
    """The first run of a scaling study has those of the others."""
    options = "--transport", "mpi", "--rank-timeout", "30", "--rounds", "2"
    by_srun = alone(*options, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")
    for done in run(1, "--size", 60, *options), by_srun:
        assert done.returncode == 0, done.stderr
        assert "verification passed" in done.stdout
        for option in options[::2]:
            assert f"{option} has no effect: there is one rank" in done.stderr


@needs_mpirun
def test_a_command_of_one_process_refuses_ranks():
    done = mpirun(3, "-m", "hybrid_gemm", "bench", "--shapes", "8")
    assert done.returncode != 0 and not done.stdout.strip()
    (said,) = [x for x in done.stderr.splitlines() if x.startswith("hybrid-gemm: ")]
    assert "hybrid-gemm bench runs in one process" in said and "started 3" in said
