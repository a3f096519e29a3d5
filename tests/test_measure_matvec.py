"""scripts/measure-matvec: what it says without a GPU, what a row counts, and a row on a GPU."""

import json
import subprocess
import sys

import pytest
from support.command import environment
from support.devices import needs
from support.scripts import SCRIPTS, loaded

SCRIPT = SCRIPTS / "measure-matvec"


@pytest.fixture(scope="module")
def tool():
    return loaded("measure-matvec")


def measure(*arguments, **changes):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True,
        env=environment(**changes), timeout=120,
    )  # fmt: skip


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    done = measure(tmp_path / "r.json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 5
    (message,) = done.stderr.splitlines()
    assert message.startswith("measure-matvec: device cuda was asked for: no ")
    assert not list(tmp_path.iterdir())


def test_a_wrong_call_is_told_the_use(tmp_path):
    for arguments in ([], [tmp_path / "r.json", "large"]):
        done = measure(*arguments)
        assert done.returncode == 1 and "scripts/measure-matvec FILE [SIDE ...]" in done.stderr


def test_matrices_that_take_turns_are_in_no_cache(tool):
    assert tool.moved(2048, 2) == (2048 * 2048 + 2 * 2048) * 2
    for side in tool.SIDES:
        for itemsize in (2, 4, 8):
            count = tool.matrices(side, itemsize)
            assert count * tool.moved(side, itemsize) >= tool.UNCACHED > 0
            assert count == 1 or (count - 1) * tool.moved(side, itemsize) < tool.UNCACHED


@pytest.mark.slow
@needs("cuda")
def test_rows_of_a_gpu(tmp_path):
    done = measure(tmp_path / "r.json", 2048)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        assert row["passed"] and row["ratio"] == row["copy_ms"] / row["ms"] > 0
