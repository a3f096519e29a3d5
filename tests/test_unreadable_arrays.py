"""Arrays of other libraries that cannot be looked at are refused by what they are."""

import subprocess
import sys

import numpy as np
import pytest
from support.arrays import Other

from hybrid_gemm import gemm
from hybrid_gemm.errors import DTypeError, UsageError

ONES = np.ones((2, 2), "f4")


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def refused(x, error, message):
    for given in (x, ONES), (ONES, x):
        with pytest.raises(error, match=message):
            gemm(*given, device="cpu")


@pytest.mark.parametrize("way", ["toarray", "todense"])
@pytest.mark.parametrize("protocol", ["__len__", "__dlpack_device__"])
def test_sparse_matrices_of_any_library_are_named(way, protocol):
    def fails(self):
        raise RuntimeError("cannot be converted automatically")

    kind = type("COO", (), {way: fails, "__array__": fails, protocol: fails})
    refused(kind(), DTypeError, rf"^[AB] is a sparse COO; \.{way}\(\) makes it dense$")


@pytest.mark.parametrize("error", [BufferError, RuntimeError])
def test_what_dlpack_refuses_is_named(error):
    class Elsewhere(Other):
        __array__ = property()

        def __dlpack__(self, **_options):
            raise error("unsupported device")

    message = r"^[AB] is a Elsewhere that NumPy cannot read: unsupported device"
    refused(Elsewhere(ONES), UsageError, message)
    with pytest.raises(UsageError, match=r"^out is a Elsewhere that NumPy cannot read"):
        gemm(ONES, ONES, out=Elsewhere(ONES), device="cpu")


def test_what_is_of_jax_and_no_array_is_named():
    jax = pytest.importorskip("jax")
    from jax.experimental import sparse

    refused(
        sparse.BCOO.fromdense(ONES), DTypeError, r"is a sparse BCOO; \.todense\(\) makes it dense"
    )
    refused(jax.ShapeDtypeStruct((2, 2), "f4"), DTypeError, "is a ShapeDtypeStruct of JAX")


def test_what_is_of_pytorch_and_no_tensor_is_named(torch):
    for x in (torch.nn.Linear(2, 2), torch.float32, torch.Size((2, 2))):
        refused(x, DTypeError, f"^[AB] is a {type(x).__name__} of PyTorch; a tensor works$")
        with pytest.raises(DTypeError, match=r"^out is a \w+ of PyTorch"):
            gemm(ONES, ONES, out=x, device="cpu")


@pytest.mark.parametrize("dtype", ["complex32", "float8_e5m2", "qint8"])
def test_dtypes_of_pytorch_alone_are_named(torch, dtype):
    kind = getattr(torch, dtype)
    one = torch.ones(2, 2)
    x = torch.quantize_per_tensor(one, 1, 0, kind) if dtype == "qint8" else one.to(kind)
    message = rf"has dtype torch\.{dtype}; float16, bfloat16.* work \(convert with \.to\)"
    refused(x, DTypeError, message)


def test_tensors_of_dtypes_that_are_not_multiplied_are_converted_by_to(torch):
    one = torch.ones(2, 2)
    refused(one.bool(), DTypeError, r"has dtype bool; .* \(convert with .*tensors with \.to\)")
    with pytest.raises(DTypeError, match=r"both float16 and bfloat16; .*tensors with \.to"):
        gemm(one.half(), one.bfloat16(), device="cpu")


def test_tensors_without_elements_are_named(torch):
    message = "is a Tensor whose elements cannot be read: .*torch.gemm works in torch.vmap"
    stack = torch.ones(3, 2, 2)
    for dtype in torch.float32, torch.bfloat16:
        with pytest.raises(UsageError, match=message):
            torch.vmap(lambda x: gemm(x, x, device="cpu"))(stack.to(dtype))


@pytest.mark.parametrize("place", ["A", "B", "C", "out"])
def test_tensors_of_functionalize_are_refused(torch, place):
    """PyTorch's `.numpy()` gives memory that has none of their elements."""
    import hybrid_gemm.torch

    one = torch.ones(2, 2)

    def product(x):
        a, b, c = (x if place == name else one for name in "ABC")
        return gemm(a, b, c, beta=1, out=x if place == "out" else None, device="cpu")

    with pytest.raises(UsageError, match=f"^{place} is a tensor of torch.func.functionalize"):
        torch.func.functionalize(product)(one)
    made = hybrid_gemm.torch.gemm(torch._to_functional_tensor(one), one)  # PyTorch's own product
    np.testing.assert_array_equal(torch._from_functional_tensor(made), np.full((2, 2), 2.0))
    made = torch.func.functionalize(hybrid_gemm.torch.gemm)(one, one)
    np.testing.assert_array_equal(made, np.full((2, 2), 2.0))


@pytest.mark.parametrize("left", [0, 12])
@pytest.mark.parametrize("way", [lambda x: x, lambda x: x.T, lambda x: x[:, :1].expand(2, 2)])
def test_tensors_whose_storage_was_freed_are_refused(torch, left, way):
    """NumPy shows memory of its own there, or what lies behind the storage."""
    one = torch.ones(2, 2)
    whole, x = (way(torch.ones(4, 2)[2:]) for _ in range(2))
    np.testing.assert_array_equal(gemm(whole, one, device="cpu"), np.full((2, 2), 2.0))
    x.untyped_storage().resize_(left)
    message = rf"is a tensor whose storage has {left} bytes and whose elements take (28|32): was"
    refused(x, UsageError, message)
    with pytest.raises(UsageError, match=f"^out {message}"):
        gemm(one, one, out=x, device="cpu")
    nothing = gemm(x[:0], one, device="cpu")
    assert nothing.shape == (0, 2)


@pytest.mark.parametrize("way", ["x.conj()", "x.conj().imag"])
def test_lazy_views_of_a_freed_storage_are_refused(torch, way):
    """PyTorch copies what is lazily conjugated or negated, and ends the process where it cannot."""
    code = f"""
import torch
import hybrid_gemm
x = torch.ones(4096, 64, dtype=torch.complex64)
view = {way}
x.untyped_storage().resize_(0)
try:
    hybrid_gemm.gemm(view, torch.ones(64, 2), device="cpu")
except hybrid_gemm.errors.UsageError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "is a tensor whose storage has 0 bytes" in done.stdout, done.stderr
    assert done.returncode == 0


def test_derivatives_carried_forward_are_refused(torch):
    """PyTorch would leave them out without a word: they would be zeros."""
    from torch.autograd import forward_ad

    from hybrid_gemm.torch import gemm as followed

    x, message = torch.ones(2, 2), r"^[ABC] is a tensor with a tangent"
    for product in followed, lambda *given, **more: gemm(*given, **more, device="cpu"):
        calls = (
            lambda t, f=product: f(t, x),
            lambda t, f=product: f(x, t),
            lambda t, f=product: f(x, x, t, beta=1),
        )
        for call in calls:
            with forward_ad.dual_level():
                with pytest.raises(UsageError, match=message):
                    call(forward_ad.make_dual(x, x))
                assert call(x).shape == (2, 2)
            if product is followed:
                with pytest.raises(UsageError, match=message):
                    torch.func.jvp(call, (x,), (x,))
