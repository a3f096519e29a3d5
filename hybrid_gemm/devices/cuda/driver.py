"""Whether CUDA is here, and calls of its driver that keep Python's lock.

These return at once. CuPy lets the lock go around such calls, and where dozens of threads fill
and empty slots, getting it back takes a hundred times as long as the call does.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import UsageError, in_one_line
from ...host.gpu_context import LIBRARY
from ...host.installing import CUPY, first_cause, outdated_cupy, pip_install
from ...host.libraries import Library, LibraryUnderLock

NOT_READY = 600  # CUDA_ERROR_NOT_READY
_KINDS = {"i": "i", "l": "q", "q": "q", "L": "Q", "Q": "Q", "f": "f", "d": "d"}  # NumPy's, struct's
Offsets = tuple[int, ...]  # bytes from the start of a buffer
Readers = tuple[Callable[[Any], Any] | None, ...]  # of an argument's value; None: it is the value
STRUCTURES_ON = 64  # bytes: so the driver wants tensor maps that it changes
_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the address tells where it is
_SIDE = (
    ("x", c_size_t), ("y", c_size_t), ("type", c_int), ("host", c_void_p), ("device", c_uint64),
    ("array", c_void_p), ("pitch", c_size_t),
)  # fmt: skip


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D"""

    _fields_ = [
        *((f"{side}_{name}", kind) for side in ("src", "dst") for name, kind in _SIDE),
        ("width", c_size_t), ("height", c_size_t),
    ]  # fmt: skip


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is 64 bytes"""

    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        *((f"{what}_{axis}", c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", c_uint),
    ]  # fmt: skip


_EARLY = Attribute(6, 0, (1,))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
# What native threads call, in the order in which they know them.
_NATIVE = (
    "cuCtxSetCurrent", "cuMemcpyAsync", "cuMemcpy2DAsync_v2", "cuEventRecord",
    "cuStreamWaitEvent", "cuEventQuery",
)  # fmt: skip
SIGNATURES = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Copy2D), c_void_p),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphGetNodes": (c_void_p, c_void_p, c_void_p),
    "cuGraphNodeGetType": (c_void_p, c_void_p),
    "cuGraphNodeGetDependencies": (c_void_p, c_void_p, c_void_p),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetAttribute": (c_void_p, c_int, c_void_p),
    "cuFuncGetName": (c_void_p, c_void_p),
    "cuKernelGetName": (c_void_p, c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, c_void_p, c_void_p),
    "cuKernelGetParamInfo": (c_void_p, c_size_t, c_void_p, c_void_p),
    "cuStreamIsCapturing": (c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuLaunchKernelEx": (ctypes.POINTER(_Config), c_void_p, c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuTensorMapReplaceAddress": (c_void_p, c_void_p),
    "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(c_int),),
}
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
CAPABILITY = 75, 76  # cudaDevAttrComputeCapabilityMajor and -Minor
LEAST_OF_CUDA_13 = 7, 5  # compute capability
# A launch that was noted: function, grid, block, arguments, bytes of shared memory, attributes.
Noted = tuple[
    int, Sequence[int], Sequence[int], Sequence[Any], int, Sequence[Attribute]
]  # fmt: skip
_notes = threading.local()


class Cleared(NamedTuple):
    """Memory that was to be cleared: its address, and bytes."""

    at: int
    size: int


def _driver_missing() -> str | None:
    try:
        Library(LIBRARY)
    except OSError:
        return f"no GPU found: there is no NVIDIA driver here ({LIBRARY})"
    return None


def unavailable() -> str | None:
    """Why there is no CUDA device here, in one line; None if there is one."""
    # First: without a driver CuPy, which is imported in a third of a second, finds no device.
    if missing := _driver_missing():
        return missing
    try:
        import cupy

        if reason := outdated_cupy(getattr(cupy, "__version__", CUPY)):
            return reason
        runtime = cupy.cuda.runtime  # not there where "cupy" is any folder
    except (Exception, SystemExit) as error:  # a broken CUDA installation fails in many ways
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed ({pip_install('cuda13')}, or cuda12 for an older driver)"
        return f"CuPy does not load: {in_one_line(first_cause(error))}"
    with contextlib.suppress(OSError, AttributeError):
        Library(LIBRARY).cuInit(0)  # before CuPy, which keeps Python's lock: it may hang
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    if not count:
        return "no CUDA device is visible"
    reasons = list(map(left_out, range(count)))
    return None if None in reasons else reasons[0]


def left_out(gpu: int) -> str | None:
    """Why the CUDA that CuPy brings does not serve a GPU; None if it does."""
    import cupy

    runtime = cupy.cuda.runtime
    found = tuple(runtime.deviceGetAttribute(number, gpu) for number in CAPABILITY)
    if found >= LEAST_OF_CUDA_13 or runtime.runtimeGetVersion() < 13000:
        return None
    return (
        f"CUDA 13 left out GPUs like GPU {gpu}, of compute capability {found[0]}.{found[1]}: "
        f"pip uninstall cupy-cuda13x, then {pip_install('cuda12')}"
    )


@functools.cache
def function(name: str) -> Any:
    library = LibraryUnderLock(LIBRARY)
    function = getattr(library, name)
    function.argtypes = SIGNATURES[name]
    return function


def address_of(name: str) -> int:
    """Where one of the driver's functions is, for native code."""
    return ctypes.cast(function(name), c_void_p).value or 0


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread allocate memory and load kernels while streams are captured, whatever mode
    they are captured in: nothing of that is queued on a stream."""
    mode = c_int(RELAXED)
    exchange = function("cuThreadExchangeStreamCaptureMode")
    check(exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        check(exchange(ctypes.byref(mode)))


def current_context() -> int:
    """The address of this thread's context; 0 where it has none."""
    context = c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


