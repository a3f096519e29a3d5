"""On the PYTHONPATH it makes rank $FAILING_RANK fail in its first product: by an error with an
exit code of its own, or, with $FAILING_HOW=kill, by a signal."""

import os
import signal

rank = next((os.environ[x] for x in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK") if x in os.environ), "")

if rank and rank == os.environ.get("FAILING_RANK"):
    from hybrid_gemm.devices import cpu
    from hybrid_gemm.errors import UnavailableError

    def fail(*_arguments, **_options):
        if os.environ.get("FAILING_HOW") == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise UnavailableError("this rank is broken on purpose")

    cpu.CpuDevice.gemm = fail
