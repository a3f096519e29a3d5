"""Products of PyTorch's tensors on one GPU, started without CuPy's views of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..arrays import tensors
from ..arrays.other_libraries import TORCH
from ..devices.cuda.device import CudaDevice
from ..host.kept import Known
from ..problem import are_numbers
from .found import Found, overlap
from .native_calls import copied_by
from .plan_maker import PlanMaker


class TensorsOnGpu:
    """alpha * op(A) @ op(B) + beta * C of tensors that lie on a GPU, on PyTorch's current stream.
    `find` is `SingleGpuExecutor.find`, given anew each time, so that nothing refers in a circle."""

    def __init__(self, device: CudaDevice, plans: PlanMaker) -> None:
        self.device, self.plans = device, plans
        self.known: Known[tuple, Found | None] = Known()

    # Many parameters: a product has so many, as in BLAS.
    def gemm(
        self, find: Callable[..., Any], a: Any, b: Any, c: Any, alpha: Any, beta: Any,
        trans_a: bool | str, trans_b: bool | str, out: Any,
    ) -> Any:  # fmt: skip
        """As `SingleGpuExecutor.gemm`; None, too, where the product is not prepared: CuPy's views
        of the tensors prepare it."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(a, "data_ptr"):  # it may be on its way in another thread
            return None
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            (a, trans_a), (b, trans_b) = (
                tensors.unconjugated(x, trans) for x, trans in ((a, trans_a), (b, trans_b))
            )
        here = self.device.ordinal
        for x in (a, b, c, out):
            if x is not None and not tensors.lies_as_it_says(x, here):
                return None
        if not self.device.is_current():
            with self.device.cp.cuda.Device(here):
                return self.gemm(find, a, b, c, alpha, beta, trans_a, trans_b, out)
        if c is not None and c is not out:
            if out is None:
                out = c = tensors.filled(a, b, c, beta, trans_a, trans_b)
            elif tensors.are_one(c, out):
                c = out  # two views of it
            if c is not out or c is None:
                return None
        if not self.plans.options.max_device_memory:
            a, b = map(copied_by, tensors.copying(a, b, out), (a, b))
        found = self._found(find, a, b, c, alpha, beta, trans_a, trans_b, out)
        if found is None or not found.ready:
            return None
        made = out
        if out is None:
            made = a.new_empty(found.shape, dtype=getattr(torch, found.dtype))
        at = a.data_ptr(), b.data_ptr(), made.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(here)
        if not all(at) or overlap(at, found.reaches):  # 0: a storage that was freed
            return None
        if not found.start_prepared(self.device, stream, at):
            return None
        if out is not None and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return made

    # Many parameters: a product has so many, as in BLAS.
    def _found(
        self, find: Callable[..., Any], a: Any, b: Any, c: Any, alpha: Any, beta: Any,
        trans_a: bool | str, trans_b: bool | str, out: Any,
    ) -> Found | None:  # fmt: skip
        """What was worked out for tensors laid out as these, once; C is `out` if there is one."""
        try:
            key = (
                a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, c is None,
                out is None or (out.shape, out.stride(), out.dtype), alpha, type(alpha), beta,
                type(beta), trans_a, trans_b,
            )  # fmt: skip
            return self.known[key]
        except KeyError:
            pass
        except TypeError:  # an array as alpha is no key
            return None
        # Into a graph that PyTorch records nothing is allocated here.
        if not are_numbers(alpha, beta) or tensors.are_captured():
            return None
        x, y, z = (x if x is None else TORCH.view(x, "A") for x in (a, b, out))
        z_in = None if c is None else z
        known = find(x, y, z_in, alpha, beta, trans_a, trans_b, z)
        found = self.known[key] = known if isinstance(known, Found) else None
        return found
