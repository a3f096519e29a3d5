"""In which order a plan reads A, B and C, and how much of it is done by then. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .partition import Box, Span, cut_span
from .plan import Block, Panel, Plan
from .steps import steps, tiles_of

PIECES = 16  # of the rows of A that a product on the host goes through


@dataclass(frozen=True, slots=True)
class Need:
    """Some rows and columns of op(A), op(B) or C ("A", "B", "C"). A run begins to read them when
    the share `start` of its operations is done, and is through when `stop` is."""

    operand: str
    rows: Span
    cols: Span
    start: float
    stop: float


def reading_order(plan: Plan) -> list[Need]:
    """What a plan reads, in the order in which its workers come to it, taken to be equally fast.

    What several of them read is there several times.
    """
    blocks: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in plan.blocks:
        for index in block.workers:
            blocks[index, block.turn].append(block)
    found: list[Need] = []
    for worker in plan.workers:
        total, done = worker.flops or 1, 0
        for step in steps(worker, tiles_of(plan, worker)):
            panel = step.panel
            start, done = done, done + Box(panel.rows, panel.cols, step.box.ks).flops
            share = start / total, done / total
            host = plan.devices[worker.device].host_memory
            found += _of_step(blocks[worker.index, step.turn], panel, *share, host=host)
            if plan.problem.beta and step.first:
                own = (strip for strip in panel.strips if strip.owner == worker.index)
                found += [Need("C", strip.rows, strip.cols, *share) for strip in own]
    return sorted(found, key=lambda need: need.start)


def _of_step(
    blocks: list[Block], panel: Panel, start: float, stop: float, *, host: bool
) -> Iterator[Need]:
    """What one product reads. On the host it begins with all of B and some rows of A; a device
    has the parts of A first."""
    for block in sorted(blocks, key=lambda block: block.operand, reverse=host):
        of_a = block.operand == "A"
        side = panel.rows if of_a else panel.cols
        for part in filter(side.meets, block.parts):
            if not of_a:
                yield Need("B", block.rows, part, start, stop)
                continue
            pieces = cut_span(part, PIECES if host else 1)
            for i, rows in enumerate(pieces):
                begin = start + (stop - start) * i / len(pieces)
                if len(rows):
                    yield Need("A", rows, block.cols, begin, stop)
