"""Occupancy: how many warps does a multiprocessor hold, and does it need them?"""

from collections.abc import Iterator

from ... import catalog
from ...reporting.pictures import Line, Panel, Picture
from ..base import (
    ANYWHERE,
    Claim,
    Experiment,
    NotTestable,
    Point,
    Published,
    Row,
    Rows,
    Verdict,
    verdict,
)
from ..measure import product_and_occupancy
from ..model import V100, occupancy, resident_blocks
from ..sizes import BEST, largest

KERNELS = (
    ("naive", {"BM": 8, "BN": 8}), ("naive", {"BM": 32, "BN": 32}), ("shared_tile", {"TILE": 8}),
    ("shared_tile", {"TILE": 16}), ("shared_tile", {"TILE": 32}), ("register_tile", {"TILE": 4}),
    ("register_tile", {"TILE": 8}), ("block_tile", None), ("conflict_free", None),
    ("double_buffered", None),
    (BEST, None),
)  # fmt: skip


def points(scale: str, device: str) -> Iterator[Point]:
    """Kernels of several sizes of block and tile, at one size."""
    n = 4096 if scale == "full" else 128
    for kernel, params in KERNELS if scale == "full" or device != "emulator" else KERNELS[1:5]:
        variant = catalog.get(kernel).variant(params)
        threads = variant.launch(n, n, n, "float32").block
        yield Point(
            product_and_occupancy,
            {"kernel": kernel, "params": " ".join(f"{k}={v}" for k, v in variant.params.items()),
             "n": n, "block_threads": threads[0] * threads[1] * threads[2]},
            {"kernel": kernel, "params": params, "n": n},
        )  # fmt: skip


def one_eighth(rows: Rows) -> Verdict:
    """136 registers and 256 threads give an eighth of the warps of a V100."""
    blocks, limit = resident_blocks(V100, 256, 136, 8192)
    share = occupancy(V100, 256, 136, 8192)
    ours: Row = next(iter(rows.where(kernel="block_tile")), {})
    words = ""
    if ours.get("registers"):
        words = f"; ours uses {ours['registers']} and has {ours['occupancy']:.1%} here"
    return verdict(
        share == 0.125,
        f"136 registers and 256 threads leave {blocks} block of 8 warps on a V100's "
        f"{V100.warps}, limited by {limit}: {share:.1%}{words}",
    )


def half_is_needed(rows: Rows) -> Verdict:
    """The fastest kernel has an occupancy of at least a half."""
    n = largest(rows, "gflops")
    best = max(rows.measured("gflops", n=n), key=lambda r: r["gflops"])
    if best.get("occupancy") is None:
        raise NotTestable(f"the occupancy of {best['kernel']}, the fastest, is not known")
    why = (
        ""
        if best["occupancy"] >= 0.5
        else (": independent multiply-adds of one thread hide latency as other warps would")
    )
    return verdict(
        best["occupancy"] >= 0.5,
        f"the fastest, {best['kernel']}, runs at {best['occupancy']:.1%} with "
        f"{best['registers']} registers a thread and reaches {best['gflops'] / 1e3:.1f} "
        f"TFLOP/s{why}",
    )


def as_the_driver_says(rows: Rows) -> Verdict:
    """The computed occupancy is the driver's, for every variant."""
    both = rows.measured("driver_occupancy").measured("occupancy")
    wrong = [r["kernel"] for r in both if abs(r["occupancy"] - r["driver_occupancy"]) > 1e-9]
    return verdict(
        not wrong,
        f"computed from registers, shared memory and threads, it is what the driver says for "
        f"{len(both) - len(wrong)} of {len(both)} variants",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Bars of occupancy and of the share of peak, by variant."""
    several = {r["kernel"] for r in rows if len(rows.where(kernel=r["kernel"])) > 1}
    names = [f"{r['kernel']} {r['params'] if r['kernel'] in several else ''}" for r in rows]
    peak = max((r["peak_gflops"] for r in rows if r.get("peak_gflops")), default=None)
    lines = [Line("occupancy", names, [100 * (r.get("occupancy") or 0) for r in rows])]
    if peak:
        shares = [100 * (r.get("gflops") or 0) / peak for r in rows]
        lines.append(Line("share of fp32 peak", names, shares, style=1))
    # Without a card occupancy is computed, for the model's, and nothing is measured.
    return Picture([Panel(lines, bars=True)], "", f"% ({machine})" if peak else "occupancy (%)")


EXPERIMENT = Experiment(
    title="Occupancy",
    source="S1, the article; S4, the lecture",
    question="How many of the warps that a multiprocessor can hold are there, and does it matter?",
    points=points,
    columns=(
        "kernel", "params", "n", "block_threads", "published_registers", "registers",
        "shared_bytes", "published_occupancy", "occupancy", "driver_occupancy",
        "occupancy_limit", "gflops", "of_peak", "verdict",
    ),
    published=(
        Published("v100_occupancy.csv", "Tesla V100", ("kernel", "block_threads"),
                  {"registers": "registers", "occupancy": "occupancy"}),
    ),
    claims=(
        Claim("At least 50 % is needed to hide latency.", half_is_needed),
        Claim("136 registers and 256 threads give an occupancy of 12.5 % on a V100.", one_eighth,
              ANYWHERE),
        Claim("Occupancy follows from registers, shared memory and threads.",
              as_the_driver_says),
    ),
    picture=picture,
    exercise="Compile `register_tile` (`hybrid-gemm kernels register_tile --compile sm_90`). From "
    "its registers compute the [occupancy](glossary.md#experiments) with TILE 2, 4 and 8 by hand; "
    "then check it against this table and that of [register tiles](#register-tiles).",
)  # fmt: skip
