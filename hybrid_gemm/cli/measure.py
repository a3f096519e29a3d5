"""`hybrid-gemm tune` and `bench`: what is timed, and how."""

from __future__ import annotations

import click

from ..errors import UsageError, VerificationError
from .shared import (
    List,
    device_option,
    json_option,
    parameters,
    progress_bar,
    say,
    shape,
    writable,
    write_result,
)


@click.command()
@device_option
@click.option(
    "--dtype",
    "dtypes",
    type=List("float32,float64"),
    default="float32,float64,int32",
    show_default=True,
)
@click.option("--layout", "layouts", type=List("nn,tt"), default="nn", show_default=True)
@click.option(
    "--shapes", type=List("1024,4096x4096x1024", shape), help="Default: some seventy shapes."
)
@click.option("--samples", default=9, show_default=True)
@click.option(
    "--quick",
    is_flag=True,
    help="Only what is known as fastest, on this GPU or one like it, beside cuBLAS.",
)
@click.option("-o", "--output", metavar="FILE", help="Where the table goes; default the cache.")
@click.option(
    "--links", is_flag=True, help="Measure the links between host and GPUs instead, and keep them."
)
@click.option("--gpus", type=List("0,1", int), help="Of --links: GPUs by number; default all.")
@json_option
@click.pass_context
def tune(context, json_file, links, gpus, **options) -> None:
    """Find the fastest kernel for each of many shapes on this GPU, and keep the table."""
    from ..bench import tune

    writable(json_file, options["output"])
    if links:
        if others := _given(context, options) - {"device"}:
            flag = next(p.opts[-1] for p in context.command.params if p.name in others)
            raise UsageError(f"{flag} is for kernels, and --links was given")
        with progress_bar() as progress:
            data = tune.host_links(device=options["device"], gpus=gpus, progress=progress, note=say)
        write_result(data, json_file, lambda: tune.print_links(data))
        return
    if gpus:
        raise UsageError("--gpus is for --links; kernels are timed on GPU 0")
    with progress_bar() as progress:
        data = tune.kernels(progress=progress, note=say, **options)
    write_result(data, json_file, lambda: tune.print_kernels(data))


