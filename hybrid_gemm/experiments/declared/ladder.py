"""The ladder of SGEMM kernels at K = 1024, beside cuBLAS."""

from collections.abc import Callable, Iterator, Mapping

from ... import catalog
from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..measure import product
from ..model import SECTOR, V100, Traffic, tile, traffic
from ..sizes import BEST

SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
FEW = (1024, 4096, 16384)
NAMES = {
    "v1_shared_128x128x8": "block_tile", "v2_conflict_free": "conflict_free",
    "v3_double_buffered": "double_buffered",
}  # fmt: skip
RUNGS = ("naive", *NAMES.values(), "cublas")
NAIVE = {"BM": 32, "BN": 32}  # the article's block


def points(scale: str, device: str) -> Iterator[Point]:
    """The rungs at every size, other kernels at a few; one small size on the small scale."""
    others = [k for k in catalog.gemm_kernels() if k.name not in RUNGS]
    others = [k for k in others if device in k.runs_on]
    own = [k for k in others if k.path.parent != catalog.directory()]
    if scale == "full":
        own += [k for k in others if k.name == BEST]
    for m in SIZES if scale == "full" else (128,):
        k = 1024 if scale == "full" else 64
        # Every other kernel of the catalog at a few sizes; the best and the user's own at each.
        more = others if device == "cpu" or (scale == "full" and m in FEW) else own
        more = [other for other in more if other.variant().takes(m, m, k, "float32")]
        for kernel in (*RUNGS, *(other.name for other in more)):
            given = {"kernel": kernel, "m": m, "n": m, "k": k}
            given["params"] = NAIVE if kernel == "naive" else None
            yield Point(product, {"kernel": kernel, "m_and_n": m, "k": k}, given)


def _at_largest(rows: Rows) -> dict[str, float]:
    """The rate of each rung in gflop/s, for the largest matrices."""
    return {kernel: rows.value("gflops", kernel=kernel, m_and_n=16384) for kernel in RUNGS}


def each_rung_faster(rows: Rows) -> Verdict:
    """At 16384 each rung is faster than the one before."""
    rates = _at_largest(rows)
    order = list(rates.values())
    return verdict(
        order == sorted(order),
        "at 16384: " + ", ".join(f"{k} {r / 1e3:.1f}" for k, r in rates.items()) + " TFLOP/s",
    )


def share(kernel: str, published: float, slack: float) -> Callable[[Rows], Verdict]:
    """Whether a kernel reaches a published share of peak, within a factor `slack`."""

    def decide(rows: Rows) -> Verdict:
        best = rows.value("gflops", kernel=kernel, m_and_n=16384)
        found = best / rows.value("peak_gflops", kernel=kernel, m_and_n=16384)
        return verdict(
            published / slack <= found,
            f"{found:.1%} of {found and best / found / 1e3:.1f} TFLOP/s (published: "
            f"{published:.1%}; confirmed means at least {1 / slack:.0%} of that)",
        )

    return decide


def near_cublas(rows: Rows) -> Verdict:
    """Double buffering reaches 0.95 of cuBLAS at 16384."""
    rates = _at_largest(rows)
    ratio = rates["double_buffered"] / rates["cublas"]
    return verdict(ratio >= 0.95, f"{ratio:.3f} of cuBLAS at 16384 (published: 0.979)")


def _traffic(kernel: str, params: Mapping[str, int] | None, staged: bool) -> Traffic:
    block = tile(catalog.get(kernel).variant(params), "float32")
    assert block is not None  # the ladder's kernels give every block a tile
    return traffic(block, "nn", "float32", staged)


def five_transactions(rows: Rows) -> Verdict:
    """A warp of the naive kernel touches 1 sector of A and 4 of B in a step of K."""
    found = _traffic("naive", NAIVE, staged=False).warp_sectors
    a, b = found or (0, 0)
    return verdict(
        found == (1, 4), f"a warp touches {a} sector of A and {b} of B of {SECTOR} bytes"
    )


