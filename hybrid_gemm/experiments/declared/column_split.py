"""A by columns over threads, partial C summed: what does the sum cost?"""

from collections.abc import Iterator
from typing import Any

from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..sizes import LAB, OURS, by_threads, largest, on, right_everywhere

FIGURES = {"compute_ms": "compute_ms", "compute_and_sum_ms": "compute_and_sum_ms"}


def points(scale: str, device: str) -> Iterator[Point]:
    """Every number of threads at every size: the lab's way, and ours."""
    return by_threads(scale, "cols", reduce="critical")


def _lab(rows: Rows, figure: str, *threads: int) -> tuple[int, list[float]]:
    """The largest n, and a figure of the lab's way there with these numbers of threads."""
    n = largest(rows, figure, way=LAB)
    return n, [rows.value(figure, way=LAB, n=n, threads=t) for t in threads]


def compute_falls(rows: Rows) -> Verdict:
    """Eight threads take less than 0.8 of the time that one takes to compute."""
    n, (one, eight) = _lab(rows, "compute_ms", 1, 8)
    return verdict(
        eight < 0.8 * one,
        f"at n = {n}, compute takes {one:.0f} ms with one thread and {eight:.0f} ms with 8 "
        "(published: 3892 and 920 ms at 8192)",
    )


def sum_grows(rows: Rows) -> Verdict:
    """With eight threads computing and summing takes longer than with one."""
    n, (one, eight) = _lab(rows, "compute_and_sum_ms", 1, 8)
    return verdict(
        eight > one,
        f"at n = {n}, compute + sum takes {one:.0f} ms with one thread and {eight:.0f} ms with 8 "
        "(published: 4395 and 6059 ms at 8192)",
    )


def sum_dominates(rows: Rows) -> Verdict:
    """With eight threads computing and summing takes twice as long as computing."""
    n, (both,) = _lab(rows, "compute_and_sum_ms", 8)
    alone = rows.value("compute_ms", way=LAB, n=n, threads=8)
    return verdict(
        both > 2 * alone,
        f"with 8 threads at n = {n}, compute + sum takes {both / alone:.2f} times compute alone "
        "(published: 6.6)",
    )


def device_sum_mends(rows: Rows) -> Verdict:
    """Summed on the device: less than 1.5 times multiplying, and faster than the lab's."""
    n, (critical,) = _lab(rows, "compute_and_sum_ms", 8)
    ours = rows.where(way=OURS)
    whole, multiply, both = (
        ours.value(f, n=n, threads=8)
        for f in ("compute_and_sum_ms", "multiply_ms", "multiply_and_sum_ms")
    )
    one = ours.value("compute_and_sum_ms", n=n, threads=1)
    return verdict(
        both < 1.5 * multiply and whole < critical,
        f"at n = {n} with 8 threads, multiplying and summing on the device takes "
        f"{both / multiply:.2f} times multiplying alone; the whole run takes {whole:.0f} ms "
        f"({one:.0f} ms with one thread), the lab's way {critical:.0f} ms",
    )


def picture(rows: Rows, machine: str) -> Picture:
    """Time by threads: published, the lab's way, ours."""
    n = max(rows.values("n"), default=0)

    def panel(found: Rows, title: str, names: list[str], **wanted: Any) -> Panel:
        theirs = title.startswith("published")
        return Panel(
            [Line("compute + sum", *found.line("threads", names[1], **wanted), theirs, 1),
             Line("compute", *found.line("threads", names[0], **wanted), theirs, 0)],
            f"{title}\nm = n = k = {wanted['n']}",
        )  # fmt: skip

    published = [f"published_{f}" for f in FIGURES]
    return Picture(
        [
            panel(EXPERIMENT.theirs(), "published", published, n=8192),
            panel(rows, f"{LAB}, {on(rows, machine, LAB)}", list(FIGURES), way=LAB, n=n),
            panel(rows, f"{OURS}, {on(rows, machine, OURS)}", list(FIGURES), way=OURS, n=n),
        ],
        "threads", "time (ms)", log_y=True, ends=True,
    )  # fmt: skip


EXPERIMENT = Experiment(
    name="column_split",
    title="Columns over threads",
    source="S3, the lab report, table 3",
    question="Each thread multiplies some columns of A with rows of B; the partial C are summed. "
    "What does the sum cost?",
    points=points,
    columns=(
        "way", "threads", "n", "published_compute_ms", "compute_ms", "ratio_compute_ms",
        "published_compute_and_sum_ms", "compute_and_sum_ms", "ratio_compute_and_sum_ms",
        "multiply_ms", "multiply_and_sum_ms", "variant", "reduction", "devices", "samples",
        "verdict",
    ),
    published=(Published("lab_table3_cols.csv", "the lab's GPU", ("threads", "n"), FIGURES),),
    claims=(
        Claim("The sum dominates at 8 threads.", sum_dominates),
        Claim("Compute falls with more threads.", compute_falls),
        Claim("Compute + sum grows with more threads.", sum_grows),
        Claim("Summing in device memory, not in a critical section, mends it.", device_sum_mends),
        Claim("The product is right for every number of threads.", right_everywhere, ANYWHERE),
    ),
    picture=picture,
    exercise="In the lab's way each thread moves C up and down once. Write down the bytes for T "
    "threads, and for a sum on the device; then compare with what is moved by `hybrid-gemm run "
    "--size 4096 --threads 8 --split cols --dry-run --device emulator`, with `--reduce critical` "
    "and without it.",
    cap_s=60,
)  # fmt: skip
