"""Batch scripts as text."""

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from hybrid_gemm.cli import cli
from hybrid_gemm.cli.run import check_arguments
from hybrid_gemm.errors import UsageError
from hybrid_gemm.ranks import slurm

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parent.parent
_GPU = ("--split", "cols", "--resident", "--repeat", "5", "--size", "32768")
_STUDY = ("--split", "cols", "--resident", "--repeat", "5")

# The files of slurm/, by name.
SCRIPTS = {
    "one-gpu": slurm.Options(gpus_per_node=1, run=("--device", "cuda", "--size", "16384")),
    "one-node": slurm.Options(gpus_per_node=8, run=_GPU),
    "nodes-srun": slurm.Options(nodes=4, gpus_per_node=8, run=_GPU),
    "nodes-mpirun": slurm.Options(nodes=4, gpus_per_node=8, launcher="mpirun", run=_GPU),
    "scaling": slurm.Options(gpus_per_node=8, scaling=True, threads=1, time="01:00:00", run=_STUDY),
    "cpu": slurm.Options(
        nodes=2, ranks_per_node=2, run=("--device", "cpu", "--split", "cols", "--size", "8192")
    ),
}
SHIPPED = sorted(SCRIPTS)
ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX", "LOADEDMODULES")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_scripts_are_what_the_command_prints(name):
    text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    words = slurm.command(SCRIPTS[name])
    assert f"# Printed by: {words}\n" in text
    nothing_active = dict.fromkeys(ACTIVE)
    printed = CliRunner().invoke(cli, words.split()[1:], env=nothing_active)
    assert printed.output == text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_every_shipped_script_is_known():
    assert sorted(p.stem for p in (ROOT / "slurm").glob("*.sbatch")) == SHIPPED


def text(**options) -> str:
    return slurm.script(slurm.Options(**options))


def test_options_become_directives():
    made = text(nodes=3, gpus_per_node=4, cpus_per_rank=6, partition="gpu", account="me", threads=2)
    for line in ("nodes=3", "ntasks-per-node=4", "gpus-per-node=4", "cpus-per-task=6",
                 "partition=gpu", "account=me"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in made
    assert "--threads 2" in made
    assert "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK" in made
    assert "gpu" not in text(nodes=2).replace("hybrid-gemm", "")


def test_peers_stay_visible_and_one_rank_needs_no_mpi():
    assert "srun --mpi=pmix --kill-on-bad-exit=1 hybrid-gemm run" in text(gpus_per_node=8)
    assert "\nsrun hybrid-gemm run" in text(gpus_per_node=1)
    assert "\nstart -n $SLURM_NTASKS --bind-to none" in text(nodes=2, launcher="mpirun")
    assert "\nmodule load x\n" in text(setup=["module load x"])


@pytest.mark.parametrize(
    "options",
    [{"launcher": "mpiexec"}, {"nodes": 0}, {"ranks_per_node": 0}, {"partition": "a b"},
     {"job_name": "x; rm"}, {"run": ["--size\n8"]}, {"cpus_per_rank": 0},
     # sbatch takes what follows # as a comment: another account would be charged.
     {"account": "me#2"}, {"job_name": "#8"},
     {"job_name": "a/b"}],  # a folder, by which sbatch ends the job without a word
)  # fmt: skip
def test_impossible_options_are_refused(options):
    with pytest.raises(UsageError):
        text(**options)


def test_queues_memory_and_arrays_are_directives():
    made = text(qos="long", constraint="a100&ib", gres="gpu:h100:8", mem="200G", array="0-9%2")
    for line in ("qos=long", "constraint=a100&ib", "gres=gpu:h100:8", "mem=200G", "array=0-9%2",
                 "output=%x-%A-%a.out"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in made


@pytest.mark.parametrize(
    ("gres", "ranks"),
    [("gpu:h100:8", 8), ("gpu:2", 2), ("tmp:5G,gpu:1g.5gb:2", 2), ("gpu", 1), ("tmp:3", 1)],
)
def test_gpus_that_are_asked_for_by_gres_have_a_rank_each(gres, ranks):
    assert f"#SBATCH --ntasks-per-node={ranks}\n" in text(gres=gres)
    assert "ntasks-per-node=3" in text(gres=gres, ranks_per_node=3)
    if ranks > 1:
        assert f"--gpus-per-node={ranks}\n" in text(gres=gres, gpus_per_node=ranks)
    assert "#SBATCH --mem=200MB\n" in text(mem="200MB")


def test_the_active_environment_is_written_in():
    venv, conda = {"VIRTUAL_ENV": "/my envs/a"}, {"CONDA_PREFIX": "/c/env", "CONDA_EXE": "/c/conda"}
    assert slurm.environment({}) == ()
    assert slurm.environment(venv) == (". '/my envs/a/bin/activate'",)
    assert slurm.environment({"LOADEDMODULES": "gcc/12:openmpi/5"}) == (
        "module load gcc/12 openmpi/5",
    )
    assert any("conda activate /c/env" in line for line in slurm.environment(conda))
    printed = CliRunner().invoke(cli, ["slurm"], env=dict.fromkeys(ACTIVE) | venv)
    assert "\n. '/my envs/a/bin/activate'\n" in printed.output
    subprocess.run(["bash", "-n"], input=printed.output, text=True, check=True)
    given = CliRunner().invoke(cli, ["slurm", "--setup", "module load x"], env=venv)
    assert "activate" not in given.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--splt", "cols"], "--split"),
        (["A.npy"], "give A.npy and B.npy, or neither"),
        (["A.npy", "B.npy", "--size", "3"], "sizes and --dtype are for generated input"),
        (["--size", "3", "-m", "3"], "--size sets m, n and k"),
        (["--size", "-3"], "sizes are 0 or more"),
        (["--repeat", "0"], "it takes at least 1"),
        (["--split", "col"], "cols"),
        (["--threads", "0"], "least 1"),
    ],
)
def test_options_of_run_are_checked(options, says):
    failed = CliRunner().invoke(cli, ["slurm", "--", *options])
    assert failed.exit_code and says in str(failed.exception or failed.output) + failed.output


