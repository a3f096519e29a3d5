"""Whether a GPU is here, and kernel arguments as the CUDA driver is given them."""

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from hybrid_gemm.devices.cuda import driver
from hybrid_gemm.devices.cuda.device import CudaDevice
from hybrid_gemm.errors import UnavailableError, UsageError

MAP = np.arange(16, dtype=np.uint64).view([("words", np.uint64, 16)])


class CudaError(RuntimeError):
    """CuPy's CUDARuntimeError"""


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        ("libno-driver-here.so.1", "no GPU found: there is no NVIDIA driver here"),
        (None, "no CUDA device: cudaErrorInsufficientDriver"),  # None: this process, which loads
    ],
    ids=["no driver", "an old driver"],
)
def test_a_driver_that_is_missing_is_not_called_too_old(monkeypatch, library, reason):
    def count():
        assert library is None, "without a driver CuPy, which takes long to import, is not asked"
        raise CudaError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    runtime = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=CudaError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(driver, "LIBRARY", library)
    assert driver.unavailable().startswith(reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__version__ = '13.6.0'", "CuPy is 13.6.0; 14.0 or newer is needed (pip install"),
        # As CuPy says it where a package of its own is not there.
        ("""try:
    import fastrlock_is_not_here
except ImportError as error:
    raise ImportError('=' * 64 + 'and so on') from error""",
         "CuPy does not load: No module named 'fastrlock_is_not_here'"),
        ("raise SystemExit('no licence')", "CuPy does not load: no licence"),
        ("", "CuPy does not load: module 'cupy' has no attribute 'cuda'"),
        (None, "CuPy is not installed (pip install"),
    ],
    ids=["old", "does not load", "ends", "empty", "none"],
)  # fmt: skip
def test_a_cupy_that_does_not_serve_is_named(monkeypatch, tmp_path, text, reason):
    """Before 14.0, of bfloat16 a KeyError was all that came."""
    monkeypatch.setattr(driver, "_driver_missing", lambda: None)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if text is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    else:
        (tmp_path / "cupy.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
    assert driver.unavailable().startswith(reason)
    sys.modules.pop("cupy", None)


@pytest.mark.parametrize(
    ("capabilities", "runtime", "reasons"),
    [
        ([(7, 0)], 13000, ["7.0"]),
        ([(7, 0)], 12090, [None]),
        ([(7, 5)], 13000, [None]),
        ([(6, 1), (9, 0)], 13020, ["6.1", None]),
    ],
)
def test_a_gpu_that_cuda_13_left_out_is_told_to_take_cuda_12(
    monkeypatch, capabilities, runtime, reasons
):
    """Its driver may be for CUDA 13; the compiler and the libraries of that do not serve it."""
    played = SimpleNamespace(
        getDeviceCount=lambda: len(capabilities), runtimeGetVersion=lambda: runtime,
        deviceGetAttribute=lambda what, gpu: capabilities[gpu][what - 75],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=played)))
    monkeypatch.setattr(driver, "_driver_missing", lambda: None)
    for gpu, capability in enumerate(reasons):
        reason = driver.left_out(gpu)
        assert (reason is None) == (capability is None)
        if capability:
            assert f"compute capability {capability}" in reason and "[cuda12]" in reason
            with pytest.raises(UnavailableError, match=f"GPU {gpu} was asked for: CUDA 13"):
                CudaDevice(gpu)
    assert (driver.unavailable() is None) == (None in reasons)


@pytest.mark.parametrize(
    "args",
    [
        [np.int32(-3)],
        [MAP, MAP[::-1], np.int32(7), np.float32(-0.0), np.int64(2**40)],
        [np.int32(1), np.float64(np.inf), np.int32(2), np.uint64(2**63), np.float32(1.5)],
    ],
    ids=["one", "maps", "mixed"],
)
def test_arguments_lie_where_it_is_said(args):
    values, offsets = driver.packed(args)
    assert len(offsets) == len(args) and all(offset % 8 == 0 for offset in offsets)
    ends = [*offsets[1:], ctypes.sizeof(values)]
    for arg, start, end in zip(args, offsets, ends, strict=True):
        assert start + arg.nbytes <= end
        assert bytes(values)[start : start + arg.nbytes] == arg.tobytes()


