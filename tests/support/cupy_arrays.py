"""CuPy's arrays played by NumPy's, where there is no GPU: the values are NumPy's, and what CuPy has
not, or does not take, raises as it does there. What it has is asked of CuPy itself, if that is
installed; it imports without a GPU."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import cupy as real
except ImportError:
    real = None

_MAKE = ("asarray", "array", "empty", "zeros", "ones", "full", "arange", "zeros_like", "empty_like",
         "full_like", "ones_like")  # fmt: skip
_OF_UFUNCS = {"out", "dtype", "casting"}
_VIEWS = ("view", "reshape", "transpose")  # which stay where they are, most of them


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """`held` are the values. Reductions give arrays without dimensions, as CuPy's do."""

    __module__ = "cupy"

    def __init__(self, held: Any) -> None:
        self.held = np.asarray(held)

    def like(self, held: Any) -> Array:
        """Another array of this GPU, which may be a view of this one."""
        return Array(held)

    def need_current(self) -> None:
        """Asserts that the array's GPU is the current one."""

    def before(self) -> None:
        """What a GPU needs before it computes with this array."""
        self.need_current()

    shape = property(lambda self: self.held.shape)
    strides = property(lambda self: self.held.strides)
    dtype = property(lambda self: self.held.dtype)
    ndim = property(lambda self: self.held.ndim)
    size = property(lambda self: self.held.size)
    nbytes = property(lambda self: self.held.nbytes)
    itemsize = property(lambda self: self.held.itemsize)
    flags = property(lambda self: self.held.flags)
    T = property(lambda self: self.like(self.held.T))
    real = property(lambda self: self.like(self.held.real))
    imag = property(lambda self: self.like(self.held.imag))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(real.ndarray if real else np.ndarray, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            if name not in _VIEWS:
                self.before()
            _bind(name, _signature_of_method(found), (self, *args), kwargs)
            made = getattr(self.held, name)(*map(_held, args), **_held_in(kwargs))
            return _played(made, self.like)

        return method

    def astype(self, dtype: Any, order: Any = "K", copy: bool = True) -> Array:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        self.before()
        return self.like(self.held.astype(dtype, order=order))

    def get(self) -> np.ndarray:
        return self.held.copy()

    def item(self) -> Any:
        return self.held.item()

    def __array__(self, *_how: Any, **_more: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __len__(self) -> int:
        return len(self.held)

    def __bool__(self) -> bool:
        return bool(self.held)

    def __float__(self) -> float:
        return float(self.held)

    def __int__(self) -> int:
        return int(self.held)

    def __complex__(self) -> complex:
        return complex(self.held)

    def __index__(self) -> int:
        return self.held.__index__()

    def __getitem__(self, where: Any) -> Array:
        return self.like(self.held[_index(where)])

    def __setitem__(self, where: Any, values: Any) -> None:
        check_assigned(values)
        self.held[_index(where)] = _held(values)

    def __array_ufunc__(self, ufunc: np.ufunc, how: str, *inputs: Any, **kwargs: Any) -> Any:
        if how != "__call__" or not _has(ufunc.__name__) or set(kwargs) - _OF_UFUNCS:
            raise TypeError(f"CuPy has no {ufunc.__name__}.{how} with {sorted(kwargs)}")
        _check((*inputs, *kwargs.get("out", ())))
        out = kwargs.pop("out", None)
        if out is not None:
            kwargs["out"] = tuple(_held(x) for x in out)
        with np.errstate(all="ignore"):  # a GPU does not warn
            made = ufunc(*map(_held, inputs), **kwargs)
        if out is not None:
            return out[0] if len(out) == 1 else out
        return _played(made, self.like)

    def __array_function__(self, function: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        return call(function.__name__, args, kwargs, self.like)


def check_assigned(values: Any) -> None:
    """Raises where CuPy does not take such values for elements of an array."""
    if isinstance(values, np.ndarray) and values.ndim:
        raise ValueError("non-scalar numpy.ndarray cannot be used for fill")


def call(name: str, args: tuple, kwargs: dict, like: Callable[[Any], Any] = Array) -> Any:
    """A function of CuPy's, which does as NumPy's of that name; `like` makes its arrays."""
    if not _has(name):
        raise AttributeError(f"module 'cupy' has no attribute {name!r}")
    if isinstance(getattr(np, name), np.ufunc):
        first = like(args[0]) if np.isscalar(args[0]) else args[0]
        if not any(isinstance(x, Array) for x in (first, *args)):
            raise TypeError(f"Unsupported type {type(first)}")
        return getattr(np, name)(first, *args[1:], **kwargs)
    _bind(name, _signature(getattr(real, name, None)), args, kwargs)
    _check((*args, *kwargs.values()), makes=name in _MAKE)
    with np.errstate(all="ignore"):
        made = getattr(np, name)(*map(_held, args), **_held_in(kwargs))
    out = kwargs.get("out")
    if name == "array" or name == "asarray":
        made = made if isinstance(args[0], Array) else np.array(made)  # a copy: another memory
    return _played(made, like) if out is None else out


def _has(name: str) -> bool:
    return real is None or hasattr(real, name)


def _bind(name: str, signature: inspect.Signature | None, args: tuple, kwargs: dict) -> None:
    if signature is not None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"cupy's {name}: {error}") from None


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function) if real else None
    except (TypeError, ValueError):
        return None


@functools.cache
def _signature_of_method(method: Any) -> inspect.Signature | None:
    """Methods say theirs in the first line of their text, with C's types."""
    found = re.match(r"[\w.]*?(\w+\(.*\))( ->.*)?$", (method.__doc__ or "").partition("\n")[0])
    if not real or not found:
        return None
    line = re.sub(r"\b(int|bool|Py_ssize_t|bint|object|dtype) (?=\w)", "", found[1])
    names: dict[str, Any] = {}
    try:
        exec(f"def {line}: pass", names)
    except SyntaxError:
        return None
    del names["__builtins__"]
    return inspect.signature(next(iter(names.values())))


def _held(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_held, x))
    return x.held if isinstance(x, Array) else x


