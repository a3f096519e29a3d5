"""What every benchmark shares: how a study is run, shown and written."""

import csv
import io
import itertools
from dataclasses import dataclass, field

import pytest

from hybrid_gemm.bench import kernels, study
from hybrid_gemm.bench.accuracy import AccuracyStudy
from hybrid_gemm.bench.kernels import KernelStudy
from hybrid_gemm.bench.libraries import LibraryStudy
from hybrid_gemm.bench.study import Table
from hybrid_gemm.errors import UsageError

ROWS = [
    {"way": "one", "params": {"BM": 8, "BN": 4}, "time_ms": 1.5, "verdict": "passed"},
    {"way": "two", "params": {}, "time_ms": None, "verdict": "FAILED", "samples_ms": [1, 2]},
    {"way": "three", "params": {}, "time_ms": None, "verdict": None},
]


@dataclass
class Invented:
    """A study of three rows that measures nothing."""

    columns = ("way", "params", "time_ms", "verdict")
    device_note: str = "device: paper (there is no other)"
    steps: int = 3
    done: list = field(default_factory=list)

    def rows(self, advance):
        for row in ROWS:
            advance(1)
            yield dict(row)
        self.done.append(True)

    def about(self):
        assert self.done, "asked after the rows"
        return {"device": {"name": "paper"}}

    @staticmethod
    def table(data):
        rows = [[row["way"], study.cell(row["time_ms"], ".2f")] for row in data["rows"]]
        return Table(["<way", "time ms"], rows, data["device"]["name"])


def test_a_study_is_run_with_its_notes_and_its_progress():
    notes, began, steps = [], [], []

    def progress(total, label):
        began.append((total, label))
        return steps.append

    data = study.run(Invented(), progress=progress, note=notes.append)
    assert data == {"device": {"name": "paper"}, "rows": ROWS}
    assert notes == ["device: paper (there is no other)"]
    assert began == [(3, "measuring")] and steps == [1, 1, 1]
    quiet = study.run(Invented(device_note=""), note=notes.append)
    assert quiet["rows"] == ROWS and len(notes) == 1


def test_csv_has_the_columns_and_no_more():
    rows = list(csv.reader(io.StringIO(study.as_csv(Invented, {"rows": ROWS}))))
    assert rows[0] == list(Invented.columns)
    assert rows[1:] == [["one", "BM=8 BN=4", "1.5", "passed"], ["two", "", "", "FAILED"],
                        ["three", "", "", ""]]  # fmt: skip


def test_wrong_rows_are_found_and_tables_shown(capsys):
    data = study.run(Invented())
    assert [row["way"] for row in study.failed(data)] == ["two"]
    study.show(Invented, data)
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["one", "1.50"] in shown and ["two"] in shown


@pytest.mark.parametrize(
    "made",
    [
        lambda: KernelStudy([], [(8, 8, 8)], device="cpu", layouts=["xx"]),
        lambda: KernelStudy([], [(8, 8, 8)], device="cpu", samples=0),
        lambda: KernelStudy([], [(8, 8, 8)], device="cpu", cold=True),
        lambda: KernelStudy([], [(8, 8, 8)], device="cpu", dtypes=["int8"]),
        lambda: AccuracyStudy([(8, 8, 8)], device="cpu", data=["odd"]),
        lambda: LibraryStudy([(8, 8, 8)], device="cpu", samples=0),
        lambda: LibraryStudy([(8, 8, 8)], device="none"),
    ],
)
def test_choices_are_checked_before_anything_is_measured(made):
    with pytest.raises(UsageError):
        made()


def test_kernels_are_compared_by_samples_of_the_same_turns():
    """The clock of a GPU changes: of a kernel that is timed longer, other samples count."""
    timing = KernelStudy([], [(8, 8, 8)], device="cpu", samples=12)
    turns = itertools.count()
    steady, wavering = (
        kernels._Timed({}, sample) for sample in (lambda: 1.0, lambda: 1.0 + next(turns) % 2)
    )
    timing._sample_in_turn([steady, wavering])
    assert len(steady.taken) == len(wavering.taken) == 12
    timing._sample_in_turn(alone := [kernels._Timed({}, lambda: 1.0)])
    assert len(alone[0].taken) == kernels.LEAST_SAMPLES
