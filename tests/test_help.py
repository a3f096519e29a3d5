"""What the command says of itself: help, suggestions, completion, and how much it says."""

import re
import shlex

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from support.command import COMMAND, one_line, python, run

from hybrid_gemm.cli import cli
from hybrid_gemm.cli.option_types import shapes
from hybrid_gemm.errors import UsageError, nearest
from hybrid_gemm.options import CHOICES, FLAGS

COMMANDS = sorted(cli.commands)


def helped(*path: str) -> str:
    found = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80, prog_name="hybrid-gemm")
    assert found.exit_code == 0, found.output
    return found.output


def written(command: click.Command) -> list[click.Option]:
    """The options of a command that its help lists."""
    return [p for p in command.params if isinstance(p, click.Option)]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_sentences_in_groups_and_fits(name):
    text = helped(name)
    assert max(map(len, text.splitlines())) <= 80
    command = cli.commands[name]
    for option in written(command):
        assert option.help and option.help.endswith("."), option.opts
        assert option.help[0].isupper() or option.help.split()[0] == "small", option.help
    summary = (command.help or "").split("\n")[0]
    assert summary.endswith(".") and f"{summary}\n" in helped(), "cut off in the list of commands"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name):
    command = cli.commands[name]
    assert len(command.examples) == 3
    for sentence, line in command.examples:
        assert sentence in " ".join(helped(name).split()) and f"    {line}\n" in helped(name)
        words = shlex.split(line.partition(" > ")[0].removeprefix('eval "$(').removesuffix(')"'))
        words = words[words.index("hybrid-gemm") + 1 :]
        cli.commands[words[0]].make_context(words[0], words[1:])


def test_options_stand_under_their_headings():
    text = helped("run")
    places = [text.index(f"\n{heading}:\n") for heading in
              ("Input", "Split and sums", "Device and kernel", "MPI ranks", "Output and checks",
               "Other options", "Examples")]  # fmt: skip
    assert places == sorted(places)
    for name in FLAGS:
        choice = CHOICES[name]
        flag = "--param " if name == "params" else f"--{name.replace('_', '-')} "
        below = text[text.index(f"\n{choice.group}:\n") :].split("\n\n")[0]
        assert f"  {flag}" in below


def test_suggestions_are_alike():
    for word, names, meant in (
        ("col", ["rows", "cols", "auto"], "cols"),
        ("gpu", ["auto", "cuda", "cpu"], "cuda"),
        ("gpu", ["gpus", "cpu"], "gpus"),
        ("fp16", ["float32", "float16"], "float16"),
        ("f4", ["float32", "float64"], "float32"),
        ("cubals", ["cublas", "blas"], "cublas"),
        ("tpu", ["cuda", "cpu"], None),
        ("sise", ["resident", "seed", "size"], "size"),
        ("xyz", ["rows", "cols"], None),
    ):
        assert nearest(word, names) == (f" (did you mean {meant}?)" if meant else "")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("-size", "--size"), ("-threads=4", "--threads"), ("--m", "-m"), ("-s", None)],
)
def test_an_option_with_too_many_or_too_few_dashes_is_told_the_right_one(given, meant):
    done = CliRunner().invoke(cli, ["run", given, "8"])
    name = given.partition("=")[0]
    hint = f" (did you mean {meant}?)" if meant else ""
    assert f"No such option '{name}'{hint}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rnu"], "No such command 'rnu'"),  # and the nearest one, from click 8.4 on
        (["run", "--sise", "8"], "(did you mean --size?)"),
        (["--size", "8"], "--size stands behind a command, as in: hybrid-gemm run --size"),
        (["--sise", "8"], "--sise"),  # which old versions of click do not quote
        (["A.npy", "B.npy"], "to multiply files: hybrid-gemm run A.npy B.npy"),
        (["run", "--size"], "requires an argument. (hybrid-gemm run --help says what there is)"),
        (["run", "--size", "8", "64"], "1 file given (64); give A.npy and B.npy"),
        (["slurm", "--size", "8"], "`hybrid-gemm run`, whose options stand after --"),
        (["slurm", "--sise", "8"], "--sise"),
        (["run", "--device", "gpu"], "did you mean cuda?"),
    ],
    ids=str,
)
def test_what_is_misspelt_is_one_line(arguments, says):
    done = run(*arguments, check=2)
    assert says in one_line(done) and "seed" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--split", "col"], "did you mean cols?"),
        (["run", "--dtype", "fp16"], "did you mean float16?"),
        (["bench", "--dtype", "double"], "did you mean float64?"),
        (["run", "--kernel", "cubals"], "did you mean cublas?"),
        (["reproduce", "laddr"], "did you mean ladder?"),
        (["completion", "fsh"], "did you mean fish?"),
        (["bench", "--sizes", "1024:64"], "1024:64 is no range: it takes START:STOP:STEP"),
        (["run", "-q", "-v"], "give one of them"),
    ],
    ids=str,
)
def test_values_that_are_misspelt_are_told_what_was_meant(arguments, says):
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code and says in f"{done.exception} {done.output}"


