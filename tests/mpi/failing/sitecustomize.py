"""On the PYTHONPATH it makes rank $FAILING_RANK fail in its first product: by an error with an
exit code of its own, or, with $FAILING_HOW=kill, by a signal. With $FAILING_AFTER=N it fails in
product N + 1; with $FAILING_IN=write, in the middle of a part of C that it writes."""

import functools
import itertools
import os
import signal

rank = next((os.environ[x] for x in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if x in os.environ), "")


def fail():
    if os.environ.get("FAILING_HOW") == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise UnavailableError("this rank is broken on purpose")


def failing(work, before=lambda *_arguments: None):
    """`work`, which fails after some calls, when it has done what comes before."""
    calls, last = itertools.count(), int(os.environ.get("FAILING_AFTER", "0"))

    @functools.wraps(work)
    def call(*arguments, **options):
        if next(calls) < last:
            return work(*arguments, **options)
        before(*arguments)
        fail()

    return call


if rank and rank == os.environ.get("FAILING_RANK"):
    from hybrid_gemm.devices import cpu
    from hybrid_gemm.errors import UnavailableError

    if os.environ.get("FAILING_IN") == "write":
        write = os.pwrite
        os.pwrite = failing(write, lambda to, data, at: write(to, data[: len(data) // 2], at))
    else:
        cpu.CpuDevice.gemm = failing(cpu.CpuDevice.gemm)