@dataclass(frozen=True)
class Calls:
    """What a thread without Python needs to copy to and from a GPU: addresses of the driver's
    functions (set context, copy, copy in 2-D, record, wait, whether an event is over), and the
    GPU's context."""

    functions: tuple[int, ...]
    context: int


def calls(context: int) -> Calls:
    """The driver's functions, for a context."""
    return Calls(tuple(map(address_of, _NATIVE)), context)


def check(status: int) -> None:
    """Raises what the driver means by a status that is not 0."""
    import cupy

    cupy.cuda.driver.check_status(status)


def call(name: str, *args: Any, fine: int = 0) -> int:
    """The status, which is 0 or `fine`."""
    status = function(name)(*args)
    if status and status != fine:
        check(status)
    return status


def copy(dst: int, src: int, size: int, stream: int) -> None:
    """Copies bytes between GPUs, or a GPU and page-locked host memory. Raises `UsageError` where
    the driver refuses that."""
    _copied(call("cuMemcpyAsync", dst, src, size, stream, fine=INVALID_VALUE))


def copy_2d(
    dst: int, dst_pitch: int, src: int, pitch: int, width: int, height: int, stream: int
) -> None:
    """As `copy`, for `height` runs of `width` bytes."""
    what = _Copy2D(
        src_type=_UNIFIED, src_device=src, src_pitch=pitch,
        dst_type=_UNIFIED, dst_device=dst, dst_pitch=dst_pitch, width=width, height=height,
    )  # fmt: skip
    _copied(call("cuMemcpy2DAsync_v2", ctypes.byref(what), stream, fine=INVALID_VALUE))


def _copied(status: int) -> None:
    if status:
        raise UsageError(
            "the driver refuses a copy (CUDA_ERROR_INVALID_VALUE). Other GPUs do not read arrays "
            "of CuPy's MemoryAsyncPool or of PyTorch's expandable segments: copy such an array to "
            "the GPU that multiplies, or multiply on the GPU that has it"
        )


