"""What is kept on disk is only believed when it is ours and whole."""

import ctypes
import json
import os
import subprocess
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.command import python
from support.emulation import Compiler, compiled, needs_emulator, run_kernel

from hybrid_gemm.catalog import Launch
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.experiments import measure
from hybrid_gemm.host import cache, compiler, notes
from hybrid_gemm.kernel_choice import tables
from hybrid_gemm.planning import link_rates

KERNEL = 'extern "C" __global__ void kernel(int* x) { x[0] = 5; }'
ONE = Launch((1, 1, 1), (1, 1, 1))


@pytest.fixture(autouse=True)
def _afresh(monkeypatch):
    """No note was printed yet, and nothing is in a temporary folder."""
    notes.forget()
    monkeypatch.setattr(cache, "temporary_folders", [])
    yield
    cache.remove_temporary_folders()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the cache will be; not there yet."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def mode(path):
    return path.stat().st_mode & 0o777


# --- folders ------------------------------------------------------------------------------


def test_folders_are_made_for_their_owner_alone(folder, monkeypatch):
    before = os.umask(0)
    try:
        made = cache.directory("emulator")
        monkeypatch.delenv("HYBRID_GEMM_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "new" / "xdg"))
        cache.directory("links")
    finally:
        os.umask(before)
    assert made == folder / "emulator"
    new = [folder / "new", folder / "new/xdg", folder / "new/xdg/hybrid-gemm/links"]
    assert [mode(path) for path in (folder, made, *new)] == [0o700] * 5


@pytest.mark.parametrize("which", ["cache", "cache/emulator"])
@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777])
def test_a_folder_that_others_may_write_is_refused(folder, which, bits, capsys):
    (folder / "emulator").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    (folder.parent / which).chmod(bits)
    found = cache.directory("emulator")
    assert not found.is_relative_to(folder) and mode(found) == 0o700
    assert cache.directory("emulator") == found
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert str(folder.parent / which) in shown and "others may write" in shown
    assert "HYBRID_GEMM_CACHE" in shown
    with pytest.raises(UnavailableError, match="others may write"):
        cache.directory("emulator", lasting=True)


def test_a_folder_of_another_user_is_refused(folder, monkeypatch, capsys):
    cache.directory("emulator")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert not cache.directory("emulator").is_relative_to(folder)
    assert "belongs to another user" in capsys.readouterr().err


@needs_emulator
def test_a_library_in_a_folder_open_to_all_is_not_loaded(tmp_path, monkeypatch):
    """A planted library, with the right name and a right digest, runs nothing."""
    gxx = Compiler(tmp_path, monkeypatch)
    path = compiled(KERNEL, tmp_path).path
    before = gxx.calls
    folder = path.parent
    folder.chmod(0o777)
    x = np.zeros(1, np.int32)
    program = compiled(KERNEL, tmp_path)
    program.launch(ONE, [x])
    assert not program.path.is_relative_to(folder) and gxx.calls == before + 1 and x[0] == 5
    folder.chmod(0o700)
    assert compiled(KERNEL, tmp_path).path == path


