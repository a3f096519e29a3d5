"""Block size: does it matter how many columns of a row a block computes?"""

import math
from collections.abc import Iterator

from ...reporting.pictures import Line, Panel, Picture
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..measure import run_kernel
from ..sizes import LAB_SIZES, lab_sizes, right_everywhere

BLOCKS = (32, 64, 128, 256, 512)


def points(scale: str, device: str) -> Iterator[Point]:
    """Every block size at every size of the lab."""
    for n in lab_sizes(scale, device):
        for block in BLOCKS:
            yield Point(
                run_kernel,
                {"block_size": block, "n": n},
                {"n": n, "kernel": "naive_row", "params": {"BLOCK": block}, "alone": True},
            )


def hardly_matters(rows: Rows) -> Verdict:
    """Up to n = 4096 the slowest block takes less than 1.4 times the fastest."""
    spreads = {}
    for n in LAB_SIZES[:-1]:
        times = [rows.value("time_ms", n=n, block_size=b) for b in BLOCKS]
        spreads[n] = max(times) / min(times)
    worst = max(spreads, key=spreads.__getitem__)
    return verdict(
        spreads[worst] < 1.4,
        f"up to n = 4096 the slowest block takes at most {spreads[worst]:.2f} of the fastest's "
        f"time, at n = {worst} (published: 1.32, at 4096)",
    )


def cubic(rows: Rows) -> Verdict:
    """From n = 4096 to 8192 time grows as n to a power of 2.5 to 3.5, for every block."""
    exponents = [
        math.log2(rows.value("time_ms", n=8192, block_size=b)
                  / rows.value("time_ms", n=4096, block_size=b))
        for b in BLOCKS
    ]  # fmt: skip
    return verdict(
        all(2.5 <= e <= 3.5 for e in exponents),
        f"from n = 4096 to 8192 time grows as n to the {min(exponents):.2f} to "
        f"{max(exponents):.2f}, by block (published: 2.82 to 3.86)",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Time over that of the fastest block, by n, a line for each block: published, and ours."""

    def panel(found: Rows, figure: str, title: str) -> Panel:
        least = {n: min(found.line("n", figure, n=n)[1], default=1) for n in found.values("n")}
        lines = []
        for style, block in enumerate(BLOCKS):
            sizes, times = found.line("n", figure, block_size=block)
            over = [ms / least[n] for n, ms in zip(sizes, times, strict=True)]
            lines.append(Line(f"block {block}", sizes, over, found is theirs, style))
        return Panel(lines, title)

    return Picture(
        [
            panel(theirs, "published_time_ms", "published, the lab's GPU"),
            panel(rows, "time_ms", machine),
        ],
        "m = n = k", "times as long as the fastest block", log_x=True, reference=1,
    )  # fmt: skip


EXPERIMENT = Experiment(
    title="Block size",
    source="S3, the lab report, table 1",
    question="One thread computes one element, a block some columns of one row. How many?",
    points=points,
    columns=(
        "block_size", "n", "published_time_ms", "time_ms", "ratio_time_ms", "multiply_ms",
        "occupancy", "occupancy_limit", "warp_sectors", "flop_per_byte", "roofline_gflops",
        "variant", "samples", "verdict",
    ),
    published=(
        Published("lab_table1_block_size.csv", "the lab's GPU", ("block_size", "n"),
                  {"time_ms": "time_ms"}),
    ),
    claims=(
        Claim("Block size hardly matters up to n = 4096.", hardly_matters),
        Claim("Time grows with n cubed.", cubic),
        Claim("The product is right with every block size.", right_everywhere, ANYWHERE),
    ),
    picture=picture,
    exercise="The time includes allocation and copies. Which share of it has the multiplication at "
    "n = 512 and at n = 8192? Then time the multiplication by itself (`hybrid-gemm run --kernel "
    "naive_row --param BLOCK=32 --size 512 --resident`; without a GPU add `--device emulator`), "
    "and compare.",
    cap_s=60,  # it is often the first one, and waits for CuPy to compile what verification needs
)  # fmt: skip
