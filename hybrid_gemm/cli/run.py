"""`hybrid-gemm run`: one product, alone or over ranks."""

from __future__ import annotations

from typing import Any

import click

from ..errors import UsageError, VerificationError
from ..options import CHOICES, DEFAULTS, PANEL_SIDE, Options
from ..ranks import ending, heartbeat, launch
from .shared import json_option, option_flags, progress_bar, say, writable, write_result

_INPUT = ("m", "n", "k", "size", "c_file", "dtype", "fill", "seed", "alpha", "beta", "trans_a",
          "trans_b")  # fmt: skip


@click.command()
@click.argument("files", nargs=-1, metavar="[A.npy B.npy]")
@click.option("-m", type=int, help="Rows of C (generated input).")
@click.option("-n", type=int, help="Columns of C (generated input).")
@click.option("-k", type=int, help="Columns of op(A) (generated input).")
@click.option("--size", type=int, help="m = n = k at once; default 2048.")
@click.option("-c", "c_file", metavar="FILE", help="C.npy to be scaled by beta.")
@click.option("-o", "--output", metavar="FILE", help="Write C as .npy, whole or not at all.")
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
@option_flags()
@click.option(
    "--resident", is_flag=True, help="Put A, B and C on the device before the clock starts."
)
@click.option("--repeat", default=1, show_default=True, help="Runs; the median one is shown.")
@click.option("--verify", default="auto", show_default=True, help="auto, full or off.")
@click.option("--print", "show", is_flag=True, help="Print A, B and C (small matrices).")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--trace", metavar="FILE", help="Write what every worker did when (Perfetto).")
@click.option(
    "--sha256",
    is_flag=True,
    help="Put the SHA-256 of the files of A, B and C into the result, as sha256sum prints them.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep finished panels of C however the run ends, and take up those of an earlier one.",
)
@click.option(
    "--panel",
    type=int,
    metavar="N",
    help=f"With --resume: rows and columns of a panel; default {PANEL_SIDE}.",
)
@click.option("--ranks", type=int, metavar="N", help="Plan for N ranks (with --dry-run).")
@json_option
def run(
    files: tuple[str, ...], json_file: str | None, ranks: int | None, sha256: bool, **given: Any
) -> None:  # fmt: skip
    """Multiply two matrices: generated ones, or A.npy B.npy.

    Started as several ranks (by mpirun or srun --mpi=pmix) it is one product over all of them.
    """
    chosen = {name: given.pop(name) for name in CHOICES}
    request = {name: given.pop(name) for name in _INPUT}
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: it takes at least 1")
    if ranks and not given["dry_run"]:
        raise UsageError(f"--ranks is for --dry-run; to run on {ranks}: mpirun -n {ranks} ...")
    outputs = [json_file, given["output"], given["trace"]]
    if given["resume"] and given["output"]:
        outputs += _names_beside(given["output"])
    inputs = [x for x in (*files, request["c_file"]) if x]
    if sha256 and not (files or given["output"]):
        raise UsageError("--sha256 is of files; give A.npy B.npy, or -o C.npy")
    if sha256 and given["dry_run"]:
        raise UsageError("--sha256 is of a result, and --dry-run makes none")
    comm = None if ranks else launch.world(chosen["rank_timeout"])
    if comm is not None and given["resume"]:
        raise launch.agreed(UsageError(
            f"--resume was given to {comm.size} ranks, and is not built for ranks yet; one process "
            "takes all GPUs and cores of a host"
        ))  # fmt: skip
    _handle_signals(comm)
    launch.together(comm, lambda: writable(*outputs, inputs=inputs))
    speaks = comm is None or comm.rank == 0
    note = say if speaks else lambda message: None
    if given["output"] and not given["output"].lower().endswith(".npy"):
        note(f"{given['output']} will hold the bytes of a .npy file, whatever its name says")
    beat = heartbeat.known(comm)
    with ending.ends_all(comm), beat.call(heartbeat.LOCAL), progress_bar(speaks) as progress:
        job = _job(comm, ranks, files, request, chosen, given, note)
        data = job.plan_only() if given["dry_run"] else job.run(progress)
    # Still as one of the ranks: what fails here ends them all.
    with ending.ends_all(comm), beat.call(heartbeat.LOCAL):
        if speaks:
            if sha256:
                data["sha256"] = _sha256(job, data["output"])
            write_result(data, json_file, lambda: _show(job, data))
            job.write_trace()
        if job.verdict is not None and not job.verdict.passed:
            raise launch.agreed(
                VerificationError(f"the product is wrong: {job.verdict}; no file was written")
            )


def _names_beside(output: str) -> list[str]:
    from ..arrays.unfinished import names_beside

    return names_beside(output)


def _handle_signals(comm: Any) -> None:
    """Once MPI has started, which has handlers of its own."""
    from . import signals

    signals.name_truncated_files(comm and comm.rank)


def _sha256(job: Any, output: str | None) -> dict[str, str | None]:
    """The SHA-256 of the files that were read and written; None for what is no file."""
    from ..arrays.npy_files import sha256

    right = job.verdict is None or job.verdict.passed
    return {**job.inputs.sha256(), "C": sha256(output) if output and right else None}


def _show(job: Any, data: dict) -> None:
    job.print()
    for name, digest in data.get("sha256", {}).items():
        if digest:
            click.echo(f"SHA-256 of {name}: {digest}")


def _job(
    comm: Any, ranks: int | None, files: tuple[str, ...], request: dict, chosen: dict,
    given: dict, note: Any,
) -> Any:  # fmt: skip
    """The job on the site that these options mean; all ranks raise alike."""
    from .inputs import InputRequest, Inputs
    from .job import Job, Wanted

    def asked() -> tuple[Options, Inputs, Wanted]:
        options = Options(**chosen)
        if comm is not None:
            options.across_ranks()
        return options, Inputs.of(InputRequest(files, **request)), Wanted(**given)

    options, inputs, wanted = launch.together(comm, asked)
    if comm is None and ranks is None:
        from .alone import Alone

        for name, choice in CHOICES.items():
            if choice.across_ranks and getattr(options, name) != DEFAULTS[name]:
                raise UsageError(f"--{name.replace('_', '-')} is for ranks; {launch.HOW}")
        if wanted.resume:
            from .resume import Resumable

            return Job(inputs, wanted, Resumable(options, wanted.panel, note), note)
        return Job(inputs, wanted, Alone(options), note)
    from .over_ranks import Elsewhere, OverRanks

    return Job(
        inputs,
        wanted,
        OverRanks(comm, options) if ranks is None else Elsewhere(ranks, options),
        note,
    )
