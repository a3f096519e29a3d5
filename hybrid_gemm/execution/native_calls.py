"""Calls that came before, found and started by one native function: `native_calls.cpp`, compiled
once by g++ if that is here. Python does the same otherwise.

What is asked of the arrays of a call, and looked up, takes Python longer than the driver takes to
launch a product.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np

from ..arrays.strides import Reach, reach
from ..arrays.tensors import called_whole, is_traced
from ..host.kept import Known

if TYPE_CHECKING:
    from ..devices.roles import Facts, Prepared

P = ParamSpec("P")
R = TypeVar("R")
How = Callable[[Any], Any]  # copies an operand
Reaches = tuple[Reach, Reach, Reach]  # of A, B and C
_SOURCE = Path(__file__).with_name("native_calls.cpp")
_OUT = 11  # where a key of native_calls.cpp has the shape of `out`; None where there is none
_PYTHON = Path(__file__).with_name("native_python.h")


class Copy(NamedTuple):
    """An operand of a call, what copied it, and the bytes that the copy lies in."""

    given: Any
    how: How
    address: int
    reach: Reach


class Started(NamedTuple):
    """A product that Python started: `prepared` for a stream of a GPU, with the addresses of A, B
    and C, the bytes that each lies in, and C's dtype; whether it was `turned`, started with B
    before A; and the copies of operands there were."""

    prepared: Prepared
    device: Facts
    stream: int
    addresses: tuple[int, int, int]
    reaches: Reaches
    dtype: str
    turned: bool = False
    copies: tuple[Copy, ...] = ()


class _Here(threading.local):
    """What this thread's call starts, None outside of calls that may be learnt, and what it copied
    last: two operands, how, and the copies while they are there."""

    started: list[Started] | None = None
    copied: deque[tuple[Any, How, weakref.ref[Any]]]


_here = _Here()


def phase(a: int, b: int, c: int) -> int:
    """What the addresses of A, B and C leave when divided by 16, in one number: kernels are chosen
    by it, and maps of tensors made."""
    return (a & 15) | (b & 15) << 4 | (c & 15) << 8


def note(started: Started) -> None:
    """Is told of each product that Python starts and that was prepared."""
    if _here.started is not None:
        made = [(given, how, copy()) for given, how, copy in _here.copied]
        copies = tuple(
            Copy(given, how, _address(x), _reach(x)) for given, how, x in made if x is not None
        )
        _here.started.append(started._replace(copies=copies))


def does_more() -> None:
    """Is told by a call that will do more than start what is noted: there is nothing to learn."""
    if _here.started is not None:
        _here.started.clear()
        _here.started = None


def copied_by(how: How | None, x: Any) -> Any:
    """`how(x)`, a copy of an operand as a kernel reads it, which known calls make, too; without
    `how` the operand itself."""
    if how is None:
        return x
    made = how(x)
    if _here.started is not None:
        _here.copied.append((x, how, weakref.ref(made)))
    return made


class _Product(ctypes.Structure):
    _fields_ = [
        ("start", c_void_p), ("prepared", c_void_p), ("context", c_void_p), ("ordinal", c_int64),
        ("turned", c_int64), ("phase", c_uint64), ("reaches", c_uint64 * 9),
    ]  # fmt: skip


@functools.cache
def unavailable() -> str | None:
    """Why calls are found by Python alone here, in one line."""
    from ..host import compiler

    return compiler.reason(_library)


@functools.cache
def _library() -> ctypes.PyDLL:
    from ..host import compiler
    from ..host.libraries import LibraryUnderLock

    library = LibraryUnderLock(str(compiler.build_library(_SOURCE, _PYTHON)))
    for make in library.make_start, library.make_key:
        make.argtypes, make.restype = [ctypes.py_object], ctypes.py_object
    return library


def _nothing(args: tuple, keywords: dict) -> Any:
    """Finds nothing."""


class NativeCalls:
    """The calls of one function that are known. `start(args, keywords)` gives C, or None where
    nothing was done; with `out_is_third` the function has `out` as its third argument, otherwise
    its C."""

    def __init__(self, *, out_is_third: bool = False) -> None:
        self._out_is_third = out_is_third
        self.forget()

    def forget(self) -> None:
        """Knows no call any more."""
        self.start: Callable[[tuple, dict], Any] = _nothing
        self._key: Callable[[tuple, dict], tuple | None] = _nothing
        self._state: list[Any] = []  # as the enumeration in native_calls.cpp says

    def served(self, function: Callable[P, R]) -> Callable[P, R]:
        """A decorator: calls that are known are started at once."""

        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if is_traced():
                return called_whole(call)(*args, **keywords)
            done = self.start(args, keywords)
            return self._watched(function, args, keywords) if done is None else done

        return call

    def _watched(self, function: Callable[..., R], args: tuple, keywords: dict) -> R:
        """What a call gives that is not known, and may be from now on."""
        if args and type(args[0]) is np.ndarray:  # which `_learn` leaves to Python
            return function(*args, **keywords)
        started: list[Started] = []
        _here.started, _here.copied = started, deque(maxlen=2)
        try:
            made = function(*args, **keywords)
        finally:
            _here.started, _here.copied = None, deque()
        if len(started) == 1:
            self._learn(args, keywords, made, started[0])
        return made

    def _learn(self, args: tuple, keywords: dict, made: Any, started: Started) -> None:
        """Knows calls with these keywords and with arrays that lie alike from now on, if the
        product that was started is all that such a call does, but for copies of A and B."""
        from ..devices.cuda import driver

        if started.prepared.native is None or unavailable():
            return
        arrays = (*args[:2], made)
        cupy = sys.modules["cupy"]
        if not all(hasattr(x, "data_ptr") or type(x) is cupy.ndarray for x in arrays):
            return  # of the host, and were copied
        lies = zip(arrays, started.addresses, started.reaches, strict=True)
        hows = [_how(x, address, of, started.copies) for x, address, of in lies]
        if False in hows or started.dtype != _dtype(made):
            return  # operands made otherwise, a part of C, or of a complex one the real product
        if cupy.cuda.runtime.getDevice() != started.device.ordinal:
            return  # whose context another one is
        if not self._state:
            self._open()
        self._know_torch()
        key = self._key(args, keywords)
        if key is None or key[1:3] != (started.device.ordinal, started.stream):
            return
        reaches = [*map(_reach, arrays)]
        if any(map(_is_backwards, arrays)):
            if key[_OUT] is not None:
                return
            reaches[:2] = [Reach(0, 0, 0)] * 2  # a new C meets neither
        product = _Product(
            *started.prepared.native, driver.current_context(), started.device.ordinal,
            started.turned, phase(*started.addresses), (c_uint64 * 9)(*itertools.chain(*reaches)),
        )  # fmt: skip
        make = _maker(arrays[0], made)
        shape, check = tuple(made.shape), started.prepared.check
        with contextlib.suppress(TypeError):  # a list among the keywords is no key
            self._state[0][key] = (
                bytes(product), check, make, shape, made.dtype, *hows[:2],
                started.device,  # which has the kernels loaded
            )  # fmt: skip

    def _open(self) -> None:
        from ..devices.cuda import driver

        cupy = sys.modules["cupy"]
        self._state = [
            Known(), driver.address_of("cuCtxGetCurrent"), self._out_is_third, cupy.ndarray,
            cupy.cuda.get_current_stream, *[None] * 6,
        ]  # fmt: skip
        self._key = _library().make_key(self._state)
        self.start = _library().make_start(self._state)

    def _know_torch(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or self._state[-1] is not None:
            return
        # PyTorch without CUDA has no streams, and one that another thread imports not all of these.
        with contextlib.suppress(AttributeError):
            self._state[-6:] = (
                torch.Tensor, torch.nn.Parameter, torch._C._cuda_getCurrentRawStream,
                torch.is_grad_enabled, torch.autograd.graph.increment_version,
                torch.autograd.forward_ad,
            )  # fmt: skip


def served_by(
    name: str,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R]]:
    """A decorator of methods: as `NativeCalls.served`, by those that the object has under this
    name, or by none where it has None."""

    def decorate(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
        @functools.wraps(method)
        def call(self: Any, /, *args: P.args, **keywords: P.kwargs) -> R:
            if is_traced():
                return called_whole(call)(self, *args, **keywords)
            calls: NativeCalls | None = getattr(self, name)
            if calls is None:
                return method(self, *args, **keywords)
            done = calls.start(args, keywords)
            if done is not None:
                return done
            return calls._watched(functools.partial(method, self), args, keywords)

        return call

    return decorate


def _how(x: Any, address: int, of: Reach, copies: Sequence[Copy]) -> How | Literal[False] | None:
    """What copied an array of a call to where a product read it; None where the product read the
    array, and False where it had neither."""
    if _address(x) == address:
        return None if _reach(x) == of else False
    for copy in copies:
        if copy.given is x and (copy.address, copy.reach) == (address, of):
            return copy.how
    return False


def _is_backwards(x: Any) -> bool:
    """Whether an array has bytes before its first element, of which `_reach` does not tell."""
    return not hasattr(x, "data_ptr") and min(x.strides, default=0) < 0


def _address(x: Any) -> int:
    return int(x.data_ptr() if hasattr(x, "data_ptr") else x.data.ptr)


def _reach(x: Any) -> Reach:
    """Of an array whose strides are positive."""
    size = x.dtype.itemsize
    strides = [step * size for step in x.stride()] if hasattr(x, "data_ptr") else x.strides
    return reach(x.shape, strides, size)


def _dtype(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _maker(a: Any, made: Any) -> Callable[..., Any]:
    """What makes a C: of A and a shape where that is a tensor, otherwise of a shape and a dtype."""
    if not hasattr(made, "data_ptr"):
        return type(made)
    new: Callable[..., Any] = sys.modules["torch"].Tensor.new_empty
    return new if a.dtype == made.dtype else functools.partial(new, dtype=made.dtype)
