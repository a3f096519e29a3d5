"""What signals do to one process: it ends in order, with the exit code of the signal."""

import os
import signal
import subprocess
import textwrap

import pytest
from support.command import COMMAND, environment, one_line, python
from support.devices import needs


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGHUP, 129, "hung up"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGQUIT, 131, "quit"),
        (signal.SIGXCPU, 152, "out of processor time"),
        (signal.SIGUSR1, 138, "ended by signal 10"),
        (signal.SIGUSR2, 140, "ended by signal 12"),
    ],
)
def test_a_signal_ends_a_run_in_order(tmp_path, number, code, said):
    with started(tmp_path) as child:
        child.send_signal(number)
        error = child.communicate(timeout=60)[1]
    assert child.returncode == code, error
    assert error.endswith(f"hybrid-gemm: {said}\n")
    assert os.listdir(tmp_path) == []


def test_a_signal_of_which_c_code_makes_another_error_still_ends_the_run(tmp_path):
    code = """
        import os, signal, sys
        from hybrid_gemm import cli
        from hybrid_gemm.cli import job
        def run(self, progress):
            try:
                signal.raise_signal(signal.SIGTERM)
            except BaseException:
                raise ImportError("as NumPy does while it is imported")
        job.Job.run = run
        cli.main()
    """
    done = python("-c", textwrap.dedent(code), "run", "--size", 8, cwd=tmp_path, timeout=60)
    assert (done.returncode, one_line(done)) == (143, "hybrid-gemm: terminated")


@needs("emulator")  # g++
@pytest.mark.parametrize(
    "hangs", ["__attribute__((constructor)) void load()", "int cuInit(unsigned)"]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_driver_that_hangs_keeps_no_signal(number, hangs, tmp_path):
    """While it is loaded, or begun, where CuPy keeps Python's lock."""
    text = f'extern "C" {hangs} {{ (void)!write(2, "!", 1); for (;;) pause(); }}\n'
    (tmp_path / "driver.cpp").write_text(f"#include <unistd.h>\n{text}")
    build = "g++", "-shared", "-fPIC", "driver.cpp", "-o", "libcuda.so.1"
    subprocess.run(build, cwd=tmp_path, check=True)
    (tmp_path / "cupy.py").write_text("""from types import SimpleNamespace
import ctypes
count = lambda: ctypes.PyDLL("libcuda.so.1").cuInit(0)
cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count))""")
    child = subprocess.Popen(
        [*COMMAND, "run", "--size", "8"], text=True, cwd=tmp_path, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, preexec_fn=heard,
        env=environment(LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=str(tmp_path)),
    )  # fmt: skip
    assert child.stderr.read(1) == "!"
    child.send_signal(number)
    try:
        assert child.wait(timeout=20) == 128 + number
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("how", ["a callback", "code that goes on"])
def test_a_signal_that_is_dropped_still_ends_the_run(how, tmp_path):
    code = f"""
        import signal, weakref
        from hybrid_gemm import cli
        from hybrid_gemm.cli import job
        class Watched:
            pass
        def signalled(_):
            signal.raise_signal(signal.SIGTERM)
        real = job.Job.run
        def run(self, progress):
            if {how == "a callback"}:
                watched = Watched()
                kept = weakref.ref(watched, signalled)
                del watched
            else:
                try:
                    signalled(None)
                except BaseException:
                    pass
            return real(self, progress)
        job.Job.run = run
        cli.main()
    """
    args = "run", "--size", 8, "-o", "C.npy"
    done = python("-c", textwrap.dedent(code), *args, cwd=tmp_path, timeout=60)
    assert done.returncode == 143 and "Traceback" not in done.stderr
    assert done.stderr.endswith("hybrid-gemm: terminated\n")
    assert os.listdir(tmp_path) == ([] if how == "a callback" else ["C.npy"])


def test_a_second_signal_does_not_stop_what_cleans_up_after_the_first(tmp_path):
    code = """
        import signal
        from hybrid_gemm import cli
        from hybrid_gemm.cli import job
        def run(self, progress):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGINT)
                print("cleaned up")
        job.Job.run = run
        cli.main()
    """
    done = python("-c", textwrap.dedent(code), "run", "--size", 8, cwd=tmp_path, timeout=60)
    assert (done.returncode, one_line(done)) == (143, "hybrid-gemm: terminated")
    assert done.stdout == "cleaned up\n"


def test_a_signal_leaves_no_temporary_folder_in_place_of_the_cache(tmp_path):
    code = """
        import os, signal, tempfile
        from hybrid_gemm import cli
        from hybrid_gemm.cli import job
        from hybrid_gemm.host import cache
        def run(self, progress):
            (cache.directory("host") / "kept").touch()
            print(os.listdir(tempfile.gettempdir()))
            signal.raise_signal(signal.SIGTERM)
        job.Job.run = run
        cli.main()
    """
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    places = {"HYBRID_GEMM_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path / "tmp")}
    args = "run", "--size", 8, "--device", "cpu"
    done = python("-c", textwrap.dedent(code), *args, cwd=tmp_path, timeout=60, env=places)
    assert done.returncode == 143 and done.stdout.startswith("['hybrid-gemm-"), done.stderr
    assert os.listdir(tmp_path / "tmp") == []


def test_a_run_under_nohup_goes_on(tmp_path):
    ignored = lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)  # noqa: E731
    with started(tmp_path, 600, preexec_fn=ignored) as child:
        child.send_signal(signal.SIGHUP)
        error = child.communicate(timeout=120)[1]
    assert child.returncode == 0, error
    assert os.listdir(tmp_path) == ["C.npy"]


def heard():
    """A hang-up is not ignored, as it is where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def started(folder, size=9000, preexec_fn=heard):
    child = subprocess.Popen(
        [*COMMAND, "run", "--size", str(size), "-o", "C.npy", "--device", "cpu"],
        cwd=folder, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env=environment(), preexec_fn=preexec_fn,
    )  # fmt: skip
    assert "generating" in child.stderr.readline()
    return child
