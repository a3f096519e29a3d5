"""`hybrid-gemm run`: one product, alone or over ranks."""

from __future__ import annotations

import click

from ..errors import UsageError, VerificationError
from ..ranks import launch
from .shared import (
    Bytes,
    List,
    device_option,
    json_option,
    parameters,
    progress_bar,
    say,
    writable,
    write_result,
)


@click.command()
@click.argument("files", nargs=-1, metavar="[A.npy B.npy]")
@click.option("-m", type=int, help="Rows of C (generated input).")
@click.option("-n", type=int, help="Columns of C (generated input).")
@click.option("-k", type=int, help="Columns of op(A) (generated input).")
@click.option("--size", type=int, help="m = n = k at once; default 2048.")
@click.option("-c", "c_file", metavar="FILE", help="C.npy to be scaled by beta.")
@click.option("-o", "--output", metavar="FILE", help="Write C as .npy, whole or not at all.")
@click.option(
    "--threads",
    type=int,
    help="Worker threads; default one a device, or as many GPUs as are worth it.",
)
@click.option(
    "--split", default="auto", show_default=True, metavar="NAME", help="rows, cols or auto."
)
@device_option
@click.option("--gpus", type=List("0,1", int), help="GPUs by number, such as 0,1; default all.")
@click.option("--emulate-devices", type=int, metavar="N", help="One GPU plays N devices.")
@click.option("--kernel", default="auto", show_default=True, metavar="NAME", help="See `kernels`.")
@click.option("--param", multiple=True, metavar="NAME=NUMBER", help="A kernel's parameter.")
@click.option(
    "--reduce",
    "reduction",
    default="ordered",
    show_default=True,
    metavar="NAME",
    help="ordered, nccl (between GPUs), or critical (the lab's way, for comparison).",
)
@click.option(
    "--algorithm",
    default="ordinary",
    show_default=True,
    metavar="NAME",
    help="ordinary, or strassen over that kernel.",
)
@click.option("--levels", default=1, show_default=True, help="Of Strassen's algorithm.")
@click.option(
    "--compute",
    default="fp32",
    show_default=True,
    metavar="NAME",
    help="How float32 is multiplied: fp32, fp32x3, tf32 or auto.",
)
@click.option(
    "--dtype", help="Of generated input: float32, float64, float16, bfloat16, int32, int64."
)
@click.option(
    "--fill",
    default="normal",
    show_default=True,
    help="Of generated input: normal, uniform or integers.",
)
@click.option("--seed", default=0, show_default=True, help="Of generated input.")
@click.option("--alpha", type=float, default=1.0, show_default=True)
@click.option("--beta", type=float, default=0.0, show_default=True)
@click.option("--trans-a", is_flag=True, help="Multiply by A's transpose.")
@click.option("--trans-b", is_flag=True, help="Multiply by B's transpose.")
@click.option(
    "--resident", is_flag=True, help="Put A, B and C on the device before the clock starts."
)
@click.option("--repeat", default=1, show_default=True, help="Runs; the median one is shown.")
@click.option("--verify", "mode", default="auto", show_default=True, help="auto, full or off.")
@click.option("--print", "show", is_flag=True, help="Print A, B and C (small matrices).")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option(
    "--trace", "trace_file", metavar="FILE", help="Write what every worker did when (Perfetto)."
)
@click.option(
    "--grid", type=List("2,2,1", int), metavar="PM,PN,PK", help="How workers cut m, n, K."
)
@click.option(
    "--max-device-memory", type=Bytes(), metavar="SIZE", help="Of each device, such as 8GiB."
)
@click.option("--transport", metavar="NAME", help="Between ranks: auto, ipc, nccl or mpi.")
@click.option("--rounds", type=int, metavar="N", help="Pieces in which ranks sum a strip of C.")
@click.option("--ranks", type=int, metavar="N", help="Plan for N ranks (with --dry-run).")
@json_option
def run(files, json_file, dry_run, grid, transport, rounds, ranks, **options) -> None:
    """Multiply two matrices: generated ones, or A.npy B.npy.

    Started as several ranks (by mpirun or srun --mpi=pmix) it is one product over all of them.
    """
    options |= {"params": parameters(options.pop("param")), "dry_run": dry_run}
    across = {"grid": grid, "transport": transport, "rounds": rounds, "ranks": ranks}
    across = {name: value for name, value in across.items() if value is not None}
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: it takes at least 1")
    if ranks and not dry_run:
        raise UsageError(f"--ranks is for --dry-run; to run on {ranks}: mpirun -n {ranks} ...")
    outputs = json_file, options["output"], options["trace_file"]
    inputs = [x for x in (*files, options["c_file"]) if x]
    comm = None if ranks else launch.world()
    launch.together(comm, lambda: writable(*outputs, inputs=inputs))
    if comm is None and not ranks:
        _run_alone(files, json_file, across, options)
        return

    from .rank_job import RankJob

    speaks = comm is None or comm.rank == 0
    note = say if speaks else lambda message: None
    with launch.ending(comm), progress_bar(speaks) as progress:
        job = launch.together(
            comm, lambda: RankJob(comm, files, note=note, **across, **options)
        )  # fmt: skip
        job.open()
        data = job.plan_only() if dry_run else job.run(progress)
        if speaks:
            write_result(data, json_file, job.print)
            job.write_trace()
        if not dry_run:
            _judge(job.verdict)


def _run_alone(files, json_file, across: dict, options: dict) -> None:
    from .job import Job

    options["grid"] = across.pop("grid", None)
    if across:
        raise UsageError(f"--{next(iter(across))} is for ranks; {launch.HOW}")
    with progress_bar() as progress:
        job = Job(files, note=say, **options)
        data = job.plan_only() if options["dry_run"] else job.run(progress)
    write_result(data, json_file, job.print)
    job.write_trace()
    if not options["dry_run"]:
        _judge(job.verdict)


def _judge(verdict) -> None:
    if verdict is not None and not verdict.passed:
        raise launch.agreed(
            VerificationError(f"the product is wrong: {verdict}; no file was written")
        )
