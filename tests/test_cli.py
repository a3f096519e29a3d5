"""The real command, as a user runs it: exit codes, streams, files."""

import json
import os
import resource
import signal
import subprocess
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from support.command import COMMAND, environment, one_line, python, run, said
from support.devices import REASONS

import hybrid_gemm
from hybrid_gemm import devices
from hybrid_gemm.cli import alone, cli
from hybrid_gemm.host.installing import pip_install
from hybrid_gemm.reporting import report


@pytest.fixture
def files(tmp_path, rng):
    a = rng.integers(-4, 5, (30, 40)).astype("f4")
    b = rng.integers(-4, 5, (40, 20)).astype("f4")
    np.save(tmp_path / "A.npy", a)
    np.save(tmp_path / "B.npy", b)
    return tmp_path, a, b


def test_run_prints_workers_total_rate_and_verdict():
    done = run("run", "--threads", 4, "--split", "cols", "--size", 200, "--device", "cpu", check=0)
    for text in ("split by cols", "150:200", "multiply and sum", "GFLOP/s", "verification passed"):
        assert text in done.stdout, done.stdout


def test_the_chosen_device_is_reported():
    done = run("run", "--size", 8, check=0)
    assert "device: " in done.stderr


def test_json_alone_is_on_stdout():
    done = run("run", "--size", 64, "--threads", 2, "--split", "cols", "--json", "-", check=0)
    data = json.loads(done.stdout)
    assert data["verify"]["passed"] is True
    assert len(data["plan"]["workers"]) == 2
    assert data["environment"]["packages"]["numpy"] == np.__version__
    assert data["command"].startswith("hybrid-gemm run --size 64")


