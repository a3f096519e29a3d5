"""Scripts that measure: what they say of themselves, and where there is no GPU."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.command import environment
from support.scripts import SCRIPTS, loaded

import hybrid_gemm

PYTHON = sorted(
    path.name for path in SCRIPTS.glob("measure-*") if "python" in path.read_text().split("\n")[0]
)
SEEDED = ["--seed", "1"]
ARGUMENTS = {
    "measure-beta": [*SEEDED, "r.json"],
    "measure-heldout": [*SEEDED, "r.json"],
    "measure-host": ["ways", "r.json", "1"],
    "measure-errors": ["r.json", "fallback"],
    "measure-gpus": ["resident", "r.json"],
    "measure-verdicts": ["--json", "r.json"],
}


def script(name, *arguments, cwd):
    """Runs a script without GPUs; it must not fail in a way of its own, nor write anything."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, *arguments], capture_output=True, text=True, cwd=cwd,
        env=environment(CUDA_VISIBLE_DEVICES=""), timeout=60,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and not list(cwd.iterdir())
    return done


@pytest.mark.parametrize("name", [*PYTHON, "pictures", "refit-models"])
def test_scripts_explain_themselves_anywhere(tmp_path, name):
    done = script(name, "--help", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr
    assert len(done.stdout.splitlines()) > 3


@pytest.mark.parametrize("name", [x for x in PYTHON if x != "measure-compile"])
def test_scripts_without_a_gpu_say_so_in_one_line(tmp_path, name):
    done = script(name, *ARGUMENTS.get(name, ["r.json"]), cwd=tmp_path)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert (line.startswith(f"{name}: ") and "GPU" in line) or "CUDA" in line


def test_what_two_calls_give_is_compared_even_in_one_place():
    difference, place = loaded("back_to_back.py").difference, np.zeros(3)

    def gives(*numbers):
        place[...] = numbers
        return place

    assert difference(lambda: gives(1, 2, -8), lambda: gives(1, 4, -8)) == 0.25
    assert difference(lambda: [place, place + 1j], lambda: [place, place]) == 0.125
    assert difference(lambda: np.zeros((2, 0)), lambda: np.zeros((2, 0))) == 0
    assert np.isnan(difference(lambda: [place, place], lambda: [place, place * np.nan]))
    assert difference(lambda: place, lambda: None) is None
    torch = pytest.importorskip("torch")
    followed = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert difference(lambda: 3 * followed, lambda: 2 * followed) == 0.5


def test_calls_beside_a_librarys_are_rows_and_a_call_that_fails_is_one():
    def kind(n):
        yield "eye", lambda: np.eye(n), lambda: np.eye(n)
        yield "added to C", lambda: np.eye(n), lambda: 2 * np.eye(n)
        yield "nothing", lambda: np.eye(n), lambda: 1 // 0

    eye, added, failed = loaded("back_to_back.py").rows_beside(
        "numpy", (2,), (kind,), lambda *calls: [float(len(calls)), 4.0]
    )
    both = {"ours_us": 2.0, "numpy_us": 4.0, "ratio": 2.0}
    assert eye == {"what": "eye", "n": 2, "difference": 0.0, **both}
    assert added == {"what": "added to C", "n": 2, **both}
    assert failed["error"].startswith("ZeroDivisionError") and "ratio" not in failed


def test_rows_of_a_gpu_say_what_they_were_measured_on(tmp_path, monkeypatch):
    runtime = SimpleNamespace(
        getDeviceProperties=lambda ordinal: {"name": b"GPU %d" % ordinal},
        getDeviceCount=lambda: 2,
    )
    studies, written = loaded("studies.py"), tmp_path / "r.json"
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(studies, "environment", lambda: {"python": "3"})
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "measure-it"), "r.json"])
    studies.write_of_gpu(str(written), [{"n": 3}], torch="2")
    assert json.loads(written.read_text()) == {
        "command": "scripts/measure-it r.json", "device": {"name": "GPU 0", "count": 2},
        "environment": {"python": "3", "torch": "2"}, "rows": [{"n": 3}],
    }  # fmt: skip


def test_host_arrays_of_any_size_hold_the_numbers_that_were_made(monkeypatch):
    def pinned(shape, dtype):
        return np.empty(shape, dtype)

    monkeypatch.setattr(hybrid_gemm, "empty_pinned", pinned, raising=False)
    monkeypatch.setattr(sys, "argv", ["measure-host", "ways", "r.json"])
    of_all = loaded("measure-host").HostArrays(300)
    for n, dtype in ((300, "float32"), (200, "float16"), (130, "bfloat16")):
        a, b, c = of_all.of(n, dtype, "pinned")
        for x, source in zip((a, b), of_all.made, strict=True):
            assert np.array_equal(x, source.reshape(-1)[: n * n].reshape(n, n).astype(x.dtype))
        assert np.isnan(c.astype("float32")).all()
