"""Zero padding against guards, where the tile does not divide the size."""

from collections.abc import Iterator

from ... import catalog
from ...reporting.pictures import Line, Panel, Picture
from ..base import Claim, Experiment, Point, Rows, Verdict, verdict
from ..measure import padded, product
from ..model import tile
from ..sizes import largest, right_everywhere

KERNELS = ("shared_tile", "double_buffered")
GUARDS, ZEROS, DIVIDES = "guards", "padded with zeros", "next size that divides"


def points(scale: str, device: str) -> Iterator[Point]:
    """Two kernels at sizes that their tile does not divide: guarded, padded, and larger."""
    for n in (1000, 2050, 4097) if scale == "full" else (65,):
        for kernel in KERNELS:
            block = tile(catalog.get(kernel).variant(), "float32")
            assert block is not None  # these kernels give every block a tile
            to = -(-n // block.rows) * block.rows
            row = {"kernel": kernel, "n": n, "tile": block.rows}
            same = {"kernel": kernel, "m": n, "n": n, "k": n}
            yield Point(product, row | {"way": GUARDS}, same)
            yield Point(padded, row | {"way": ZEROS, "padded_to": to},
                        {"kernel": kernel, "n": n, "to": to})  # fmt: skip
            larger = {"kernel": kernel, "m": to, "n": to, "k": to}
            yield Point(product, row | {"way": DIVIDES, "padded_to": to}, larger)


def padding_or_guards(rows: Rows) -> Verdict:
    """Every product is right; the figures say which way is faster."""
    right = right_everywhere(rows)
    words = []
    for kernel in KERNELS:
        n = largest(rows, "time_ms", kernel=kernel, way=ZEROS)
        guards, zeros = (rows.value("time_ms", kernel=kernel, way=w, n=n) for w in (GUARDS, ZEROS))
        words.append(f"{kernel} at n = {n}: {zeros / guards:.2f}")
    return verdict(
        right.status == "confirmed",
        f"{right.because}; time padded, copies included, over guards: {', '.join(words)}",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Bars of the useful rate by size, a panel for each kernel."""
    panels = []
    for kernel in KERNELS:
        names = [str(n) for n in rows.values("n")]
        lines = []
        for i, way in enumerate((GUARDS, ZEROS)):
            found = rows.by("n", "gflops", kernel=kernel, way=way)
            rates = [found[n] / 1e3 if n in found else None for n in rows.values("n")]
            lines.append(Line(way, names, rates, style=i))
        panels.append(Panel(lines, kernel, bars=True))
    return Picture(panels, "m = n = k", f"useful TFLOP/s ({machine})")


EXPERIMENT = Experiment(
    title="Zero padding against guards",
    source="S2, the note",
    question="The tile does not divide the size: pad with zeros, or guard every access?",
    points=points,
    columns=("kernel", "tile", "n", "way", "padded_to", "time_ms", "gflops", "registers",
             "samples", "verdict"),
    claims=(
        Claim("A tile that does not divide the size needs padding or guards; either will do.",
              padding_or_guards, ("cuda", "emulator")),
    ),
    picture=picture,
    exercise="Padding copies A and B once, n squared elements; a guard is asked at each step of "
    "K. From which n on should padding win? Add a size to `points` in "
    "`hybrid_gemm/experiments/declared/padding.py` and see.",
)  # fmt: skip
