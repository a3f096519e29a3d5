"""Compiling before kernels are needed, and at once."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from support import command
from support.arrays import integers
from support.devices import open_device
from support.emulation import Compiler

import hybrid_gemm
from hybrid_gemm import Runner, catalog
from hybrid_gemm.bench import warm
from hybrid_gemm.devices import kernel_launcher
from hybrid_gemm.devices.emulator.device import EmulatorDevice
from hybrid_gemm.errors import KernelError, UsageError
from hybrid_gemm.execution.plan_maker import PlanMaker
from hybrid_gemm.host import cache


def files():
    return {p for kind in ("cubin", "emulator", "host") for p in cache.directory(kind).iterdir()}


@pytest.mark.parametrize(
    "dtype, options",
    [
        ("float32", {"kernel": "own"}),
        ("float32", {"compute": "fp32x3"}),
        ("float32", {"kernel": "shared_tile"}),
        ("float16", {"kernel": "own"}),
        ("int32", {}),
    ],
)
def test_products_after_it_compile_nothing(
    kernel_device, dtype, options, rng, tmp_path, monkeypatch, without_models
):
    monkeypatch.setenv("HYBRID_GEMM_CACHE", str(tmp_path))
    shape = 70, 50, 90
    data = warm.warm(
        [shape], dtypes=[dtype], layouts=["nn", "tn"], device=kernel_device, **options
    )  # fmt: skip
    assert data["products"] == 2 and data["kernels"]
    before = files()
    assert before
    a, b = integers(rng, (70, 90), dtype), integers(rng, (90, 50), dtype)
    for x in a, np.asfortranarray(a):
        for runner in (
            Runner(device=kernel_device, **options),
            Runner(device=kernel_device, threads=2, split="rows", **options),
        ):
            np.testing.assert_array_equal(runner.run(x, b).c, (a @ b).astype(dtype))
            np.testing.assert_array_equal(runner.gemm(x, b), (a @ b).astype(dtype))
    assert {p for p in files() - before if "host" not in p.parts} == set()


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_native_code_of_gpus_is_compiled_too(tmp_path, monkeypatch):
    """Runs and calls that came again waited for g++ even so. With -O3 it would take 20 s."""
    Compiler(tmp_path, monkeypatch, "-O0")
    code = """
from types import SimpleNamespace
from hybrid_gemm.bench import warm
list(warm._native([SimpleNamespace(on_gpu=True)]))
"""
    done = command.python("-c", code)
    assert done.returncode == 0, done.stderr
    package = Path(hybrid_gemm.__file__).parent
    sources = {p for p in package.rglob("*.cpp") if p.parent.name != "emulator"}
    assert len([*(tmp_path / "cache" / "host").glob("*.so")]) == len(sources) == 6


def test_a_row_or_column_is_taken_as_products_take_it(monkeypatch):
    """It lies in both orders, and products read it in one."""
    asked = []

    def choice(self, plan, layouts):
        asked.append(layouts)
        return catalog.get("naive").variant(), ""

    monkeypatch.setattr(PlanMaker, "choice", choice)
    monkeypatch.setattr(warm, "_compile", lambda *given: None)
    warm.warm([(40, 1, 30), (40, 20, 1)], dtypes=["float32"], layouts=["tt"], device="emulator")
    assert set(asked) == {"tn", "nn"}


def test_what_compiles_nothing_is_refused():
    with pytest.raises(UsageError, match="the cpu device compiles no kernels"):
        warm.warm([(8, 8, 8)], dtypes=["float32"], layouts=["nn"], device="cpu")
    with pytest.raises(UsageError, match=r"no table .* for emulator:0: name shapes"):
        warm.warm(None, dtypes=["float32"], layouts=["nn"], device="emulator")


def test_kernels_that_are_only_listed_are_loaded_later():
    """To list what a product needs marked it as prepared, so that its kernels came one by one."""
    device, variant = EmulatorDevice(), catalog.get("transposed_b").variant()
    a = b = np.ones((4, 4), "f4")

    def prepare(x):
        x.prepare(variant, a, b, "float32")

    listed = [device.kernels_of(prepare) for _ in "12"]
    assert listed[0] == listed[1] and len(listed[0]) > 1
    assert not device._loaded
    prepare(device)
    assert set(device._loaded) == set(listed[0])


def test_kernels_of_one_product_are_compiled_at_once(monkeypatch):
    device = open_device("emulator")
    monkeypatch.setattr(device, "_loaded", {})
    monkeypatch.setattr(kernel_launcher, "cores", lambda: 8)
    together, compiled = threading.Barrier(4, timeout=60), []

    def compile(variant, dtype, layouts):
        together.wait()  # for the others
        compiled.append((variant, dtype, layouts))

    monkeypatch.setattr(device, "compile", compile)
    monkeypatch.setattr(device, "load", lambda *key: key)
    a, b = np.ones((40, 30), "f4"), np.ones((30, 20), "f4")
    variant = catalog.get("mma").variant({"TERMS": 3, "OUT": 4})
    device.prepare(variant, a, b, "float32", summed=False)
    assert len(compiled) == 4 and set(compiled) == set(device._loaded)


def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    device = open_device("emulator")

    def compile(variant, dtype, layouts):
        raise KernelError("no")

    monkeypatch.setattr(device, "_loaded", {})
    monkeypatch.setattr(device, "compile", compile)
    with pytest.raises(KernelError, match="no"):
        device.prepare(catalog.get("naive").variant(), np.ones((4, 4)), np.ones((4, 4)), "float64")


def test_the_command_says_what_is_in_the_cache(tmp_path):
    done = command.run(
        "warm", "--shapes", "64", "--device", "emulator", "--kernel", "naive", "--json",
        tmp_path / "warm.json", check=0, HYBRID_GEMM_CACHE=str(tmp_path),
    )  # fmt: skip
    assert "1 kernel of 1 product in the cache, after" in done.stdout
    (row,) = json.loads((tmp_path / "warm.json").read_text())["kernels"]
    assert row["variant"] == "naive BM=16 BN=16"