@click.command()
@device_option
@click.option("--kernels", "names", type=List("naive,cublas"), help="Comma-separated; default all.")
@click.option("--all-params", is_flag=True, help="Every listed variant, not only the default.")
@click.option("--param", multiple=True, metavar="NAME=NUMBER", help="For every kernel that has it.")
@click.option(
    "--shapes",
    "--sizes",
    type=List("1024,4096x4096x1024", shape),
    help="N or MxNxK, comma-separated; default 1024.",
)
@click.option("--series", metavar="NAME", help="published: K = 1024, m = n = 128 ... 16384.")
@click.option("--dtype", "dtypes", type=List("float32,int32"), default="float32", show_default=True)
@click.option(
    "--compute",
    default="fp32",
    show_default=True,
    metavar="NAME",
    help="How float32 is multiplied: fp32, fp32x3 or tf32, these beside cuBLAS.",
)
@click.option("--data", default="normal", show_default=True, help="As --accuracy has them.")
@click.option(
    "--accuracy",
    is_flag=True,
    help="Errors against float64 on data of several kinds instead of times.",
)
@click.option(
    "--layout",
    "layouts",
    type=List("nn,tt"),
    default="nn",
    show_default=True,
    help="Orders of A and B: n as they are, t transposed.",
)
@click.option("--samples", default=30, show_default=True, help="At most so many a row ...")
@click.option(
    "--noise",
    default=0.003,
    show_default=True,
    help="... and no more once the median is known to this fraction.",
)
@click.option("--cold", is_flag=True, help="Fill the L2 cache with other data before each product.")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--peers",
    is_flag=True,
    help="Host arrays to host arrays beside cuBLASXt, CuPy, PyTorch, NumPy instead.",
)
@click.option("--gpus", type=List("0,1", int), help="Of --peers: by number; default all.")
@click.option(
    "--memory",
    "memories",
    type=List("pageable,pinned"),
    help="Of --peers: pageable, pinned; default both on GPUs.",
)
@json_option
@click.option("--csv", "csv_file", metavar="FILE", help="Write the rows as CSV.")
@click.pass_context
def bench(context, json_file, csv_file, **options) -> None:
    """Time kernels x parameters x shapes on one device, with a verdict in each row.

    With --peers, time whole products from host arrays to host arrays, ours and others'. With
    --accuracy, measure errors of fp32, TF32, fp32x3 and cuBLAS against float64.
    """
    from ..bench import kernels as benches

    writable(json_file, csv_file)
    series, shapes = options.pop("series"), options.pop("shapes")
    shapes = [*(benches.series(series) if series else []), *(shapes or [])]
    timed, columns, show = _kernels_timed, benches.COLUMNS, benches.show
    if options.pop("peers"):
        from ..bench.libraries import COLUMNS as columns
        from ..bench.libraries import show

        timed = _peers_timed
    if options.pop("accuracy"):
        from ..bench.accuracy import COLUMNS as columns
        from ..bench.accuracy import show

        timed = _accuracy
    given = _given(context, options)
    with progress_bar() as progress:
        data = timed(
            shapes, given, progress=progress, note=say, **options
        )  # fmt: skip
    if csv_file:
        from ..reporting.console import write

        write(csv_file, benches.as_csv(data, columns))
    write_result(data, json_file, lambda: show(data))
    if wrong := [row for row in data["rows"] if row["verdict"] == "FAILED"]:
        raise VerificationError(f"{len(wrong)} rows have wrong products")


def _given(context, names) -> set[str]:
    """Those of a command's options that were given."""
    default = click.core.ParameterSource.DEFAULT
    return {name for name in names if context.get_parameter_source(name) is not default}


def _kernels_timed(shapes, given, *, names, all_params, param, gpus, memories, **options) -> dict:
    from ..bench import kernels as benches

    if gpus is not None or memories:
        raise UsageError("--gpus and --memory are for --peers; kernels are timed on GPU 0")
    variants = []  # beside cuBLAS
    narrow = set(options["dtypes"]) <= {"float16", "bfloat16"}
    if names or (options["compute"] == "fp32" and not narrow):
        variants = benches.select(names, all_params, parameters(param), options["device"])
    elif all_params or param:
        raise UsageError("parameters need kernels on tensor cores: name one by --kernels")
    return benches.run(variants, shapes or [(1024,) * 3], **options)


def _accuracy(shapes, given, *, device, seed, progress, note, data, **others) -> dict:
    from ..bench import accuracy

    if others := given - {"device", "shapes", "seed", "data"}:
        raise UsageError(f"--{min(others).replace('_', '-')} is not for --accuracy")
    kinds = data.split(",") if "data" in given else tuple(accuracy.KINDS)
    return accuracy.run(
        shapes, device=device, data=kinds, seed=seed, progress=progress, note=note
    )  # fmt: skip


def _peers_timed(shapes, given, *, dtypes, samples, **options) -> dict:
    from ..bench import tune

    others = {"names": "kernels", "all_params": "all-params", "param": "param", "cold": "cold",
              "layouts": "layout", "noise": "noise", "compute": "compute",
              "data": "data"}  # fmt: skip
    for name, option in others.items():
        options.pop(name)
        if name in given:
            raise UsageError(f"--{option} is for kernels; --peers times whole products")
    if len(dtypes) != 1:
        raise UsageError(f"--peers takes one --dtype; {','.join(dtypes)} was given")
    samples = samples if "samples" in given else 5
    shapes = shapes or [(1024,) * 3]
    return tune.bench_peers(shapes, dtype=dtypes[0], samples=samples, **options)
