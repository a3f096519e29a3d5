"""Files of models of times: the user's and the shipped, damaged and of other versions."""

import zipfile

import numpy as np
import pytest
from support.fitted import MACHINE, invented, written

from hybrid_gemm import catalog
from hybrid_gemm.bench import drawing, fitting
from hybrid_gemm.errors import UsageError
from hybrid_gemm.kernel_choice import (
    choices,
    fitted,
    likeness,
    model_files,
    on_gpu,
)
from hybrid_gemm.kernel_choice.tables import Machine


def test_the_users_model_comes_before_the_shipped_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    on_gpu.forget()
    file = written(model_files.users_file(MACHINE.model, "float32"), invented(lead=0.5))
    on_gpu.forget()
    model = model_files.model(MACHINE, "float32")
    assert model is not None and len(model.fitted) == 4
    damaged = file.read_bytes()
    file.write_bytes(damaged[: len(damaged) // 2])
    on_gpu.forget()
    model = model_files.model(MACHINE, "float32")
    assert model is not None and len(model.fitted) > 30
    assert "is no model of `hybrid-gemm tune`" in capsys.readouterr().err
    on_gpu.forget()
    with pytest.raises(UsageError, match="is no model"):
        model_files.read(file, MACHINE)


def test_a_model_of_another_likeness_is_left_out(tmp_path, monkeypatch, capsys):
    """Its weights are of that; by this one they predict times that are off by a factor of 100."""
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    with monkeypatch.context() as before:
        before.setattr(likeness, "_LENGTH", 2 * likeness._LENGTH)
        before.setattr(likeness, "CONSTANTS", [2 * likeness.CONSTANTS[0], *likeness.CONSTANTS[1:]])
        file = written(model_files.users_file(MACHINE.model, "float32"), invented(lead=0.5))
    on_gpu.forget()
    model = model_files.model(MACHINE, "float32")
    on_gpu.forget()
    assert model is not None and len(model.fitted) > 30  # the shipped one
    assert f"{file} is of another version of hybrid-gemm" in capsys.readouterr().err


def test_a_model_has_nothing_of_kernels_and_parameters_that_are_gone():
    measured = invented()
    data = fitting.data(measured, fitting.fit(measured, measured.counts(132)), MACHINE)
    names = [x.variant.name for x in model_files.from_data(data, MACHINE).fitted]
    first, second, *_others = data["about"]["variants"]
    first["kernel"], second["params"]["OLD"] = "gone", 1
    assert [x.variant.name for x in model_files.from_data(data, MACHINE).fitted] == names[2:]


def test_a_model_with_a_flipped_bit_is_no_model_or_the_same(tmp_path):
    """Whichever of the archive's layers it hits: names, lengths, compressed bytes, checksums."""
    machine, file, path = Machine("NVIDIA H200", 132, 90, 66.9), tmp_path / "whole", tmp_path / "x"
    shipped = model_files.shipped(machine, "int32")
    data = model_files.as_bytes(
        shipped | {"about": shipped["about"] | {"likeness": likeness.CONSTANTS}}
    )  # fmt: skip
    file.write_bytes(data)
    whole, refused = model_files.read(file, machine), 0
    for at in range(0, len(data), len(data) // 100):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            np.testing.assert_array_equal(model_files.read(path, machine).places, whole.places)
        except UsageError:
            refused += 1
    assert refused > 80


@pytest.mark.parametrize("header", ["{'descr': ('<f4', }\n", "{'descr': ('<f4'\n", "{'descr': '\n"])
def test_a_model_with_a_broken_header_is_no_model(tmp_path, header):
    """NumPy reads it by Python's own parser, whose errors come through."""
    path = tmp_path / "x"
    with zipfile.ZipFile(path, "w") as archive:
        start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        archive.writestr("about.npy", start + header.encode())
    with pytest.raises(UsageError, match="is no model"):
        model_files.read(path, Machine("NVIDIA H200", 132, 90, 66.9))


@pytest.fixture(scope="module")
def whole():
    """The data of a model with a library, of some of its shapes."""
    data = model_files.shipped(LIKE, "float32")
    few = {
        name: data[name] if name == "reaches" else data[name][..., :50]
        if name in ("errors", "weights") else data[name][:50]
        for name in ARRAYS
    }  # fmt: skip
    return few | {"about": data["about"] | {"likeness": likeness.CONSTANTS}}


LIKE = Machine("NVIDIA H200", 132, 90, 66.9)
ARRAYS = (
    "sides", "layouts", "errors", "weights", "reaches", "library_sides", "library_layouts",
    "library_launched", "library_weights", "library_errors",
)  # fmt: skip
ABOUT = "model", "arch", "multiprocessors", "mode", "variants", "library"
LIBRARY = "kernel", "kernels", "constants", "mean"
VARIANT = "kernel", "params", "constants", "mean"

OF_ITS_KIND = {
    "model": ["x"], "mode": ["x"], "variants": [[]], "library": [{}, None], "kernel": ["x"],
    "kernels": [[]], "params": [{}], "constants": [[]], "mean": [7.5],
}  # fmt: skip


def refusal(path, data):
    """What is said of a file of this data: one line, with what is wrong."""
    path.write_bytes(model_files.as_bytes(data))
    with pytest.raises(UsageError) as error:
        model_files.read(path, LIKE)
    words = str(error.value)
    before, after = f"{path} is no model of `hybrid-gemm tune`, ", ": remove it, or run tune again"
    assert words.startswith(before) and words.endswith(after) and "\n" not in words
    return words.removeprefix(before).removesuffix(after)


def test_the_data_that_is_damaged_here_is_a_model(tmp_path, whole):
    (tmp_path / "x").write_bytes(model_files.as_bytes(whole))
    assert model_files.read(tmp_path / "x", LIKE).library is not None
    assert set(whole) == {"about", *ARRAYS} and set(whole["about"]) == {"likeness", *ABOUT}
    assert set(whole["about"]["library"]) == set(LIBRARY)
    assert set(whole["about"]["variants"][0]) == set(VARIANT)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_a_model_lacks_or_that_is_another_is_named(tmp_path, whole, name):
    path, found = tmp_path / "x", whole[name]
    without = {x: y for x, y in whole.items() if x != name}
    assert refusal(path, without) == f"it has no {name}"
    assert refusal(path, whole | {name: found[:0]}) == f"{name} is empty"
    for other in (np.array(["x"]), found.astype("c8") if found.dtype.kind != "U" else found[None]):
        assert refusal(path, whole | {name: other}).startswith(f"{name} is {other.dtype} of ")
    assert "not " in refusal(path, whole | {name: found[:-1]})


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(("about", x) for x in ABOUT), *(("library", x) for x in LIBRARY),
        *(("an entry of variants", x) for x in VARIANT),
    ],
)  # fmt: skip
def test_what_a_model_does_not_say_of_itself_is_named(tmp_path, whole, part, name):
    def changed(change):
        about = whole["about"]
        match part:
            case "about":
                about = change(about)
            case "library":
                about = about | {"library": change(about["library"])}
            case _:
                first, *others = about["variants"]
                about = about | {"variants": [change(first), *others]}
        return refusal(tmp_path / "x", whole | {"about": about})

    left_out = changed(lambda of: {x: y for x, y in of.items() if x != name})
    assert left_out == f"{part} has no {name}"
    for wrong in (7.5, "x", [], {}, None):
        if wrong in OF_ITS_KIND.get(name, ()):
            continue
        assert changed(lambda of, wrong=wrong: of | {name: wrong}).startswith(
            f"{name} of {part} cannot be "
        )


def test_contents_that_mean_nothing_are_named(tmp_path, whole):
    path, about = tmp_path / "x", whole["about"]
    first, *others = about["variants"]

    def said(**changes):
        return refusal(path, whole | {"about": about | changes})

    assert said(mode="float8") == "there is no mode 'float8'"
    assert said(variants=[]) == "variants is empty"
    assert said(library={}) == "library has no kernel"
    assert said(library=about["library"] | {"kernel": "x"}) == "there is no kernel 'x'"
    assert "kernels that library has not" in said(library=about["library"] | {"kernels": []})
    assert "numbers, and not []" in said(variants=[first | {"constants": []}, *others])
    assert "9 numbers" in said(library=about["library"] | {"constants": [1.0]})
    names = about["library"] | {"kernels": [["x"], *about["library"]["kernels"][1:]]}
    assert said(library=names).startswith("kernels of library are names, and not [['x'], ")
    layouts = np.full_like(whole["layouts"], "xy")
    assert refusal(path, whole | {"layouts": layouts}) == "layouts are words such as nt"


@pytest.mark.parametrize("number", [np.inf, np.nan, 10**400], ids=["Inf", "NaN", "huge"])
def test_numbers_that_float64_does_not_hold_are_named(tmp_path, whole, number):
    """Of these no time was predicted, or the choice failed with an error of Python's."""
    about = whole["about"]
    first, *others = about["variants"]
    for changes, words in (
        ({"mean": number}, "mean of an entry of variants cannot be "),
        ({"constants": [number, *first["constants"][1:]]}, "constants of "),
    ):
        changed = about | {"variants": [first | changes, *others]}
        assert refusal(tmp_path / "x", whole | {"about": changed}).startswith(words)


@pytest.mark.parametrize("name", ["errors", "weights", "reaches", "library_weights"])
def test_an_array_with_inf_is_named(tmp_path, whole, name):
    damaged = whole[name].astype("f8")
    damaged.flat[-1] = np.inf
    assert refusal(tmp_path / "x", whole | {name: damaged}) == f"{name} has Inf or NaN"


@pytest.mark.parametrize("name", ["sides", "library_sides", "library_launched"])
def test_sides_and_launches_below_one_are_named(tmp_path, whole, name):
    damaged = whole[name].copy()
    damaged[-1, -1] = 0
    assert refusal(tmp_path / "x", whole | {name: damaged}) == f"{name} has some below 1"


def test_a_model_has_nothing_of_parameters_that_rules_refuse_now():
    measured = invented()
    data = fitting.data(measured, fitting.fit(measured, measured.counts(132)), MACHINE)
    kept = len(model_files.from_data(data, MACHINE).fitted)
    params = data["about"]["variants"][0]["params"]
    params[next(iter(params))] = 0
    assert len(model_files.from_data(data, MACHINE).fitted) == kept - 1


@pytest.mark.parametrize("mode", fitted.OPERANDS)
def test_shipped_models_choose_something_that_runs(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    on_gpu.forget()
    model = model_files.model(MACHINE, mode)
    assert model is not None
    known = {str(v) for k in catalog.kernels().values() for v in k.variants()}
    assert {str(f.variant) for f in model.fitted} <= known
    for drawn in drawing.draw(11, 25, drawing.FITTED):
        for own in (False, True):
            choice = choices.chosen(model, drawn.shape, drawn.layout, MACHINE, own=own)
            assert 1 < choice.us < 1e6 and 0 < choice.error < 1
            assert not (own and choice.variant.kernel.library)
    on_gpu.forget()
