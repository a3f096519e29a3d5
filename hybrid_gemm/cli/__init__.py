"""The `hybrid-gemm` command: parse, call, print. Heavy imports wait for the subcommand."""

from __future__ import annotations

import os
import signal
import sys

import click

from ..errors import HybridGemmError
from ..ranks import launch
from .measure import bench, tune
from .run import run
from .tools import info, kernels, new_kernel, plot, reproduce, slurm, version_option


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
        if launch.first_of_job():
            error.show()
        else:
            launch.leave_last()
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
    if launch.first_of_job():
        click.echo(f"hybrid-gemm: {message}", err=True)
    elif code not in (130, 143):
        launch.leave_last()
    return code


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@version_option
def cli() -> None:
    """Matrix products split by rows or by K-columns over threads, GPUs and MPI ranks."""


for _each in run, info, kernels, tune, bench, reproduce, plot, new_kernel, slurm:
    cli.add_command(_each)
