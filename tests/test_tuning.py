"""Choosing a kernel where tables or no model are, and `hybrid-gemm tune --shapes`. Pure."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_gemm import catalog
from hybrid_gemm.bench import tune
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import model_files, on_gpu, tables
from hybrid_gemm.kernel_choice.on_gpu import strict
from hybrid_gemm.kernel_choice.tables import Machine
from hybrid_gemm.kernel_choice.time_model import candidates, predict_us, worth_timing
from hybrid_gemm.problem import Problem

UNTUNED = Machine("Some GPU", 80, 80, 20.0)
side = st.sampled_from([1, 2, 16, 100, 1000, 4096, 20000])


def row(m, n, k, kernel, time_ms, layout="nn", dtype="float32", **params):
    return {"m": m, "n": n, "k": k, "kernel": kernel, "time_ms": time_ms, "layout": layout,
            "dtype": dtype, "params": params, "verdict": "passed"}  # fmt: skip


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """A machine with a user's table, and no model."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    monkeypatch.setattr(tables, "HERE", tmp_path / "none")
    monkeypatch.setattr(model_files, "HERE", tmp_path / "none")
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
    on_gpu.forget()
    yield machine
    on_gpu.forget()


def test_a_measured_shape_gets_what_was_fastest_there(tuned):
    variant, why = strict(tuned, Problem(1024, 1024, 1024))
    assert variant.name == "naive" and why == "fastest measured at 1024 x 1024 x 1024 nn"
    assert strict(tuned, Problem(8192, 8192, 8192))[0].name == "cublas"
    assert strict(tuned, Problem(8192, 8192, 8192), own=True)[0].name == "shared_tile"
    tt, _why = strict(tuned, Problem(8192, 8192, 8192), "tt")
    assert tt.name == "shared_tile" and tt.params == {"TILE": 32}, "layouts have their own rows"


def test_without_a_model_it_is_the_library_or_what_the_rough_model_prefers(tuned):
    variant, why = strict(tuned, Problem(1023, 1024, 1024))
    assert variant.name == "cublas" and why == "no model of times for such a GPU"
    variant, why = strict(tuned, Problem(2048, 2048, 2048, "int32"))
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
    on_gpu.forget()
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    best = {}
    for row in tables.table(machine):
        case = row["m"], row["n"], row["k"], row["dtype"], row["layout"]
        best[case] = min(best.get(case, row), row, key=lambda r: r["time_ms"])
    assert len(best) > 100
    for (m, n, k, dtype, layout), row in best.items():
        variant, why = strict(machine, Problem(m, n, k, dtype), layout)
        assert (variant.name, variant.params) == (row["kernel"], row["params"]), why
    on_gpu.forget()


