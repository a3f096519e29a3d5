"""g++ as it is called: what it sees, how it is stopped, and what is said where it fails."""

import contextlib
import errno
import itertools
import os
import signal
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command import python
from support.devices import needs

from hybrid_gemm.errors import KernelError
from hybrid_gemm.host import compiler


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the cache will be; not there yet."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gxx(tmp_path, folder, monkeypatch):
    """Makes a text the first g++ on the path, and returns how a C++ file is then compiled."""

    def written(text):
        program = tmp_path / "bin" / "g++"
        program.parent.mkdir()
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        (tmp_path / "x.cpp").write_text("int x;\n")
        return lambda: compiler.build_library(tmp_path / "x.cpp")

    return written


@pytest.fixture
def over_once(monkeypatch):
    """Lets the time of a tool be over once it has written something to a file."""

    def of(path):
        ticks = itertools.count(step=2 * compiler.LIMIT_S)

        def clock():
            return next(ticks) if path.exists() and path.stat().st_size else 0

        monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))

    return of


def until_gone(child):
    """Waits until a compiler's child is gone, or nobody's."""
    status = Path(f"/proc/{child}/stat")
    for _ in range(400):
        with contextlib.suppress(OSError):
            if ") Z" not in status.read_text():
                time.sleep(0.05)
                continue
        return
    os.kill(child, signal.SIGKILL)
    pytest.fail("the compiler's child lives on")


def test_a_compiler_that_does_not_end_is_stopped(tmp_path, gxx, over_once):
    """Its children too."""
    compiled = gxx(f"#!/bin/sh\nsleep 600 &\necho $! >{tmp_path}/child\nwait\n")
    over_once(tmp_path / "child")
    with pytest.raises(KernelError, match=r"x\.cpp.*g\+\+ did not end within 300 s"):
        compiled()
    until_gone(int((tmp_path / "child").read_text()))


def test_control_c_ends_the_program_and_not_the_compiler_alone(gxx):
    compiled = gxx("#!/bin/sh\nkill -INT $PPID\nsleep 600\n")
    with pytest.raises(KeyboardInterrupt):
        compiled()


