"""Arrays of PyTorch, JAX, Numba, and of anything else with DLPack or the CUDA array interface.

While a product is made they are NumPy's or CuPy's views of the same memory; C is given back as an
array of the caller's library.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import DTypeError, UnavailableError, UsageError
from ..host.derivatives import check_no_tangent
from ..host.installing import pip_install
from ..host.notes import warn
from ..problem import WORK
from .strides import address, is_device_array
from .tensors import check_storage, is_functional

_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def check_dense(x: Any, name: str) -> None:
    """Raises `DTypeError` for a sparse matrix of any library; `name` is the operand's."""
    for way in ("toarray", "todense"):
        if hasattr(x, way):
            raise DTypeError(f"{name} is a sparse {type(x).__name__}; .{way}() makes it dense")


_MEANINGS = "iloc", "columns", "coords", "unit", "units"  # what labels and units are called


def warn_of_meaning(x: Any, name: str) -> None:
    """Warns where an array has labels or units, of which a product knows nothing."""
    if any(hasattr(x, meaning) for meaning in _MEANINGS):
        does = "keeps" if name == "out" else "loses"
        warn(
            f"{name} is a {type(x).__name__}, which {does} its labels or units: the product is one "
            "of numbers alone"
        )


class Library:
    """How arrays of one library are looked at, and made. This one knows the protocols alone."""

    def view(self, x: Any, name: str) -> Any:
        """A NumPy or CuPy array of the same memory; `name` is the operand's, for messages."""
        check_dense(x, name)
        warn_of_meaning(x, name)
        if hasattr(x, "__cuda_array_interface__"):
            return _cupy().asarray(x)
        if self.on_gpu(x):
            return _cupy().from_dlpack(x)
        if any(hasattr(x, way) for way in ("__array__", "__array_interface__", "__buffer__")):
            return np.asarray(x)
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError) as error:
            raise UsageError(
                f"{name} is a {type(x).__name__} that NumPy cannot read: {error}"
            ) from error

    def on_gpu(self, x: Any) -> bool:
        """Whether an array lies on a GPU of NVIDIA's."""
        if hasattr(x, "__cuda_array_interface__"):
            return True
        return hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in _DLPACK_CUDA

    def out(self, x: Any) -> Any:
        """As `view`, of an array that the product is written to. Raises `UsageError` where NumPy
        is given a copy, which would take the product in its place."""
        view = self.view(x, "out")
        if is_device_array(view) or not view.size or _lie_as_one(view, self.view(x, "out")):
            return view
        try:
            view = np.from_dlpack(x)  # `__array__` copies in some libraries where DLPack does not
            if view.flags.writeable and _lie_as_one(view, np.from_dlpack(x)):
                return view
        except (BufferError, RuntimeError, TypeError, ValueError):
            pass
        raise UsageError(
            f"out is a {type(x).__name__}, of which NumPy gets only copies; give an array of "
            "NumPy's, or leave it out and take the result"
        )

    def written(self, x: Any) -> None:
        """Tells the library that an array was written to."""

    def give(self, made: Any, like: Any) -> Any:
        """An array of the library that has the memory of NumPy's or CuPy's `made`; made itself
        where the library of `like` has no way to look at it."""
        if not hasattr(like, "__array_namespace__"):
            return made
        return like.__array_namespace__().from_dlpack(
            made if is_device_array(made) else np.asarray(made)
        )

    def stream(self, ordinal: int) -> int | None:
        """The address of the library's current stream of a GPU; None where CuPy's counts."""
        return None

    def lets_go(self, x: Any) -> bool:
        """Whether the memory may be used anew when the view is gone, though a stream reads it."""
        return not hasattr(x, "__cuda_array_interface__") and self.on_gpu(x)

    def lending(self, gpus: Collection[int]) -> contextlib.AbstractContextManager[None]:
        """Meanwhile CuPy makes arrays in memory of this library's, if it lends any, on these GPUs,
        where what CuPy works on comes after, and before, what the library's streams are given."""
        return contextlib.nullcontext()


