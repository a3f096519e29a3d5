"""`hybrid-gemm run`: one product, alone or over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ..errors import HybridGemmError, UsageError, VerificationError
from ..option_checks import MOST_RANKS
from ..options import (
    CHOICES,
    DEFAULTS,
    DEVICE_GROUP,
    FLAGS,
    PANEL_SIDE,
    RANK_GROUP,
    SPLIT_GROUP,
    Options,
)
from ..ranks import ending, heartbeat, launch
from .help import Command, talk
from .option_types import WHOLE, Factor, File, Named, known
from .shared import (
    complain,
    json_option,
    option_flags,
    progress_bar,
    refuse_options,
    say,
    seed_option,
    writable,
    write_result,
)

_INPUT = ("m", "n", "k", "size", "c_file", "dtype", "fill", "seed", "alpha", "beta", "trans_a",
          "trans_b", "conj_trans_a", "conj_trans_b")  # fmt: skip


@click.command(
    cls=Command,
    ranks=True,
    groups={
        "Input": _INPUT,
        SPLIT_GROUP: (),
        DEVICE_GROUP: ("resident",),
        RANK_GROUP: ("ranks",),
        "Output and checks": ("output", "resume", "panel", "repeat", "verify", "check", "show",
                              "dry_run", "trace", "sha256", "json_file"),
    },
    examples=[
        ("Multiply two generated matrices, on a GPU if one is here:",
         "hybrid-gemm run --size 8192"),
        ("Multiply two files by 4 threads that split K, and write the product:",
         "hybrid-gemm run A.npy B.npy -o C.npy --threads 4 --split cols"),
        ("Show the plan over 16 ranks and its memory, and multiply nothing:",
         "hybrid-gemm run --size 100000 --ranks 16 --dry-run"),
    ],
)  # fmt: skip
@click.argument("files", nargs=-1, type=File(), metavar="[A.npy B.npy]")
@click.option("-m", type=WHOLE, metavar="M", help="Rows of C, for generated input.")
@click.option("-n", type=WHOLE, help="Columns of C, for generated input.")
@click.option("-k", type=WHOLE, metavar="K", help="Columns of op(A), for generated input.")
@click.option(
    "--size",
    type=WHOLE,
    help="All of m, n and k at once. A side that is not given is 2048; with --check, m is 200, "
    "n 184 and k 168.",
)
@click.option("-c", "c_file", type=File(), help="C.npy, to be scaled by beta.")
@click.option("-o", "--output", type=File(), help="Write C as a .npy file, whole or not at all.")
@click.option(
    "--dtype",
    type=Named(known("generated dtypes")),
    help="Dtype of generated input: float32 (the default), float64, complex64, complex128, "
    "float16, bfloat16, int32 or int64.",
)
@click.option(
    "--fill",
    type=Named(known("fills")),
    default="normal",
    help="What generated input holds: normal or uniform random numbers, or small integers.",
)
@seed_option
@click.option(
    "--alpha",
    type=Factor(),
    default=1.0,
    help="The factor of op(A) @ op(B); of complex matrices also such as 1-2j.",
)
@click.option("--beta", type=Factor(), default=0.0, help="The factor of C; with 0, C is not read.")
@click.option("--trans-a", is_flag=True, help="Multiply by A's transpose.")
@click.option("--trans-b", is_flag=True, help="Multiply by B's transpose.")
@click.option("--conj-trans-a", is_flag=True, help="Multiply by A's conjugate transpose.")
@click.option("--conj-trans-b", is_flag=True, help="Multiply by B's conjugate transpose.")
@option_flags()
@click.option(
    "--resident", is_flag=True, help="Put A, B and C on the device before the clock starts."
)
@click.option(
    "--repeat",
    type=WHOLE,
    default=1,
    help="Multiply N times; the median run is shown, beside the fastest and the slowest.",
)
@click.option(
    "--verify",
    type=Named(known("checks")),
    default="auto",
    help="How C is compared with a float64 reference: auto (large products by random sums), full "
    "(every element) or off.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Run the kernels on the emulator and watch every access, barrier and order of threads.",
)
@click.option("--print", "show", is_flag=True, help="Print A, B and C, if they are small.")
@click.option("--dry-run", is_flag=True, help="Print the plan and stop.")
@click.option("--trace", type=File(), help="Write what every worker did when, for Perfetto.")
@click.option(
    "--sha256",
    is_flag=True,
    help="Put the SHA-256 of the files of A, B and C into the result, as sha256sum prints them.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Keep finished panels of C however the run ends, and go on with those of an earlier run.",
)
@click.option(
    "--panel", type=WHOLE, help=f"With --resume: rows and columns of a panel; default {PANEL_SIDE}."
)
@click.option("--ranks", type=WHOLE, help="Plan for N ranks (with --dry-run).")
@json_option
def run(
    files: tuple[str, ...], json_file: str | None, ranks: int | None, sha256: bool, check: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Multiply two matrices: generated ones, or two .npy files.

    Started as several ranks (by mpirun or srun --mpi=pmix) it is one product over all of them.
    """
    chosen = {name: given.pop(name) for name in FLAGS}
    request = {name: given.pop(name) for name in _INPUT}
    _refuse_contradictions(files, ranks, json_file, given, sha256=sha256, check=check)
    _refuse_for_files(click.get_current_context(), files)
    if ranks:
        launch.alone("hybrid-gemm run --ranks")
    if check:
        _prepare_check(files, ranks, request, chosen)
    outputs = [json_file, given["output"], given["trace"]]
    if given["resume"] and given["output"]:
        from ..arrays.unfinished import names_beside

        outputs += names_beside(given["output"])
    inputs = [x for x in (*files, request["c_file"]) if x is not None]
    comm = None if ranks else launch.world("run", chosen["rank_timeout"])
    _handle_signals(comm)
    launch.together(comm, lambda: writable(*outputs, inputs=inputs))
    speaks = comm is None or comm.rank == 0
    note = say if speaks else lambda message: None
    beat = heartbeat.known(comm)
    with ending.ends_all(comm), beat.call(heartbeat.LOCAL), progress_bar(speaks) as progress:
        job = _job(comm, ranks, files, request, chosen, given, note, check)
        _note_files(files, request, given, note, alone=comm is None)
        data = job.plan_only() if given["dry_run"] else job.run(progress)
    there = given["output"] if speaks and _is_written(job) else None
    # Still as one of the ranks: what fails here ends them all.
    with ending.ends_all(comm), beat.call(heartbeat.LOCAL), _says_what_is(there):
        if speaks:
            if sha256:
                data["sha256"] = _sha256(job, data["output"])
            write_result(data, json_file, lambda: _show(job, data), job.write_trace)
        if job.verdict is not None and not job.verdict.passed:
            raise launch.agreed(
                VerificationError(f"the product is wrong: {job.verdict}; no file was written")
            )


