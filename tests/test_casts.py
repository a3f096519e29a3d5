"""Arrays that a kernel copies on a device and casts, with any steps between elements: as NumPy
casts whole numbers that both types hold, and integers that wrap."""

import ml_dtypes
import numpy as np
import pytest
from support.arrays import copied
from support.devices import open_device

from hybrid_gemm.devices.kernel_device import ELEMENTS

WAYS = (
    lambda x: x, lambda x: np.repeat(x, 2, -1)[..., ::2], lambda x: x[..., ::-1].copy()[..., ::-1],
    lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    lambda x: np.repeat(x, 3, -2)[..., ::3, :],
)  # fmt: skip
SEEDS = [*range(10), *(pytest.param(x, marks=pytest.mark.campaign) for x in range(10, 300))]


def there(device, lying):
    """A view that lies so in the device's memory."""
    if device.on_gpu:
        return copied(device.cp, lying)
    whole = lying if lying.base is None else lying.base
    offset = lying.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    memory = device.empty(1, whole.nbytes, "u1")
    memory[0] = np.frombuffer(whole.tobytes("K"), "u1")
    return np.ndarray(lying.shape, lying.dtype, memory, offset, lying.strides)


def drawn(rng):
    """A and what A is cast to, as they lie."""
    of, to = (np.dtype(getattr(ml_dtypes, x, x)) for x in rng.choice(ELEMENTS, 2))
    if of.kind == "c" != to.kind or rng.random() < 0.3:
        to = of
    shape = (*rng.integers(1, 4, rng.integers(0, 4)), *rng.integers(1, 99, 2))
    if len(shape) > 4:
        shape = (shape[0], 1, *shape[2:])
    low = 0 if "u" in (of.kind, to.kind) and not {of.kind, to.kind} <= {"i", "u"} else -99
    x = rng.integers(low, 100, shape).astype(of)
    source = WAYS[rng.integers(len(WAYS))](x)
    if rng.random() < 0.2:
        source = np.broadcast_to(source[..., :1, :], source.shape)
    return source, WAYS[rng.integers(len(WAYS))](np.zeros(shape, to))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cast_is_numpys(kernel_device, seed):
    device, rng = open_device(kernel_device), np.random.default_rng(seed)
    source, into = drawn(rng)
    a, c, stream = there(device, source), there(device, into), device.stream()
    device.bind_cast(a, c)(a, None, c, stream)
    stream.synchronize()
    got = c.get() if device.on_gpu else np.array(c)
    np.testing.assert_array_equal(got, source.astype(into.dtype))


def test_what_no_kernel_casts_is_none(kernel_device):
    real, parts = np.zeros((3, 4), "f4"), np.zeros((3, 4), "c8")
    many = np.zeros((4, 4, 4, 4, 4), "f4")[::2, ::2, ::2]
    uneven = np.lib.stride_tricks.as_strided(np.zeros(99, "f4"), (3, 4), (18, 4))
    for a, c in ((parts, real), (real > 0, real), (uneven, real), (many, many)):
        assert open_device(kernel_device).bind_cast(a, c) is None
