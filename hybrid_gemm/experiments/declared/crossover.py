"""From which size on is the library faster than a kernel of one's own?"""

from collections.abc import Iterator

from ...reporting.pictures import Line, Panel, Picture
from ..base import Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..measure import library_cold, run_kernel
from ..sizes import lab_sizes

HAND, BEST, COLD = "the lab's kernel", "our best kernel", "cuBLAS, handle included"


def points(scale: str, device: str) -> Iterator[Point]:
    """At every size the lab's kernel, our best kernel, and cuBLAS with its handle."""
    for n in lab_sizes(scale, device):
        row = {"program": HAND, "n": n}
        lab = {"kernel": "naive_row", "params": {"BLOCK": 32}, "alone": True}
        yield Point(run_kernel, row, {"n": n, **lab})
        yield Point(run_kernel, {"program": BEST, "n": n}, {"n": n})
        yield Point(library_cold, {"program": COLD, "n": n}, {"n": n})


def _ratio(rows: Rows, n: int) -> float:
    """The library's time over that of the lab's kernel."""
    return rows.value("time_ms", program=COLD, n=n) / rows.value("time_ms", program=HAND, n=n)


def slower_below(rows: Rows) -> Verdict:
    """At n = 512, 1024 and 2048 cuBLAS takes longer than the lab's kernel."""
    ratios = {n: _ratio(rows, n) for n in (512, 1024, 2048)}
    words = ", ".join(f"{r:.3g} at {n}" for n, r in ratios.items())
    return verdict(
        all(r > 1 for r in ratios.values()),
        f"time with the handle, over the lab's kernel: {words} (published: 84.8, 38.4, 7.0)",
    )


def faster_above(rows: Rows) -> Verdict:
    """At n = 8192 cuBLAS is more than 1.5 times as fast as the lab's kernel."""
    ratio = _ratio(rows, 8192)
    ours = rows.value("time_ms", program=BEST, n=8192)
    warm = rows.value("warm_ms", program=COLD, n=8192)
    return verdict(
        ratio < 1 / 1.5,
        f"at n = 8192 the library takes {ratio:.2f} of the lab's kernel's time (published: 0.37); "
        f"our best kernel takes {ours:.0f} ms, the library without its handle {warm:.0f} ms",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Time over n, a line for each program: published, and ours."""
    return Picture(
        [
            Panel([Line(p, *theirs.line("n", "published_time_ms", program=p), True, i)
                   for i, p in ((0, HAND), (2, COLD))], "published, the lab's GPU"),
            Panel([*(Line(p, *rows.line("n", "time_ms", program=p), style=i)
                     for i, p in enumerate((HAND, BEST, COLD))),
                   Line("cuBLAS, second product", *rows.line("n", "warm_ms", program=COLD),
                        style=3)],
                  machine),
        ],
        "m = n = k", "time (ms), copies included", log_x=True, log_y=True,
    )  # fmt: skip


_LAB = ("the lab's GPU", ("n",), {"time_ms": "time_ms"})

EXPERIMENT = Experiment(
    title="Kernel against library",
    source="S3, the lab report, tables 1 and 4",
    question="From which size on is the library faster than a kernel of one's own?",
    points=points,
    columns=("program", "n", "published_time_ms", "time_ms", "ratio_time_ms", "warm_ms",
             "variant", "samples", "verdict"),
    published=(
        Published("lab_table1_block_size.csv", *_LAB, where={"block_size": 32},
                  held={"program": HAND}),
        Published("lab_table4_cublas.csv", *_LAB, held={"program": COLD}),
    ),
    claims=(
        Claim("Below n = 4096 cuBLAS is slower, since its handle is in the time.", slower_below),
        Claim("Above n = 4096 cuBLAS is far faster.", faster_above),
    ),
    picture=picture,
    exercise="Where do the two published curves cross, where do ours? Which would you show to "
    "someone who multiplies once, and which to someone who multiplies a thousand times?",
)  # fmt: skip