def _note_files(
    files: tuple[str, ...], request: dict, given: dict, note: Any, *, alone: bool
) -> None:
    """Says what files will not be, in case that was not meant."""
    c, output = request["c_file"], given["output"]
    warned = alone and not (output or given["dry_run"])  # by the product, as in Python
    if c is not None and not request["beta"] and not warned:
        note(f"note: {c} is not read: beta is 0; --beta 1 adds it")
    if files and not (output or given["show"] or given["dry_run"]):
        note("note: C is not kept; -o C.npy writes it")


def _refuse_contradictions(
    files: tuple[str, ...], ranks: int | None, json_file: str | None, given: dict, *,
    sha256: bool, check: bool,
) -> None:  # fmt: skip
    if ranks is not None and not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: it takes 1 to {MOST_RANKS}")
    if ranks and not given["dry_run"]:
        raise UsageError(f"--ranks is for --dry-run; to run on {ranks}: mpirun -n {ranks} ...")
    if check and given["resume"]:
        raise UsageError(
            "--check watches one whole product, and --resume multiplies panels; leave out one"
        )
    if sha256 and not (files or given["output"]):
        raise UsageError("--sha256 is for files; give A.npy B.npy, or -o C.npy")
    if sha256 and given["dry_run"]:
        raise UsageError("--sha256 is for results, and --dry-run makes none; leave out one")
    if given["show"] and json_file == "-":
        raise UsageError(
            "--print writes A, B and C to stdout, and so does --json - the result; name a file "
            "for --json, or leave out one"
        )


