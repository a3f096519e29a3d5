"""scripts/scaling: what it makes of the files that a scaling job leaves."""

import json
import resource

import pytest
from support.scripts import loaded

from hybrid_gemm.errors import HybridGemmError

collect = loaded("scaling").collect


@pytest.fixture
def left(tmp_path):
    """Makes the file of a run; its rate is half of the ideal one from two ranks on."""

    def make(job, study, ranks):
        file = tmp_path / f"scaling-{job}-{study}-{ranks}.json"
        result = {
            "problem": {}, "total_ms": 1.0, "totals_ms": [1.0], "reduction": "none",
            "gflops": 10.0 * max(1, ranks / 2), "kernel": "blas", "verify": None, "command": "",
            "environment": {},
        }  # fmt: skip
        file.write_text(json.dumps(result))
        return str(file)

    return make


def test_a_job_becomes_a_study(left, tmp_path):
    files = [left(1, study, ranks) for study in ("weak", "strong") for ranks in (4, 1)]
    collect(str(tmp_path / "study.json"), files)
    rows = json.loads((tmp_path / "study.json").read_text())["rows"]
    found = [(row["study"], row["ranks"], row["efficiency"]) for row in rows]
    assert found == [("strong", 1, 1), ("strong", 4, 0.5), ("weak", 1, 1), ("weak", 4, 0.5)]


@pytest.mark.parametrize(
    "runs, count", [([(1, 2)], 0), ([(1, 1), (2, 1)], 2)], ids=["unfinished", "two jobs"]
)
def test_files_that_are_no_study_are_refused(left, tmp_path, runs, count):
    files = [left(1, "strong", 1), *(left(job, "weak", ranks) for job, ranks in runs)]
    with pytest.raises(SystemExit, match=f"a weak study takes one file of 1 rank, and {count} of"):
        collect(str(tmp_path / "study.json"), files)
    assert not (tmp_path / "study.json").exists()


def test_a_study_that_cannot_be_written_leaves_the_one_before(left, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)  # to a file, under pytest
    study, files = tmp_path / "study.json", [left(1, "weak", ranks) for ranks in (1, 2)]
    collect(str(study), files)
    before, limits = study.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a disk that becomes full
    try:
        with pytest.raises((OSError, HybridGemmError), match="too large"):
            collect(str(study), files)
        assert study.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
