"""`kernels/sum_parts.cu`: the last tiles of C, from the parts of k that clusters of blocks left."""

import numpy as np
import pytest
from support.arrays import fetch
from support.devices import open_device

from hybrid_gemm import catalog

TILE = {"BM": 64, "BN": 32, "CLUSTER": 2}  # of the product's kernel
HIGH, WIDE, STRIP, STEPS = 128, 32, 4, 5


def places(m, n):
    """The first rows and columns of all tiles, in the order of `kernels/tiles.cuh`."""
    rows, cols = -(-m // HIGH), -(-n // WIDE)
    return [
        (row * HIGH, col * WIDE)
        for strip in range(0, rows, STRIP)
        for col in range(cols)
        for row in range(strip, min(rows, strip + STRIP))
    ]


def parts_of(cut, runs):
    """The parts of the tiles that are cut, as (number, tile), and how many there are at most."""
    least, more = divmod(cut * STEPS, runs)
    ends = np.cumsum([0] + [least + (run < more) for run in range(runs)])
    made = {(run + step // STEPS, step // STEPS) for run in range(runs)
            for step in range(ends[run], ends[run + 1])}  # fmt: skip
    return sorted(made), cut + runs


@pytest.mark.parametrize(
    ("m", "n", "cut", "runs"), [(300, 200, 5, 12), (130, 97, 8, 8), (7, 20, 1, 5), (600, 70, 9, 31)]
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [("float16", 2), ("bfloat16", 2), ("tfloat32", 4)])
@pytest.mark.parametrize("beta", [0, 2])
def test_parts_are_added(kernel_device, rng, m, n, cut, runs, turned, dtype, out, beta):
    device = open_device(kernel_device)
    kernel, shape = catalog.helper("parts").kernel, (n, m) if turned else (m, n)
    variant = kernel.variant({**TILE, "TURN": 1 + turned, "OUT": out})
    old, tile_shape = rng.integers(-3, 4, shape), (WIDE, HIGH) if turned else (HIGH, WIDE)
    exponents = [rng.integers(-1, 2, s).astype("i4") for s in shape]
    made, most = parts_of(cut, runs)
    parts = np.full((most, *tile_shape), np.nan, "f4")
    expected = np.stack([old, old]).astype("f8")  # without exponents and with them
    whole = len(places(m, n)) - cut
    for tile, place in enumerate(places(m, n)[whole:]):
        row, col = place[::-1] if turned else place
        of_tile = [number for number, of in made if of == tile]
        parts[of_tile] = rng.integers(-2, 3, (len(of_tile), *tile_shape))
        there = np.s_[row : row + tile_shape[0], col : col + tile_shape[1]]
        sums = parts[of_tile].sum(axis=0)[: shape[0] - row, : shape[1] - col]
        scale = 2.0 ** (exponents[0][there[0], None] + exponents[1][there[1]])
        for made_of, factor in zip(expected, (2, 2 * scale), strict=True):
            made_of[there] = factor * sums + beta * made_of[there]

    def bits(x):
        if dtype == "bfloat16":
            return (x.astype("f4").view("u4") >> 16).astype("u2")  # exact for these
        return x.astype("f2").view("u2") if out == 2 else x.astype("f4").view("u4")

    before, stream = np.full((shape[0], shape[1] + 3), 0x7FC1, f"u{out}"), device.stream()
    before[:, : shape[1]] = bits(old)
    with device.using(stream):
        hosts = [before, parts.reshape(most, -1), *(x[None] for x in exponents)]
        there = [device.empty(*x.shape, x.dtype.name) for x in hosts]
        for to, host in zip(there, hosts, strict=True):
            device.copy(to, host, stream)
        c, given, of_rows, of_cols = there
        verdict = device.empty(1, 1, "int32")
        device.copy(verdict, np.array([[7]], "i4"), stream)
        function = device.function(variant, dtype)
        for wanted, scales in ((6, 1), (7, 1), (-1, 0)):  # nothing happens, and then it does
            device.copy(c, before, stream)
            sizes = [np.int32(x) for x in (m, n, STEPS, cut, runs)]
            args = [
                *sizes, given, np.float32(2), of_rows, of_cols, np.int32(scales),
                np.float32(beta), c, np.int64(shape[1] + 3), verdict, np.int32(wanted),
            ]  # fmt: skip
            device.launch(function, variant.launch(m, n, cut, dtype), args, stream)
            after = before.copy()
            if wanted != 6:
                after[:, : shape[1]] = bits(expected[scales])
            stream.synchronize()
            np.testing.assert_array_equal(fetch(device, c), after)
