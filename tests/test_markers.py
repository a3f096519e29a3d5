"""Markers select what they say: `./scripts/test -m slurm`, `-m gpu`, `-m "not slow"`, and
`--campaigns`."""

import json
import re

import pytest
from support.command import PACKAGE_FOLDER, TESTS, python

CI = TESTS.parent / ".ci" / "run"
PURE = "tests/test_experiments.py::test_points_are_told_apart"

# Run as pytest's plugin: prints the tests that are left, with their markers; without options all.
PLUGIN = """
import json, sys, pytest

class Listing:
    def pytest_collection_finish(self, session):
        items = session.items if sys.argv[3:] else session.config.collected
        listed = {x.nodeid: [m.name for m in x.iter_markers()] for x in items}
        print("LISTED " + json.dumps(listed))

sys.exit(pytest.main(["--collect-only", "-q", *sys.argv[1:]], plugins=[Listing()]))
"""


def listed(*options) -> dict[str, list[str]]:
    """The tests that pytest selects with these options, and the markers of each."""
    done = python("-c", PLUGIN, "-p", "no:cacheprovider", *options, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return json.loads(re.search("^LISTED (.*)$", done.stdout, re.MULTILINE)[1])


@pytest.fixture(scope="module")
def everything(request):
    """All tests and their markers: those that this process collected, where it was to collect all,
    since a process that collects them takes 5 s."""
    if request.config.args != request.config.getini("testpaths"):
        return listed()
    collected = request.config.collected
    return {item.nodeid: [mark.name for mark in item.iter_markers()] for item in collected}


@pytest.mark.parametrize("marker", ["gpu", "mpi", "slurm", "slow", "blas", "campaign"])
def test_markers_are_registered_and_used(everything, marker, pytestconfig):
    assert any(line.startswith(f"{marker}:") for line in pytestconfig.getini("markers"))
    marked = [name for name, markers in everything.items() if marker in markers]
    assert 0 < len(marked) < len(everything)


def test_tests_of_cuda_are_marked_gpu(everything):
    """Those that have it as a parameter, but for those that plan for a GPU without one."""
    for name, markers in everything.items():
        if re.search(r"\[(.*-)?cuda( \w+)?(-.*)?\]$", name) and not name.startswith(PURE):
            assert "gpu" in markers, name


def test_tests_of_ranks_are_marked_mpi(everything):
    for name, markers in everything.items():
        if name.startswith("tests/mpi/"):
            assert "mpi" in markers, name
    starts = [name for name in everything if "test_every_rank_passes" in name]
    assert starts and all({"mpi", "slow"} <= set(everything[name]) for name in starts)


def test_tests_of_batch_scripts_are_marked_slurm(everything):
    marked = {name for name, markers in everything.items() if "slurm" in markers}
    assert marked == {name for name in everything if name.startswith("tests/test_slurm")}


def test_m_selects_by_markers(everything):
    files = "tests/test_ranks.py", "tests/test_slurm.py"
    there = {x: markers for x, markers in everything.items() if x.startswith(files)}
    selected = listed("-m", "slurm and not slow", *files)
    assert set(selected) == {
        x for x, markers in there.items() if "slurm" in markers and "slow" not in markers
    }
    assert any({"slurm", "slow"} <= set(markers) for markers in there.values())


def test_campaigns_are_run_alone_or_not_at_all():
    files = "tests/test_copier.py", "tests/test_verify_power.py"
    without, alone = listed(*files), listed("--campaigns", *files)
    assert without and not any("campaign" in markers for markers in without.values())
    assert alone and all("campaign" in markers for markers in alone.values())
    assert any("test_planted_faults_are_found" in x for x in without)  # the sample
    assert any("test_planted_faults_are_found" in x for x in alone)


@pytest.mark.skipif(not CI.exists(), reason="no .ci: this is no checkout")
def test_ci_begins_as_readme_does_and_runs_campaigns():
    text = CI.read_text()
    first = text.index("\n./scripts/test ")
    assert first < min(text.index("pip install"), text.index("apt-get install"))
    assert "\n./scripts/test --campaigns" in text


def test_support_is_found_by_other_processes(tmp_path):
    """From any folder, with the package that is tested here."""
    code = "import support, hybrid_gemm; print(support.__file__, hybrid_gemm.__file__, sep='\\n')"
    support, package = python("-c", code, cwd=tmp_path).stdout.split()
    assert support == str(TESTS / "support" / "__init__.py")
    assert package.startswith(f"{PACKAGE_FOLDER}/")
