"""Coalescing: what does it cost when a warp's addresses do not lie side by side?"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...reporting.pictures import Line, Panel, Picture
from ..base import Claim, Experiment, Point, Published, Rows, Verdict, verdict
from ..measure import probe
from ..model import WARP, sectors
from ..sizes import right_everywhere

Access = Callable[[int], int | None]  # of a thread by its number: the element that it touches


def _every(step: int, start: int = 0) -> Access:
    return lambda t: start + step * t


# The kernel, its parameters, how many of n elements change, and the accesses of a thread.
Pattern = tuple[str, dict[str, int] | None, Callable[[int], int], Sequence[Access]]
PATTERNS: dict[str, Pattern] = {
    "aligned": ("probe_aligned", None, lambda n: n, [_every(1)]),
    "some threads idle": (
        "probe_some_idle", None, lambda n: n - n // 3, [lambda t: None if t % 3 == 2 else t]),
    "permuted": ("probe_permuted", None, lambda n: n, [lambda t: t ^ 1]),
    "misaligned": ("probe_misaligned", None, lambda n: n - 1, [_every(1, 1)]),
    **{
        f"stride {s}": ("probe_strided", {"STRIDE": s}, lambda n: n, [_every(s)])
        for s in (2, 4, 8, 16, 32)
    },
    "float3": ("probe_float3", None, lambda n: n, [_every(3, x) for x in range(3)]),
    "float3, shared memory": (
        "probe_float3_shared", None, lambda n: n, [_every(1, 32 * x) for x in range(3)]),
}  # fmt: skip


def points(scale: str, device: str) -> Iterator[Point]:
    """Every pattern, on few and on many floats; few on the small scale."""
    millions = 3 * 2**20
    for elements in (millions, 32 * millions) if scale == "full" else (3 * 2**12,):
        for pattern, (kernel, params, touched, accesses) in PATTERNS.items():
            moved = [[4 * i for t in range(WARP) if (i := f(t)) is not None] for f in accesses]
            row = {
                "pattern": pattern, "elements": elements,
                "warp_sectors": sum(map(sectors, moved)) / len(moved),
            }  # fmt: skip
            given = {"kernel": kernel, "params": params, "count": elements}
            yield Point(probe, row, given | {"touched": touched(elements)})


def _slower(rows: Rows, pattern: str, than: str = "aligned") -> dict[int, float]:
    """How many times as long a pattern takes, by number of elements."""
    return {
        n: rows.value("time_us", pattern=pattern, elements=n)
        / rows.value("time_us", pattern=than, elements=n)
        for n in rows.values("elements")
    }


def _words(found: Mapping[int, float]) -> str:
    return " and ".join(f"{ratio:.2f} times at {n / 2**20:.0f}M" for n, ratio in found.items())


def idle_is_free(rows: Rows) -> Verdict:
    """Idle threads cost less than a tenth of the time."""
    found = _slower(rows, "some threads idle")
    return verdict(
        max(found.values()) < 1.1, f"{_words(found)} elements of aligned's time (published: 1.00)"
    )


def ten_times(pattern: str) -> Callable[[Rows], Verdict]:
    """Whether a pattern takes more than five times as long as aligned accesses."""

    def decide(rows: Rows) -> Verdict:
        found = _slower(rows, pattern)
        return verdict(
            min(found.values()) > 5, f"{_words(found)} elements (published: 9.8 times aligned)"
        )

    return decide


def shared_mends(rows: Rows) -> Verdict:
    """float3 through shared memory takes less than 0.9 of its time without."""
    found = _slower(rows, "float3, shared memory", "float3")
    naive, mended = (_words(_slower(rows, p)) for p in ("float3", "float3, shared memory"))
    return verdict(
        min(found.values()) < 0.9,
        f"float3 takes {naive} elements of aligned's time, through shared memory {mended}",
    )


def picture(rows: Rows, theirs: Rows, machine: str) -> Picture:
    """Bars of time over that of aligned accesses, by pattern."""
    names, lines = list(PATTERNS), []

    def add(label: str, times: Mapping[str, float], **more: Any) -> None:
        if first := times.get("aligned"):
            over = [times[p] / first if p in times else None for p in names]
            lines.append(Line(label, names, over, **more))

    add("published, G80, 3M floats", theirs.by("pattern", "published_time_us"), theirs=True)
    for i, elements in enumerate(rows.values("elements")):
        label = f"{machine}, {elements / 2**20:.3g}M floats"
        add(label, rows.by("pattern", "time_us", elements=elements), style=i)
    return Picture([Panel(lines, bars=True)], "", "time relative to aligned reads")


EXPERIMENT = Experiment(
    title="Coalescing",
    source="S4, the lecture",
    question="What does it cost when a warp's addresses do not lie side by side?",
    points=points,
    columns=("pattern", "elements", "published_time_us", "time_us", "ratio_time_us", "gbps",
             "warp_sectors", "samples", "verdict"),
    published=(
        Published("g80_coalescing.csv", "a G80", ("pattern",), {"time_us": "time_us"},
                  held={"elements": 3 * 2**20}),
    ),
    claims=(
        Claim("Misaligned addresses cost 10 times the time.", ten_times("misaligned")),
        Claim("Idle threads cost nothing.", idle_is_free),
        Claim("Permuted addresses cost 10 times the time.", ten_times("permuted")),
        Claim("An array of float3 is uncoalesced; shared memory mends it.", shared_mends),
        Claim("Every pattern touches what it says.",
              functools.partial(right_everywhere, what="probes changed the elements that they "
                                "should, and no others"), ("cuda", "emulator")),
    ),
    picture=picture,
    exercise="Predict the time of stride 8 from the sectors a warp alone, at both sizes. Where is "
    "the prediction wrong, and which cache explains it?",
)  # fmt: skip
