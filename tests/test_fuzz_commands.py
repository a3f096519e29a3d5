"""scripts/fuzz-commands: what it draws, and which ends of a command are faults."""

from subprocess import CompletedProcess

import numpy as np
import pytest
from support.scripts import loaded


@pytest.fixture(scope="module")
def script():
    return loaded("fuzz-commands")


@pytest.fixture
def command(script):
    a, b, c = (np.full((2, 2), x, "f4") for x in (1, 2, 3))
    options = ["--alpha", "2", "--beta", "-1", "-o", "C out.npy", "--json", "result.json"]
    return script.Command(options, 0, {"A": a, "B": b, "C": c})


SAID = "hybrid-gemm: no\n"


@pytest.mark.parametrize(
    ("code", "said", "files", "fault"),
    [
        (0, "", {"C out.npy": 5, "result.json": 1}, None),
        (0, "", {"C out.npy": 6, "result.json": 1}, "wrong: C is not"),
        (0, "", {"result.json": 1}, "C is missing"),
        (0, "", {"C out.npy": 5}, "result.json is missing"),
        (0, "", {"C out.npy": 5, "result.json": 1, "x.tmp": 1}, "left behind: x.tmp"),
        (0, "Traceback (most", {"C out.npy": 5, "result.json": 1}, "a traceback"),
        (2, SAID, {}, None),
        (5, SAID, {}, None),
        (1, "hybrid-gemm: emulator:0, which has 64 KiB free\n", {}, None),
        (2, "", {}, "no line of ours"),
        (2, SAID, {"C out.npy": 5}, "C is there after a refusal"),
        (1, SAID, {}, "exit code 1"),
        (3, SAID, {}, "wrong by its own verdict"),
        (139, "", {}, "exit code 139"),
    ],
)
def test_the_ends_of_a_command(script, command, tmp_path, code, said, files, fault):
    for name, value in files.items():
        if name.endswith(".npy"):
            np.save(tmp_path / name, np.full((2, 2), value, "f4"))
        else:
            (tmp_path / name).write_text(str(value))
    found = script.judged(command, tmp_path, CompletedProcess([], code, "", said))
    assert found == fault or (fault and found.startswith(fault))


def test_a_seed_and_a_number_make_the_same_command(script):
    drawn = [script.drawn(7, number) for number in range(60)]
    again = [script.drawn(7, number) for number in range(60)]
    assert [(x.options, x.ranks) for x in drawn] == [(x.options, x.ranks) for x in again]
    for one, other in zip(drawn, again, strict=True):
        assert all(np.array_equal(x, other.files[name]) for name, x in one.files.items())
    assert {"--algorithm", "--grid", "--resume"} <= {x for each in drawn for x in each.options}
    assert {bool(x.files) for x in drawn} == {True, False}


def test_what_is_expected_is_the_product(script):
    a, b = np.array([[1, 2j]], "c8"), np.array([[3], [4]], "c8")
    made = script.expected(
        script.Command(["--conj-trans-a", "--alpha", "-1"], 0, {"A": a.T, "B": b})
    )
    np.testing.assert_array_equal(made, -(a.conj() @ b))


@pytest.mark.parametrize(
    ("ends", "fault"),
    [("echo Traceback: why; exit 1", "a traceback"), ("exec sleep 100", "does not end within 5 s")],
)
def test_all_that_a_faulty_command_said_is_told(script, command, monkeypatch, ends, fault):
    said = "hybrid-gemm: begun", *(["Traceback: why"] if "echo" in ends else [])
    monkeypatch.setattr(command, "words", lambda _: ["sh", "-c", f"echo {said[0]}; {ends}"])
    monkeypatch.setattr(script, "HANGS_S", 5 if "sleep" in ends else 60)
    assert script.tried(command) == (fault, "".join(f"{line}\n" for line in said))
