"""The signature of a call, and the table of programs by it.

A signature is what a call is but for addresses: the function, its keywords by type and value, and
of each array its place, shape, strides and dtype. To it belong, too, how C relates to OUT, the
current stream of the arrays' GPU, whose workspaces launches hold, and what addresses leave when
divided by 16. Arrays of NumPy, CuPy (also together) and PyTorch have one; a call with others, such
as lists, is written each time.

Two functions make it, this module's and that of `signature.cpp`, which also plays programs: it is
compiled by g++, if that is here, once a program is kept that has a native launch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from ..arrays.strides import Reach
from ..arrays.tensors import called_whole, is_plain, is_traced
from ..host.derivatives import goes_forward
from ..host.kept import Known
from .program import Call, Program

P = ParamSpec("P")
Written = tuple[Program, Call]
_TRACER = "torch._dynamo"  # of torch.compile
MATMUL = "matmul"  # the function whose third argument by position is `out`
_SOURCE, _PYTHON = (Path(__file__).with_name(name) for name in ("signature.cpp", "python.h"))
_NOWHERE = None, None, None, None


class _Launch(ctypes.Structure):
    _fields_ = [
        ("start", c_void_p), ("prepared", c_void_p), ("context", c_void_p), ("phase", c_uint64),
        ("slots", c_int64 * 3),
    ]  # fmt: skip


def native_launch(
    native: tuple[int, int], context: int, phase: int, slots: tuple[int, int, int]
) -> bytes:
    """A launch as `signature.cpp` reads it; `native` is that of `roles.Prepared`."""
    return bytes(_Launch(*native, context, phase, slots))


def native_reaches(reaches: Sequence[Reach]) -> bytes:
    """Those of A, B, C and OUT as they stand before a program's launches."""
    return bytes((c_uint64 * 16)(*itertools.chain(*reaches)))


def phase(a: int, b: int, out: int) -> int:
    """What the addresses of A, B and OUT leave when divided by 16, in one number: kernels are
    chosen by it, and maps of tensors made."""
    return (a & 15) | (b & 15) << 4 | (out & 15) << 8


def signature(function: str, args: tuple, keywords: Mapping[str, Any]) -> tuple | None:
    """That of a call; None where it has none."""
    if not 2 <= len(args) <= 3:
        return None
    out, c = keywords.get("out"), args[2] if len(args) == 3 else None
    if function == MATMUL and len(args) == 3:
        if "out" in keywords:
            return None
        out, c = c, None
    relation = 0 if c is None else 1 if c is out else 3
    a, b = args[:2]
    if c is out:
        c = None
    options: tuple | None = None
    if keywords:
        every: list[Any] = []
        for name, value in keywords.items():
            if name != "out":
                try:
                    kept = repr(value) if type(value) in _TYPED else value
                except ValueError:  # a number that is longer than Python prints
                    return None
                every += name, type(value), kept
        options = tuple(every) or None
    if type(a) is type(b) is np.ndarray and type(c) in _HOST and type(out) in _HOST:
        return (
            function, options, relation, None, 0,
            None, a.shape, a.strides, a.dtype, None, b.shape, b.strides, b.dtype,
            *(_NOWHERE if c is None else (None, c.shape, c.strides, c.dtype)),
            *(_NOWHERE if out is None else (None, out.shape, out.strides, out.dtype)),
        )  # fmt: skip
    found = _on_gpus(a, b, c, out)
    if found is None:
        return None
    lies, places, stream = found
    if places[2] and places[2] == places[3]:
        relation = 2
    at = phase(places[0], places[1], places[3])
    return function, options, relation, stream, at, *itertools.chain(*lies)


_HOST = np.ndarray, type(None)
_TYPED = list, tuple, dict  # as text: what equals is of other types, and two are no keys


def _on_gpus(*arrays: Any) -> tuple[list[tuple], list[int], int] | None:
    """How arrays lie of which some lie on GPUs, their addresses, 0 of the host's, and the current
    stream of the first's GPU."""
    cupy, torch = (sys.modules.get(name) for name in ("cupy", "torch"))
    lies: list[tuple] = []
    places: list[int] = []
    stream: int | None = None
    tensors = [hasattr(x, "data_ptr") for x in arrays if x is not None]
    if any(tensors) != all(tensors):
        return None
    for x in arrays:
        if x is None or type(x) is np.ndarray:
            lies.append(_NOWHERE if x is None else (None, x.shape, x.strides, x.dtype))
            places.append(0)
            continue
        if type(x) is getattr(cupy, "ndarray", None):
            ordinal, at = x.data.device_id, x.data.ptr
            whole = x._c_contiguous and x.ndim == 2 and len(x)
            first, second = (len(x), x.size) if whole else (x.shape, x.strides)
            if stream is None:
                stream = sys.modules["cupy"].cuda.get_current_stream(ordinal).ptr
        elif tensors[0] and torch is not None and is_plain(x) and not goes_forward():
            ordinal, first, second, at = x.get_device(), x.shape, x.stride(), 0
            with contextlib.suppress(RuntimeError):  # of a tensor without memory
                at = x.data_ptr()
            if stream is None and ordinal >= 0:
                stream = torch._C._cuda_getCurrentRawStream(ordinal)
        else:
            return None
        if ordinal < 0 or not at:
            return None
        lies.append((ordinal, first, second, x.dtype))
        places.append(at)
    return None if stream is None else (lies, places, stream)


