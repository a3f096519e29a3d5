"""Transposing B first, so that both operands are read along rows."""

from ... import catalog
from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, verdict
from ..measure import product, transposition
from ..model import tile, traffic
from ..sizes import largest, right_everywhere

AS_IT_LIES, WITHIN, BEFORE = "B as it lies", "transposed within the time", "transposed before"
BLOCK = {"BM": 32, "BN": 32}


def points(scale, device):
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


def faster(rows):
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


def contiguous(rows):
    plain, turned = (
        traffic(
            tile(catalog.get(k).variant(BLOCK), "float32"), layout, "float32", False
        ).warp_sectors
        for k, layout in (("naive", "nn"), ("transposed_b", "nt"))
    )
    return verdict(
        turned[1] < plain[1],
        f"along a thread's own loop, yes; but a warp's 32 threads read {plain[1]} sectors of B a "
        f"step as it lies and {turned[1]} transposed: what is contiguous for one thread is "
        "scattered over a warp",
    )


def picture(rows):
    names = [f"n = {n}" for n in rows.values("n")]
    ways = [("naive", AS_IT_LIES), ("transposed_b", WITHIN), ("transposed_b", BEFORE),
            ("blas", AS_IT_LIES), ("blas", BEFORE)]  # fmt: skip
    lines = []
    for i, (kernel, way) in enumerate(ways):
        found = dict(zip(*rows.line("n", "gflops", kernel=kernel, way=way), strict=True))
        if found:
            values = [(found.get(n) or 0) / 1e3 for n in rows.values("n")]
            lines.append(Line(f"{kernel}, {way}", names, values, style=i))
    return Picture([Panel(lines, bars=True)], "", "TFLOP/s")


EXPERIMENT = Experiment(
    name="transposed_b",
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
