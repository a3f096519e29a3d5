"""An installed wheel has what a checkout has, and the scripts say what is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.devices import needs

from hybrid_gemm import catalog

CHECKOUT = Path(catalog.__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (CHECKOUT / "pyproject.toml").is_file(), reason="needs a checkout"
)


def run(*command, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, **options
    )


# --- the wheel ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Where the wheel of this checkout is installed, without what it depends on."""
    for builder in ("pip", "hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(builder)
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-index", "--no-deps"]
    built = run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, CHECKOUT)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    done = run(*pip, "install", *offline, "--target", folder / "site", wheel)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def python(installed: Path, code: str) -> str:
    """What `code` prints where only the installed package can be found."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    done = run(sys.executable, "-c", code, cwd=installed.parent, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_catalog_is_the_checkouts(installed):
    ours = "\n".join(map(repr, catalog.kernels().values())) + catalog.include_digest()
    code = """
from hybrid_gemm import catalog
print(catalog.directory())
print(*map(repr, catalog.kernels().values()), sep="\\n", end=catalog.include_digest())
"""
    directory, theirs = python(installed, code).split("\n", 1)
    assert directory == str(installed / "hybrid_gemm" / "kernels")
    assert theirs == ours.replace(str(catalog.directory()), directory)
    assert len(catalog.kernels()) > 10


def test_every_file_of_the_package_is_installed(installed):
    def files(folder):
        return {
            path.relative_to(folder)
            for path in folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    package = installed / "hybrid_gemm"
    ours = files(CHECKOUT / "hybrid_gemm")
    ours |= {"kernels" / path for path in files(CHECKOUT / "kernels")}
    assert files(package) == ours
    assert {path.suffix for path in ours} >= {".py", ".h", ".cu", ".cuh", ".toml"}


def test_the_description_on_a_package_index_has_no_links_into_the_checkout(installed):
    (about,) = installed.glob("hybrid_gemm-*.dist-info/METADATA")
    head, description = about.read_text().split("\n\n", 1)
    assert description.startswith("# hybrid-gemm") and "<!--" not in description
    targets = re.findall(r"\]\(([^)]+)\)", description)
    assert not [x for x in targets if not x.startswith(("https://", "#"))]
    for line in ("Typing :: Typed", "Programming Language :: Python :: 3.11"):
        assert f"Classifier: {line}" in head
    assert "Author: The hybrid-gemm authors" in head


@needs("emulator")
def test_the_installed_emulator_finds_its_headers(installed, tmp_path):
    code = """
import numpy as np, hybrid_gemm
a = np.arange(15, dtype="float32").reshape(3, 5)
assert (hybrid_gemm.gemm(a, a.T, device="emulator", kernel="naive") == a @ a.T).all()
print(hybrid_gemm.__file__)
"""
    assert python(installed, code).startswith(str(installed))


# --- the scripts --------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what the scripts need, and a PATH of few commands in `bin`."""
    shutil.copytree(CHECKOUT / "scripts", tmp_path / "scripts")
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    (tmp_path / "bin").mkdir()
    tools = "cat cksum dirname find flock grep mkdir mktemp nproc readlink rm sh touch"
    for found in filter(None, map(shutil.which, tools.split())):
        (tmp_path / "bin" / Path(found).name).symlink_to(found)
    return tmp_path


