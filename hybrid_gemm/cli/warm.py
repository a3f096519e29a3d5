"""`hybrid-gemm warm`: compiles kernels before they are needed."""

from __future__ import annotations

from typing import Any

import click

from .help import Command
from .shared import (
    SHAPES,
    SHAPES_HELP,
    dtypes_option,
    json_option,
    layouts_option,
    option_flags,
    progress_bar,
    say,
    writable,
    write_result,
)


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
@dtypes_option
@layouts_option
@click.option(
    "--shapes",
    type=SHAPES,
    metavar="LIST",
    help=f"{SHAPES_HELP} Without it, those of the table of measured times for this GPU.",
)
@option_flags("device", "gpus", "kernel", "params", "compute")
@json_option
def warm(json_file: str | None, shapes: Any, **options: Any) -> None:
    """Compile kernels into the cache before they are needed.

    A first product compiles the kernels that it needs, which takes a second or more. After this
    command, products of these shapes find theirs in the cache.
    """
    from ..bench import warm

    writable(json_file)
    with progress_bar() as progress:
        data = warm.warm(shapes, progress=progress, note=say, **options)
    write_result(data, json_file, lambda: warm.show(data))