def test_control_c_as_a_compiler_starts_ends_it(tmp_path, gxx, monkeypatch):
    """It ran on: its number was not known yet."""
    compiled, start = gxx("#!/bin/sh\nexec sleep 600\n"), os.posix_spawnp
    started = []

    def interrupted(*given, **options):
        started.append(start(*given, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "posix_spawnp", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compiled()
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)


def test_a_compiler_that_is_stopped_leaves_no_file(tmp_path, gxx, monkeypatch, over_once):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    compiled = gxx(f'#!/bin/sh\ntouch "$TMPDIR/cc.s"\necho >{tmp_path}/began\nsleep 600\n')
    over_once(tmp_path / "began")
    with pytest.raises(KernelError, match="did not end within 300 s"):
        compiled()
    assert os.listdir(tmp_path / "tmp") == []


def test_a_rank_that_is_stopped_while_it_compiles_leaves_no_file(tmp_path, gxx):
    """Its signals have a thread, which ends it at once."""
    code = """
        from pathlib import Path
        from hybrid_gemm.host import compiler
        from hybrid_gemm.ranks import ending
        ending.watch_signals(as_rank=True)
        compiler.build_library(Path("x.cpp"))
    """
    gxx('#!/bin/sh\ncase "$*" in *text.cpp*) ls "$TMPDIR" >began; kill $PPID; sleep 2;; esac\n')
    (tmp_path / "tmp").mkdir()
    places = {"TMPDIR": str(tmp_path / "tmp"), "PATH": os.environ["PATH"]}
    done = python("-c", textwrap.dedent(code), cwd=tmp_path, env=places, timeout=60)
    assert done.returncode == 143, done.stderr
    assert (tmp_path / "began").read_text() == "text.cpp\n"
    assert os.listdir(tmp_path / "tmp") == []


@pytest.mark.parametrize("as_rank", [False, True], ids=["alone", "rank"])
def test_a_signal_ends_compilers_that_threads_wait_for(tmp_path, gxx, as_rank):
    """And none is started after that."""
    code = f"""
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from hybrid_gemm.host import compiler
        from hybrid_gemm.ranks import ending
        ending.watch_signals(as_rank={as_rank})
        with ThreadPoolExecutor(2) as pool:
            begun = [pool.submit(compiler.build_library, Path(f"{{x}}.cpp")) for x in "xyz"]
            for future in begun:
                future.result()
    """
    for name in "yz":
        (tmp_path / f"{name}.cpp").write_text(f"int {name};\n")
    gxx(
        "#!/bin/sh\nsleep 600 &\necho $! >>children\n"
        "[ $(wc -l <children) = 2 ] && kill $PPID\nwait\n"
    )
    done = python("-c", textwrap.dedent(code), cwd=tmp_path, env={"PATH": os.environ["PATH"]})
    assert done.returncode == (143 if as_rank else 1) and "terminated" in done.stderr
    children = (tmp_path / "children").read_text().split()
    assert len(children) == 2
    for child in children:
        until_gone(int(child))


def test_a_compiler_that_starts_as_the_process_ends_is_stopped(tmp_path, gxx, monkeypatch):
    """The signal came between the question whether it may start and its start."""
    spawn = os.posix_spawnp

    def spawn_late(*args, **keywords):
        compiler.stop_tools()
        begun.append(spawn(*args, **keywords))
        return begun[0]

    begun = []
    monkeypatch.setattr(compiler, "_ending", False)
    monkeypatch.setattr(compiler.os, "posix_spawnp", spawn_late)
    monkeypatch.setattr(compiler, "LIMIT_S", 5)
    with pytest.raises(KernelError, match=r"g\+\+ was stopped: this process ends"):
        gxx("#!/bin/sh\nexec sleep 600\n")()
    assert not Path(f"/proc/{begun[0]}").exists()


def test_a_number_that_was_given_again_is_not_killed():
    """Of a compiler that ended, whose number another process has."""
    with subprocess.Popen(["sleep", "60"]) as other:
        compiler._kill(other.pid, parent=other.pid)
        time.sleep(0.2)
        assert other.poll() is None
        compiler._kill(other.pid, parent=os.getpid())
        assert other.wait(timeout=60) == -signal.SIGKILL


def test_a_tool_sees_the_signals_that_a_rank_has_blocked():
    """Or neither Ctrl-C nor the launcher would end a compiler that a rank has started."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    try:
        done = compiler.run_tool(["grep", "SigBlk", "/proc/self/status"])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert int(done.stdout.split()[1], 16) == 0


@pytest.fixture
def no_zombies():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@needs("emulator")
def test_a_library_is_compiled_where_children_are_not_waited_for(tmp_path, folder, no_zombies):
    (tmp_path / "x.cpp").write_text("int x;\n")
    assert compiler.build_library(tmp_path / "x.cpp").exists()
    (tmp_path / "x.cpp").write_text("int x = y;\n")
    with pytest.raises(KernelError, match=r"x\.cpp does not compile:\n.*y"):
        compiler.build_library(tmp_path / "x.cpp")


def test_a_tool_gives_both_outputs_and_has_no_input():
    words = "cat; yes long | head -100000; echo wrong >&2; exit 7"
    done = compiler.run_tool(["sh", "-c", words])
    assert (done.returncode, done.stderr) == (7, "wrong\n")
    assert done.stdout == "long\n" * 100_000


@needs("emulator")
def test_a_library_is_compiled_where_no_path_is_set(tmp_path, folder, monkeypatch):
    """As by a service manager or `env -i`: the system then looks in its own folders."""
    monkeypatch.delenv("PATH")
    if compiler.shutil.which("g++") is None:
        pytest.skip("g++ is not in the system's own folders")
    (tmp_path / "x.cpp").write_text("int x;\n")
    assert compiler.build_library(tmp_path / "x.cpp").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/bin/sh\nexit 3\n", r"g\+\+ ended with code 3, made nothing and said nothing"),
        ("#!/bin/sh\nexit 0\n", r"g\+\+ ended with code 0, made nothing and said nothing"),
        ("#!/bin/sh\nkill -9 $$\n", r"g\+\+ was ended by SIGKILL, and said nothing"),
        ("#!/bin/sh\necho no licence >&2; exit 1\n", "does not compile:\nno licence$"),
        ("no program", r"g\+\+ does not start: Exec format error"),
    ],
)
def test_it_is_said_how_a_compiler_failed(text, says, gxx):
    with pytest.raises(KernelError, match=rf"^x\.cpp.*{says}"):
        gxx(text)()


def test_a_reason_in_one_line_is_short(gxx):
    """Though a compiler may have found a thousand faults."""
    build = gxx(
        "#!/bin/sh\nfor i in $(seq 1000); do echo x.cpp:$i: no such name >&2; done; exit 1\n"
    )
    said = compiler.reason(build)
    assert said.startswith("x.cpp does not compile: x.cpp:1: no such name x.cpp:2:")
    assert said.endswith("...") and len(said) < 500
    assert compiler.reason(lambda: 0) is None


def test_it_is_said_that_a_compiler_had_no_room(gxx, monkeypatch):
    """Not even for its own words, which go to the same disk."""
    of, full = compiler.shutil.disk_usage, tempfile.gettempdir()
    monkeypatch.setattr(
        compiler.shutil, "disk_usage", lambda x: SimpleNamespace(free=4096) if x == full else of(x)
    )
    with pytest.raises(KernelError, match=rf"disk of {full} is full; TMPDIR names another place"):
        gxx("#!/bin/sh\nexit 1\n")()


def test_it_is_said_that_there_was_no_room_for_what_is_compiled(gxx, monkeypatch):
    """It was said that the system does not load it, and that HYBRID_GEMM_CACHE would help."""

    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    said = rf"x\.cpp cannot be written to {tempfile.gettempdir()}: No space .*; TMPDIR names"
    with pytest.raises(KernelError, match=said):
        gxx("#!/bin/sh\nexit 1\n")()
