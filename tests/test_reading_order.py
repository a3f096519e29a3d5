"""In which order plans read A, B and C, and which bytes of files that is."""

import numpy as np
import pytest
from support.devices import needs

import hybrid_gemm
from hybrid_gemm import Runner
from hybrid_gemm.arrays import mapped_files
from hybrid_gemm.arrays.npy_files import NpyFile, NpyWriter
from hybrid_gemm.planning.hardware import DeviceSpec
from hybrid_gemm.planning.partition import Span
from hybrid_gemm.planning.planner import make_plan
from hybrid_gemm.planning.reading_order import Need, reading_order
from hybrid_gemm.problem import Problem, make_problem


def plan(m, n, k, **options):
    return hybrid_gemm.plan(m, n, k, device="cpu", **options)


def test_the_host_begins_with_b_and_goes_through_the_rows_of_a():
    found = reading_order(plan(640, 320, 160))
    assert found[0] == Need("B", Span(0, 160), Span(0, 320), 0.0, 1.0)
    rest = found[1:]
    assert {need.operand for need in rest} == {"A"}
    assert [need.rows.start for need in rest] == sorted(need.rows.start for need in rest)
    assert sum(len(need.rows) for need in rest) == 640
    assert rest[8].start == pytest.approx(0.5)


def test_workers_that_cut_k_begin_together():
    found = reading_order(plan(640, 320, 160, threads=2, split="cols"))
    first = [(need.operand, need.rows if need.operand == "B" else need.cols) for need in found[:4]]
    assert {first[0], first[2]} == {("B", Span(0, 80)), ("B", Span(80, 160))}
    assert {first[1], first[3]} == {("A", Span(0, 80)), ("A", Span(80, 160))}


def test_shares_of_a_product_in_turns_on_the_host_follow_one_another():
    small = DeviceSpec("cpu", "cpu", 0, 3 << 20, 0.1, 10, host_memory=True, on_gpu=False)
    made = make_plan(Problem(700, 500, 600), [small], 3, split="cols")
    found = reading_order(made)
    assert made.turns > 1 and max(need.start for need in found) > 0.5
    assert all(need.start < need.stop <= 1 for need in found)


@needs("emulator")
@pytest.mark.parametrize("options", [{}, {"threads": 3}, {"threads": 3, "split": "cols"},
                                     {"max_device_memory": 3 << 20}])  # fmt: skip
def test_all_of_a_and_b_is_read_by_any_plan(options):
    made = hybrid_gemm.plan(700, 500, 600, device="emulator", **options)
    read = {"A": np.zeros((700, 600), bool), "B": np.zeros((600, 500), bool)}
    last = 0.0
    for need in reading_order(made):
        read[need.operand][need.rows.slice, need.cols.slice] = True
        assert last <= need.start < need.stop <= 1
        last = need.start
    assert read["A"].all() and read["B"].all()


@needs("emulator")
@pytest.mark.parametrize("split", ["rows", "cols"])
def test_c_is_read_once_where_beta_scales_it(split):
    a, b, c = np.ones((300, 200), "f4"), np.ones((200, 100), "f4"), np.ones((300, 100), "f4")
    with Runner(device="emulator", threads=2, split=split) as runner:
        made = runner.plan(make_problem(a, b, c, beta=2.0))
    rows = [need.rows for need in reading_order(made) if need.operand == "C"]
    assert sum(map(len, rows)) == 300


# --- bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_the_bytes_of_a_part_are_found_however_it_lies(tmp_path, rng, fortran, turned):
    whole = rng.random((40, 90_000)).astype("f4")
    np.save(tmp_path / "A.npy", np.asfortranarray(whole) if fortran else whole)
    file = NpyFile(tmp_path / "A.npy")
    part = file.array[10:20, 30_000:45_000]
    part = part.T if turned else part
    assert mapped_files.file_of(part, NpyFile) is file
    data, found = (tmp_path / "A.npy").read_bytes(), list(mapped_files.ranges(part, file))
    assert len(found) == (1 if fortran else 10)
    if not fortran:
        for i, (start, stop) in enumerate(found):
            row = np.frombuffer(data[start:stop], "f4")
            np.testing.assert_array_equal(row, whole[10 + i, 30_000:45_000])
    else:
        ((start, stop),) = found
        assert start == file.offset + 4 * (30_000 * 40 + 10)
        assert stop == file.offset + 4 * (44_999 * 40 + 20)


def test_other_arrays_lie_in_no_file(tmp_path, rng):
    np.save(tmp_path / "A.npy", rng.random((4, 4)))
    file = NpyFile(tmp_path / "A.npy")
    assert mapped_files.file_of(file.array.copy(), NpyFile) is None
    assert mapped_files.file_of(file.array, NpyWriter) is None
    assert mapped_files.file_of(file.array[:0], NpyFile) is None
    assert mapped_files.file_of("text", NpyFile) is None
