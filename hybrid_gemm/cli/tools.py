"""The subcommands info, kernels, reproduce, plot and new-kernel; and --version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..errors import UsageError, VerificationError, counted, nearest
from ..ranks import launch
from . import shared
from .help import Command
from .option_types import DTYPES, EXPERIMENTS, WHOLE, File, Named, known


def _print_version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from ..reporting.environment import version

        click.echo(f"hybrid-gemm {version()}")
        context.exit()


# Not click's own, which takes a version that is known beforehand: this one asks git.
version_option = click.option(
    "-V", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the version, and the git commit of a checkout, and exit.",
)  # fmt: skip


@click.command(
    cls=Command,
    ranks=True,
    groups={"Output": ("json_file",)},
    examples=[
        ("Show what a bug report needs:", "hybrid-gemm info"),
        ("Write it to a file:", "hybrid-gemm info --json info.json"),
        ("Show which rank takes which GPU:", "mpirun -n 4 hybrid-gemm info"),
    ],
)
@shared.json_option
def info(json_file: str | None) -> None:
    """Show versions, devices and links, as a bug report needs them."""
    from ..reporting.environment import environment, ranks, warnings

    placed = ranks()
    if not launch.first_of_job():
        return
    started = {"launcher": launch.launcher(), "ranks": placed} if placed else {}
    data = environment() | started
    if json_file:
        shared.write_result(started, json_file, lambda: None)
    else:
        _print_tree(data)
    for warning in warnings(data):
        shared.say(f"note: {warning}")


def _print_tree(data: Mapping[str, Any], indent: int = 0) -> None:
    """Nested data as indented lines; each item of a list of dictionaries by itself."""
    margin = "  " * indent
    for key, value in data.items():
        if isinstance(value, dict) and value:
            click.echo(f"{margin}{key}:")
            _print_tree(value, indent + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                click.echo(f"{margin}{key.removesuffix('s')}:")
                _print_tree(item, indent + 1)
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            click.echo(f"{margin}{key}: {'none' if text in ({}, '') else text}")


@click.command(
    cls=Command,
    groups={"Compiling": ("arch", "dtype"), "Output": ("json_file",)},
    examples=[
        ("List all kernels:", "hybrid-gemm kernels"),
        ("Show one kernel, its parameters and its limits:", "hybrid-gemm kernels tuned"),
        ("Compile it for an H100, and show its registers:",
         "hybrid-gemm kernels tuned --compile sm_90"),
    ],
)  # fmt: skip
@click.argument(
    "names", nargs=-1, type=Named(known("catalog", "kernels"), check=False), metavar="[NAME]..."
)
@click.option(
    "--compile",
    "arch",
    metavar="ARCH",
    help="Compile for an architecture such as sm_90, and show registers and spills.",
)
@click.option(
    "--dtype",
    type=Named(DTYPES),
    default="float32",
    help="The dtype that --compile compiles for.",
)
@shared.json_option
@click.pass_context
def kernels(
    context: click.Context, names: tuple[str, ...], arch: str | None, dtype: str,
    json_file: str | None,
) -> None:  # fmt: skip
    """List the kernels; with names, show their parameters and limits."""
    from . import kernel_listing

    if arch is None:
        shared.refuse_options(context, {"dtype"}, "is for --compile, which was not given")
    data = kernel_listing.kernels(names, arch, dtype)
    shared.write_result(data, json_file, lambda: kernel_listing.print_kernels(data, bool(names)))


@click.command(
    cls=Command,
    groups={
        "Input": ("scale", "seed"),
        "Device and kernel": ("gpus",),
        "Measuring": ("samples",),
        "Output": ("listed", "output", "json_file"),
    },
    examples=[
        ("List the experiments:", "hybrid-gemm reproduce --list"),
        ("Run one at small sizes:", "hybrid-gemm reproduce column_split"),
        ("Run all at the published sizes, with tables and pictures:",
         "hybrid-gemm reproduce all --scale full -o out"),
    ],
)  # fmt: skip
@click.argument("names", nargs=-1, type=Named(EXPERIMENTS, check=False), metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="List the experiments and stop.")
@click.option(
    "--scale",
    type=Named(("small", "full")),
    default="small",
    help="small takes up to a minute each; full is the published sizes, minutes on a GPU.",
)
@shared.device_option
@shared.gpus_option("GPUs by number, such as 0,1. Without it, all.")
@click.option(
    "--samples",
    type=WHOLE,
    help="Timed samples of a row. Without it, 5 (small) or 3 (full), and 1 on the emulator.",
)
@shared.seed_option
@click.option(
    "-o",
    "--output",
    type=File("dir"),
    help="Write JSON, CSV, Markdown and pictures into this folder: a new or empty one, or one of "
    "earlier results, which are replaced.",
)
@shared.json_option
@click.pass_context
def reproduce(
    context: click.Context, names: tuple[str, ...], listed: bool, output: str | None,
    json_file: str | None, **options: Any,
) -> None:  # fmt: skip
    """Run published experiments, and judge their claims.

    Each table has the published figures, ours and their ratio, and each claim gets a verdict.
    NAME is an experiment of --list, or all.
    """
    from ..experiments import engine
    from ..experiments import output as out
    from ..reporting import console

    if listed:
        others = {*context.params} - {"listed", "names"}
        shared.refuse_options(context, others, "is for results, and --list shows none")
        if names:
            raise UsageError("--list shows all experiments; leave out the names, or --list")
        for experiment in engine.experiments().values():
            words = f"{experiment.name:<16}{experiment.title}: {experiment.question}"
            console.line(words, indent=16, first=0)
        return
    if not names:
        raise UsageError("name experiments, or all; --list shows them")
    chosen = engine.choose_experiments(names)
    if output is not None:
        out.check_directory(output)
        if json_file is not None and Path(json_file).resolve().is_relative_to(
            Path(output).resolve()
        ):
            raise UsageError(
                f"--json {json_file} is in {output}, which gets {out.RESULTS}; leave out --json"
            )
    shared.writable(json_file)
    with shared.progress_bar() as progress:
        data = engine.run(chosen, progress=progress, note=shared.say, **options)

    def write_folder() -> None:
        from ..reporting.environment import command_line, environment

        if output is not None:
            out.write(output, {"command": command_line(), **data, "environment": environment()})
            shared.say(f"wrote {output}")

    shared.write_result(data, json_file, lambda: out.show(data), write_folder)
    rows = [row for result in data["experiments"] for row in result["rows"]]
    if wrong := [row for row in rows if row.get("verdict") == "FAILED"]:
        raise VerificationError(f"{counted(len(wrong), 'row')} with a wrong result")


@click.command(
    cls=Command,
    groups={"Output": ("output",)},
    examples=[
        ("Draw rates over sizes:", "hybrid-gemm plot rows.json -o rates.svg"),
        ("Draw what every worker did when:", "hybrid-gemm plot trace.json -o timeline.svg"),
        ("Draw one experiment of several:", "hybrid-gemm plot out ladder -o ladder.png"),
    ],
)
@click.argument("file", type=File())
@click.argument("name", type=Named(EXPERIMENTS, check=False), required=False)
@click.option(
    "-o", "--output", type=File(), required=True, help="The picture: NAME.svg or NAME.png."
)
def plot(file: str, name: str | None, output: str) -> None:
    """Draw a result of bench, run --trace or reproduce.

    FILE is what `bench --json`, `run --trace` or `reproduce -o` wrote. NAME is an experiment,
    where a file has several.
    """
    from ..arrays.output_files import check_output, write_file
    from ..experiments.output import load
    from ..reporting import plots
    from .pictures import pictures

    target = check_output(output, [file])
    give = "give a file of bench --json, run --trace or reproduce"
    data = load(file, give)
    with shared.reading_results(file):
        found = pictures(data)
        if not found:
            raise UsageError(f"{file} has nothing to draw; {give}")
        if name is None and len(found) == 1:
            (name,) = found
        if name not in found:
            asked = "several pictures: name one"
            if name is not None:
                asked = f"no picture {name!r}{nearest(name, found)}"
            raise UsageError(f"{file} has {asked}; there are {', '.join(found)}")
        if found[name].empty:
            raise UsageError(f"{file} has nothing to draw: nothing in it took any time")
        image = plots.draw(found[name], output.rpartition(".")[2].lower())
    write_file(target, image)
    shared.say(f"wrote {output}")


@click.command(
    "new-kernel",
    cls=Command,
    groups={"Output": ("directory",)},
    examples=[
        ("Write kernels/gemm_mine.cu in a checkout:", "hybrid-gemm new-kernel mine"),
        ("Write it into a folder of yours:", "hybrid-gemm new-kernel mine --directory my-kernels"),
        ("Run it without a GPU:",
         "hybrid-gemm run --kernel mine --device emulator --size 200 --verify full"),
    ],
)  # fmt: skip
@click.argument("name")
@click.option(
    "--directory",
    type=File("dir"),
    help="Where it goes. Without it, the kernels folder of a checkout, or $HYBRID_GEMM_KERNELS.",
)
def new_kernel(name: str, directory: str | None) -> None:
    """Write a commented kernel file to start from, gemm_NAME.cu."""
    from ..catalog import template as new

    path = new.write(name, directory)
    click.echo(f"wrote {path}\n\n{new.next_steps(name, path)}")
