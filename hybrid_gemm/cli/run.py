"""`hybrid-gemm run`: one product, alone or over ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import click

from ..errors import HybridGemmError, UsageError, VerificationError
from ..option_checks import MOST_RANKS
from ..options import CHOICES, DEFAULTS, DEVICE_GROUP, FLAGS, RANK_GROUP, SPLIT_GROUP, Options
from ..ranks import ending, heartbeat, launch
from . import shared
from .asked import InputRequest, Wanted
from .help import Command, talk
from .option_types import WHOLE, File

_INPUT, _WANTED = (
    [x.name for x in dataclasses.fields(asked) if x.name != "files"]
    for asked in (InputRequest, Wanted)
)


@click.command(
    cls=Command,
    ranks=True,
    groups={
        "Input": _INPUT,
        SPLIT_GROUP: (),
        DEVICE_GROUP: ("resident",),
        RANK_GROUP: ("ranks",),
        "Output and checks": [*(x for x in _WANTED if x != "resident"), "json_file"],
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
@shared.flags_of(InputRequest)
@shared.flags_of(Options)
@shared.flags_of(Wanted)
@click.option("--ranks", type=WHOLE, help="Plan for N ranks (with --dry-run).")
@shared.json_option
@click.pass_context
def run(context: click.Context, **_given: Any) -> None:
    """Multiply two matrices: generated ones, or two .npy files.

    Started as several ranks (by mpirun or srun --mpi=pmix) it is one product over all of them.
    """
    from . import signals

    asked = _Asked(context)
    given, output = asked.given, asked.given["output"]
    if asked.ranks:
        launch.alone("hybrid-gemm run --ranks")
    if given["check"]:
        _prepare_check(asked)
    outputs = [asked.json_file, output, given["trace"]]
    if given["resume"] and output:
        from ..arrays.unfinished import names_beside

        outputs += names_beside(output)
    inputs = [x for x in (*asked.files, asked.request["c_file"]) if x is not None]
    comm = None if asked.ranks else launch.world("run", asked.chosen["rank_timeout"])
    signals.name_truncated_files(comm and comm.rank)  # once MPI runs, which has its own handlers
    launch.together(comm, lambda: shared.writable(*outputs, inputs=inputs))
    speaks = comm is None or comm.rank == 0
    note = shared.say if speaks else lambda message: None
    beat = heartbeat.known(comm)
    with ending.ends_all(comm), beat.call(heartbeat.LOCAL), shared.progress_bar(speaks) as progress:
        job = _job(comm, asked, note)
        _note_files(asked, note, alone=comm is None)
        data = job.plan_only() if given["dry_run"] else job.run(progress)
    there = output if speaks and _is_written(job) else None
    # Still as one of the ranks: what fails here ends them all.
    with ending.ends_all(comm), beat.call(heartbeat.LOCAL), _says_what_is(there):
        if speaks:
            if given["sha256"]:
                data["sha256"] = _sha256(job, data["output"])
            shared.write_result(data, asked.json_file, lambda: _show(job, data), job.write_trace)
        if job.verdict is not None and not job.verdict.passed:
            raise launch.agreed(
                VerificationError(f"the product is wrong: {job.verdict}; no file was written")
            )


class _Asked:
    """What a command line of `run` asks for: `request` of the input, `chosen` of `Options`, and
    `given` of `Wanted`. Raises `UsageError` for what goes with nothing else that is asked for."""

    def __init__(self, context: click.Context) -> None:
        self.given = given = dict(context.params)
        self.files: tuple[str, ...] = given.pop("files")
        self.json_file: str | None = given.pop("json_file")
        self.ranks: int | None = given.pop("ranks")
        self.chosen = {name: given.pop(name) for name in FLAGS}
        self.request = {name: given.pop(name) for name in _INPUT}
        self._refuse_contradictions()
        if self.files:
            why = "is for generated input; files were given"
            shared.refuse_options(context, {"seed", "fill"}, why)

    def _refuse_contradictions(self) -> None:
        ranks, given = self.ranks, self.given
        if ranks is not None and not 1 <= ranks <= MOST_RANKS:
            raise UsageError(f"--ranks {ranks}: it takes 1 to {MOST_RANKS}")
        if ranks and not given["dry_run"]:
            raise UsageError(f"--ranks is for --dry-run; to run on {ranks}: mpirun -n {ranks} ...")
        if given["check"] and given["resume"]:
            raise UsageError(
                "--check watches one whole product, and --resume multiplies panels; leave out one"
            )
        if given["sha256"] and not (self.files or given["output"]):
            raise UsageError("--sha256 is for files; give A.npy B.npy, or -o C.npy")
        if given["sha256"] and given["dry_run"]:
            raise UsageError("--sha256 is for results, and --dry-run makes none; leave out one")
        if given["show"] and self.json_file == "-":
            raise UsageError(
                "--print writes A, B and C to stdout, and so does --json - the result; name a file "
                "for --json, or leave out one"
            )


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises what `run` with these arguments would say before it looks at files and devices."""
    from .inputs import check_request

    with run.make_context("hybrid-gemm run", list(arguments)) as context:
        asked = _Asked(context)
    Options(**asked.chosen)
    check_request(InputRequest(asked.files, **asked.request))
    Wanted(**asked.given)


def _note_files(asked: _Asked, note: Any, *, alone: bool) -> None:
    """Says what files will not be, in case that was not meant."""
    c, given = asked.request["c_file"], asked.given
    warned = alone and not (given["output"] or given["dry_run"])  # by the product, as in Python
    if c is not None and not asked.request["beta"] and not warned:
        note(f"note: {c} is not read: beta is 0; --beta 1 adds it")
    if asked.files and not (given["output"] or given["show"] or given["dry_run"]):
        note("note: C is not kept; -o C.npy writes it")


def _prepare_check(asked: _Asked) -> None:
    """Makes --check the emulator's, in one watched process, and small where sides are not given."""
    from .check import SIDES, restart_checked

    launch.alone("hybrid-gemm run --check")
    if asked.ranks:
        raise UsageError("--check runs kernels, and --ranks only plans; give one of them")
    device, request = asked.chosen["device"], asked.request
    if device not in ("auto", "emulator"):
        raise UsageError(
            f"--check runs on the emulator, and --device {device} was given; leave it out"
        )
    asked.chosen["device"] = "emulator"
    if not asked.files and request["size"] is None:
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
            shared.complain(f"note: {there} is written; what failed came after that")
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


def _job(comm: Any, asked: _Asked, note: Any) -> Any:
    """The job on the site that these options mean; all ranks raise alike."""
    from .inputs import Inputs
    from .job import Job

    def parts() -> tuple[Options, Inputs, Wanted]:
        options = Options(**asked.chosen)
        if comm is not None:
            options.across_ranks()
        inputs = Inputs.of(InputRequest(asked.files, **asked.request))
        return options, inputs, Wanted(**asked.given)

    options, inputs, wanted = launch.together(comm, parts)
    if comm is not None:
        launch.agree(comm, wanted.facts())
    if comm is None and asked.ranks is None:
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
        return Job(inputs, wanted, (Checked if asked.given["check"] else Alone)(options), note)
    from .over_ranks import Elsewhere, OverRanks

    if asked.ranks is not None:
        return Job(inputs, wanted, Elsewhere(asked.ranks, options), note)
    if wanted.resume:
        from .resume_over_ranks import ResumableOverRanks

        return Job(inputs, wanted, ResumableOverRanks(comm, options, wanted.panel, note), note)
    return Job(inputs, wanted, OverRanks(comm, options), note)
