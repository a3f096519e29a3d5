"""The subcommands info, kernels, reproduce, plot, new-kernel and slurm; and --version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ..errors import UsageError, VerificationError
from ..ranks import launch
from .shared import List, device_option, json_option, progress_bar, say, writable, write_result


def _print_version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from ..reporting.environment import version

        click.echo(f"hybrid-gemm {version()}")
        context.exit()


# Not click's own, which takes a version that is known beforehand: this one asks git.
version_option = click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version, and the git commit of a checkout, and exit.",
)  # fmt: skip


@click.command()
@json_option
def info(json_file: str | None) -> None:
    """Versions, devices and links: what a bug report needs."""
    from ..reporting.environment import environment, ranks, warnings

    placed = ranks()
    if not launch.first_of_job():
        return
    started = {"launcher": launch.launcher(), "ranks": placed} if placed else {}
    data = environment() | started
    if json_file:
        write_result(started, json_file, lambda: None)
    else:
        _print_tree(data)
    for warning in warnings(data):
        say(f"note: {warning}")


def _print_tree(data: Mapping[str, Any], indent: int = 0) -> None:
    """Nested data as indented lines; each item of a list of dictionaries by itself."""
    margin = "  " * indent
    for key, value in data.items():
        if isinstance(value, dict):
            click.echo(f"{margin}{key}:")
            _print_tree(value, indent + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                click.echo(f"{margin}{key.removesuffix('s')}:")
                _print_tree(item, indent + 1)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            click.echo(f"{margin}{key}: {text}")


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--compile", "arch", metavar="ARCH", help="Compile for sm_90, ...: registers, spills."
)
@click.option("--dtype", default="float32", show_default=True, help="Of --compile.")
@json_option
def kernels(names: tuple[str, ...], arch: str | None, dtype: str, json_file: str | None) -> None:
    """List the kernels with their parameters and limits."""
    from . import kernel_listing

    data = kernel_listing.kernels(names, arch, dtype)
    write_result(data, json_file, lambda: kernel_listing.print_kernels(data))


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="List the experiments and stop.")
@click.option(
    "--scale",
    default="small",
    show_default=True,
    metavar="NAME",
    help="small (seconds), or full: the published sizes, 10 minutes on one GPU.",
)
@device_option
@click.option("--gpus", type=List("0,1", int), help="GPUs by number, such as 0,1; default all.")
@click.option("--samples", type=int, help="Timed samples a row; default 1 (small) or 3 (full).")
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", metavar="DIR", help="Write JSON, CSV, Markdown and plots there.")
@json_option
def reproduce(
    names: tuple[str, ...], listed: bool, output: str | None, json_file: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Run published experiments: theirs, ours, ratio, and a verdict on each claim.

    NAME is an experiment of --list, or all.
    """
    from ..experiments import engine
    from ..experiments import output as out

    if listed:
        for experiment in engine.experiments().values():
            click.echo(f"{experiment.name:<16}{experiment.title}: {experiment.question}")
        return
    if not names:
        raise UsageError("name experiments, or all; --list shows them")
    chosen = engine.choose_experiments(names)
    writable(json_file)
    if output:
        out.check_directory(output)
    with progress_bar() as progress:
        data = engine.run(chosen, progress=progress, note=say, **options)
    write_result(data, json_file, lambda: out.show(data))
    if output:
        from ..reporting.environment import command_line, environment

        out.write(output, {"command": command_line(), **data, "environment": environment()})
        say(f"wrote {output}")
    rows = [row for result in data["experiments"] for row in result["rows"]]
    if wrong := [row for row in rows if row.get("verdict") == "FAILED"]:
        raise VerificationError(f"{len(wrong)} rows have wrong results")


@click.command()
@click.argument("file", metavar="FILE")
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="FILE", required=True, help="NAME.svg or NAME.png.")
def plot(file: str, name: str | None, output: str) -> None:
    """Draw a result of `bench --json`, `run --trace` or `reproduce -o`.

    NAME is an experiment, where a file has several.
    """
    from pathlib import Path

    from ..arrays.npy_files import check_output
    from ..experiments.output import load
    from ..host.cache import atomic_write
    from ..reporting import plots
    from .pictures import pictures

    target = check_output(output, [file])
    found = pictures(load(file))
    if name is None and len(found) == 1:
        (name,) = found
    if name not in found:
        raise UsageError(f"say which picture: {', '.join(found)}")
    image = plots.draw(found[name], output.rpartition(".")[2].lower())
    atomic_write(Path(target), image)
    say(f"wrote {output}")


@click.command("new-kernel")
@click.argument("name")
@click.option(
    "--directory",
    metavar="DIR",
    help="Default: the kernels folder of a checkout, or $HYBRID_GEMM_KERNELS.",
)
def new_kernel(name: str, directory: str | None) -> None:
    """Write a commented kernel file to start from: gemm_NAME.cu."""
    from ..catalog import template as new

    path = new.write(name, directory)
    click.echo(f"wrote {path}\n\n{new.next_steps(name, path)}")


@click.command()
@click.argument("run", nargs=-1, type=click.UNPROCESSED, metavar="[-- RUN OPTIONS]")
@click.option("--nodes", default=1, show_default=True)
@click.option("--ranks-per-node", type=int, metavar="N", help="Default: one a GPU, or one.")
@click.option("--gpus-per-node", default=0, metavar="N", show_default=True)
@click.option("--cpus-per-rank", default=8, metavar="N", show_default=True)
@click.option("--threads", type=int, metavar="N", help="Worker threads in each rank.")
@click.option(
    "--launcher", default="srun", metavar="NAME", help="srun or mpirun.", show_default=True
)
@click.option("--mpi", default="pmix", metavar="NAME", help="Of srun.", show_default=True)
@click.option("--scaling", is_flag=True, help="1, 2, 4, ... ranks: strong and weak.")
@click.option("--time", default="00:30:00", metavar="TIME", show_default=True)
@click.option("--partition", default="", metavar="NAME")
@click.option("--account", default="", metavar="NAME")
@click.option("--job-name", default="hybrid-gemm", metavar="NAME", show_default=True)
@click.option(
    "--setup", multiple=True, metavar="LINE", help="Shell line, as 'module load openmpi'."
)
def slurm(**options: Any) -> None:
    """Print an sbatch script: hybrid-gemm slurm --gpus-per-node 8 -- --split cols > job.sbatch."""
    from ..ranks.slurm import Options, script

    click.echo(script(Options(**options)), nl=False)
