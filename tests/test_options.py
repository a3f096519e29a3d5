"""`Options` is where each choice is stated; signatures and flags follow it."""

import contextlib
import inspect
import itertools

import click
import numpy as np
import pytest
from click.testing import CliRunner

import hybrid_gemm
from hybrid_gemm import RankRunner, Runner, api, gemm, matmul, plan
from hybrid_gemm.cli.run import run
from hybrid_gemm.errors import HybridGemmError, OptionTypeError, UsageError
from hybrid_gemm.option_checks import parse_grid
from hybrid_gemm.options import (
    CHOICES,
    DEFAULTS,
    FLAGS,
    Options,
    OptionsAlone,
    OptionsOverRanks,
)

RUNNER = Runner(device="cpu")
ALONE = {name for name, choice in CHOICES.items() if not choice.across_ranks}


def keywords(function):
    found = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in found if x.kind is x.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "function, names",
    [(gemm, set(CHOICES)), (matmul, set(CHOICES)), (RankRunner, set(CHOICES)), (Runner, ALONE),
     (plan, ALONE)],
)  # fmt: skip
def test_signatures_name_every_option_with_its_default(function, names):
    found = keywords(function)
    assert names <= set(found)
    assert {name: found[name] for name in names} == {name: DEFAULTS[name] for name in names}
    assert not names ^ set(CHOICES) & set(found)


def test_help_says_what_each_keyword_of_a_call_means():
    for function in (gemm, matmul, hybrid_gemm.gemm_many, plan, Runner.__init__,
                     RankRunner.__init__):  # fmt: skip
        text = inspect.getdoc(function)
        parameters = inspect.signature(function).parameters
        own = [name for name in parameters if name not in CHOICES and name != "self"]
        listed = text.partition("\n\nOptions:\n")[2]
        assert {name for name in parameters if f"\n    {name}: " in f"\n{listed}"} == (
            set(parameters) & set(CHOICES)
        ), function
        assert function is RankRunner.__init__ or not [x for x in own if x not in text], function
        assert "ValueError" in text or "UsageError" in text
    assert "gpus: int | Sequence[int] | None = None\n        GPUs by number, such as" in text


def test_type_checkers_know_every_option_of_a_call():
    for function, known in (
        (matmul, OptionsOverRanks), (hybrid_gemm.gemm_many, OptionsAlone), (plan, OptionsAlone),
        (Runner.__init__, OptionsAlone),
    ):  # fmt: skip
        assert function.__annotations__["options"] == f"Unpack[{known.__name__}]"
        assert set(known.__annotations__) & set(CHOICES) == set(keywords(function)) & set(CHOICES)


def test_types_that_signatures_name_are_those_of_gemm():
    full = inspect.signature(gemm).parameters
    for function in (matmul, plan, Runner):
        for name, found in inspect.signature(function).parameters.items():
            if name in CHOICES:
                assert found.annotation == full[name].annotation, name


def test_an_option_stands_in_every_place_and_all_in_the_same_order(monkeypatch):
    """Those of CONTRIBUTING's recipe."""
    takes = [name for name in inspect.signature(gemm).parameters if name in CHOICES]
    handed = []
    monkeypatch.setattr(api, "kept_runner", lambda given, a, b: handed.extend(given) or RUNNER)
    gemm(np.eye(2), np.eye(2), **{name: name for name in takes})
    places = {
        "OptionsAlone and OptionsOverRanks (options.py)": list(OptionsOverRanks.__annotations__),
        "the parameters of gemm (api.py)": takes,
        "`given` in gemm (api.py)": handed,
    }
    for place, there in places.items():
        assert there == list(CHOICES), f"{place} lack an option, or have another order"


def test_numbers_in_a_list_are_those_in_a_tuple(monkeypatch):
    a, found = np.ones((2, 2)), []
    monkeypatch.setattr(api, "_kept", lambda options: found.append(options) or Runner(device="cpu"))
    for gpus in [0, 1], (0, 1):
        gemm(a, a, device="cuda", gpus=gpus)
    assert found == [Options(device="cuda", gpus=(0, 1))] * 2
    for wrong in [True], [0.0]:  # which equal numbers
        with pytest.raises(OptionTypeError, match="gpus takes"):
            gemm(a, a, device="cuda", gpus=wrong)


