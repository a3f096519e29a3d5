"""What multiplies in strict fp32 behind the verdict on a split product."""

import numpy as np
import pytest
from support.devices import needs

from hybrid_gemm import Runner, catalog
from hybrid_gemm.devices import tensor_core_products

# The least shared memory of a block, in bytes, on GPUs that multiply fp32x3: sm_86 and sm_89.
SMALLEST = 99 * 1024


@pytest.mark.parametrize("variant", catalog.helper("strict").kernel.variants(), ids=str)
def test_the_fallback_fits_every_gpu_that_it_is_for(variant):
    assert variant.launch(4096, 4096, 4096, "float32").shared_bytes <= SMALLEST


@needs("emulator")
@pytest.mark.parametrize("beta", [0, 2])
@pytest.mark.parametrize("wide", [0, 1])  # columns of C's array more than of C: rows off vectors
@pytest.mark.parametrize("number", [0, 1])
def test_both_tiles_are_stored_whole(monkeypatch, number, wide, beta):
    def chosen(device, m, n, tf32):
        variants = catalog.helper("strict").kernel.variants()
        return variants[2 * number + wide].for_multiprocessors(4)

    monkeypatch.setattr(tensor_core_products, "strict_variant", chosen)
    rng, (m, n, k) = np.random.default_rng(1), (301, 516, 50)
    a, b, c = (
        rng.integers(-8, 8, shape).astype(np.float32) for shape in ((m, k), (k, n + wide), (m, n))
    )
    b = b[:, :n]
    out = np.full((m, n + wide), -1, np.float32)[:, :n]
    out[...] = c
    large = np.float32(2.0**100)  # which no split takes
    runner = Runner(device="emulator", compute="fp32x3", kernel="mma")
    result = runner.run(a * large, b, out, beta=beta * float(large), out=out)
    assert (result.c == (a @ b + beta * c) * large).all()
    assert "strict" in result.compute