def test_files_in_and_out(files):
    folder, a, b = files
    run("run", "A.npy", "B.npy", "-o", "C.npy", "--threads", 3, "--split", "cols", cwd=folder,
        check=0)  # fmt: skip
    np.testing.assert_array_equal(np.load(folder / "C.npy"), a @ b)
    assert sorted(os.listdir(folder)) == ["A.npy", "B.npy", "C.npy"]


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8", "<f2", "<i4", ">i8"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_any_order_and_byte_order(files, dtype, order, monkeypatch):
    """In this process: starting others takes longer than all products."""
    folder, a, b = files
    monkeypatch.chdir(folder)
    np.save(folder / "A.npy", np.asarray(a.T, dtype, order=order))
    np.save(folder / "B.npy", np.asarray(b, dtype, order=order))
    given = ["run", "A.npy", "B.npy", "-o", "C.npy", "--trans-a", "--threads", "2"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    c = np.load(folder / "C.npy")
    assert c.dtype == np.dtype(dtype).newbyteorder("=")
    np.testing.assert_array_equal(c, (a @ b).astype(dtype))


def test_beta_scales_a_given_c(files):
    folder, a, b = files
    c = np.ones((30, 20), "f4")
    np.save(folder / "C0.npy", c)
    run("run", "A.npy", "B.npy", "-c", "C0.npy", "--alpha", 2, "--beta", -1, "-o", "C.npy",
        cwd=folder, check=0)  # fmt: skip
    np.testing.assert_array_equal(np.load(folder / "C.npy"), 2 * (a @ b) - 1)


def test_generated_input_depends_on_the_seed_alone(tmp_path):
    outputs = []
    for i, options in enumerate((["--seed", 1], ["--seed", 1, "--threads", 3], ["--seed", 2])):
        path = tmp_path / f"{i}.npy"
        run("run", "--size", 50, "--fill", "integers", "-o", path, *options, check=0)
        outputs.append(np.load(path))
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert (outputs[0] != outputs[2]).any()


def test_dry_run_prints_the_plan_and_writes_nothing(files):
    folder, _a, _b = files
    done = run("run", "A.npy", "B.npy", "-o", "C.npy", "--threads", 3, "--split", "cols",
               "--dry-run", cwd=folder, check=0)  # fmt: skip
    assert "0+1+2" in done.stdout and "GiB free" in done.stdout
    assert not (folder / "C.npy").exists()
    data = json.loads(
        run("run", "--size", 10**5, "--threads", 1, "--split", "rows", "--device", "cpu",
            "--dry-run", "--json", "-", check=0).stdout
    )  # fmt: skip
    assert data["plan"]["workers"][0]["boxes"][0]["rows"] == [0, 10**5]


def test_print_shows_small_matrices():
    done = run("run", "-m", 2, "-n", 2, "-k", 3, "--fill", "integers", "--print", check=0)
    assert "A =" in done.stdout and "C =" in done.stdout
    done = run("run", "--size", 64, "--print", check=0)
    assert "--print shows up to" in done.stderr


def test_empty_products():
    assert "passed" in said("run", "--size", 0)
    for m, n, k in ((0, 4, 4), (4, 0, 4), (4, 4, 0)):
        text = said("run", "-m", m, "-n", n, "-k", k)
        assert "passed" in text and "alpha=1 beta=0" in text


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64"])
def test_a_product_without_k_shows_its_alpha(dtype):
    options = "run", "-m", 4, "-n", 4, "-k", 0, "--dtype", dtype, "--alpha", 3, "--beta", 2
    for more in ([], ["--dry-run"]):
        assert "k=0" in (text := said(*options, "--device", "cpu", *more))
        assert "alpha=3 beta=2" in text and ("passed" in text or more)
    assert json.loads(said(*options, "--device", "cpu", "--json", "-"))["problem"]["alpha"] == 3


def test_repetitions_hold_one_product(monkeypatch):
    made, run_once = [], alone.Alone.run

    def counting(*arguments):
        assert not [x for x in made if x() is not None], "an older C is there"
        result = run_once(*arguments)
        made.append(weakref.ref(result.c))
        return result

    monkeypatch.setattr(alone.Alone, "run", counting)
    said("run", "--size", 8, "--device", "cpu", "--repeat", 4, "--print")
    assert len(made) == 4


@pytest.mark.parametrize("alpha", [2**53 + 1, 2**63 - 1, -(2**63)])
def test_whole_factors_keep_their_digits(alpha):
    options = "run", "--size", 2, "--dtype", "int64", "--alpha", alpha, "--device", "cpu"
    assert f"alpha={alpha} beta=0" in said(*options)
    assert json.loads(said(*options, "--json", "-"))["problem"]["alpha"] == alpha


def test_a_wrong_product_exits_3_and_leaves_no_file(files):
    folder, _a, _b = files
    script = (
        "import sys, numpy as np\n"
        "from hybrid_gemm.devices import cpu\n"
        "real = cpu.CpuDevice.gemm\n"
        "def wrong(self, variant, a, b, c, **o):\n"
        "    real(self, variant, a, b, c, **o); c[0, 0] += 1\n"
        "cpu.CpuDevice.gemm = wrong\n"
        "sys.argv = ['hybrid-gemm', 'run', 'A.npy', 'B.npy', '-o', 'C.npy', '--device', 'cpu']\n"
        "from hybrid_gemm.cli import main\nmain()\n"
    )
    done = python("-c", script, cwd=folder)
    assert done.returncode == 3, done.stderr
    assert "the product is wrong" in done.stderr
    assert sorted(os.listdir(folder)) == ["A.npy", "B.npy"]


def bad_files(folder):
    """Files that are not what they should be, and what the message must say of each."""
    np.save(folder / "three.npy", np.ones((2, 2, 2)))
    np.save(folder / "object.npy", np.array([[None]]), allow_pickle=True)
    np.save(folder / "wide.npy", np.ones((40, 40), np.clongdouble))
    np.save(folder / "fields.npy", np.zeros((4, 4), "f4,i4"))
    (folder / "text.npy").write_text("not an array")
    whole = (folder / "A.npy").read_bytes()
    (folder / "short.npy").write_bytes(whole[:-100])
    return {
        "missing.npy": "no such file",
        "three.npy": "(2, 2, 2)",
        "object.npy": "object",
        "wide.npy": "complex256",
        "fields.npy": "dtype",
        "text.npy": "not a .npy file",
        "short.npy": "truncated",
        ".": "directory",
    }


def test_bad_input_files(files):
    folder, _a, _b = files
    before = None
    for name, says in bad_files(folder).items():
        before = before or sorted(os.listdir(folder))
        done = run("run", name, "B.npy", "-o", "C.npy", cwd=folder, check=2)
        assert says in one_line(done), name
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["A.npy", "A.npy"], 2, "A is 30 x 40 and B is 30 x 40"),
        (["A.npy"], 2, "give A.npy and B.npy"),
        (["A.npy", "B.npy", "--size", "4"], 2, "for generated input"),
        (["A.npy", "B.npy", "-o", "A.npy"], 2, "it is the input A.npy"),
        (["A.npy", "B.npy", "-o", "no/where/C.npy"], 2, "no directory"),
        (["A.npy", "B.npy", "--beta", "2"], 2, "no C was given"),
        (["--threads", "0"], 2, "at least 1"),
        (["--ranks", "0", "--dry-run"], 2, "it takes 1 to 65536"),
        (["--ranks", "65537", "--dry-run"], 2, "it takes 1 to 65536"),
        (["--grid", "99999999999,1,1"], 2, "one a worker; it takes at most 1024"),
        (["--threads", "-4"], 2, "at least 1"),
        (["--split", "diagonal"], 2, "rows, cols and auto"),
        (["--device", "tpu"], 2, "no device is called 'tpu'"),
        (["--device", "cpu", "--gpus", "0"], 2, "the device is cpu"),
        (["--device", "emulator", "--kernel", "blok_tile"], 2, "did you mean block_tile"),
        (["--device", "emulator", "--kernel", "shared_tile",
          "--param", "TILES=8"], 2, "did you mean TILE"),
        (["--device", "emulator", "--kernel", "shared_tile", "--param", "TILE=64"], 2, "TILE"),
        (["--device", "emulator", "--kernel", "shared_tile", "--param", "TILE=8",
          "--param", "TILE=16"], 2, "TILE=8 and TILE=16 were given"),
        (["--dry-run", "--print"], 2, "--dry-run makes none"),
        (["--size", "4", "--print", "--json", "-"], 2, "name a file for --json"),
        (["--device", "emulator", "--kernel", "shared_tile",
          "--param", "TILE=x"], 2, "NAME=NUMBER"),
        (["--device", "emulator", "--kernel", "one_block", "--size", "64"], 2, "m * n"),
        (["--device", "cpu", "--kernel", "naive"], 2, "does not run on the cpu"),
        (["--device", "cpu", "--kernel", "naive", "-m", "0"], 2, "does not run on the cpu"),
        (["--max-device-memory", "-8GiB"], 2, "--max-device-memory is -"),
        (["--grid", "1,1"], 2, "--grid is 1 x 1; it takes three numbers"),
        (["a\x1b[31m\r.npy", "B.npy"], 2, r"a\x1b[31m\r.npy: no such file"),
        (["--kernel", "cublas", "--device", "emulator"], 2, "does not run on the emulator"),
        (["--dtype", "complex32"], 2, "it takes float16"),
        (["--dtype", "fp16"], 2, "did you mean float16"),
        (["--verify", "ful"], 2, "did you mean full"),
        (["--fill", "zeros"], 2, "it takes normal"),
        (["--verify", "maybe"], 2, "auto, full, off"),
        (["-m", "-3"], 2, "0 or more"),
        (["--size", "1e4"], 2, "'1e4' is not a whole number"),
        (["--param", "BM=128"], 2, "name it too, by kernel (--kernel)"),
        (["--size", "10000000"], 1, "GiB"),
        (["--reduce", "critical", "--split", "rows"], 2, "needs the split cols"),
    ],
)  # fmt: skip
def test_bad_choices_are_one_line(files, arguments, code, says):
    folder, _a, _b = files
    if "emulator" in arguments and (reason := REASONS["emulator"]):
        pytest.skip(reason)
    done = run("run", *arguments, cwd=folder, check=code)
    assert says in one_line(done)
    assert sorted(os.listdir(folder)) == ["A.npy", "B.npy"]