@functools.cache
def unavailable() -> str | None:
    """Why calls are played by Python alone here, in one line."""
    from ..host import compiler

    return compiler.reason(_library)


@functools.cache
def _library() -> ctypes.PyDLL:
    from ..host import compiler
    from ..host.libraries import LibraryUnderLock

    library = LibraryUnderLock(str(compiler.build_library(_SOURCE, _PYTHON)))
    for make in library.make_play, library.make_signature:
        make.argtypes, make.restype = [ctypes.py_object], ctypes.py_object
    return library


class Programs:
    """The programs of calls, by their signatures. Calls of any thread may look and keep."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Has no program any more."""
        self._table: Known[tuple, Program] = Known()
        self._state: list[Any] = []  # as the enumeration in signature.cpp says
        self._signature: Callable[..., tuple | None] = signature
        self.__dict__.pop("play", None)

    def play(self, function: str, args: tuple, keywords: Mapping[str, Any]) -> Any:
        """C of a call that has a program; None where there is none. Native code does this in place
        of Python once a program has native launches."""
        key = self._signature(function, args, keywords)
        try:
            program = self._table[key]  # type: ignore[index]
        except (KeyError, TypeError):  # an array among the keywords is no key
            return None
        c = args[2] if len(args) == 3 and function != MATMUL else None
        out = keywords.get("out", args[2] if len(args) == 3 and function == MATMUL else None)
        made = program.play(args[0], args[1], c, out)
        if program.launch and program.launch.native and not self._state and unavailable() is None:
            self._open()
        return made

    def keep(self, function: str, args: tuple, keywords: Mapping[str, Any], made: Program) -> None:
        """Has a program for calls like this one from now on."""
        self._know_libraries()
        key = self._signature(function, args, keywords)
        with contextlib.suppress(TypeError):  # a list among the keywords is no key
            if key is not None:
                self._table[key] = made

    def _open(self) -> None:
        from ..devices.cuda import driver

        self._state = [
            self._table, MATMUL, driver.address_of("cuCtxGetCurrent"),
            driver.address_of("cuStreamIsCapturing"), np.ndarray, *[None] * 8,
        ]  # fmt: skip
        self._signature = _library().make_signature(self._state)
        self._know_libraries()
        self.play = _library().make_play(self._state)  # type: ignore[method-assign]

    def _know_libraries(self) -> None:
        if not self._state:
            return
        cupy, torch = (sys.modules.get(name) for name in ("cupy", "torch"))
        # One that another thread imports has not all of these, PyTorch without CUDA no streams.
        if self._state[5] is None and cupy is not None:
            with contextlib.suppress(AttributeError):
                self._state[5:7] = cupy.ndarray, cupy.cuda.get_current_stream
        if self._state[-1] is None and torch is not None:
            with contextlib.suppress(AttributeError):
                self._state[-6:] = (
                    torch.Tensor, torch.nn.Parameter, torch._C._cuda_getCurrentRawStream,
                    torch.is_grad_enabled, torch.autograd.graph.increment_version,
                    torch.autograd.forward_ad,
                )  # fmt: skip

    def get(self, function: str, args: tuple, keywords: Mapping[str, Any]) -> Program | None:
        """The program of calls like this one."""
        try:
            return self._table.get(self._signature(function, args, keywords))  # type: ignore[arg-type]
        except TypeError:  # an array among the keywords is no key
            return None

    def first(self, function: str, written: Written, args: tuple, keywords: Mapping) -> Any:
        """Plays a program that was just written, and keeps it."""
        program, call = written
        made = program.play(*call.arrays)
        if program.kept:
            self.keep(function, args, keywords, program)
        return made


def played(function: str, by: Programs | str) -> Callable[[Callable[P, Written]], Callable[P, Any]]:
    """A decorator of what writes a call's program: the call plays it. Those that there are, are
    `by`, or of a method what its object has by this name."""

    def decorate(write: Callable[P, Written]) -> Callable[P, Any]:
        @functools.wraps(write)
        def call(*args: P.args, **keywords: P.kwargs) -> Any:
            if _TRACER in sys.modules and is_traced():
                return called_whole(call)(*args, **keywords)
            programs: Programs = getattr(args[0], by) if isinstance(by, str) else by
            given: tuple = args if programs is by else args[1:]
            done = programs.play(function, given, keywords)
            if done is not None:
                return done
            return programs.first(function, write(*args, **keywords), given, keywords)

        return call

    return decorate
