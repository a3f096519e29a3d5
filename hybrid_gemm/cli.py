"""The `hybrid-gemm` command: parse, call, print. Heavy imports wait for the subcommand."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import click

from . import __version__
from .errors import HybridGemmError, UsageError, VerificationError


def main() -> None:
    """Entry point: exit codes are 0 right, 1 failed, 2 bad input, 3 wrong result, 5 not here,
    130 interrupted, 143 terminated."""
    signal.signal(signal.SIGTERM, _terminated)
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = _fail("interrupted", 130)
    except _Terminated:  # a time limit of the batch system, say: leave nothing half-written
        code = _fail("terminated", 143)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except HybridGemmError as error:
        code = _fail(str(error), error.exit_code)
    except MemoryError as error:
        code = _fail(f"out of host memory: {error}", 1)
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        code = _fail(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _terminated(_signal, _frame) -> None:
    raise _Terminated


def _fail(message: str, code: int) -> int:
    click.echo(f"hybrid-gemm: {message}", err=True)
    return code


def _note(message: str) -> None:
    click.echo(message, err=True)


class _List(click.ParamType):
    """Comma-separated values; `each` turns one into what the command wants."""

    def __init__(self, name: str, each=str):
        self.name, self.each = name, each

    def convert(self, value, param, ctx):
        if isinstance(value, list):
            return value
        try:
            return [self.each(x) for x in value.split(",") if x]
        except ValueError:
            self.fail(f"{value!r} is not a list such as {self.name}", param, ctx)


def _params(given: tuple[str, ...]) -> dict[str, int]:
    out = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not value.lstrip("-").isdigit():
            raise UsageError(f"--param {text}: it takes NAME=NUMBER, such as BM=128")
        out[name] = int(value)
    return out


def _shape(text: str) -> tuple[int, int, int]:
    sides = [int(x) for x in text.lower().split("x")]
    if len(sides) not in (1, 3) or min(sides) < 0:
        raise ValueError(text)
    return tuple(sides * 3 if len(sides) == 1 else sides)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hybrid-gemm")
def cli() -> None:
    """Matrix products split by rows or by K-columns over threads, GPUs and MPI ranks."""


_device = click.option(
    "--device",
    default="auto",
    metavar="NAME",
    help="auto, cuda, cpu or emulator.",
    show_default=True,
)
_json = click.option(
    "--json", "json_file", metavar="FILE", help="Write the result as JSON; - is stdout."
)


@cli.command()
@click.argument("files", nargs=-1, metavar="[A.npy B.npy]")
@click.option("-m", type=int, help="Rows of C (generated input).")
@click.option("-n", type=int, help="Columns of C (generated input).")
@click.option("-k", type=int, help="Columns of op(A) (generated input).")
@click.option("--size", type=int, help="m = n = k at once; default 2048.")
@click.option("-c", "c_file", metavar="FILE", help="C.npy to be scaled by beta.")
@click.option("-o", "--output", metavar="FILE", help="Write C as .npy, whole or not at all.")
@click.option("--threads", type=int, help="Worker threads; default one a device.")
@click.option(
    "--split", default="auto", show_default=True, metavar="NAME", help="rows, cols or auto."
)
@_device
@click.option("--gpus", type=_List("0,1", int), help="GPUs by number, such as 0,1; default all.")
@click.option("--emulate-devices", type=int, metavar="N", help="One GPU plays N devices.")
@click.option("--kernel", default="auto", show_default=True, metavar="NAME", help="See `kernels`.")
@click.option("--param", multiple=True, metavar="NAME=NUMBER", help="A kernel's parameter.")
@click.option(
    "--reduce",
    "reduction",
    default="ordered",
    show_default=True,
    metavar="NAME",
    help="ordered, or critical (the lab's way, for comparison).",
)
@click.option(
    "--algorithm",
    default="ordinary",
    show_default=True,
    metavar="NAME",
    help="ordinary, or strassen over that kernel.",
)
@click.option("--levels", default=1, show_default=True, help="Of Strassen's algorithm.")
@click.option(
    "--dtype", help="Of generated input: float32 (default), float64, float16, int32, int64."
)
@click.option(
    "--fill",
    default="normal",
    show_default=True,
    help="Of generated input: normal, uniform or integers.",
)
@click.option("--seed", default=0, show_default=True, help="Of generated input.")
@click.option("--alpha", type=float, default=1.0, show_default=True)
@click.option("--beta", type=float, default=0.0, show_default=True)
@click.option("--trans-a", is_flag=True, help="Multiply by A's transpose.")
@click.option("--trans-b", is_flag=True, help="Multiply by B's transpose.")
@click.option(
    "--resident", is_flag=True, help="Put A, B and C on the device before the clock starts."
)
@click.option("--repeat", default=1, show_default=True, help="Runs; the median one is shown.")
@click.option("--verify", "mode", default="auto", show_default=True, help="auto, full or off.")
@click.option("--print", "show", is_flag=True, help="Print A, B and C (small matrices).")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@_json
def run(files, output, device, mode, json_file, dry_run, **options) -> None:
    """Multiply two matrices: generated ones, or A.npy B.npy."""
    from . import command

    with _progress() as progress:
        job = command.Job(
            files, output=output, device=device, mode=mode, dry_run=dry_run,
            params=_params(options.pop("param")), note=_note, **options,
        )  # fmt: skip
        data = job.plan_only() if dry_run else job.run(progress)
    _write(data, json_file, job.print)
    if not dry_run and job.verdict is not None and not job.verdict.passed:
        raise VerificationError(f"the product is wrong: {job.verdict}; no file was written")


@contextlib.contextmanager
def _progress():
    """A bar on stderr for work that lasts; yields `start(flops) -> advance(flops)`."""
    if not sys.stderr.isatty():
        yield lambda total, what: lambda amount: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def start(total, what):
            task = bar.add_task(what, total=total)
            return lambda amount: bar.advance(task, amount)

        yield start


def _write(data: dict, json_file: str | None, show) -> None:
    """JSON where it was asked for, the table on stdout unless JSON is there."""
    if json_file != "-":
        show()
    if json_file:
        from .info import command_line, environment
        from .report import as_json

        data = {"command": command_line(), **data, "environment": environment()}
        if json_file == "-":
            click.echo(as_json(data))
        else:
            from .report import write

            write(json_file, as_json(data) + "\n")


@cli.command()
@_json
def info(json_file) -> None:
    """Versions, devices and links: what a bug report needs."""
    from .info import environment, warnings

    data = environment()

    def show(value=data, indent=0):
        for key, inner in value.items():
            if isinstance(inner, dict):
                click.echo(f"{'  ' * indent}{key}:")
                show(inner, indent + 1)
            elif isinstance(inner, list) and inner and isinstance(inner[0], dict):
                for item in inner:
                    click.echo(f"{'  ' * indent}{key.removesuffix('s')}:")
                    show(item, indent + 1)
            else:
                text = ", ".join(map(str, inner)) if isinstance(inner, list) else inner
                click.echo(f"{'  ' * indent}{key}: {text}")

    if json_file:
        _write({}, json_file, lambda: None)
    else:
        show()
    for warning in warnings(data):
        _note(f"note: {warning}")


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--compile", "arch", metavar="ARCH", help="Compile for sm_90, ...: registers, spills."
)
@click.option("--dtype", default="float32", show_default=True, help="Of --compile.")
@_json
def kernels(names, arch, dtype, json_file) -> None:
    """List the kernels with their parameters and limits."""
    from . import command

    data = command.kernels(names, arch, dtype)
    _write(data, json_file, lambda: command.print_kernels(data))


@cli.command()
@_device
@click.option(
    "--kernels", "names", type=_List("naive,cublas"), help="Comma-separated; default all."
)
@click.option("--all-params", is_flag=True, help="Every listed variant, not only the default.")
@click.option("--param", multiple=True, metavar="NAME=NUMBER", help="For every kernel that has it.")
@click.option(
    "--shapes",
    type=_List("1024,4096x4096x1024", _shape),
    help="N or MxNxK, comma-separated; default 1024.",
)
@click.option("--series", metavar="NAME", help="published: K = 1024, m = n = 128 ... 16384.")
@click.option("--dtype", default="float32", show_default=True)
@click.option("--layout", default="nn", show_default=True, help="nn, nt, tn or tt.")
@click.option("--samples", default=7, show_default=True, help="Timed samples a row.")
@click.option("--seed", default=0, show_default=True)
@_json
@click.option("--csv", "csv_file", metavar="FILE", help="Write the rows as CSV.")
def bench(
    device,
    names,
    all_params,
    param,
    shapes,
    series,
    dtype,
    layout,
    samples,
    seed,
    json_file,
    csv_file,
) -> None:
    """Time kernels x parameters x shapes on one device, with a verdict in each row."""
    from . import bench as benches

    variants = benches.select(names, all_params, _params(param), device)
    shapes = [*(benches.series(series) if series else []), *(shapes or [])]
    with _progress() as progress:
        data = benches.run(
            variants, shapes or [(1024,) * 3], device=device, dtype=dtype, layout=layout,
            samples=samples, seed=seed, progress=progress, note=_note,
        )  # fmt: skip
    if csv_file:
        from .report import write

        write(csv_file, benches.as_csv(data))
    _write(data, json_file, lambda: benches.show(data))
    if wrong := [row for row in data["rows"] if row["verdict"] == "FAILED"]:
        raise VerificationError(f"{len(wrong)} rows have wrong products")
