"""Products for PyTorch: an operation that autograd and `torch.compile` know. On the CPU it is
PyTorch's own product, whose threads those of another library would hold up.

Importing this registers `torch.ops.hybrid_gemm.gemm`; `gemm` below calls it. `hybrid_gemm.gemm`
takes tensors too, and follows no gradients.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from .api import gemm as _untracked
from .api import programs
from .arrays.operand import CallerArrays
from .arrays.other_libraries import check_strided, torch_dtype
from .errors import DTypeError, UsageError, shown
from .host.derivatives import check_no_tangent, check_untracked, goes_forward
from .options import Options, named_keywords
from .problem import make_problem, op_of
from .programs.signature import played

__all__ = ["gemm"]

_NAME = "hybrid_gemm::gemm"
# Not `kernel`: torch.compile's own functions have that name, beside an operation's keywords.
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? c=None, *, float alpha=1.0, float beta=0.0, "
    "bool trans_a=False, bool trans_b=False, bool conj_a=False, bool conj_b=False, "
    "str compute='fp32', str kernel_name='auto') -> Tensor"
)


# Many parameters: a product has so many, as in BLAS.
@named_keywords
def gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, /, *, alpha: float = 1.0, beta: float = 0.0,
    trans_a: bool | str = False, trans_b: bool | str = False, compute: str = Options.compute,
    kernel: str = Options.kernel,
) -> Tensor:  # fmt: skip
    """alpha * op(A) @ op(B) + beta * C of tensors, with gradients; see `hybrid_gemm.gemm`.

    `a` (m x k, or k x m with trans_a), `b` (k x n, or n x k with trans_b) and `c`, which broadcasts
    to m x n, lie on the CPU, where PyTorch multiplies them, or on one GPU. `trans_a` and `trans_b`
    may be "c", for the conjugate transpose. The result is a new tensor there, of NumPy's promoted
    dtype, made on PyTorch's current stream. Gradients are made by the same operation, with the
    same `compute` and `kernel`, and can be differentiated again. Inside `torch.compile` it is one
    operation of the graph.

    Raises ValueError on shapes and choices that do not fit, TypeError on dtypes.

    >>> import torch
    >>> a = torch.ones(2, 3, requires_grad=True)
    >>> gemm(a, torch.ones(3, 2)).sum().backward()
    >>> a.grad.tolist()
    [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """
    alone = _is_seen_by_autograd_alone(a, b, c, alpha, beta)
    if (not alone or goes_forward()) and not torch.compiler.is_compiling():
        _check_operands(a, b, c)
        alpha, beta = _checked_factor(alpha, "alpha"), _checked_factor(beta, "beta")
    given: dict[str, Any] = {
        "alpha": alpha, "beta": beta, "compute": compute, "kernel_name": kernel
    }  # fmt: skip
    if op := op_of(trans_a, "trans_a"):
        given |= {"trans_a": True, "conj_a": op == "c"}
    if op := op_of(trans_b, "trans_b"):
        given |= {"trans_b": True, "conj_b": op == "c"}
    return _by_autograd(a, b, c, given) if alone else _followed(a, b, c, given)


def _check_operands(a: Any, b: Any, c: Any) -> None:
    """Raises `DTypeError` for what is no tensor, and `UsageError` for one with a tangent, which
    PyTorch would leave out."""
    for name, x in (("A", a), ("B", b), ("C", c)):
        if isinstance(x, Tensor):
            check_no_tangent(x, name)
        elif not hasattr(x, "__torch_function__") and (x is not None or name != "C"):
            raise DTypeError(
                f"{name} is of type {type(x).__name__}; a tensor is needed (torch.as_tensor "
                "makes one, and hybrid_gemm.gemm takes other arrays, too)"
            )


def _checked_factor(factor: Any, name: str) -> Any:
    """alpha or beta; whole numbers of NumPy's as Python's, which are exact. Raises `DTypeError` for
    what is no real number: PyTorch would leave imaginary parts of NumPy's numbers out. `UsageError`
    as `check_untracked`."""
    if type(factor) in (int, float) or isinstance(factor, torch.SymInt | torch.SymFloat):
        return factor
    check_untracked(factor, name)
    value = factor
    if isinstance(factor, Tensor):  # whose value may not be there
        real = factor.ndim == 0 and factor.dtype != torch.bool and not factor.is_complex()
        if real and not factor.is_floating_point() and type(factor) in _PLAIN and _is_unwatched():
            value = factor.item()
    else:
        value = factor.item() if getattr(factor, "ndim", None) == 0 else factor
        real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real:
        raise DTypeError(
            f"{name} must be a real number here, not {shown(factor)}; hybrid_gemm.gemm takes "
            "complex ones for complex matrices"
        )
    return int(value) if isinstance(value, numbers.Integral) else factor


def _check_held(factor: Any, name: str, *tensors: Tensor | None) -> None:
    """Raises `UsageError` for a factor of whole numbers that the operation, whose factors are
    float64, would be given rounded."""
    if type(factor) is not int or abs(factor).bit_length() - (factor & -factor).bit_length() < 53:
        return
    # Asked last: tracers without values (`torch.fx.symbolic_trace`) cannot say.
    if not any(x is not None and (x.is_floating_point() or x.is_complex()) for x in tensors):
        raise UsageError(
            f"{name}={factor} has more than the 53 bits that compilers, tracers, transforms and "
            "modes of PyTorch's pass on; multiply without them"
        )


def _followed(a: Tensor, b: Tensor, c: Tensor | None, given: Mapping[str, Any]) -> Tensor:
    """The product, for whoever looks at what becomes of these tensors."""
    if _is_seen_by_autograd_alone(a, b, c, given["alpha"], given["beta"]):
        return _by_autograd(a, b, c, given)
    return _watched(a, b, c, given)


def _watched(a: Tensor, b: Tensor, c: Tensor | None, given: Mapping[str, Any]) -> Tensor:
    """The product by PyTorch's dispatcher, which shows it to all."""
    if not torch.compiler.is_compiling() and _is_transformed():
        made: Tensor = _Transformed.apply(a, b, c, MappingProxyType(given))
        return made
    for name in ("alpha", "beta"):
        _check_held(given[name], name, a, b, c)
    made = torch.ops.hybrid_gemm.gemm(a, b, c, **given)
    return made


def _by_autograd(a: Tensor, b: Tensor, c: Tensor | None, given: Mapping[str, Any]) -> Tensor:
    """The product, which nothing but autograd looks at."""
    if _lie_on_the_cpu(a, b, c):
        return _on_cpu(_alive(a), _alive(b), None if c is None else _alive(c), **given)
    if torch.is_grad_enabled() and (
        a.requires_grad or b.requires_grad or (c is not None and c.requires_grad)
    ):
        made: Tensor = _apply(_alive(a), _alive(b), None if c is None else _alive(c), given)
        return made
    return _on_gpu(a, b, c, **given)


def _lie_on_the_cpu(a: Tensor, b: Tensor, c: Tensor | None) -> bool:
    return a.is_cpu and b.is_cpu and (c is None or c.is_cpu)


_PLAIN = Tensor, torch.nn.Parameter
_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functions = getattr(torch._C, "_is_torch_function_mode_enabled", None)
_functorch = getattr(torch._C, "_functorch", None)
_transforms: Any = getattr(_functorch, "peek_interpreter_stack", None)
_is_batched = getattr(_functorch, "is_legacy_batchedtensor", None)
_alive: Any = getattr(_functorch, "unwrap_if_dead", None)  # of what a transform has left behind
_CAN_TELL = None not in (_modes, _transforms, _alive)


def _is_transformed() -> bool:
    """Whether a transform of `torch.func` looks at tensors that follows functions of autograd."""
    innermost = _transforms and _transforms()
    return bool(innermost and innermost.key().name != "Functionalize")


def _is_seen_by_autograd_alone(a: Any, b: Any, c: Any, alpha: Any, beta: Any) -> bool:
    """Whether nothing but autograd looks at what becomes of these tensors: no compiler, tracer or
    transform. PyTorch's dispatcher takes longer for an operation of Python's than a small product
    does."""
    for x in (a, b) if c is None else (a, b, c):
        if type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu):
            return False
    return type(alpha) in (int, float) and type(beta) in (int, float) and _is_unwatched()


