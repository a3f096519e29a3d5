"""Shared-memory tiles: how large should a block's tile be?"""

from collections.abc import Iterator

from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..sizes import products_by_tile, time_by_tile

TILES = (1, 2, 4, 8, 16, 32)


def points(scale: str, device: str) -> Iterator[Point]:
    """Every tile at one size."""
    return products_by_tile("shared_tile", TILES, 1024 if scale == "full" else 64)


def steep_then_flat(rows: Rows) -> Verdict:
    """Tile 16 is over 5 times as fast as tile 1, and tile 32 within a quarter of it."""
    one, sixteen, last = (rows.value("time_ms", tile_size=t) for t in (1, 16, 32))
    return verdict(
        one > 5 * sixteen and 0.8 < last / sixteen < 1.25,
        f"tile 16 is {one / sixteen:.1f} times as fast as tile 1 (published: 33.7), and tile 32 "
        f"takes {last / sixteen:.2f} of tile 16's time (published: 1.04)",
    )


def loads_cut(rows: Rows) -> Verdict:
    """A tile of width T reads a T-th of the elements, for every T."""
    loads = {t: rows.value("loads_a_madd", tile_size=t) for t in TILES}
    cuts = {t: 2 / found for t, found in loads.items()}
    return verdict(
        all(cut == t for t, cut in cuts.items()),
        "; ".join(f"tile {t}: {cut:.0f} times fewer loads than the 2 a multiply-add without tiles"
                  for t, cut in cuts.items() if t >= 16),
    )  # fmt: skip


def flops_a_load(rows: Rows) -> Verdict:
    """Tile 16 computes 16 flops for each element that it reads."""
    found = 2 / rows.value("loads_a_madd", tile_size=16)
    return verdict(found == 16, f"{found:.0f} flops for each element read from global memory")


EXPERIMENT = Experiment(
    title="Shared-memory tiles",
    source="S0, the course project; S2, the note; S4, the lecture",
    question="How large should the tiles be that a block keeps in shared memory?",
    points=points,
    columns=(
        "tile_size", "n", "published_time_ms", "time_ms", "ratio_time_ms", "gflops",
        "roofline_gflops", "flop_per_byte", "loads_a_madd", "shared_bytes", "registers",
        "occupancy", "occupancy_limit", "verdict",
    ),
    published=(
        Published("p100_shared_tile.csv", "Tesla P100", ("tile_size",),
                  {"time_ms": "time_ms"}, held={"n": 1024}),
    ),
    claims=(
        Claim("Time falls steeply up to tile 16, then is flat.", steep_then_flat),
        Claim("A tile of width T cuts global loads by T.", loads_cut, ANYWHERE),
        Claim("Tiles of 16 x 16 give 16 flops a global load.", flops_a_load, ANYWHERE),
    ),
    picture=time_by_tile("threads of a block"),
    exercise="Why is a tile of 1 slower than no tile at all (`naive`)? Look at the threads of a "
    "warp that work, and at the occupancy.",
)  # fmt: skip