def test_setup_lines_may_read_variables_that_are_not_set_and_may_not_fail():
    def output_of(line: str) -> str:
        ranks = "srun() { echo ran; }\n"
        return subprocess.run(
            ["bash", "-c", ranks + text(setup=[line])], capture_output=True, text=True,
            env={"SLURM_CPUS_PER_TASK": "1"},
        ).stdout  # fmt: skip

    assert output_of('export X="$NOT_SET:/x"') == "ran\n"  # as oneAPI's setvars.sh and conda do
    assert not output_of("module load x")


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize("does", ["true", "false", "echo done >$HYBRID_GEMM_ENDED"])
def test_a_script_ends_well_only_if_mpirun_and_the_ranks_did(tmp_path, does, scaling):
    """Open MPI's mpirun ends with 0 where it loses a node."""
    script = text(nodes=2, launcher="mpirun", scaling=scaling)
    done = subprocess.run(
        ["bash", "-c", f"mpirun() {{ echo ran; {does}; }}\n" + script], capture_output=True,
        text=True, env={"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": "1",
                        "PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    well = "echo" in does
    assert done.returncode == (0 if well else 1), done.stderr
    assert done.stdout == "ran\n" * (4 if well and scaling else 1)
    assert ("the ranks were not done" in done.stderr) == (does == "true")
    assert not list(tmp_path.iterdir())


def test_words_are_quoted():
    assert "srun '--mpi=a&b' --kill" in text(nodes=2, mpi="a&b")
    assert "--json 'a file.json'" in text(run=["--json", "a file.json"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mem": "lots"}, "sbatch takes it as 200G"),
        ({"mem": "200B"}, "sbatch takes it as 200G"),
        *[({"array": x}, "sbatch takes it as 0-3") for x in ("x", "3-0", "1-2-3", "0-3:0", "5:2")],
        *[
            ({"gres": x}, "sbatch takes it as gpu:2")
            for x in ("gpu=2", "gpu:", "gpu::2", "gpu:a:b:c", "gpu:1,", "gres/gpu:1", ":2")
        ],
        # Slurm gives what gres says: two ranks on one GPU.
        ({"gres": "gpu:1", "gpus_per_node": 2}, "asks for 1 GPU of each node, and gpus_per_node=2"),
        ({"mpi": "x$(id)"}, "is not one word"),
        ({"launcher": "mpirun", "mpi": "pmi2"}, "is for srun"),
    ],
)
def test_what_a_job_would_fail_of_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        slurm.Options(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--scaling -- --split cols --size=100", "leave out --size"),
        ("--scaling -- -m5 -k 7", "leave out -m -k"),
        ("--scaling -- A.npy B.npy", "leave out the files"),
        ("--scaling -- --json x.json -o C.npy", "leave out -o --json"),
        ("--scaling -- --dry-run", "leave out --dry-run"),
        ("--threads 8 -- --threads 4", "given twice"),
        ("--threads 5000", "at most 1024"),
        ("--threads 0", "at least 1"),
        ("--ranks-per-node 3 -- --grid 2,1,1", "has 2 parts, and this job 3 ranks"),
        ("--nodes 2 -- --check", "runs in one process, and this job has 2 ranks"),
        ("--nodes 2 -- --dry-run --ranks 4", "--ranks runs in one process, and this job has 2"),
        ("--nodes 2 -- --transport ipc", "between ranks of one node, and this job has 2 nodes"),
        ("--scaling --ranks-per-node 4 -- --grid 4,1,1", "leave out --grid"),
        ("--nodes 2 -- --reduce nccl", "nccl reduction is for one process"),
        ("--nodes 2 -- --rounds 0", "at least 1"),
        ("-- run A.npy B.npy", "leave out run (./run is a file)"),
        ("-- hybrid-gemm run", "leave out hybrid-gemm run"),
    ],
)
def test_options_of_run_that_would_fail_in_the_job_are_refused(given, said):
    result = CliRunner().invoke(cli, ["slurm", *given.split()])
    assert isinstance(result.exception, UsageError) and not result.stdout
    assert said in str(result.exception)


@pytest.mark.parametrize("given", ["", "--size 8", "A.npy B.npy -o C.npy", "-m 8 -n 9"])
def test_the_arguments_that_a_script_names_go_with_its_own(given):
    script = CliRunner().invoke(cli, ["slurm", "--", *given.split()]).stdout
    named = script.partition("run`: sbatch FILE ")[2].splitlines()[0]
    check_arguments([*given.split(), *named.split()])  # as the job would


def test_a_scaling_study_takes_its_size_from_a_variable():
    text = slurm.script(slurm.Options(scaling=True, mem="1T", array="0-9%2", run=("--size-like",)))
    assert "# Arguments go to `hybrid-gemm run`: SIZE=4096 sbatch FILE" in text
    assert "size=${SIZE:-16384}" in text
