"""Choosing a kernel: from measured tables, or by the cost model. Pure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import nearest_measured, tables
from hybrid_gemm.kernel_choice.nearest_measured import Machine, fastest
from hybrid_gemm.kernel_choice.time_model import predict_us, worth_timing
from hybrid_gemm.problem import Problem

UNTUNED = Machine("Some GPU", 80, 80, 20.0)
side = st.sampled_from([1, 2, 16, 100, 1000, 4096, 20000])


def row(m, n, k, kernel, time_ms, layout="nn", dtype="float32", **params):
    return {"m": m, "n": n, "k": k, "kernel": kernel, "time_ms": time_ms, "layout": layout,
            "dtype": dtype, "params": params, "verdict": "passed"}  # fmt: skip


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A machine with a user's table."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "HERE", tmp_path / "none")
    machine = Machine("Test GPU 9000", 132, 90, 60.0)
    rows = [
        row(1024, 1024, 1024, "cublas", 1.0),
        row(1024, 1024, 1024, "naive", 0.9, BM=16, BN=16),
        row(8192, 8192, 8192, "cublas", 1.0),
        row(8192, 8192, 8192, "shared_tile", 2.0, TILE=16),
        row(8192, 8192, 8192, "shared_tile", 0.1, "tt", TILE=32),
        row(8192, 8192, 8192, "retired_kernel", 0.01),
    ]
    tables.user_table(machine.model).write_text(json.dumps({"rows": rows}))
    nearest_measured.forget()
    yield machine
    nearest_measured.forget()


def test_the_nearest_measured_shape_decides(tuned):
    variant, why = fastest(tuned, Problem(1020, 1028, 1024))
    assert variant.name == "naive" and "1024 x 1024 x 1024 nn" in why
    assert fastest(tuned, Problem(9000, 9000, 9000))[0].name == "cublas"
    assert fastest(tuned, Problem(9000, 9000, 9000), own=True)[0].name == "shared_tile"


def test_far_from_what_was_measured_the_library_is_taken(tuned):
    variant, why = fastest(tuned, Problem(300, 1100, 100))
    assert variant.name == "cublas" and "not measured near" in why


def test_without_a_library_times_are_carried_over_from_every_measured_shape(tuned):
    """naive is measured nearer, but took 0.9 ms for what shared_tile should do far faster."""
    variant, why = fastest(tuned, Problem(300, 1100, 100), own=True)
    assert variant.name == "shared_tile" and "8192 x 8192 x 8192" in why
    assert fastest(tuned, Problem(1024, 1024, 1024), own=True)[0].name == "naive", "as measured"


WIDE = {"BM": 128, "BN": 256, "BK": 8, "TM": 16, "TN": 8, "LM": 4, "KG": 1, "HOPS": 1,
        "STAGES": 5, "BLOCKS": 132, "SPLIT": 132}  # fmt: skip
DEEP = {"BM": 64, "BN": 128, "BK": 16, "TM": 16, "TN": 8, "LM": 4, "KG": 4, "HOPS": 1,
        "STAGES": 5, "BLOCKS": 132}  # fmt: skip


@pytest.fixture
def leading(tmp_path, monkeypatch):
    """A machine where our kernels lead clearly at some shapes and barely at others."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "HERE", tmp_path / "none")
    machine = Machine("Test GPU 9001", 132, 90, 60.0)
    rows = []
    for m, n, k, layout, kernel, lead, params in (
        (4096, 4096, 4096, "nn", "tuned", 1.1, WIDE),
        (4096, 4096, 4096, "tn", "tuned", 1.02, WIDE),
        (1024, 1024, 1024, "nn", "deep", 1.1, DEEP),
        (128, 128, 2**18, "nn", "deep", 1.1, DEEP),
    ):
        rows.append(row(m, n, k, "cublas", 1.0, layout))
        rows.append(row(m, n, k, kernel, 1 / lead, layout, **params))
    tables.user_table(machine.model).write_text(json.dumps({"rows": rows}))
    nearest_measured.forget()
    yield machine
    nearest_measured.forget()


@pytest.mark.parametrize(
    "shape, layout, taken",
    [
        ((4096, 4096, 4096), "tn", "tuned"),  # measured: any lead will do
        ((3000, 3000, 3000), "tn", "cublas"),  # not a clear lead
        ((4000, 4000, 4000), "tn", "tuned"),  # nor here, but many rounds of tiles
        ((4000, 4000, 800), "tn", "cublas"),  # of a short k
        ((4000, 4000, 4000), "nn", "tuned"),
        ((4001, 4001, 4001), "nn", "cublas"),  # rows off 16 bytes
        ((4000, 4000, 4000), "tt", "cublas"),  # another layout
        ((1020, 1020, 1020), "nn", "deep"),
        ((1040, 1040, 1040), "nn", "cublas"),  # a second round of tiles for what is left over
        ((100, 240, 40000), "nn", "deep"),  # 33 shares of k for each of 4 tiles
        ((128, 512, 40000), "nn", "deep"),  # 8 tiles
        ((68, 396, 40000), "nn", "cublas"),  # half of 8 tiles
        ((300, 300, 40000), "nn", "cublas"),  # 15 tiles
    ],
)
def test_a_lead_is_trusted_where_nothing_that_may_cost_it_differs(leading, shape, layout, taken):
    assert fastest(leading, Problem(*shape), layout)[0].name == taken