def test_matrices_are_given_by_their_address():
    matrix = SimpleNamespace(data=SimpleNamespace(ptr=0x7F0012345600))
    values, offsets = driver.packed([np.int32(5), matrix, np.int32(6)])
    assert bytes(values)[offsets[1] : offsets[2]] == (0x7F0012345600).to_bytes(8, "little")
    assert bytes(values)[offsets[2] :][:4] == (6).to_bytes(4, "little")


def test_an_argument_that_no_kernel_takes_is_an_error():
    with pytest.raises(KeyError):
        driver.packed([np.complex64(1)])


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_hands_over_pointers_to_arguments(monkeypatch, early):
    """Through a C function pointer, as the driver's is."""
    seen, name = [], "cuLaunchKernelEx" if early else "cuLaunchKernel"

    def launched(*given):
        *numbers, arguments, extra = given
        if early:
            config, function = given[0].contents, given[1]
            first = config.attributes[0]
            assert (config.count, first.id, first.value[0]) == (1, 6, 1)
            names = [name for name, _ in driver._Config._fields_[:8]]
            numbers = [function, *(getattr(config, name) for name in names)]
        places = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        first = ctypes.cast(places[0], ctypes.POINTER(ctypes.c_int32))[0]
        second = ctypes.cast(places[1], ctypes.POINTER(ctypes.c_double))[0]
        third = ctypes.string_at(places[2], MAP.nbytes)
        seen.extend([tuple(numbers), first, second, third, extra])
        return 0

    c_function = ctypes.CFUNCTYPE(ctypes.c_int, *driver.SIGNATURES[name])(launched)
    monkeypatch.setattr(driver, "function", {name: c_function}.get)
    args = [np.int32(-5), np.float64(2.5), MAP]
    driver.launch(0x1234, (1, 2, 3), (4, 5, 6), args, 7, 0x88, early=early)
    assert seen == [(0x1234, 1, 2, 3, 4, 5, 6, 7, 0x88), -5, 2.5, MAP.tobytes(), None]


def test_a_copy_that_the_driver_refuses_is_a_clear_error(monkeypatch):
    """As from memory of another GPU that lies in one of CUDA's pools."""
    status = iter([1, 1, 0])
    monkeypatch.setattr(driver, "function", lambda name: lambda *args: next(status))
    for copy in (
        lambda: driver.copy(4096, 8192, 64, 0), lambda: driver.copy_2d(4096, 8, 8192, 16, 8, 2, 0),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"refuses a copy .*MemoryAsyncPool.* expandable"):
            copy()
    driver.copy(4096, 8192, 64, 0)


@pytest.mark.parametrize(
    ("capability", "float32", "float64"),
    [((9, 0), 66.9, 66.9), ((12, 0), 66.9, 1.05), ((12, 1), 66.9, 1.05), ((10, 3), 66.9, 1.05),
     ((8, 7), 66.9, 1.05), ((13, 0), None, None)],
)  # fmt: skip
def test_peaks_are_those_of_the_capability(capability, float32, float64):
    """132 multiprocessors at 1.98 GHz, of which the driver tells that float64 has a 64th."""
    told = {"ClockRate": 1980000, "MemoryClockRate": 0, "SingleToDoublePrecisionPerfRatio": 64}
    gpu = object.__new__(CudaDevice)
    gpu.ordinal, (major, minor) = 0, capability
    gpu.properties = {"major": major, "minor": minor, "multiProcessorCount": 132}
    of_driver = SimpleNamespace(attributes=told)
    gpu.cp = SimpleNamespace(cuda=SimpleNamespace(Device=lambda _: of_driver))
    for dtype, peak in (("float32", float32), ("float64", float64)):
        found = gpu.peak_tflops(dtype)
        assert found == (peak and pytest.approx(peak, rel=0.01)), dtype
    if capability == (12, 1):
        del gpu._told, told["SingleToDoublePrecisionPerfRatio"]
        assert gpu.peak_tflops("float64") is None
