"""PyTorch's tensors on a GPU, multiplied where they lie: what PyTorch itself copies and fills
before a product, on its current stream. PyTorch is imported by whoever has a tensor."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import UsageError
from ..host.derivatives import has_tangent

P = ParamSpec("P")
R = TypeVar("R")
Copy = Callable[[Any], Any]


def is_traced() -> bool:
    """Whether `torch.compile` traces what asks this."""
    if "torch._dynamo" not in sys.modules:
        return False
    return bool(sys.modules["torch"].compiler.is_dynamo_compiling())


def called_whole(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which `torch.compile` calls and does not trace: it would make operations of
    PyTorch's of what NumPy does, with other rules for dtypes."""
    return sys.modules["torch"].compiler.disable(function)  # type: ignore[no-any-return]


def not_traced(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: `torch.compile` calls the function as `called_whole` does."""

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if is_traced():
            return called_whole(function)(*args, **keywords)
        return function(*args, **keywords)

    return call


def is_plain(x: Any) -> bool:
    """Whether this is a tensor whose numbers lie as its strides say, and no derivatives are
    followed to it."""
    torch = sys.modules["torch"]
    if not (type(x) is torch.Tensor or type(x) is torch.nn.Parameter):
        return False
    if x.layout is not torch.strided or x.is_neg() or x.is_conj():
        return False
    if is_functional(x):
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) and not has_tangent(x)


def is_functional(x: Any) -> bool:
    """Whether a tensor is of `torch.func.functionalize`: its elements lie elsewhere, and PyTorch
    gives out memory that has none of them."""
    return bool(sys.modules["torch"]._is_functional_tensor(x))


def check_storage(x: Any, name: str) -> None:
    """Raises `UsageError` for a strided tensor with elements beyond the end of its storage;
    `name` is the operand's."""
    has = x.untyped_storage().nbytes()
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    takes = (x.storage_offset() + reach + 1) * x.element_size()
    if x.numel() and takes > has:
        raise UsageError(
            f"{name} is a tensor whose storage has {has} bytes and whose elements take {takes}: "
            "was it freed (untyped_storage().resize_), as of parameters that are sharded?"
        )


def are_captured() -> bool:
    """Whether a graph records what PyTorch's current stream of the current GPU is given."""
    return bool(sys.modules["torch"].cuda.is_current_stream_capturing())


def are_one(x: Any, y: Any) -> bool:
    """Whether two tensors are one matrix in one place."""
    alike = x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
    return bool(alike and x.device == y.device and x.data_ptr() == y.data_ptr())


def unconjugated(x: Any, trans: bool | str) -> tuple[Any, bool | str]:
    """A tensor that is not lazily conjugated, and how it is transposed ("c": and conjugated) where
    `x`, which may be, is by `trans`. It is copied only where no transpose conjugates it."""
    if not x.is_conj():
        return x, trans
    if trans:
        return x.conj(), True if trans == "c" else "c"
    if x.dim() == 2 and x.stride(0) == 1:
        return x.mH, "c"
    return x.resolve_conj(), False


def copying(a: Any, b: Any, out: Any) -> tuple[Copy | None, Copy | None]:
    """What copies each of two operands as kernels read it, None where they read the tensor: of two
    dtypes of floating point one in that of the other, as NumPy promotes them, unless there is
    `out`, and without gaps what no kernel reads, such as a gradient that was expanded."""
    dtype = None if out is not None or a.dtype == b.dtype else _promoted(a.dtype, b.dtype)
    if dtype is None:
        return _laying_out(a, out), _laying_out(b, out)
    to = operator.methodcaller("to", dtype)  # leaves no gaps
    of_a, of_b = (_laying_out(x, out) if x.dtype == dtype else to for x in (a, b))
    return of_a, of_b


def _promoted(one: Any, other: Any) -> Any:
    torch = sys.modules["torch"]
    floats = torch.float16, torch.float32, torch.float64
    return torch.promote_types(one, other) if one in floats and other in floats else None


def _laying_out(x: Any, out: Any) -> Copy | None:
    """What copies a tensor without gaps if it is a matrix that no kernel reads. Not where it may
    meet `out`, which is refused."""
    if x.dim() != 2:
        return None
    (rows, cols), (down, along) = x.shape, x.stride()
    if (along == 1 and down >= cols) or (down == 1 and along >= rows) or not x.numel():
        return None
    if out is not None and out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return None
    contiguous: Copy = sys.modules["torch"].Tensor.contiguous
    return contiguous


def filled(a: Any, b: Any, c: Any, beta: Any, trans_a: Any, trans_b: Any) -> Any:
    """C in a new tensor of the product's shape, to which that is added; None where it does not
    broadcast to that, and where dtypes differ."""
    if not (a.dim() == b.dim() == 2 and a.dtype == b.dtype == c.dtype and beta):
        return None
    made = a.new_empty((a.shape[bool(trans_a)], b.shape[not trans_b]))
    try:
        return made.copy_(c)
    except RuntimeError:
        return None