def _is_unwatched() -> bool:
    """Whether no compiler, tracer or transform is at work."""
    return (
        _CAN_TELL
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or _modes())
        and _transforms() is None
        and not (_functions and _functions() and _functions_are_followed())
    )


def _functions_are_followed() -> bool:
    """Whether one of PyTorch's modes for functions is another than that of a default device."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def _on_gpu(a: Tensor, b: Tensor, c: Tensor | None = None, **given: Any) -> Any:
    """`given` are those of the keywords that have other values than the schema says."""
    if not given.get("trans_a") and given.pop("conj_a", False):
        a = a.conj()
    if not given.get("trans_b") and given.pop("conj_b", False):
        b = b.conj()
    return _kept(a, b, c, **given)


@played("torch", programs)
def _kept(a: Tensor, b: Tensor, c: Tensor | None, **given: Any) -> Any:
    """The product of what a program is kept of, by these tensors: none is made of them before."""
    _check_places(a, b, c)
    kernel = given.pop("kernel_name", "auto")
    for conjugated, transposed in ("conj_a", "trans_a"), ("conj_b", "trans_b"):
        if given.pop(conjugated, False):
            given[transposed] = "c"
    # What that starts is this call's.
    return _untracked.__wrapped__(a, b, c, kernel=kernel, **given)  # type: ignore[attr-defined]


# Many parameters: those of the schema.
def _on_cpu(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0,
    trans_a: bool = False, trans_b: bool = False, conj_a: bool = False, conj_b: bool = False,
    compute: str = "fp32", kernel_name: str = "auto",
) -> Tensor:  # fmt: skip
    """PyTorch's own product, with this package's dtypes and errors."""
    of_c = None if c is None else (c.shape, c.dtype, c.layout)
    how = _Host.of(
        (a.shape, a.dtype, a.layout), (b.shape, b.dtype, b.layout), of_c, alpha, beta, trans_a,
        trans_b,
    )  # fmt: skip
    if kernel_name != "auto" or compute not in ("fp32", "auto"):
        one = np.zeros((1, 1), how.numpys)  # of which the same is refused
        _untracked(one, one, device="cpu", kernel=kernel_name, compute=compute)
    if how.casts:
        a, b, c = (x if x is None else x.to(how.multiplied) for x in (a, b, c))
    x, y = a.mT if trans_a else a, b.mT if trans_b else b
    x, y = x.conj() if conj_a else x, y.conj() if conj_b else y
    if not how.reads:
        x, y = x[:, :0], y[:0]
    if torch.is_autocast_enabled("cpu"):  # in which PyTorch would multiply in another dtype
        with torch.autocast("cpu", enabled=False):
            made = how.product(x, y, c)
    else:
        made = how.product(x, y, c)
    return made.to(how.made) if how.casts else made


_Form = tuple[torch.Size, torch.dtype, torch.layout]  # of a tensor


class _Host(NamedTuple):
    """How PyTorch multiplies tensors on the CPU: the dtype of C for NumPy and PyTorch, the one in
    which A, B and C are multiplied, and whether they have another one. PyTorch multiplies no
    integers without sign; those with sign wrap around to the same bits. As in BLAS, A and B are
    not read where alpha is 0."""

    numpys: str
    made: torch.dtype
    multiplied: torch.dtype
    casts: bool
    alpha: float
    beta: float
    reads: bool

    def product(self, x: Tensor, y: Tensor, c: Tensor | None) -> Tensor:
        if c is None and self.alpha == 1:
            return torch.mm(x, y)
        added = x.new_zeros(()) if c is None else c
        return torch.addmm(added, x, y, alpha=self.alpha, beta=self.beta)

    @classmethod
    @functools.lru_cache(maxsize=256, typed=True)  # in a tenth of a small product's time
    def of(
        cls, of_a: _Form, of_b: _Form, of_c: _Form | None, alpha: float, beta: float,
        trans_a: bool, trans_b: bool,
    ) -> _Host:  # fmt: skip
        """For tensors of these shapes, dtypes and layouts."""
        described = (of_a, of_b) if of_c is None else (of_a, of_b, of_c)
        likes = []
        for name, (shape, dtype, layout) in zip("ABC", described, strict=False):
            check_strided(layout, "cpu", name)
            likes.append(np.broadcast_to(np.empty((), torch_dtype(dtype, name)), shape))
        arrays = CallerArrays.of(*likes, trans_a=trans_a, trans_b=trans_b)
        p = arrays.problem(alpha=alpha, beta=beta)
        multiplied, alpha, beta = p.out_dtype.removeprefix("u"), p.alpha, p.beta
        if p.is_integer:
            alpha, beta = (int(np.int64(x).astype(multiplied)) for x in (alpha, beta))
        made, dtype = (getattr(torch, name) for name in (p.out_dtype, multiplied))
        casts = any(x.dtype.name != multiplied for x in likes)
        return cls(p.out_dtype, made, dtype, casts, alpha, beta, p.alpha != 0)


def _check_places(a: Tensor, b: Tensor, c: Tensor | None) -> None:
    place = a.device
    if b.device != place or (c is not None and c.device != place):
        places = {str(x.device) for x in (a, b, c) if x is not None}
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
    given = {"alpha": 1.0, **ctx.options, "beta": 0.0}
    ops = [given.pop(name, False) for name in _OPS]
    tensors = a, b, grad
    of_grad_a, of_grad_b = _factors(*ops, *[x.is_complex() for x in tensors])
    alone = _is_seen_by_autograd_alone(a, b, grad, given["alpha"], 0.0)
    if alone and _is_batched and _is_batched(grad):  # of `torch.autograd.grad`: many at once
        alone = False
    multiply = _by_autograd if alone else _watched
    wanted = ctx.needs_input_grad
    grad_a = grad_b = grad_c = None
    if wanted[0]:
        left, right, done = of_grad_a
        made = multiply(tensors[left], tensors[right], None, given | done)
        grad_a = _cast(made, a.dtype)
    if wanted[1]:
        left, right, done = of_grad_b
        made = multiply(tensors[left], tensors[right], None, given | done)
        grad_b = _cast(made, b.dtype)
    if ctx.c and wanted[2]:
        shape, dtype = ctx.c
        grad_c = _cast((ctx.options.get("beta", 0.0) * grad).sum_to_size(shape), dtype)
    return grad_a, grad_b, grad_c


def _cast(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a matrix of that dtype: of a real one beside complex ones, its real part."""
    if grad.dtype == dtype:
        return grad
    real = grad.is_complex() and not dtype.is_complex
    return (grad.real if real else grad).to(dtype)