def test_every_option_has_a_flag_with_its_help_and_its_default():
    text = " ".join(CliRunner().invoke(run, ["--help"]).output.split())
    assert set(CHOICES) - set(FLAGS) == {"tune"}  # of repeated calls, which the command has none of
    for name in FLAGS:
        choice = CHOICES[name]
        flag = "--param " if name == "params" else f"--{name.replace('_', '-')} "
        assert flag in text and " ".join(choice.help.split()[:4]) in text
        if DEFAULTS[name] not in (None, (), False):
            assert f"[default: {DEFAULTS[name]}]" in text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"threads": "4"}, "threads takes a whole number; '4' was given"),
        ({"threads": 4.0}, "threads takes a whole number"),
        ({"threads": True}, "threads takes a whole number"),
        ({"gpus": "0,1"}, "gpus takes whole numbers"),
        ({"grid": (1, 1.5, 1)}, "grid takes a whole number; 1.5"),
        ({"split": 3}, "split takes one of rows, cols and auto"),
        ({"kernel": 7}, "kernel takes a name"),
        ({"kernel": "tuned", "params": {"BM": "8"}}, r"params\['BM'\] takes a whole number"),
        ({"kernel": "tuned", "params": {"TILE": 8.0}}, "takes a whole number; 8.0"),
        ({"max_device_memory": 1e9}, "max_device_memory takes bytes"),
        ({"transport": "mpi"}, "give gemm or matmul comm too"),
        ({"rounds": 2}, "give gemm or matmul comm too"),
        ({"root": 1}, "pass comm too"),
    ],
)
def test_wrong_types_are_named(options, message):
    a = np.ones((2, 2))
    for threads in (1, 4):  # runners that are kept are not taken for options that equal theirs
        gemm(a, a, device="cpu", threads=threads)
    with pytest.raises(OptionTypeError, match=message):
        gemm(a, a, device="cpu", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "col"}, "did you mean cols"),
        ({"threads": 0}, "0 threads asked for; it takes at least 1"),
        ({"rounds": 0}, "0 rounds asked for; it takes at least 1"),
        ({"emulate_devices": 0}, "0 devices asked for; it takes at least 1"),
        ({"reduce": "tree", "split": "cols"}, "ordered, nccl and critical"),
        ({"reduce": "critical", "split": "rows"}, "needs the split cols"),
        ({"device": "gpu"}, "no device is called 'gpu'; there are auto, cuda, cpu and emulator"),
        ({"compute": "fp32x4"}, "did you mean fp32x3"),
        ({"max_device_memory": "8"}, "8 has no unit"),
        ({"max_device_memory": "8 bananas"}, "not a size"),
        ({"max_device_memory": "inf GiB"}, "not a size"),
        ({"grid": (2, 1, 1), "split": "rows"}, "beside the split"),
        ({"grid": (2, 2)}, "grid is 2 x 2; it takes three numbers"),
        ({"grid": (8, 0, 1)}, "each at least 1"),
        ({"grid": (1025, 1, 1)}, "1025 x 1 x 1 has 1025 parts.* at most 1024"),
        ({"grid": (2**40, 2**40, 1)}, "at most 1024"),
        ({"levels": 9}, "0 to 6"),
        ({"levels": -1}, "0 to 6"),
        ({"gpus": (0, 0)}, "different GPU numbers"),
        ({"gpus": ()}, "gpus names no GPU"),
        ({"device": "CPU"}, "did you mean cpu"),
    ],
)
def test_wrong_values_are_named(options, message):
    a = np.ones((2, 2))
    with pytest.raises(UsageError, match=message):
        gemm(a, a, **options)


@pytest.mark.parametrize(
    "function, misspelt, meant",
    [(gemm, "thread", "threads"), (Runner, "thread", "threads"), (plan, "splt", "split"),
     (gemm, "transa", "trans_a"), (gemm, "transA", "trans_a"),
     (matmul, "max_memory", None)],
)  # fmt: skip
def test_a_misspelt_keyword_is_a_type_error_with_the_nearest_name(function, misspelt, meant):
    sizes = (2, 2, 2) if function is plan else ()
    arrays = (np.ones((2, 2)),) * 2 if function in (gemm, matmul) else sizes
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{misspelt}'") as caught:
        function(*arrays, device="cpu", **{misspelt: 1})
    assert meant is None or f"did you mean {meant}" in str(caught.value)


@pytest.mark.parametrize("method", ["gemm", "run"])
def test_an_option_of_a_runner_is_told_where_it_goes(method):
    a = np.ones((2, 2))
    with pytest.raises(TypeError, match=r"'threads'; it is an option of Runner\(threads=\.\.\.\)"):
        getattr(Runner(device="cpu"), method)(a, a, threads=2)


@pytest.mark.parametrize("multiply", [gemm, Runner(device="cpu").gemm], ids=["gemm", "Runner"])
def test_a_matrix_by_name_is_said_to_stand_by_its_place(multiply):
    a = np.ones((2, 2))
    with pytest.raises(TypeError, match=r"takes c by its place: gemm\(a, b, c\)"):
        multiply(a, a, c=a, beta=1)