def test_which_sides_decide_whether_rows_begin_on_16_bytes():
    p = Problem(5, 8, 12)
    assert [nearest_measured._vectors(p, x) for x in ("nn", "nt", "tn", "tt")] == [
        True,
        True,
        False,
        False,
    ]


def test_layouts_have_rows_of_their_own(tuned):
    variant, _why = fastest(tuned, Problem(9000, 9000, 9000), "tt")
    assert variant.name == "shared_tile" and variant.params == {"TILE": 32}


def test_other_dtypes_fall_to_the_cost_model(tuned):
    variant, why = fastest(tuned, Problem(2048, 2048, 2048, "int32"))
    assert variant.name == "tuned" and why == "by the cost model"


def test_the_users_table_is_named_after_the_model():
    assert tables.file_name("NVIDIA H200") == "nvidia_h200.json"
    assert tables.file_name("NVIDIA GeForce RTX 4090 (x)") == "nvidia_geforce_rtx_4090_x.json"


def test_shipped_tables_name_kernels_that_exist():
    from hybrid_gemm import catalog

    for path in tables.HERE.glob("*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert rows
        listed = {
            (v.name, tuple(v.params.items())) for k in catalog.gemm_kernels() for v in k.variants()
        }
        missing = {r["kernel"] for r in rows} - {name for name, _ in listed}
        assert not missing, f"{path.name} was measured with kernels that are gone: {missing}"


def test_where_the_shipped_table_measured_the_fastest_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    nearest_measured.forget()
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    best = {}
    for row in tables.table(machine):
        case = row["m"], row["n"], row["k"], row["dtype"], row["layout"]
        best[case] = min(best.get(case, row), row, key=lambda r: r["time_ms"])
    assert len(best) > 100
    for (m, n, k, dtype, layout), row in best.items():
        variant, why = fastest(machine, Problem(m, n, k, dtype), layout)
        assert (variant.name, variant.params) == (row["kernel"], row["params"]), why
    nearest_measured.forget()


def test_a_table_of_a_gpu_like_it_stands_in(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    nearest_measured.forget()
    like, smaller = Machine("NVIDIA H999", 132, 90, 66.9), Machine("NVIDIA H998", 114, 90, 50.0)
    variant, why = fastest(like, Problem(4096, 4096, 4096))
    assert variant.name == "tuned" and why.startswith("fastest measured at 4096 x 4096 x 4096")
    assert " on NVIDIA H" in why
    assert tables.best_tflops(like, "float32") is None, "rates of another GPU are not its own"
    assert fastest(smaller, Problem(4096, 4096, 4096))[1] == "by the cost model"
    nearest_measured.forget()


def test_of_another_gpu_a_lead_has_to_be_clear(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "HERE", tmp_path)
    gpu = {"name": "Lender", "multiprocessors": 132, "compute_capability": "9.0"}
    rows = [
        row(512, 512, 512, "cublas", 1.0),
        row(512, 512, 512, "naive", 0.99, BM=16, BN=16),
        row(1024, 1024, 1024, "cublas", 1.0),
        row(1024, 1024, 1024, "naive", 0.9, BM=16, BN=16),
    ]
    table = {"environment": {"cuda": {"gpus": [gpu]}}, "rows": rows}
    (tmp_path / "lender.json").write_text(json.dumps(table))
    nearest_measured.forget()
    for name, barely in (("Lender", "naive"), ("Borrower", "cublas")):
        machine = Machine(name, 132, 90, 60.0)
        assert fastest(machine, Problem(512, 512, 512))[0].name == barely
        assert fastest(machine, Problem(1024, 1024, 1024))[0].name == "naive"
    nearest_measured.forget()


def test_what_a_user_measured_comes_before_the_same_shape_of_the_shipped_table(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    mine = [row(4096, 4096, 4096, "naive", 1e-3, BM=16, BN=16)]
    tables.user_table(machine.model).write_text(json.dumps({"rows": mine}))
    nearest_measured.forget()
    assert fastest(machine, Problem(4096, 4096, 4096))[0].name == "naive"
    assert fastest(machine, Problem(8192, 8192, 8192))[0].name == "tuned"
    assert len([r for r in tables.table(machine) if tables.case(r) == tables.case(mine[0])]) == 1
    nearest_measured.forget()


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"m": 1}]}', '{"rows": 5}'])
def test_what_is_no_table_is_named(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=r"x\.json is no table of `hybrid-gemm tune`"):
        tables.read_rows(tmp_path / "x.json")
    assert tables.read_rows(tmp_path / "y.json") == []