def command(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def fake_python(path: Path, version: str, *, failing: str = "nothing") -> None:
    """A Python that says it is `version` and fails at programs that mention `failing`."""
    command(
        path,
        f'''case "$*" in
            *"{failing}"*) exit 1 ;;
            *cuDriverGetVersion*) echo "{version} 0" ;;
            *version_info*) exec "{sys.executable}" -c "import sys
sys.exit({tuple(map(int, version.split(".")))} < (3, 11))" ;;
        esac''',
    )


def script(checkout: Path, name: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    return run(checkout / "scripts" / name, *args, cwd="/", env={"PATH": f"{checkout}/bin", **env})


def refused(checkout: Path, **env: str) -> str:
    for name in ("run", "test"):
        done = script(checkout, name, **env)
        assert done.returncode == 1 and done.stdout == ""
        assert done.stderr.count("\n") == 1, done.stderr
        assert not (checkout / ".venv").exists()
    return done.stderr


def test_scripts_say_which_python_is_missing(checkout):
    needed = "Python 3.11 or later is needed"
    assert f"test: {needed}; apt install python3 python3-venv" in refused(checkout)
    fake_python(checkout / "bin" / "python3", "3.9")
    assert f"{needed}, and python3 is 3.9; apt install" in refused(checkout)
    fake_python(checkout / "bin" / "python3.12", "3.12", failing="ensurepip")
    assert "python3.12 has no venv module; apt install python3.12-venv" in refused(checkout)
    assert "PYTHON=/no/python does not serve" in refused(checkout, PYTHON="/no/python")
    assert "python3 is 3.9" in refused(checkout, PYTHON="python3")


def ready_checkout(checkout: Path) -> None:
    """Puts an environment there that records what is run in it."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (checkout / ".venv" / "lib" / "python3.12").mkdir(parents=True)
    log = f'echo "$@" >>"{checkout}/log"'
    command(
        python,
        f"""case "$*" in
            *cuDriverGetVersion*) echo "3.12 $CUDA" ;;
            *"pip install"*) {log}; echo "$BROKEN"; [ -z "$BROKEN" ] ;;
            *) {log} ;;
        esac""",
    )
    command(checkout / ".venv" / "bin" / "hybrid-gemm", log)


def ran(checkout: Path) -> list[str]:
    """What was run since the last call, less pip's looks."""
    path = checkout / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line for line in lines if "pip --version" not in line]


def test_scripts_install_once_and_pass_arguments_on(checkout):
    ready_checkout(checkout)
    for times in range(2):
        done = script(checkout, "run", "--threads", "4", CUDA="0")
        assert done.returncode == 0
        assert done.stderr.count("\n") == 1 - times, "says that it installs, then nothing"
        found = ran(checkout)
        assert found[-1] == "run --threads 4"
        assert len(found) == 2 - times
    for times in range(2):
        done = script(checkout, "test", "-k", "planner", CUDA="0")
        assert "g++ not found: the emulator's tests are skipped; apt install g++" in done.stderr
        found = ran(checkout)
        assert found[-1].startswith("-m pytest -n ") and found[-1].endswith("-k planner")
        assert len(found) == 2 - times
    # What serves the tests serves run as well; another pyproject.toml needs an install.
    script(checkout, "run", CUDA="0")
    assert len(ran(checkout)) == 1
    (checkout / "pyproject.toml").open("a").write("\n")
    script(checkout, "run", CUDA="0")
    assert len(ran(checkout)) == 2


@pytest.mark.parametrize(
    ("cuda", "for_run", "for_test"),
    [
        ("0", "-e .", "-e .[test,compile]"),
        ("11", "-e .", "-e .[test,compile]"),
        ("12", "-e .[cuda12]", "-e .[test,cuda12]"),
        ("13", "-e .[cuda13]", "-e .[test,cuda13]"),
        ("14", "-e .[cuda13]", "-e .[test,cuda13]"),
    ],
)
def test_scripts_choose_the_extra_for_the_driver(checkout, cuda, for_run, for_test):
    ready_checkout(checkout)
    done = script(checkout, "run", CUDA=cuda)
    assert ran(checkout)[0].endswith(for_run)
    assert ("driver is for CUDA 11, and 12 is needed" in done.stderr) == (cuda == "11")
    script(checkout, "test", CUDA=cuda)
    assert ran(checkout)[0].endswith(for_test)


