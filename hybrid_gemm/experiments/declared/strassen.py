"""Strassen's algorithm over a kernel: when does it win, and what does it cost in accuracy?"""

import itertools
from collections.abc import Callable, Iterator

from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Rows, Verdict, verdict
from ..measure import strassen
from ..sizes import BEST, largest

LEVELS = (0, 1, 2, 3)


def points(scale: str, device: str) -> Iterator[Point]:
    """0 to 3 levels over the kernels of the device, at several sizes."""
    kernels = {"cuda": (BEST, "cublas"), "cpu": ("blas",),
               "emulator": ("shared_tile",)}[device]  # fmt: skip
    sizes = {"cuda": (256, 512), "cpu": (127, 256), "emulator": (33, 64)}[device]
    for n in sizes if scale == "small" else (2048, 4096, 8192, 16384):
        for kernel in kernels:
            for levels in LEVELS:
                yield Point(strassen, {"kernel": kernel, "n": n, "levels": levels},
                            {"kernel": kernel, "n": n, "levels": levels})  # fmt: skip


def wins(kernel: str) -> Callable[[Rows], Verdict]:
    """Whether some level is faster than the kernel alone, at some size."""

    def decide(rows: Rows) -> Verdict:
        gains = {}
        for n in rows.values("n", kernel=kernel):
            times = [rows.value("time_ms", kernel=kernel, n=n, levels=x) for x in LEVELS]
            best = min(LEVELS[1:], key=lambda x: times[x])
            gains[n] = times[0] / times[best], best
        words = ", ".join(
            f"{gain:.2f} times as fast at {n} ({level} level{'s' * (level > 1)})"
            for n, (gain, level) in gains.items()
        )
        won = [n for n, (gain, _level) in gains.items() if gain > 1]
        return verdict(bool(won), f"against the kernel alone {words}")

    return decide


def errors_grow(rows: Rows) -> Verdict:
    """Each level has a larger error than the one before."""
    kernel = rows.measured("error")[0]["kernel"]
    n = largest(rows, "error", kernel=kernel)
    errors = [rows.value("error", kernel=kernel, n=n, levels=x) for x in LEVELS]
    return verdict(
        all(a < b for a, b in itertools.pairwise(errors[1:])) and errors[0] < errors[-1],
        f"over {kernel} at n = {n}: "
        + ", ".join(f"{e:.2g} with {x}" for x, e in zip(LEVELS, errors, strict=True))
        + " levels (Frobenius norm of the error over the product's)",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Speed over that of the kernel alone by n, and the error by levels."""
    kernels = rows.values("kernel")
    panels = []
    for kernel in kernels:
        lines = []
        base = rows.by("n", "time_ms", kernel=kernel, levels=0)
        for i, level in enumerate(LEVELS[1:]):
            sizes, times = rows.line("n", "time_ms", kernel=kernel, levels=level)
            gains = [base[n] / t for n, t in zip(sizes, times, strict=True) if n in base]
            lines.append(Line(f"{level} level{'s' * (level > 1)}", sizes, gains, style=i))
        panels.append(Panel(lines, f"over {kernel}, {machine}"))
    n = max(rows.values("n"), default=0)
    errors = [
        Line(kernel, *rows.line("levels", "error", kernel=kernel, n=n), style=3 + i)
        for i, kernel in enumerate(kernels)
    ]
    panels.append(
        Panel(errors, f"m = n = k = {n}", x="levels", y="relative error (Frobenius)", log_y=True)
    )
    return Picture(
        panels, "m = n = k", "times as fast as the kernel alone", log_x=True, reference=1
    )


EXPERIMENT = Experiment(
    title="Strassen's algorithm",
    source="S3, the lab report, improvements",
    question="Seven products of quarters instead of eight: from which size on does that win?",
    points=points,
    columns=("kernel", "n", "levels", "time_ms", "gflops", "error", "worst_error_of_bound",
             "samples", "verdict"),
    claims=(
        Claim("Strassen's algorithm makes a hand-written kernel faster.",
              wins(BEST)),
        Claim("It makes cuBLAS faster too.", wins("cublas")),
        Claim("Its errors grow with each level.", errors_grow, ANYWHERE),
    ),
    picture=picture,
    exercise="Each level saves an eighth of the multiply-adds and adds 15 sums of quarters. From "
    "the roofline's two rates, predict the n at which one level breaks even.",
    cap_s=60,
)  # fmt: skip