@pytest.mark.parametrize("thin, short", [(1, 1), (3, 4), (6, 8)])
def test_tiles_as_thin_as_the_product_are_timed(thin, short):
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    timed = worth_timing(machine, Problem(thin, 3000, 5000))
    assert (short, 64) in {(v.params["BM"], v.params["BN"]) for v in timed if v.name == "vector"}
    assert "vector" not in {v.name for v in worth_timing(machine, Problem(64, 3000, 5000))}


@given(side, side, side, st.sampled_from(["float32", "float64", "int32", "int64"]), st.booleans())
def test_an_untuned_gpu_gets_something_that_runs(m, n, k, dtype, own):
    problem = Problem(m, n, k, dtype)
    variant, why = fastest(UNTUNED, problem, own=own)
    assert why == "by the cost model"
    assert variant.refusal(device="cuda", dtype=dtype, m=m, n=n, k=k) is None
    assert not (own and variant.kernel.library)
    assert predict_us(variant, UNTUNED, problem) > 0


def test_the_cost_model_prefers_block_tiles_for_large_products():
    for dtype in ("float32", "int32"):
        variant, _ = fastest(UNTUNED, Problem(4096, 4096, 4096, dtype), own=True)
        assert variant.params["BM"] >= 64, str(variant)


def test_hopeless_variants_are_not_timed_and_libraries_always_are():
    worth = worth_timing(UNTUNED, Problem(4096, 4096, 4096))
    names = {v.name for v in worth}
    assert "cublas" in names and "double_buffered" in names
    assert not any(v.params == {"TILE": 1} for v in worth)


def test_persistent_kernels_scale_with_the_multiprocessors():
    from hybrid_gemm import catalog

    (variant, *_rest) = catalog.get("tuned").variants()
    assert variant.for_multiprocessors(132).params == variant.params
    assert variant.for_multiprocessors(66).params["BLOCKS"] == variant.params["BLOCKS"] // 2


class Gpu:
    """What choosing among kernels asks of a GPU."""

    model = "Test GPU 9002"

    def machine(self, dtype):
        return Machine(self.model, 132, 90, 66.9)


def test_quick_tuning_times_little_besides_the_library():
    from hybrid_gemm.bench import tune

    problem = Problem(4096, 4096, 4096)
    few, full = (tune.worth_timing(Gpu(), quick)(problem, "nn") for quick in (True, False))
    assert {v.name for v in few} == {"cublas", "tuned"} and len(few) == 2 < len(full)


def test_tuning_keeps_what_it_did_not_measure(tmp_path, monkeypatch):
    """And times of what was not timed now."""
    from hybrid_gemm.bench.tune import KernelTable

    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"rows": [row(9, 9, 9, "naive", 1.0), row(8, 8, 8, "naive", 1.0)]}))
    timed = [
        row(m, m, m, name, ms, **params)
        for m in (8, 4096)
        for name, ms, params in (("cublas", 2.0, {}), ("naive", 3.0, {"BM": 16, "BN": 16}))
    ]
    timed[-1]["time_ms"] = None
    data = {"device": {"kind": "cuda"}, "rows": timed}
    KernelTable(Gpu.model, str(file)).keep(data)
    assert [(r["m"], r["kernel"]) for r in tables.read_rows(file)] == [
        (9, "naive"), (8, "cublas"), (8, "naive"), (4096, "cublas"),
    ]  # fmt: skip
    KernelTable(Gpu.model).keep(data)
    assert tables.user_table(Gpu.model).is_file()
    nearest_measured.forget()


def test_a_file_that_is_no_table_is_refused_before_timing(tmp_path):
    from hybrid_gemm.bench.tune import KernelTable

    file = tmp_path / "t.json"
    file.write_text("[]")
    with pytest.raises(UsageError, match="no table"):
        KernelTable(Gpu.model, str(file))


def test_tuning_shows_shapes_where_none_of_ours_was_timed(capsys):
    from hybrid_gemm.bench import tune

    timed = [row(8, 8, 8, "cublas", 2.0), row(9, 9, 9, "cublas", 2.0), row(8, 8, 8, "naive", 3.0)]
    for each in timed:
        each["ratio_to_cublas"] = None
    tune.print_kernels({"device": {"name": "Test GPU 9002"}, "rows": timed, "table": "t.json"})
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["9", "nn", "float32", "cublas"] in shown
    assert ["8", "nn", "float32", "cublas", "3"] in shown
