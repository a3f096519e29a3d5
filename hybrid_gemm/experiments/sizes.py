"""What several declarations share: the lab's sizes and threads, and a claim about all rows."""

from __future__ import annotations

from typing import Any

from ..reporting.pictures import machines
from .base import Rows, Verdict, verdict

LAB_SIZES = (512, 1024, 2048, 4096, 8192)
LAB_THREADS = (1, 2, 4, 8)
BEST = "tuned"  # our own kernel that is fastest for large matrices
LAB, OURS = "the lab's way", "ours"


def lab_sizes(scale: str) -> tuple[int, ...]:
    """The sides n of the lab's square matrices at a scale of `SCALES`."""
    return LAB_SIZES if scale == "full" else (64, 128)


def largest(rows: Rows, figure: str, **wanted: Any) -> int:
    """The largest n at which a figure was measured, in the rows that have these values."""
    return max(r["n"] for r in rows.measured(figure, **wanted))


def on(rows: Rows, machine: str, way: str) -> str:
    """How many machines one way of a split took, in words: "2 H200s"."""
    return machines(max(rows.values("devices", way=way), default=1), machine)


def right_everywhere(rows: Rows) -> Verdict:
    """Whether every product that was made was verified as right."""
    judged = rows.measured("verdict")
    passed = judged.where(verdict="passed")
    return verdict(len(passed) == len(judged), f"{len(passed)} of {len(judged)} products are right")
