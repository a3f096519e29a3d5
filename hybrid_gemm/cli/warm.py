"""`hybrid-gemm warm`: compiles kernels before they are needed."""

from __future__ import annotations

from typing import Any

import click

from ..options import Options
from . import shared
from .help import Command


@click.command(
    cls=Command,
    groups={
        "Input": ("dtypes", "layouts", "shapes"),
        "Device and kernel": ("device", "gpus", "kernel", "params", "compute"),
        "Output": ("json_file",),
    },
    examples=[
        ("Compile what float32 products need on this GPU, whatever their shape:",
         "hybrid-gemm warm"),
        ("Compile for some shapes and dtypes, A or B transposed too:",
         "hybrid-gemm warm --shapes 1024,4096 --dtype float32,float16 --layout nn,tn"),
        ("Compile what --compute fp32x3 needs:", "hybrid-gemm warm --compute fp32x3"),
    ],
)  # fmt: skip
@shared.dtypes_option(shared.DTYPES_HELP)
@shared.layouts_option
@shared.shapes_option("{} Without it, those of the table of measured times for this GPU.")
@shared.flags_of(Options, "device", "gpus", "kernel", "params", "compute")
@shared.json_option
def warm(json_file: str | None, shapes: Any, **options: Any) -> None:
    """Compile kernels into the cache before they are needed.

    A first product compiles the kernels that it needs, which takes a second or more. After this
    command, products of these shapes find theirs in the cache.
    """
    from ..bench import warm

    shared.writable(json_file)
    with shared.progress_bar() as progress:
        data = warm.warm(shapes, progress=progress, note=shared.say, **options)
    shared.write_result(data, json_file, lambda: warm.show(data))
