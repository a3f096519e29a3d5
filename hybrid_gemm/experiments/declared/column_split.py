"""A by columns over threads, partial C summed: what does the sum cost?"""

from collections.abc import Iterator
from typing import Any

from ...errors import in_words
from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..sizes import LAB, OURS, by_threads, largest, on, printed, right_everywhere

FIGURES = {"compute_ms": "compute_ms", "compute_and_sum_ms": "compute_and_sum_ms"}


def points(scale: str, device: str) -> Iterator[Point]:
    """Every number of threads at every size: the lab's way, and ours."""
    return by_threads(scale, device, "cols", reduce="critical")


def _lab(rows: Rows, figure: str) -> tuple[int, Rows, int, Rows]:
    """The largest n at which a figure of the lab's way was measured with 8 threads and the rows
    there; the size of the published rows beside them, and those."""
    n = largest(rows, figure, way=LAB, threads=8)
    return n, rows.where(way=LAB, n=n), *printed(EXPERIMENT.theirs(), n)


def _one_and_eight(rows: Rows, *figures: str) -> list[float]:
    """What a figure is with one thread and with 8, or what the first has more than the second."""
    found = []
    for threads in (1, 8):
        more, *less = (rows.value(figure, threads=threads) for figure in figures)
        found.append(more - sum(less))
    return found


def compute_falls(rows: Rows) -> Verdict:
    """Eight threads take less than 0.8 of the time that one takes to compute."""
    n, ours, at, theirs = _lab(rows, "compute_ms")
    one, eight = _one_and_eight(ours, "compute_ms")
    return verdict(
        eight < 0.8 * one,
        f"at n = {n}, compute takes {one:.0f} ms with one thread and {eight:.0f} ms with 8 "
        "(published: {:.0f} and {:.0f} ms at {})".format(*_one_and_eight(theirs, "compute_ms"), at),
    )


def sum_grows(rows: Rows) -> Verdict:
    """With eight threads the sum adds more to the time of computing than with one."""
    figures = "compute_and_sum_ms", "compute_ms"
    n, ours, at, theirs = _lab(rows, figures[0])
    one, eight = _one_and_eight(ours, *figures)
    return verdict(
        eight > one,
        f"at n = {n}, the sum adds {one:.1f} ms to compute with one thread and {eight:.1f} ms with "
        "8 (published: {:.0f} and {:.0f} ms at {})".format(*_one_and_eight(theirs, *figures), at),
    )


def sum_dominates(rows: Rows) -> Verdict:
    """With eight threads computing and summing takes twice as long as computing."""
    n, ours, at, theirs = _lab(rows, "compute_and_sum_ms")
    times, published = (
        found.value("compute_and_sum_ms", threads=8) / found.value("compute_ms", threads=8)
        for found in (ours, theirs)
    )
    return verdict(
        times > 2,
        f"with 8 threads at n = {n}, compute + sum takes {times:.2f} times compute alone "
        f"(published: {published:.1f} at {at})",
    )


def on_a_gpu(rows: Rows) -> str:
    """What a GPU would show, from what its link would carry and what was published."""
    n = largest(rows, "bytes_d2h", way=OURS, threads=8)
    lab, ours = (
        in_words(sum(rows.value(x, way=way, n=n, threads=8) for x in ("bytes_h2d", "bytes_d2h")))
        for way in (LAB, OURS)
    )
    at, theirs = printed(EXPERIMENT.theirs(), n)
    compute, whole = (theirs.value(figure, threads=8) for figure in FIGURES)
    return (
        f"Here no partial leaves host memory; a GPU's link carries {lab} the lab's way, one thread "
        f"after the other, and {ours} ours. Of the {whole:.0f} ms that were published for n = {at} "
        f"and 8 threads, {whole - compute:.0f} are the sum"
    )


def each_sends_c(rows: Rows) -> Verdict:
    """The lab's way sends A and B once, and C for each of eight threads; ours sends no C."""
    n = largest(rows, "bytes_h2d", way=OURS, threads=8)
    sent = {way: rows.value("bytes_h2d", way=way, n=n, threads=8) for way in (LAB, OURS)}
    matrix = 4 * n * n
    return verdict(
        sent[LAB] == 10 * matrix,
        f"at n = {n} the plan for 8 threads sends {sent[LAB] / matrix:.0f} matrices to the GPU the "
        f"lab's way, A and B once and C for each thread, and {sent[OURS] / matrix:.0f} ours",
    )


def device_sum_mends(rows: Rows) -> Verdict:
    """Summed on the device: less than 1.5 times multiplying, and faster than the lab's."""
    n, lab, *_ = _lab(rows, "compute_and_sum_ms")
    critical = lab.value("compute_and_sum_ms", threads=8)
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


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Time by threads: published if of our size, the lab's way, ours."""
    n = max(rows.values("n"), default=0)

    def panel(found: Rows, title: str, names: list[str], **wanted: Any) -> Panel:
        return Panel(
            [Line("compute + sum", *found.line("threads", names[1], **wanted), found is theirs, 1),
             Line("compute", *found.line("threads", names[0], **wanted), found is theirs, 0)],
            f"{title}\nm = n = k = {wanted['n']}",
        )  # fmt: skip

    published = [f"published_{f}" for f in FIGURES]
    return Picture(
        [
            *([panel(theirs, "published", published, n=n)] if n in theirs.values("n") else []),
            panel(rows, f"{LAB}, {on(rows, machine, LAB)}", list(FIGURES), way=LAB, n=n),
            panel(rows, f"{OURS}, {on(rows, machine, OURS)}", list(FIGURES), way=OURS, n=n),
        ],
        "threads", "time (ms)", log_y=True, ends=True,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Columns over threads",
    source="S3, the lab report, table 3",
    question="Each thread multiplies some columns of A with rows of B; the partial C are summed. "
    "What does the sum cost?",
    points=points,
    columns=(
        "way", "threads", "n", "published_compute_ms", "compute_ms", "ratio_compute_ms",
        "published_compute_and_sum_ms", "compute_and_sum_ms", "ratio_compute_and_sum_ms",
        "multiply_ms", "multiply_and_sum_ms", "bytes_h2d", "bytes_d2h", "variant", "devices",
        "samples", "verdict",
    ),
    published=(Published("lab_table3_cols.csv", "the lab's GPU", ("threads", "n"), FIGURES),),
    claims=(
        Claim("The sum dominates at 8 threads.", sum_dominates, elsewhere=on_a_gpu),
        Claim("Compute falls with more threads.", compute_falls),
        Claim("The sum grows with more threads.", sum_grows, ("cuda", "cpu")),
        Claim("Each thread sends all of C to the GPU.", each_sends_c, ANYWHERE),
        Claim("Summing in device memory, not in a critical section, mends it.", device_sum_mends),
        Claim("The product is right for every number of threads.", right_everywhere, ANYWHERE),
    ),
    picture=picture,
    exercise="In the lab's way each thread moves C up and down once. Write down the bytes for T "
    "threads, and for a sum on the device, before you look at the table; then for two GPUs, and "
    "compare with `hybrid-gemm run --size 4096 --threads 8 --split cols --dry-run --device "
    "emulator --emulate-devices 2`, with `--reduce critical` and without it.",
    cap_s=60,
)  # fmt: skip
