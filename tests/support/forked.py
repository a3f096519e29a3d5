"""Runs the command in forks of one process that has imported it, which costs a test the imports of
neither Python nor NumPy. Another such process is watched by AddressSanitizer, for `run --check`.

As a program, `python forked.py FD` is that process: over the socket FD it gets a command's folder,
arguments and changes of the environment, with files for its output, and answers with its exit code.
"""

import atexit
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_PASSING = ("PYTEST_CURRENT_TEST",)  # differs from test to test, and nothing reads it
_LATE = {"HYBRID_GEMM_KERNELS"}  # read when a command runs, and not where modules are imported
_lock = threading.Lock()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _PASSING}


@functools.cache
def _server(checked: bool) -> tuple[socket.socket, dict[str, str]]:
    """A socket to the process, and the environment that this one had when it was started."""
    from hybrid_gemm.devices.emulator import program as emulation

    from .command import environment

    watched = emulation.sanitized_environment() if checked else {}

    ours, its = socket.socketpair()
    with its:
        number = its.fileno()
        process = subprocess.Popen(
            [sys.executable, __file__, str(number)], pass_fds=[number],
            env=environment(**watched), stdin=subprocess.DEVNULL,
        )  # fmt: skip
    atexit.register(process.wait)
    atexit.register(ours.close)  # which ends it
    return ours, _environment()


def run(
    arguments: list[str], cwd: object, changes: dict[str, str], *, checked: bool = False
) -> subprocess.CompletedProcess | None:
    """Runs `hybrid-gemm` with these arguments and changes of the environment; None where that is
    another than the process was started in, which may decide what is imported, and how."""
    if not changes.keys() <= _LATE:
        return None
    with _lock:
        ours, environment = _server(checked)
        if environment != _environment():
            return None
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            asked = json.dumps([str(cwd or os.getcwd()), arguments, changes]).encode()
            socket.send_fds(ours, [len(asked).to_bytes(4, "big")], [out.fileno(), err.fileno()])
            ours.sendall(asked)
            code = json.loads(ours.recv(100))
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
    return subprocess.CompletedProcess(["hybrid-gemm", *arguments], code, *said)


def _serve(its: socket.socket) -> tuple[str, list[str], dict[str, str]] | None:
    """Forks for each command, and returns in the child what it is to do; None at the end."""
    while True:
        size, files, _flags, _from = socket.recv_fds(its, 4, 2)
        if not size:
            return None
        asked = b""
        while len(asked) < int.from_bytes(size, "big"):
            asked += its.recv(1 << 16)
        child = os.fork()
        if child == 0:
            its.close()
            for number, file in enumerate(files, 1):
                os.dup2(file, number)
                os.close(file)
            folder, arguments, changes = json.loads(asked)
            return folder, arguments, changes
        for file in files:
            os.close(file)
        status = os.waitpid(child, 0)[1]
        its.sendall(json.dumps(os.waitstatus_to_exitcode(status)).encode())


def _main() -> None:
    import numpy.random  # noqa: F401

    import hybrid_gemm.cli.alone
    import hybrid_gemm.cli.check
    import hybrid_gemm.cli.job
    import hybrid_gemm.runner  # all of these are what commands import

    gc.freeze()  # what is here is not looked at, and so not copied, in each child
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        folder, arguments, changes = asked
        os.chdir(folder)
        os.environ.update(changes)
        sys.argv = [str(Path(hybrid_gemm.__file__).with_name("__main__.py")), *arguments]
        hybrid_gemm.cli.main()


if __name__ == "__main__":
    sys.path.pop(0)  # this folder; the package and `support` are on PYTHONPATH
    _main()