def _held_in(kwargs: dict) -> dict:
    return {name: _held(x) for name, x in kwargs.items()}


def _flat(x: Any) -> Any:
    return (y for part in x for y in _flat(part)) if isinstance(x, (list, tuple)) else (x,)


def _check(given: Any, *, makes: bool = False) -> None:
    """Of what a function is given: an array of the host is for one that `makes` arrays."""
    for x in _flat(given):
        if isinstance(x, np.ndarray) and not makes:
            raise TypeError(f"Unsupported type {type(x)}")
        if isinstance(x, Array):
            (x.need_current if makes else x.before)()


def _index(where: Any) -> Any:
    """CuPy takes arrays of both kinds as indices."""
    return tuple(map(_held, where)) if isinstance(where, tuple) else _held(where)


def _played(made: Any, like: Callable[[Any], Any]) -> Any:
    if isinstance(made, (tuple, list)):
        return type(made)(_played(x, like) for x in made)
    return like(np.asarray(made)) if isinstance(made, (np.ndarray, np.generic)) else made


class Module(types.ModuleType):
    """cupy's functions, of arrays that `like` makes."""

    def __init__(self, ndarray: type = Array, like: Callable[[Any], Any] = Array) -> None:
        super().__init__("cupy")
        self.ndarray, self.like = ndarray, like

    def asarray(self, x: Any, dtype: Any = None) -> Any:
        if isinstance(x, Array):
            return x if dtype is None else x.astype(dtype, copy=False)
        return self.like(np.array(x, dtype))

    def broadcast_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        return x.like(np.broadcast_to(x.held, shape))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not _has(name):
            raise AttributeError(name)
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found  # inf, float64
        return lambda *args, **kwargs: call(name, args, kwargs, self.like)


def play(monkeypatch: Any) -> Module:
    """`import cupy` gives the stand-in, until the test is over."""
    module = Module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module