def test_a_device_that_is_not_here_exits_5():
    done = run("run", "--device", "cuda", "--size", 8, CUDA_VISIBLE_DEVICES="-1", check=5)
    assert "device cuda was asked for" in one_line(done)


def test_unknown_options_exit_2():
    assert "No such option" in run("run", "--treads", 4, check=2).stderr
    assert "No such command" in run("rnu", check=2).stderr


def test_a_full_disk_leaves_nothing(files):
    folder, _a, _b = files
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "sys.argv = ['hybrid-gemm', 'run', 'A.npy', 'B.npy', '-o', 'C.npy', '--device', 'cpu']\n"
        "from hybrid_gemm.cli import main\nmain()\n"
    )
    done = python("-c", script, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "needs 2528 bytes" in done.stderr
    assert sorted(os.listdir(folder)) == ["A.npy", "B.npy"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_leaves_nothing_half_written(tmp_path, number, code):
    process = subprocess.Popen(
        [*COMMAND, "run", "--size", "2000", "--device", "cpu", "-o", "C.npy", "--repeat", "10000"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    assert b"generating" in process.stderr.readline()
    time.sleep(0.5)  # C has no name meanwhile
    process.send_signal(number)
    _out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert os.listdir(tmp_path) == []


def test_help_is_quick():
    """At most three times what Python with click takes to start (2.0 was measured), in processor
    time and in turns: the machine may be slow, or busy with other tests."""

    def spent(*arguments) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert python(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    turns = [(spent("-c", "import click"), spent("-m", "hybrid_gemm", "--help")) for _ in range(6)]
    click, help_text = map(min, zip(*turns, strict=True))
    assert help_text < 3 * click


def test_help_imports_nothing_heavy():
    script = (
        "import sys; sys.argv = ['x', '--help']\n"
        "from hybrid_gemm.cli import cli\n"
        "try: cli.main(standalone_mode=False)\n"
        "finally: print(sorted({'numpy', 'cupy', 'rich', 'mpi4py'} & sys.modules.keys()))\n"
    )
    done = python("-c", script)
    assert done.stdout.splitlines()[-1] == "[]"


def test_info_names_versions_and_why_there_is_no_gpu():
    done = run("info", check=0)
    assert np.__version__ in done.stdout
    assert done.stdout.splitlines()[-1].startswith((" ", "variables: none"))
    data = json.loads(run("info", "--json", "-", check=0).stdout)
    assert data["environment"]["cpu"]["cores"] >= 1


def test_kernels_lists_the_whole_catalog():
    from hybrid_gemm import catalog

    done = run("kernels", check=0)
    for name in catalog.kernels():
        assert name in done.stdout
    uses = [x for x in done.stdout.splitlines() if x.startswith("-- ")]
    assert len(uses) == 4 and uses[0] == "-- for --kernel NAME --"
    chosen, *_others = done.stdout.partition(uses[1])
    assert "\ndeep " in chosen and "\nprobe_" not in chosen
    lines = done.stdout.splitlines()
    assert len(lines) == len(catalog.kernels()) + len(uses) + 1  # one a kernel; how to see more
    one = run("kernels", "deep", check=0).stdout
    assert "--" not in one and "parameters: " in one and "source: " in one
    assert "no kernel is called" in one_line(run("kernels", "nothing", check=2))


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "A.npy", "B.npy", "--json", "A.npy"], "it is the input A.npy"),
        (["run", "A.npy", "B.npy", "-o", "x", "--json", "x"], "given for two outputs"),
        (["run", "A.npy", "B.npy", "-o", "C.npy", "--json", "no/x.json"], "no directory"),
        (["bench", "--sizes", "8", "--csv", "no/x.csv"], "no directory"),
        (["bench", "--sizes", "8", "--csv", "x", "--json", "./x"], "given for two outputs"),
        (["reproduce", "ladder", "--json", "no/x.json"], "no directory"),
        (["tune", "-o", "no/x.json"], "no directory"),
    ],
    ids=str,
)
def test_output_files_are_checked_before_any_work(files, arguments, said):
    folder, a, _b = files
    done = run(*arguments, check=2, cwd=folder)
    assert said in one_line(done) and done.stdout == ""
    assert sorted(os.listdir(folder)) == ["A.npy", "B.npy"]
    np.testing.assert_array_equal(np.load(folder / "A.npy"), a)


def test_why_there_is_no_gpu_is_said_once():
    reason = devices.choose("auto")[1]
    done = run("run", "--size", 8, check=0)
    assert (done.stdout + done.stderr).count(reason) == 1
    plan = run("run", "--size", 8, "--dry-run", "--ranks", 4, check=0)
    assert (plan.stdout + plan.stderr).count(reason) <= 1


def test_gpus_that_are_named_and_not_here_say_why():
    if (reason := devices.choose("auto"))[0] == "cuda":
        pytest.skip("a GPU is here")
    done = run("run", "--size", 8, "--gpus", 0, check=5)
    assert reason[1] in one_line(done) and "without --gpus" in one_line(done)
    assert "--gpus" in one_line(run("run", "--device", "cpu", "--gpus", 0, check=2))


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("float16", "float16 (summed in float32)"),
        ("bfloat16", "bfloat16 (summed in float32)"),
        ("float32", "float32"),
        ("int32", "int32"),
    ],
)
def test_the_first_line_names_the_dtype_of_c(dtype, says):
    given = "run", "--size", 8, "--device", "cpu", "--dtype", dtype
    assert f"m=8 n=8 k=8 {says}, alpha=1" in said(*given)
    assert f"m=8 n=8 k=8 {says}, alpha=1" in said(*given, "--dry-run")
    plan = json.loads(said(*given, "--dry-run", "--json", "-"))
    assert plan["problem"]["out_dtype"] == dtype


