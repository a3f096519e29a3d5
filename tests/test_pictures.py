"""Pictures of experiments and of benchmarks, and the command that draws them."""

import json
import re

import pytest
from click.testing import CliRunner
from support import invented

from hybrid_gemm.cli import cli
from hybrid_gemm.cli.pictures import pictures
from hybrid_gemm.errors import UsageError
from hybrid_gemm.experiments import engine, output
from hybrid_gemm.reporting import plots
from hybrid_gemm.reporting.pictures import Line, Panel, Picture, machine, machines

EXPERIMENTS = engine.experiments()
DRAWN = [name for name, experiment in EXPERIMENTS.items() if experiment.picture]


@pytest.fixture(scope="module")
def full():
    return invented.results()


def rows(data, name: str) -> list:
    (found,) = (x["rows"] for x in data["experiments"] if x["name"] == name)
    return found


@pytest.mark.parametrize("name", DRAWN)
def test_every_picture_has_labels_with_units(full, name):
    picture = pictures(full)[name]
    for panel in picture.panels:
        assert panel.lines, name
        label = panel.y or picture.y
        units = ("(", "%", "TFLOP/s", "time", "times")
        assert any(unit in label for unit in units), (name, label)
        assert panel.bars or panel.x or picture.x
        for line in panel.lines:
            assert len(line.x) == len(line.y) and line.label
    image = plots.draw(picture).decode()
    assert image.count("<text") > 5 and "<svg" in image
    assert machine(full["device"]["name"]) in image, "the machine is named"


def test_limits_and_emulation_are_tables_without_a_picture(full):
    assert set(EXPERIMENTS) - set(DRAWN) == {"device_query", "emulation"}
    assert set(output.pictures_of(full)) == set(DRAWN)


def test_the_time_of_columns_is_in_ms_with_its_last_values(full):
    picture = pictures(full)["column_split"]
    image = plots.draw(picture).decode()
    assert picture.y == "time (ms)" and ">6059<" in image and ">920<" in image
    assert [panel.title.split("\n")[0].split(", ")[-1] for panel in picture.panels[1:]] == [
        machines(max(r["devices"] for r in rows(full, "column_split") if r["way"] == way),
                 machine(full["device"]["name"]))
        for way in ("the lab's way", "ours")
    ]  # fmt: skip


def test_a_legend_is_above_the_lines(full):
    pytest.importorskip("matplotlib")
    image = plots.draw(pictures(full)["row_split"]).decode()
    heights = {}
    for name in ("axes_1", "legend_1"):  # the frame of each is its first path
        path = image.partition(f'id="{name}"')[2].partition('<path d="')[2].partition('"')[0]
        heights[name] = [float(x) for x in re.findall(r"[\d.]+", path)][1::2]
    assert max(heights["legend_1"]) <= min(heights["axes_1"])


@pytest.mark.parametrize("names", [1, 6])
def test_long_labels_are_in_the_picture(names):
    """Of which a legend above leaves less."""
    matplotlib = pytest.importorskip("matplotlib")
    y = "times as long as hybrid-gemm (cpu, 2 cores)"
    lines = [Line(f"a rather long name {i}", ["8192"], [i + 1.0], i) for i in range(names)]
    with matplotlib.rc_context(plots.SETTINGS):
        figure = plots._panels(Picture([Panel(lines, bars=True)], "m = n = k", y))
        figure.draw_without_rendering()
        label = figure.axes[0].yaxis.label
        box = label.get_window_extent()
    assert box.y0 >= 0 and box.y1 <= figure.bbox.height and box.x0 >= 0
    assert label.get_text().split() == y.split()


def test_theirs_differ_from_ours_without_colour(full):
    image = plots.draw(pictures(full)["register_tiles"]).decode()
    assert image.count("stroke-dasharray") >= 1  # theirs is dashed


