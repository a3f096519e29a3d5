"""PyTorch's tensors on a GPU, multiplied where they lie: what PyTorch itself copies and fills
before a product, on its current stream. PyTorch is imported by whoever has a tensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..errors import UsageError
from ..host.derivatives import has_tangent

P = ParamSpec("P")
R = TypeVar("R")


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