def _refuse_for_files(context: click.Context, files: tuple[str, ...]) -> None:
    if files:
        refuse_options(
            context,
            context.params,
            ("seed", "fill"),
            "is for generated input; files were given",
        )


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises what `run` with these arguments would say before it looks at files and devices."""
    from .inputs import InputRequest, check_request
    from .job import Wanted

    with run.make_context("hybrid-gemm run", list(arguments)) as context:
        given = dict(context.params)
        _refuse_for_files(context, given["files"])
    Options(**{name: given.pop(name) for name in FLAGS})
    request = {name: given.pop(name) for name in _INPUT}
    files, ranks, sha256, check = (given.pop(x) for x in ("files", "ranks", "sha256", "check"))
    check_request(InputRequest.of(files, **request))
    json_file = given.pop("json_file")
    _refuse_contradictions(files, ranks, json_file, given, sha256=sha256, check=check)
    Wanted(**given)


def _handle_signals(comm: Any) -> None:
    """Once MPI has started, which has handlers of its own."""
    from . import signals

    signals.name_truncated_files(comm and comm.rank)


def _prepare_check(files: tuple[str, ...], ranks: int | None, request: dict, chosen: dict) -> None:
    """Makes --check the emulator's, in one watched process, and small where sides are not given."""
    from .check import SIDES, restart_checked

    launch.alone("hybrid-gemm run --check")
    if ranks:
        raise UsageError("--check runs kernels, and --ranks only plans; give one of them")
    if chosen["device"] not in ("auto", "emulator"):
        raise UsageError(
            f"--check runs on the emulator, and --device {chosen['device']} was given; leave it out"
        )
    chosen["device"] = "emulator"
    if not files and request["size"] is None:
        request |= {x: side for x, side in SIDES.items() if request[x] is None}
    restart_checked()


def _is_written(job: Any) -> bool:
    """Whether C is in its file."""
    right = job.verdict is None or job.verdict.passed
    return bool(job.wanted.output) and right and not job.wanted.dry_run


@contextlib.contextmanager
def _says_what_is(there: str | None) -> Iterator[None]:
    """Before the error of what comes after C, says that C is there."""
    try:
        yield
    except (OSError, HybridGemmError) as error:
        if there and not isinstance(error, BrokenPipeError):  # of which nothing is said
            complain(f"note: {there} is written; what failed came after that")
        raise


def _sha256(job: Any, output: str | None) -> dict[str, str | None]:
    """The SHA-256 of the files that were read and written; None for what is no file."""
    from ..arrays.npy_files import sha256

    return {**job.inputs.sha256(), "C": sha256(output) if output and _is_written(job) else None}


def _show(job: Any, data: dict) -> None:
    if talk.verbose and job.wanted.dry_run is False:
        job.site.print_plan()
    job.print()
    for name, digest in data.get("sha256", {}).items():
        if digest:
            click.echo(f"SHA-256 of {name}: {digest}")


def _job(
    comm: Any, ranks: int | None, files: tuple[str, ...], request: dict, chosen: dict,
    given: dict, note: Any, check: bool,
) -> Any:  # the job's parts  # fmt: skip
    """The job on the site that these options mean; all ranks raise alike."""
    from .inputs import InputRequest, Inputs
    from .job import Job, Wanted

    def asked() -> tuple[Options, Inputs, Wanted]:
        options = Options(**chosen)
        if comm is not None:
            options.across_ranks()
        return options, Inputs.of(InputRequest.of(files, **request)), Wanted(**given)

    options, inputs, wanted = launch.together(comm, asked)
    if comm is not None:
        launch.agree(comm, wanted.facts())
    if comm is None and ranks is None:
        from .alone import Alone
        from .check import Checked

        for name, choice in CHOICES.items():
            if choice.across_ranks and getattr(options, name) != DEFAULTS[name]:
                option = f"--{name.replace('_', '-')}"
                if not launch.is_started():
                    raise UsageError(f"{option} is for ranks; {launch.HOW}")
                note(f"{option} has no effect: there is one rank")
                options = dataclasses.replace(options, **{name: DEFAULTS[name]})
        if wanted.resume:
            from .resume import Resumable

            return Job(inputs, wanted, Resumable(options, wanted.panel, note), note)
        return Job(inputs, wanted, (Checked if check else Alone)(options), note)
    from .over_ranks import Elsewhere, OverRanks

    if ranks is not None:
        return Job(inputs, wanted, Elsewhere(ranks, options), note)
    if wanted.resume:
        from .resume_over_ranks import ResumableOverRanks

        return Job(inputs, wanted, ResumableOverRanks(comm, options, wanted.panel, note), note)
    return Job(inputs, wanted, OverRanks(comm, options), note)
