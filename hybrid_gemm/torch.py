"""Products for PyTorch: an operation that autograd and `torch.compile` know.

Importing this registers `torch.ops.hybrid_gemm.gemm`; `gemm` below calls it. `hybrid_gemm.gemm`
takes tensors too, and follows no gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .api import gemm as _untracked
from .arrays.other_libraries import torch_dtype
from .arrays.tensors import check_no_tangent
from .errors import UsageError
from .options import Options, named_keywords
from .problem import make_problem

__all__ = ["gemm"]

_NAME = "hybrid_gemm::gemm"
# Not `kernel`: torch.compile's own functions have that name, beside an operation's keywords.
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? c=None, *, float alpha=1.0, float beta=0.0, "
    "bool trans_a=False, bool trans_b=False, str compute='fp32', str kernel_name='auto') -> Tensor"
)


# Many parameters: a product has so many, as in BLAS.
@named_keywords
def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, /, *, alpha: float = 1.0, beta: float = 0.0,
    trans_a: bool = False, trans_b: bool = False, compute: str = Options.compute,
    kernel: str = Options.kernel,
) -> Tensor:  # fmt: skip
    """alpha * op(A) @ op(B) + beta * C of tensors, with gradients; see `hybrid_gemm.gemm`.

    `a` (m x k, or k x m with trans_a), `b` (k x n, or n x k with trans_b) and `c`, which broadcasts
    to m x n, lie on the CPU or on one GPU. The result is a new tensor there, of NumPy's promoted
    dtype, made on PyTorch's current stream. Gradients are made by the same operation, with the same
    `compute` and `kernel`, and can be differentiated again. Inside `torch.compile` it is one
    operation of the graph.

    Raises ValueError on shapes and choices that do not fit, TypeError on dtypes.

    >>> import torch
    >>> a = torch.ones(2, 3, requires_grad=True)
    >>> gemm(a, torch.ones(3, 2)).sum().backward()
    >>> a.grad.tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    if not torch.compiler.is_compiling():
        for name, x in (("A", a), ("B", b), ("C", c)):
            if isinstance(x, Tensor):
                check_no_tangent(x, name)  # which PyTorch would leave out
    given = {
        "alpha": alpha, "beta": beta, "trans_a": trans_a, "trans_b": trans_b, "compute": compute,
        "kernel_name": kernel,
    }  # fmt: skip
    if not _is_seen_by_autograd_alone(a, b, c, alpha, beta, trans_a, trans_b):
        return torch.ops.hybrid_gemm.gemm(a, b, c, **given)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, c)):
        return _Followed.apply(a, b, c, given)
    return _product(a, b, c, **given)


_PLAIN = Tensor, torch.nn.Parameter, type(None)
_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
_transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)


def _is_seen_by_autograd_alone(
    a: Any, b: Any, c: Any, alpha: Any, beta: Any, trans_a: Any, trans_b: Any
) -> bool:
    """Whether nothing but autograd looks at what becomes of these tensors: no compiler, tracer or
    transform. PyTorch's dispatcher takes longer for an operation of Python's than a small product
    does."""
    return (
        _modes is not None
        and _transforms is not None
        and all(type(x) in _PLAIN and (x is None or x.is_cuda or x.is_cpu) for x in (a, b, c))
        and all(type(x) in (int, float) for x in (alpha, beta))
        and type(trans_a) is type(trans_b) is bool
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing())
        and not _modes()
        and _transforms() is None
    )


def _product(a: Tensor, b: Tensor, c: Tensor | None = None, **given: Any) -> Tensor:
    """`given` are those of the keywords that have other values than the schema says."""
    _check_places(a, b, c)
    kernel = given.pop("kernel_name", "auto")
    device = "auto" if a.is_cuda else "cpu"
    made = _untracked(a, b, c, device=device, kernel=kernel, **given)
    assert isinstance(made, Tensor)
    return made


def _check_places(*tensors: Tensor | None) -> None:
    places = {str(x.device) for x in tensors if x is not None}
    if len(places) > 1:
        raise UsageError(
            f"the tensors lie on {' and '.join(sorted(places))}; bring them to one device (.to)"
        )


def _described(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0,
    trans_a: bool = False, trans_b: bool = False, **_options: str,
) -> Tensor:  # fmt: skip
    """What the product will be, without values; sides may be symbols."""
    _check_places(a, b, c)
    for name, x in (("A", a), ("B", b)):
        torch._check(x.ndim == 2, lambda name=name, x=x: f"{name} has shape {tuple(x.shape)}")
    (m, k), (k2, n) = a.shape[:: -1 if trans_a else 1], b.shape[:: -1 if trans_b else 1]
    torch._check(k == k2, lambda: f"shapes do not match: op(A) is {m} x {k}, op(B) {k2} x {n}")
    named = zip("ABC", (a, b, c), strict=True)
    dtypes = [torch_dtype(x.dtype, name) for name, x in named if x is not None]
    likes = [np.broadcast_to(np.empty((), dtype), (1, 1)) for dtype in dtypes]
    problem = make_problem(*likes, alpha=alpha, beta=beta)
    return a.new_empty((m, n), dtype=getattr(torch, problem.out_dtype))


def _remember(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict, output: Any) -> None:
    a, b, c = (*inputs, None)[:3]
    ctx.save_for_backward(a, b)
    ctx.options = keyword_only_inputs
    ctx.c = None if c is None else (c.shape, c.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of A, B and C: products with the conjugates of B and A, and beta times `grad`
    summed to C's shape."""
    a, b = ctx.saved_tensors
    grad = grad.contiguous()  # once: sums leave it expanded, as no kernel reads it
    given = dict(ctx.options)
    given["kernel"] = given.pop("kernel_name", "auto")
    beta = given.pop("beta", 0.0)
    trans_a, trans_b = given.pop("trans_a", False), given.pop("trans_b", False)
    grad_a = grad_b = grad_c = None
    if ctx.needs_input_grad[0]:
        x = b.conj()
        grad_a = (
            gemm(x, grad, trans_a=trans_b, trans_b=True, **given)
            if trans_a
            else gemm(grad, x, trans_b=not trans_b, **given)
        ).to(a.dtype)
    if ctx.needs_input_grad[1]:
        y = a.conj()
        grad_b = (
            gemm(grad, y, trans_a=True, trans_b=trans_a, **given)
            if trans_b
            else gemm(y, grad, trans_a=not trans_a, **given)
        ).to(b.dtype)
    if ctx.c and ctx.needs_input_grad[2]:
        shape, dtype = ctx.c
        grad_c = (beta * grad).sum_to_size(shape).to(dtype)
    return grad_a, grad_b, grad_c


class _Followed(torch.autograd.Function):
    """The operation as autograd alone sees it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor | None, given: dict) -> Tensor:
        _remember(ctx, (a, b, c), given, None)
        return _product(a, b, c, **given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, grad), None


torch.library.define(_NAME, _SCHEMA)
torch.library.impl(_NAME, ("cpu", "cuda"), _product)
torch.library.register_fake(_NAME, _described)
torch.library.register_autograd(_NAME, _backward, setup_context=_remember)
