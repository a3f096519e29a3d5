"""Checked products of small matrices, on devices that damage what they make."""

import sys
from pathlib import Path

import hybrid_gemm as hg
from hybrid_gemm import devices

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from fuzzing.faulty import FaultyDevice, flip, put

__all__ = ["SPOT", "FaultyDevice", "K", "M", "N", "flip", "matrices", "plant", "put", "run"]

M, K, N = 130, 70, 132
SPOT = slice(70, 71), slice(90, 91)


def plant(monkeypatch, faults):
    """Lets the devices that are opened from now on have these faults, each its own."""
    real = devices.open_devices

    def faulty(*args, **keywords):
        return [FaultyDevice(device, faults) for device in real(*args, **keywords)]

    monkeypatch.setattr(devices, "open_devices", faulty)


def matrices(rng, dtype="float32"):
    return [(4 * rng.standard_normal(s)).astype(dtype) for s in ((M, K), (K, N), (M, N))]


def run(device, arrays, checked=True, alpha=1, beta=0, **options):
    a, b, c = arrays
    with hg.Runner(device=device, checked=checked, **options) as runner:
        return runner.run(a, b, c if beta else None, alpha=alpha, beta=beta)
