"""`hybrid-gemm slurm`: prints batch scripts."""

from __future__ import annotations

import math
import os
from typing import Any

import click
from click.shell_completion import CompletionItem, ShellComplete

from ..errors import UsageError
from ..ranks.slurm import LAUNCHERS, Options, environment, script
from .help import Command
from .option_types import Named
from .shared import flags_of


class _OfAJob(Command):
    """Its own options are those of the job; those of `run` stand after --."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from .run import run

        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            if not any(name in parameter.opts for parameter in run.params):
                raise
            says = f"{name} is an option of `hybrid-gemm run`, whose options stand after --"
            raise click.NoSuchOption(name, says, ctx=ctx) from None


def _complete_run(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What `hybrid-gemm run` would offer behind the words after --."""
    from .run import run

    shell = ShellComplete(run, {}, "hybrid-gemm run", "")
    return shell.get_completions(list(ctx.params["run"]), incomplete)


@click.command(
    cls=_OfAJob,
    groups={
        "Job": ("nodes", "ranks_per_node", "gpus_per_node", "cpus_per_rank", "mem", "time",
                "array", "job_name"),
        "Queue": ("partition", "account", "qos", "constraint", "gres"),
        "Start": ("threads", "launcher", "mpi", "scaling", "setup"),
    },
    examples=[
        ("A product over 8 GPUs of one node:",
         "hybrid-gemm slurm --gpus-per-node 8 -- --size 65536 > job.sbatch"),
        ("A job on 4 nodes, for an account:",
         "hybrid-gemm slurm --nodes 4 --gpus-per-node 8 --account me"),
        ("A strong and a weak scaling study:", "hybrid-gemm slurm --gpus-per-node 8 --scaling"),
    ],
)  # fmt: skip
@click.argument(
    "run",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[-- RUN OPTIONS]",
    shell_complete=_complete_run,
)
@flags_of(Options, setup={"multiple": True}, launcher={"type": Named(LAUNCHERS)})
def slurm(**options: Any) -> None:
    """Print an sbatch script that runs a product.

    What stands after -- are options of `hybrid-gemm run`; sbatch takes more of them after the
    script's name.
    """
    from .run import check_arguments

    _check_first(options["run"])
    check_arguments(options["run"])
    options["setup"] = options["setup"] or environment(os.environ)
    job = Options(**options)
    _check_job(job)
    click.echo(os.fsencode(script(job)), nl=False)  # names as they are, in UTF-8 or not


def _check_first(run: tuple[str, ...]) -> None:
    """Raises `UsageError` where the command itself stands after --, which would be a file of A."""
    for command in (("hybrid-gemm", "run"), ("run",)):
        if run[: len(command)] == command:
            raise UsageError(
                f"'{' '.join(command)}' stands after --, where options and files of `hybrid-gemm "
                f"run` stand: leave out {' '.join(command)} (./{command[0]} is a file)"
            )


# What a scaling study sets itself, or would do again and again, by the names of run's parameters.
_OF_A_STUDY = {
    "files": "the files", "m": "-m", "n": "-n", "k": "-k", "size": "--size", "grid": "--grid",
    "output": "-o", "json_file": "--json", "trace": "--trace", "dry_run": "--dry-run",
}  # fmt: skip


def _check_job(job: Any) -> None:
    """Raises `UsageError` for options of `run` with which this job fails, or measures nothing."""
    from ..options import FLAGS
    from ..options import Options as RunOptions
    from .run import run

    with run.make_context("hybrid-gemm run", list(job.run)) as context:
        given = context.params
    if job.threads and given["threads"]:
        raise UsageError("threads were given twice, before and after --; leave out one")
    threads = job.threads or given["threads"]
    chosen = RunOptions(**{name: given[name] for name in FLAGS} | {"threads": threads})
    if job.scaling and (named := [x for name, x in _OF_A_STUDY.items() if given[name]]):
        raise UsageError(
            f"a scaling study sets sizes, ranks and results: leave out {' '.join(named)}; "
            "SIZE=4096 sbatch FILE changes its size"
        )
    if job.ranks == 1:
        return
    chosen.across_ranks()
    for name in ("check", "ranks"):
        if given[name]:
            raise UsageError(f"--{name} runs in one process, and this job has {job.ranks} ranks")
    if chosen.transport == "ipc" and job.nodes > 1:
        raise UsageError(
            f"the transport ipc is between ranks of one node, and this job has {job.nodes} nodes"
        )
    if chosen.grid and math.prod(chosen.grid) != job.ranks:
        raise UsageError(
            f"the grid {' x '.join(map(str, chosen.grid))} has {math.prod(chosen.grid)} parts, and "
            f"this job {job.ranks} ranks; they must be as many"
        )
