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
OTHERS = (7.5, "x", [], {}, None, [["x"]], np.nan, 10**400)  # things that a file may say instead


def parts(of, path=()):
    """The path to each thing that a model says of itself."""
    for name in of if isinstance(of, dict) else range(min(1, len(of))):
        yield (*path, name)
        if isinstance(of[name], dict | list):
            yield from parts(of[name], (*path, name))


def with_other(of, path, other):
    """The same with another thing at a path; without it where that is `parts`."""
    name, *rest = path
    if rest:
        other = with_other(of[name], rest, other)
    whole = dict(of) if isinstance(of, dict) else dict(enumerate(of))
    whole[name] = other
    if other is parts:
        del whole[name]
    return whole if isinstance(of, dict) else list(whole.values())


def read_or_refused(path, data):
    """The model in a file of this data; None where it is refused, in one line."""
    path.write_bytes(model_files.as_bytes(data))
    try:
        return model_files.read(path, LIKE)
    except UsageError as error:
        assert str(error).startswith(f"{path} is ") and "\n" not in str(error)
        return None


def test_the_data_that_is_damaged_here_is_a_model(tmp_path, whole):
    assert read_or_refused(tmp_path / "x", whole).library is not None
    assert set(whole) == {"about", *ARRAYS}


@pytest.mark.parametrize("name", ARRAYS)
def test_a_model_without_an_array_or_with_another_is_refused(tmp_path, whole, name):
    found, path = whole[name], tmp_path / "x"
    words = found.dtype.kind == "U"
    last = found.copy() if words else found.astype("f8")
    last.flat[-1] = "xy" if words else np.inf
    others = [found[:0], found[:-1], last, np.array(["x"]), found.astype("S2" if words else "c8")]
    if name in ("sides", "library_sides", "library_launched"):
        others.append(0 * found)
    assert not read_or_refused(path, {x: y for x, y in whole.items() if x != name})
    for other in others:
        assert not read_or_refused(path, whole | {name: other})


def test_a_model_that_says_something_else_is_refused_or_lacks_what_says_so(tmp_path, whole):
    unread = "likeness", "model", "arch", "multiprocessors"
    variants = len(whole["about"]["variants"])
    for at in [x for x in parts(whole["about"]) if x[0] not in unread]:
        for other in (*OTHERS, parts):
            about = with_other(whole["about"], at, other)
            made = read_or_refused(tmp_path / "x", whole | {"about": about})
            of_its_kind = {"mean", "constants"} if other == 7.5 else {"kernels"}
            if made is None or (other in (7.5, "x") and of_its_kind & {*at}):
                continue
            gone = at == ("library",) or {"kernel", "params"} & {*at}
            assert gone and (made.library is None or len(made.fitted) <= variants), (at, other)
            assert made.times_us((100, 100, 100), "nn", LIKE)


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