def clear(at: int, size: int, stream: int) -> None:
    """Fills memory of a GPU with zeros."""
    notes = getattr(_notes, "launches", None)
    if notes is not None:
        notes.append(Cleared(at, size))
        return
    call("cuMemsetD8Async", at, 0, size, stream)


def launch(
    function: int, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared: int,
    stream: int, *, early: bool = False,
) -> None:  # fmt: skip
    """Starts a kernel of the current GPU; `args` as `packed` takes them. An `early` one's blocks
    may begin while those of what was launched before end."""
    notes = getattr(_notes, "launches", None)
    if notes is not None:
        notes.append((function, grid, block, args, shared, (_EARLY,) if early else ()))
        return
    values, offsets = packed(args)
    at = ctypes.addressof(values)
    # As bytes: an array of pointers takes Python four times as long to make.
    places = struct.pack(f"={len(offsets)}Q", *[at + offset for offset in offsets])
    if early:
        how = config(grid, block, shared, stream, (_EARLY,))
        call("cuLaunchKernelEx", ctypes.byref(how), function, places, None)
    else:
        call("cuLaunchKernel", function, *grid, *block, shared, stream, places, None)


def without(noted: Noted | Cleared, passing: Sequence[range]) -> Noted | Cleared:
    """The same, where arrays in memory that is given back are addresses alone."""
    if isinstance(noted, Cleared):
        return noted
    function, grid, block, args, shared, attributes = noted

    def known(arg: Any) -> Any:
        if isinstance(arg, np.ndarray | np.generic):
            return arg
        at = int(arg.data.ptr)
        return np.uint64(at) if any(x.start <= at < x.stop for x in passing) else arg

    return function, grid, block, [known(arg) for arg in args], shared, attributes


def config(
    grid: Sequence[int], block: Sequence[int], shared: int, stream: int,
    attributes: Sequence[Attribute],
) -> ctypes.Structure:  # fmt: skip
    """A CUlaunchConfig."""
    count = len(attributes)
    listed = (Attribute * count)(*attributes) if count else None
    return _Config(*grid, *block, shared, stream, listed, count)


@contextlib.contextmanager
def noted() -> Iterator[list[Noted | Cleared]]:
    """Notes what this thread launches and clears, and does none of it."""
    _notes.launches = []
    try:
        yield _notes.launches
    finally:
        _notes.launches = None


def packed(args: Sequence[Any]) -> tuple[ctypes.Array, Offsets]:
    """A kernel's arguments in one buffer, and where in it each begins: NumPy scalars, CuPy arrays
    (their address), and structures as NumPy arrays of one element."""
    pack, room, offsets, values = _form(
        tuple([x.nbytes if isinstance(x, np.ndarray) else type(x) for x in args])
    )
    return room.from_buffer_copy(
        pack(*[f(x) if f else x for f, x in zip(values, args, strict=True)])
    ), offsets


@functools.cache
def _form(kinds: tuple[type | int, ...]) -> tuple[Callable[..., bytes], Any, Offsets, Readers]:
    """How values of these types, or structures of so many bytes, are packed one after the other,
    each on 8 bytes, structures on `STRUCTURES_ON`; the buffer's type; where each begins; what gives
    its value, if not itself."""
    text, offsets = "=", []
    values: list[Callable[[Any], Any] | None] = []
    value: Callable[[Any], Any] | None
    for kind in kinds:
        text += "x" * (-struct.calcsize(text) % (STRUCTURES_ON if isinstance(kind, int) else 8))
        offsets.append(struct.calcsize(text))
        if isinstance(kind, int):
            text, value = text + f"{kind}s", np.ndarray.tobytes
        elif issubclass(kind, np.generic):
            text, value = text + _KINDS[np.dtype(kind).char], None
        else:
            text, value = text + "Q", operator.attrgetter("data.ptr")
        values.append(value)
    form = struct.Struct(text)
    return form.pack, ctypes.c_char * form.size, tuple(offsets), tuple(values)