class _Op(NamedTuple):
    """Whether a matrix is transposed, and conjugated."""

    trans: bool
    conj: bool

    def after(self, other: _Op) -> _Op:
        """Both, one after the other, in any order."""
        return _Op(self.trans != other.trans, self.conj != other.conj)

    def of_product(self, left: _Factor, right: _Factor) -> tuple[_Factor, _Factor]:
        """The factors of a product to which this is done; a transpose turns them around."""
        left, right = ((x, op.after(self)) for x, op in (left, right))
        return (right, left) if self.trans else (left, right)


_Factor = tuple[int, _Op]  # the place of a matrix, and what is done to it first
_A, _B, _GRAD = range(3)
_PLAIN_OP, _ADJOINT = _Op(False, False), _Op(True, True)
_OPS = "trans_a", "conj_a", "trans_b", "conj_b"


@functools.cache  # worked out once: a small product takes no longer than this
def _factors(
    trans_a: bool, conj_a: bool, trans_b: bool, conj_b: bool, *are_complex: bool
) -> tuple[tuple[int, int, dict[str, bool]], ...]:
    """The products that the gradients of A and B are: the places of two of A, B and the gradient,
    which `are_complex`, and what is done to each first, as keywords. Of op(A) it is grad op(B)^H,
    of op(B) op(A)^H grad."""
    of_a, of_b, grad = _Op(trans_a, conj_a), _Op(trans_b, conj_b), (_GRAD, _PLAIN_OP)
    products = (
        of_a.of_product(grad, (_B, of_b.after(_ADJOINT))),
        of_b.of_product((_A, of_a.after(_ADJOINT)), grad),
    )
    return tuple(
        (left, right, _named(op_left, op_right, are_complex[left], are_complex[right]))
        for (left, op_left), (right, op_right) in products
    )