def test_slow_products_have_a_rate(capsys):
    plan = hybrid_gemm.plan(8, 8, 8, device="cpu")
    report.print_total(SimpleNamespace(total_ms=50_000.0, gflops=0.0432), plan)
    report.print_total(SimpleNamespace(total_ms=50.0, gflops=43.21), plan)
    assert capsys.readouterr().out == "total 50 s, 0.043 GFLOP/s\ntotal 50 ms, 43.2 GFLOP/s\n"


def test_the_command_that_installs_an_extra_is_for_this_installation(monkeypatch):
    root = Path(hybrid_gemm.__file__).resolve().parents[1]
    monkeypatch.chdir(root)
    assert pip_install("plot") == "pip install -e '.[plot]'"
    monkeypatch.chdir("/")
    assert pip_install("plot") == f"pip install -e '{root}[plot]'"


@pytest.mark.parametrize(
    "sizes",
    [
        ["--size", 99999999999],
        ["--size", 10**40],
        ["-m", 2**62, "-n", 1, "-k", 2],
        ["-m", 2**63, "-n", 0, "-k", 0],
        ["-m", 2 * 10**9, "-n", 2 * 10**9, "-k", 0, "--dtype", "float64"],
        ["--size", 99999999999, "--dry-run"],
        ["--size", 99999999999, "--ranks", 4, "--dry-run"],
    ],
)
def test_sizes_that_overflow_are_one_clear_line(sizes):
    done = run("run", "--device", "cpu", *sizes, check=2)
    assert "too large" in one_line(done)


def test_a_call_of_cuda_that_fails_is_one_line(capsys):
    module = {"__module__": "cupy_backends.cuda.api.runtime"}
    error = type("CUDARuntimeError", (RuntimeError,), module)("cudaErrorECCUncorrectable: ECC")
    assert hybrid_gemm.cli._fail(error) == 1
    assert capsys.readouterr().err == (
        "hybrid-gemm: a call of CUDA failed: cudaErrorECCUncorrectable: ECC (-v shows where)\n"
    )
