"""The kernels without a card: the same text in an emulator."""

import functools
from collections.abc import Iterator

from ..base import ANYWHERE, Claim, Experiment, Point, Rows, Verdict, verdict
from ..measure import emulated, emulated_race
from ..sizes import right_everywhere

KERNELS = ("naive_row", "naive", "shared_tile", "block_tile", "conflict_free", "double_buffered")


def points(scale: str, device: str) -> Iterator[Point]:
    """Some kernels of the ladder, and one with a race in two orders of its threads."""
    n = 128 if scale == "full" else 64
    for kernel in KERNELS if scale == "full" or device == "emulator" else KERNELS[:3]:
        yield Point(emulated, {"kernel": kernel, "n": n}, {"kernel": kernel, "n": n})
    for order in ("forward", "reverse"):
        yield Point(emulated_race, {"kernel": "one that lacks a barrier", "order": order},
                    {"order": order})  # fmt: skip


def races_hide(rows: Rows) -> Verdict:
    """With its threads in order the kernel with a race gives no wrong result."""
    wrong = {o: rows.value("wrong", order=o) for o in ("forward", "reverse")}
    return verdict(
        wrong["forward"] == 0,
        f"with threads in order a race gives {wrong['forward']} wrong results of 32 and hides; "
        f"in reverse order {wrong['reverse']}, and shows",
    )


EXPERIMENT = Experiment(
    title="Without a card",
    source="S4, the lecture",
    question="Can kernels be developed without a GPU?",
    points=points,
    columns=("kernel", "n", "order", "time_ms", "wrong", "verdict"),
    claims=(
        Claim("Where there is no card, kernels run in an emulator.",
              functools.partial(right_everywhere,
                                what="kernels give the exact whole-number product"), ANYWHERE),
        Claim("Some race errors do not show there.", races_hide, ANYWHERE),
    ),
    picture=None,
    exercise="`hybrid-gemm new-kernel mine` writes a kernel with tiles in shared memory. Remove "
    "one `__syncthreads()` from it. Does `hybrid-gemm run --kernel mine --size 200 --device "
    "emulator` notice? What does `--check` say instead of `--device emulator`?",
)  # fmt: skip
