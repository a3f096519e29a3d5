"""PyTorch's derivatives: who has some that a product would leave out. PyTorch is imported by
whoever has a tensor."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import UsageError


def goes_forward() -> bool:
    """Whether derivatives are carried forward with any of PyTorch's tensors (`torch.func.jvp`)."""
    return getattr(sys.modules["torch"].autograd.forward_ad, "_current_level", 0) >= 0


def has_tangent(x: Any) -> bool:
    """Whether they are with this one. Where they are with none, PyTorch takes ten times as long to
    say so."""
    return (
        goes_forward()
        and sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None
    )


def check_no_tangent(x: Any, name: str) -> None:
    """Raises `UsageError` for a tensor whose derivatives are carried forward; `name` is the
    operand's."""
    if has_tangent(x):
        raise UsageError(
            f"{name} is a tensor with a tangent (forward-mode derivatives), which gemm does not "
            "follow: hybrid_gemm.torch.gemm has backward gradients alone"
        )


def check_untracked(factor: Any, name: str) -> None:
    """Raises `UsageError` for alpha or beta in a tensor of PyTorch's to which gradients are
    followed, or with a tangent, for derivatives would end there."""
    torch: Any = sys.modules.get("torch")  # who has a tensor has imported it
    if torch is None or not (hasattr(factor, "requires_grad") and isinstance(factor, torch.Tensor)):
        return
    if (factor.requires_grad and torch.is_grad_enabled()) or has_tangent(factor):
        raise UsageError(
            f"{name} is a tensor that requires gradients or has a tangent, and none are followed "
            "to it: multiply the product by it, or leave them out by .detach()"
        )