def test_documents_and_packages_bring_what_they_need(checkout):
    ready_checkout(checkout)
    for name, extra, command in (
        ("docs", "docs", "-m sphinx"),
        ("packages", "release", "-m build"),
    ):
        script(checkout, name, CUDA="0")
        found = ran(checkout)
        assert found[0].endswith(f"-e .[{extra}]") and command in found[1]
    script(checkout, "docs", CUDA="0")
    assert len(ran(checkout)) == 1, "what was installed is not installed again"


def test_scripts_show_why_pip_failed(checkout):
    ready_checkout(checkout)
    done = script(checkout, "run", CUDA="0", BROKEN="conflicting versions")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "conflicting versions\nrun: pip could not install hybrid-gemm (its log is above)\n"
    )
    done = script(checkout, "run", CUDA="0", BROKEN="NewConnectionError")
    assert "run: pip could not reach the package index" in done.stderr
    assert script(checkout, "run", CUDA="0").returncode == 0


def test_scripts_make_a_broken_environment_anew(checkout):
    # No Python is on the PATH, so that making it anew is refused, which shows that it was tried.
    ready_checkout(checkout)
    script(checkout, "run", CUDA="0")
    anew = "Python 3.11 or later is needed"
    for change, back in (
        (lambda: (checkout / ".venv" / "made-for").write_text("3.12 0 /elsewhere\n"), None),
        (lambda: (checkout / ".venv" / "installing").touch(), "installing"),
    ):
        (checkout / ".venv" / "ready-run").unlink()
        change()
        assert anew in script(checkout, "run", CUDA="0").stderr
        (checkout / ".venv" / (back or "made-for")).unlink()
        assert script(checkout, "run", CUDA="0").returncode == 0
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert anew in script(moved, "run", CUDA="0").stderr
    moved.rename(checkout)
    assert script(checkout, "run", CUDA="0").returncode == 0
    (checkout / ".venv" / "lib" / "python3.12").rmdir()
    assert anew in script(checkout, "run", CUDA="0").stderr


def test_scripts_leave_the_environment_of_another_checkout_alone(checkout, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    ready_checkout(other)
    (other / ".venv" / "made-for").write_text(f"3.12 0 {other}\n")
    (checkout / ".venv").symlink_to(other / ".venv")
    for name in ("run", "test", "docs", "packages"):
        done = script(checkout, name, CUDA="0")
        assert done.returncode == 1
        assert f".venv leads to the environment of {other}; remove the link" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert (other / ".venv" / "bin" / "python").is_file() and not ran(other)


# --- packages for each Python -------------------------------------------------------------


def test_packages_are_tried_with_each_python(checkout, tmp_path_factory):
    """A 3.11 of the PATH works; pyenv's 3.12 is there and not switched on, so its command fails."""
    ready_checkout(checkout)
    pyenv = checkout / "pyenv" / "versions" / "3.12.1" / "bin"
    pyenv.mkdir(parents=True)
    works = f"""case "$*" in
        "-m venv "*) mkdir -p "$3/bin"; ln -s "{checkout}/.venv/bin/python" "$3/bin/python" ;;
    esac"""
    command(checkout / "bin" / "python3.11", works)
    command(checkout / "bin" / "python3.12", "echo 'command not found' >&2; exit 127")
    command(pyenv / "python", works)
    (checkout / "bin" / "ln").symlink_to(shutil.which("ln"))
    built = tmp_path_factory.mktemp("built")
    packages = ("hybrid_gemm-1-py3-none-any.whl", "hybrid_gemm-1.tar.gz")
    for name in packages:
        (built / name).touch()
    done = script(checkout, "packages", str(built), CUDA="0", PYENV_ROOT=f"{checkout}/pyenv")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("packages: tried with Python 3.11 3.12; not here: 3.13 3.14 3.15\n")
    installed = [line for line in ran(checkout) if "pip install" in line and str(built) in line]
    assert [Path(line.split()[-1]).name for line in installed] == [*packages, *packages]