def bytes_bound(rows: Rows) -> Verdict:
    """The naive kernel computes 3.2 flops for each byte that it moves."""
    found = _traffic("naive", NAIVE, staged=False).flop_per_byte
    published = max(r["published_gflops"] for r in EXPERIMENT.theirs().where(kernel="naive"))
    return verdict(
        abs(found - 3.2) < 0.1,
        f"64 flops for 5 transactions of {SECTOR} bytes are {found:.1f} flop/byte: 3.2 counts 4 "
        f"bytes for each. At {found:.1f} the V100's 763 GB/s would allow {found * 763:.0f} "
        f"GFLOP/s, and {published:.0f} were measured: caches serve most of the reads",
    )


def thirty_two(rows: Rows) -> Verdict:
    """Block tiles compute 32 flops for each byte that they move."""
    found = _traffic("block_tile", None, staged=True).flop_per_byte
    return verdict(
        found == 32, f"{found:.0f} flop/byte from its grid; the naive kernel has 0.4 (no caches)"
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Share of peak over the size, a line for each rung: published, and ours on a card."""

    def shares(found: Rows, figure: str, kernel: str, peak: float) -> tuple[list, list]:
        sizes, rates = found.line("m_and_n", figure, kernel=kernel)
        return sizes, [100 * r / peak for r in rates]

    peak = max((r["peak_gflops"] for r in rows if r.get("peak_gflops")), default=None)
    own = [k for k in rows.values("kernel") if k not in RUNGS and k != "blas"]
    best = max(own, key=lambda k: max(rows.line("m_and_n", "gflops", kernel=k)[1], default=0),
               default=None)  # fmt: skip
    panels = [
        Panel([Line(k, *shares(theirs, "published_gflops", k, V100.gflops),
                    theirs=True, style=i) for i, k in enumerate(RUNGS)],
              "published, V100\nK = 1024"),
    ]  # fmt: skip
    if peak:
        lines = [Line(k, *shares(rows, "gflops", k, peak), style=i)
                 for i, k in enumerate((*RUNGS, *([best] if best else [])))]  # fmt: skip
        panels.append(Panel(lines, f"{machine}\nK = {rows.values('k')[0]}"))
    return Picture(panels, "m = n", "share of the card's fp32 peak (%)", log_x=True)


EXPERIMENT = Experiment(
    title="The ladder of kernels",
    source="S1, the article",
    question="How close to the library does each step of the ladder come?",
    points=points,
    columns=(
        "kernel", "m_and_n", "k", "published_gflops", "gflops", "ratio_gflops", "of_peak",
        "roofline_gflops", "flop_per_byte", "registers", "shared_bytes", "occupancy", "waves",
        "samples", "verdict",
    ),
    published=(
        Published("v100_ladder_k1024.csv", "Tesla V100", ("kernel", "m_and_n", "k"),
                  {"gflops": "gibiflops_per_s"}, scale=2**30 / 1e9, names=NAMES),
    ),
    claims=(
        Claim("Each rung is faster than the one before, and cuBLAS the fastest.",
              each_rung_faster),
        Claim("The naive kernel reaches 11.5 % of peak.", share("naive", 0.115, 1.5)),
        Claim("Block tiles reach 51.7 % of peak.", share("block_tile", 0.517, 1.1)),
        Claim("Without bank conflicts it is 74.3 %.", share("conflict_free", 0.743, 1.1)),
        Claim("With two buffers it is 80.6 %.", share("double_buffered", 0.806, 1.1)),
        Claim("Double buffering comes within a few percent of cuBLAS.", near_cublas),
        Claim("A warp of the naive kernel needs 1 + 4 transactions a step of K.",
              five_transactions, ANYWHERE),
        Claim("That is 3.2 flop/byte, so memory's rate bounds it.", bytes_bound, ANYWHERE),
        Claim("Block tiles of 128 x 128 give 32 flop/byte.", thirty_two, ANYWHERE),
    ),
    picture=picture,
    exercise="Write your own rung with `hybrid-gemm new-kernel`: at full scale it appears in this "
    "table by itself. Which of the columns did you mean to change, and did it?",
    cap_s=60,
)  # fmt: skip
