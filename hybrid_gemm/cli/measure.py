"""`hybrid-gemm bench`: what is timed, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError, VerificationError, counted
from ..options import COMPUTES
from . import shared
from .help import Command
from .option_types import KERNELS, WHOLE, File, List, Named, known, parameters

if TYPE_CHECKING:
    from ..bench.study import Progress, Shape, Study


@click.command(
    cls=Command,
    groups={
        "Input": ("shapes", "series", "dtypes", "data", "layouts", "seed"),
        "Device and kernel": ("names", "all_params", "param", "gpus", "memories"),
        "Measuring": ("accuracy", "libraries", "samples", "noise", "cold"),
        "Output": ("sort", "json_file", "csv_file", "markdown_file"),
    },
    examples=[
        ("Time two kernels with all their parameters beside cuBLAS:",
         "hybrid-gemm bench --kernels 'naive*,tuned,cublas' --all-params"),
        ("Time every kernel from 1024 to 16384, and keep the rows:",
         "hybrid-gemm bench --shapes 1024:16384:x2 --json rows.json"),
        ("Time whole products beside those of other libraries:",
         "hybrid-gemm bench --libraries --shapes 8192"),
    ],
)  # fmt: skip
@shared.device_option
@click.option(
    "--kernels",
    "names",
    type=List("naive,cublas", names=KERNELS, check=False),
    metavar="NAMES",
    help="Kernels, comma-separated; * stands for any letters. Without it, all that the device has.",
)
@click.option("--all-params", is_flag=True, help="Time every listed variant, not only the default.")
@click.option(
    "--param",
    multiple=True,
    metavar="NAME=NUMBER",
    help="A parameter, for every kernel that has it.",
)
@shared.shapes_option("{} Without it, 1024.", "--sizes")
@click.option(
    "--series",
    type=Named(known("bench.selection", "SERIES")),
    help="A series of shapes; published is K = 1024, m = n = 128 to 16384.",
)
@shared.dtypes_option(shared.DTYPES_HELP)
@click.option(
    "--compute",
    default="fp32",
    type=Named(COMPUTES),
    help="How float32 is multiplied: fp32, or by fp32x3 or tf32 on tensor cores beside cuBLAS, or "
    "auto, as `run` has it; or float64, by fp64x.",
)
@click.option(
    "--data",
    default="normal",
    type=Named(known("bench.accuracy", "KINDS"), check=False),
    help="What A and B hold, as --accuracy has it: normal, uniform, cancelling, ill-scaled, wide "
    "or huge.",
)
@click.option(
    "--accuracy",
    is_flag=True,
    help="Measure errors against float64 on data of several kinds instead of times.",
)
@shared.layouts_option
@click.option("--samples", type=WHOLE, default=30, help="The most samples of a row.")
@click.option(
    "--noise",
    type=float,
    default=0.003,
    metavar="FRACTION",
    help="Sampling of a row ends once its median is known to this fraction.",
)
@click.option("--cold", is_flag=True, help="Fill the L2 cache with other data before each product.")
@shared.seed_option
@click.option(
    "--libraries",
    "--peers",
    "libraries",
    is_flag=True,
    help="Time whole products from host arrays to host arrays instead, beside cuBLASXt, CuPy, "
    "PyTorch and NumPy.",
)
@shared.gpus_option("With --libraries: GPUs by number. Without it, all.")
@click.option(
    "--memory",
    "memories",
    type=List("pageable,pinned", names=("pageable", "pinned")),
    metavar="NAMES",
    help="With --libraries: pageable or pinned, or pageable,pinned, as on GPUs without it.",
)
@click.option(
    "--sort",
    type=Named(known("bench.study", "SORTS")),
    help="Order the rows by time, gflops, kernel or size instead of as they were measured.",
)
@shared.json_option
@click.option("--csv", "csv_file", type=File(), help="Write the rows as CSV.")
@shared.markdown_option
@click.pass_context
def bench(
    context: click.Context, json_file: str | None, csv_file: str | None,
    markdown_file: str | None, libraries: bool, accuracy: bool, sort: str | None, **options: Any,
) -> None:  # fmt: skip
    """Time kernels, with a verdict on each product.

    Each row is a kernel with its parameters at one shape, with the data on the device: "time ms" is
    the device's for a product. On a GPU "call us" is the host's for a call of hybrid_gemm.gemm,
    which does not wait for the product. With --libraries, whole products are timed from host arrays
    to host arrays, ours and others'. With --accuracy, errors of fp32, TF32, fp32x3 and cuBLAS are
    measured against float64.
    """
    from ..bench import selection
    from ..bench import study as studies
    from ..reporting.console import write

    shared.writable(json_file, csv_file, markdown_file)
    if accuracy and libraries:
        raise UsageError("--accuracy and --libraries were given; give one of them")
    if sort and (accuracy or libraries):
        raise UsageError("--sort is for kernels; --accuracy and --libraries have their own order")
    series, shapes = options.pop("series"), options.pop("shapes")
    shapes = [*(selection.SERIES[series] if series else []), *(shapes or [])]
    with shared.progress_bar() as progress:
        if accuracy:
            study = _accuracy_study(context, shapes, options)
        elif libraries:
            study = _library_study(context, shapes or [CUBE], options, progress)
        else:
            study = _kernel_study(context, shapes or [CUBE], options)
        data = studies.run(study, progress=progress, note=shared.say)
    if sort:
        data["rows"].sort(key=studies.SORTS[sort])
    if csv_file:
        write(csv_file, studies.as_csv(study, data))
    if markdown_file:
        write(markdown_file, studies.as_markdown(study, data))
    shared.write_result(data, json_file, lambda: studies.show(study, data))
    if warning := studies.outliers(data):
        shared.say(f"note: {warning}")
    if wrong := studies.failed(data):
        raise VerificationError(f"{counted(len(wrong), 'row')} with a wrong product")
    studies.need_times(data)


CUBE = (1024, 1024, 1024)  # what is measured where no shape is given
Options = dict[str, Any]  # of `bench`, by the names of its parameters


def _kernel_study(context: click.Context, shapes: list[Shape], options: Options) -> Study:
    """What `bench` measures by itself."""
    from ..bench import kernels, selection

    why = "is for --libraries; kernels run on GPU 0"
    shared.refuse_options(context, {"gpus", "memories"}, why)
    names, all_params, param = (options[x] for x in ("names", "all_params", "param"))
    chosen = {name: value for name, value in options.items() if name in KERNEL_CHOICES}
    variants = []  # without any, the tensor cores' beside cuBLAS
    narrow = set(options["dtypes"]) <= {"float16", "bfloat16"}
    if names or (options["compute"] == "fp32" and not narrow):
        variants = selection.select(names, all_params, parameters(param), options["device"])
    elif all_params or param:
        raise UsageError("parameters need kernels on tensor cores: name one by --kernels")
    return kernels.KernelStudy(variants, shapes, calls=True, **chosen)


KERNEL_CHOICES = {
    "device", "dtypes", "layouts", "samples", "noise", "cold", "seed", "compute", "data",
}  # fmt: skip


def _accuracy_study(context: click.Context, shapes: list[Shape], options: Options) -> Study:
    """What `bench --accuracy` measures."""
    from ..bench import accuracy

    others = options.keys() - {"device", "seed", "data"}
    shared.refuse_options(context, others, "is not for --accuracy")
    given = shared.given_options(context, {"data"})
    return accuracy.AccuracyStudy(
        shapes, options["device"], options["data"].split(",") if given else tuple(accuracy.KINDS),
        options["seed"],
    )  # fmt: skip


def _library_study(
    context: click.Context, shapes: list[Shape], options: Options, progress: Progress
) -> Study:
    """What `bench --libraries` measures; the host's links too, unless they are known."""
    from ..bench import libraries, tune

    mine = {"device", "gpus", "memories", "dtypes", "samples", "seed"}
    reason = "is for kernels; --libraries times whole products"
    shared.refuse_options(context, options.keys() - mine, reason)
    dtypes = options["dtypes"]
    if len(dtypes) != 1:
        raise UsageError(f"--libraries takes one --dtype; {','.join(dtypes)} was given")
    tune.know_links(device=options["device"], progress=progress, note=shared.say)
    chosen = {"device", "gpus", "memories", "seed"} | shared.given_options(context, {"samples"})
    return libraries.LibraryStudy(shapes, dtype=dtypes[0], **{x: options[x] for x in chosen})
