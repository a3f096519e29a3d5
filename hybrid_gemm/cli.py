"""The `hybrid-gemm` command: parse, call, print. Heavy imports wait for the subcommand."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import click

from . import __version__
from .errors import HybridGemmError, UsageError, VerificationError
from .runtime import launchers


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
        if launchers.first_of_job():
            error.show()
        else:
            launchers.leave_last()
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
    if launchers.first_of_job():
        click.echo(f"hybrid-gemm: {message}", err=True)
    elif code not in (130, 143):
        launchers.leave_last()
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


class _Bytes(click.ParamType):
    """A number of bytes, with a unit or without."""

    name = "size"

    def convert(self, value, param, ctx):
        if isinstance(value, int):
            return value
        number = value.rstrip("BiKMGT")
        unit = value[len(number) :].removesuffix("B")
        base = 1024 if unit.endswith("i") else 1000
        try:
            return int(float(number) * base ** ["", "K", "M", "G", "T"].index(unit[:1]))
        except ValueError:
            self.fail(f"{value!r} is not a size such as 8GiB or 500MB", param, ctx)


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
    "--compute",
    default="fp32",
    show_default=True,
    metavar="NAME",
    help="How float32 is multiplied: fp32, fp32x3, tf32 or auto.",
)
@click.option(
    "--dtype", help="Of generated input: float32, float64, float16, bfloat16, int32, int64."
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
@click.option(
    "--trace", "trace_file", metavar="FILE", help="Write what every worker did when (Perfetto)."
)
@click.option(
    "--grid", type=_List("2,2,1", int), metavar="PM,PN,PK", help="How workers cut m, n, K."
)
@click.option(
    "--max-device-memory", type=_Bytes(), metavar="SIZE", help="Of each device, such as 8GiB."
)
@click.option("--transport", metavar="NAME", help="Between ranks: auto, ipc, nccl or mpi.")
@click.option("--rounds", type=int, metavar="N", help="Pieces in which ranks sum a strip of C.")
@click.option("--ranks", type=int, metavar="N", help="Plan for N ranks (with --dry-run).")
@_json
def run(files, json_file, dry_run, grid, transport, rounds, ranks, **options) -> None:
    """Multiply two matrices: generated ones, or A.npy B.npy.

    Started as several ranks (by mpirun or srun --mpi=pmix) it is one product over all of them.
    """
    options |= {"params": _params(options.pop("param")), "dry_run": dry_run}
    across = {"grid": grid, "transport": transport, "rounds": rounds, "ranks": ranks}
    across = {name: value for name, value in across.items() if value is not None}
    if ranks is not None and ranks < 1:
        raise UsageError(f"--ranks {ranks}: it takes at least 1")
    if ranks and not dry_run:
        raise UsageError(f"--ranks is for --dry-run; to run on {ranks}: mpirun -n {ranks} ...")
    comm = None if ranks else launchers.world()
    if comm is None and not ranks:
        _run_alone(files, json_file, across, options)
        return

    from .rank_job import RankJob

    speaks = comm is None or comm.rank == 0
    note = _note if speaks else lambda message: None
    with launchers.ending(comm), _progress(speaks) as progress:
        job = launchers.together(
            comm, lambda: RankJob(comm, files, note=note, **across, **options)
        )  # fmt: skip
        job.open()
        data = job.plan_only() if dry_run else job.run(progress)
        if speaks:
            _write(data, json_file, job.print)
            job.write_trace()
        if not dry_run:
            _judge(job.verdict)


def _run_alone(files, json_file, across: dict, options: dict) -> None:
    from . import command

    options["grid"] = across.pop("grid", None)
    if across:
        raise UsageError(f"--{next(iter(across))} is for ranks; {launchers.HOW}")
    with _progress() as progress:
        job = command.Job(files, note=_note, **options)
        data = job.plan_only() if options["dry_run"] else job.run(progress)
    _write(data, json_file, job.print)
    job.write_trace()
    if not options["dry_run"]:
        _judge(job.verdict)


def _judge(verdict) -> None:
    if verdict is not None and not verdict.passed:
        raise launchers.agreed(
            VerificationError(f"the product is wrong: {verdict}; no file was written")
        )


@contextlib.contextmanager
def _progress(shown: bool = True):
    """A bar on stderr for work that lasts; yields `start(flops) -> advance(flops)`."""
    if not (shown and sys.stderr.isatty()):
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
    from .info import environment, ranks, warnings

    placed = ranks()
    if not launchers.first_of_job():
        return
    started = {"launcher": launchers.launcher(), "ranks": placed} if placed else {}
    data = environment() | started

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
        _write(started, json_file, lambda: None)
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
    "--dtype",
    "dtypes",
    type=_List("float32,float64"),
    default="float32,float64,int32",
    show_default=True,
)
@click.option("--layout", "layouts", type=_List("nn,tt"), default="nn", show_default=True)
@click.option("--shapes", type=_List("1024,4096x4096x1024", _shape), help="Default: forty shapes.")
@click.option("--samples", default=9, show_default=True)
@click.option("-o", "--output", metavar="FILE", help="Where the table goes; default the cache.")
@click.option(
    "--links", is_flag=True, help="Measure the links between host and GPUs instead, and keep them."
)
@click.option("--gpus", type=_List("0,1", int), help="Of --links: GPUs by number; default all.")
@_json
def tune(json_file, links, gpus, **options) -> None:
    """Find the fastest kernel for each of many shapes on this GPU, and keep the table."""
    from . import command

    if links:
        with _progress() as progress:
            data = command.tune_links(
                device=options["device"], gpus=gpus, progress=progress, note=_note
            )
        _write(data, json_file, lambda: command.print_links(data))
        return
    if gpus:
        raise UsageError("--gpus is for --links; kernels are timed on GPU 0")
    with _progress() as progress:
        data = command.tune(progress=progress, note=_note, **options)
    _write(data, json_file, lambda: command.print_tuned(data))


@cli.command()
@_device
@click.option(
    "--kernels", "names", type=_List("naive,cublas"), help="Comma-separated; default all."
)
@click.option("--all-params", is_flag=True, help="Every listed variant, not only the default.")
@click.option("--param", multiple=True, metavar="NAME=NUMBER", help="For every kernel that has it.")
@click.option(
    "--shapes",
    "--sizes",
    type=_List("1024,4096x4096x1024", _shape),
    help="N or MxNxK, comma-separated; default 1024.",
)
@click.option("--series", metavar="NAME", help="published: K = 1024, m = n = 128 ... 16384.")
@click.option(
    "--dtype", "dtypes", type=_List("float32,int32"), default="float32", show_default=True
)
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
    type=_List("nn,tt"),
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
@click.option("--gpus", type=_List("0,1", int), help="Of --peers: by number; default all.")
@click.option(
    "--memory",
    "memories",
    type=_List("pageable,pinned"),
    help="Of --peers: pageable, pinned; default both on GPUs.",
)
@_json
@click.option("--csv", "csv_file", metavar="FILE", help="Write the rows as CSV.")
@click.pass_context
def bench(context, json_file, csv_file, **options) -> None:
    """Time kernels x parameters x shapes on one device, with a verdict in each row.

    With --peers, time whole products from host arrays to host arrays, ours and others'. With
    --accuracy, measure errors of fp32, TF32, fp32x3 and cuBLAS against float64.
    """
    from . import bench as benches

    series, shapes = options.pop("series"), options.pop("shapes")
    shapes = [*(benches.series(series) if series else []), *(shapes or [])]
    timed, columns, show = _kernels_timed, benches.COLUMNS, benches.show
    if options.pop("peers"):
        from .peers import COLUMNS as columns
        from .peers import show

        timed = _peers_timed
    if options.pop("accuracy"):
        from .accuracy import COLUMNS as columns
        from .accuracy import show

        timed = _accuracy
    given = {
        name
        for name in options
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    with _progress() as progress:
        data = timed(
            shapes, given, progress=progress, note=_note, **options
        )  # fmt: skip
    if csv_file:
        from .report import write

        write(csv_file, benches.as_csv(data, columns))
    _write(data, json_file, lambda: show(data))
    if wrong := [row for row in data["rows"] if row["verdict"] == "FAILED"]:
        raise VerificationError(f"{len(wrong)} rows have wrong products")


def _kernels_timed(shapes, given, *, names, all_params, param, gpus, memories, **options) -> dict:
    from . import bench as benches

    if gpus is not None or memories:
        raise UsageError("--gpus and --memory are for --peers; kernels are timed on GPU 0")
    variants = []  # beside cuBLAS
    narrow = set(options["dtypes"]) <= {"float16", "bfloat16"}
    if names or (options["compute"] == "fp32" and not narrow):
        variants = benches.select(names, all_params, _params(param), options["device"])
    elif all_params or param:
        raise UsageError("parameters need kernels on tensor cores: name one by --kernels")
    return benches.run(variants, shapes or [(1024,) * 3], **options)


def _accuracy(shapes, given, *, device, seed, progress, note, data, **others) -> dict:
    from . import accuracy

    if others := given - {"device", "shapes", "seed", "data"}:
        raise UsageError(f"--{min(others).replace('_', '-')} is not for --accuracy")
    kinds = data.split(",") if "data" in given else tuple(accuracy.KINDS)
    return accuracy.run(
        shapes, device=device, data=kinds, seed=seed, progress=progress, note=note
    )  # fmt: skip


def _peers_timed(shapes, given, *, dtypes, samples, **options) -> dict:
    from . import command

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
    return command.bench_peers(shapes, dtype=dtypes[0], samples=samples, **options)


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "listed", is_flag=True, help="List the experiments and stop.")
@click.option(
    "--scale",
    default="small",
    show_default=True,
    metavar="NAME",
    help="small (seconds), or full: the published sizes, 10 minutes on one GPU.",
)
@_device
@click.option("--gpus", type=_List("0,1", int), help="GPUs by number, such as 0,1; default all.")
@click.option("--samples", type=int, help="Timed samples a row; default 1 (small) or 3 (full).")
@click.option("--seed", default=0, show_default=True)
@click.option("-o", "--output", metavar="DIR", help="Write JSON, CSV, Markdown and plots there.")
@_json
def reproduce(names, listed, scale, device, gpus, samples, seed, output, json_file) -> None:
    """Run published experiments: theirs, ours, ratio, and a verdict on each claim.

    NAME is an experiment of --list, or all.
    """
    from .experiments import engine
    from .experiments import output as out

    if listed:
        for experiment in engine.experiments().values():
            click.echo(f"{experiment.name:<16}{experiment.title}: {experiment.question}")
        return
    if not names:
        raise UsageError("name experiments, or all; --list shows them")
    chosen = engine.choose_experiments(names)
    if output:
        out.check_directory(output)
    with _progress() as progress:
        data = engine.run(
            chosen, device=device, scale=scale, gpus=gpus, seed=seed, samples=samples,
            progress=progress, note=_note,
        )  # fmt: skip
    _write(data, json_file, lambda: out.show(data))
    if output:
        from .info import command_line, environment

        out.write(output, {"command": command_line(), **data, "environment": environment()})
        _note(f"wrote {output}")
    rows = [row for result in data["experiments"] for row in result["rows"]]
    if wrong := [row for row in rows if row.get("verdict") == "FAILED"]:
        raise VerificationError(f"{len(wrong)} rows have wrong results")


@cli.command()
@click.argument("file", metavar="FILE")
@click.argument("name", required=False)
@click.option("-o", "--output", metavar="FILE", required=True, help="NAME.svg or NAME.png.")
def plot(file, name, output) -> None:
    """Draw a result of `bench --json`, `run --trace` or `reproduce -o`.

    NAME is an experiment, where a file has several.
    """
    from . import plots
    from .experiments.output import load
    from .matrices import check_output

    target = check_output(output, [file])
    found = plots.pictures(load(file))
    if name is None and len(found) == 1:
        (name,) = found
    if name not in found:
        raise UsageError(f"say which picture: {', '.join(found)}")
    image = plots.draw(found[name], output.rpartition(".")[2].lower())
    from pathlib import Path

    from .cache import atomic_write

    atomic_write(Path(target), image)
    _note(f"wrote {output}")


@cli.command("new-kernel")
@click.argument("name")
@click.option(
    "--directory",
    metavar="DIR",
    help="Default: the kernels folder of a checkout, or $HYBRID_GEMM_KERNELS.",
)
def new_kernel(name, directory) -> None:
    """Write a commented kernel file to start from: gemm_NAME.cu."""
    from . import new_kernel as new

    path = new.write(name, directory)
    click.echo(f"wrote {path}\n\n{new.next_steps(name, path)}")


@cli.command()
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
def slurm(**options) -> None:
    """Print an sbatch script: hybrid-gemm slurm --gpus-per-node 8 -- --split cols > job.sbatch."""
    from .slurm import Options, script

    click.echo(script(Options(**options)), nl=False)
