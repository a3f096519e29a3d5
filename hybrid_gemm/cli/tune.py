"""`hybrid-gemm tune`: finds the fastest kernels, or measures links, and keeps the figures."""

from __future__ import annotations

from typing import Any

import click

from ..errors import UsageError, VerificationError
from .help import Command
from .option_types import File, List, Named, kernel_dtypes, kernel_names
from .shared import (
    SHAPES,
    SHAPES_HELP,
    device_option,
    given_options,
    json_option,
    layouts_option,
    progress_bar,
    refuse_options,
    say,
    writable,
    write_result,
)


@click.command(
    cls=Command,
    groups={
        "Input": ("dtypes", "layouts", "shapes"),
        "Device and kernel": ("kernel", "gpus"),
        "Measuring": ("samples", "quick", "links"),
        "Output": ("output", "json_file"),
    },
    examples=[
        ("Measure every shape, and let --kernel auto take the fastest from now on:",
         "hybrid-gemm tune"),
        ("Measure the links between the host and its GPUs:", "hybrid-gemm tune --links"),
        ("Find the fastest parameters of a kernel of your own, on any device:",
         "hybrid-gemm tune --kernel mine --device emulator --shapes 128"),
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
    "--kernel",
    "kernel",
    type=Named(kernel_names, check=False),
    metavar="NAME",
    help="Time all parameters in the space of one kernel instead, on any device; see `space` in "
    "docs/kernels.md.",
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
    kernel: str | None, **options: Any,
) -> None:  # fmt: skip
    """Find the fastest kernel for each of many shapes.

    The table of times is kept, and --kernel auto takes its kernels from it on this GPU.
    """
    from ..bench import tune

    writable(json_file, options["output"])
    device = options.pop("device")
    if links:
        if others := given_options(context, {*options, "kernel"}):
            flag = next(p.opts[-1] for p in context.command.params if p.name in others)
            raise UsageError(f"{flag} is for kernels, and --links was given")
        with progress_bar() as progress:
            data = tune.host_links(device=device, gpus=gpus, progress=progress, note=say)
        write_result(data, json_file, lambda: tune.print_links(data))
        return
    if gpus:
        raise UsageError("--gpus is for --links; kernels are timed on GPU 0")
    if kernel:
        _search(context, kernel, device, json_file, options)
        return
    tune.need_gpu(device, "tuning is for GPUs (one kernel's parameters for any device: --kernel)")
    with progress_bar() as progress:
        data = tune.kernels(progress=progress, note=say, **options)
    write_result(data, json_file, lambda: tune.print_kernels(data))


def _search(
    context: click.Context, kernel: str, device: str, json_file: str | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """`tune --kernel`: the space of one kernel."""
    from ..bench import search
    from ..bench.study import failed

    refuse_options(context, options, {"output", "quick"}, "is for the table of all kernels")
    del options["output"], options["quick"]
    if "dtypes" not in given_options(context, options):
        options["dtypes"] = ["float32"]
    with progress_bar() as progress:
        data = search.search(kernel, device=device, progress=progress, note=say, **options)
    write_result(data, json_file, lambda: search.show(data))
    if wrong := failed(data):
        raise VerificationError(f"{len(wrong)} variants give wrong products")
