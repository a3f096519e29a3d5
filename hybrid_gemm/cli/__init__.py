"""The `hybrid-gemm` command: parse, call, print. Heavy imports wait for the subcommand."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

import click

from ..errors import HybridGemmError
from ..ranks import ending, heartbeat, launch
from .measure import bench, tune
from .run import run
from .tools import info, kernels, new_kernel, plot, reproduce, slurm, version_option


def main() -> None:
    """Entry point: exit codes are 0 right, 1 failed, 2 bad input, 3 wrong result, 5 not here,
    129 hung up, 130 interrupted, 143 terminated."""
    ranked = launch.launcher() is not None
    ending.watch_signals(as_rank=ranked)
    try:
        result = cli.main(standalone_mode=False)
        code = result if isinstance(result, int) else 0
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
    ending.finish_mpi()
    heartbeat.leave()
    sys.exit(code)


def _end(message: str, code: int) -> NoReturn:
    """Ends at once, without waiting for threads that are still in a product."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    ending.end_job(message, code)


def _fail(error: BaseException) -> int:
    """Says what failed, once for all ranks; the exit code."""
    if isinstance(error, BrokenPipeError):  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if not launch.first_of_job() and (ending.is_agreed(error) or not launch.speaks_last()):
        return ending.exit_code(error)
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, MemoryError) and not isinstance(error, HybridGemmError):
        click.echo(f"hybrid-gemm: out of host memory: {error}", err=True)
    elif isinstance(error, HybridGemmError | OSError):
        click.echo(f"hybrid-gemm: {error}", err=True)
    else:
        raise error
    return ending.exit_code(error)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@version_option
def cli() -> None:
    """Matrix products split by rows or by K-columns over threads, GPUs and MPI ranks."""


for _each in run, info, kernels, tune, bench, reproduce, plot, new_kernel, slurm:
    cli.add_command(_each)
