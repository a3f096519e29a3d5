"""`hybrid-gemm tune`: finds the fastest kernels, or measures links, and keeps the figures."""

from __future__ import annotations

from typing import Any

import click

from ..errors import UsageError
from .help import Command
from .option_types import File, List, kernel_dtypes
from .shared import (
    SHAPES,
    SHAPES_HELP,
    device_option,
    given_options,
    json_option,
    layouts_option,
    progress_bar,
    say,
    writable,
    write_result,
)


@click.command(
    cls=Command,
    groups={
        "Input": ("dtypes", "layouts", "shapes"),
        "Device and kernel": ("gpus",),
        "Measuring": ("samples", "quick", "links"),
        "Output": ("output", "json_file"),
    },
    examples=[
        ("Measure every shape, and let --kernel auto take the fastest from now on:",
         "hybrid-gemm tune"),
        ("Measure only what is known to lead, at three shapes:",
         "hybrid-gemm tune --quick --shapes 1024:4096:x2"),
        ("Measure the links between the host and its GPUs:", "hybrid-gemm tune --links"),
    ],
)  # fmt: skip
@device_option
@click.option(
    "--dtype",
    "dtypes",
    type=List("float32,float64", names=kernel_dtypes),
    metavar="NAMES",
    default="float32,float64,int32",
    show_default=True,
    help="Dtypes of A, B and C, comma-separated.",
)
@layouts_option
@click.option(
    "--shapes",
    type=SHAPES,
    metavar="LIST",
    help=f"{SHAPES_HELP} Without it, some seventy shapes.",
)
@click.option(
    "--samples", type=int, default=9, show_default=True, metavar="N", help="Samples of each time."
)
@click.option(
    "--quick",
    is_flag=True,
    help="Time only what is known as fastest, on this GPU or one like it, beside cuBLAS.",
)
@click.option(
    "-o",
    "--output",
    type=File(),
    metavar="FILE",
    help="Where the table goes. Without it, into the cache, where --kernel auto finds it.",
)
@click.option(
    "--links", is_flag=True, help="Measure the links between host and GPUs instead, and keep them."
)
@click.option(
    "--gpus",
    type=List("0,1", int),
    metavar="0,1",
    help="With --links: GPUs by number. Without it, all.",
)
@json_option
@click.pass_context
def tune(
    context: click.Context, json_file: str | None, links: bool, gpus: list[int] | None,
    **options: Any,
) -> None:  # fmt: skip
    """Find the fastest kernel for each of many shapes.

    The table of times is kept, and --kernel auto takes its kernels from it on this GPU.
    """
    from ..bench import tune

    writable(json_file, options["output"])
    device = options.pop("device")
    if links:
        if others := given_options(context, options):
            flag = next(p.opts[-1] for p in context.command.params if p.name in others)
            raise UsageError(f"{flag} is for kernels, and --links was given")
        with progress_bar() as progress:
            data = tune.host_links(device=device, gpus=gpus, progress=progress, note=say)
        write_result(data, json_file, lambda: tune.print_links(data))
        return
    if gpus:
        raise UsageError("--gpus is for --links; kernels are timed on GPU 0")
    tune.need_gpu(device, "tuning is for GPUs")
    with progress_bar() as progress:
        data = tune.kernels(progress=progress, note=say, **options)
    write_result(data, json_file, lambda: tune.print_kernels(data))
