"""The `hybrid-gemm` command: parse, call, print. Heavy imports wait for the subcommand."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
import warnings
from typing import Any, NoReturn, TextIO

import click

from ..errors import HybridGemmWarning, UsageError
from ..host.installing import unusable
from ..options import CHOICES
from ..ranks import ending, heartbeat, launch
from .compare import compare
from .completion import check_asked, completion
from .help import Group, talk
from .measure import bench
from .run import run
from .shared import complain, say, stderr_may_fail
from .slurm import slurm
from .tools import info, kernels, new_kernel, plot, reproduce, version_option
from .tune import tune
from .warm import warm


def main() -> None:
    """Entry point: exit codes are 0 right, 1 failed, 2 bad input, 3 wrong result, 4 slower,
    5 not here,
    129 hung up, 130 interrupted, 143 terminated."""
    _open_streams()
    try:
        ending.watch_signals(as_rank=launch.is_rank())  # one may arrive before this returns
        warnings.showwarning = _show_warning
        warnings.simplefilter("default", HybridGemmWarning)  # notes, whatever -W says
        check_asked()
        result = cli.main(prog_name="hybrid-gemm", standalone_mode=False)
        code = result if isinstance(result, int) else 0
        if ending.arrived is not None:  # and somebody dropped it
            raise ending.arrived
    except SystemExit as stop:
        code = ending.exit_code(stop)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except ending.Signalled as stop:  # a time limit of the batch system, say
        _end(str(stop), stop.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _end("interrupted", 130)
    except BaseException as error:
        if ending.arrived is not None:  # NumPy makes an ImportError of it while it is imported
            _end(str(ending.arrived), ending.arrived.exit_code)
        if ending.mpi_runs() and not ending.is_agreed(error):
            ending.fail(error)  # the other ranks do not know of it
        code = _fail(error)
    try:
        ending.finish_mpi(*heartbeat.at_the_end())
        heartbeat.leave()
        if code == 0 and (why := ending.tell_script()):
            _end(why, 1)
    except ending.Signalled as stop:
        _end(str(stop), stop.exit_code)
    sys.exit(code)


def _open_streams() -> None:
    """Makes a standard stream that was closed /dev/null: otherwise the next file that is opened,
    C's perhaps, gets its number, and what libraries print there. Has stdout write all of what it
    is given, or fail."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed when Python started
            # The lowest number: the stream's, unless a library that was loaded since keeps a file
            # there, as libffi does.
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    raw = getattr(sys.stdout, "buffer", None)
    if isinstance(raw, io.RawIOBase):  # PYTHONUNBUFFERED, by which half a write is a whole one
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw), sys.stdout.encoding, sys.stdout.errors, line_buffering=True
        )


def _drop_output() -> None:
    """Sends what was not yet written to /dev/null, since Python would fail to write it, too, when
    it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end(message: str, code: int) -> NoReturn:
    """Ends at once, without waiting for threads that are still in a product."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    ending.end_job(message, code)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int,
    file: TextIO | None = None, line: str | None = None,
) -> None:  # as in `warnings`  # fmt: skip
    """A warning of the package as a note, once for all ranks; others as Python shows them."""
    if not issubclass(category, HybridGemmWarning):
        (file or sys.stderr).write(
            warnings.formatwarning(message, category, filename, lineno, line)
        )
    elif launch.first_of_job():
        name, rest = str(message).split(" ", 1)
        if name in (*CHOICES, "resident"):  # the library's name of an option
            name = f"--{name.replace('_', '-')}"
        say(f"note: {name} {rest}")


# No command was given: click from 8.2 on raises this, with the help as its message.
_ASKS_FOR_HELP: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())


def _fail(error: BaseException) -> int:
    """Says what failed, once for all ranks; the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone
        _drop_output()
        return 1
    if not launch.first_of_job():
        agreed = ending.is_agreed(error)
        # Without MPI, the launcher would end rank 0 before that has spoken.
        alone = not (agreed and ending.mpi_runs()) and launch.speaks_last()
        if agreed or not alone:
            return ending.exit_code(error)
    if talk.verbose and not isinstance(error, click.ClickException):  # what was typed, and where
        with stderr_may_fail():
            traceback.print_exception(error)
    if isinstance(error, _ASKS_FOR_HELP):
        with stderr_may_fail():
            error.show()
        return error.exit_code
    if isinstance(error, click.ClickException):
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        more = f" ({path} --help says what there is)" if path else ""
        complain(f"hybrid-gemm: {error.format_message()}{more}")
        return error.exit_code
    if (what := ending.words(error)) is not None:
        if isinstance(error, UsageError):
            what = what.replace("\n", "\\n")  # of a file's name
        if isinstance(error, OSError):
            try:
                sys.stdout.flush()
            except OSError:
                _drop_output()
        complain(f"hybrid-gemm: {what}")
    elif type(error).__module__.startswith("cupy_backends."):  # CuPy's, of a GPU that fails, say
        complain(f"hybrid-gemm: a call of CUDA failed: {error} (-v shows where)")
    elif (package := unusable(error)) is not None:
        complain(f"hybrid-gemm: {package}")
        return package.exit_code
    else:
        raise error
    return ending.exit_code(error)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=[
        ("Multiply two generated matrices:", "hybrid-gemm run --size 4096"),
        ("Split a product over 4 MPI ranks:", "mpirun -n 4 hybrid-gemm run --size 8192"),
        ("Time the kernels:", "hybrid-gemm bench --shapes 1024:4096:x2"),
    ],
)
@version_option
def cli() -> None:
    """Multiply large matrices on GPUs, CPU threads and MPI ranks.

    A product is split over workers by rows of A, or by columns of A and rows of B; then the
    workers' partial sums of C are added. Each command below has a --help of its own.
    """


for _each in (
    run,
    bench,
    compare,
    tune,
    warm,
    reproduce,
    plot,
    kernels,
    new_kernel,
    slurm,
    info,
    completion,
):
    cli.add_command(_each)