def _lie_as_one(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two views of one array, of which both are still there, are in the same memory."""
    return address(x) == address(y)


class Torch(Library):
    """PyTorch. Products are queued on its current stream, and its allocator knows of no other. What
    they allocate is PyTorch's, so that a graph that it records keeps it."""

    def __init__(self) -> None:
        self._lent = threading.local()

    @contextlib.contextmanager
    def lending(self, gpus: Collection[int]) -> Iterator[None]:
        import torch

        cp, before = _cupy(), self._tensors()
        cuda, usual = cp.cuda, cp.cuda.get_allocator()
        made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._lent.tensors = made

        def allocate(size: int) -> Any:
            ordinal = cuda.runtime.getDevice()
            if ordinal not in gpus:
                return usual(size)
            try:
                x = torch.empty(size, dtype=torch.uint8, device=f"cuda:{ordinal}")
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from None
            if torch.are_deterministic_algorithms_enabled():  # which fill it, on PyTorch's stream
                filled = external_stream(cp, self.stream(ordinal), ordinal).record()
                cuda.get_current_stream().wait_event(filled)
            made[x.data_ptr()] = x
            return cuda.MemoryPointer(cuda.UnownedMemory(x.data_ptr(), size, x, ordinal), 0)

        try:
            with cuda.using_allocator(allocate):
                yield
        finally:
            self._lent.tensors = before

    @property
    def lends(self) -> bool:
        """Whether what this thread allocates is PyTorch's now, whose graphs keep it."""
        return isinstance(self._tensors(), weakref.WeakValueDictionary)

    def _tensors(self) -> Mapping[int, Any]:
        """What was allocated so, by its address."""
        found: Mapping[int, Any] = getattr(self._lent, "tensors", {})
        return found

    def view(self, x: Any, name: str) -> Any:
        import torch

        if not isinstance(x, torch.Tensor):
            raise DTypeError(f"{name} is a {type(x).__name__} of PyTorch; a tensor works")
        if x.requires_grad:
            if torch.is_grad_enabled():
                of_stacks = ", of x.flatten(0, -2)," if x.ndim > 2 else ""
                raise UsageError(
                    f"{name} is a tensor that requires gradients, and gemm follows none: "
                    f"hybrid_gemm.torch.gemm does{of_stacks} and .detach() leaves them out"
                )
            x = x.detach()
        check_no_tangent(x, name)
        if is_functional(x):
            raise UsageError(
                f"{name} is a tensor of torch.func.functionalize, whose elements cannot be read "
                "(hybrid_gemm.torch.gemm works there)"
            )
        check_strided(x.layout, x.device, name)
        dtype = torch_dtype(x.dtype, name)
        try:
            check_storage(x, name)
            x = x.resolve_conj().resolve_neg()
            if x.device.type == "cuda":
                return self._on_gpu(x, dtype)
            if dtype == _BFLOAT16:
                return x.view(torch.int16).numpy().view(dtype)
            return x.numpy()
        except TypeError:
            raise _no_dtype(x.dtype, name) from None
        except RuntimeError as error:  # of a subclass, or within torch.vmap
            raise UsageError(
                f"{name} is a {type(x).__name__} whose elements cannot be read: {error} "
                "(hybrid_gemm.torch.gemm works in torch.vmap and in torch.compile)"
            ) from error

    @staticmethod
    def _on_gpu(x: Any, dtype: np.dtype) -> Any:
        cupy = _cupy()
        strides = tuple(step * dtype.itemsize for step in x.stride())
        extent = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True)) + dtype.itemsize
        memory = cupy.cuda.UnownedMemory(x.data_ptr(), max(0, extent), x, x.device.index)
        at = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(tuple(x.shape), dtype, at, strides)

    def out(self, x: Any) -> Any:
        view = self.view(x, "out")
        if x.is_conj() or x.is_neg():
            raise UsageError("out is a lazily conjugated or negated view, which cannot be written")
        return view

    def written(self, x: Any) -> None:
        import torch

        if not x.is_inference():  # autograd notices what was saved for backward and is gone
            torch.autograd.graph.increment_version(x)

    def give(self, made: Any, like: Any) -> Any:
        import torch

        if is_device_array(made) and (memory := self._tensors().get(made.data.ptr)) is not None:
            steps = [step // made.itemsize for step in made.strides]
            there = torch.empty(0, dtype=getattr(torch, made.dtype.name), device=memory.device)
            return there.set_(memory.untyped_storage(), 0, made.shape, steps)
        bits = made.view(np.int16) if made.dtype == _BFLOAT16 else made
        if is_device_array(made):
            there = torch.from_dlpack(bits)
        else:
            there = torch.from_numpy(np.asarray(bits))
        return there.view(torch.bfloat16) if bits is not made else there

    def stream(self, ordinal: int) -> int:
        import torch

        current = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # in a tenth of the time
        return int(current(ordinal) if current else torch.cuda.current_stream(ordinal).cuda_stream)

    def lets_go(self, x: Any) -> bool:
        return False


class Jax(Library):
    """JAX. DLPack lets CuPy's current stream wait for JAX's, and the other way round."""

    def on_gpu(self, x: Any) -> bool:
        """Whether one GPU has all of it."""
        import jax

        if isinstance(x, jax.core.Tracer):
            return False  # of which np.asarray says what it is
        places = x.devices()
        return len(places) == 1 and next(iter(places)).platform in ("gpu", "cuda")

    def view(self, x: Any, name: str) -> Any:
        import jax

        if not isinstance(x, jax.Array):
            check_dense(x, name)
            raise DTypeError(f"{name} is a {type(x).__name__} of JAX; a jax.Array works")
        if not self.on_gpu(x):
            return np.asarray(x)
        try:
            return _cupy().from_dlpack(x)
        except (BufferError, NotImplementedError, TypeError, ValueError):
            if x.dtype != _BFLOAT16:
                raise
            # CuPy before 14.1 knows no bfloat16 of DLPack's; this copies on the GPU.
            return _cupy().from_dlpack(x.view("uint16")).view(_BFLOAT16)

    def out(self, x: Any) -> Any:
        raise UsageError(
            "out is a JAX array, and those are never written to: leave it out and take the result"
        )

    def give(self, made: Any, like: Any) -> Any:
        import jax

        if is_device_array(made) and made.dtype == _BFLOAT16:
            return jax.dlpack.from_dlpack(made.view(np.uint16)).view("bfloat16")
        if is_device_array(made):
            return jax.dlpack.from_dlpack(made)
        place = {} if self.on_gpu(like) or len(like.devices()) > 1 else next(iter(like.devices()))
        return jax.device_put(made, place or None)

    def lets_go(self, x: Any) -> bool:
        return self.on_gpu(x)


class Numba(Library):
    """Arrays of numba.cuda."""

    def give(self, made: Any, like: Any) -> Any:
        if not is_device_array(made):
            return made
        from numba import cuda

        return cuda.as_cuda_array(made)


class Subclass(Library):
    """NumPy's subclasses (maps of files, masked arrays, `np.matrix`, others), whose operators may
    do other things than an array's. Their elements are multiplied, and the product is an array."""

    def view(self, x: Any, name: str) -> Any:
        if self._masks(x):
            warn(
                f"{name} is a masked array, and its mask is lost: masked elements count with the "
                "values under the mask (.filled(0) leaves them out)"
            )
        warn_of_meaning(x, name)
        return np.asarray(x)

    def out(self, x: Any) -> Any:
        if self._masks(x):
            warn(
                "out is a masked array, and its mask stays: it hides what is written under it "
                "(out.data shows all)"
            )
        warn_of_meaning(x, "out")
        return np.asarray(x)

    @staticmethod
    def _masks(x: Any) -> bool:
        # Importing numpy.ma takes 20 ms, and who has a masked array has imported it.
        return "numpy.ma" in sys.modules and bool(np.ma.is_masked(x))

    def give(self, made: Any, like: Any) -> Any:
        return made

    def lets_go(self, x: Any) -> bool:
        return False


TORCH = Torch()
_KNOWN: dict[str, Library] = {
    "torch": TORCH, "jax": Jax(), "jaxlib": Jax(), "numba": Numba(), "numba_cuda": Numba(),
}  # fmt: skip
_ANY, SUBCLASS = Library(), Subclass()


def check_strided(layout: Any, device: Any, name: str) -> None:
    """Raises `UsageError` for a tensor that does not lie on the CPU or a GPU as strides say."""
    strided = sys.modules["torch"].strided
    if layout is not strided or str(device).partition(":")[0] not in ("cpu", "cuda"):
        kind = f"{layout} tensor on the device {device}".removeprefix("torch.")
        dense = " (.to_dense() makes one)" if kind.startswith("sparse") else ""
        raise UsageError(f"{name} is a {kind}; strided tensors on cpu and cuda work{dense}")


def torch_dtype(dtype: Any, name: str) -> np.dtype:
    """NumPy's dtype for one of PyTorch's. Raises `DTypeError` where there is none."""
    found = _numpy_dtype(dtype)
    if found is None:
        raise _no_dtype(dtype, name)
    return found


def _no_dtype(dtype: Any, name: str) -> DTypeError:
    return DTypeError(f"{name} has dtype {dtype}; {WORK} (convert with .to)")


@functools.cache
def _numpy_dtype(dtype: Any) -> np.dtype | None:
    try:
        return np.dtype(str(dtype).removeprefix("torch."))
    except TypeError:
        return None


_kinds: dict[type, Library | None] = {np.ndarray: None, type(None): None}


def library_of(x: Any) -> Library | None:
    """The library of an array that is neither NumPy's nor CuPy's, or is of a subclass of NumPy's;
    None for those, and for what is no array, such as a list."""
    kind = type(x)
    if kind in _kinds:
        return _kinds[kind]
    for base in kind.__mro__:
        room = (base.__module__ or "").partition(".")[0]
        if base is np.ndarray:
            return _kinds.setdefault(kind, SUBCLASS)
        if room in _KNOWN or (room == "cupy" and base is kind):
            return _kinds.setdefault(kind, _KNOWN.get(room))
    if isinstance(x, type):  # a class has its arrays' methods
        return None
    protocols = "__cuda_array_interface__", "__dlpack_device__"
    return _ANY if any(hasattr(x, protocol) for protocol in protocols) else None


def _cupy() -> Any:
    try:
        import cupy
    except ImportError:
        raise UnavailableError(
            f"an array lies on a GPU, and CuPy is not installed ({pip_install('cuda13')}, or "
            "cuda12 for an older driver)"
        ) from None
    return cupy


def gpu_of(x: Any) -> int:
    """The ordinal of the GPU that has an array; -1 where none has."""
    if is_device_array(x):
        return int(x.data.device_id)
    library = library_of(x)
    if library is TORCH:
        return int(x.get_device())
    try:
        if library is not None and library.on_gpu(x):
            return gpu_of(library.view(x, "A"))
    except Exception:  # which is told when the array is looked at
        pass
    return -1


class _Address:
    """A stream by its address, in CUDA's protocol for streams."""

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def external_stream(cp: Any, address: int, ordinal: int) -> Any:
    """CuPy's object for a stream of the current GPU."""
    if not address:
        return cp.cuda.Stream.null
    if hasattr(cp.cuda.Stream, "from_external"):
        return cp.cuda.Stream.from_external(_Address(address))
    return cp.cuda.ExternalStream(address, ordinal)  # before CuPy 14.1
