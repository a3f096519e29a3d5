"""Kernel texts for the emulator, and compilers that say when they are called."""

import os
import shutil
from pathlib import Path

import pytest

from hybrid_gemm.catalog import Launch
from hybrid_gemm.devices.emulator import program as emulator
from hybrid_gemm.devices.emulator.program import Options

needs_emulator = pytest.mark.skipif(
    emulator.unavailable() is not None, reason=str(emulator.unavailable())
)


def compiled(text, folder, label="test", options=Options(), dtype="float"):  # noqa: B008
    """The program made of a kernel text, in which T is a type of C; the kernel is `kernel`, and
    what it includes is in `folder`."""
    source = f'typedef {dtype} T;\n#line 1 "kernel.cu"\n{text.lstrip()}'
    return emulator.compile(source, "kernel", include=folder, options=options, label=label)


def run_kernel(
    text, args, folder, *, grid=1, block=1, shared=0, threads=1, options=Options(),  # noqa: B008
):  # fmt: skip
    """Compiles a kernel text and runs it over grids and blocks along x."""
    launch = Launch((grid, 1, 1), (block, 1, 1), shared)
    compiled(text, folder).launch(launch, args, threads=threads, options=options)


class Compiler:
    """A g++ that is found before the real one, adds `flags` to each call, and counts the libraries
    that it is to make.

    What was compiled before is not found again: the cache is an empty folder.
    """

    def __init__(self, folder: Path, monkeypatch, flags: str = ""):
        self.log = folder / "g++-calls"
        self.log.touch()
        (folder / "bin").mkdir()
        program = folder / "bin" / "g++"
        program.write_text(
            f'#!/bin/sh\necho "$*" >>"{self.log}"\nexec "{shutil.which("g++")}" "$@" {flags}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("HYBRID_GEMM_CACHE", str(folder / "cache"))

    @property
    def calls(self) -> int:
        return self.log.read_text().count(" -shared ")
