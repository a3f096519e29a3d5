"""cuBLAS with its handle made within the time."""

from collections.abc import Iterator

from ...reporting.pictures import Line, Panel, Picture
from ..base import Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..measure import library_cold
from ..sizes import lab_sizes


def points(scale: str, device: str) -> Iterator[Point]:
    """cuBLAS with its handle, at every size of the lab."""
    for n in lab_sizes(scale, device):
        yield Point(library_cold, {"n": n}, {"n": n})


def flat_below(rows: Rows) -> Verdict:
    """n = 2048 takes less than 1.2 times as long as n = 512."""
    small, larger = rows.value("time_ms", n=512), rows.value("time_ms", n=2048)
    return verdict(
        larger < 1.2 * small,
        f"n = 2048 takes {larger / small:.2f} times as long as n = 512, for 64 times the work "
        f"(published: 1.08); a second product with the same handle takes "
        f"{rows.value('warm_ms', n=512):.2f} and {rows.value('warm_ms', n=2048):.2f} ms",
    )


def handle_cost(rows: Rows) -> Verdict:
    """Making the handle takes 220 ms, within a factor of two."""
    handles = sorted(r["handle_ms"] for r in rows.measured("handle_ms"))
    middle = handles[len(handles) // 2]
    return verdict(
        110 <= middle <= 440,
        f"making the handle takes {middle:.0f} ms here ({handles[0]:.0f} to {handles[-1]:.0f}); "
        "confirmed means within a factor of two of 220",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Time over n: published, ours, and of a second product."""
    return Picture(
        [Panel([
            Line("published, the lab's GPU, handle included",
                 *theirs.line("n", "published_time_ms"), theirs=True),
            Line(f"{machine}, handle included", *rows.line("n", "time_ms")),
            Line(f"{machine}, second product", *rows.line("n", "warm_ms"), style=2),
        ])],
        "m = n = k", "time (ms), copies included", log_x=True, log_y=True,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="cuBLAS",
    source="S3, the lab report, table 4",
    question="What does a first product by the library cost?",
    points=points,
    columns=("n", "published_time_ms", "time_ms", "ratio_time_ms", "handle_ms", "warm_ms",
             "verdict"),
    published=(
        Published("lab_table4_cublas.csv", "the lab's GPU", ("n",), {"time_ms": "time_ms"}),
    ),
    claims=(
        Claim("Up to n = 2048 the time hardly depends on the size.", flat_below),
        Claim("Making the handle costs about 220 ms.", handle_cost),
    ),
    picture=picture,
    exercise="How many products of n = 1024 must a program make before the handle takes less "
    "than a tenth of the whole time?",
)  # fmt: skip
