"""Runs of `hybrid-gemm run --resume` that end too early, and what they leave."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hybrid_gemm.arrays.journal import Journal
from hybrid_gemm.cli import cli
from hybrid_gemm.runner import Runner

KEPT = ["C.npy.unfinished", "C.npy.unfinished.journal"]
PANELS = 6  # of 70 x 50 in panels of at most 30


class Interrupted(Exception):
    """Ends a run between two panels."""


@pytest.fixture
def folder(tmp_path, monkeypatch, rng):
    """A.npy and B.npy, whose product is 70 x 50, in the working directory."""
    np.save(tmp_path / "A.npy", rng.standard_normal((70, 40), "f4"))
    np.save(tmp_path / "B.npy", rng.standard_normal((40, 50), "f4"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resume(*options, device="cpu", inputs=("A.npy", "B.npy")) -> dict:
    """What a run with --resume says of its panels, as JSON."""
    arguments = ["run", *inputs, "-o", "C.npy", "--resume", "--json", "out.json", "--panel", "30"]
    done = CliRunner().invoke(cli, [*arguments, "--device", device, *map(str, options)])
    if done.exception is not None:
        raise done.exception
    return reported()


def reported() -> dict:
    """What the last run with --json says of its panels."""
    return json.loads(Path("out.json").read_text())["resume"]


def plain(output: str) -> None:
    """A run without --resume."""
    done = CliRunner().invoke(cli, ["run", "A.npy", "B.npy", "-o", output, "--device", "cpu"])
    assert done.exit_code == 0, done.exception


def interrupted(monkeypatch, panels: int, *options, **places) -> None:
    """A run that ends when it has finished so many panels."""
    real, left = Runner.run, [panels]

    def multiply(runner, *arguments, **keywords):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return real(runner, *arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Runner, "run", multiply)
        resume(*options, **places)
    assert not Path("C.npy").exists()


def whole(*options, **places) -> bytes:
    """The file of an uninterrupted run with --resume."""
    assert resume(*options, **places)["found"] == 0
    made = Path("C.npy").read_bytes()
    os.unlink("C.npy")
    return made


def counted(found: dict) -> tuple[int, int]:
    """The panels that a run found, and those that it multiplied."""
    assert found["panels"] == found["found"] + found["multiplied"] == PANELS
    return found["found"], found["multiplied"]


def changed(path: str, at: int) -> None:
    """Turns one bit of a byte over."""
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 1
    Path(path).write_bytes(data)


def lines(path) -> int:
    """How many lines a file has; 0 if there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def journal(path) -> Journal:
    """What the journal beside C says, once no process has it."""
    found = Journal(f"{path}.unfinished.journal")
    found.close()
    return found
