"""`hybrid-gemm tune`: finds the fastest kernels, or measures links, and keeps the figures."""

from __future__ import annotations

from typing import Any

import click

from ..errors import UsageError, VerificationError, counted
from . import shared
from .help import Command
from .option_types import KERNELS, WHOLE, File, List, Named, known


@click.command(
    cls=Command,
    groups={
        "Input": ("modes", "shapes", "dtypes", "layouts"),
        "Device and kernel": ("kernel", "gpus"),
        "Measuring": ("minutes", "samples", "quick", "links"),
        "Output": ("output", "json_file"),
    },
    examples=[
        ("Learn how long kernels take on this GPU; --kernel auto chooses by that from now on:",
         "hybrid-gemm tune"),
        ("Find the fastest kernel for the shapes of your own program:",
         "hybrid-gemm tune --shapes 4096x1024x512,3000"),
        ("Find the fastest parameters of a kernel of your own, on any device:",
         "hybrid-gemm tune --kernel mine --device emulator --shapes 128"),
    ],
)  # fmt: skip
@shared.device_option
@click.option(
    "--modes",
    type=List("float32,tf32", names=known("kernel_choice.fitted", "OPERANDS")),
    metavar="NAMES",
    default="float32,float64,int32,float16,tf32,fp32x3",
    help="Dtypes and compute modes to learn, comma-separated.",
)
@click.option(
    "--minutes", type=float, default=9, metavar="M", help="For how long drawn shapes are timed."
)
@shared.dtypes_option(
    "With --shapes or --kernel: dtypes of A, B and C, comma-separated. A kernel by itself is timed "
    "in float32, or in the first that it multiplies.",
    "float32,float64,int32",
)
@shared.layouts_option
@shared.shapes_option("Time every kernel at these shapes instead, which then get the fastest. {}")
@click.option(
    "--kernel",
    "kernel",
    type=Named(KERNELS, check=False),
    help="Time all parameters in the space of one kernel instead, on any device; see `space` in "
    "docs/kernels.md.",
)
@click.option("--samples", type=WHOLE, default=9, help="Samples of each time.")
@click.option(
    "--quick",
    is_flag=True,
    help="With --shapes: time only what is predicted as fastest, beside cuBLAS.",
)
@click.option(
    "-o",
    "--output",
    type=File(),
    help="With --shapes: where the table goes. Without it, into the cache, where --kernel auto "
    "finds it.",
)
@click.option(
    "--links", is_flag=True, help="Measure the links between host and GPUs instead, and keep them."
)
@shared.gpus_option("With --links: GPUs by number. Without it, all.")
@shared.json_option
@click.pass_context
def tune(
    context: click.Context, json_file: str | None, links: bool, gpus: list[int] | None,
    kernel: str | None, **options: Any,
) -> None:  # fmt: skip
    """Learn how long each kernel takes on this GPU.

    Shapes drawn at random are timed, and models of times are fitted to them and kept: --kernel auto
    then takes what they predict to be fastest. With --shapes, the fastest kernel for each of these
    is found and kept.
    """
    from ..bench import tune

    shared.writable(json_file, options["output"])
    device = options.pop("device")
    if links:
        if others := shared.given_options(context, {*options, "kernel"}):
            flag = next(p.opts[-1] for p in context.command.params if p.name in others)
            raise UsageError(f"{flag} is for kernels, and --links was given")
        with shared.progress_bar() as progress:
            data = tune.host_links(device=device, gpus=gpus, progress=progress, note=shared.say)
        shared.write_result(data, json_file, lambda: tune.print_links(data))
        return
    if gpus:
        raise UsageError("--gpus is for --links; kernels are timed on GPU 0")
    if kernel:
        _search(context, kernel, device, json_file, options)
        return
    tune.need_gpu(device, "tuning is for GPUs (one kernel's parameters for any device: --kernel)")
    if options["shapes"]:
        shared.refuse_options(context, {"modes", "minutes"}, "is for tune without --shapes")
        del options["modes"], options["minutes"]
        with shared.progress_bar() as progress:
            data = tune.kernels(progress=progress, note=shared.say, **options)
        shared.write_result(data, json_file, lambda: tune.print_kernels(data))
        return
    others = {"dtypes", "layouts", "samples", "quick", "output"}
    shared.refuse_options(context, others, "is for --shapes")
    _learn(options["modes"], options["minutes"], json_file)


def _learn(modes: list[str], minutes: float, json_file: str | None) -> None:
    """`tune` alone: models of times."""
    from ..bench import models, tune

    with shared.progress_bar() as progress:
        data = models.make(
            tune.open_gpus([0])[0], modes, minutes=minutes, progress=progress, note=shared.say
        )
    shared.write_result(data, json_file, lambda: models.show(data))


def _search(
    context: click.Context, kernel: str, device: str, json_file: str | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """`tune --kernel`: the space of one kernel."""
    from ..bench import search
    from ..bench.study import failed, need_times

    others = {"output", "quick", "modes", "minutes"}
    shared.refuse_options(context, others, "is for all kernels, and --kernel names one")
    for name in others:
        del options[name]
    if not shared.given_options(context, {"dtypes"}):
        options["dtypes"] = None  # the kernel's
    with shared.progress_bar() as progress:
        data = search.search(kernel, device=device, progress=progress, note=shared.say, **options)
    shared.write_result(data, json_file, lambda: search.show(data))
    if wrong := failed(data):
        raise VerificationError(f"{counted(len(wrong), 'variant')} with a wrong product")
    need_times(data)
