"""Results of a GPU that does not exist: plausible rows of every experiment at full scale, so
that claims, pictures and pages can be tested without a card."""

import dataclasses

from hybrid_gemm import catalog
from hybrid_gemm.experiments import engine, model
from hybrid_gemm.experiments.base import Rows

GFLOPS = {
    "naive_row": 4e3, "naive": 5e3, "transposed_b": 3e3, "register_tile": 9e3,
    "shared_tile": 7e3, "block_tile": 25e3, "conflict_free": 38e3, "double_buffered": 44e3,
    "cublas": 50e3,
}  # fmt: skip
SLOWER = {"permuted": 1, "misaligned": 1.1, "float3": 1.3, "float3, shared memory": 1.05}


def _timed(ms, **more):
    return {"time_ms": ms, "min_ms": ms, "samples": 3, "verdict": "passed", **more}


def product(row, *, kernel, m, n, k, params=None, dtype="float32", **_):
    found = catalog.get(kernel)
    variant = found.variant(params) if params else found.variants()[0]
    figures = model.describe(variant, dtype, None, model.H200, m, n, k)
    rate = GFLOPS.get(kernel, 30e3) * min(1, (m / 3000) ** 0.7)
    if kernel in ("register_tile", "shared_tile"):
        tile = variant.params["TILE"]
        rate /= {1: 8, 2: 3, 4: 1.5, 8: 1, 16: 1.2, 32: 4, 64: 15}[tile]
    ms = 2 * m * n * k / rate / 1e6
    return figures | _timed(
        ms, gflops=rate, peak_gflops=66_900.0, of_peak=rate / 66_900, registers=64,
        local_bytes=0, shared_bytes=0, occupancy=0.5, loads_a_madd=0.125,
        occupancy_limit="registers", roofline_gflops=2e4, flop_per_byte=4.0,
    )  # fmt: skip


def product_and_occupancy(row, *, kernel, n, params=None):
    return product(row, kernel=kernel, m=n, n=n, k=n, params=params) | {"driver_occupancy": 0.5}


def strassen(row, *, kernel, levels, n):
    ms = 2 * n**3 / GFLOPS.get(kernel, 44e3) / 1e6 * (7 / 8) ** levels + levels * n**2 * 2e-8
    return _timed(ms, gflops=2 * n**3 / ms / 1e6, error=1e-6 * 2**levels, worst_error_of_bound=0.1)


def padded(row, *, kernel, n, to, **_):
    return product(row, kernel=kernel, m=to, n=to, k=to) | {"gflops": 40e3}


def transposition(row, *, n, **_):
    return _timed(n * n * 8 / 2e9)


def run(row, *, n, threads=1, split="rows", reduce="ordered", kernel="own", **_):
    multiply = 2 * n**3 / GFLOPS.get(kernel, 44e3) / 1e6
    copies = 3 * 4 * n * n / 20e6
    both = multiply * 1.05 + (threads * 8 * n * n / 10e6 if reduce == "critical" else 0)
    return _timed(
        copies + both, multiply_ms=multiply, multiply_and_sum_ms=both, variant=kernel,
        compute_ms=multiply + copies, compute_and_sum_ms=copies + both, devices=1,
        bytes_h2d=4 * n * n * (9 if kernel == "naive_row" else 2), reduction=reduce,
    )  # fmt: skip


run_kernel = run


def library_cold(row, *, n):
    warm = 2 * n**3 / 50e9 + 12 * n * n / 20e6
    return _timed(warm + 60, handle_ms=60.0, warm_ms=warm)


def probe(row, *, count, touched, **_):
    stride = row["pattern"].removeprefix("stride ")
    us = 2 + 8 * count / 4e6 * SLOWER.get(row["pattern"], 1)
    us *= min(8, int(stride)) if stride.isdigit() else 1
    return _timed(us / 1e3, time_us=us, gbps=8 * touched / us / 1e3)


def limit(row, **_):
    return {"value": {"multiprocessors": 132, "shared KiB a block": 48}.get(row["property"], 1024)}


def emulated(row, **_):
    return _timed(12.5)


def emulated_race(row, *, order):
    return {"wrong": 0 if order == "forward" else 31}


def results(scale: str = "full") -> dict:
    """A result file's data, as `reproduce --scale full` on a GPU would write it."""
    measures = globals()
    found = []
    for experiment in engine.experiments().values():
        rows = [
            dict(p.row) | measures[p.measure.__name__](p.row, **p.given)
            for p in experiment.points(scale, "cuda")
        ]
        found.append({
            "name": experiment.name,
            "rows": experiment.beside(rows),
            "verdicts": engine.verdicts(experiment, Rows(rows), "cuda"),
            "cut": 0,
            "seconds": 20.0,
        })  # fmt: skip
    return {
        "command": "hybrid-gemm reproduce all --scale full",
        "device": {"kind": "cuda", "name": "cuda:0 Invented GPU"},
        "machine": dataclasses.asdict(model.H200) | {"assumed": False},
        "scale": scale,
        "seed": 0,
        "seconds": 300.0,
        "experiments": found,
    }