@pytest.mark.parametrize("make", [lambda x: gemm(np.eye(2), np.eye(2), comm=x), RankRunner])
def test_what_is_no_communicator_is_named(make):
    with pytest.raises(OptionTypeError, match=r"comm takes an mpi4py communicator, .* 4 was given"):
        make(4)


def test_values_are_kept_in_one_form():
    assert Options(gpus=1).gpus == (1,)
    assert Options(max_device_memory="8GiB") == Options(max_device_memory=8 << 30)
    assert Options(max_device_memory="500MB").max_device_memory == 500 * 10**6
    assert Options(threads=np.int64(4)) == Options(threads=4)
    assert Options(kernel="tuned", params={"BM": 8}) == Options(kernel="tuned", params=[("BM", 8)])
    assert hash(Options(grid=[1, 2, 1])) == hash(Options(grid=(1, 2, 1)))


@pytest.mark.parametrize("wrong", [[True, 2, 1], [1.0, 2, 1], (True, 2, 1), (1.0, 2, 1)])
def test_what_equals_a_kept_option_and_is_wrong_is_refused(wrong):
    assert gemm(np.eye(2), np.eye(2), device="cpu", grid=type(wrong)([1, 2, 1])).sum() == 2
    with pytest.raises(OptionTypeError, match="grid takes a whole number"):
        gemm(np.eye(2), np.eye(2), device="cpu", grid=wrong)


def test_a_type_error_of_the_caller_stays_what_it_is():
    with pytest.raises(OptionTypeError):
        hybrid_gemm.gemm(np.ones((2, 2)), np.ones((2, 2)), threads="x")
    with pytest.raises(TypeError, match="positional"):
        gemm(np.ones((2, 2)))


def test_sizes_on_the_command_line_take_a_unit():
    done = CliRunner().invoke(run, ["--size", "8", "--max-device-memory", "8"])
    assert isinstance(done.exception, UsageError) and "8 has no unit" in str(done.exception)


LONG = "1" * 5000  # digits, more than Python reads or prints


def test_a_number_of_5000_digits_is_refused_in_words(tmp_path, monkeypatch):
    """As the value of any option, of the command and in Python."""
    monkeypatch.chdir(tmp_path)
    for option in run.params:
        if not isinstance(option, click.Option) or option.is_flag:
            continue
        given = f"TILE={LONG}" if option.name == "param" else LONG
        more = ["--size", "8", "--dry-run", "--kernel", "shared_tile", "--device", "emulator"]
        error = CliRunner().invoke(run, [*more, option.opts[0], given]).exception
        known = HybridGemmError, click.ClickException, SystemExit, OSError  # of names of files
        assert error is None or isinstance(error, known), option.opts
    for name, device in itertools.product(CHOICES, ("auto", "cpu")):
        number = {"TILE": 10**5000} if name == "params" else 10**5000
        with contextlib.suppress(HybridGemmError):
            plan(8, 8, 8, **{"device": device, name: number})


def test_a_grid_is_taken_as_results_print_it():
    assert parse_grid("2,1,3") == parse_grid("2x1x3") == parse_grid("2 x 1 x 3") == [2, 1, 3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--threads", "x"], "--threads: 'x' is not a whole number"),
        (["--grid", "1,y,1"], "--grid: '1,y,1' is not a grid such as 2,1,2"),
        (["--gpus", "0,y"], "--gpus: '0,y' is not a list of whole numbers such as 0,1"),
        (["--rank-timeout", "soon"], "--rank-timeout: 'soon' is not a number"),
        (["--max-device-memory", "8"], "--max-device-memory: 8 has no unit"),
    ],
)
def test_text_that_cannot_be_read_is_said_with_its_flag(arguments, says):
    done = CliRunner().invoke(run, ["--size", "8", *arguments])
    assert isinstance(done.exception, UsageError) and str(done.exception).startswith(says)


@pytest.mark.parametrize(
    ("sides", "dtype", "error", "words"),
    [
        ((-1, 2, 3), "float32", ValueError, "m is -1; it takes 0 to 2147483647"),
        ((2**63, 2, 3), "float32", ValueError, "m is 9223372036854775808; it takes 0 to"),
        ((1, 2, 3), None, TypeError, "dtype is None; it takes a name"),
        ((1, 2, 3.5), "float32", TypeError, "k takes a whole number; 3.5 was given"),
        ((1, "2", 3), "float32", TypeError, "n takes a whole number; '2' was given"),
        ((1, 2, 3), "float31", TypeError, "the product has dtype 'float31', which NumPy does not"),
        ((1, 2, 3), object, TypeError, "the product has dtype object; float16"),
    ],
    ids=range(7),
)
def test_a_plan_of_what_is_no_product_is_refused(sides, dtype, error, words):
    with pytest.raises(error, match=words):
        plan(*sides, dtype=dtype, device="cpu")
