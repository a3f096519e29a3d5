"""Fixtures and options of all tests. `device` runs a test on every device that is here."""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from support.devices import DEVICES, HERE, KERNEL_DEVICES, REASONS

import hybrid_gemm
from hybrid_gemm import devices
from hybrid_gemm.arrays import output_files
from hybrid_gemm.devices import tensor_core_products
from hybrid_gemm.errors import UnavailableError
from hybrid_gemm.host import cache
from hybrid_gemm.kernel_choice import model_files, on_gpu
from hybrid_gemm.programs.planned import Plans

# Shells start background jobs with SIGINT and SIGQUIT ignored, and children inherit that. Some
# tests interrupt their children, or have them quit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

# JAX takes three quarters of a GPU's memory when it is first used; other workers want some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# An example that compiles a kernel, or reads a model of times, takes longer than the others; and
# all take long on a busy machine. A failure says how its example is repeated elsewhere.
hypothesis.settings.register_profile(
    "untimed", deadline=None, print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("untimed")

# What the shell sets for its own work is not the suite's: kernels of the user's, a file that tells
# a batch job that it is done, or a misspelt name, which each command notes.
for _name in [x for x in os.environ if x.startswith("HYBRID_GEMM_") and x != "HYBRID_GEMM_CACHE"]:
    del os.environ[_name]

# Where no cache can be made, as with a HOME that is read-only, each process that tests start would
# say so and compile anew: they all get a temporary one.
try:
    cache.directory("host", lasting=True)
except UnavailableError:
    os.environ["HYBRID_GEMM_CACHE"] = str(cache.directory("host").parent)

# Tests start hundreds of Python processes, each of which would compile the package again. (Of this
# one and the workers scripts/test sees to it.)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


PASSED = "hybrid-gemm/passed"  # in pytest's cache: the tests that passed in the last run


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=KERNEL_DEVICES)
def kernel_device(request):
    return request.param


@pytest.fixture(autouse=True)
def current_gpu():
    """JAX leaves another GPU current than it found."""
    yield
    cupy = sys.modules.get("cupy")
    if "jax" in sys.modules and cupy is not None and cupy.cuda.is_available():
        cupy.cuda.Device(0).use()


@pytest.fixture(autouse=True)
def _notes_are_printed(monkeypatch):
    """Also after a command that was called here, to be quiet."""
    monkeypatch.setattr("hybrid_gemm.host.notes.quiet", False)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def there(torch):
    """PyTorch on a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch


@pytest.fixture
def named_by_half_a_letter():
    """This process has a name that Linux cut, after 15 bytes, within a letter of UTF-8."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"xy" + "программа".encode()[:13])
    yield
    name.write_bytes(before)


@pytest.fixture(params=["nameless", "named"])
def kind(request, monkeypatch):
    """Both kinds of new files; not every filesystem has the first."""
    if request.param == "named":
        monkeypatch.setattr(output_files, "_takes_nameless_files", lambda folder: False)
    return request.param


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)


@pytest.fixture
def no_plans(monkeypatch):
    """No call is carried out by a plan; `Runner.run` still is."""
    monkeypatch.setattr(Plans, "multiply", lambda *_given: pytest.fail("by a plan"))


@pytest.fixture
def tf32_split_of_small_products(monkeypatch):
    """Products of any size may take the TF32 split."""
    monkeypatch.setattr(tensor_core_products, "LEAST_WORK_TF32", 0)


@pytest.fixture
def without_models(tmp_path, monkeypatch):
    """No models of times: what goes to tensor cores does so at any size, by our kernels."""
    monkeypatch.setattr(model_files, "HERE", tmp_path / "no models")
    on_gpu.forget()
    yield
    on_gpu.forget()


def pytest_report_header(config):
    """On which devices tests run, and why not on others: their tests are thousands, and each takes
    pytest some milliseconds to collect and to skip."""
    away = [f"{kind}: {reason}" for kind, reason in REASONS.items() if reason]
    which = "campaigns alone" if config.getoption("--campaigns") else "no campaigns (--campaigns)"
    return [f"devices: {', '.join(HERE)}", *(f"not on {said}" for said in away), f"tests: {which}"]