def completed(*words: str) -> list[str]:
    """What a shell offers for the last of these words."""
    shell = ShellComplete(cli, {}, "hybrid-gemm", "_HYBRID_GEMM_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_completion_offers_names():
    assert completed("ru") == ["run"]
    assert {"tuned", "own", "cublas"} <= set(completed("run", "--kernel", ""))
    assert completed("run", "--kernel", "nai") == ["naive_row", "naive"]
    assert completed("run", "--kernel", "wg") == ["wgmma"]
    assert completed("bench", "--kernels", "mma,residues_") == ["mma,residues_mma"]
    assert completed("run", "--split", "") == ["rows", "cols", "auto"]
    assert completed("run", "--dtype", "float6") == ["float64"]
    assert completed("bench", "--kernels", "tuned,nai") == ["tuned,naive_row", "tuned,naive"]
    assert completed("reproduce", "col") == ["column_split"]
    assert "--max-device-memory" in completed("run", "--max")
    assert completed("kernels", "tun") == ["tuned"]


def test_completion_offers_runs_options_behind_a_jobs():
    assert completed("slurm", "--nodes", "2", "--", "--spl") == ["--split"]
    assert completed("slurm", "--", "--split", "") == ["rows", "cols", "auto"]
    assert completed("slurm", "--", "A.npy", "B.npy", "--comp") == ["--compute"]
    assert "--nodes" not in completed("slurm", "--", "--")


def test_completion_offers_files():
    shell = ShellComplete(cli, {}, "hybrid-gemm", "_HYBRID_GEMM_COMPLETE")
    files, folders = (["run"], ["run", "-o"], ["plot"], ["slurm", "--"]), (["reproduce", "-o"],)
    for words, kind in [*((x, "file") for x in files), *((x, "dir") for x in folders)]:
        assert [item.type for item in shell.get_completions(words, "x")] == [kind], words


def test_completion_without_words_is_refused():
    done = run(_HYBRID_GEMM_COMPLETE="bash_complete", check=2)
    assert "sets COMP_CWORD and COMP_WORDS too" in one_line(done)
    words = {"COMP_WORDS": "hybrid-gemm ru", "COMP_CWORD": "x"}
    done = run(_HYBRID_GEMM_COMPLETE="zsh_complete", **words, check=2)
    assert "COMP_CWORD=x is no number of a word" in one_line(done)
    done = run(_HYBRID_GEMM_COMPLETE="1", check=2)
    assert "_HYBRID_GEMM_COMPLETE=1: it takes bash_complete" in one_line(done)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_asks_the_command(shell):
    text = CliRunner().invoke(cli, ["completion", shell], prog_name="hybrid-gemm").output
    assert text.startswith("# ") and f"_HYBRID_GEMM_COMPLETE={shell}_complete" in text
    assert "hybrid-gemm" in text and "python" not in text


def test_bash_completes(tmp_path):
    """The script in a real bash, with this package's command on the PATH."""
    program = tmp_path / "hybrid-gemm"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    script = (
        f'PATH={tmp_path}:$PATH; eval "$(hybrid-gemm completion bash)"; '
        "COMP_WORDS=(hybrid-gemm run --kernel nai); COMP_CWORD=3; "
        '_hybrid_gemm_completion hybrid-gemm; echo "${COMPREPLY[@]}"'
    )
    done = python("-c", f"import subprocess; subprocess.run(['bash', '-c', {script!r}])")
    assert done.stdout.split() == ["naive_row", "naive"], done.stderr


def test_quiet_leaves_results_alone_and_verbose_adds_the_plan():
    quiet = run("run", "--size", 16, "-q", check=0)
    assert quiet.stderr == "" and "verification passed" in quiet.stdout
    assert "plan: " not in quiet.stdout
    verbose = run("run", "--size", 16, "-v", check=0)
    assert "plan: " in verbose.stdout and "generating" in verbose.stderr
    wrong = run("run", "--device", "tpu", "-v", check=2)
    assert "Traceback" in wrong.stderr and "no device is called" in wrong.stderr


@pytest.mark.parametrize("options", [["-q", "-v"], ["-v", "--sise", "3"], ["-v", "--repeat", "x"]])
def test_what_was_typed_wrongly_has_no_traceback(options):
    assert "Traceback" not in (said := one_line(run("run", *options, check=2))), said


def test_no_command_is_the_help():
    done = run()
    shown = done.stdout + done.stderr
    assert shown.startswith("Usage: hybrid-gemm") and "--help says" not in shown


def test_version_has_a_short_form():
    short, long = (CliRunner().invoke(cli, [flag]).output for flag in ("-V", "--version"))
    assert short == long and short.startswith("hybrid-gemm ")


def test_ranges_of_shapes():
    def sizes(text: str) -> list[int]:
        assert all(m == n == k for m, n, k in shapes(text))
        return [m for m, _n, _k in shapes(text)]

    assert shapes("8x9x10") == [(8, 9, 10)] and sizes("64") == [64]
    assert sizes("1024:4096:1024") == [1024, 2048, 3072, 4096]
    assert sizes("1024:16384:x2") == [1024, 2048, 4096, 8192, 16384]
    assert sizes("100:250:100") == [100, 200]
    for wrong in ("1:2", "8:4:1", "1:8:0", "1:8:x1", "a:b:c", "1:10000000:1", "0:4:1"):
        with pytest.raises(ValueError):
            shapes(wrong)


def test_a_wrong_range_is_one_line():
    done = CliRunner().invoke(cli, ["bench", "--shapes", "8:4:1"])
    assert isinstance(done.exception, UsageError)
    said = str(done.exception)
    assert "--shapes/--sizes '8:4:1'" in said and "START:STOP:STEP" in said


def test_kernels_by_pattern():
    from hybrid_gemm.bench import selection

    assert selection.matching(["naive*", "tuned", "naive"], ["naive", "naive_row", "tuned"]) == [
        "naive", "naive_row", "tuned",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no kernel is like 'x\\*'"):
        selection.matching(["x*"], ["naive"])
    assert re.match("naive", selection.select(["naive*"], False, {})[0].name)
