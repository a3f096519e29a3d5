"""Register tiles: how many elements of C should one thread own?"""

import itertools
import math
from collections.abc import Iterator

from ... import catalog
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..model import H200, P100
from ..sizes import products_by_tile, time_by_tile

TILES = (1, 2, 4, 8, 16, 32, 64)


def points(scale: str, device: str) -> Iterator[Point]:
    """Every tile at one size."""
    tiles = TILES if scale == "full" or device != "emulator" else (1, 4, 8, 16)
    return products_by_tile("register_tile", tiles, 1024 if scale == "full" else 64)


def best_then_steep(rows: Rows) -> Verdict:
    """The fastest tile is 4, 8 or 16, and the largest takes over three times as long."""
    times = {r["tile_size"]: r["time_ms"] for r in rows.measured("time_ms")}
    best = min(times, key=times.__getitem__)
    last = max(times)
    return verdict(
        4 <= best <= 16 and times[last] > 3 * times[best],
        f"fastest at tile {best} ({times[best]:.3g} ms); tile {last} takes "
        f"{times[last] / times[best]:.1f} times as long (published: 8, and 40 times at 64)",
    )


def spills(rows: Rows) -> Verdict:
    """The compiler uses local memory from tile 16 on, and not before."""
    local = {r["tile_size"]: r["local_bytes"] for r in rows.measured("local_bytes")}
    first = min((t for t, used in local.items() if used), default=None)
    held = {t: rows.value("registers", tile_size=t) for t in local}
    return verdict(
        first == 16,
        f"none of {len(local)} tiles uses local memory" if first is None else
        f"the compiler first uses local memory at tile {first} ({local[first]} bytes a thread, "
        f"{held[first]} registers); tile 8 needs {held.get(8)} registers and none",
    )  # fmt: skip


def fewer_loads(rows: Rows) -> Verdict:
    """Each larger tile reads fewer elements for a multiply-add."""
    loads = {r["tile_size"]: r["loads_a_madd"] for r in rows.measured("loads_a_madd")}
    tiles = sorted(loads)
    return verdict(
        all(loads[a] > loads[b] for a, b in itertools.pairwise(tiles)),
        ", ".join(f"tile {t}: {loads[t]:.3g}" for t in tiles) + " loads a multiply-add",
    )


def idle_card(rows: Rows) -> Verdict:
    """The grid has 64 blocks at tile 8 and 16 at tile 16, for n = 1024."""
    kernel = catalog.get("register_tile")
    grids = {t: kernel.variant({"TILE": t}).launch(1024, 1024, 1024, "int32").grid for t in (8, 16)}
    blocks = {tile: math.prod(grid) for tile, grid in grids.items()}
    return verdict(
        blocks == {8: 64, 16: 16},
        f"by the kernel's grid at n = 1024 there are {blocks[8]} blocks at tile 8 and {blocks[16]} "
        f"at tile 16, for the P100's {P100.multiprocessors} multiprocessors (an H200 has "
        f"{H200.multiprocessors})",
    )


EXPERIMENT = Experiment(
    title="Register tiles",
    source="S0, the course project",
    question="How many elements of C should one thread own?",
    points=points,
    columns=(
        "tile_size", "n", "published_time_ms", "time_ms", "ratio_time_ms", "gflops",
        "roofline_gflops", "flop_per_byte", "loads_a_madd", "registers", "local_bytes",
        "occupancy", "blocks", "verdict",
    ),
    published=(
        # n is not printed; it follows from the blocks that are: 64 at tile 8.
        Published("p100_register_tile.csv", "Tesla P100", ("tile_size",),
                  {"time_ms": "time_ms"}, held={"n": 1024}),
    ),
    claims=(
        Claim("Time falls to a minimum near tile 8, then rises steeply.", best_then_steep),
        Claim("From tile 16 on the sums do not fit in registers and spill.", spills, ANYWHERE),
        Claim("Loads a multiply-add fall as the tile grows.", fewer_loads, ANYWHERE),
        Claim("At tile 16 only 16 blocks remain, 64 at tile 8, so the card idles.", idle_card,
              ANYWHERE),
    ),
    picture=time_by_tile("elements of C a thread owns"),
    exercise="Time `register_tile` with blocks of 8 x 8 threads (`hybrid-gemm bench --kernels "
    "register_tile --param BLOCK=8 --all-params`; without a GPU add `--device emulator --sizes "
    "128`, and expect other times). How many blocks has each tile now, and which is fastest?",
)  # fmt: skip