def pytest_configure(config):
    """A worker that another process ends says so, with what it did, and does not just vanish."""
    if not hasattr(config, "said_when_ended"):
        config.said_when_ended = os.fdopen(os.dup(2), "w")  # fd 2 is captured later
        for number in signal.SIGTERM, signal.SIGHUP:
            if signal.getsignal(number) is signal.SIG_DFL:
                faulthandler.register(number, config.said_when_ended, all_threads=True, chain=True)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Each worker begins with its own share of the test files, and finds those of others compiled
    when it comes there: pytest takes longer to rewrite their asserts than for all else of this."""
    report = yield
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if worker and collector.path == Path(__file__).parent and not asked_for(collector.config):
        files = [x for x in report.result if isinstance(x, pytest.Module)]
        first = len(files) * int(worker) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        for file in files[first:] + files[:first]:
            with contextlib.suppress(Exception, pytest.skip.Exception):  # said when it is collected
                file.obj  # noqa: B018 - which imports it
    return report


def asked_for(config) -> bool:
    """Whether files or tests are named, so that others are not to be imported."""
    return any("::" in argument or argument.endswith(".py") for argument in config.args)


def pytest_collection_modifyitems(config, items):
    """Campaigns or all else. Slow tests first, so that no worker is alone with one at the end."""
    config.collected = list(items)  # what -m and -k leave out, too
    wanted: tuple[list, list] = ([], [])
    passed = frozenset(config.cache.get(PASSED, ()) if config.getoption("--not-passed") else ())
    for item in items:
        campaign = item.get_closest_marker("campaign") is not None
        asked = campaign == config.getoption("--campaigns") and item.nodeid not in passed
        wanted[asked].append(item)
    config.hook.pytest_deselected(items=wanted[False])
    items[:] = wanted[True]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """What is there by now stays. Looking at thousands of collected tests takes Python's garbage
    collection a tenth of a second each time, and tests call it, too."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser):
    parser.addoption(
        "--emulate-devices", type=int, metavar="N",
        help="run every test as if one GPU (or the emulator) played N devices where it names none",
    )  # fmt: skip
    parser.addoption(
        "--campaigns", action="store_true",
        help="run the tests that are campaigns, and no others: of what they draw or list, the "
        "other tests have a sample",
    )  # fmt: skip
    parser.addoption(
        "--not-passed", action="store_true",
        help="run what did not pass in the last run, as what was skipped for want of a package",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _emulated(request, current_gpu, monkeypatch):
    """After `current_gpu`, which thus ends when what a test put in CuPy's place is gone."""
    count = request.config.getoption("--emulate-devices")
    if not count:
        return
    real = devices.open_devices

    def several(kind, workers, *, gpus=None, emulate=None):
        given = emulate is not None or gpus is not None
        return real(kind, workers, gpus=gpus, emulate=emulate if given else count)

    hybrid_gemm.free_memory()  # no runner kept from another test has other devices
    monkeypatch.setattr(devices, "open_devices", several)


def pytest_terminal_summary(terminalreporter, config):
    """Keeps what passed, for --not-passed, and shows what compiled kernels use, as
    test_kernel_compile.py recorded it."""
    passed = {x.nodeid for x in terminalreporter.getreports("passed") if x.when == "call"}
    if passed and (cache := getattr(config, "cache", None)):
        before = cache.get(PASSED, ()) if config.getoption("--not-passed") else ()
        cache.set(PASSED, sorted(passed.union(before)))
    rows = [
        value
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, value in report.user_properties
        if name == "usage" and report.when == "call"
    ]
    if rows:
        terminalreporter.section("kernels: registers a thread, bytes of shared memory and spills")
        head = ["kernel", "dtype", "layout", "arch", "registers", "shared", "stack", "spilled"]
        table = [head] + [[str(x) for x in row] for row in sorted(rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            cells = zip(line, widths, strict=True)
            terminalreporter.line("  ".join(x.ljust(width) for x, width in cells).rstrip())