def test_what_a_user_measured_comes_before_the_same_shape_of_the_shipped_table(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    machine = Machine("NVIDIA H200", 132, 90, 66.9)
    mine = [row(4096, 4096, 4096, "naive", 1e-3, BM=16, BN=16)]
    tables.user_table(machine.model).write_text(json.dumps({"rows": mine}))
    on_gpu.forget()
    assert strict(machine, Problem(4096, 4096, 4096))[0].name == "naive"
    assert strict(machine, Problem(8192, 8192, 8192))[0].name == "tuned"
    assert len([r for r in tables.table(machine) if tables.case(r) == tables.case(mine[0])]) == 1
    on_gpu.forget()


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
    variant, why = strict(UNTUNED, problem, own=own)
    assert why in ("by the cost model", "no model of times for such a GPU")
    assert variant.refusal(device="cuda", dtype=dtype, m=m, n=n, k=k) is None
    assert not (own and variant.kernel.library)
    assert predict_us(variant, UNTUNED, problem) > 0


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sides", [(47213, 18, 57), (19, 85617, 122), (500, 500, 500)])
@pytest.mark.parametrize(("arch", "kib"), [(70, 96), (75, 64), (86, 99)])
def test_an_untuned_gpu_gets_what_its_shared_memory_holds(arch, kib, sides, own):
    machine, problem = Machine("Some GPU", 82, arch, 10.0, kib * 1024), Problem(*sides, "int64")
    chosen = [strict(machine, problem, own=own)[0], *worth_timing(machine, problem)]
    for variant in (v for v in chosen if not v.kernel.library):
        assert variant.launch(*sides, "int64").shared_bytes <= kib * 1024


def test_an_a100_has_room_for_the_largest_tiles_of_float64():
    machine = Machine("NVIDIA A100", 108, 80, 9.7, 163 * 1024)
    variant, _why = strict(machine, Problem(4096, 4096, 4096, "float64"), own=True)
    assert variant.name == "mma_double" and variant.tile == (128, 128)


def test_the_cost_model_prefers_block_tiles_for_large_products():
    for dtype in ("float32", "int32"):
        variant, _ = strict(UNTUNED, Problem(4096, 4096, 4096, dtype), own=True)
        assert variant.params["BM"] >= 64, str(variant)


def test_hopeless_variants_are_not_timed_and_libraries_always_are():
    worth = worth_timing(UNTUNED, Problem(4096, 4096, 4096))
    names = {v.name for v in worth}
    assert "cublas" in names and "tuned" in names
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
    problem = Problem(4096, 4096, 4096)
    few, full = (tune.worth_timing(Gpu(), quick)(problem, "nn") for quick in (True, False))
    assert {v.name for v in few} == {"cublas", "tuned"} and len(few) == 2 < len(full)


def test_tuning_keeps_what_it_did_not_measure(tmp_path, monkeypatch):
    """And times of what was not timed now."""
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
    tune.keep(tune.table_file(Gpu.model, str(file)), data)
    assert [(r["m"], r["kernel"]) for r in tables.read_rows(file)] == [
        (9, "naive"), (8, "cublas"), (8, "naive"), (4096, "cublas"),
    ]  # fmt: skip
    tune.keep(tune.table_file(Gpu.model), data)
    assert tables.user_table(Gpu.model).is_file()
    on_gpu.forget()


def test_a_file_that_is_no_table_is_refused_before_timing(tmp_path):
    file = tmp_path / "t.json"
    file.write_text("[]")
    with pytest.raises(UsageError, match="no table"):
        tune.table_file(Gpu.model, str(file))


def test_tuning_shows_shapes_where_none_of_ours_was_timed(capsys):

    timed = [row(8, 8, 8, "cublas", 2.0), row(9, 9, 9, "cublas", 2.0), row(8, 8, 8, "naive", 3.0)]
    for each in timed:
        each["ratio_to_cublas"] = None
    tune.print_kernels({"device": {"name": "Test GPU 9002"}, "rows": timed, "table": "t.json"})
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["9", "nn", "float32", "cublas"] in shown
    assert ["8", "nn", "float32", "cublas", "3"] in shown


def test_a_variant_may_ask_for_all_the_shared_memory_of_a_block_and_no_more():
    problem, variant = Problem(700, 900, 300), catalog.get("shared_tile").variant()
    asked = variant.launch(700, 900, 300, "float32").shared_bytes
    for there, fits in ((None, True), (asked, True), (asked - 1, False)):
        machine = Machine("Some GPU", 80, 80, 20.0, there)
        assert (variant in candidates(machine, problem)) == fits
        assert "cublas" in {v.name for v in candidates(machine, problem)}


def test_a_rough_time_is_that_of_memory_or_of_the_arithmetic():
    """In microseconds, of a GPU of 20 TFLOP/s, to whose memory 1.25 TB/s are granted."""
    library = catalog.get("cublas").variant()
    for sides, us in (
        ((1, 10**6, 10**3), 4 + 4 * (1e3 + 1e9 + 1e6) / 1.25e6),
        ((10**6, 1, 10**3), 4 + 4 * (1e9 + 1e3 + 1e6) / 1.25e6),
        ((2000, 3000, 4000), 4 + 2 * 2000 * 3000 * 4000 / (0.75 * 20e6)),
    ):
        assert predict_us(library, UNTUNED, Problem(*sides)) == pytest.approx(us)
    one, two = (predict_us(library, Machine("?", 80, 80, x), Problem(9, 9, 9)) for x in (None, 1.0))
    assert one == two > 4
