"""Invented times of kernels and a library, and the models that are fitted to them."""

import tempfile
from pathlib import Path

import numpy as np

from hybrid_gemm import catalog
from hybrid_gemm.bench import drawing, fitting, left_out
from hybrid_gemm.kernel_choice import costs, model_files
from hybrid_gemm.kernel_choice.tables import Machine

MACHINE = Machine("NVIDIA H200", 132, 90, 66.9)


def invented(count=160, seed=3, lead=1.0):
    """Times of three kernels and a library which follow laws: half a microsecond a step of the
    busiest multiprocessor; of the library, work at 30 TFLOP/s and bytes, times `lead`."""
    drawn = drawing.draw(seed, count)
    ours = [catalog.get(name).variant() for name in ("tuned", "deep", "double_buffered")]
    times = np.array([
        [3 + 0.5 * costs.counts(v, d.shape, d.layout, "float32", 132)[1] for v in ours]
        for d in drawn
    ])  # fmt: skip
    cublas = catalog.get("cublas").variant()
    theirs = [costs.counts(cublas, d.shape, d.layout, "float32", 132) for d in drawn]
    library = lead * np.array([[3 + x[1] / 80 + x[2] / 2 + x[3] / 2] for x in theirs])
    return fitting.Measured("float32", drawn, [*ours, cublas], np.hstack([times, library]))


def written(file, measured):
    """The file of the model of measured times."""
    found, library = (
        fitting.fit(measured, measured.counts(132)), fitting.fit_library(measured, MACHINE)
    )  # fmt: skip
    file.write_bytes(model_files.as_bytes(fitting.data(measured, found, MACHINE, library)))
    return file


def made(measured):
    """The model of measured times, through its file."""
    with tempfile.TemporaryDirectory() as folder:
        return model_files.read(written(Path(folder) / "model.npz", measured), MACHINE)


def judged(measured):
    """What choosing is worth at shapes left out."""
    found, library = (
        fitting.fit(measured, measured.counts(132)), fitting.fit_library(measured, MACHINE)
    )  # fmt: skip
    return left_out.worth(left_out.LeftOut(measured, found, library))["all"]
