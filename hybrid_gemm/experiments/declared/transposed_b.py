"""Transposing B first, so that both operands are read along rows."""

from collections.abc import Iterator

from ... import catalog
from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Rows, Verdict, verdict
from ..measure import product, transposition
from ..model import tile, traffic
from ..sizes import largest, right_everywhere

AS_IT_LIES, WITHIN, BEFORE = "B as it lies", "transposed within the time", "transposed before"
BLOCK = {"BM": 32, "BN": 32}


def points(scale: str, device: str) -> Iterator[Point]:
    """Kernels with B as it lies and transposed: before, or within the time."""
    kernels = ("naive", "double_buffered") if device != "cpu" else ("blas",)
    for n in (1024, 2048, 4096) if scale == "full" else (128,):
        same = {"m": n, "n": n, "k": n}
        for kernel in kernels:
            params = BLOCK if kernel == "naive" else None
            for way, layout in ((AS_IT_LIES, "nn"), (BEFORE, "nt")):
                yield Point(
                    product,
                    {"kernel": kernel, "way": way, "n": n},
                    same | {"kernel": kernel, "params": params, "layout": layout},
                )
        if device != "cpu":
            for way, layout in ((WITHIN, "nn"), (BEFORE, "nt")):
                yield Point(
                    product,
                    {"kernel": "transposed_b", "way": way, "n": n},
                    same | {"kernel": "transposed_b", "params": BLOCK, "layout": layout},
                )
            yield Point(transposition, {"kernel": "transpose", "way": "alone", "n": n}, {"n": n})


def faster(rows: Rows) -> Verdict:
    """Transposing B within the time is faster than the kernel that reads B as it lies."""
    n = largest(rows, "time_ms", kernel="transposed_b")
    plain = rows.value("time_ms", kernel="naive", way=AS_IT_LIES, n=n)
    within, before = (
        rows.value("time_ms", kernel="transposed_b", way=w, n=n) for w in (WITHIN, BEFORE)
    )
    alone = rows.value("time_ms", kernel="transpose", n=n)
    return verdict(
        within < plain,
        f"at n = {n} the product takes {within:.3g} ms transposing first, {before:.3g} ms with B "
        f"transposed already, {plain:.3g} ms without; transposing alone takes {alone:.3g} ms",
    )


def _sectors_of_b(kernel: str, layout: str) -> int:
    """Sectors of B that a warp moves in a step of K."""
    block = tile(catalog.get(kernel).variant(BLOCK), "float32")
    assert block is not None  # both kernels give every block a tile
    found = traffic(block, layout, "float32", staged=False).warp_sectors
    assert found is not None  # of threads that read for themselves
    return found[1]


def contiguous(rows: Rows) -> Verdict:
    """A warp reads fewer sectors of B where B is transposed."""
    plain, turned = _sectors_of_b("naive", "nn"), _sectors_of_b("transposed_b", "nt")
    return verdict(
        turned < plain,
        f"along a thread's own loop, yes; but a warp's 32 threads read {plain} sectors of B a "
        f"step as it lies and {turned} transposed: what is contiguous for one thread is "
        "scattered over a warp",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Bars of the rate by size, for each kernel and way."""
    names = [str(n) for n in rows.values("n")]
    ways = [("naive", AS_IT_LIES), ("transposed_b", WITHIN), ("transposed_b", BEFORE),
            ("blas", AS_IT_LIES), ("blas", BEFORE)]  # fmt: skip
    lines = []
    for i, (kernel, way) in enumerate(ways):
        found = rows.by("n", "gflops", kernel=kernel, way=way)
        if found:
            values = [(found.get(n) or 0) / 1e3 for n in rows.values("n")]
            lines.append(Line(f"{kernel}, {way}", names, values, style=i))
    return Picture([Panel(lines, bars=True)], "m = n = k", f"TFLOP/s ({machine})")


EXPERIMENT = Experiment(
    title="Transposed B",
    source="S3, the lab report, improvements",
    question="B is read down its columns. Does it help to transpose it first?",
    points=points,
    columns=("kernel", "way", "n", "time_ms", "gflops", "warp_sectors", "flop_per_byte",
             "roofline_gflops", "registers", "samples", "verdict"),
    claims=(
        Claim("Transposing B before multiplying makes it faster.", faster),
        Claim("Reads of B become contiguous.", contiguous, ANYWHERE),
        Claim("The product is right in every layout.", right_everywhere, ANYWHERE),
    ),
    picture=picture,
    exercise="On a CPU one thread walks a row of A and a column of B. Write that loop in C, with "
    "and without B transposed. Why does the advice hold there?",
)  # fmt: skip