def test_sizes_that_are_not_the_published_ones_are_named():
    small = pictures(invented.results("small"))
    for name in ("shared_tiles", "register_tiles"):
        theirs, ours = small[name].panels[0].lines
        assert theirs.label.endswith("m = n = k = 1024") and ours.label.endswith("m = n = k = 64")
        assert "1024" not in small[name].y
    theirs, ours = small["ladder"].panels
    assert theirs.title.endswith("K = 1024") and ours.title.endswith("K = 64")


@pytest.mark.parametrize("name", ["column_split", "row_split"])
@pytest.mark.parametrize("scale", ["small", "full"])
def test_published_times_stand_beside_ours_of_their_size(name, scale):
    experiment = EXPERIMENTS[name]
    for device in ("cpu", "cuda", "emulator"):
        rows = [dict(p.row) for p in experiment.points(scale, device)]
        panels = experiment.picture(experiment.beside(rows), experiment.theirs(), "machine").panels
        text = " ".join([p.title for p in panels] + [x.label for p in panels for x in p.lines])
        assert len(set(re.findall(r"k = (\d+)", text))) == 1, (device, text)


def test_shares_of_a_peak_are_not_drawn_without_a_card(full):
    data = json.loads(json.dumps(full))
    data["device"] = {"kind": "emulator", "name": "emulator:0"}
    for row in rows(data, "ladder") + rows(data, "occupancy"):
        row.pop("peak_gflops", None)
    found = pictures(data)
    assert [panel.title for panel in found["ladder"].panels] == ["published, V100\nK = 1024"]
    assert found["occupancy"].y == "occupancy (%)", "computed, and of no emulator"


@pytest.mark.slow
def test_pictures_without_our_rows():
    for experiment in EXPERIMENTS.values():
        rows = [dict(p.row) | {"note": "not here"} for p in experiment.points("small", "cpu")]
        if experiment.picture:
            assert plots.draw(
                experiment.picture(experiment.beside(rows), experiment.theirs(), "cpu"), "png"
            )


def test_plot_command(tmp_path, full):
    file = tmp_path / "results.json"
    file.write_text(json.dumps(full))
    run = CliRunner().invoke
    made = run(cli, ["plot", str(file), "ladder", "-o", str(tmp_path / "ladder.png")])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    missing = run(cli, ["plot", str(file), "-o", str(tmp_path / "x.svg")])
    assert isinstance(missing.exception, UsageError)
    assert "several pictures: name one; there are" in str(missing.exception)
    unknown = run(cli, ["plot", str(file), "ladr", "-o", str(tmp_path / "x.svg")])
    assert "has no picture 'ladr' (did you mean ladder?); there are" in str(unknown.exception)
    file.write_text('{"plan": {}}')
    other = run(cli, ["plot", str(file), "-o", str(tmp_path / "x.svg")])
    assert f"{file} has nothing to draw; give a file of bench --json" in str(other.exception)
    wrong = run(cli, ["plot", str(file), "ladder", "-o", str(tmp_path / "x.pdf")])
    assert isinstance(wrong.exception, UsageError)


def test_plot_of_a_bench(tmp_path):
    def row(m, k, dtype="float32"):
        return {"kernel": "naive", "params": {}, "m": m, "n": m, "k": k, "dtype": dtype,
                "layout": "nn", "gflops": 2.0}  # fmt: skip

    rows = [row(64, 64), row(128, 64), row(256, 64, "float64"), row(256, 256)]
    data = {"rows": rows, "device": {"name": "cpu"}}
    picture = pictures(data)["bench"]
    assert [panel.title for panel in picture.panels] == ["K = 64", "m = n = k"]
    assert [line.label for line in picture.panels[0].lines] == ["naive float32", "naive float64"]
    assert picture.panels[1].lines[0].x == [64, 256]
    assert plots.draw(picture, "png").startswith(b"\x89PNG")
    assert pictures({"problem": {}}) == {}
