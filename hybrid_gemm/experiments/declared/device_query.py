"""What the GPU says of itself, and how many rounds a grid takes."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ... import catalog
from ..base import ANYWHERE, Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..measure import limit
from ..model import P100, Machine, resident_blocks, waves

PROPERTIES: dict[str, Callable[[Machine, Mapping[str, Any]], int]] = {
    "multiprocessors": lambda machine, p: p["multiProcessorCount"],
    "shared KiB a block": lambda machine, p: p["sharedMemPerBlock"] // 1024,
    "shared KiB a block, if asked for": lambda machine, p: p["sharedMemPerBlockOptin"] // 1024,
    "shared KiB a multiprocessor": lambda machine, p: machine.shared // 1024,
    "threads a block": lambda machine, p: p["maxThreadsPerBlock"],
    "threads a multiprocessor": lambda machine, p: machine.threads,
    "registers a multiprocessor": lambda machine, p: machine.registers,
    "L2 MiB": lambda machine, p: p["l2CacheSize"] // 2**20,
    "memory GiB": lambda machine, p: p["totalGlobalMem"] // 2**30,
}


def points(scale: str, device: str) -> Iterator[Point]:
    """A row for each property."""
    for name, read in PROPERTIES.items():
        yield Point(limit, {"property": name}, {"read": read})


def same(name: str) -> Callable[[Rows], Verdict]:
    """Whether a property has the published value here."""

    def decide(rows: Rows) -> Verdict:
        ours = rows.value("value", property=name)
        theirs = rows.value("published_value", property=name)
        return verdict(ours == theirs, f"{ours} here")

    return decide


def rounds(rows: Rows) -> Verdict:
    """The rounds of a grid by blocks and multiprocessors alone, and with resident blocks."""
    variant = catalog.get("register_tile").variant({"TILE": 8})
    blocks = 64  # its grid at n = 1024
    held, limit = resident_blocks(P100, 256, 101, 0)
    alone, together = waves(blocks, P100), waves(blocks, P100, held)
    return verdict(
        alone == together,
        f"the {blocks} blocks of {variant} would take {alone} rounds on {P100.multiprocessors} "
        f"multiprocessors; but each holds {held} such blocks (limited by {limit}), so they take "
        f"{together}",
    )


EXPERIMENT = Experiment(
    title="Device query",
    source="S0, the course project",
    question="What are the GPU's limits, and how many rounds does a grid take?",
    points=points,
    columns=("property", "published_value", "value", "ratio_value"),
    published=(Published("p100_device.csv", "Tesla P100", ("property",), {"value": "value"}),),
    claims=(
        Claim("A grid takes blocks / multiprocessors rounds, rounded up.", rounds, ANYWHERE),
        Claim("A block has 48 KB of shared memory.", same("shared KiB a block")),
        Claim("A block has at most 1024 threads.", same("threads a block")),
        Claim("A multiprocessor has at most 2048 threads.", same("threads a multiprocessor")),
    ),
    picture=None,
    exercise="Blocks have 256 threads, and each thread has 100 registers. How many such blocks "
    "does a multiprocessor hold ([occupancy](glossary.md#experiments) says what counts), and which "
    "limit decides that? Is it so on a GPU of yours (`hybrid-gemm reproduce device_query`)?",
)
