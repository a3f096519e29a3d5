"""A by rows over threads: do more threads on one GPU help?"""

from collections.abc import Iterator
from typing import Any

from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..sizes import LAB, OURS, by_threads, largest, on, printed, right_everywhere


def points(scale: str, device: str) -> Iterator[Point]:
    """Every number of threads at every size: the lab's way, and ours."""
    return by_threads(scale, device, "rows")


def no_speed_up(rows: Rows) -> Verdict:
    """Eight threads are less than 1.5 times as fast as one, the lab's way."""
    n = largest(rows, "time_ms", way=LAB)
    at, theirs = printed(EXPERIMENT.theirs(), n)
    lab, ours, published = (
        found.value("time_ms", threads=1) / found.value("time_ms", threads=8)
        for found in (rows.where(way=LAB, n=n), rows.where(way=OURS, n=n), theirs)
    )
    return verdict(
        lab < 1.5,
        f"at n = {n}, 8 threads are {lab:.2f} times as fast as one the lab's way "
        f"(published: {published:.2f} at {at}), {ours:.2f} times ours",
    )


def copies_of_b(rows: Rows) -> Verdict:
    """The lab's way sends A once and B eight times with eight threads."""
    n = largest(rows, "bytes_h2d")
    sent = {way: rows.value("bytes_h2d", way=way, n=n, threads=8) for way in (LAB, OURS)}
    matrix = 4 * n * n
    return verdict(
        sent[LAB] == 9 * matrix,
        f"at n = {n} 8 threads send {sent[LAB] / matrix:.0f} matrices to the GPU the lab's way, "
        f"and {sent[OURS] / matrix:.0f} ours; A once and B for each thread are 9",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Speed over one thread's, by threads: published if of our size, the lab's way, ours."""
    n = max(rows.values("n"), default=0)

    def speed_up(found: Rows, figure: str, **wanted: Any) -> tuple[list, list]:
        threads, times = found.line("threads", figure, **wanted)
        return threads, [times[0] / t for t in times]

    lines = []
    if n in theirs.values("n"):
        found = speed_up(theirs, "published_time_ms", n=n)
        lines.append(Line(f"published, 1 GPU, m = n = k = {n}", *found, theirs=True))
    for style, way in ((1, LAB), (2, OURS)):
        label = f"{way}, {on(rows, machine, way)}, m = n = k = {n}"
        lines.append(Line(label, *speed_up(rows, "time_ms", way=way, n=n), style=style))
    return Picture([Panel(lines)], "threads", "times as fast as one thread", reference=1, ends=True)


EXPERIMENT = Experiment(
    title="Rows over threads",
    source="S3, the lab report, table 2",
    question="Each thread takes some rows of A and all of B. Do threads that share a GPU help?",
    points=points,
    columns=(
        "way", "threads", "n", "published_time_ms", "time_ms", "ratio_time_ms", "compute_ms",
        "multiply_ms", "bytes_h2d", "variant", "devices", "samples", "verdict",
    ),
    published=(
        Published("lab_table2_rows.csv", "the lab's GPU", ("threads", "n"), {"time_ms": "time_ms"}),
    ),
    claims=(
        Claim("Threads that share a GPU give almost no speed-up.", no_speed_up),
        Claim("Every thread copies all of B.", copies_of_b, ("cuda", "emulator")),
        Claim("The product is right for every number of threads.", right_everywhere, ANYWHERE),
    ),
    picture=picture,
    exercise="Predict how many bytes 8 threads bring to one GPU, and to two GPUs, at n = 4096. "
    "Then read them off the plan of `hybrid-gemm run --size 4096 --threads 8 --split rows "
    "--dry-run --device emulator`, and with `--emulate-devices 2`. How does the second GPU get B?",
)  # fmt: skip