def test_relative_cache_paths_are_ignored(tmp_path, monkeypatch):
    """As the XDG base directory specification asks."""
    monkeypatch.delenv("HYBRID_GEMM_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given in ("relative", "./here", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache.directory("host") == tmp_path / "home/.cache/hybrid-gemm/host"
    assert os.listdir(tmp_path) == ["home"]


@needs_emulator
@pytest.mark.parametrize("cause", ["a file", "no home"])
def test_without_a_cache_a_temporary_folder_serves(cause, tmp_path, monkeypatch, capsys):
    if cause == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("HYBRID_GEMM_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "relative")
    x = np.zeros(1, np.int32)
    for _ in range(2):
        run_kernel(KERNEL, [x], tmp_path)
    assert x[0] == 5
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "temporary folder" in shown


@needs_emulator
@pytest.mark.parametrize("where", ["cache", "everywhere"])
def test_code_is_not_kept_where_none_is_loaded(where, folder, tmp_path, monkeypatch, capsys):
    """As in a home that is mounted noexec."""
    of = os.statvfs

    def noexec(path):
        flags = os.ST_NOEXEC if where == "everywhere" or Path(path).is_relative_to(folder) else 0
        return SimpleNamespace(f_flag=of(path).f_flag | flags)

    monkeypatch.setattr(os, "statvfs", noexec)
    x = np.zeros(1, np.int32)
    if where == "cache":
        run_kernel(KERNEL, [x], tmp_path)
        assert x[0] == 5
    else:
        with pytest.raises(UnavailableError, match=r"noexec.*TMPDIR names another place"):
            run_kernel(KERNEL, [x], tmp_path)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "noexec" in shown and "HYBRID_GEMM_CACHE" in shown
    assert cache.directory("rates").is_relative_to(folder)  # what is no code is kept


@needs_emulator
def test_a_cache_that_cannot_be_written_is_still_read(tmp_path, monkeypatch, capsys):
    gxx = Compiler(tmp_path, monkeypatch)
    kept = compiled(KERNEL, tmp_path).path
    write = cache.atomic_write

    def full(path, data, **options):
        if path.is_relative_to(tmp_path):
            raise OSError(30, "Read-only file system")
        write(path, data, **options)

    monkeypatch.setattr(cache, "atomic_write", full)
    assert compiled(KERNEL, tmp_path).path == kept and not capsys.readouterr().err
    x = np.zeros(1, np.int32)
    calls = gxx.calls
    for _ in range(2):
        run_kernel(KERNEL.replace("5", "6"), [x], tmp_path)
    assert x[0] == 6 and gxx.calls == calls + 1
    assert "Read-only file system" in capsys.readouterr().err


def test_the_temporary_folder_goes_with_the_process(tmp_path):
    code = """
        import os
        from hybrid_gemm.host import cache
        made = cache.directory("host")
        if os.fork() == 0:
            raise SystemExit(cache.directory("host") == made)  # a child has its own
        assert os.wait()[1] == 0 and made.is_dir()
        print(made)
    """
    (tmp_path / "file").touch()
    places = {"HYBRID_GEMM_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    done = python("-c", textwrap.dedent(code), env=places, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path)) and os.listdir(tmp_path) == ["file"]


# --- compiled files -----------------------------------------------------------------------


def damage(path, how):
    data = path.read_bytes()
    match how:
        case "flipped":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
        case "truncated":
            data = data[: len(data) // 2]
        case "empty":
            data = b""
        case "text":
            data = b"not a library\n"
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a FIFO":
        os.mkfifo(path)
    elif how != "missing":
        path.write_bytes(data)


DAMAGES = ["flipped", "truncated", "empty", "text", "missing", "a folder", "a FIFO"]


@needs_emulator
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("which", ["library", "digest"])
def test_a_damaged_library_is_made_again(which, how, tmp_path, monkeypatch):
    gxx = Compiler(tmp_path, monkeypatch)
    path = compiled(KERNEL, tmp_path).path
    whole = path.read_bytes()
    damage(path if which == "library" else Path(f"{path}.sha256"), how)
    for _ in range(2):
        again = compiled(KERNEL, tmp_path)
        x = np.zeros(1, np.int32)
        again.launch(ONE, [x])
        assert x[0] == 5 and again.path.read_bytes() == whole
    assert gxx.calls == 2


@needs_emulator
def test_a_kept_library_has_a_digest_that_sha256sum_reads(tmp_path, monkeypatch):
    Compiler(tmp_path, monkeypatch)
    path = compiled(KERNEL, tmp_path).path
    kept = [x.name for x in path.parent.iterdir() if x.name.startswith(path.stem)]
    assert sorted(kept) == [path.name, f"{path.name}.sha256"]
    assert {mode(path.with_name(name)) for name in kept} == {0o600}
    checked = subprocess.run(["sha256sum", "-c", f"{path}.sha256"], cwd=path.parent)
    assert checked.returncode == 0


@needs_emulator
def test_the_copying_threads_heal_too(folder):
    source = folder.parent / "source.cpp"
    source.write_text('extern "C" int seven() { return 7; }\n')
    path = compiler.build_library(source)
    damage(path, "flipped")
    assert ctypes.CDLL(str(compiler.build_library(source))).seven() == 7


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("which", ["cubin", "digest"])
def test_a_damaged_cubin_is_made_again(which, how, folder, monkeypatch):
    from hybrid_gemm.devices.cuda import nvrtc

    calls = []

    def compile(source, arch, name, more):
        calls.append(source)
        return b"\x7fELF machine code\n" * 99, "Used 17 registers"

    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(nvrtc, "compiled_by_nvrtc", compile)
    made = nvrtc.compile("text", "sm_90", "x.cu")
    (path,) = (folder / "cubin").glob("*.cubin")
    damage(path if which == "cubin" else Path(f"{path}.sha256"), how)
    for _ in range(2):
        assert nvrtc.compile("text", "sm_90", "x.cu") == made
    assert len(calls) == 2 and made[1].registers == 17


# --- the working directory ----------------------------------------------------------------


@pytest.mark.timeout(30)
def test_a_handler_that_needs_what_its_thread_compiles_compiles_it_too(folder):
    """It waited for ever for its own thread."""
    names = []

    def make():
        names.append("made")
        if len(names) == 1:
            assert cache.kept("host", "made", make)[1] == b"text"
        return b"text"

    path, data = cache.kept("host", "made", make)
    assert path.read_bytes() == data == b"text" and len(names) == 2
    assert not [*path.parent.glob("*.lock")] and not cache._turns


@needs_emulator
def test_g_plus_plus_includes_nothing_from_the_working_directory(tmp_path, folder, monkeypatch):
    """Which may be another user's, with a file of the name of one that kernels include."""
    planted, kernels = tmp_path / "planted", tmp_path / "kernels"
    for where, value in ((planted, 666), (kernels, 5)):
        where.mkdir()
        (where / "part.cuh").write_text(f"#define VALUE {value}\n")
    monkeypatch.chdir(planted)
    x = np.zeros(1, "i4")
    text = KERNEL.replace("5", "VALUE")
    run_kernel(f'#include "part.cuh"\n{text}', [x], kernels)
    assert x[0] == 5


def test_a_process_that_measures_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    planted = tmp_path / "hybrid_gemm"
    planted.mkdir()
    (planted / "__init__.py").write_text("raise SystemExit('planted')\n")
    monkeypatch.chdir(tmp_path)
    lab = SimpleNamespace(device=SimpleNamespace(on_gpu=True), first_gpu=0)
    try:
        assert measure.library_cold(lab, n=64)["handle_ms"] > 0
    except UnavailableError as error:  # no GPU
        assert "planted" not in str(error)


# --- tables -------------------------------------------------------------------------------

ROW = {"m": 64, "n": 64, "k": 64, "dtype": "float32", "layout": "nn", "kernel": "naive",
       "params": {"BM": 16, "BN": 16}, "time_ms": 1.0}  # fmt: skip
BAD_TEXTS = [b"", b"[]", b"5", b"{", b"\xff\xfe", b"[" * 100_000, b'{"rows": 5}', b'{"rows": [5]}']


def bad_rows():
    for key, values in {
        "m": ("64", 1.5, None, -1, [1], 10**400), "dtype": (5, []), "kernel": (None, {}),
        "params": (None, {"BM": "16"}, [1]),
        "time_ms": ("1", None, 0, -1.0, float("nan"), {}, 10**400),
    }.items():  # fmt: skip
        for value in values:
            yield json.dumps({"rows": [{**ROW, key: value}]}).encode()
    yield json.dumps({"rows": [{k: v for k, v in ROW.items() if k != "time_ms"}]}).encode()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A GPU that no shipped table is of."""
    monkeypatch.setattr(tables, "HERE", tmp_path / "none")
    tables.table.cache_clear()
    yield tables.Machine("Test GPU 9000", 132, 90, 60.0)
    tables.table.cache_clear()


@pytest.mark.parametrize("text", [*BAD_TEXTS, *bad_rows()])
def test_a_damaged_table_of_times_is_absent(text, folder, machine, capsys):
    path = tables.user_table(machine.model)
    path.write_bytes(json.dumps({"rows": [ROW]}).encode())
    assert tables.table(machine) == (ROW,)
    tables.table.cache_clear()
    path.write_bytes(text)
    for _ in range(2):
        assert tables.table(machine) == ()
        tables.table.cache_clear()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and str(path) in shown


def test_times_are_not_measured_for_a_cache_that_does_not_last(folder, machine, capsys):
    """`tune` is refused before it begins; choosing goes on without the table."""
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UnavailableError, match="others may write"):
        tables.user_table(machine.model)
    assert tables.table(machine) == () and "others may write" in capsys.readouterr().err


LINK_ROW = {"link": "h2d", "memory": "pinned", "at_once": 1, "gbps": 50.0}
LINKS = {"measured": "2026-01-01", "rows": [
    LINK_ROW, {**LINK_ROW, "link": "d2h"}, {**LINK_ROW, "link": "both"},
]}  # fmt: skip


def bad_links():
    for key, values in {
        "link": (None,), "memory": (5,), "at_once": ("1", 0, 1.5, None, 10**400),
        "gbps": ("50", None, 0, -1, float("nan"), float("inf"), 10**400),
    }.items():  # fmt: skip
        for value in values:
            yield json.dumps({**LINKS, "rows": [*LINKS["rows"], {**LINK_ROW, key: value}]}).encode()
    yield json.dumps({"rows": LINKS["rows"]}).encode()
    yield json.dumps({**LINKS, "measured": []}).encode()
    yield json.dumps({**LINKS, "rows": LINKS["rows"][1:]}).encode()


@pytest.mark.parametrize("text", [*BAD_TEXTS, *bad_links()])
def test_a_damaged_table_of_links_is_absent(text, folder, capsys):
    path = link_rates.path(("aa",))
    path.write_text(json.dumps(LINKS))
    link_rates.forget()
    assert link_rates.known(("aa",)).h2d == ((1, 50.0),)
    path.write_bytes(text)
    for _ in range(2):
        link_rates.forget()
        assert link_rates.kept(("aa",)) is None and link_rates.known(("aa",)) is None
    link_rates.forget()
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and str(path) in shown
