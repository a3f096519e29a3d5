"""What several declarations share: the lab's sizes and threads, and a claim about all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..reporting.pictures import Line, Panel, Picture, machines
from .base import Point, Rows, Verdict, verdict
from .measure import product, run

LAB_SIZES = (512, 1024, 2048, 4096, 8192)
LAB_THREADS = (1, 2, 4, 8)
BEST = "tuned"  # our own kernel that is fastest for large matrices
LAB, OURS = "the lab's way", "ours"


def lab_sizes(scale: str, device: str) -> tuple[int, ...]:
    """The sides n of the lab's square matrices at a scale of `SCALES`; of the emulator, which is
    slow, small ones are smaller than the lab's."""
    if scale == "full":
        return LAB_SIZES
    return (64, 128) if device == "emulator" else LAB_SIZES[:2]


def largest(rows: Rows, figure: str, **wanted: Any) -> int:
    """The largest n at which a figure was measured, in the rows that have these values."""
    return max(r["n"] for r in rows.measured(figure, **wanted))


def printed(theirs: Rows, n: int) -> tuple[int, Rows]:
    """The size whose published rows stand beside ours of size `n`, which is that one or else their
    largest; and these rows, with figures named as ours are."""
    sizes = theirs.values("n")
    at = n if n in sizes else max(sizes)
    renamed = ({k.removeprefix("published_"): v for k, v in r.items()} for r in theirs.where(n=at))
    return at, Rows(renamed)


def on(rows: Rows, machine: str, way: str) -> str:
    """How many machines one way of a split took, in words: "2 H200s"."""
    return machines(max(rows.values("devices", way=way), default=1), machine)


def right_everywhere(rows: Rows, what: str = "products are right") -> Verdict:
    """Whether all that was made was verified as right."""
    judged = rows.measured("verdict")
    passed = judged.where(verdict="passed")
    return verdict(len(passed) == len(judged), f"{len(passed)} of {len(judged)} {what}")


def by_threads(scale: str, device: str, split: str, **lab: Any) -> Iterator[Point]:
    """Every number of threads at every size: the lab's way, for which `lab` says more, and ours."""
    for n in lab_sizes(scale, device):
        for way in (LAB, OURS):
            for threads in LAB_THREADS:
                given: dict[str, Any] = {"n": n, "threads": threads, "split": split}
                if way == LAB:
                    given |= {"kernel": "naive_row", "params": {"BLOCK": 32}, "alone": True, **lab}
                yield Point(run, {"way": way, "threads": threads, "n": n}, given)


def time_by_tile(side: str) -> Callable[[Rows, Rows, str], Picture]:
    """A picture of time over the tile: published, and ours. `side` says what a tile's side is."""

    def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
        n = rows.values("n")[0]
        lines = [
            Line("published, P100, m = n = k = 1024",
                 *theirs.line("tile_size", "published_time_ms"), theirs=True),
            Line(f"{machine}, m = n = k = {n}", *rows.line("tile_size", "time_ms")),
        ]  # fmt: skip
        x = f"tile side ({side}, squared)"
        return Picture([Panel(lines)], x, "time (ms), int32", log_x=True, log_y=True)

    return picture


def products_by_tile(kernel: str, tiles: Iterable[int], n: int) -> Iterator[Point]:
    """A kernel with every tile at one size, in int32 as the course had it."""
    for tile in tiles:
        given = {"kernel": kernel, "params": {"TILE": tile}, "dtype": "int32"}
        yield Point(product, {"tile_size": tile, "n": n}, given | {"m": n, "n": n, "k": n})
