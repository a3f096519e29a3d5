"""One test body, every device that is there: `device` runs a test on each of them."""

import signal

import numpy as np
import pytest

from hybrid_gemm import devices
from hybrid_gemm.errors import UnavailableError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs behind them:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests' children shall see it


def _reason(kind: str) -> str | None:
    try:
        devices.choose(kind)
    except UnavailableError as error:
        return str(error)
    return None


REASONS = {kind: _reason(kind) for kind in devices.KINDS}


def on(kind: str):
    """A parameter for tests of one device, skipped with the reason where it is not here."""
    mark = pytest.mark.skipif(REASONS[kind] is not None, reason=str(REASONS[kind]))
    return pytest.param(kind, marks=mark)


DEVICES = [on(kind) for kind in devices.KINDS]
KERNEL_DEVICES = [on("emulator"), on("cuda")]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=KERNEL_DEVICES)
def kernel_device(request):
    return request.param


def integers(rng, shape, dtype="float32"):
    """Whole numbers whose float32 products are exact."""
    return rng.integers(-4, 5, shape).astype(dtype)


@pytest.fixture
def rng():
    return np.random.default_rng(20240607)


def pytest_addoption(parser):
    parser.addoption(
        "--emulate-devices", type=int, metavar="N",
        help="run every test as if one GPU (or the emulator) played N devices",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _emulated(request, monkeypatch):
    count = request.config.getoption("--emulate-devices")
    if not count:
        return
    real = devices.open_devices

    def several(kind, workers, *, gpus=None, emulate=None):
        return real(kind, workers, gpus=gpus, emulate=count if emulate is None else emulate)

    from hybrid_gemm import api

    api._runner.cache_clear()
    monkeypatch.setattr(devices, "open_devices", several)


def pytest_terminal_summary(terminalreporter):
    """What compiled kernels use, as test_kernel_compile.py recorded it."""
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