def _named(of_a: _Op, of_b: _Op, *are_complex: bool) -> dict[str, bool]:
    """What is done to two matrices as the operation's keywords, of which False are left out."""
    done = of_a.trans, of_a.conj and are_complex[0], of_b.trans, of_b.conj and are_complex[1]
    return {name: True for name, wanted in zip(_OPS, done, strict=True) if wanted}


class _Followed(torch.autograd.Function):
    """The operation on a GPU as autograd alone sees it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, c: Tensor | None, given: dict) -> Tensor:
        _remember(ctx, (a, b, c), given, None)
        return _on_gpu(a, b, c, **given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, grad), None


# Without what PyTorch's own asks before, of transforms, of which there are none by then.
_apply = super(torch.autograd.Function, _Followed).apply


class _Transformed(torch.autograd.Function):
    """The operation as the transforms of `torch.func` see it. What is given is not a dict, in which
    they would look for tensors."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, c: Tensor | None, given: Mapping[str, Any]) -> Tensor:
        return _followed(a, b, c, dict(given))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _remember(ctx, inputs[:3], dict(inputs[3]), output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, grad), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise UsageError(
            "hybrid_gemm.torch.gemm has backward gradients alone, and forward-mode derivatives of "
            "these were asked for, as by torch.func.hessian: jacrev(jacrev(function)) works"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], a: Tensor, b: Tensor, c: Tensor | None,
        given: Mapping[str, Any],
    ) -> tuple[Tensor, int]:  # fmt: skip
        """A stack of A with one B is one product, others are a product for each."""
        given, count = dict(given), info.batch_size
        of_a, of_b, _of_c, _ = in_dims
        if c is None and of_a is not None and of_b is None and not given.get("trans_a"):
            rows = a.movedim(of_a, 0)
            made = _followed(rows.reshape(count * rows.shape[1], rows.shape[2]), b, None, given)
            return made.reshape(count, rows.shape[1], made.shape[1]), 0
        each = (  # of an empty stack one product, of sums of nothing, says what is made
            [x] * max(1, count) if x is None or of is None
            else x.unbind(of) or (x.sum(of, dtype=x.dtype),)
            for x, of in zip((a, b, c), in_dims, strict=False)
        )  # fmt: skip
        made = [_followed(x, y, z, given) for x, y, z in zip(*each, strict=True)]
        return torch.stack(made)[:count], 0


class _Refusing(torch.library.Library):
    """Registers what is given to it with tangents refused. PyTorch passes an operation of Python's
    the numbers of such tensors alone: derivatives that are carried forward would be 0."""

    def impl(self, op_name: str, fn: Callable[..., Any], *args: Any, **keywords: Any) -> None:
        def refusing(keyset: Any, *operands: Any, **given: Any) -> Any:
            if goes_forward():
                for name, x in zip("ABC", operands, strict=False):
                    if x is not None:
                        check_no_tangent(x, name)
            return fn(keyset, *operands, **given)

        super().impl(op_name, refusing, *args, **keywords)


torch.library.define(_NAME, _SCHEMA)
torch.library.impl(_NAME, "cpu", _on_cpu)
torch.library.impl(_NAME, "cuda", _on_gpu)
torch.library.register_fake(_NAME, _described)
_library = _Refusing("hybrid_gemm", "FRAGMENT")  # what it registers is there as long as it is
torch.library.register_autograd(_NAME, _backward, setup_context=_remember, lib=_library)
